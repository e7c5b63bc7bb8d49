"""The choice of a tree stream's coefficient, on items kept for it, and the picture of what each value gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.data.questions import chosen
from keel.evaluation.results import Arm, Comparison, Metric
from keel.experiment.selection import (
    RETAINED,
    SYNTAX,
    choose_coefficient,
    coefficient_pictures,
    tree_coefficients,
)
from keel.training import load_recipe
from keel.training.tree_sections import Adapters

GRID = {"none": 0.0, "l005": 0.05, "l010": 0.1, "l015": 0.15, "l020": 0.2}


def arm(label: str, right: float) -> Arm:
    def metric(mean: float) -> Metric:
        return Metric(values=[mean], mean=mean, ci95=(mean - 0.02, mean + 0.02), unit="share", higher_is_better=True)

    metrics = {SYNTAX: metric(right), **{name: metric(0.5) for name in RETAINED}}
    return Arm(
        label=label, params_total=1, params_trainable=1, train_tokens_per_s=1.0, peak_memory_bytes=1, metrics=metrics
    )


def difference(metric: str, one: str, baseline: str, low: float, high: float) -> Comparison:
    return Comparison(metric=metric, arm=one, baseline=baseline, difference=(low + high) / 2, ci95=(low, high), p=0.01)


ARMS = {name: arm(name, right) for name, right in zip(GRID, (0.60, 0.61, 0.66, 0.64, 0.70), strict=True)}


def test_the_grid_of_the_recipe_is_found_and_no_other_is() -> None:
    assert tree_coefficients(load_recipe("gtca/coefficient", "small")) == GRID
    assert tree_coefficients(load_recipe("gtca/main", "small")) == {}
    assert tree_coefficients(load_recipe("s_former/dyck", "small")) == {}


def test_the_best_value_is_chosen_among_those_that_lose_nothing() -> None:
    choice = choose_coefficient(GRID, ARMS, [])
    assert choice is not None and choice.arm == "l020" and choice.losing == {}
    lost = [
        difference("mmlu.accuracy", "l020", "none", -0.09, -0.01),
        difference("mmlu.accuracy", "l010", "none", -0.09, 0.01),  # not decided
        difference("cola.mcc", "l010", "none", -0.09, -0.01),  # no benchmark of general ability
        difference("mmlu.accuracy", "l010", "l005", -0.09, -0.01),  # against another value
    ]
    choice = choose_coefficient(GRID, ARMS, lost)
    assert choice is not None and choice.arm == "l010" and choice.losing == {"l020": ["mmlu"]}
    # The same loss said the other way round.
    turned = difference("winogrande.accuracy", "none", "l010", 0.01, 0.09)
    choice = choose_coefficient(GRID, ARMS, [*lost, turned])
    assert choice is not None and choice.arm == "l015" and choice.losing["l010"] == ["winogrande"]
    everything = [difference("mmlu.accuracy", name, "none", -0.09, -0.01) for name in GRID if name != "none"]
    choice = choose_coefficient(GRID, ARMS, everything)
    assert choice is not None and choice.arm == "none"


def test_without_the_arm_at_zero_nothing_is_chosen() -> None:
    without = {name: one for name, one in ARMS.items() if name != "none"}
    assert choose_coefficient(GRID, without, []) is None
    assert choose_coefficient(GRID, {"none": ARMS["none"]}, []) is None


def test_the_choice_is_drawn_and_said(tmp_path: Path) -> None:
    recipe = load_recipe("gtca/coefficient", "small")
    lost = [difference("mmlu.accuracy", "l020", "none", -0.09, -0.01)]
    (found,) = coefficient_pictures(recipe, ARMS, lost, tmp_path)
    assert (
        "Chosen: 0.1, with the most minimal pairs right of the values that lose nothing" in found.caption
        and "0.2 loses in mmlu" in found.caption
    )
    drawn = (tmp_path / "figures" / "trees.coefficients.svg").read_text(encoding="utf-8")
    assert (tmp_path / found.file).is_file() and ">0.15<" in drawn and "HellaSwag" in drawn and "CoLA" not in drawn
    assert coefficient_pictures(load_recipe("gtca/main", "small"), ARMS, lost, tmp_path) == []


@pytest.mark.parametrize(("count", "taken"), [(3, 4), (None, 4), (50, 4), (3, 50)])
def test_items_to_choose_by_are_not_those_that_are_reported(count: int | None, taken: int) -> None:
    items = [f"item {n}" for n in range(20)]
    reported = chosen(items, taken, 0)
    kept = chosen(items, count, 0, disjoint_from=taken)
    assert not set(kept) & set(reported) and kept == sorted(kept, key=items.index)
    assert len(kept) == min(len(items) - len(reported), len(items) if count is None else count)


def test_arms_that_differ_in_more_are_no_grid() -> None:
    recipe = load_recipe("gtca/coefficient", "small")
    changed = recipe.arms["l020"].model_copy(update={"streams": {"tree": {"coefficient": 0.2, "gate": "none"}}})
    assert tree_coefficients(recipe.model_copy(update={"arms": {**recipe.arms, "l020": changed}})) == {}
    for other in (
        recipe.arms["none"].model_copy(update={"phases": None}),
        recipe.arms["none"].model_copy(
            update={"phases": [recipe.arms["none"].phases[0].model_copy(update={"steps": 9})]}
        ),  # type: ignore[index]
        recipe.arms["none"].model_copy(update={"adapters": Adapters(rank=2)}),
    ):
        found = tree_coefficients(recipe.model_copy(update={"arms": {**recipe.arms, "none": other}}))
        assert found == (GRID if other.phases is None else {})
