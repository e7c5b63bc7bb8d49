"""Two CPU processes (gloo) against one: DDP and FSDP2 train the same model as one process with the same windows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from keel.evaluation.results import read_results
from keel.model import KeelForCausalLM
from keel.training import TrainingReport, read_training_report

WORKER = Path(__file__).with_name("distributed_worker.py")
WAYS = [f"{kind}_{way}" for kind in ("ddp", "fsdp") for way in ("plain", "whole", "resumed")]
RECIPE = """
name: made_up
title: A run of this test
data: {corpus: {source: "%s"}, tokenizer: {bpe: 300}}
host: {family: llama, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 24}
arms:
  rope: {}
  window: {weights_of: rope, positions: {scheme: window, window: 8}}
phases: [{name: train, steps: 3, batch_size: 4, window: 16, learning_rate: 1.0e-2}]
evaluation: {extrapolation: {lengths: [16, 32]}}
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, then two processes in every way; one launch each, since starting a process takes longest."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "corpus").mkdir()
    for index in range(4):
        (folder / "corpus" / f"{index}.txt").write_text(" ".join(f"{word % 37} {index}" for word in range(900)))
    (folder / "two").mkdir()
    (folder / "two/recipe.yaml").write_text(RECIPE % (folder / "corpus"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(WORKER), str(folder / "one"), "plain"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for command in (words, [*launch, str(WORKER), str(folder / "two"), *WAYS, "experiment"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


def report_of(folder: Path) -> TrainingReport:
    report = read_training_report(folder)
    assert report is not None
    return report


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_what_one_trains(out: Path, kind: str) -> None:
    one, two = out / "one/plain", out / f"two/{kind}_plain"
    ours, theirs = report_of(two), report_of(one)
    assert (ours.processes, theirs.processes) == (2, 1)
    assert (ours.params_total, ours.params_trainable) == (theirs.params_total, theirs.params_trainable)
    # The same sums over windows, added in another order (per process, then across): float32 rounding, which six steps of
    # Adam at a learning rate of 1e-2 enlarge where a gradient is nearly zero.
    for point, expected in zip(ours.log["train"], theirs.log["train"], strict=True):
        assert point["step"] == expected["step"]
        for name in ("loss", "nll", "loss.structural.confidence", "grad_norm"):
            assert point[name] == pytest.approx(expected[name], rel=1e-4), (point["step"], name)
    for point, expected in zip(ours.curve, theirs.curve, strict=True):
        assert point == pytest.approx(expected, rel=1e-4)
    weights, reference = (load_file(folder / "model/model.safetensors") for folder in (two, one))
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-3, msg=name)


def test_training_moves_weights_by_more_than_that_tolerance(out: Path) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("distributed_worker", WORKER)
    assert spec is not None and spec.loader is not None
    worker = module_from_spec(spec)
    spec.loader.exec_module(worker)
    before = dict(worker.model_of(0.0).named_parameters())
    after = load_file(out / "one/plain/model/model.safetensors")
    assert min(float((after[name] - before[name].detach()).abs().max()) for name in after if name in before) > 1e-2


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_resume_on_two_processes_is_bitwise(out: Path, kind: str) -> None:
    whole, resumed = (load_file(out / f"two/{kind}_{way}/model/model.safetensors") for way in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    plain = load_file(out / f"two/{kind}_plain/model/model.safetensors")
    assert any(not torch.equal(plain[name], whole[name]) for name in plain), "dropout was off"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_saved_model_loads_in_one_process(out: Path, kind: str) -> None:
    model = KeelForCausalLM.from_pretrained(out / f"two/{kind}_plain/model")
    assert int(model.streams["structural"].step) == 6
    saved = load_file(out / f"two/{kind}_plain/model/model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items() if name in saved)


def test_a_whole_recipe_runs_under_torchrun(out: Path) -> None:
    results = read_results(out / "two/experiment/results.json")
    assert list(results.arms) == ["rope", "window"]
    assert all(
        set(arm.metrics) == {"ppl@16", "ppl@32", "bpb@16", "bpb@32", "growth@32"} for arm in results.arms.values()
    )
    assert "2 processes" in results.provenance.device
    assert report_of(out / "two/experiment/rope/seed0").processes == 2
