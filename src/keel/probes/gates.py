"""Gates against depth, and how often gates are saturated (S-Former Fig. 2).

The paper correlates alpha with the bracket depth of a Dyck word. Here any signal of shape [B, T, S] that a stream returns is set
against any whole-number depth a token: Pearson's r within each sequence, its mean over sequences with an interval, and r over all
tokens together.

Shapes: N sequences, B sequences of a batch, T tokens, S sites, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from rich.table import Table
from scipy import stats
from torch import Tensor

from keel.drawing import Canvas, Drawing, render
from keel.errors import KeelError, suggest
from keel.model import KeelForCausalLM
from keel.probes.output import mean_of, write_table
from keel.probes.recording import quiet

Array = NDArray[np.float64]
MEAN_SITE = "mean"
LOW, HIGH = 0.05, 0.95


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """One site, or ``mean``: the mean gate over all sites, token by token.

    Attributes:
        mean_r: mean over sequences of Pearson's r between gate and depth; NaN where no sequence has one.
        ci95: its 95 % interval, bootstrapped over sequences; None for fewer than two.
        pooled_r, pooled_p: r over all tokens together, and its two-sided p, which takes tokens as independent and so is too small.
        r, p: a value a sequence; NaN where gate or depth is constant in it.
        undefined: how many of them are NaN.
        mean_gate: over all tokens, 0 to 1.
        low_share, high_share: share of tokens with a gate below 0.05, above 0.95.
    """

    site: str
    mean_r: float
    ci95: tuple[float, float] | None
    pooled_r: float
    pooled_p: float
    r: tuple[float, ...]
    p: tuple[float, ...]
    undefined: int
    mean_gate: float
    low_share: float
    high_share: float

    @property
    def significant_share(self) -> float:
        """Share of the sequences with an r whose p is below 0.05; NaN where none has one."""
        return mean_of([float(p < 0.05) for p in self.p if not math.isnan(p)])


@dataclass(frozen=True, kw_only=True)
class GateDepth:
    """Gates against depth: ``rows`` with the mean over sites first; ``gate`` and ``depth`` of one sequence for the case study.

    Where the gate is one a channel the signal is already the mean over channels, and saturation is of that mean.
    """

    signal: str
    sequences: int
    tokens: int
    rows: tuple[GateRow, ...]
    gate: tuple[float, ...]
    depth: tuple[int, ...]

    def metrics(self) -> dict[str, float]:
        """Return ``gates.QUANTITY`` of the mean over sites, and ``gates.QUANTITY_SITE@layerK`` of every site."""
        names = ("mean_r", "significant_share", "pooled_r", "mean_gate", "low_share", "high_share")
        return {
            f"gates.{name}{'' if row.site == MEAN_SITE else f'_{row.site}'}": getattr(row, name)
            for row in self.rows
            for name in names
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        head = {"signal": self.signal, "sequences": self.sequences, "tokens": self.tokens}
        case = {"gate": list(self.gate), "depth": list(self.depth)}
        rows = [dict(vars(row)) for row in self.rows]
        return {"probe": "gates", **head, "rows": rows, "case": case, "metrics": self.metrics()}

    def table(self) -> Table:
        """Return the sites as a table for a terminal."""
        columns = ("mean r", "95 %", "p < 0.05", "pooled r", "mean gate", f"< {LOW}", f"> {HIGH}")
        table = Table("site", *columns, title=f"{self.signal} against depth, {self.sequences} sequences")
        for row in self.rows:
            interval = "" if row.ci95 is None else f"[{row.ci95[0]:.3f}, {row.ci95[1]:.3f}]"
            shares = (f"{value:.3f}" for value in (row.pooled_r, row.mean_gate, row.low_share, row.high_share))
            table.add_row(row.site, f"{row.mean_r:.3f}", interval, f"{row.significant_share:.3f}", *shares)
        return table

    def drawings(self) -> list[Drawing]:
        """Return the figures: gate and depth along one sequence (Fig. 2), and the histogram of r over sequences."""
        found = [_draw_case(self)]
        return found if math.isnan(self.rows[0].mean_r) else [*found, _draw_histogram(self.rows[0])]


def gate_depth(
    model: KeelForCausalLM,
    sequences: Sequence[Tensor],
    depths: Sequence[Tensor],
    *,
    signal: str = "structural.gate",
    batch_size: int = 16,
    case: int = 0,
    resamples: int = 2000,
    seed: int = 0,
) -> GateDepth:
    """Correlate a gate with depth over sequences; the paper shows one, 500 give a usable interval.

    Args:
        sequences: token ids, each [T_n], T_n >= 2; they may differ in length.
        depths: a whole number a token, each [T_n].
        signal: name of a [B, T, S] signal, as ``model(..., collect_signals=True).signals`` has it.
        case: index of the sequence that is kept for the figure.
        seed: of the bootstrap over sequences.
    Raises: KeelError where sequences and depths do not fit or the model has no such signal.
    Reference twin of r: ``reference_pearson``.
    """
    _check(sequences, depths, case)
    with quiet(model):
        gates = list(_gates(model, sequences, signal, batch_size))
    levels = [depth_T.cpu().double().numpy() for depth_T in depths]
    names = [MEAN_SITE, *_site_names(model, signal, gates[0].shape[1])]
    with_mean = [np.concatenate([gate_TS.mean(1, keepdims=True), gate_TS], 1) for gate_TS in gates]
    rows = [
        _row(name, [gate_TS[:, index] for gate_TS in with_mean], levels, resamples, seed)
        for index, name in enumerate(names)
    ]
    return GateDepth(
        signal=signal,
        sequences=len(sequences),
        tokens=sum(len(level) for level in levels),
        rows=tuple(rows),
        gate=tuple(with_mean[case][:, 0].tolist()),
        depth=tuple(int(level) for level in levels[case]),
    )


def _check(sequences: Sequence[Tensor], depths: Sequence[Tensor], case: int) -> None:
    shapes = [(tuple(ids.shape), tuple(depth.shape)) for ids, depth in zip(sequences, depths, strict=False)]
    wrong = [pair for pair in shapes if pair[0] != pair[1] or len(pair[0]) != 1 or pair[0][0] < 2]
    if wrong or not sequences or len(sequences) != len(depths) or not 0 <= case < len(sequences):
        raise KeelError(
            f"gates: {len(sequences)} sequences and {len(depths)} depths, case {case}, shapes that do not fit: {wrong[:2] or 'none'}; "
            "give one depth a token, [T] each with T >= 2"
        )


def _gates(model: KeelForCausalLM, sequences: Sequence[Tensor], signal: str, batch_size: int) -> Iterator[Array]:
    """Yield the gates of each sequence, [T, S]; shorter ones of a batch are padded on the right and cut again."""
    for start in range(0, len(sequences), batch_size):
        batch = list(sequences[start : start + batch_size])
        ids_BT = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(model.device)
        lengths_B1 = torch.tensor([[len(ids)] for ids in batch], device=model.device)
        mask_BT = (torch.arange(ids_BT.shape[1], device=model.device) < lengths_B1).long()
        options: dict[str, Any] = {"collect_signals": True, "use_cache": False, "logits_to_keep": 1}
        signals = model(ids_BT, attention_mask=mask_BT, **options).signals or {}
        if signal not in signals or signals[signal].dim() != 3:
            fitting = [name for name, value in signals.items() if value.dim() == 3]
            hint = suggest(signal, fitting) if fitting else "this model's streams have none of shape [B, T, S]"
            raise KeelError(f"gates: no gate signal {signal!r}; {hint}")
        for gate_TS, ids in zip(signals[signal].double().cpu().numpy(), batch, strict=True):
            yield gate_TS[: len(ids)]


def _site_names(model: KeelForCausalLM, signal: str, sites: int) -> list[str]:
    stream = model.wires.streams.get(signal.rpartition(".")[0])
    pairs = [] if stream is None else stream.write_sites()
    if len(pairs) != sites:
        return [f"site@{index}" for index in range(sites)]
    return [f"{site}@layer{layer}" for site, layer in pairs]


def _row(site: str, gates: list[Array], levels: list[Array], resamples: int, seed: int) -> GateRow:
    pairs = [pearson(gate_T, level_T) for gate_T, level_T in zip(gates, levels, strict=True)]
    r = tuple(pair[0] for pair in pairs)
    every = np.concatenate(gates)
    pooled_r, pooled_p = pearson(every, np.concatenate(levels))
    return GateRow(
        site=site,
        mean_r=mean_of(r),
        ci95=mean_interval(r, resamples=resamples, seed=seed),
        pooled_r=pooled_r,
        pooled_p=pooled_p,
        r=r,
        p=tuple(pair[1] for pair in pairs),
        undefined=sum(math.isnan(value) for value in r),
        mean_gate=float(every.mean()),
        low_share=float((every < LOW).mean()),
        high_share=float((every > HIGH).mean()),
    )


def pearson(first: Array, second: Array) -> tuple[float, float]:
    """Return Pearson's r and its two-sided p; NaN for both where either is constant.  Twin: ``reference_pearson``."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan, math.nan
    found = stats.pearsonr(first, second)
    return float(found.statistic), float(found.pvalue)


