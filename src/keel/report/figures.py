"""Figures of a results file: curves over conditions and over training, and single metrics as dot plots."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from keel.evaluation.results import Arm, Curve, Results
from keel.report.contrasts import ranking, reference_value
from keel.report.drawing import Canvas, Drawing, Look, Painter, looks_of, render
from keel.report.findings import row_mean
from keel.report.metrics import (
    EXTRAPOLATION,
    Group,
    count,
    groups_of,
    lengths_of,
    metric_phrase,
    quantity_phrase,
    single_metrics,
    unit_of,
)
from keel.report.text import capitalised, number

_OUTLIER = 20.0
"""An arm that ends beyond this multiple of the best one leaves the figure at its edge and is named there."""
_EARLY = 8.0
"""Of training, values up to this multiple of the lowest are shown: the first steps would flatten all that follows."""
_LONGEST_LABEL = 30


@dataclass(frozen=True, kw_only=True)
class _Line:
    arm: str
    label: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


def draw_all(results: Results, prefix: str) -> list[Drawing]:
    """Draw every figure that the results have numbers for; `prefix` makes the ids in the SVGs unique on a page."""
    lengths, groups = lengths_of(results, "ppl"), [group for group in groups_of(results) if len(group.values) > 1]
    drawings = [_draw_group(results, group, prefix) for group in groups if group.quantity == "ppl"]
    if len(lengths) > 1:
        drawings.append(_draw_dots(results, f"growth@{lengths[-1]}", prefix, reference_line=1.0))
    drawings += [_draw_dots(results, metric, prefix) for metric in single_metrics(results)]
    drawings += [_draw_group(results, group, prefix) for group in groups if group.quantity not in EXTRAPOLATION]
    labels = dict.fromkeys(label for arm in results.arms.values() for label in arm.curves)
    drawings += [_draw_training(results, label, index, prefix) for index, label in enumerate(labels)]
    return [drawing for drawing in drawings if drawing is not None]


def _draw_group(results: Results, group: Group, prefix: str) -> Drawing | None:
    """Draw a group of metrics over its numbers: logarithmic in both axes for perplexity over tokens, else as it suits."""
    lines = [line for name, arm in results.arms.items() if (line := _group_line(name, arm, group))]
    unit, higher_is_better = unit_of(results, group.metrics[0])
    values, tokens, perplexity = group.values, group.kind == "", group.quantity == "ppl"
    phrase = quantity_phrase(group.quantity)

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        most = 4 if canvas.narrow else 8
        if tokens:
            axes.set_xscale("log", base=2)
            axes.set_xlim(values[0] / 1.08, values[-1] * 1.08)
        else:
            axes.set_xlim(*_padded(values))
        axes.xaxis.set_major_locator(FixedLocator(_spread(values, most) if tokens else _thinned(values, most)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(float(value))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("evaluated length (tokens)" if tokens else group.axis)
        y_label = unit if perplexity else f"{phrase} ({unit})" if unit else phrase
        _paint_lines(canvas, results, lines, y_label=y_label, higher_is_better=higher_is_better)

    ends = f"{group.columns[0]} to {group.columns[-1]}"
    what = (
        f"Perplexity of the same tokens, read in blocks of {ends} tokens, both axes logarithmic."
        if perplexity
        else f"{capitalised(phrase)} at {group.axis} {ends}; {'higher' if higher_is_better else 'lower'} is better."
    )
    return _finish(
        results,
        lines,
        list(results.arms),
        paint,
        name=_file_name("perplexity" if perplexity else f"{group.quantity} by {group.axis}"),
        title="Perplexity over length" if perplexity else capitalised(group.title),
        caption=f"{what} Bands: 95 % intervals. Solid lines: arms with a stream.",
        prefix=prefix,
    )


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text.replace("@", "-at-")).strip("-")


def _draw_training(results: Results, label: str, index: int, prefix: str) -> Drawing | None:
    lines = [
        line for name, arm in results.arms.items() if label in arm.curves and (line := _curve_line(name, arm, label))
    ]
    x_label = next(arm.curves[label].x_label for arm in results.arms.values() if label in arm.curves)

    def paint(canvas: Canvas) -> None:
        canvas.axes.xaxis.set_major_locator(MaxNLocator(3 if canvas.narrow else 6))
        canvas.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        canvas.axes.set_xlabel(x_label)
        canvas.axes.set_xlim(*_padded([x for line in lines for x in line.x]))
        _paint_lines(canvas, results, lines, y_label=label, most=_EARLY)

    return _finish(
        results,
        lines,
        [name for name, arm in results.arms.items() if label in arm.curves],
        paint,
        name=f"training-{index}",
        title=f"{capitalised(label)} over training",
        caption="Mean over seeds; bands: from the lowest to the highest seed. Values above "
        f"{_EARLY:.0f} times the lowest are cut off.",
        prefix=prefix,
    )


def _draw_dots(results: Results, metric: str, prefix: str, reference_line: float | None = None) -> Drawing | None:
    order = [name for name in ranking(results, metric) if math.isfinite(results.arms[name].metrics[metric].mean or 0.0)]
    if not order:
        return None
    printed = {name: value for name in order if (value := reference_value(results, name, metric)) is not None}

    def paint(canvas: Canvas) -> None:
        _paint_dots(canvas, results, metric, order, printed)
        if reference_line is not None:
            canvas.axes.axvline(reference_line, color=canvas.palette["muted"], linewidth=0.8, zorder=1)

    phrase = metric_phrase(metric)
    described = ", ".join(
        f"{results.arms[name].label} {number(results.arms[name].metrics[metric].mean)}" for name in order
    )
    return render(
        paint,
        heights=(0.62 + 0.31 * len(order), 0.62 + 0.44 * len(order)),
        name=_file_name(metric),
        title=capitalised(phrase),
        caption="Mean and 95 % interval, best first."
        + (" Open diamonds: the paper's value." if printed else "")
        + (" At 1, length costs nothing." if reference_line is not None else ""),
        alt=f"{phrase}, best first: {described}",
        prefix=prefix,
        label_width=max(len(_clip(results.arms[name].label)) for name in order),
        labels_left=True,
        legend=[],
    )


def _finish(
    results: Results, lines: list[_Line], expected: list[str], paint: Painter, *, caption: str, title: str, **rest: Any
) -> Drawing | None:
    """Render a line figure, naming in the caption the arms that have no finite value."""
    drawn = {line.arm for line in lines}
    if not drawn:
        return None
    missing = [results.arms[name].label for name in expected if name not in drawn]
    note = f" Not drawn, for want of a finite value: {', '.join(missing)}." if missing else ""
    ends = ", ".join(f"{line.label} {number(_last(line))}" for line in lines)
    return render(
        paint,
        heights=(4.5, 4.1),
        title=title,
        caption=caption + note,
        alt=f"{title}. Last values: {ends}",
        label_width=max(len(_clip(line.label)) for line in lines),
        labels_left=False,
        legend=[(line.arm, line.label, number(_last(line))) for line in lines],
        **rest,
    )


def _last(line: _Line) -> float:
    return next(value for value in reversed(line.y) if math.isfinite(value))


def _group_line(name: str, arm: Arm, group: Group) -> _Line | None:
    points = []
    for value, metric_name in zip(group.values, group.metrics, strict=True):
        metric = arm.metrics.get(metric_name)
        mean = math.nan if metric is None or metric.mean is None else metric.mean
        low, high = (mean, mean) if metric is None or metric.ci95 is None else metric.ci95
        points.append((value, mean, low, high))
    return _line(name, arm.label, points)


def _curve_line(name: str, arm: Arm, label: str) -> _Line | None:
    curve: Curve = arm.curves[label]
    points = []
    for x, row in zip(curve.x, curve.values, strict=True):
        values = [value for value in row if value is not None] or [math.nan]
        points.append((x, row_mean(row), min(values), max(values)))
    return _line(name, arm.label, points)


def _line(name: str, label: str, points: list[tuple[float, float, float, float]]) -> _Line | None:
    """Make a line of finite points; anything else becomes a gap. None where nothing is left."""
    clean = [(x, *(value if math.isfinite(value) else math.nan for value in rest)) for x, *rest in points]
    if not any(math.isfinite(point[1]) for point in clean):
        return None
    x, y, low, high = (list(column) for column in zip(*clean, strict=True))
    return _Line(arm=name, label=label, x=x, y=y, low=low, high=high)


def _paint_lines(
    canvas: Canvas,
    results: Results,
    lines: list[_Line],
    *,
    y_label: str,
    most: float = math.inf,
    higher_is_better: bool = False,
) -> None:
    axes, looks = canvas.axes, looks_of(results)
    low, high = _extent(lines) if higher_is_better else _limits(lines, most)
    if low > 0 and not higher_is_better:
        axes.set_yscale("log")
        axes.set_ylim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)
        axes.yaxis.set_major_locator(FixedLocator(_log_ticks(low, high)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
        )
    else:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.set_ylabel(y_label)
    for line in lines:
        look = looks[line.arm]
        colour = canvas.palette[look.series]
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.11, linewidth=0, zorder=2)
        axes.plot(
            line.x,
            line.y,
            color=colour,
            linestyle=look.dash,
            linewidth=1.9 if look.solid else 1.3,
            marker=look.marker if len(line.x) <= 20 else None,
            markersize=4.2,
            markerfacecolor=colour if look.solid else canvas.palette["paper"],
            markeredgewidth=1.0,
            zorder=4 if look.solid else 3,
        )
    if canvas.narrow:
        return  # its names stand in the legend below
    ends = [_end_label(axes, line, high) for line in lines]
    _paint_labels(canvas, [looks[line.arm] for line in lines], ends)


def _limits(lines: list[_Line], most: float) -> tuple[float, float]:
    """Return the lowest and the highest value to show.

    Arms that end far above the others are left out of account, and nothing is shown beyond `most` times the lowest
    mean.
    """
    best = min(_last(line) for line in lines)
    usual = [line for line in lines if best <= 0 or _last(line) <= best * _OUTLIER]
    means = [value for line in usual for value in line.y if math.isfinite(value)]
    bands = [value for line in usual for value in (*line.low, *line.high) if math.isfinite(value)]
    low, high = min(means + bands), max(means + bands)
    if min(means) > 0:
        low = max(low, min(means) / 3)
        high = min(high, min(means) * most)
    if len(usual) < len(lines):
        high *= 1.3  # room in which the others can be seen to leave
    return (low, high) if high > low else (low - 0.05 * abs(low), high + (0.05 * abs(high) or 1.0))


def _extent(lines: list[_Line]) -> tuple[float, float]:
    """Return the lowest and the highest value of all lines and bands."""
    shown = [value for line in lines for value in (*line.y, *line.low, *line.high) if math.isfinite(value)]
    low, high = min(shown), max(shown)
    return (low, high) if high > low else (low - 0.05 * (abs(low) or 1.0), high + 0.05 * (abs(high) or 1.0))


def _padded(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.03 * (high - low) or 1.0
    return low - margin, high + margin


def _end_label(axes: Axes, line: _Line, high: float) -> tuple[float, float, str]:
    """Return where a line ends, as fractions of the axes' width and height, and what to write there."""
    index = max(i for i, value in enumerate(line.y) if math.isfinite(value))
    value = line.y[index]
    text = _clip(line.label) if value <= high else f"{_clip(line.label)} ↑ {number(value)}"
    if index < len(line.y) - 1:
        text += " (then not finite)"
    point = axes.transAxes.inverted().transform(axes.transData.transform((line.x[index], min(value, high))))
    return float(point[0]), float(point[1]), text


