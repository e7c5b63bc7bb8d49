"""Perplexity and bits per byte far beyond the training length: the same tokens at every length, in bounded memory.

Block protocol (S-Former, Table 2): a segment of N + 1 tokens is cut at every length L into blocks of L inputs, and a
block sees nothing before its first token. Every one of the N targets is therefore scored exactly once at every length;
only the context that the model has by then differs. The last block of a segment is shorter where L does not divide N.

Memory: the hidden states of one batch of blocks (``token_budget`` tokens, or one block where L is more) and the logits
of ``head_tokens`` rows; logits of a whole block never exist. Sums are float64 over float32 token losses.

Shapes: B blocks, T tokens of a block, D hidden size, V vocabulary, N targets of a segment, R rows of a head chunk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from keel.data.windows import Segment
from keel.errors import KeelError
from keel.evaluation.scoring import LanguageModel, evaluating, score_tokens
from keel.evaluation.statistics import TokenScores


@dataclass(frozen=True, kw_only=True)
class LengthSums:
    """What was scored at one length, one entry a document.

    Attributes:
        nll: negative log-likelihood in nats; NaN or infinite where a token's loss was.
        tokens: targets, end-of-text tokens included.
        bytes: UTF-8 bytes of text that these targets cover.
        nonfinite: number of targets whose loss was NaN or infinite, over all documents.
        seconds: wall-clock time of this length.
    """

    nll: tuple[float, ...]
    tokens: tuple[int, ...]
    bytes: tuple[int, ...]
    nonfinite: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ExtrapolationResult:
    """Sums per length and document, from which every metric follows.

    Attributes:
        documents: index of each document in the token stream's ``names``, ascending.
        sums: by length in tokens.
    """

    documents: tuple[int, ...]
    sums: Mapping[int, LengthSums]

    @property
    def lengths(self) -> list[int]:
        """The evaluated lengths in tokens, ascending."""
        return sorted(self.sums)

    def ppl(self, length: int) -> float:
        """Return perplexity per token, exp(Σ nll / Σ tokens); infinite where that overflows."""
        return _exp(self._mean_nll(length))

    def bpb(self, length: int) -> float:
        """Return bits per byte, Σ nll / (ln 2 · Σ bytes); end-of-text tokens cost bits and cover no bytes."""
        sums = self._at(length)
        covered = sum(sums.bytes)
        return math.fsum(sums.nll) / (math.log(2) * covered) if covered else math.nan

    def growth(self, length: int, base: int | None = None) -> float:
        """Return ppl(length) / ppl(base), base being the shortest length unless given; 1: length costs nothing."""
        return _exp(self._mean_nll(length) - self._mean_nll(self.lengths[0] if base is None else base))

    def _mean_nll(self, length: int) -> float:
        sums = self._at(length)
        return math.fsum(sums.nll) / sum(sums.tokens)

    def _at(self, length: int) -> LengthSums:
        if length not in self.sums:
            raise KeelError(f"extrapolation: length {length} was not evaluated; evaluated: {self.lengths}")
        return self.sums[length]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; a number that is not finite becomes the string "nan", "inf" or "-inf"."""
        return {
            "documents": list(self.documents),
            "sums": {
                str(length): {
                    "nll": [value if math.isfinite(value) else repr(value) for value in self.sums[length].nll],
                    "tokens": list(self.sums[length].tokens),
                    "bytes": list(self.sums[length].bytes),
                    "nonfinite": self.sums[length].nonfinite,
                    "seconds": self.sums[length].seconds,
                }
                for length in self.lengths
            },
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ExtrapolationResult:
        """Read what ``to_json`` wrote.  Raises: KeelError when the fields are others."""
        try:
            sums = {int(length): _sums_from_json(entry) for length, entry in values["sums"].items()}
            return cls(documents=tuple(int(index) for index in values["documents"]), sums=sums)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise KeelError(f"extrapolation: not a saved result ({error!r}); evaluate again") from error


def extrapolation(
    model: LanguageModel,
    segments: Sequence[Segment],
    lengths: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    token_budget: int = 8192,
    head_tokens: int = 512,
    before_length: Callable[[int], None] | None = None,
    progress: bool = False,
) -> ExtrapolationResult:
    """Score the same targets at every length. S-Former, Table 2; see the module's docstring for the protocol.

    The model is put into evaluation mode for the call. Its parameters stay where they are.

    Args:
        model: on ``device``.
        segments: of any size; a length beyond a segment's N scores it as one block.
        lengths: tokens of context, each ≥ 1, no repetition.
        device: where the ids are sent.
        token_budget: blocks of one length are batched up to this many tokens; a longer block runs alone.
        head_tokens: rows of the head computed at a time, at most.
        before_length: called with each length before it is scored, for a position scheme that depends on it (YaRN).
        progress: show a progress bar.

    Raises: KeelError for no segments, no lengths, or a number below 1.
    """
    _check(segments, lengths, token_budget, head_tokens)
    documents = np.unique(np.concatenate([segment.document_T for segment in segments]))
    sums = {}
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), disable=not progress
    )
    with evaluating(model), bar:
        for length in lengths:
            if before_length is not None:
                before_length(length)
            task = bar.add_task(f"length {length:,}", total=sum(len(segment.ids) - 1 for segment in segments))
            started = time.perf_counter()
            total = _Totals(documents)
            for batch in _batches(segments, length, token_budget):
                _score(model, segments, batch, torch.device(device), head_tokens, total)
                bar.advance(task, sum(stop - start for _, start, stop in batch))
            sums[length] = total.finish(time.perf_counter() - started)
    return ExtrapolationResult(documents=tuple(documents.tolist()), sums=sums)


