"""A recipe run whole, as `keel run` does it: units as processes, results.json, resume after kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from keel.errors import KeelError
from keel.evaluation.results import Results, read_results
from keel.experiment import run_experiment
from keel.training import Recipe, parse_recipe, read_training_report
from keel.training.recipe import merge

STEPS = 12


def text(seed: int, words: int) -> str:
    """Made-up text: sentences over a small vocabulary."""
    source = random.Random(seed)
    vocabulary = ["".join(source.choices("abcdefghij", k=source.randint(2, 6))) for _ in range(60)]
    return " ".join(source.choices(vocabulary, k=words))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(8):
        (folder / f"{index}.txt").write_text(text(index, 700))
    return parse_recipe(
        {
            "name": "made_up",
            "title": "A run of this test",
            "scale": "tiny",
            "data": {"corpus": {"source": str(folder)}, "tokenizer": {"bpe": 300}},
            "host": {
                "family": "llama",
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "attention_dropout": 0.1,
                "initializer_range": 0.3,  # large, so that positions matter after a few steps
            },
            "match_parameters": True,
            "arms": {
                "rope": {"label": "RoPE"},
                "structural": {"streams": {"structural": {"init": "paper", "confidence_penalty": 0.1}}},
                "window": {"weights_of": "rope", "positions": {"scheme": "window", "window": 16}},
                "yarn": {"weights_of": "rope", "positions": {"scheme": "yarn"}},
            },
            "seeds": [0],
            "phases": [
                {
                    "name": "train",
                    "steps": STEPS,
                    "batch_size": 4,
                    "window": 16,
                    "stride": 8,
                    "learning_rate": 1e-2,
                    "checkpoint_every": 3,
                    "validate_every": 6,
                }
            ],
            "evaluation": {"extrapolation": {"lengths": [16, 64], "segments": 2}},
            "reference": {"paper": "P", "table": "1", "values": {"rope": {"ppl@16": 2.0}}},
        }
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "whole"


@pytest.fixture(scope="module")
def results(recipe: Recipe, out: Path) -> Results:
    return run_experiment(recipe, out, device="cpu", jobs=2)


def test_results_hold_every_arm_with_its_metrics_and_costs(recipe: Recipe, results: Results, out: Path) -> None:
    assert read_results(out / "results.json") == results
    assert list(results.arms) == ["rope", "structural", "window", "yarn"]
    for name, arm in results.arms.items():
        assert set(arm.metrics) == {"ppl@16", "ppl@64", "bpb@16", "bpb@64", "growth@64"}
        assert len(arm.metrics["ppl@16"].values) == 1
        near, far, growth = (arm.metrics[metric].mean for metric in ("ppl@16", "ppl@64", "growth@64"))
        assert near is not None and far is not None and 1 < near < 300
        assert growth == pytest.approx(far / near)
        trained = recipe.arms[name].weights_of is None
        assert (arm.train_tokens_per_s is not None) == (arm.peak_memory_bytes is not None) == trained
        assert bool(arm.curves) == trained
    assert results.arms["rope"].label == "RoPE" and results.arms["window"].weights_of == "rope"
    assert results.arms["structural"].streams == ["structural"] and results.arms["rope"].streams == []
    assert results.provenance.seeds == [0] and results.provenance.wall_s > 0
    assert results.reference is not None and results.reference.values == {"rope": {"ppl@16": 2.0}}


def test_parameters_are_matched_and_both_counts_reported(recipe: Recipe, results: Results, out: Path) -> None:
    widths = json.loads((out / "plan.json").read_text())["widths"]
    assert widths["structural"] == 24 and widths["rope"] > 24
    rope, structural = results.arms["rope"].params_total, results.arms["structural"].params_total
    per_channel = 3 * 16 * 2  # gate, up and down of two layers
    assert abs(rope - structural) <= per_channel / 2
    assert load_file(out / "rope/seed0/model/model.safetensors").keys() != set()


def test_borrowed_weights_are_read_with_other_positions(results: Results) -> None:
    rope, window, yarn = (results.arms[name].metrics for name in ("rope", "window", "yarn"))
    # Within the training length nothing differs: the window covers it, and YaRN's factor is one. The masks' kernels
    # add in another order.
    for other in (window, yarn):
        assert other["ppl@16"].mean == pytest.approx(rope["ppl@16"].mean, rel=1e-6)
        assert abs(other["ppl@64"].mean / rope["ppl@64"].mean - 1) > 1e-5  # type: ignore[operator]


def test_arms_are_compared_in_pairs(results: Results) -> None:
    pairs = {(comparison.arm, comparison.baseline) for comparison in results.comparisons}
    assert len(pairs) == 6 and ("structural", "rope") in pairs and ("yarn", "window") in pairs
    for comparison in results.comparisons:
        ours, theirs = (
            results.arms[name].metrics[comparison.metric].mean for name in (comparison.arm, comparison.baseline)
        )
        assert ours is not None and theirs is not None
        assert comparison.difference == pytest.approx(ours - theirs)


def test_the_curve_follows_validation_perplexity(results: Results) -> None:
    curve = results.arms["structural"].curves["validation perplexity at 16 tokens"]
    assert curve.x == [6 * 4 * 16, 12 * 4 * 16]
    first, last = (row[0] for row in curve.values)
    assert first is not None and last is not None and 1 < last < first < 400


def test_a_folder_with_a_run_is_not_overwritten(recipe: Recipe, results: Results, out: Path) -> None:
    with pytest.raises(KeelError, match="already holds a run; go on with --resume"):
        run_experiment(recipe, out)


def test_another_recipe_is_refused_on_resume(recipe: Recipe, results: Results, out: Path) -> None:
    phase = recipe.phases[0].model_copy(update={"learning_rate": 0.5})
    with pytest.raises(KeelError, match=r"begun with phases\.0\.learning_rate = 0\.01, now it is 0\.5"):
        run_experiment(recipe.model_copy(update={"phases": [phase]}), out, resume=True)


def test_more_seeds_resume_what_is_there(recipe: Recipe, results: Results, out: Path) -> None:
    before = (out / "rope/seed0/evaluation.json").stat().st_mtime_ns
    more = run_experiment(recipe, out, resume=True, seeds=[0, 1], only=["rope"], device="cpu", jobs=1)
    assert (out / "rope/seed0/evaluation.json").stat().st_mtime_ns == before
    assert more.provenance.seeds == [0, 1]
    values = more.arms["rope"].metrics["ppl@64"].values
    assert (
        None not in values and values[0] != values[1] and values[0] == results.arms["rope"].metrics["ppl@64"].values[0]
    )
    assert more.arms["structural"].metrics["ppl@64"].values[1] is None, "an arm that was not asked for waits"
    assert more.provenance.wall_s > results.provenance.wall_s


def _with_arm(recipe: Recipe, name: str, **fields: Any) -> Recipe:
    return parse_recipe(merge(recipe.model_dump(mode="json", exclude_none=True), {"arms": {name: fields}}))


def test_an_arm_added_later_joins_the_run(recipe: Recipe, results: Results, out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "more")
    out = tmp_path / "more"
    before = (out / "rope/seed0/evaluation.json").stat().st_mtime_ns
    more = run_experiment(_with_arm(recipe, "nope", positions={"scheme": "nope"}), out, resume=True, only=["nope"])
    assert (out / "rope/seed0/evaluation.json").stat().st_mtime_ns == before
    assert more.arms["nope"].metrics["ppl@64"].mean is not None
    assert abs(more.arms["nope"].params_total - more.arms["rope"].params_total) < 100
    assert more.arms["rope"].metrics["ppl@64"] == results.arms["rope"].metrics["ppl@64"]


def test_measurements_added_later_are_made_on_what_is_trained(
    recipe: Recipe, results: Results, out: Path, tmp_path: Path
) -> None:
    shutil.copytree(out, tmp_path / "more")
    out = tmp_path / "more"
    trained = {path: path.stat().st_mtime_ns for path in out.glob("*/seed0/training.json")}
    sections = {"gates": {"samples": 3}, "span": {"lengths": [16, 32], "sequences": 2}}
    given = merge(recipe.model_dump(mode="json", exclude_none=True), {"evaluation": sections})
    run_experiment(recipe, out, resume=True, seeds=[0, 1], only=["rope"], device="cpu", jobs=1)
    more = run_experiment(parse_recipe(given), out, resume=True, device="cpu", jobs=1)
    assert trained and {path: path.stat().st_mtime_ns for path in trained} == trained
    assert more.arms["rope"].metrics["ppl@64"] == results.arms["rope"].metrics["ppl@64"]
    assert 0 < (more.arms["rope"].metrics["span.distance@32"].mean or 0) < 32
    assert 0 <= (more.arms["structural"].metrics["gate.saturation@all"].mean or 0) <= 1
    assert "gate.saturation@all" not in more.arms["rope"].metrics
    assert more.arms["window"].metrics["span.distance@32"].mean != more.arms["rope"].metrics["span.distance@32"].mean


def test_a_measurement_asked_for_differently_is_made_anew_and_no_other(
    recipe: Recipe, results: Results, out: Path, tmp_path: Path
) -> None:
    shutil.copytree(out, tmp_path / "again")
    out = tmp_path / "again"
    trained = {path: path.stat().st_mtime_ns for path in out.glob("*/seed0/training.json")}
    given = recipe.model_dump(mode="json", exclude_none=True)

    def run(**sections: Any) -> Results:
        changed = parse_recipe(merge(given, {"evaluation": sections}))
        return run_experiment(changed, out, resume=True, only=["rope"], device="cpu", jobs=1)

    short = run(extrapolation={"lengths": [16, 32]}, span={"lengths": [16], "sequences": 2}).arms["rope"].metrics
    assert "ppl@64" not in short and short["ppl@16"].mean is not None
    assert "span.distance@16" in short and "span.distance@32" not in short
    path = out / "rope/seed0/evaluation.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    for sums in kept["extrapolation"]["sums"].values():
        sums["nll"] = [2 * nll for nll in sums["nll"]]
    path.write_text(json.dumps(kept), encoding="utf-8")
    longer = run(extrapolation={"lengths": [16, 32]}, span={"lengths": [16, 32], "sequences": 2}).arms["rope"].metrics
    assert longer["ppl@32"].mean == pytest.approx((short["ppl@32"].mean or 0) ** 2), "what was written down was kept"
    assert "span.distance@32" in longer
    assert {path: path.stat().st_mtime_ns for path in trained} == trained, "no arm was trained anew"


def test_an_arm_that_would_change_the_others_is_refused(recipe: Recipe, results: Results, out: Path) -> None:
    large = _with_arm(recipe, "large", streams={"structural": {"share": "layer", "init": "paper"}})
    with pytest.raises(KeelError, match=r"give arm 'rope' a width of .*; run all arms in another folder"):
        run_experiment(large, out, resume=True, only=["large"])


def test_an_unknown_arm_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="no arm 'rop'; did you mean 'rope'"):
        run_experiment(recipe, tmp_path / "run", only=["rop"])


def test_what_stops_a_unit_comes_back_in_one_line(recipe: Recipe, tmp_path: Path) -> None:
    phase = recipe.phases[0].model_copy(update={"learning_rate": 1e30, "clip": None})
    with pytest.raises(KeelError, match=r"arm 'rope', seed 0, .*is not finite at step") as caught:
        run_experiment(recipe.model_copy(update={"phases": [phase]}), tmp_path / "run", only=["rope"], device="cpu")
    assert "\n" not in str(caught.value)
    assert "Traceback" in (tmp_path / "run/rope/seed0/log.txt").read_text()


RUNNER = """
import sys
from pathlib import Path
from keel.experiment import run_experiment
from keel.training import load_recipe

if __name__ == "__main__":
    run_experiment(load_recipe(sys.argv[1]), Path(sys.argv[2]), device="cpu", jobs=2, only=["rope"])
"""


def wait_for(happened: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_after_kill_9_a_resume_ends_bitwise_like_an_uninterrupted_run(
    recipe: Recipe, results: Results, out: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(path), str(cut)], env=dict(os.environ))
    checkpoints = cut / "rope/seed0/checkpoints/0-train"
    # From the moment that the checkpoint gets its name: the kill falls anywhere in the steps and writes that follow.
    wait_for(lambda: (checkpoints / "checkpoint-6").exists() or (cut / "rope/seed0/model").exists())
    children = psutil.Process(runner.pid).children(recursive=True)
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    wait_for(lambda: all(gone(child) for child in children))
    assert read_training_report(cut / "rope/seed0") is None, "the kill came too late to test anything"
    run_experiment(recipe, cut, resume=True, device="cpu", jobs=2, only=["rope"])
    ours, theirs = (load_file(folder / "rope/seed0/model/model.safetensors") for folder in (cut, out))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    one, two = (read_training_report(folder / "rope/seed0") for folder in (cut, out))
    assert one is not None and two is not None and one.curve == two.curve
