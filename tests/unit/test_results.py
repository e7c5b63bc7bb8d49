"""The results file: round trip, errors in one line, atomic writing, and a page that documents every field."""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from keel.errors import KeelError
from keel.evaluation.results import MODELS, Results, read_results, write_results

SCHEMA_PAGE = Path(__file__).parents[2] / "docs" / "results-schema.md"


def valid() -> dict[str, Any]:
    """The smallest file with every part in it."""
    metric = {"values": [3.0, None], "mean": 3.0, "ci95": [2.5, 3.5], "unit": "ratio", "higher_is_better": False}
    arm = {
        "label": "RoPE",
        "streams": [],
        "weights_of": None,
        "params_total": 10,
        "params_trainable": 8,
        "train_tokens_per_s": 1e3,
        "peak_memory_bytes": None,
        "metrics": {"ppl@256": metric},
        "curves": {"loss": {"x_label": "steps", "x": [1, 2], "values": [[3, 4], ["NaN", 2]]}},
    }
    return {
        "schema": "keel.results/1",
        "recipe": "demo",
        "scale": "tiny",
        "title": "A demo",
        "provenance": {
            "git": None,
            "versions": {"torch": "2.13"},
            "device": "cpu",
            "seeds": [0, 1],
            "started": "2026-01-02T03:04:05Z",
            "wall_s": 3.5,
        },
        "arms": {"rope": arm, "window": {**copy.deepcopy(arm), "label": "Window", "weights_of": "rope"}},
        "comparisons": [
            {"metric": "ppl@256", "arm": "window", "baseline": "rope", "difference": -1.0, "ci95": [-2, 0], "p": 0.1}
        ],
        "reference": {"paper": "P", "table": "Table 2", "note": "", "values": {"fusion": {"ppl@256": 29.87}}},
        "figures": [{"file": "figures/heads.png", "title": "Heads"}],
    }


def written(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "results.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_write_and_read_give_the_same_results(tmp_path: Path) -> None:
    results = Results.model_validate(valid())
    again = read_results(write_results(results, tmp_path / "deep" / "results.json"))
    # NaN differs from itself, so the written forms are compared.
    assert again.model_dump_json() == results.model_dump_json()
    assert math.isnan(again.arms["rope"].curves["loss"].values[1][0] or 0.0)


def test_the_file_is_strict_json_whatever_was_measured(tmp_path: Path) -> None:
    data = valid()
    data["arms"]["rope"]["metrics"]["ppl@256"] |= {
        "values": [math.inf, math.nan],
        "mean": math.nan,
        "ci95": [9, math.inf],
    }
    path = write_results(Results.model_validate(data), tmp_path / "results.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    stored = json.loads(path.read_text(), parse_constant=refuse)["arms"]["rope"]["metrics"]["ppl@256"]
    assert stored["values"] == ["Infinity", "NaN"]
    assert read_results(path).arms["rope"].metrics["ppl@256"].values[0] == math.inf


def put(path: str, value: Any):
    def change(data: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for parent in parents:
            data = data[int(parent)] if isinstance(data, list) else data[parent]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("schema", "keel.results/2"), "field schema: expected 'keel.results/1', got 'keel.results/2'"),
        (put("recipee", 1), "field recipee: unknown; did you mean 'recipe'"),
        (put("arms/rope/params_totl", 1), "field arms.rope.params_totl: unknown; did you mean 'params_total'"),
        (put("provenance/sed", 1), "field provenance.sed: unknown"),
        (put("arms/rope/metrics/ppl@256/meen", 1), "did you mean 'mean'"),
        (put("arms/rope/curves/loss/y", 1), "valid: values, x, x_label"),
        (put("comparisons/0/pp", 1), "valid: arm, baseline, ci95"),
        (put("reference/papr", 1), "did you mean 'paper'"),
        (put("figures/0/titel", 1), "field figures.0.titel: unknown; did you mean 'title'"),
        (put("figures/0/file", "../heads.png"), "field figures.0.file: expected the path of a .png or .svg file below"),
        (put("figures/0/file", "/heads.png"), "expected the path of a .png or .svg file below"),
        (put("figures/0/file", "figures/heads.pdf"), "expected the path of a .png or .svg file below"),
        (lambda data: data["arms"]["rope"].pop("label"), "field arms.rope.label: missing; give it a value"),
        (put("arms/rope/metrics/ppl@256/mean", "high"), "metrics.ppl@256.mean: expected a number or one of NaN"),
        (put("arms/rope/metrics/ppl@256/mean", True), "expected a number"),
        (put("arms/rope/metrics/ppl@256/ci95", [2, 1]), r"expected \[low, high\] with low <= high"),
        (put("arms/rope/metrics/ppl@256/values", [1]), "expected 2 values, one per seed, got 1"),
        (put("arms/rope/curves/loss/values", [[1, 2]]), "one row of values per x: 2 x, 1 rows"),
        (put("arms/rope/curves/loss/values", [[1], [1]]), "arms.rope.curves.loss: expected 2 values"),
        (put("arms/rope/params_total", -1), "greater than or equal to 0, got -1"),
        (put("arms/rope/params_trainable", 11), "params_trainable 11 exceeds params_total 10"),
        (put("arms/window/weights_of", "rop"), "weights_of names no arm: did you mean 'rope'"),
        (put("arms", {}), "field arms: "),
        (put("comparisons/0/arm", "windoe"), "comparisons.0.arm: no arm 'windoe'; did you mean 'window'"),
        (put("comparisons/0/metric", "ppl@512"), "has no metric 'ppl@512'; did you mean 'ppl@256'"),
        (put("comparisons/0/p", 1.5), "less than or equal to 1, got 1.5"),
        (put("provenance/started", "2026-01-02 03:04"), "timezone"),
        (put("provenance/seeds", []), "field provenance.seeds: "),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, change, message: str) -> None:
    data = valid()
    change(data)
    path = written(tmp_path, data)
    with pytest.raises(KeelError, match=message) as caught:
        read_results(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ('{"schema": ', "not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "expected 'keel.results/1'"),
    ],
)
def test_a_file_that_is_no_results_file_is_told_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        read_results(written(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text_and_a_missing_file_are_told(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(KeelError, match="cannot be read"):
        read_results(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KeelError, match="not JSON"):
        read_results(path)


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    path = write_results(Results.model_validate(valid()), tmp_path / "results.json")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeelError, match="No space left on device"):
        write_results(Results.model_validate(valid() | {"title": "Another"}), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["results.json"]


def test_the_page_names_every_field() -> None:
    page = SCHEMA_PAGE.read_text(encoding="utf-8")
    for place, model in MODELS.items():
        section = page.split(f"\n## {model.__name__}\n")[1].split("\n## ")[0]
        for name, field in model.model_fields.items():
            assert f"| `{field.alias or name}` |" in section, f"{'.'.join(place)}: {name} is not documented"
