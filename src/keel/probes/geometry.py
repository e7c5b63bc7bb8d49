"""Geometry of what a stream writes into the layers, and what that does to them (S-Former App. B.1, Table 4).

At every site of every layer the bias is m_t = (what the stream returned) - (what it was given), the content x_t = what it was
given. For bias injection that is alpha_t g_t and h_t. The model runs twice a batch, with its streams and without: the same weights
with the streams switched off, not a host that was trained without them. Nothing is held but one batch of layer outputs, one
attention matrix a head group, and one D x D matrix a site.

Per-token quantities are averaged over the tokens of a sequence, so that a caller can resample sequences; ranks and the spectra of the
layers' outputs are one value over all tokens. A layer's value is the mean over its sites. The difference m_t carries the rounding of
the host's dtype: measure in float32.

Shapes: N sequences, B sequences of a batch, T tokens, D hidden size.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from keel.drawing import Drawing
from keel.errors import KeelError, suggest
from keel.model import KeelForCausalLM
from keel.probes.attention import SeenAttention, observing_attention
from keel.probes.output import Line, line_figure, mean_of, write_table
from keel.probes.recording import Write, check_ids, quiet, recording_layers, recording_writes
from keel.probes.spectra import Moments, attention_spectra

_EPSILON = 1e-8
BIAS_METRICS = ("relative_strength", "orthogonality", "temporal_consistency")
RANK_METRICS = ("effective_rank", "effective_rank_centred")
SPECTRAL_METRICS = ("effective_dimension", "participation_ratio", "spectral_entropy")


@dataclass(frozen=True, kw_only=True)
class GeometryRow:
    """One site of one layer, or (``site`` None) the layer as a whole.

    Attributes:
        values: metric -> one number. At a site: ``relative_strength`` (>= 0), ``orthogonality`` (0 to 1), ``temporal_consistency``
            (-1 to 1), ``effective_rank`` and ``effective_rank_centred`` (0 to D). A layer has the means of these over its sites, and
            ``representation_shift`` (>= 0) and, by spectral metric M with variants M (singular values of attention), M_diagonal
            and M_hidden: ``M`` with the stream, ``M_without`` and their ratio ``M_ratio``.
        per_sequence: metric -> a value a sequence, for the metrics that have one; the rest are over all tokens.
    """

    layer: int
    site: str | None
    values: Mapping[str, float]
    per_sequence: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What was measured of one stream: rows by layer, first the layer as a whole, then its sites."""

    stream: str
    sequences: int
    tokens: int
    width: int
    rows: tuple[GeometryRow, ...]

    def metrics(self) -> dict[str, float]:
        """Return ``geometry.METRIC@layerK`` and, at a site, ``geometry.METRIC_SITE@layerK``, each with its value."""
        return {
            f"geometry.{metric}{'' if row.site is None else f'_{row.site}'}@layer{row.layer}": value
            for row in self.rows
            for metric, value in row.values.items()
        }

    def layers(self) -> list[GeometryRow]:
        """Return the rows of whole layers."""
        return [row for row in self.rows if row.site is None]

    def to_json(self) -> dict[str, Any]:
        """Return plain values; ``table.json`` writes those that are not finite as strings."""
        rows = [
            {"layer": row.layer, "site": row.site, "values": dict(row.values), "per_sequence": dict(row.per_sequence)}
            for row in self.rows
        ]
        head = {"stream": self.stream, "sequences": self.sequences, "tokens": self.tokens, "width": self.width}
        return {"probe": "geometry", **head, "rows": rows, "metrics": self.metrics()}

    def table(self) -> Table:
        """Return the layers as a table for a terminal, in the columns of S-Former's Table 4 and App. B.1."""
        columns = [*BIAS_METRICS, "effective_rank", "representation_shift", *(f"{m}_ratio" for m in SPECTRAL_METRICS)]
        shown = [name for name in columns if any(name in row.values for row in self.layers())]
        table = Table("layer", *(_words(name) for name in shown), title=f"Geometry of {self.stream}")
        for row in self.layers():
            table.add_row(str(row.layer), *(f"{row.values.get(name, math.nan):.3g}" for name in shown))
        return table

    def drawings(self) -> list[Drawing]:
        """Return the figures: the bias by layer, and spectra with over without by layer where they were measured."""
        rows = self.layers()
        found = [line_figure(
            [_line(rows, name) for name in (*BIAS_METRICS, "representation_shift")],
            name="bias", title="What the stream writes, by layer", x_label="layer", y_label="mean over tokens",
            caption="Relative strength of the bias, its orthogonality to the content, its consistency from token to token, and the "
            "shift of the layer's output (S-Former App. B.1).",
        )]  # fmt: skip
        if all(f"{name}_ratio" in rows[0].values for name in SPECTRAL_METRICS):
            found.append(line_figure(
                [_line(rows, f"{name}_ratio") for name in SPECTRAL_METRICS],
                name="spectra", title="Attention spectra with the stream, relative to without", x_label="layer", y_label="ratio",
                caption="From the singular values of the attention matrices, mean over heads and sequences. At 1 nothing changed.",
                reference=1.0,
            ))  # fmt: skip
        return found


