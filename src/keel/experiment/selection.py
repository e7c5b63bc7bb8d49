"""What each value of a setting gives: a panel a quantity, and the choice of a tree stream's coefficient (GTCA App. C).

The paper chooses lambda by "a retention-aware criterion" that it does not print. Ours: among the values that lose decidedly in none
of the benchmarks of general ability, against the same adapters trained for as many steps without trees, the one with the most minimal
pairs right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from keel.drawing import Canvas, Drawing, render
from keel.evaluation.results import Arm, Comparison, Picture
from keel.streams import TreeStream
from keel.training import Recipe

SYNTAX = "blimp.overall"
RETAINED = ("mmlu.accuracy", "hellaswag.accuracy", "winogrande.accuracy")
_SHOWN = {
    SYNTAX: "minimal pairs right (BLiMP)",
    "cola.mcc": "CoLA, Matthews' correlation",
    "mmlu.accuracy": "MMLU, accuracy",
    "hellaswag.accuracy": "HellaSwag, accuracy",
    "winogrande.accuracy": "WinoGrande, accuracy",
    "cloze.accuracy": "gaps in text, accuracy",
}


class Spread(NamedTuple):
    """A value between the ends of its interval."""

    low: float
    middle: float
    high: float


def tree_coefficients(recipe: Recipe) -> dict[str, float]:
    """Return the arms that differ in the coefficient of their tree stream alone, by ascending coefficient.

    An arm with the same host and adapters, as many steps and no stream at all is there at 0. Fewer than two values are no grid.
    """
    found: dict[str, float] = {}
    kinds, common = set(), set()
    for name, arm in recipe.arms.items():
        streams = list(arm.stream_configs().values())
        if arm.host_of is None or arm.adapters is None or len(streams) > 1:
            continue
        if streams and (streams[0]["type"] != TreeStream.type_name or "coefficient" not in streams[0]):
            continue
        found[name] = float(streams[0]["coefficient"]) if streams else 0.0
        phases = recipe.phases_of(name)
        common.add(str((arm.host_of, arm.adapters, sum(phase.steps for phase in phases))))
        if streams:
            kinds.add(str(({**streams[0], "coefficient": None}, arm.trees, phases)))
    alike = len(kinds) == len(common) == 1 and len(set(found.values())) == len(found)
    return dict(sorted(found.items(), key=lambda pair: pair[1])) if alike and len(found) > 1 else {}


class Choice(NamedTuple):
    """The arm that is chosen, and those that lose something decidedly, with what that is."""

    arm: str
    losing: dict[str, list[str]]


def choose_coefficient(
    coefficients: Mapping[str, float], arms: Mapping[str, Arm], comparisons: Sequence[Comparison]
) -> Choice | None:
    """Apply the criterion of this module; the arm at 0 is what is held against, and can be chosen too.

    Returns: None while there is no other arm beside the one at 0, or no minimal pairs.
    """
    bare = next((arm for arm, value in coefficients.items() if value == 0 and arm in arms), None)
    there = [arm for arm in coefficients if arm in arms and arms[arm].metrics.get(SYNTAX) is not None]
    if bare is None or bare not in there or len(there) < 2:
        return None
    losing: dict[str, list[str]] = {}
    for one in comparisons:
        if one.metric not in RETAINED or one.ci95 is None or bare not in (one.arm, one.baseline):
            continue
        other = one.arm if one.baseline == bare else one.baseline
        # The difference is arm - baseline; of the other against the bare one its sign may have to be turned.
        most = one.ci95[1] if one.baseline == bare else -one.ci95[0]
        if other in there and most < 0:
            losing.setdefault(other, []).append(one.metric.removesuffix(".accuracy"))
    kept = [arm for arm in there if arm not in losing]
    best = max(kept, key=lambda arm: arms[arm].metrics[SYNTAX].mean or 0.0)
    return Choice(best, losing)


def coefficient_pictures(
    recipe: Recipe, arms: Mapping[str, Arm], comparisons: Sequence[Comparison], out: Path
) -> list[Picture]:
    """Draw what each coefficient of a tree stream gives, into ``OUT/figures``, and say which one is chosen (GTCA Table 8)."""
    coefficients = {arm: value for arm, value in tree_coefficients(recipe).items() if arm in arms}
    choice = choose_coefficient(coefficients, arms, comparisons)
    if choice is None:
        return []
    panels = {
        words: {value: _interval(arms[arm], metric) for arm, value in coefficients.items()}
        for metric, words in _SHOWN.items()
        if any(metric in arms[arm].metrics for arm in coefficients)
    }
    caption = (
        "Means and 95 % intervals on items that are kept for choosing; 0 is adapters alone, trained for as many steps. "
        f"{_said(choice, coefficients)} GTCA App. C, Table 8."
    )
    title = "What each coefficient of the tree stream gives"
    drawing = draw_selection(panels, name="coefficients", title=title, caption=caption, prefix="trees")
    drawing.write(out / "figures", "trees")
    return [Picture(file=f"figures/trees.{drawing.name}.png", title=drawing.title, caption=drawing.caption)]


def _said(choice: Choice, coefficients: Mapping[str, float]) -> str:
    lost = "; ".join(f"{coefficients[arm]:g} loses in {', '.join(metrics)}" for arm, metrics in choice.losing.items())
    kept = " that lose nothing in general ability" if lost else ", none of which loses in general ability"
    chosen = f"Chosen: {coefficients[choice.arm]:g}, with the most minimal pairs right of the values{kept}"
    return f"{chosen} ({lost})." if lost else f"{chosen}."


def _interval(arm: Arm, metric: str) -> Spread | None:
    found = arm.metrics.get(metric)
    if found is None or found.mean is None or found.ci95 is None:
        return None
    return Spread(found.ci95[0], found.mean, found.ci95[1])


def draw_selection(
    panels: Mapping[str, Mapping[float, Spread | None]], *, name: str, title: str, caption: str, prefix: str
) -> Drawing:
    """Draw one panel a quantity, each over the same values of a setting."""

    def paint(canvas: Canvas) -> None:
        canvas.axes.set_axis_off()
        columns = 1 if canvas.narrow else 2
        rows = -(-len(panels) // columns)
        for index, (words, values) in enumerate(panels.items()):
            column, row = index % columns, index // columns
            place = (column / columns, 1 - (row + 0.86) / rows, 0.86 / columns, 0.62 / rows)
            _panel(canvas, canvas.axes.inset_axes(place), values, words)

    return render(
        paint,
        heights=(2.7 * -(-len(panels) // 2), 2.1 * len(panels)), label_width=0, labels_left=False, name=name, title=title,
        caption=caption, alt=f"{title}. {caption}", prefix=prefix, legend=[(words, words, "") for words in panels],
    )  # fmt: skip


def _panel(canvas: Canvas, panel: Axes, values: Mapping[float, Spread | None], words: str) -> None:
    there = {value: found for value, found in values.items() if found is not None}
    if there:
        spreads_3N = np.array(list(there.values())).T
        places = [list(values).index(value) for value in there]
        errors_2N = np.abs(spreads_3N[[0, 2]] - spreads_3N[1])
        panel.errorbar(
            places, spreads_3N[1], yerr=errors_2N, color=canvas.palette["series-0"], linewidth=1.5, marker="o",
            markersize=4, capsize=2.5,
        )  # fmt: skip
    panel.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    panel.set_xlim(-0.4, len(values) - 0.6)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_title(words, fontsize=canvas.font_size, color=canvas.palette["ink"], loc="left")
    panel.set_xlabel("λ", fontsize=canvas.font_size, color=canvas.palette["muted"], labelpad=0)
    panel.tick_params(colors=canvas.palette["muted"], labelsize=canvas.font_size - 0.5, length=2)
    panel.set_facecolor("none")
    panel.grid(visible=True, color=canvas.palette["rule"], linewidth=0.6)
    for side, spine in panel.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(canvas.palette["muted"])
