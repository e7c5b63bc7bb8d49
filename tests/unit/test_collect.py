"""What a results file says of a recipe: which arms' streams are asked about, and on what all of them were trained."""

from __future__ import annotations

import pytest

from keel.experiment.collect import _curves, setting_of, streams_of
from keel.training import TrainingReport, load_recipe


def test_controls_and_baselines_have_no_stream_whose_worth_is_asked_about() -> None:
    with_streams = {
        name: {arm for arm in recipe.arms if streams_of(recipe, arm)}
        for name in ("main", "ablations")
        for recipe in (load_recipe(f"gtca/{name}", "small"),)
    }
    assert with_streams == {
        "main": {"direct_joint", "gtca", "strict"},
        "ablations": {"gtca", "no_gate", "no_mask", "weak_trees", "stage_2", "no_stage1", "no_stage2"},
    }
    dyck = load_recipe("s_former/dyck", "small")
    assert streams_of(dyck, "learned") == [] and streams_of(dyck, "fusion") == ["structural"]
    lengths = load_recipe("s_former/wikitext103_extrapolation", "small")
    assert streams_of(lengths, "window_structural") == ["structural"] and streams_of(lengths, "window") == []


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("s_former/pg19", ["llama, 128 wide, 4 layers, 4 heads", "data:novels, BPE of 4,096", "600 steps, batches of 2 of 4,096 tokens"]),
        ("gtca/host", ["llama, 256 wide", "data:wikispeedia + data:novels, BPE of 4,096", "3,000 steps"]),
        ("s_former/dyck", ["256 wide", "dyck, 1,000,000 strings", "800 steps, batches of 32, learning rate 0.0005"]),
        ("dstg/comparison", ["dstg, 128 semantic channels, 24 channels of position", "4,000 steps, batches of 32 of 64 tokens"]),
    ],
)  # fmt: skip
def test_the_setting_is_said_in_words(name: str, parts: list[str]) -> None:
    said = setting_of(load_recipe(name, "small"))
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("name", "arm", "label"),
    [
        ("gtca/host", "backbone", "validation perplexity at 512 tokens"),
        ("gtca/main", "gtca", "validation perplexity of the right answers"),
        ("s_former/dyck", "fusion", "validation perplexity of targets"),
    ],
)
def test_what_was_validated_is_said(name: str, arm: str, label: str) -> None:
    report = TrainingReport(
        arm=arm, seed=0, params_total=1, params_trainable=1, tokens_per_s=1.0, peak_memory_bytes=1,
        curve=[{"tokens": 5, "nll": 0.0}], log={}, seconds=1.0, threads=1, processes=1, device="cpu",
    )  # fmt: skip
    (found,) = _curves(load_recipe(name, "small"), arm, {0: report}).items()
    assert found[0] == label and found[1].values == [[1.0]]
