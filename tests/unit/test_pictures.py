"""Pictures of a run: heat maps show each matrix where it belongs, and only what was measured is listed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import matplotlib.image
import numpy as np

from keel.experiment.pictures import ATTENTION_FILE, SUPPORT_FILE, draw_heat_maps, pictures
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
        (tmp_path / arm / "seed0" / SUPPORT_FILE).write_text(json.dumps({name: curves[name] for name in kept}))
    assert pictures(recipe, ["ce"], tmp_path) == [], "an arm without a prior has no curve of its own"
    (found,) = pictures(recipe, ["ce", "margin_005"], tmp_path)
    drawn = (tmp_path / "figures" / "support.curves.svg").read_text(encoding="utf-8")
    assert (tmp_path / found.file).is_file() and "Fresh prior" in drawn and recipe.label_of("margin_005") in drawn
