"""Pictures of a run: heat maps show each matrix where it belongs, and only what was measured is listed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import matplotlib.image
import numpy as np

from keel.evaluation.items import ItemMetric
from keel.experiment.measure import Evaluation, Measurement
from keel.experiment.pictures import ATTENTION_FILE, SUPPORT_FILE, draw_heat_maps, pictures
from keel.experiment.robustness_pictures import margin_weights, robustness_pictures
from keel.training import Recipe
from keel.training.recipe import load_recipe


def _recipe() -> Recipe:
    return load_recipe("s_former/markov", "tiny")


def test_pictures_are_those_of_the_first_seed_of_the_arms_that_have_them(tmp_path: Path) -> None:
    assert pictures(_recipe(), ["rope", "nope"], tmp_path) == []
    matrices = {"target": np.eye(4).tolist(), "estimate": (np.ones((4, 4)) / 4).tolist()}
    for arm in ("rope", "fusion"):
        (tmp_path / arm / "seed0").mkdir(parents=True)
        (tmp_path / arm / "seed0" / ATTENTION_FILE).write_text(json.dumps(matrices))
    (tmp_path / "fusion" / "seed0" / "gates.case.png").write_bytes(b"")
    found = pictures(_recipe(), ["rope", "fusion", "nope"], tmp_path)
    assert [picture.file for picture in found] == ["figures/attention.matrices.png", "fusion/seed0/gates.case.png"]
    assert (tmp_path / found[0].file).is_file() and (tmp_path / "figures/attention.matrices.svg").is_file()
    assert "RoPE + fusion (GRU)" in found[1].title


def test_a_darker_cell_is_more_attention() -> None:
    def darkness(matrix: np.ndarray) -> float:
        drawing = draw_heat_maps({"P*": np.eye(4), "RoPE": matrix}, 0)
        image = matplotlib.image.imread(io.BytesIO(drawing.png), format="png")
        return float(1 - image[:, image.shape[1] // 3 : 2 * image.shape[1] // 3, 0].mean())

    assert darkness(np.ones((4, 4))) > darkness(np.full((4, 4), 0.5)) > darkness(np.zeros((4, 4))) + 0.005


def test_a_heat_map_names_its_panels() -> None:
    drawing = draw_heat_maps({"P*": np.eye(3), "one": np.eye(3), "two": np.eye(3), "three": np.eye(3)}, 2)
    assert all(
        f">{label}<" in drawing.wide and f">{label}<" in drawing.narrow for label in ("P*", "one", "two", "three")
    )
    assert "seed 2" in drawing.caption and "1.00" in drawing.caption


def test_the_barriers_share_is_drawn_for_learned_priors_beside_a_fresh_one(tmp_path: Path) -> None:
    recipe = load_recipe("support_tokens/robustness", "tiny")
    curves = {"random": np.linspace(1 / 32, 1, 32).tolist(), "learned": [0.9, *[1.0] * 31]}
    for arm, kept in (("ce", ["random"]), ("margin_005", ["random", "learned"])):
        (tmp_path / arm / "seed0").mkdir(parents=True)
        (tmp_path / arm / "seed0" / SUPPORT_FILE).write_text(
            json.dumps({"curves": {name: curves[name] for name in kept}})
        )
    assert pictures(recipe, ["ce"], tmp_path) == [], "an arm without a prior has no curve of its own"
    (found,) = pictures(recipe, ["ce", "margin_005"], tmp_path)
    drawn = (tmp_path / "figures" / "support.curves.svg").read_text(encoding="utf-8")
    assert (tmp_path / found.file).is_file() and "Fresh prior" in drawn and recipe.label_of("margin_005") in drawn


def evaluation(level: float, metrics: tuple[str, ...]) -> Evaluation:
    """Forty windows whose ratio is ``level`` in every metric."""
    items = {
        name: ItemMetric(
            name=name, unit="ratio", higher_is_better=False, numerators=(level,) * 40, denominators=(1.0,) * 40
        )
        for name in metrics
    }
    return Evaluation(measurements={"robustness": Measurement(asked={}, metrics=items)}, seconds=1.0)


def test_robustness_is_drawn_by_kind_of_noise_and_by_weight_of_the_prior(tmp_path: Path) -> None:
    recipe = load_recipe("support_tokens/robustness", "tiny")
    metrics = ("ppl", "noise.ratio@0.1", "noise.ratio@0.4", "drift.ratio_snr@8", "contextual_embedding_error")
    evaluations = {arm: {0: evaluation(2.0, metrics)} for arm in ("ce", "margin_005", "neftune")}
    found = robustness_pictures(recipe, evaluations, tmp_path)
    names = [picture.file for picture in found]
    assert names == [f"figures/robustness.{name}.png" for name in ("noise-ratio", "drift-ratio_snr", "weights")]
    assert all((tmp_path / name).is_file() for name in names)
    boxes = (tmp_path / "figures" / "robustness.noise-ratio.svg").read_text(encoding="utf-8")
    assert "NEFTune" in boxes and "Cross-entropy alone" in boxes and ">0.4<" in boxes
    weights = (tmp_path / "figures" / "robustness.weights.svg").read_text(encoding="utf-8")
    assert ">0.05<" in weights and "noise of 0.4" in found[-1].caption
    alone = robustness_pictures(recipe, {"ce": evaluations["ce"]}, tmp_path / "alone")
    assert len(alone) == 2, "one weight is no choice"
    assert robustness_pictures(recipe, {"ce": {0: evaluation(2.0, ("ppl",))}}, tmp_path / "none") == []


def test_weights_are_of_free_priors_that_differ_in_nothing_else() -> None:
    weights = margin_weights(load_recipe("support_tokens/robustness", "small"))
    assert weights == {"ce": 0.0, "margin_002": 0.02, "margin_005": 0.05, "margin_010": 0.1, "margin_025": 0.25}
