"""The papers' recipes at their tiny scale: whatever one asks to measure is in results.json, under the names that are documented."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import keel
from keel.evaluation.dta_metrics import METRICS
from keel.experiment import run_experiment
from keel.report import write_docs_page, write_report
from keel.streams.dynamic_state import FAILURES, SafeguardConfig
from keel.training import load_recipe

COMPLETION = ("exact_match", "structural_accuracy", "valid_not_exact", "syntax_error")
GEOMETRY = ("relative_strength", "orthogonality", "temporal_consistency", "effective_rank", "representation_shift")
CASES = {
    "s_former/ablations": (
        "first_layer",  # writes into one layer of two
        ["growth@64", "gate.saturation@all", "geometry.relative_strength@layer0", "geometry.representation_shift@layer1"],
    ),
    "s_former/dyck": (
        "fusion",
        [f"dyck.{name}{where}" for name in COMPLETION for where in ("", "@L100", "@d8", "@intact", "@zeroed")]
        + ["alpha_depth.r", "alpha_depth.significant", "alpha_depth.r@layer1", "gate.saturation@all"],
    ),
    "s_former/markov": ("structural", ["markov.l1"]),
    "s_former/lambada": ("structural", ["lambada.accuracy@32", "lambada.ppl@64"]),
    "s_former/pg19": ("structural", ["pg19.ppl", "pg19.accuracy"]),
    "s_former/wikitext103_extrapolation": (
        "structural",
        [f"geometry.{name}@layer1" for name in GEOMETRY] + ["gate.saturation@all"],
    ),
    "support_tokens/robustness": (
        "margin_005",
        ["ppl", "embedding_rms", "contextual_embedding_error", "noise.ratio@0.4", "noise.ratio_snr@1", "drift.ratio@4", "drift.ratio_snr@8",
         "noise.ratio.median@0.4", "ppl.median", "support.effective_size.median", "support.top5_share", "support.first5_share@softmax",
         "support.pressing", "ece", "aurc", "aurc@barrier", "posterior.ppl", "train.ppl"],
    ),
    "support_tokens/novels": (
        "margin_005",
        ["noise.ratio.median@0.4", "support.top5_share@random", "train.ppl", "lambada.ece", "lambada.posterior.accuracy",
         "lambada.posterior.aurc@entropy"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_measures_what_it_names(name: str, tmp_path: Path) -> None:
    arm, wanted = CASES[name]
    smaller = ["evaluation.completion.samples=2"] if name == "s_former/dyck" else []
    recipe = load_recipe(name, "tiny", smaller)
    results = run_experiment(recipe, tmp_path, seeds=[0], only=[arm], device="cpu", jobs=1)
    metrics = results.arms[arm].metrics
    assert set(wanted) <= set(metrics), sorted(metrics)
    shares = ("accuracy", "match", "error", "exact", "validity", "f1", "saturation", "significant")
    for metric in wanted:
        mean = metrics[metric].mean
        assert mean is not None
        if metric.partition("@")[0].endswith(shares):
            assert math.isnan(mean) or 0 <= mean <= 1 or metric == "contextual_embedding_error", metric
        assert metric != "alpha_depth.r" or math.isnan(mean) or -1 <= mean <= 1
    page = write_report([tmp_path / "results.json"], tmp_path).read_text(encoding="utf-8")
    docs = write_docs_page([tmp_path / "results.json"], tmp_path / "docs" / "page.md").read_text(encoding="utf-8")
    assert recipe.reference is not None
    for text in (page, docs):
        assert recipe.title in text and recipe.reference.table in text and "4 steps" in text, (
            "what was asked, theirs, and how long"
        )


def test_a_dynamic_state_path_is_trained_and_measured_as_the_recipe_says(tmp_path: Path) -> None:
    """The path of DTA's recipe under safeguards, and the host that it began with: every metric that they are asked for has its name."""
    smaller = ["evaluation.dta.rows=1", "evaluation.dta.planted=1", "evaluation.dta.distances=[20]"]
    recipe = load_recipe("dta/signals", "tiny", smaller)
    results = run_experiment(recipe, tmp_path, only=["guarded", "without"], device="cpu", jobs=1)
    assert set(results.arms) == {"base", "path", "without", "guarded"}, "what an arm begins with is trained too"
    found = {name: set(arm.metrics) for name, arm in results.arms.items()}
    signals = {"signal.auroc_noise", "signal.auroc_coherence"}
    text = {
        "baseline.auroc_surprisal",
        "generation.nll",
        "generation.repetition",
        "generation.drift",
        "dta.cpi",
        "dta.tcs",
        "dta.dct",
    }
    suite = {f"dta.{name}" for name in METRICS}
    table = {f"fault.{mode}.{what}" for mode in FAILURES for what in ("detected_after", "bounded", "recovered_after")}
    for bare in ("base", "without"):
        assert text <= found[bare] and not (signals | suite | table) - text & found[bare]
    assert text | signals | suite <= found["path"] and not table & found["path"]
    assert text | signals | suite | table | {"fault.detected", "fault.bounded", "fault.recovered"} <= found["guarded"]
    for metric in (*signals, *text):
        mean = results.arms["path"].metrics[metric].mean
        assert mean is not None and math.isfinite(mean), metric
    guarded = keel.load(tmp_path / "guarded" / "seed0" / "model")
    assert guarded.wires.first(keel.DynamicStateStream)[1].config.limits == SafeguardConfig(change_least=0.002)
    page = write_docs_page([tmp_path / "results.json"], tmp_path / "page.md").read_text(encoding="utf-8")
    assert recipe.reference is not None and "### Targets" in page
    for target in recipe.reference.targets:
        there = {target.arm, target.baseline} <= {*results.arms, None}
        assert (target.says in page) == there, target.says
