"""How far back a model attends, by layer and sequence length (S-Former Fig. 4).

The same tokens are read at every length, cut into blocks of that length that see nothing before their first token. Rows of the
attention matrices are recomputed ``query_block`` queries and one head group at a time, so memory is linear in the length.

Shapes: N rows of tokens, B blocks of a batch, T tokens, Q queries of a block, S keys, R heads of a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from keel.drawing import Drawing
from keel.errors import KeelError
from keel.model import KeelForCausalLM
from keel.probes.attention import SeenAttention, distances, observing_attention
from keel.probes.output import Line, line_figure, mean_of, write_table
from keel.probes.recording import check_ids, quiet

METRICS = ("distance", "beyond", "entropy")


@dataclass(frozen=True, kw_only=True)
class SpanRow:
    """One layer at one length.

    Attributes:
        values: ``distance``, mean of sum_s a_ts (t - s) in tokens; ``beyond``, mean attention mass on keys at least
            ``AttentionSpans.beyond`` tokens back (0 to 1); ``entropy`` of the rows in nats. Means over heads and queries.
        per_sequence: the same a row of tokens, for resampling.
    """

    length: int
    layer: int
    values: Mapping[str, float]
    per_sequence: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class AttentionSpans:
    """Spans of one model; ``rows`` by length, then layer. ``beyond`` is the distance in tokens that counts as far."""

    beyond: int
    sequences: int
    rows: tuple[SpanRow, ...]

    @property
    def lengths(self) -> list[int]:
        """The measured lengths in tokens, ascending."""
        return sorted({row.length for row in self.rows})

    def metrics(self) -> dict[str, float]:
        """Return ``span.METRIC@LENGTH``, means over layers, and ``span.METRIC_LENGTH@layerK``."""
        found = {f"span.{name}@{length}": self.mean(name, length) for length in self.lengths for name in METRICS}
        return found | {
            f"span.{name}_{row.length}@layer{row.layer}": value
            for row in self.rows
            for name, value in row.values.items()
        }

    def mean(self, metric: str, length: int) -> float:
        """Return the mean of a metric over the layers at a length."""
        return mean_of([row.values[metric] for row in self.rows if row.length == length])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        rows = [
            {"length": r.length, "layer": r.layer, "values": dict(r.values), "per_sequence": dict(r.per_sequence)}
            for r in self.rows
        ]
        return {"beyond": self.beyond, "sequences": self.sequences, "rows": rows, "metrics": self.metrics()}


def attention_spans(
    model: KeelForCausalLM | PreTrainedModel,
    ids_NT: Tensor,
    lengths: Sequence[int],
    *,
    beyond: int = 256,
    tokens_per_batch: int = 4096,
    query_block: int = 128,
) -> AttentionSpans:
    """Measure attention spans at several lengths over the same tokens.

    Args:
        model: with or without streams.
        ids_NT: token ids, N >= 1 rows of T >= max(lengths) tokens without padding.
        lengths: tokens, each >= 1 and at most T; what is left of a row after its last whole block is not read.
        beyond: distance in tokens from which mass counts as far; a training window of 256 tokens never shows a distance of 256.
        tokens_per_batch: tokens a forward pass, or one block where a length is more.
    Raises: KeelError for other ids or lengths, or attention that cannot be read.
    Reference twin: ``reference_spans``.
    """
    check_ids(ids_NT, 1)
    if not lengths or min(lengths) < 1 or max(lengths) > ids_NT.shape[1] or min(beyond, query_block) < 1:
        raise KeelError(
            f"attention spans: lengths {list(lengths)} with rows of {ids_NT.shape[1]} tokens, beyond={beyond}; give lengths from 1 to "
            "the rows' length and beyond >= 1"
        )
    rows: list[SpanRow] = []
    with quiet(model):
        for length in sorted(set(lengths)):
            rows += _at_length(model, ids_NT, length, beyond, tokens_per_batch, query_block)
    return AttentionSpans(beyond=beyond, sequences=len(ids_NT), rows=tuple(rows))


def _at_length(
    model: Any, ids_NT: Tensor, length: int, beyond: int, tokens_per_batch: int, query_block: int
) -> list[SpanRow]:
    each = ids_NT.shape[1] // length
    blocks_MT = ids_NT[:, : each * length].reshape(-1, length)
    found: dict[int, list[Tensor]] = defaultdict(list)
    host = model.host if isinstance(model, KeelForCausalLM) else model
    run = model.final_hidden if isinstance(model, KeelForCausalLM) else model.base_model

    def observe(seen: SeenAttention) -> None:
        found[seen.layer].append(spans_of(seen, beyond, query_block).cpu())

    step = max(1, tokens_per_batch // length)
    with observing_attention(host, observe):
        for start in range(0, len(blocks_MT), step):
            run(input_ids=blocks_MT[start : start + step].to(model.device), use_cache=False)
    return [_row(length, layer, torch.cat(found[layer]).unflatten(0, (-1, each)).mean(1)) for layer in sorted(found)]


def _row(length: int, layer: int, values_NM: Tensor) -> SpanRow:
    per_sequence = {name: tuple(values_NM[:, index].tolist()) for index, name in enumerate(METRICS)}
    values = {name: mean_of(entries) for name, entries in per_sequence.items()}
    return SpanRow(length=length, layer=layer, values=values, per_sequence=per_sequence)


def spans_of(seen: SeenAttention, beyond: int, query_block: int = 128) -> Tensor:
    """Return distance, far mass and entropy of one layer's attention, means over heads and queries: [B, 3] float64."""
    batch, heads, length = seen.query_BHTK.shape[:3]
    total_B3 = torch.zeros(batch, 3, dtype=torch.float64, device=seen.query_BHTK.device)
    for start in range(0, length, query_block):
        stop = min(start + query_block, length)
        distance_QS = distances(start, stop, seen.query_BHTK.device)
        for group in range(seen.groups):
            row_BRQS = seen.rows(start, stop, group)
            total_B3[:, 0] += _total(row_BRQS * distance_QS)
            if stop > beyond:
                total_B3[:, 1] += _total(row_BRQS * (distance_QS >= beyond))
            total_B3[:, 2] += _total(torch.special.entr(row_BRQS))
    return total_B3 / (heads * length)


