"""What is kept of a run follows the recipe in what the paper says, and in nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from keel.errors import KeelError
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


def test_a_page_ends_with_what_the_benchmarks_recorded_of_its_mechanism(tmp_path: Path) -> None:
    def line(label: str, median: float, met: bool | None) -> dict[str, object]:
        spread = {"median": median, "min": median / 2, "max": median * 2}
        target = None if met is None else {"text": "≤ 1.10", "met": met}
        return {
            "label": label,
            "judged": "wall",
            "ratios": {"processor": {**spread, "median": 9.0}, "wall": spread},
            "target": target,
        }

    record = tmp_path / "pages" / "data" / "performance.cpu.json"
    record.parent.mkdir(parents=True)
    lines = [line("host + gru stream / host", 1.25, False), line("host + dynamic state stream / host", 1.5, True)]
    content = {"decode": {"comparisons": lines}, "logdet": {"comparisons": [line("at once / rank", 40.0, None)]}}
    record.write_text(json.dumps({"benchmarks": content}), encoding="utf-8")
    shutil.copy(KEPT, tmp_path / "results.json")
    (page,) = publish([tmp_path / "results.json"], tmp_path / "pages")
    text = page.read_text(encoding="utf-8")
    assert text.count("## Speed and memory") == 1
    assert text.rstrip().endswith(
        "| `benchmarks/decode.py` | host + gru stream / host | 1.25 (0.625 to 2.5) | ≤ 1.10: **missed** |"
    )
    record.write_text("{}", encoding="utf-8")
    with pytest.raises(KeelError, match="not a record of benchmarks"):
        publish([tmp_path / "results.json"], tmp_path / "pages")
