"""Figures of a results file: curves over conditions and over training, and single metrics as dot plots."""

from __future__ import annotations

import math
import re
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from keel.drawing import Canvas, Drawing, Painter, render
from keel.evaluation.results import Arm, Results
from keel.report.contrasts import ranking, reference_value
from keel.report.findings import row_mean
from keel.report.metrics import (
    DIRECTIONS,
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
from keel.report.painting import (
    Line,
    clip,
    extent_of,
    last_value,
    limits_of,
    padded,
    paint_dots,
    paint_lines,
    short,
    spread,
    thinned,
)
from keel.report.text import capitalised, number

_EARLY = 8.0
"""Of training, values up to this multiple of the lowest are shown: the first steps would flatten all that follows."""


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


def _spans_decades(quantity: str) -> bool:
    """Whether values of a quantity are read on a logarithmic axis: perplexities, and ratios of them."""
    return quantity.split(".")[-1] in ("ppl", "ratio", "ratio_snr")


def _draw_group(results: Results, group: Group, prefix: str) -> Drawing | None:
    """Draw a group of metrics over its numbers: tokens and perplexities on logarithmic axes, the others as they are."""
    lines = [line for name, arm in results.arms.items() if (line := _group_line(name, arm, group))]
    unit, higher_is_better = unit_of(results, group.metrics[0])
    values, tokens = group.values, group.kind == "" and group.values[0] > 0
    perplexity = tokens and group.quantity == "ppl"
    phrase, logarithmic = quantity_phrase(group.quantity), _spans_decades(group.quantity)

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        most = 4 if canvas.narrow else 8
        if tokens:
            axes.set_xscale("log", base=2)
            axes.set_xlim(values[0] / 1.08, values[-1] * 1.08)
        else:
            axes.set_xlim(*padded(values))
        axes.xaxis.set_major_locator(FixedLocator(spread(values, most) if tokens else thinned(values, most)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(float(value))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("evaluated length (tokens)" if tokens else group.axis)
        y_label = unit if perplexity else f"{phrase} ({unit})" if unit else phrase
        limits = limits_of(lines) if higher_is_better is False else extent_of(lines)
        paint_lines(canvas, results, lines, y_label=y_label, limits=limits, logarithmic=logarithmic)

    ends = f"{group.columns[0]} to {group.columns[-1]}"
    what = (
        f"Perplexity of the same tokens, read in blocks of {ends} tokens, both axes logarithmic."
        if perplexity
        else f"{capitalised(phrase)} at {group.axis} {ends}; {DIRECTIONS[higher_is_better]}."
    )
    return _finish(
        results,
        lines,
        [name for name, arm in results.arms.items() if {*group.metrics} & {*arm.metrics}],
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
        canvas.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        canvas.axes.set_xlabel(x_label)
        canvas.axes.set_xlim(*padded([x for line in lines for x in line.x]))
        paint_lines(canvas, results, lines, y_label=label, limits=limits_of(lines, _EARLY))

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
        paint_dots(canvas, results, metric, order, printed)
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
        label_width=max(len(clip(results.arms[name].label)) for name in order),
        labels_left=True,
        legend=[],
    )


def _finish(
    results: Results, lines: list[Line], expected: list[str], paint: Painter, *, caption: str, title: str, **rest: Any
) -> Drawing | None:
    """Render a line figure, naming in the caption the arms that have no finite value."""
    drawn = {line.arm for line in lines}
    if not drawn:
        return None
    missing = [results.arms[name].label for name in expected if name not in drawn]
    note = f" Not drawn, for want of a finite value: {', '.join(missing)}." if missing else ""
    ends = ", ".join(f"{line.label} {number(last_value(line))}" for line in lines)
    return render(
        paint,
        heights=(4.5, 4.1),
        title=title,
        caption=caption + note,
        alt=f"{title}. Last values: {ends}",
        label_width=max(len(clip(line.label)) for line in lines),
        labels_left=False,
        legend=[(line.arm, line.label, number(last_value(line))) for line in lines],
        **rest,
    )


def _group_line(name: str, arm: Arm, group: Group) -> Line | None:
    points = []
    for value, metric_name in zip(group.values, group.metrics, strict=True):
        metric = arm.metrics.get(metric_name)
        mean = math.nan if metric is None or metric.mean is None else metric.mean
        low, high = (mean, mean) if metric is None or metric.ci95 is None else metric.ci95
        points.append((value, mean, low, high))
    return _line(name, arm.label, points)


def _curve_line(name: str, arm: Arm, label: str) -> Line | None:
    curve, points = arm.curves[label].joined(), []
    for x, row in zip(curve.x, curve.values, strict=True):
        values = [value for value in row if value is not None] or [math.nan]
        points.append((x, row_mean(row), min(values), max(values)))
    return _line(name, arm.label, points)


def _line(name: str, label: str, points: list[tuple[float, float, float, float]]) -> Line | None:
    """Make a line of finite points; anything else becomes a gap. None where nothing is left."""
    clean = [(x, *(value if math.isfinite(value) else math.nan for value in rest)) for x, *rest in points]
    if not any(math.isfinite(point[1]) for point in clean):
        return None
    x, y, low, high = (list(column) for column in zip(*clean, strict=True))
    return Line(arm=name, label=label, x=x, y=y, low=low, high=high)
