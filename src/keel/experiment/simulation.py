"""Run a recipe that trains nothing: seconds, so there is nothing to resume, and its file is that of any other run."""

from __future__ import annotations

import datetime
import platform
import time
from pathlib import Path

import numpy as np

from keel.drawing import Canvas, Drawing, Painter, render
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric
from keel.evaluation.results import Arm, Picture, Provenance, Reference, Results, write_results
from keel.evaluation.scalar_prior import conditional_density, density_grid, scalar_metrics, scalar_paths
from keel.evaluation.statistics import Array
from keel.experiment.collect import Statistics, git_commit, package_versions
from keel.experiment.measure import Evaluation, Measurement
from keel.files import write_atomically
from keel.training.recipe import Simulation, load_any

_DRAWN = 1000  # dots of a population that a figure shows


def run_simulation(simulation: Simulation, out: Path, *, resume: bool = False) -> Results:
    """Draw, measure, and write ``OUT/results.json``, ``OUT/recipe.yaml`` and the figures; return the results.

    Raises: KeelError for a folder that holds a run, unless ``resume`` is given and it is this one.
    """
    started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    path = out / "recipe.yaml"
    if path.is_file() and not (resume and load_any(path) == simulation):
        raise KeelError(f"{out} already holds a run; choose another folder with --out")
    write_atomically(path, simulation.to_yaml().encode())
    statistics = Statistics({name: _evaluations(simulation, name) for name in simulation.scalar_prior.couplings})
    arms = {
        name: Arm(
            label=coupling.label, params_total=0, params_trainable=0, train_tokens_per_s=None, peak_memory_bytes=None,
            metrics=statistics.metrics(name, simulation.seeds),
        )
        for name, coupling in simulation.scalar_prior.couplings.items()
    }  # fmt: skip
    drawings = [_densities(simulation), _factors(simulation), _population(simulation)]
    for drawing in drawings:
        drawing.write(out / "figures", "scalar")
    reference = simulation.reference
    results = Results(
        recipe=simulation.name,
        scale=simulation.scale,
        title=simulation.title,
        provenance=Provenance(
            git=git_commit(), versions=package_versions(), device=platform.machine(), seeds=simulation.seeds,
            started=started, wall_s=time.monotonic() - clock,
        ),
        arms=arms,
        reference=None if reference is None else Reference(**reference.model_dump()),
        figures=[Picture(file=f"figures/scalar.{d.name}.png", title=d.title, caption=d.caption) for d in drawings],
    )  # fmt: skip
    write_results(results, out / "results.json")
    return results


def _evaluations(simulation: Simulation, name: str) -> dict[int, Evaluation]:
    prior = simulation.scalar_prior

    def metrics(seed: int) -> dict[str, ItemMetric]:
        found = scalar_metrics(
            prior.couplings[name].value, sequences=prior.sequences, length=prior.length, spreads=prior.spreads,
            past=prior.past, seed=seed,
        )  # fmt: skip
        return {metric.name: metric for metric in found}

    return {
        seed: Evaluation(
            measurements={"scalar_prior": Measurement(asked=prior.model_dump(mode="json"), metrics=metrics(seed))},
            seconds=0.0,
        )
        for seed in simulation.seeds
    }


def _densities(simulation: Simulation) -> Drawing:
    """Fig. 3.2: the conditional density of a token's embedding."""
    grid_G, past = density_grid(), simulation.scalar_prior.past
    curves = {
        coupling.label: conditional_density(grid_G, past, coupling.value)[0]
        for coupling in simulation.scalar_prior.couplings.values()
    }
    title = f"Density of an embedding after {', '.join(f'{value:g}' for value in past)}"
    return _lines("densities", title, grid_G, curves, ("embedding", "density"), "Support tokens, Fig. 3.2.")


def _factors(simulation: Simulation) -> Drawing:
    """Fig. 3.2: the factor of the change of variables."""
    grid_G, past = density_grid(), simulation.scalar_prior.past
    curves = {
        coupling.label: conditional_density(grid_G, past, coupling.value)[1]
        for coupling in simulation.scalar_prior.couplings.values()
    }
    caption = (
        "1 − w Var at each embedding (support tokens, Eq. 8); below 1 it thins the density out, above 1 it adds to it."
    )
    return _lines("factors", "The factor of the change of variables", grid_G, curves, ("embedding", "factor"), caption)


def _population(simulation: Simulation) -> Drawing:
    """Fig. 3.3: log-density over the variance of random sequences; a sequence beyond the boundary has none."""
    prior, seed = simulation.scalar_prior, simulation.seeds[0]
    normal_NT = np.random.default_rng(seed).standard_normal((prior.sequences, prior.length))
    dots: dict[str, tuple[Array, Array]] = {}
    for coupling in prior.couplings.values():
        paths = scalar_paths(prior.spreads[0] * normal_NT, coupling.value)
        shown = np.flatnonzero(paths.valid_N)[:_DRAWN]
        dots[coupling.label] = paths.variance_NT.max(1)[shown], paths.log_density_N[shown]

    def paint(canvas: Canvas) -> None:
        for index, (label, (x, y)) in enumerate(dots.items()):
            colour = canvas.palette[f"series-{index % 8}"]
            canvas.axes.plot(x, y, linestyle="", marker="o", markersize=2.0, alpha=0.45, color=colour, label=label)
        canvas.axes.set_xlabel("largest attention-weighted variance of a sequence")
        canvas.axes.set_ylabel("log-density (nats)")
        _key(canvas)

    title = "Log-density of random sequences over their variance"
    caption = (
        f"The first {_DRAWN:,} valid of {prior.sequences:,} sequences of {prior.length} embeddings with standard deviation "
        f"{prior.spreads[0]:g}, seed {seed}; sequences with a margin of 0 or less are left out (support tokens, Fig. 3.3)."
    )
    return _render(paint, "population", title, caption, list(dots))


def _lines(
    name: str, title: str, x_G: Array, curves: dict[str, Array], axes_labels: tuple[str, str], caption: str
) -> Drawing:
    def paint(canvas: Canvas) -> None:
        for index, (label, y_G) in enumerate(curves.items()):
            canvas.axes.plot(x_G, y_G, color=canvas.palette[f"series-{index % 8}"], linewidth=1.7, label=label)
        canvas.axes.set_xlabel(axes_labels[0])
        canvas.axes.set_ylabel(axes_labels[1])
        _key(canvas)

    return _render(paint, name, title, caption, list(curves))


def _key(canvas: Canvas) -> None:
    key = canvas.axes.legend(
        frameon=False, fontsize=canvas.font_size - 1, loc="upper right", handlelength=1.2, markerscale=2
    )
    for text in key.get_texts():
        text.set_color(canvas.palette["ink"])


def _render(paint: Painter, name: str, title: str, caption: str, labels: list[str]) -> Drawing:
    return render(
        paint,
        heights=(3.8, 4.0), label_width=0, labels_left=False, name=name, title=title, caption=caption,
        alt=f"{title}. {caption}", prefix="scalar", legend=[(label, label, "") for label in labels],
    )  # fmt: skip
