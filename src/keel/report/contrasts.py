"""One arm against another in one metric, and what the paper printed beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keel.evaluation.results import Arm, Metric, Results
from keel.report.metrics import lengths_of, split_metric
from keel.report.text import interval, number, probability


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One arm against another in one metric.

    `ahead` is True where the arm is better, None where that cannot be said. `decided` is True where the interval of the
    paired difference excludes zero or, without a paired comparison, where the two intervals are apart.
    """

    metric: str
    arm: str
    baseline: str
    difference: float
    ci95: tuple[float, float] | None
    p: float | None
    paired: bool
    ahead: bool | None
    decided: bool


def ranking(results: Results, metric: str, *, streams: bool | None = None) -> list[str]:
    """Return the arms that measured a metric, best first.

    `streams` keeps only those with (True) or without (False), and no stage of another arm: what it asks for is who wins. A metric of which
    neither end is better ranks nobody.
    """
    measured: list[tuple[float, str]] = []
    for name, arm in results.arms.items():
        value = mean_of(arm, metric)
        if value is None or arm.metrics[metric].higher_is_better is None:
            continue
        if not math.isnan(value) and (streams is None or (streams == bool(arm.streams) and not arm.stage)):
            measured.append((-value if arm.metrics[metric].higher_is_better else value, name))
    return [name for _, name in sorted(measured, key=lambda pair: pair[0])]


def mean_of(arm: Arm, metric: str) -> float | None:
    """Return the mean of a metric, None where the arm has none."""
    return arm.metrics[metric].mean if metric in arm.metrics else None


def contrast(results: Results, metric: str, arm: str, baseline: str) -> Contrast:
    """Compare two arms in one metric, by their paired comparison if the file has it, else by their intervals."""
    ours, theirs = results.arms[arm].metrics.get(metric), results.arms[baseline].metrics.get(metric)
    difference, ci95, p, paired = _paired(results, metric, arm, baseline)
    if not paired and ours is not None and theirs is not None and ours.mean is not None and theirs.mean is not None:
        difference = ours.mean - theirs.mean
    ahead: bool | None = None
    if ours is not None and ours.higher_is_better is not None and not math.isnan(difference) and difference != 0:
        ahead = (difference > 0) == ours.higher_is_better
    decided = (
        difference != 0 and not math.isnan(difference) and (_excludes_zero(ci95) if paired else _apart(ours, theirs))
    )
    return Contrast(
        metric=metric,
        arm=arm,
        baseline=baseline,
        difference=difference,
        ci95=ci95,
        p=p,
        paired=paired,
        ahead=ahead,
        decided=decided,
    )


def tally(results: Results, family: str, arm: str, baseline: str) -> tuple[int, int, int]:
    """Count the lengths at which an arm is decidedly better, undecided, and decidedly worse than another."""
    better = worse = undecided = 0
    for length in lengths_of(results, family):
        result = contrast(results, f"{family}@{length}", arm, baseline)
        better += bool(result.decided and result.ahead)
        worse += bool(result.decided and not result.ahead)
        undecided += not result.decided
    return better, undecided, worse


def reference_value(results: Results, arm: str, metric: str) -> float | None:
    """Return what the paper printed; a growth that it did not print is taken from its perplexities."""
    if results.reference is None or arm not in results.reference.values:
        return None
    printed = results.reference.values[arm]
    quantity, condition = split_metric(metric)
    if metric in printed or quantity != "growth":
        return printed.get(metric)
    lengths = lengths_of(results, "ppl")
    far, near = printed.get(f"ppl@{condition}"), printed.get(f"ppl@{lengths[0]}") if lengths else None
    return far / near if far is not None and near else None


def _paired(
    results: Results, metric: str, arm: str, baseline: str
) -> tuple[float, tuple[float, float] | None, float | None, bool]:
    for given in results.comparisons:
        if given.metric != metric or given.difference is None or given.ci95 is None:
            continue
        if math.isnan(given.difference) or any(math.isnan(bound) for bound in given.ci95):
            continue
        if (given.arm, given.baseline) == (arm, baseline):
            return given.difference, given.ci95, given.p, True
        if (given.baseline, given.arm) == (arm, baseline):
            return -given.difference, (-given.ci95[1], -given.ci95[0]), given.p, True
    return math.nan, None, None, False


def _excludes_zero(ci95: tuple[float, float] | None) -> bool:
    return ci95 is not None and not ci95[0] <= 0 <= ci95[1]


def _apart(ours: Metric | None, theirs: Metric | None) -> bool:
    if ours is None or theirs is None or ours.ci95 is None or theirs.ci95 is None:
        return False
    return ours.ci95[1] < theirs.ci95[0] or theirs.ci95[1] < ours.ci95[0]


def measured(results: Results, arm: str, metric: str) -> str:
    """Write the mean of a metric and its interval."""
    entry = results.arms[arm].metrics[metric]
    return f"{number(entry.mean)} {interval(entry.ci95, like=entry.mean)}".strip()


def label_of(results: Results, arm: str) -> str:
    """Return the name that a reader sees."""
    return results.arms[arm].label


def evidence(result: Contrast) -> str:
    """Say in words what a contrast rests on."""
    if result.paired:
        size = f"{number(result.difference, signed=True)} {interval(result.ci95, like=result.difference, signed=True)}"
        return f"paired difference {size}" + (f", p = {probability(result.p)}" if result.p is not None else "")
    return "their 95 % intervals are apart" if result.decided else "their 95 % intervals overlap or are missing"
