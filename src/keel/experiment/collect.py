"""Put what the finished units measured together into a `keel.results/1` file."""

from __future__ import annotations

import datetime
import math
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from keel.errors import KeelError
from keel.evaluation.extrapolation import ExtrapolationResult, token_scores
from keel.evaluation.items import item_statistic
from keel.evaluation.results import Arm, Comparison, Curve, Metric, Provenance, Reference, Results
from keel.evaluation.robustness import subsample_medians
from keel.evaluation.statistics import Bootstrap, Statistic, bits_per_byte, growth, perplexity
from keel.experiment.measure import Evaluation, read_evaluation
from keel.experiment.pictures import pictures
from keel.experiment.robustness_pictures import robustness_pictures
from keel.experiment.selection import coefficient_pictures
from keel.experiment.unit import Plan, Unit
from keel.streams import STREAMS
from keel.training import Phase, Recipe, TrainingReport, read_training_report
from keel.training.sections import Data

_PACKAGES = ("keel", "torch", "transformers", "accelerate", "tokenizers", "numpy")


def collect(recipe: Recipe, plan: Plan, out: Path) -> Results | None:
    """Return the results of all units that are finished; None where no arm has one.

    An arm that lacks a seed has None in its place, and its interval comes from the seeds that are there. Arms are
    compared on the seeds that both have.
    """
    evaluations = {
        arm: {
            seed: found
            for seed in recipe.seeds
            if (found := read_evaluation(recipe, Unit(arm, seed).folder(out))) is not None
        }
        for arm in recipe.arms
    }
    finished = {arm: by_seed for arm, by_seed in evaluations.items() if by_seed}
    # An arm needs its lender's parameter counts, and the file wants the lender among the arms.
    finished = {arm: found for arm, found in finished.items() if (recipe.arms[arm].weights_of or arm) in finished}
    if not finished:
        return None
    statistics = Statistics(finished)
    arms = {arm: _arm(recipe, arm, statistics, out) for arm in finished}
    comparisons = statistics.comparisons()
    documents = max(
        (
            len(found.extrapolation.documents)
            for by_seed in finished.values()
            for found in by_seed.values()
            if found.extrapolation is not None
        ),
        default=None,
    )
    reference = recipe.reference
    return Results(
        recipe=recipe.name,
        scale=recipe.scale,
        title=recipe.title,
        provenance=_provenance(recipe, plan, out, documents),
        arms=arms,
        comparisons=comparisons,
        reference=None if reference is None else Reference(**reference.model_dump()),
        figures=[
            *pictures(recipe, list(finished), out),
            *robustness_pictures(recipe, finished, out),
            *coefficient_pictures(recipe, arms, comparisons, out),
        ],
    )