def reference_pearson(first: Sequence[float], second: Sequence[float]) -> float:
    """Covariance over the product of the standard deviations, number by number."""
    mean_a, mean_b = sum(first) / len(first), sum(second) / len(second)
    both = sum((a - mean_a) * (b - mean_b) for a, b in zip(first, second, strict=True))
    spread = math.sqrt(sum((a - mean_a) ** 2 for a in first) * sum((b - mean_b) ** 2 for b in second))
    return both / spread


def mean_interval(values: Sequence[float], *, resamples: int = 2000, seed: int = 0) -> tuple[float, float] | None:
    """Return a 95 % percentile interval of the mean over sequences, NaN left out; None for fewer than two values."""
    defined = np.array([value for value in values if not math.isnan(value)])
    if len(defined) < 2:
        return None
    drawn_RN = np.random.default_rng(seed).integers(len(defined), size=(resamples, len(defined)))
    low, high = np.percentile(defined[drawn_RN].mean(1), [2.5, 97.5], method="inverted_cdf")
    return float(low), float(high)


def _draw_case(result: GateDepth) -> Drawing:
    def paint(canvas: Canvas) -> None:
        axes, other = canvas.axes, canvas.axes.twinx()
        x = range(len(result.gate))
        other.step(x, result.depth, where="mid", color=canvas.palette["series-0"], linewidth=1.2, linestyle=(0, (5, 2)))
        axes.plot(x, result.gate, color=canvas.palette["series-1"], linewidth=1.7, zorder=3)
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("gate, mean over sites (solid)")
        other.set_ylabel("depth (broken)", color=canvas.palette["muted"], fontsize=canvas.font_size)
        other.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        other.tick_params(colors=canvas.palette["muted"], labelsize=canvas.font_size, length=0)
        for spine in other.spines.values():
            spine.set_visible(False)

    r, _ = pearson(np.array(result.gate), np.array(result.depth, dtype=np.float64))
    return _render(paint, name="case", title="Gate and depth along one sequence",
                   caption=f"Each on its own axis, both linear; r = {r:.3f} in this sequence (S-Former Fig. 2).")  # fmt: skip


