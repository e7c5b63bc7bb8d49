"""Windows on a token stream: overlapping ones to train on, spread-out segments to evaluate on.

Legend: T = tokens of a window or target tokens of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from keel.data.tokens import Longs, TokenStream
from keel.errors import KeelError


class SlidingWindows(Dataset[dict[str, Tensor]]):
    """Windows of ``length`` tokens, each ``stride`` tokens after the one before, across documents; no copy is kept.

    S-Former trains on windows of 256 with a stride of 64. The last ``(len(stream) - length) % stride`` tokens are in no
    window.
    """

    def __init__(self, stream: TokenStream, length: int, stride: int) -> None:
        """Check the sizes. Raises: KeelError: length below 2, stride below 1, or a stream shorter than a window."""
        if length < 2:
            raise KeelError(f"window is {length} tokens, expected at least 2 (a token and the one to predict)")
        if stride < 1:
            raise KeelError(f"stride is {stride} tokens, expected at least 1")
        if len(stream) < length:
            raise KeelError(
                f"a window of {length:,} tokens does not fit into a split of {len(stream):,} tokens; "
                "give more text or a shorter window"
            )
        self.stream = stream
        self.length = length
        self.stride = stride

    def __len__(self) -> int:
        """Return the number of windows."""
        return (len(self.stream) - self.length) // self.stride + 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels``, int64 [T] each and equal: the model shifts labels, as in transformers.

        Raises: IndexError outside ``0 .. len - 1``.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.stride
        input_ids = torch.from_numpy(self.stream.ids[start : start + self.length].astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids.clone()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A stretch of T + 1 tokens whose last T are to be predicted.

    Attributes:
        ids: int64 [T + 1]; inputs are ``ids[:-1]``, targets ``ids[1:]``.
        document_T: int64 [T], index in the stream's ``names`` of the document of each target.
        bytes: int64 [T], UTF-8 bytes that each target covers; 0 for an end-of-text token.
        start: index of the first token in the stream.
    """

    ids: Tensor
    document_T: Longs
    bytes: Longs
    start: int


def evaluation_segments(stream: TokenStream, length: int, count: int, *, at_starts: bool = True) -> list[Segment]:
    """Return ``count`` segments of ``length`` targets, spread evenly over the stream and not overlapping.

    The stream is divided into ``count`` equal stretches with a segment in each, at the stretch's first document start
    where the segment still fits, else at the stretch's beginning. The choice depends on nothing but the arguments.

    Args: at_starts: False for all at the beginnings of their stretches. How documents begin may tell how far a token is into one.

    Raises: KeelError for a size below 1, or where the segments do not fit.
    """
    if length < 1 or count < 1:
        raise KeelError(f"{count} segments of {length} tokens asked for, expected at least 1 of at least 1")
    needed = count * (length + 1)
    if len(stream) < needed:
        raise KeelError(
            f"{count} evaluation segment(s) of {length:,} tokens need {needed:,} tokens, the split has {len(stream):,};"
            f" give more text, fewer segments, or lengths up to {max(0, len(stream) // count - 1):,}"
        )
    bounds = [index * len(stream) // count for index in range(count + 1)]
    return [_segment(stream, length, low, high, at_starts) for low, high in pairwise(bounds)]


def _segment(stream: TokenStream, length: int, low: int, high: int, at_starts: bool) -> Segment:
    """Return the segment within tokens ``low .. high - 1``, of which there are at least ``length + 1``."""
    first = int(np.searchsorted(stream.starts, low))
    fits = at_starts and first < len(stream.starts) and int(stream.starts[first]) + length + 1 <= high
    start = int(stream.starts[first]) if fits else low
    targets = slice(start + 1, start + length + 1)
    return Segment(
        ids=torch.from_numpy(stream.ids[start : targets.stop].astype(np.int64)),
        document_T=stream.documents_at(np.arange(targets.start, targets.stop)),
        bytes=stream.token_bytes[targets].astype(np.int64),
        start=start,
    )