class Statistics:
    """Metrics of every arm over the seeds that it has, and comparisons of every two arms over those that both have."""

    def __init__(self, evaluations: Mapping[str, Mapping[int, Evaluation]]) -> None:
        self.evaluations = evaluations
        self._bootstraps: dict[tuple[int, int], Bootstrap] = {}

    def metrics(self, arm: str, seeds: Sequence[int]) -> dict[str, Metric]:
        """Return the metrics of ``arm``; ``seeds`` are those of the results file, in order."""
        there = [seed for seed in seeds if seed in self.evaluations[arm]]
        metrics = {}
        for name, measured in self._measured(arm, there).items():
            estimate = self._bootstrap(measured.statistic).estimate(measured.statistic)
            by_seed = dict(zip(there, estimate.values, strict=True))
            metrics[name] = Metric(
                values=[by_seed.get(seed) for seed in seeds],
                mean=estimate.mean,
                ci95=estimate.ci95,
                unit=measured.unit,
                higher_is_better=measured.higher_is_better,
            )
        return metrics

    def comparisons(self) -> list[Comparison]:
        """Return arm − baseline for every two arms, the earlier one being the baseline, in all metrics but bits per byte."""
        found = []
        for baseline, arm in combinations(self.evaluations, 2):
            seeds = [seed for seed in self.evaluations[arm] if seed in self.evaluations[baseline]]
            if not seeds:
                continue
            ours, theirs = self._measured(arm, seeds), self._measured(baseline, seeds)
            for metric in ours:
                # What has no better end is not compared: a description is read, not won.
                if metric in theirs and not metric.startswith("bpb@") and ours[metric].higher_is_better is not None:
                    if ours[metric].statistic.shape != theirs[metric].statistic.shape:
                        raise KeelError(f"{metric}: arms {arm!r} and {baseline!r} were measured on different items")
                    bootstrap = self._bootstrap(ours[metric].statistic)
                    difference = bootstrap.compare(ours[metric].statistic, theirs[metric].statistic)
                    found.append(Comparison(metric=metric, arm=arm, baseline=baseline, **vars(difference)))
        return found

    def _measured(self, arm: str, seeds: Sequence[int]) -> dict[str, Measured]:
        evaluations = [self.evaluations[arm][seed] for seed in seeds]
        found: dict[str, Measured] = {}
        lengths = [evaluation.extrapolation for evaluation in evaluations if evaluation.extrapolation is not None]
        if lengths:
            found |= _at_lengths(lengths)
        for name, metric in evaluations[0].metrics.items():
            # A measurement added to a finished run is there for some seeds first: it waits for all.
            if any(name not in evaluation.metrics for evaluation in evaluations):
                continue
            statistic = item_statistic([evaluation.metrics[name] for evaluation in evaluations])
            found[name] = Measured(statistic, metric.unit, metric.higher_is_better)
        return found

    def _bootstrap(self, statistic: Statistic) -> Bootstrap:
        if statistic.shape not in self._bootstraps:
            self._bootstraps[statistic.shape] = Bootstrap(*statistic.shape)
        return self._bootstraps[statistic.shape]


class Measured(NamedTuple):
    """A metric of one arm over some seeds."""

    statistic: Statistic
    unit: str
    higher_is_better: bool | None


def _at_lengths(results: Sequence[ExtrapolationResult]) -> dict[str, Measured]:
    scores = token_scores(results)
    lengths = sorted(scores)
    found = {f"ppl@{n}": Measured(perplexity(scores[n]), "perplexity per token", False) for n in lengths}
    found |= {f"bpb@{n}": Measured(bits_per_byte(scores[n]), "bits per byte", False) for n in lengths}
    near = scores[lengths[0]]
    return found | {f"growth@{n}": Measured(growth(scores[n], near), "ratio", False) for n in lengths[1:]}


def _arm(recipe: Recipe, arm: str, statistics: Statistics, out: Path) -> Arm:
    lender = recipe.arms[arm].weights_of
    reports = {seed: read_training_report(Unit(lender or arm, seed).folder(out)) for seed in recipe.seeds}
    trained = [report for report in reports.values() if report is not None]
    own = trained if lender is None else []
    metrics = statistics.metrics(arm, recipe.seeds)
    if recipe.evaluation.robustness is not None:
        measured = {seed: evaluation.metrics for seed, evaluation in statistics.evaluations[arm].items()}
        metrics |= subsample_medians(measured, recipe.seeds)
    return Arm(
        label=recipe.label_of(arm),
        streams=streams_of(recipe, arm),
        weights_of=lender,
        stage=recipe.arms[arm].stage,
        params_total=trained[0].params_total,
        params_trainable=trained[0].params_trainable,
        train_tokens_per_s=sum(report.tokens_per_s for report in own) / len(own) or None if own else None,
        peak_memory_bytes=max((report.peak_memory_bytes for report in own), default=None),
        metrics=metrics,
        curves=_curves(recipe, arm, reports) if own else {},
    )


def streams_of(recipe: Recipe, arm: str) -> list[str]:
    """Return the streams of an arm whose worth is asked about: none in a control."""
    if recipe.arms[recipe.arms[arm].weights_of or arm].control or recipe.arms[arm].control:
        return []
    return [name for name, given in recipe.streams_of(arm).items() if not STREAMS[given["type"]].is_baseline]


