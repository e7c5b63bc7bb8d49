"""What a model reads of trees: compact arrays a row, and their tensors for a batch.

A *chunk* is a tree's node in the tokens of one row, padding not counted. In a batch chunks lie on *shelves* of one height each, short
ones, so that little of a batch is filling. Shapes: N chunks of a row, B rows, L layers, H shelves, M chunks of a shelf, P chunks
that a layer reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from keel.errors import KeelError

Ints = np.ndarray[Any, np.dtype[Any]]  # made int32 where it is kept
SHELF = 16
ALWAYS = np.iinfo(np.int32).max
Scope = Literal["sentence", "prefix"]


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of one row, int32 [N] each; positions are tokens of the row, from 0.

    The layer of a chunk's own height reads it at tokens ``first`` to ``last``. A chunk of the greatest height of its tree is also
    read by every layer above, at tokens ``top_first`` to ``top_last`` (``top_last < top_first`` where it is never the greatest).

    Attributes:
        left, right: first and last token of the span.
        height: see ``keel.trees.align``: of the whole sentence (GTCA section 3.2) or of the constituent itself.
        first, last, top_first, top_last: the tokens that may see it, both ends included.
        scope: ``prefix`` where all this is strictly causal, ``sentence`` where the parse has read the words to come.
    """

    left: Ints
    right: Ints
    height: Ints
    first: Ints
    last: Ints
    top_first: Ints
    top_last: Ints
    scope: Scope = "sentence"

    def __post_init__(self) -> None:
        for name in ARRAYS:
            array = np.ascontiguousarray(getattr(self, name), dtype=np.int32)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
            if array.shape != self.left.shape or array.ndim != 1:
                raise KeelError(
                    f"chunks: {name} has shape {array.shape}; expected one number for each of {self.left.shape}"
                )
        if len(self) and not (
            (self.left >= 0).all() and (self.left <= self.right).all() and (self.height >= 0).all()
            and (self.first >= self.right).all()
        ):  # fmt: skip
            raise KeelError(
                "chunks: expected 0 <= left <= right <= first and height >= 0: nobody sees a chunk before its last token"
            )

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.left)

    def shifted(self, tokens: int) -> Chunks:
        """Return the same chunks as many tokens further on, as those of a part of a row."""
        moved = {name: _moved(getattr(self, name), tokens) for name in ARRAYS if name != "height"}
        return Chunks(height=self.height, scope=self.scope, **moved)


ARRAYS = tuple(field.name for field in fields(Chunks) if field.name != "scope")


def _moved(array: Ints, tokens: int) -> Ints:
    return np.where(array == ALWAYS, ALWAYS, array + np.int32(tokens))


def joined(parts: Sequence[Chunks], scope: Scope | None = None) -> Chunks:
    """Return the chunks of several parts of one row as one, maybe none, of the given scope (None: that of the parts).

    Raises: KeelError for a part of another scope.
    """
    wanted: Scope = scope or (parts[0].scope if parts else "sentence")
    if any(part.scope != wanted for part in parts):
        raise KeelError(f"chunks of scope 'sentence' and 'prefix' in one row or batch; make all of them {wanted!r}")
    empty = np.zeros(0, dtype=np.int32)
    arrays = {name: np.concatenate([empty, *(getattr(part, name) for part in parts)]) for name in ARRAYS}
    return Chunks(**arrays, scope=wanted)


def fixed_chunks(num_tokens: int, width: int, scope: Scope = "prefix") -> Chunks:
    """Return chunks that know nothing of the text: a chunk of height h is ``width ** h`` tokens (the control for capacity).

    A chunk is there from its last token on; an unfinished one is not. They are strictly causal, whatever scope they are used as.
    Raises: KeelError for a width below 2.
    """
    if width < 2:
        raise KeelError(f"chunks of a fixed width need a width of at least 2, got {width}")
    parts, size, height = [], 1, 0
    while size <= num_tokens:
        left = np.arange(0, num_tokens - size + 1, size, dtype=np.int32)
        right = left + np.int32(size - 1)
        until = (
            ALWAYS if size * width > num_tokens else size * width - 2
        )  # then the first chunk of the next height is whole
        full = np.full_like(left, ALWAYS)
        parts.append(
            Chunks(left, right, np.full_like(left, height), right, full, right, np.full_like(left, until), scope)
        )
        size, height = size * width, height + 1
    return joined(parts, scope)