def _total(values_BRQS: Tensor) -> Tensor:
    """Sum over all but the batch: a row in float32, rows in float64, without a float64 copy of the block."""
    return values_BRQS.sum(-1).double().sum((1, 2))


def reference_spans(attention_HTT: Tensor, beyond: int) -> tuple[float, float, float]:
    """Distance, far mass and entropy of one sequence's whole attention matrices, entry by entry: the oracle of ``spans_of``."""
    heads, length = attention_HTT.shape[:2]
    distance = far = entropy = 0.0
    for head in attention_HTT.double():
        for t in range(length):
            for s in range(length):
                weight = float(head[t, s])
                distance += weight * (t - s)
                far += weight * (t - s >= beyond)
                entropy -= weight * float(head[t, s].log()) if weight > 0 else 0.0
    return distance / heads / length, far / heads / length, entropy / heads / length


def span_table(spans: Mapping[str, AttentionSpans]) -> Table:
    """Return arms and lengths as a table for a terminal, means over layers."""
    table = Table("arm", "tokens", "mean distance (tokens)", "mass beyond", "entropy (nats)", title="Attention spans")
    for arm, found in spans.items():
        for length in found.lengths:
            table.add_row(arm, f"{length:,}", *(f"{found.mean(name, length):.4g}" for name in METRICS))
    return table


def draw_spans(spans: Mapping[str, AttentionSpans]) -> list[Drawing]:
    """Return the figures: mean distance over length (Fig. 4), and by layer at the greatest length, a line an arm."""
    lengths = next(iter(spans.values())).lengths
    over = [
        Line(label=arm, x=found.lengths, y=[found.mean("distance", n) for n in found.lengths])
        for arm, found in spans.items()
    ]
    last = {arm: [row for row in found.rows if row.length == lengths[-1]] for arm, found in spans.items()}
    by_layer = [
        Line(label=arm, x=[float(row.layer) for row in rows], y=[row.values["distance"] for row in rows])
        for arm, rows in last.items()
    ]
    caption = "How many tokens back attention lies on average, over heads and queries; the same tokens at every length."
    drawn = [line_figure(
        by_layer, name="layers", title=f"Attention distance by layer at {lengths[-1]:,} tokens", caption=caption, x_label="layer",
        y_label="mean distance (tokens)",
    )]  # fmt: skip
    if lengths[-1] > lengths[0] > 1:
        drawn.insert(0, line_figure(
            over, name="lengths", title="Attention distance over length", caption=f"{caption} Both axes logarithmic.",
            x_label="evaluated length (tokens)", y_label="mean distance (tokens)", logarithmic=True,
        ))  # fmt: skip
    return drawn


def run_span(
    models: Mapping[str, KeelForCausalLM | PreTrainedModel],
    ids_NT: Tensor,
    lengths: Sequence[int],
    out: Path,
    *,
    beyond: int = 256,
) -> dict[str, AttentionSpans]:
    """Measure every arm (name -> model) and write ``table.json`` and the figures into ``out``; see ``attention_spans``."""
    spans = {arm: attention_spans(model, ids_NT, lengths, beyond=beyond) for arm, model in models.items()}
    table = {"probe": "span", "arms": {arm: found.to_json() for arm, found in spans.items()}}
    write_table(Path(out), table, draw_spans(spans), "span")
    return spans
