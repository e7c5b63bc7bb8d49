"""BLiMP: of two sentences that differ in one point, the grammatical one should be likelier (Warstadt et al. 2020; GTCA App. B.2).

Both are scored from the start token on. A draw is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keel.data.questions import chosen
from keel.data.rows import read_rows
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, accuracy, mean
from keel.evaluation.options import Request, option_scores
from keel.model import KeelForCausalLM
from keel.trees.fields import FieldReader


@dataclass(frozen=True, kw_only=True)
class MinimalPair:
    """Two sentences, the paradigm that they are of (``adjunct_island``) and its field (``syntax``)."""

    good: str
    bad: str
    paradigm: str
    field: str


def read_pairs(
    source: str, count: int | None = None, seed: int = 0, disjoint_from: int | None = None
) -> list[MinimalPair]:
    """Read minimal pairs with BLiMP's fields (see ``keel.data.rows.read_rows``), of each paradigm as ``keel.data.questions.chosen`` says.

    Raises: KeelError for rows without BLiMP's fields.
    """
    by_paradigm: dict[str, list[MinimalPair]] = {}
    for row in read_rows(source):
        pair = _pair(row, source)
        by_paradigm.setdefault(pair.paradigm, []).append(pair)
    return [pair for name in sorted(by_paradigm) for pair in chosen(by_paradigm[name], count, seed, disjoint_from)]


def _pair(row: Mapping[str, Any], source: str) -> MinimalPair:
    try:
        good, bad, paradigm, field = (row[name] for name in ("sentence_good", "sentence_bad", "UID", "field"))
    except KeyError as error:
        raise KeelError(f"{source} holds no minimal pairs (field {error}); give BLiMP's own files") from error
    # One of BLiMP's files spells "syntax_semantics" with a slash.
    return MinimalPair(good=good, bad=bad, paradigm=paradigm, field=field.replace("/", "_"))


def minimal_pairs(
    model: KeelForCausalLM,
    reader: FieldReader,
    pairs: Sequence[MinimalPair],
    family: str = "blimp",
    *,
    token_budget: int = 8192,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[ItemMetric]:
    """Score all pairs.

    Returns: ``<family>.overall``, ``<family>.<field>`` and ``<family>.<paradigm>``, shares of right pairs. Those of the paradigms have
        no better end: they describe, and arms are compared by fields and overall.
    """
    requests = [Request("", (pair.good, pair.bad)) for pair in pairs]
    scores = option_scores(model, reader, requests, token_budget=token_budget, device=device, progress=progress)
    hits = [float(good > bad) for good, bad in scores]
    metrics = [accuracy(f"{family}.overall", hits)]
    for field in Counter(pair.field for pair in pairs):
        found = [hit for hit, pair in zip(hits, pairs, strict=True) if pair.field == field]
        metrics.append(accuracy(f"{family}.{field}", found))
    for paradigm in Counter(pair.paradigm for pair in pairs):
        found = [hit for hit, pair in zip(hits, pairs, strict=True) if pair.paradigm == paradigm]
        metrics.append(mean(f"{family}.{paradigm}", found, unit="share", higher_is_better=None))
    return metrics
