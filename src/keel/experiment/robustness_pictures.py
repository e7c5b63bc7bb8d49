"""Pictures of robustness: box plots over subsamples of windows, and what each weight of a margin prior gives (Figs. 7.4 to 7.7).

The boxes are the paper's summary: 100 random subsamples of 16 windows each, of every seed. They show how subsamples scatter; the
intervals of the tables are narrower, since they are of all windows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter

from keel.drawing import Canvas, Drawing, Painter, render
from keel.evaluation.results import Picture
from keel.evaluation.robustness import subsampled
from keel.evaluation.statistics import Array
from keel.experiment.measure import Evaluation
from keel.experiment.selection import Spread, draw_selection
from keel.streams import MarginPrior
from keel.training import Recipe

_CONDITION = re.compile(r"(?P<family>(?:noise|drift)\.ratio(?:_snr)?)@(?P<sigma>[\d.]+)")
_FAMILIES = {
    "noise.ratio": "Unstructured noise, σ absolute",
    "noise.ratio_snr": "Unstructured noise, σ in units of the embeddings",
    "drift.ratio": "Drift in one direction, σ absolute",
    "drift.ratio_snr": "Drift in one direction, σ in units of the embeddings",
}
_SELECTED = {
    "ppl": "clean perplexity",
    "noise.ratio": "perplexity under noise / clean",
    "contextual_embedding_error": "contextual embedding error",
    "support.effective_size": "effective support size",
}

Evaluations = Mapping[str, Mapping[int, Evaluation]]


def robustness_pictures(recipe: Recipe, evaluations: Evaluations, out: Path) -> list[Picture]:
    """Draw what there are measurements for, into ``OUT/figures``, and list it."""
    drawings = [_boxes(recipe, evaluations, family) for family in _FAMILIES]
    drawings.append(_selection(recipe, evaluations))
    found = []
    for drawing in drawings:
        if drawing is not None:
            drawing.write(out / "figures", "robustness")
            found.append(
                Picture(file=f"figures/robustness.{drawing.name}.png", title=drawing.title, caption=drawing.caption)
            )
    return found


def _values(by_seed: Mapping[int, Evaluation], metric: str) -> Array | None:
    """Return a metric over the subsamples of all seeds that have it."""
    found = [subsampled(e.metrics[metric]).values_K for e in by_seed.values() if metric in e.metrics]
    return np.concatenate(found) if found else None


def _sigmas(evaluations: Evaluations, family: str) -> list[str]:
    names = {name for by_seed in evaluations.values() for e in by_seed.values() for name in e.metrics}
    found = [match["sigma"] for name in names if (match := _CONDITION.fullmatch(name)) and match["family"] == family]
    return sorted(found, key=float)


def _boxes(recipe: Recipe, evaluations: Evaluations, family: str) -> Drawing | None:
    sigmas = _sigmas(evaluations, family)
    if not sigmas:
        return None
    arms = [arm for arm, found in evaluations.items() if _values(found, f"{family}@{sigmas[0]}") is not None]
    width = 0.84 / len(arms)

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        axes.set_yscale("log")
        for index, arm in enumerate(arms):
            colour = canvas.palette[f"series-{index % 8}"]
            groups = [_values(evaluations[arm], f"{family}@{sigma}") for sigma in sigmas]
            places = [place + (index - (len(arms) - 1) / 2) * width for place in range(len(sigmas))]
            parts = axes.boxplot(
                [group for group in groups if group is not None], positions=places, widths=width * 0.8,
                whis=(2.5, 97.5), showfliers=False, manage_ticks=False, patch_artist=True,
            )  # fmt: skip
            for line in (line for name in ("boxes", "whiskers", "caps", "medians") for line in parts[name]):
                line.set_color(colour)
                line.set_linewidth(1.0 if index < 8 else 0.6)
            for box in parts["boxes"]:
                box.set_facecolor("none")
            axes.plot([], [], color=colour, linewidth=2, label=recipe.label_of(arm))
        axes.set_xticks(range(len(sigmas)), [f"{float(sigma):g}" for sigma in sigmas])
        axes.set_xlabel("σ")
        axes.set_ylabel("perturbed / clean perplexity")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        _key(canvas)

    title = _FAMILIES[family]
    caption = (
        "Perturbed over clean perplexity of 100 subsamples of 16 windows, all seeds: median, quartiles, and whiskers from 2.5 to 97.5 % "
        "(support tokens, Figs. 7.4 and 7.5)."
    )
    return _render(paint, family.replace(".", "-"), title, caption, [recipe.label_of(arm) for arm in arms])


def _key(canvas: Canvas) -> None:
    key = canvas.axes.legend(frameon=False, fontsize=canvas.font_size - 1.5, loc="upper left", handlelength=1.0)
    for text in key.get_texts():
        text.set_color(canvas.palette["ink"])


def margin_weights(recipe: Recipe) -> dict[str, float]:
    """Return the arms that differ in the fixed weight of a free margin prior alone, cross-entropy alone at 0, by ascending weight."""
    found = {}
    for name, arm in recipe.arms.items():
        streams = list(arm.stream_configs().values())
        if arm.weights_of is not None or arm.phases is not None or len(streams) > 1:
            continue
        weight = streams[0].get("weight") if streams else 0.0
        free = not streams or (streams[0]["type"] == MarginPrior.type_name and "coupling" not in streams[0])
        if free and isinstance(weight, int | float):
            found[name] = float(weight)
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _selection(recipe: Recipe, evaluations: Evaluations) -> Drawing | None:
    """Fig. 7.7: four quantities over the weight of the prior."""
    weights = {arm: weight for arm, weight in margin_weights(recipe).items() if arm in evaluations}
    sigmas = _sigmas(evaluations, "noise.ratio")
    if len(weights) < 2 or not sigmas:
        return None
    panels = {}
    for name, words in _SELECTED.items():
        metric = name if name != "noise.ratio" else f"{name}@{sigmas[-1]}"
        panels[words] = {weight: _spread(_values(evaluations[arm], metric)) for arm, weight in weights.items()}
    caption = (
        f"Medians and 95 % intervals over 100 subsamples of 16 windows, all seeds, at noise of {sigmas[-1]}; 0 is cross-entropy alone, "
        "which has no prior of its own (support tokens, Fig. 7.7)."
    )
    title = "What each weight of the margin prior gives"
    return draw_selection(panels, name="weights", title=title, caption=caption, prefix="robustness")


def _spread(values: Array | None) -> Spread | None:
    return None if values is None else Spread(*map(float, np.quantile(values, [0.025, 0.5, 0.975])))


def _render(paint: Painter, name: str, title: str, caption: str, labels: list[str]) -> Drawing:
    return render(
        paint,
        heights=(4.6, 5.0), label_width=0, labels_left=False, name=name, title=title, caption=caption,
        alt=f"{title}. {caption}", prefix="robustness", legend=[(label, label, "") for label in labels],
    )  # fmt: skip