def _words(metric: str) -> str:
    """Write a ratio of with and without as "×"."""
    ratio = metric.endswith("_ratio") and metric != "participation_ratio"
    return f"{metric.removesuffix('_ratio')} ×".replace("_", " ") if ratio else metric.replace("_", " ")


def _line(rows: list[GeometryRow], metric: str) -> Line:
    y = [row.values.get(metric, math.nan) for row in rows]
    return Line(label=_words(metric), x=[float(row.layer) for row in rows], y=y)


def measure_geometry(
    model: KeelForCausalLM,
    ids_NT: Tensor,
    *,
    stream: str | None = None,
    batch_size: int = 8,
    spectra: bool = True,
) -> Geometry:
    """Measure what a stream writes into every layer and what that changes there.

    Args:
        ids_NT: token ids, N >= 1 sequences of T >= 2 tokens without padding.
        stream: its name in the model; None where only one stream writes into layers. Shift and spectra compare the model with
            all its streams to the bare host.
        batch_size: sequences a forward pass.
        spectra: also the spectra of attention (singular values of a T x T matrix a head, the slow part: cubic in T).
    Raises: KeelError for other ids, an unknown stream or none that writes into layers, or attention that cannot be read.
    Reference twins: ``reference_bias_metrics``, those of ``keel.probes.spectra``.
    """
    check_ids(ids_NT)
    measured = _Measured(_chosen(model, stream))
    with quiet(model):
        for start in range(0, len(ids_NT), batch_size):
            measured.batch(model, ids_NT[start : start + batch_size].to(model.device), spectra)
    return Geometry(
        stream=measured.stream,
        sequences=len(ids_NT),
        tokens=ids_NT.numel(),
        width=model.host.config.hidden_size,
        rows=tuple(measured.rows()),
    )


def _chosen(model: KeelForCausalLM, stream: str | None) -> str:
    writing = [name for name, s in model.wires.streams.items() if any(layer >= 0 for _, layer in s.write_sites())]
    if stream is None and len(writing) == 1:
        return writing[0]
    if stream not in writing:
        raise KeelError(f"geometry: stream {stream!r}; {suggest(str(stream), writing)}" if writing else
                        "geometry: no stream of this model writes into its layers; give a model with a structural stream")  # fmt: skip
    return stream


