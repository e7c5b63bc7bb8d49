"""GTCA's recipes at their tiny scale, with every evaluation on: on corpora that are made here, since real ones need not be there."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tree_support"))

import made_corpora  # found through the line above

from keel.evaluation.results import Results
from keel.experiment import run_experiment
from keel.training import load_recipe

pytest.importorskip("peft")
pytest.importorskip("nltk", reason="the extra keel[trees] is not installed")

ASKED = [
    "blimp.overall", "blimp.syntax", "blimp.made_island", "cola.mcc", "mmlu.accuracy", "hellaswag.accuracy", "winogrande.accuracy",
    "cloze.accuracy",
]  # fmt: skip


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_DATA", str(made_corpora.make_root(tmp_path / "data")))


def _shares_are_shares(results: Results) -> None:
    for arm in results.arms.values():
        for name, metric in arm.metrics.items():
            assert metric.mean is not None
            if name.endswith("accuracy") or name.startswith(("blimp", "uuas")):
                assert math.isnan(metric.mean) or 0 <= metric.mean <= 1, name


@pytest.mark.parametrize("name", ["main", "ablations", "coefficient"])
def test_tiny_leaves_nothing_out_that_small_measures(name: str) -> None:
    tiny, small = (load_recipe(f"gtca/{name}", scale).evaluation.model_dump() for scale in ("tiny", "small"))
    assert [section for section in tiny if tiny[section]] == [section for section in small if small[section]]


def test_the_main_table_is_measured_whole(tmp_path: Path) -> None:
    recipe = load_recipe("gtca/main", "tiny")
    results = run_experiment(recipe, tmp_path / "run", only=["gtca", "strict"], device="cpu", jobs=2)
    assert list(results.arms) == ["backbone", "gtca", "strict"]
    for name, arm in results.arms.items():
        assert {*ASKED, "uuas@layer0", "uuas@layer2", "leak.max_logit_change"} <= set(arm.metrics), sorted(arm.metrics)
        assert ("parser.f1" in arm.metrics) == (name != "backbone")
        assert arm.metrics["uuas@layer1"].higher_is_better and arm.metrics["uuas.linear"].higher_is_better is None
    strict = results.arms["strict"].metrics["leak.max_logit_change"].mean
    assert strict is not None and strict < 1e-4, "a strictly causal stream does not know the future"
    _shares_are_shares(results)


def test_ablations_of_stages(tmp_path: Path) -> None:
    recipe = load_recipe("gtca/ablations", "tiny")
    results = run_experiment(recipe, tmp_path, only=["stage_1", "no_stage1", "no_stage2"], device="cpu", jobs=2)
    asked = set(ASKED) - {"hellaswag.accuracy", "winogrande.accuracy"}  # Tables 4 to 6 have neither
    assert all(asked <= set(arm.metrics) for arm in results.arms.values())
    _shares_are_shares(results)
    backbone, gtca, early = (
        load_file(tmp_path / arm / "seed0" / folder / "model.safetensors")
        for arm, folder in (("backbone", "model"), ("gtca", "model"), ("gtca", "after_adaptation"))
    )
    changed = {name for name in backbone if not backbone[name].equal(early[name])}
    assert changed and all("proj" in name for name in changed), "the first stage has trained adapters, and kept them"
    assert any(not early[name].equal(gtca[name]) for name in early)
    logged = {
        arm: json.loads((tmp_path / arm / "seed0/training.json").read_text())["log"]
        for arm in ("no_stage1", "no_stage2")
    }
    assert {arm: list(phases) for arm, phases in logged.items()} == {
        "no_stage1": ["structure", "joint"], "no_stage2": ["adaptation", "joint"],
    }  # fmt: skip


def test_the_host_is_trained_once_and_lent_as_a_checkpoint(tmp_path: Path) -> None:
    lender = tmp_path / "lender"
    run_experiment(load_recipe("gtca/host", "tiny"), lender, device="cpu", jobs=1)
    host = lender / "backbone/seed0/host"
    model = AutoModelForCausalLM.from_pretrained(host)
    assert model.config.model_type == "llama" and AutoTokenizer.from_pretrained(host).eos_token
    changes = [
        f"host={{checkpoint: {host}}}", f"data.tokenizer={{pretrained: {host}}}", "arms.backbone.phases=[]", "seeds=[0, 1]",
        "evaluation.syntax=null", "evaluation.hellaswag=null", "evaluation.winogrande=null", "evaluation.mmlu=null", "evaluation.leak=null",
    ]  # fmt: skip
    recipe = load_recipe("gtca/main", "tiny", changes)
    assert recipe.is_same_for_all_seeds("backbone") and not recipe.is_same_for_all_seeds("lora_only")
    out = tmp_path / "run"
    results = run_experiment(recipe, out, only=["lora_only"], device="cpu", jobs=2)
    trained = model.state_dict()
    for seed in (0, 1):
        lent = load_file(out / f"backbone/seed{seed}/model/model.safetensors")
        assert all(trained[name.removeprefix("host.")].equal(weight) for name, weight in lent.items())
    first, second = (json.loads((out / f"backbone/seed{seed}/evaluation.json").read_text()) for seed in (0, 1))
    assert first["seed"] == 0 and {**first, "seed": 1} == second, "what cannot differ is measured once"
    tuned = results.arms["lora_only"].metrics["blimp.overall"].values
    assert len(tuned) == 2 and None not in tuned
