"""What is kept of a run follows the recipe in what the paper says, and in nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from keel.evaluation.results import read_results, write_results
from keel.publishing import publish
from keel.training import load_recipe

KEPT = Path(__file__).parents[2] / "docs" / "results" / "data" / "s_former" / "pg19.small.json"


def test_a_correction_of_the_reference_reaches_what_was_kept(tmp_path: Path) -> None:
    shutil.copy(KEPT, tmp_path / "results.json")
    results = read_results(tmp_path / "results.json")
    assert results.reference is not None
    wrong = results.reference.model_copy(update={"note": "A mistake.", "targets": []})
    write_results(results.model_copy(update={"reference": wrong}), tmp_path / "results.json")
    (page,) = publish([tmp_path / "results.json"], tmp_path / "pages")
    kept = read_results(tmp_path / "pages" / "data" / "s_former" / "pg19.small.json")
    recipe = load_recipe("s_former/pg19", "small")
    assert recipe.reference is not None and kept.reference is not None
    assert kept.reference.model_dump() == recipe.reference.model_dump() and kept.arms == results.arms
    text = page.read_text(encoding="utf-8")
    assert page == tmp_path / "pages" / "s_former.md" and "A mistake." not in text and "### Targets" in text


def test_results_of_a_recipe_that_is_not_ours_keep_their_reference(tmp_path: Path) -> None:
    results = read_results(KEPT).model_copy(update={"recipe": "mine/own"})
    write_results(results, tmp_path / "results.json")
    publish([tmp_path / "results.json"], tmp_path / "pages")
    assert read_results(tmp_path / "pages" / "data" / "mine" / "own.small.json").reference == results.reference
