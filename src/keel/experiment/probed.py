"""The probes as measurements of an experiment: what they find, as metrics over items."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from keel.data import TaskData, TokenCorpus, evaluation_segments
from keel.data.languages.dyck import depths
from keel.evaluation.items import ItemMetric, mean
from keel.experiment.encoder_views import ends_of, keep_heads, keep_positions, texts_of
from keel.experiment.pictures import GATES_PREFIX
from keel.experiment.subject import Subject
from keel.probes.attention_span import attention_spans
from keel.probes.gates import MEAN_SITE, gate_depth
from keel.probes.geometry import BIAS_METRICS, SPECTRAL_METRICS, measure_geometry
from keel.probes.heads import head_influence
from keel.probes.positions import boundary_ids, probe_positions, table_metrics
from keel.streams import StructuralStream

_GEOMETRY = (*BIAS_METRICS, "effective_rank", "representation_shift", *(f"{name}_ratio" for name in SPECTRAL_METRICS))
_GEOMETRY_UNITS = {"effective_rank": "dimensions", "orthogonality": "1 - |cosine|", "temporal_consistency": "cosine"}
_SPAN_UNITS = {"distance": "tokens", "far": "share of attention", "entropy": "nats"}


def measure_gates(subject: Subject) -> list[ItemMetric]:
    """Saturation of the gates by site, and on bracket words their correlation with depth (S-Former, Fig. 2, App. A.5)."""
    wanted, signal = subject.recipe.evaluation.gates, "structural.gate"
    assert wanted is not None
    stream = subject.model.wires.streams.get("structural")
    if not isinstance(stream, StructuralStream) or stream.config.gate == "none":
        return []
    subject.tell("gates", 0, 1)
    sequences, levels = _gated_sequences(subject, wanted.samples)
    found = gate_depth(subject.model, sequences, levels, signal=signal)
    if isinstance(subject.data, TaskData):
        for drawing in found.drawings():
            drawing.write(subject.folder, GATES_PREFIX)
    metrics: list[ItemMetric] = []
    for row in found.rows:
        where = "" if row.site == MEAN_SITE else f"_{row.site}".replace("_attention_qk", "").replace(".layer", "@layer")
        # Of all sites together, the mean of their shares: the mean gate over sites may be far from 0 and 1 while they are not.
        chosen = [row] if where else [other for other in found.rows if other.site != MEAN_SITE]
        share = sum(other.low_share + other.high_share for other in chosen) / len(chosen)
        if (
            stream.config.gate == "scalar"
        ):  # of a gate a channel the signal is the mean, which says nothing of its channels
            metrics.append(
                mean(f"gate.saturation{where or '@all'}", [share], unit="share of tokens", higher_is_better=False)
            )
        if isinstance(subject.data, TaskData):
            metrics.append(
                ItemMetric(
                    name=f"alpha_depth.r{where}",
                    unit="Pearson's r",
                    higher_is_better=True,
                    # A word in which gate or depth is constant has no r and counts nothing.
                    numerators=tuple(0.0 if math.isnan(r) else r for r in row.r),
                    denominators=tuple(0.0 if math.isnan(r) else 1.0 for r in row.r),
                )
            )
            if not where:
                metrics.append(
                    ItemMetric(
                        name="alpha_depth.significant",
                        unit="share of strings with p < 0.05",
                        higher_is_better=True,
                        numerators=tuple(float(p < 0.05) for p in row.p),
                        denominators=tuple(0.0 if math.isnan(p) else 1.0 for p in row.p),
                    )
                )
    return metrics


def _gated_sequences(subject: Subject, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Sequences of the test split with the depth of every token; text has none, and zeros stand for it."""
    data = subject.data
    if isinstance(data, TokenCorpus):
        length = subject.recipe.train_window(subject.arm)
        segments = evaluation_segments(data.test, length - 1, count)
        return [segment.ids for segment in segments], [torch.zeros(len(segment.ids)) for segment in segments]
    words = [data.language.sample("test", index).whole for index in range(count)]
    sequences = [torch.tensor([data.tokenizer.bos_token_id, *data.encode(word)]) for word in words]
    return sequences, [torch.tensor([0, *depths(word)]) for word in words]