def collate(rows: Sequence[Chunks], num_layers: int) -> dict[str, Tensor]:
    """Lay the chunks of a batch out as a model with ``num_layers`` layers reads them.

    Returns: int64 tensors. ``height`` [B, H]: that of each shelf, the same in every row, ascending, below ``num_layers``. ``left``,
        ``right`` [B, H, M]: the spans on it, M = ``SHELF``. ``chunk`` [B, L, P]: which of the H · M chunks a layer reads, and ``first``,
        ``last`` [B, L, P]: at which tokens. A place that no chunk takes has ``right < left`` and ``last < first``. H and P are at least
        1. ``causal`` [B, 0], which says by being there that the chunks are of scope ``prefix``.
    Raises: KeelError for no rows or no layers, or rows of different scopes.
    """
    scope = joined(rows).scope
    if not rows or num_layers < 1:
        raise KeelError(f"collate: {len(rows)} rows and {num_layers} layers; give at least one of each")
    slots = [_slots(row.height) for row in rows]
    shelves = _shelves(rows, num_layers)
    begins = np.concatenate([[0], np.cumsum(shelves)])
    spans = np.zeros((2, len(rows), max(1, begins[-1]) * SHELF), dtype=np.int64)
    spans[1] = -1
    read = []
    for b, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        index = begins[np.minimum(row.height, num_layers)] * SHELF + slot
        low = row.height < num_layers
        spans[:, b, index[low]] = row.left[low], row.right[low]
        read.append([_read_by(layer, row, index) for layer in range(num_layers)])
    widest = max([1, *(part.shape[1] for row_read in read for part in row_read)])
    lists = np.zeros((3, len(rows), num_layers, widest), dtype=np.int64)
    lists[2] = -1
    for b, row_read in enumerate(read):
        for layer, part in enumerate(row_read):
            lists[:, b, layer, : part.shape[1]] = part
    names = ("left", "right", "chunk", "first", "last")
    on_shelves = spans.reshape(2, len(rows), -1, SHELF)
    batch = {name: torch.from_numpy(array) for name, array in zip(names, [*on_shelves, *lists], strict=True)}
    heights = np.repeat(np.arange(num_layers), shelves) if begins[-1] else np.zeros(1, dtype=np.int64)
    batch["height"] = torch.from_numpy(heights).repeat(len(rows), 1)
    if scope == "prefix":
        batch["causal"] = torch.zeros(len(rows), 0)
    return batch


def _shelves(rows: Sequence[Chunks], num_layers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return how many shelves each height needs for the row that has most of it."""
    counts = [np.bincount(row.height[row.height < num_layers], minlength=num_layers) for row in rows]
    return -(-np.max(counts, axis=0) // SHELF)


def _slots(height: Ints) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return for each chunk how many of the same height stand before it."""
    order = np.argsort(height, kind="stable")
    ordered = height[order]
    begins = np.searchsorted(ordered, ordered, side="left")
    slots = np.empty(len(height), dtype=np.int64)
    slots[order] = np.arange(len(height)) - begins
    return slots


def _read_by(
    layer: int, row: Chunks, index: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return (chunk, first, last) of what a layer reads, [3, P]: its own height, and lower ones while they are the greatest."""
    own = row.height == layer
    top = (row.height < layer) & (row.top_last >= row.top_first)
    return np.stack(
        [
            np.concatenate([index[own], index[top]]),
            np.concatenate([row.first[own], row.top_first[top]]),
            np.concatenate([row.last[own], row.top_last[top]]),
        ]
    ).astype(np.int64)