class _Measured:
    """The sums of one measurement."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.sites: dict[tuple[int, str], dict[str, list[float]]] = {}
        self.bias: dict[tuple[int, str], Moments] = defaultdict(Moments)
        self.layers: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.hidden: dict[tuple[int, str], Moments] = defaultdict(Moments)

    def batch(self, model: KeelForCausalLM, ids_BT: Tensor, spectra: bool) -> None:
        """Run one batch with the streams, then without, and add it."""
        outputs: dict[int, Tensor] = {}
        with recording_writes(model, self._write), recording_layers(model, outputs.__setitem__):
            self._run(model, ids_BT, "", spectra)
        compare = recording_layers(model, lambda layer, bare: self._outputs(layer, outputs.pop(layer), bare))
        with compare, model.disable_streams():
            self._run(model, ids_BT, "_without", spectra)

    def _run(self, model: KeelForCausalLM, ids_BT: Tensor, suffix: str, spectra: bool) -> None:
        if not spectra:
            model.final_hidden(ids_BT)
            return
        with observing_attention(model.host, lambda seen: self._attention(seen, suffix)):
            model.final_hidden(ids_BT)

    def _write(self, write: Write) -> None:
        if write.stream != self.stream or write.layer < 0:
            return
        content_BTD = write.given_BTD.float()
        bias_BTD = write.written_BTD.float() - content_BTD
        key = (write.layer, write.site)
        lists = self.sites.setdefault(key, {name: [] for name in BIAS_METRICS})
        for name, values_BT in bias_metrics(bias_BTD, content_BTD).items():
            lists[name] += values_BT.nanmean(-1).tolist()
        self.bias[key].add(bias_BTD)

    def _outputs(self, layer: int, with_BTD: Tensor, without_BTD: Tensor) -> None:
        with_BTD, without_BTD = with_BTD.float(), without_BTD.float()
        shift_BT = (with_BTD - without_BTD).norm(dim=-1) / (without_BTD.norm(dim=-1) + _EPSILON)
        self.layers[layer]["representation_shift"] += shift_BT.mean(-1).tolist()
        self.hidden[layer, ""].add(with_BTD)
        self.hidden[layer, "_without"].add(without_BTD)

    def _attention(self, seen: SeenAttention, suffix: str) -> None:
        for index in range(len(seen.query_BHTK)):
            one, found = seen.sequence(index), []
            for group in range(seen.groups):
                found += [attention_spectra(head_TT) for head_TT in one.rows(0, seen.length, group)[0]]
            for name in SPECTRAL_METRICS:
                for kind, which in enumerate(("", "_diagonal")):
                    values = [getattr(pair[kind], name) for pair in found]
                    self.layers[seen.layer][f"{name}{which}{suffix}"].append(mean_of(values))

    def rows(self) -> list[GeometryRow]:
        """Return the rows, layer by layer."""
        # A site that were written twice in a pass would count its sequences twice.
        assert len({len(entries) for lists in self.sites.values() for entries in lists.values()}) == 1
        rows = []
        for layer in sorted(self.layers):
            sites = [self._site_row(key) for key in self.sites if key[0] == layer]
            rows += [self._layer_row(layer, sites), *sites]
        return rows

    def _site_row(self, key: tuple[int, str]) -> GeometryRow:
        per_sequence = {name: tuple(values) for name, values in self.sites[key].items()}
        values = {name: mean_of(entries) for name, entries in per_sequence.items()}
        values["effective_rank"] = float(self.bias[key].effective_rank(centred=False))
        values["effective_rank_centred"] = float(self.bias[key].effective_rank(centred=True))
        return GeometryRow(layer=key[0], site=key[1], values=values, per_sequence=per_sequence)

    def _layer_row(self, layer: int, sites: list[GeometryRow]) -> GeometryRow:
        """Means over the sites (none where the stream leaves the layer alone), then what is the layer's own."""
        per_sequence: dict[str, tuple[float, ...]] = {}
        if sites:
            for name in BIAS_METRICS:
                by_sequence = zip(*(site.per_sequence[name] for site in sites), strict=True)
                per_sequence[name] = tuple(mean_of(entries) for entries in by_sequence)
        per_sequence |= {name: tuple(entries) for name, entries in self.layers[layer].items()}
        values = {name: mean_of(entries) for name, entries in per_sequence.items()}
        if sites:
            values |= {name: mean_of([site.values[name] for site in sites]) for name in RANK_METRICS}
        for name in SPECTRAL_METRICS:
            for suffix in ("", "_without"):
                values[f"{name}_hidden{suffix}"] = getattr(self.hidden[layer, suffix].spectrum(), name)
            for kind in (name, f"{name}_diagonal", f"{name}_hidden"):
                if kind in values:
                    values[f"{kind}_ratio"] = values[kind] / values[f"{kind}_without"]
        return GeometryRow(layer=layer, site=None, values=values, per_sequence=per_sequence)


def bias_metrics(bias_BTD: Tensor, content_BTD: Tensor) -> dict[str, Tensor]:
    """Return relative strength and orthogonality [B, T], temporal consistency [B, T - 1] (S-Former App. B.1).

    A cosine with a zero vector is undefined: NaN, and left out of means.  Reference twin: ``reference_bias_metrics``.
    """
    strength_BT = bias_BTD.norm(dim=-1) / (content_BTD.norm(dim=-1) + _EPSILON)
    return {
        "relative_strength": strength_BT,
        "orthogonality": 1 - _cosine(bias_BTD, content_BTD).abs(),
        "temporal_consistency": _cosine(bias_BTD[:, :-1], bias_BTD[:, 1:]),
    }


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    first, second = first.double(), second.double()
    undefined = (first.norm(dim=-1) == 0) | (second.norm(dim=-1) == 0)
    product = (F.normalize(first, dim=-1, eps=1e-300) * F.normalize(second, dim=-1, eps=1e-300)).sum(-1)
    return product.masked_fill(undefined, math.nan)


def reference_bias_metrics(bias_TD: Tensor, content_TD: Tensor) -> dict[str, float]:
    """App. B.1 token by token for one sequence, its means: the oracle of ``bias_metrics``."""
    bias, content = bias_TD.double().tolist(), content_TD.double().tolist()

    def dot(a: list[float], b: list[float]) -> float:
        return math.fsum(x * y for x, y in zip(a, b, strict=True))

    def size(a: list[float]) -> float:
        return math.sqrt(dot(a, a))

    pairs, following = list(zip(bias, content, strict=True)), list(itertools.pairwise(bias))
    return {
        "relative_strength": mean_of([size(m) / (size(x) + _EPSILON) for m, x in pairs]),
        "orthogonality": mean_of([1 - abs(dot(m, x) / size(m) / size(x)) for m, x in pairs]),
        "temporal_consistency": mean_of([dot(m, n) / size(m) / size(n) for m, n in following]),
    }


def run_geometry(
    model: KeelForCausalLM, ids_NT: Tensor, out: Path, *, stream: str | None = None, batch_size: int = 8
) -> Geometry:
    """Measure, and write ``table.json`` and the figures into the folder ``out``; see ``measure_geometry``."""
    result = measure_geometry(model, ids_NT, stream=stream, batch_size=batch_size)
    write_table(Path(out), result.to_json(), result.drawings(), "geometry")
    return result
