"""What every probe writes: a table as JSON, and line figures in the house's style."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from keel.drawing import Canvas, Drawing, render
from keel.files import write_atomically

SCHEMA: Final = "keel.probe/1"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a figure: finite x ascending, one y for each; a y that is not finite is a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def write_table(folder: Path, table: Mapping[str, Any], drawings: Sequence[Drawing], prefix: str) -> None:
    """Write ``table.json`` and every figure as ``PREFIX.NAME.svg`` and ``.png`` into a folder, which is made.

    Numbers that are not finite become the strings "NaN", "Infinity", "-Infinity", as in a results file.
    """
    text = json.dumps({"schema": SCHEMA, **_strict(table)}, indent=1, allow_nan=False)
    write_atomically(folder / "table.json", f"{text}\n".encode())
    for drawing in drawings:
        drawing.write(folder, prefix)


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of the values that are defined, NaN where none is."""
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan


def line_figure(
    lines: Sequence[Line],
    *,
    name: str,
    title: str,
    caption: str,
    x_label: str,
    y_label: str,
    logarithmic: bool = False,
    reference: float | None = None,
    ticks: Sequence[float] | None = None,
) -> Drawing:
    """Draw lines, named at their ends.

    Args:
        lines: at least one.
        logarithmic: both axes.
        reference: a y that is marked by a thin line.
        ticks: of the x axis; None for the x of the first line.
    """

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        if logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.margins(y=0.08)
        axes.xaxis.set_major_locator(FixedLocator(list(lines[0].x if ticks is None else ticks)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if reference is not None:
            axes.axhline(reference, color=canvas.palette["muted"], linewidth=0.8, zorder=1)
        _paint(canvas, lines)

    ends = ", ".join(f"{line.label} {line.y[-1]:.4g}" for line in lines)
    return render(
        paint,
        heights=(3.8, 3.4),
        label_width=max(len(line.label) for line in lines),
        labels_left=False,
        name=name,
        title=title,
        caption=caption,
        alt=f"{title}. Last values: {ends}",
        prefix="probe",
        legend=[(line.label, line.label, f"{line.y[-1]:.4g}") for line in lines],
    )


def share_figure(curves: Mapping[str, Sequence[float]], caption: str) -> Drawing:
    """Draw the share of a whole that its k heaviest parts hold, by k; each curve has an entry for every k from 1 on."""
    most = len(next(iter(curves.values())))
    ranks = sorted({rank for rank in (1, 5, 10, 25, 50, 100, 150, 200, 300, 400, 500) if rank < most} | {most})
    lines = [
        Line(label=label, x=[float(rank) for rank in ranks], y=[curve[rank - 1] for rank in ranks])
        for label, curve in curves.items()
    ]
    return line_figure(
        lines, name="curves", title="Share of the barrier in the heaviest tokens", caption=caption, x_label="tokens",
        y_label="share", ticks=[1, *(rank for rank in ranks if rank >= 50 or rank == most)],
    )  # fmt: skip


def _paint(canvas: Canvas, lines: Sequence[Line]) -> None:
    axes = canvas.axes
    for index, line in enumerate(lines):
        colour, marker = _colour(canvas, index), _MARKERS[index % len(_MARKERS)]
        y = [value if math.isfinite(value) else math.nan for value in line.y]
        axes.plot(line.x, y, color=colour, linewidth=1.7, marker=marker, markersize=4.2, zorder=3)
    if canvas.narrow:
        return
    for index, (line, height) in enumerate(zip(lines, _spread_ends(canvas, lines), strict=True)):
        axes.annotate(
            line.label,
            xy=(1.015, height),
            xycoords="axes fraction",
            color=_colour(canvas, index),
            fontsize=canvas.font_size,
            va="center",
            annotation_clip=False,
        )


def _colour(canvas: Canvas, index: int) -> str:
    return canvas.palette[f"series-{index % 8}"]


def _spread_ends(canvas: Canvas, lines: Sequence[Line], gap: float = 0.055) -> list[float]:
    """Return the height of each line's end as a fraction of the axes, moved apart so that no two names overlap."""
    axes = canvas.axes
    axes.autoscale_view()
    ends = [next((value for value in reversed(line.y) if math.isfinite(value)), math.nan) for line in lines]
    points = [(line.x[-1], 0.0 if math.isnan(end) else end) for line, end in zip(lines, ends, strict=True)]
    heights = axes.transAxes.inverted().transform(axes.transData.transform(points))[:, 1]
    order = np.argsort(heights)
    placed = np.clip(heights[order], 0, 1)
    for index in range(1, len(placed)):
        placed[index] = max(placed[index], placed[index - 1] + gap)
    placed -= max(0.0, placed[-1] - 1.0)
    result = np.empty(len(placed))
    result[order] = placed
    return result.tolist()


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