def _draw_histogram(row: GateRow) -> Drawing:
    defined = [value for value in row.r if not math.isnan(value)]

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        axes.hist(defined, bins=np.linspace(-1, 1, 41).tolist(), color=canvas.palette["series-1"], alpha=0.75, zorder=2)
        axes.axvline(row.mean_r, color=canvas.palette["ink"], linewidth=1.0, zorder=3)
        axes.set_xlim(-1, 1)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("r between gate and depth within a sequence")
        axes.set_ylabel("sequences")

    return _render(paint, name="histogram", title="Correlation of gate and depth over sequences",
                   caption=f"{len(defined)} sequences; line: the mean, {row.mean_r:.3f}.")  # fmt: skip


def _render(paint: Any, *, name: str, title: str, caption: str) -> Drawing:
    return render(
        paint, heights=(3.2, 3.0), label_width=6, labels_left=False, name=name, title=title, caption=caption,
        alt=f"{title}. {caption}", prefix="gates", legend=[],
    )  # fmt: skip


def run_gates(
    model: KeelForCausalLM,
    sequences: Sequence[Tensor],
    depths: Sequence[Tensor],
    out: Path,
    *,
    signal: str = "structural.gate",
    seed: int = 0,
) -> GateDepth:
    """Measure, and write ``table.json`` and the figures into the folder ``out``; see ``gate_depth``."""
    result = gate_depth(model, sequences, depths, signal=signal, seed=seed)
    write_table(Path(out), result.to_json(), result.drawings(), "gates")
    return result
