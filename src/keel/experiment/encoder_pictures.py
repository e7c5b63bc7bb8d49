"""Pictures of encoders: heads on the simplex, attention by component, positions across the blocks, position tables (DSTG Figs. 2-4, 6, 9).

They are drawn from what ``encoder_views`` kept of the first seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from keel.drawing import Canvas, Drawing, render
from keel.evaluation.results import Picture
from keel.experiment.encoder_views import HEADS_FILE, TABLE_FILE, TRAJECTORIES_FILE
from keel.probes.output import Line, line_figure
from keel.training import Recipe

_PREFIX = "encoder"
_INK = (0.16, 0.50, 0.75)  # it reads on light and on dark paper, which a raster cannot follow
_CORNERS = {"semantic": (0.0, 0.0), "ap": (1.0, 0.0), "rp": (0.5, math.sqrt(3) / 2)}
_NAMES = {"semantic": "semantic", "ap": "absolute position", "rp": "relative position", "all": "all together"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_GAP = 0.25

Points = NDArray[np.float64]


def encoder_pictures(recipe: Recipe, folders: Mapping[str, Path], out: Path, seed: int) -> list[Picture]:
    """Draw and list the pictures of the encoders whose units are in ``folders``, by arm."""
    heads, tables, paths = (_read(folders, name) for name in (HEADS_FILE, TABLE_FILE, TRAJECTORIES_FILE))
    labels = {arm: recipe.label_of(arm) for arm in folders}
    drawings = []
    simplex = {labels[arm]: found for arm, found in heads.items() if set(found["components"]) == set(_CORNERS)}
    if simplex:
        drawings.append(draw_simplex(simplex, seed))
    drawings += [draw_maps(found, arm, labels[arm], seed) for arm, found in heads.items()]
    drawings += [draw_trajectories(found, arm, labels[arm], seed) for arm, found in paths.items()]
    if tables:
        drawings += draw_tables(_named(tables, labels), seed)
    for drawing in drawings:
        drawing.write(out / "figures", _PREFIX)
    return [
        Picture(file=f"figures/{_PREFIX}.{drawing.name}.png", title=drawing.title, caption=drawing.caption)
        for drawing in drawings
    ]


def _read(folders: Mapping[str, Path], name: str) -> dict[str, Any]:
    return {
        arm: json.loads((folder / name).read_text(encoding="utf-8"))
        for arm, folder in folders.items()
        if (folder / name).is_file()
    }


def _named(tables: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Tables by what people call them; that of a checkpoint, which every arm keeps, once."""
    own = {labels[arm]: found[""] for arm, found in tables.items()}
    return own | {name: shape for found in tables.values() for name, shape in found.items() if name}


def draw_simplex(arms: Mapping[str, Any], seed: int) -> Drawing:
    """Draw every head by the shares of its three components; a mark a block (DSTG Fig. 2)."""

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        for index, (label, found) in enumerate(arms.items()):
            left = index * (1 + _GAP)
            corners = {name: (left + x, y) for name, (x, y) in _CORNERS.items()}
            ring = [*corners.values(), next(iter(corners.values()))]
            axes.plot(*zip(*ring, strict=True), color=canvas.palette["muted"], linewidth=0.8, zorder=1)
            for name, (x, y) in corners.items():
                below = name != "rp"
                axes.text(
                    x, y - 0.03 if below else y + 0.03, _NAMES[name], ha={"semantic": "left", "ap": "right"}.get(name, "center"),
                    va="top" if below else "bottom", fontsize=canvas.font_size - 1, color=canvas.palette["ink"],
                )  # fmt: skip
            axes.text(left, math.sqrt(3) / 2 + 0.1, label, fontsize=canvas.font_size, color=canvas.palette["ink"])
            order = [found["components"].index(name) for name in _CORNERS]
            middles = np.array(list(corners.values()))
            for block, shares in enumerate(np.array(found["shares"])):
                points = shares[:, order] @ middles
                colours = [canvas.palette[f"series-{found['groups'][block][head]}"] for head in range(len(points))]
                marker = _MARKERS[block % len(_MARKERS)]
                axes.scatter(points[:, 0], points[:, 1], c=colours, marker=marker, s=22, alpha=0.85, zorder=3)
        canvas.bare()
        axes.set_xlim(-0.1, len(arms) * (1 + _GAP))
        axes.set_ylim(-0.12, math.sqrt(3) / 2 + 0.2)

    counts = "; ".join(
        f"{label}: "
        + ", ".join(
            f"{int((np.array(found['groups']) == index).sum())} {_NAMES[name]}"
            for index, name in enumerate(found["components"])
        )
        for label, found in arms.items()
    )
    caption = (
        "Each mark is a head, nearer to a corner the more its attention changes (KL divergence, as a share) when that component is "
        f"taken away; a shape a block, a colour a group of k-means. {counts}, seed {seed} (DSTG Fig. 2)."
    )
    return _drawing(paint, (3.4, 2.2), "heads", "What the heads listen to", caption)


