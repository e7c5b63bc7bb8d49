"""Pictures of a run that are no table of metrics: attention beside the matrix that it was trained to be, gates along a word.

They are drawn for the first seed of a recipe and lie in the run's folder, where its results file names them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from keel.drawing import Canvas, Drawing, render
from keel.evaluation.results import Picture
from keel.evaluation.selective import COVERAGES
from keel.experiment.encoder_pictures import encoder_pictures
from keel.experiment.time_lines import draw_time_lines
from keel.experiment.token_picture import draw_tokens
from keel.probes.output import Line, line_figure, share_figure
from keel.training import Recipe

ATTENTION_FILE = "attention.json"
SUPPORT_FILE = "support.json"
RISK_FILE = "risk.json"
SIGNALS_FILE = "signals.json"
GATES_PREFIX = "gates"
_PREFIX = "attention"
_COLOUR = (0.16, 0.50, 0.75)  # it reads on light and on dark paper, which a raster cannot follow
_GAP = 3

Matrix = NDArray[np.float64]


def pictures(recipe: Recipe, arms: Sequence[str], out: Path) -> list[Picture]:
    """Draw and list the pictures of the arms that are finished."""
    seed = recipe.seeds[0]
    folders = {arm: out / arm / f"seed{seed}" for arm in arms}
    return [
        *_heat_maps(recipe, folders, out, seed),
        *_gates(recipe, folders, out, seed),
        *_support(recipe, folders, out, seed),
        *_risk(recipe, folders, out, seed),
        *_signals(recipe, folders, out, seed),
        *encoder_pictures(recipe, folders, out, seed),
    ]


def _heat_maps(recipe: Recipe, folders: Mapping[str, Path], out: Path, seed: int) -> list[Picture]:
    found = {arm: folder / ATTENTION_FILE for arm, folder in folders.items() if (folder / ATTENTION_FILE).is_file()}
    if not found:
        return []
    read = {arm: json.loads(path.read_text(encoding="utf-8")) for arm, path in found.items()}
    panels = {"P*": np.array(next(iter(read.values()))["target"])}
    panels |= {recipe.label_of(arm): np.array(values["estimate"]) for arm, values in read.items()}
    drawing = draw_heat_maps(panels, seed)
    drawing.write(out / "figures", _PREFIX)
    return [Picture(file=f"figures/{_PREFIX}.{drawing.name}.png", title=drawing.title, caption=drawing.caption)]


def draw_heat_maps(panels: Mapping[str, Matrix], seed: int) -> Drawing:
    """Draw square matrices of one size beside one another, darker for more; the first is what the others should be."""
    size = len(next(iter(panels.values())))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    most = max(float(matrix.max()) for matrix in panels.values())

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        for index, (label, matrix) in enumerate(panels.items()):
            left, top = index % columns * (size + _GAP), index // columns * (size + 3 * _GAP)
            image = np.empty((*matrix.shape, 4))
            image[..., :3], image[..., 3] = _COLOUR, np.clip(matrix / most, 0, 1)
            axes.imshow(image, extent=(left, left + size, top + size, top), interpolation="nearest", zorder=2)
            frame = Rectangle(
                (left, top), size, size, edgecolor=canvas.palette["rule"], facecolor="none", linewidth=0.6
            )
            axes.add_patch(frame).set_zorder(3)
            font_size = canvas.font_size - (2.5 if canvas.narrow else 0)
            axes.text(left, top - 0.5, label, fontsize=font_size, color=canvas.palette["ink"], va="bottom")
        axes.set_xlim(-1, columns * (size + _GAP))
        axes.set_ylim(rows * (size + 3 * _GAP), -2 * _GAP)
        canvas.bare()

    title = "Attention of every query beside the transition matrix"
    caption = (
        f"Rows are queries, columns the states attended to; darker is more, on one scale up to {most:.2f}. First the matrix P*, then "
        f"what each arm attends to, mean over heads, seed {seed} (S-Former Fig. 1)."
    )
    return render(
        paint,
        heights=(0.3 + 2.3 * rows, 0.3 + 1.2 * rows),
        label_width=0,
        labels_left=False,
        name="matrices",
        title=title,
        caption=caption,
        alt=f"{title}. {caption}",
        prefix=_PREFIX,
        legend=[],
    )


def _support(recipe: Recipe, folders: Mapping[str, Path], out: Path, seed: int) -> list[Picture]:
    """Draw the share of the barrier in the heaviest tokens, of each learned prior and of a fresh one (support tokens, Fig. 7.6), and
    a text with each learned prior's barriers.
    """
    found = {arm: folder / SUPPORT_FILE for arm, folder in folders.items() if (folder / SUPPORT_FILE).is_file()}
    read = {arm: json.loads(path.read_text(encoding="utf-8")) for arm, path in found.items()}
    curves = {arm: kept["curves"] for arm, kept in read.items()}
    texts = {arm: kept["text"] for arm, kept in read.items() if "text" in kept}
    learned = {recipe.label_of(arm): curve["learned"] for arm, curve in curves.items() if "learned" in curve}
    if not learned:
        return []
    fresh = next(curve["random"] for curve in curves.values() if "learned" in curve)
    caption = f"Mean over windows, the heaviest token first, seed {seed}; the fresh prior reads the embeddings of the first of these arms."
    drawing = share_figure({**learned, "Fresh prior": fresh}, caption)
    drawing.write(out / "figures", "support")
    pictures = [Picture(file="figures/support.curves.png", title=drawing.title, caption=drawing.caption)]
    for arm, text in texts.items():
        drawing = draw_tokens(text["pieces"], text["barriers"], arm, recipe.label_of(arm), seed)
        drawing.write(out / "figures", "tokens")
        pictures.append(Picture(file=f"figures/tokens.{arm}.png", title=drawing.title, caption=drawing.caption))
    return pictures


def _risk(recipe: Recipe, folders: Mapping[str, Path], out: Path, seed: int) -> list[Picture]:
    """Draw risk over coverage, by score, of the first arm with a margin prior: does its barrier know more than the others?"""
    read = {
        arm: json.loads((folder / RISK_FILE).read_text(encoding="utf-8"))
        for arm, folder in folders.items()
        if (folder / RISK_FILE).is_file()
    }
    arm = next((arm for arm, sets in read.items() if any("barrier" in curves for curves in sets.values())), None)
    found = []
    for what, curves in ({} if arm is None else read[arm]).items():
        x = [100 * coverage for coverage in COVERAGES]
        lines = [Line(label=score.replace("_", " "), x=x, y=curve) for score, curve in curves.items()]
        drawing = line_figure(
            lines, name=f"risk-{what.replace(' ', '-')}", title=f"Errors among the surest {what}: {recipe.label_of(str(arm))}",
            caption=f"The error rate of the predictions that a score calls surest, by their share; lower is better. Seed {seed}.",
            x_label="share of predictions that are given (%)", y_label="error rate", ticks=[5, 20, 40, 60, 80, 100],
        )  # fmt: skip
        drawing.write(out / "figures", "selective")
        found.append(
            Picture(file=f"figures/selective.{drawing.name}.png", title=drawing.title, caption=drawing.caption)
        )
    return found


def _signals(recipe: Recipe, folders: Mapping[str, Path], out: Path, seed: int) -> list[Picture]:
    """Draw the signals of a path along a text that random tokens interrupt (DTA §11.6), one picture an arm."""
    found = []
    for arm, folder in folders.items():
        path = folder / SIGNALS_FILE
        if path.is_file():
            given = json.loads(path.read_text(encoding="utf-8"))
            drawing = draw_time_lines(given["signals"], given["stages"], arm, recipe.label_of(arm), seed)
            drawing.write(out / "figures", "signals")
            found.append(
                Picture(file=f"figures/signals.{drawing.name}.png", title=drawing.title, caption=drawing.caption)
            )
    return found


def _gates(recipe: Recipe, folders: Mapping[str, Path], out: Path, seed: int) -> list[Picture]:
    found = []
    for arm, folder in folders.items():
        path = folder / f"{GATES_PREFIX}.case.png"
        if path.is_file():
            found.append(
                Picture(
                    file=path.relative_to(out).as_posix(),
                    title=f"Gate and bracket depth along one word: {recipe.label_of(arm)}",
                    caption=f"The mean over sites (solid) and the depth (broken), each on its own axis, seed {seed} (S-Former Fig. 2).",
                )
            )
    return found