def _curves(recipe: Recipe, arm: str, reports: Mapping[int, TrainingReport | None]) -> dict[str, Curve]:
    points = {
        seed: {p["tokens"]: p["nll"] for p in report.curve} for seed, report in reports.items() if report is not None
    }
    x = sorted({tokens for curve in points.values() for tokens in curve})
    task = recipe.data.task
    shown: Callable[[float | None], float | None]
    if task is not None and task.language == "markov":  # what is validated is a divergence and no likelihood
        label, shown = "validation KL divergence from P* (nats)", _as_it_is
    else:
        what = f"at {recipe.train_window(arm)} tokens" if task is None else "of targets"
        if [*recipe.phases, *recipe.phases_of(arm)][-1].learns == "questions":
            what = "of the right answers"
        what = what if recipe.data.masking is None else f"of masked tokens {what}"
        label, shown = f"validation perplexity {what}", _exp
    values = [[shown(points.get(seed, {}).get(tokens)) for seed in reports] for tokens in x]
    return {label: Curve(x_label="training tokens", x=x, values=values)}


def _as_it_is(nats: float | None) -> float | None:
    return nats


def _exp(nats: float | None) -> float | None:
    return None if nats is None else math.exp(min(nats, 700.0))


def _provenance(recipe: Recipe, plan: Plan, out: Path, documents: int | None) -> Provenance:
    return Provenance(
        git=", ".join(plan.commits) or None,
        versions=package_versions(),
        device=_device(recipe, out),
        seeds=recipe.seeds,
        setting=setting_of(recipe),
        documents=documents,
        started=datetime.datetime.fromisoformat(plan.started),
        wall_s=plan.wall_s,
    )


def setting_of(recipe: Recipe) -> str:
    """Say on what, how wide and how long the arms were trained: what they have in common."""
    phases = (_phase_in_words(phase, is_text=recipe.data.task is None) for phase in recipe.phases)
    return "; ".join([_host_in_words(recipe.host), _data_in_words(recipe.data), *phases])


def _host_in_words(host: Mapping[str, Any]) -> str:
    if "checkpoint" in host:
        return f"host {host['checkpoint']}"
    named = {"hidden_size": "wide", "semantic_size": "semantic channels", "position_size": "channels of position",
             "num_hidden_layers": "layers", "num_attention_heads": "heads"}  # fmt: skip
    return ", ".join(
        [str(host["family"]), *(f"{host[field]:,} {words}" for field, words in named.items() if field in host)]
    )


def _data_in_words(data: Data) -> str:
    if data.task is not None:
        return f"{data.task.language}, {data.task.train_samples:,} strings"
    assert data.tokenizer is not None
    pieces = data.tokenizer.pretrained or f"BPE of {data.tokenizer.bpe:,}"
    return f"{data.corpus_config().label}, {pieces}"


def _phase_in_words(phase: Phase, *, is_text: bool) -> str:
    each = f" of {phase.window:,} tokens" if is_text and phase.learns == "text" else ""
    return f"{phase.name}: {phase.steps:,} steps, batches of {phase.batch_size:,}{each}, learning rate {phase.learning_rate:g}"


def package_versions() -> dict[str, str]:
    """Return the versions that a results file names."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def _device(recipe: Recipe, out: Path) -> str:
    """What the arms were trained on, as the training reports say, and in what precision."""
    precisions = {phase.precision for arm in recipe.trained_arms() for phase in recipe.phases_of(arm)}
    found = {
        f"{_processor(report.device)}, {report.processes} process{'es' * (report.processes > 1)} × {report.threads} "
        f"thread{'s' * (report.threads > 1)}"
        for arm in recipe.trained_arms()
        for seed in recipe.seeds
        if (report := read_training_report(Unit(arm, seed).folder(out))) is not None
    }
    return ", ".join(["; ".join(sorted(found)), *sorted(precisions)]) if found else ""


def _processor(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name() if torch.cuda.is_available() else device
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from, marked where files differ; None outside of one."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", "unit.py"):  # an installed copy may lie inside somebody else's repository
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changed else commit