def draw_maps(found: Mapping[str, Any], arm: str, label: str, seed: int) -> Drawing:
    """Draw what each component alone would attend to, for a few heads of one arm (DSTG Fig. 3)."""
    names = [*found["components"], "all"]

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        for row, name in enumerate(names):
            for column, (maps, (block, head)) in enumerate(zip(found["maps"], found["heads"], strict=True)):
                matrix = np.sqrt(np.array(maps[name]))  # a root: most of attention is small
                left, top = column * (1 + _GAP), row * (1 + _GAP)
                image = np.empty((*matrix.shape, 4))
                image[..., :3], image[..., 3] = _INK, matrix / max(1e-9, matrix.max())
                axes.imshow(image, extent=(left, left + 1, top + 1, top), interpolation="nearest", zorder=2)
                frame = Rectangle((left, top), 1, 1, edgecolor=canvas.palette["rule"], facecolor="none", linewidth=0.6)
                axes.add_patch(frame).set_zorder(3)
                what = f"block {block}, head {head}: {_NAMES[name]}"
                size = canvas.font_size - (3.5 if canvas.narrow else 2)
                axes.text(left, top - 0.04, what, fontsize=size, color=canvas.palette["ink"], va="bottom")
        canvas.bare()
        axes.set_xlim(-0.05, len(found["heads"]) * (1 + _GAP))
        axes.set_ylim(len(names) * (1 + _GAP), -_GAP)

    caption = (
        "Rows of a map are queries, columns keys of the first text of the test split; darker is more, by its root, each map on its own "
        "scale. Each component stands alone in its softmax; the last row is the attention itself. The heads with the largest semantic "
        f"share, then the largest positional share, seed {seed} (DSTG Fig. 3)."
    )
    height = 1.9 * len(names)
    return _drawing(paint, (height, height / 2), f"maps.{arm}", f"Attention of each component: {label}", caption)


def draw_trajectories(found: Mapping[str, Any], arm: str, label: str, seed: int) -> Drawing:
    """Draw the absolute-position states of a text's tokens, block by block, a colour a sentence (DSTG Fig. 4)."""
    points, segments = np.array(found["points"]), np.array(found["segments"])
    columns = min(3, len(points))

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        for panel, (each, share) in enumerate(zip(points, found["shares"], strict=True)):
            left, top = panel % columns * (1 + _GAP), -(panel // columns) * (1 + _GAP)
            low, high = each.min(axis=0), each.max(axis=0)
            placed = (each - low) / np.maximum(high - low, 1e-12) * 0.96 + 0.02 + (left, top)
            axes.plot(placed[:, 0], placed[:, 1], color=canvas.palette["rule"], linewidth=0.7, zorder=1)
            colours = [canvas.palette[f"series-{segment % 8}"] for segment in segments]
            axes.scatter(placed[:, 0], placed[:, 1], c=colours, s=5, zorder=3)
            what = "table" if panel == 0 else f"after block {panel - 1}"
            size = canvas.font_size - (2 if canvas.narrow else 1)
            axes.text(left, top + 1.03, f"{what} ({share:.0%})", fontsize=size, color=canvas.palette["ink"])
        canvas.bare()

    caption = (
        "A dot a token of the first text of the test split, in the two principal components of that block's absolute-position states "
        f"(their share of the variance in brackets); a colour a sentence, a line through neighbours, seed {seed} (DSTG Fig. 4)."
    )
    rows = -(-len(points) // columns)
    return _drawing(
        paint,
        (2.5 * rows, 1.4 * rows),
        f"trajectories.{arm}",
        f"Absolute positions across the blocks: {label}",
        caption,
    )


def draw_tables(tables: Mapping[str, Any], seed: int) -> list[Drawing]:
    """Draw the variance of position tables by principal components, and the first of these (DSTG Figs. 6 and 9)."""
    most = min(10, *(len(shape["cumulative"]) for shape in tables.values()))
    lines = [
        Line(label=label, x=[float(index + 1) for index in range(most)], y=shape["cumulative"][:most])
        for label, shape in tables.items()
    ]
    variance = line_figure(
        lines,
        name="table_variance",
        title="Variance of the position table in its first components",
        caption=f"Share of the variance of the rows, seed {seed} (DSTG Fig. 6).",
        x_label="principal components",
        y_label="share",
    )
    return [variance, _draw_components(tables, seed)]


def _draw_components(tables: Mapping[str, Any], seed: int) -> Drawing:
    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        for row, (label, shape) in enumerate(tables.items()):
            top = -row * (1 + _GAP)
            for index, component in enumerate(shape["components"][:2]):
                wave = np.array(component)
                x = np.linspace(0, 1, len(wave))
                y = top + 0.5 + 0.48 * wave / np.abs(wave).max()
                axes.plot(x, y, color=canvas.palette[f"series-{index}"], linewidth=1.0, zorder=3)
                power = np.array(shape["power"][index])
                at = 1.1 + 0.025 * (np.arange(len(power)) + 0.45 * index)
                axes.bar(at, power, width=0.011, bottom=top, color=canvas.palette[f"series-{index}"], zorder=3)
            share = shape["cumulative"][1]
            size = canvas.font_size - (2 if canvas.narrow else 0)
            axes.text(0, top + 1.04, f"{label} ({share:.1%})", fontsize=size, color=canvas.palette["ink"])
        canvas.bare(equal=False)
        axes.set_ylim(-(len(tables) - 1) * (1 + _GAP) - 0.05, 1.3)

    caption = (
        "Left, the first two principal components of the table along the positions, each on its own scale; in brackets the share of "
        "variance in both. Right, the share of their power in the first 16 bins of the DCT-II, of which bin 0 is empty, "
        f"seed {seed} (DSTG §4 (1), Fig. 9)."
    )
    rows = len(tables)
    return _drawing(paint, (1.3 * rows, 1.0 * rows), "table_components", "Components of the position table", caption)


def _drawing(paint: Any, heights: tuple[float, float], name: str, title: str, caption: str) -> Drawing:
    return render(
        paint, heights=(heights[0] + 0.4, heights[1] + 0.4), label_width=0, labels_left=False, name=name, title=title,
        caption=caption, alt=f"{title}. {caption}", prefix=_PREFIX, legend=[],
    )  # fmt: skip