def token_scores(results: Sequence[ExtrapolationResult]) -> dict[int, TokenScores]:
    """Stack results of one arm, one a seed, for the bootstrap: by length, documents in the order of the results.

    Raises: KeelError when there are none, or they were not scored on the same tokens of the same documents.
    """
    if not results:
        raise KeelError("extrapolation: no results to combine; evaluate at least one seed")
    first = results[0]
    scores = {}
    for length in first.lengths:
        at_length = [result._at(length) for result in results]
        counts = {(result.documents, sums.tokens, sums.bytes) for result, sums in zip(results, at_length, strict=True)}
        if len(counts) > 1 or any(result.lengths != first.lengths for result in results):
            raise KeelError("extrapolation: the seeds were scored on different tokens or lengths; evaluate them again")
        scores[length] = TokenScores(
            nll_SD=np.array([sums.nll for sums in at_length]),
            tokens_D=np.array(at_length[0].tokens, dtype=np.float64),
            bytes_D=np.array(at_length[0].bytes, dtype=np.float64),
        )
    return scores


# A block: (segment, first input, end of the inputs).
_Block = tuple[int, int, int]


def _batches(segments: Sequence[Segment], length: int, token_budget: int) -> Iterator[list[_Block]]:
    """Yield all blocks of ``length`` in batches of one size, each of at most ``token_budget`` tokens or one block."""
    by_size: dict[int, list[_Block]] = {}
    for index, segment in enumerate(segments):
        targets = len(segment.ids) - 1
        for start in range(0, targets, length):
            stop = min(start + length, targets)
            by_size.setdefault(stop - start, []).append((index, start, stop))
    for size, blocks in sorted(by_size.items(), reverse=True):
        together = max(1, token_budget // size)
        for first in range(0, len(blocks), together):
            yield blocks[first : first + together]


class _Totals:
    """Running float64 sums per document."""

    def __init__(self, documents: np.ndarray) -> None:
        self.documents = documents
        self.nll, self.tokens, self.bytes = (np.zeros(len(documents)) for _ in range(3))
        self.nonfinite = 0

    def add(self, nll_T: np.ndarray, document_T: np.ndarray, bytes_T: np.ndarray) -> None:
        where_T, size = np.searchsorted(self.documents, document_T), len(self.documents)
        self.nll += np.bincount(where_T, weights=nll_T, minlength=size)
        self.tokens += np.bincount(where_T, minlength=size)
        self.bytes += np.bincount(where_T, weights=bytes_T, minlength=size)
        self.nonfinite += int((~np.isfinite(nll_T)).sum())

    def finish(self, seconds: float) -> LengthSums:
        tokens, covered = (tuple(int(value) for value in array) for array in (self.tokens, self.bytes))
        nll = tuple(self.nll.tolist())
        return LengthSums(nll=nll, tokens=tokens, bytes=covered, nonfinite=self.nonfinite, seconds=seconds)


def _score(
    model: LanguageModel,
    segments: Sequence[Segment],
    batch: list[_Block],
    device: torch.device,
    head_tokens: int,
    total: _Totals,
) -> None:
    """Add one batch of equally long blocks to ``total``: one forward, then the head a chunk of rows at a time."""
    ids_BT = torch.stack([segments[index].ids[start:stop] for index, start, stop in batch]).to(device)
    targets_BT = torch.stack([segments[index].ids[start + 1 : stop + 1] for index, start, stop in batch]).to(device)
    hidden_BTD = model.final_hidden(input_ids=ids_BT).last_hidden_state
    scores = score_tokens(model, hidden_BTD.flatten(0, 1), targets_BT.flatten(), head_tokens)
    nll_BT = scores.nll_R.view(ids_BT.shape)
    for nll_T, (index, start, stop) in zip(nll_BT.numpy(), batch, strict=True):
        segment = segments[index]
        total.add(nll_T, segment.document_T[start:stop], segment.bytes[start:stop])


def _check(segments: Sequence[Segment], lengths: Sequence[int], token_budget: int, head_tokens: int) -> None:
    if not segments or any(len(segment.ids) < 2 for segment in segments):
        raise KeelError("extrapolation: needs at least one segment, and two tokens in each")
    if not lengths or min(lengths) < 1 or len(set(lengths)) < len(lengths):
        raise KeelError(f"extrapolation: lengths must be distinct and at least 1, got {list(lengths)}")
    if token_budget < 1 or head_tokens < 1:
        raise KeelError(f"extrapolation: budgets must be at least 1, got {token_budget} and {head_tokens}")


def _sums_from_json(entry: Mapping[str, Any]) -> LengthSums:
    return LengthSums(
        nll=tuple(float(value) for value in entry["nll"]),
        tokens=tuple(int(value) for value in entry["tokens"]),
        bytes=tuple(int(value) for value in entry["bytes"]),
        nonfinite=int(entry["nonfinite"]),
        seconds=float(entry["seconds"]),
    )


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