def _paint_labels(canvas: Canvas, looks: list[Look], ends: list[tuple[float, float, str]]) -> None:
    """Write each name beside the end of its line, moved apart until none overlap, with a hair line where it moved."""
    axes = canvas.axes
    height = axes.bbox.height * 72 / axes.figure.dpi
    places = _spaced([end[1] for end in ends], gap=1.3 * canvas.font_size / height)
    for look, (x, y, text), place in zip(looks, ends, places, strict=True):
        colour = canvas.palette[look.series]
        axes.annotate(
            text,
            xy=(x, y),
            xycoords="axes fraction",
            xytext=(1.035, place),
            textcoords="axes fraction",
            va="center",
            ha="left",
            color=colour,
            fontsize=canvas.font_size,
            fontweight="bold" if look.solid else "normal",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3, "alpha": 0.7},
        )


def _spaced(wanted: list[float], gap: float) -> list[float]:
    """Move positions as little as is simple so that neighbours are `gap` apart, inside 0 … 1 where they fit."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed: list[float] = []
    for index in order:
        placed.append(max(wanted[index], placed[-1] + gap) if placed else max(wanted[index], 0.0))
    ceiling = 1.0
    for position in reversed(range(len(placed))):
        placed[position] = min(placed[position], ceiling)
        ceiling = placed[position] - gap
    result = [0.0] * len(wanted)
    for index, place in zip(order, placed, strict=True):
        result[index] = place
    return result


def _paint_dots(canvas: Canvas, results: Results, metric: str, order: list[str], printed: dict[str, float]) -> None:
    axes, looks = canvas.axes, looks_of(results)
    entries = {name: results.arms[name].metrics[metric] for name in order}
    means = {name: float(entries[name].mean or 0.0) for name in order}
    shown = [value for value in (*means.values(), *printed.values()) if math.isfinite(value)]
    smallest, largest = min(shown), max(shown)
    # What is to be low may explode, and is drawn as a ratio; what is to be high, such as a share, is drawn as it is.
    ratio = smallest > 0 and not entries[order[0]].higher_is_better
    cut = 1.5 * max(value for value in shown if value <= smallest * _OUTLIER) if ratio else math.inf
    cut = math.inf if largest <= cut else cut
    if ratio and largest / smallest > 4:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(_log_ticks(smallest, min(largest, cut))))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4 if canvas.narrow else 7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    for row, name in enumerate(order):
        colour, look = canvas.palette[looks[name].series], looks[name]
        mean = min(means[name], cut)
        if (ci95 := entries[name].ci95) is not None and all(math.isfinite(bound) for bound in ci95):
            axes.plot([min(ci95[0], cut), min(ci95[1], cut)], [row, row], color=colour, linewidth=1.6, zorder=3)
        axes.plot(
            [mean],
            [row],
            marker=look.marker if means[name] <= cut else ">",
            color=colour,
            markersize=5.5,
            markerfacecolor=colour if look.solid else canvas.palette["paper"],
            zorder=4,
        )
        if name in printed:
            axes.plot(
                [min(printed[name], cut)],
                [row],
                marker="d",
                color=canvas.palette["ink"],
                markerfacecolor="none",
                markersize=6,
                zorder=5,
            )
        axes.annotate(
            number(means[name]),
            xy=(1.015, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=canvas.font_size,
            color=colour,
            fontweight="bold" if look.solid else "normal",
            annotation_clip=False,
        )
    labels = [_clip(results.arms[name].label) for name in order]
    axes.set_yticks(range(len(order)), [""] * len(order) if canvas.narrow else labels)
    for row, label in enumerate(labels if canvas.narrow else ()):
        _paint_row_name(canvas, label, row)
    axes.set_ylim(len(order) - 0.5, -0.75 if canvas.narrow else -0.5)
    axes.grid(axis="y", visible=False)


def _paint_row_name(canvas: Canvas, label: str, row: int) -> None:
    """Write a name above its row, on a patch of paper that keeps grid lines out of the letters."""
    canvas.axes.annotate(
        label,
        xy=(0.005, row - 0.22),
        xycoords=("axes fraction", "data"),
        color=canvas.palette["ink"],
        fontsize=canvas.font_size,
        bbox={"facecolor": canvas.palette["paper"], "edgecolor": "none", "pad": 1.0},
        zorder=2,
    )


def _clip(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1].rstrip()}…"


def _thinned(values: list[float], most: int) -> list[float]:
    """Choose every n-th of some values, so that at most `most` are left."""
    return values[:: math.ceil(len(values) / most)]


def _spread(lengths: list[float], most: int) -> list[float]:
    """Choose at most about `most` of the lengths, evenly on a logarithmic axis, both ends among them."""
    step = math.log(lengths[-1] / lengths[0]) / most
    chosen = [lengths[-1]]
    for length in reversed(lengths[:-1]):
        if math.log(chosen[-1] / length) >= step and math.log(length / lengths[0]) >= step:
            chosen.append(length)
    return [lengths[0], *reversed(chosen)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Choose three to eight round numbers between two positive ones."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [digit * 10.0**exponent for exponent in exponents for digit in digits]
        inside = [tick for tick in ticks if low * 0.97 <= tick <= high * 1.03]
        if len(inside) >= 4:
            return inside
    linear = [float(tick) for tick in MaxNLocator(5).tick_values(low, high)]
    return [tick for tick in linear if low * 0.97 <= tick <= high * 1.03 and tick > 0]


def _short(value: float) -> str:
    """Write a large count of steps or tokens short: 2500000 is "2.5 M"."""
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= scale:
            return f"{value / scale:,.4g}{unit}"
    return f"{value:,.4g}"
