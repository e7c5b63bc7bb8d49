"""How lines and dots are put onto axes: limits, ticks, bands, and names that do not overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from keel.drawing import Canvas
from keel.evaluation.results import Results
from keel.report.drawing import Look, looks_of
from keel.report.text import number

_OUTLIER = 20.0
"""An arm that ends beyond this multiple of the best one leaves the figure at its edge and is named there."""
_LONGEST_LABEL = 30


@dataclass(frozen=True, kw_only=True)
class Line:
    """One arm's points and the band around them, NaN where there is a gap; at least one of `y` is finite."""

    arm: str
    label: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


def last_value(line: Line) -> float:
    """Return the last finite value of a line."""
    return next(value for value in reversed(line.y) if math.isfinite(value))


def paint_lines(
    canvas: Canvas,
    results: Results,
    lines: list[Line],
    *,
    y_label: str,
    limits: tuple[float, float],
    logarithmic: bool = True,
) -> None:
    """Draw lines, bands and names; `limits` are the lowest and the highest value to show, `logarithmic` where they allow it."""
    axes, looks = canvas.axes, looks_of(results)
    low, high = limits
    if logarithmic and low > 0:
        axes.set_yscale("log")
        axes.set_ylim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(low, high)))
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


def limits_of(lines: list[Line], most: float = math.inf) -> tuple[float, float]:
    """Return the lowest and the highest value to show.

    Arms that end far above the others are left out of account, and nothing is shown beyond `most` times the lowest
    mean.
    """
    best = min(last_value(line) for line in lines)
    usual = [line for line in lines if best <= 0 or last_value(line) <= best * _OUTLIER]
    means = [value for line in usual for value in line.y if math.isfinite(value)]
    bands = [value for line in usual for value in (*line.low, *line.high) if math.isfinite(value)]
    low, high = min(means + bands), max(means + bands)
    if min(means) > 0:
        low = max(low, min(means) / 3)
        high = min(high, min(means) * most)
    if len(usual) < len(lines):
        high *= 1.3  # room in which the others can be seen to leave
    return (low, high) if high > low else (low - 0.05 * abs(low), high + (0.05 * abs(high) or 1.0))


def extent_of(lines: list[Line]) -> tuple[float, float]:
    """Return the lowest and the highest value of all lines and bands."""
    shown = [value for line in lines for value in (*line.y, *line.low, *line.high) if math.isfinite(value)]
    low, high = min(shown), max(shown)
    return (low, high) if high > low else (low - 0.05 * (abs(low) or 1.0), high + 0.05 * (abs(high) or 1.0))


def padded(values: list[float]) -> tuple[float, float]:
    """Return the limits of an axis that shows these values with a little room at both ends."""
    low, high = min(values), max(values)
    margin = 0.03 * (high - low) or 1.0
    return low - margin, high + margin


def _end_label(axes: Axes, line: Line, high: float) -> tuple[float, float, str]:
    """Return where a line ends, as fractions of the axes' width and height, and what to write there."""
    index = max(i for i, value in enumerate(line.y) if math.isfinite(value))
    value = line.y[index]
    text = clip(line.label) if value <= high else f"{clip(line.label)} ↑ {number(value)}"
    if index < len(line.y) - 1:
        text += " (then not finite)"
    point = axes.transAxes.inverted().transform(axes.transData.transform((line.x[index], min(value, high))))
    return float(point[0]), float(point[1]), text


def _paint_labels(canvas: Canvas, looks: list[Look], ends: list[tuple[float, float, str]]) -> None:
    """Write each name beside the end of its line, moved apart until none overlap, with a hair line where it moved."""
    axes = canvas.axes
    height = axes.bbox.height * 72 / axes.figure.dpi
    places = spaced([end[1] for end in ends], gap=1.3 * canvas.font_size / height)
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
            # From the left of the name: from its middle, a line would cross the names between.
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                "alpha": 0.7,
                "relpos": (0.0, 0.5),
            },
        )


def spaced(wanted: list[float], gap: float) -> list[float]:
    """Move positions as little as can be, by least squares, so that neighbours are `gap` apart, inside 0 … 1 where they fit."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    # Each less the gaps below it: these must not fall, and pooling those that do is isotonic regression.
    pools: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        mean, count = wanted[index] - rank * gap, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        pools.append((mean, count))
    starts = [mean for mean, count in pools for _ in range(count)]
    highest = 1.0 - (len(wanted) - 1) * gap
    result = [0.0] * len(wanted)
    for rank, index in enumerate(order):
        result[index] = min(max(starts[rank], 0.0), highest) + rank * gap
    return result


def paint_dots(canvas: Canvas, results: Results, metric: str, order: list[str], printed: dict[str, float]) -> None:
    """Draw the mean and interval of each arm in a row of its own, in this order, with the paper's value as a hollow mark.

    What is to be low may explode: it is drawn as a ratio where it spans one, and cut off at the edge beyond the usual.
    What is to be high, such as a share, is drawn as it is.
    """
    axes, looks = canvas.axes, looks_of(results)
    entries = {name: results.arms[name].metrics[metric] for name in order}
    means = {name: float(entries[name].mean or 0.0) for name in order}
    shown = [value for value in (*means.values(), *printed.values()) if math.isfinite(value)]
    smallest, largest = min(shown), max(shown)
    ratio = smallest > 0 and not entries[order[0]].higher_is_better
    cut = 1.5 * max(value for value in shown if value <= smallest * _OUTLIER) if ratio else math.inf
    cut = math.inf if largest <= cut else cut
    if ratio and largest / smallest > 4:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(log_ticks(smallest, min(largest, cut))))
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
    labels = [clip(results.arms[name].label) for name in order]
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


def clip(label: str) -> str:
    """Return a label, cut where it is too long to stand beside a figure."""
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1].rstrip()}…"


def thinned(values: list[float], most: int) -> list[float]:
    """Choose every n-th of some values, so that at most `most` are left."""
    return values[:: math.ceil(len(values) / most)]


def spread(lengths: list[float], most: int) -> list[float]:
    """Choose at most about `most` of the lengths, evenly on a logarithmic axis, both ends among them."""
    step = math.log(lengths[-1] / lengths[0]) / most
    chosen = [lengths[-1]]
    for length in reversed(lengths[:-1]):
        if math.log(chosen[-1] / length) >= step and math.log(length / lengths[0]) >= step:
            chosen.append(length)
    return [lengths[0], *reversed(chosen)]


def log_ticks(low: float, high: float) -> list[float]:
    """Choose three to eight round numbers between two positive ones."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [digit * 10.0**exponent for exponent in exponents for digit in digits]
        inside = [tick for tick in ticks if low * 0.97 <= tick <= high * 1.03]
        if len(inside) >= 4:
            return inside
    linear = [float(tick) for tick in MaxNLocator(5).tick_values(low, high)]
    return [tick for tick in linear if low * 0.97 <= tick <= high * 1.03 and tick > 0]


def short(value: float) -> str:
    """Write a large count of steps or tokens short: 2500000 is "2.5 M"."""
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= scale:
            return f"{value / scale:,.4g}{unit}"
    return f"{value:,.4g}"