def measure_geometry_of(subject: Subject) -> list[ItemMetric]:
    """The geometry of what the structural stream writes, layer by layer (S-Former, App. B.1, Table 4)."""
    wanted = subject.recipe.evaluation.geometry
    assert wanted is not None
    if not isinstance(subject.model.wires.streams.get("structural"), StructuralStream):
        return []
    subject.tell("geometry", 0, 1)
    subject.set_positions(wanted.length)
    found = measure_geometry(subject.model, _rows(subject, wanted.length, wanted.sequences), stream="structural")
    return [
        _over_sequences(
            f"geometry.{name}@layer{row.layer}",
            row.per_sequence.get(name, (row.values[name],)),
            _GEOMETRY_UNITS.get(name, "ratio"),
        )
        for name in _GEOMETRY
        for row in found.layers()
        if name in row.values  # where the stream leaves a layer alone there is no bias to describe
    ]


def measure_spans(subject: Subject) -> list[ItemMetric]:
    """How far attention reaches, by length and, at the longest, by layer (S-Former, Fig. 4)."""
    wanted = subject.recipe.evaluation.span
    assert wanted is not None
    longest = wanted.lengths[-1]
    rows_NT = _rows(subject, longest, wanted.sequences)
    metrics = []
    for length in wanted.lengths:
        subject.tell(f"attention spans at {length:,} tokens", wanted.lengths.index(length), len(wanted.lengths))
        subject.set_positions(length)
        rows = attention_spans(subject.model, rows_NT, [length]).rows
        for name in rows[0].values:
            layers = [row.per_sequence[name] for row in rows]
            means = [sum(values) / len(values) for values in zip(*layers, strict=True)]
            unit = _SPAN_UNITS.get(name, "share of attention")
            metrics.append(_over_sequences(f"span.{name}@{length}", means, unit))
            if length == longest:
                metrics += [
                    _over_sequences(f"span.{name}_{length}@layer{row.layer}", row.per_sequence[name], unit)
                    for row in rows
                ]
    return metrics


def measure_position_probe(subject: Subject) -> list[ItemMetric]:
    """What linear probes read of positions, by layer, and the shape of the learned position table (DSTG §4 (1), §5)."""
    wanted = subject.recipe.evaluation.position_probe
    assert wanted is not None
    subject.tell("positions in the states", 0, 1)
    rows_NT, sources = texts_of(subject, wanted.length, wanted.documents)
    boundaries, ends = boundary_ids(subject.data.tokenizer), ends_of(subject)
    found = probe_positions(subject.model, rows_NT, boundaries, sources=sources, ends=ends, seeds=wanted.divisions)
    metrics = [
        ItemMetric(
            name=name,
            unit="R²",
            higher_is_better=True,
            numerators=tuple(explained_N.tolist()),
            denominators=tuple(spread_N.tolist()),
        )
        for name, (explained_N, spread_N) in found.metrics().items()
    ]
    table = subject.model.encoder.embed_positions
    if table is not None:
        shares = table_metrics(table.weight).items()
        metrics += [mean(name, [value], unit="share", higher_is_better=None) for name, value in shares]
    keep_positions(subject)
    return metrics


def measure_heads(subject: Subject) -> list[ItemMetric]:
    """How many heads listen to each component of the logits, and what share of a layer's influence each has (DSTG §4 (3))."""
    wanted = subject.recipe.evaluation.heads
    assert wanted is not None
    if not subject.model.encoder.config.has_relative_bias:
        return []  # one component: there is nothing to hold it against
    subject.tell("what the heads listen to", 0, 1)
    rows_NT, _ = texts_of(subject, wanted.length, wanted.documents)
    first, last = (rows_NT.new_full((len(rows_NT), 1), end) for end in ends_of(subject))
    found = head_influence(subject.model, torch.cat((first, rows_NT, last), dim=1))
    keep_heads(subject, found)
    metrics = [mean(name, [count], unit="heads", higher_is_better=None) for name, count in found.counts().items()]
    metrics += [
        mean(name, [share], unit="share of heads", higher_is_better=None) for name, share in found.fractions().items()
    ]
    for index, name in enumerate(found.components):
        metrics += [
            mean(f"heads.share_{name}@layer{layer}", shares[:, index].tolist(), unit="share", higher_is_better=None)
            for layer, shares in enumerate(found.shares)
        ]
    return metrics


def _rows(subject: Subject, length: int, count: int) -> Tensor:
    """Stretches of the test split, [count, length]."""
    assert isinstance(subject.data, TokenCorpus)
    return torch.stack([segment.ids for segment in evaluation_segments(subject.data.test, length - 1, count)])


def _over_sequences(name: str, values: Sequence[float], unit: str) -> ItemMetric:
    """A description: a mean over sequences, in which what is not defined counts nothing."""
    return ItemMetric(
        name=name,
        unit=unit,
        higher_is_better=None,
        numerators=tuple(0.0 if math.isnan(value) else value for value in values),
        denominators=tuple(0.0 if math.isnan(value) else 1.0 for value in values),
    )
