"""What the numbers of one results file say: contrasts, the verdict and the sentences around it.

Everything that a report claims in words is computed here, so that the page and the documentation cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from keel.evaluation.results import Arm, Metric, Results
from keel.report.text import interval, joined, metric_phrase, number, probability, split_metric

FEW_DOCUMENTS = 20
"""Below so many documents a percentile bootstrap is visibly too narrow, and the report says so."""
Status = Literal["helped", "undecided", "did not help", "no stream"]


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


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The headline and the sentences that qualify it."""

    status: Status
    headline: str
    sentences: list[str]


def lengths_of(results: Results, family: str) -> list[int]:
    """Return every length at which some arm measured this family, ascending."""
    parts = [split_metric(name) for arm in results.arms.values() for name in arm.metrics]
    return sorted({part[1] for part in parts if part and part[0] == family})


def families_of(results: Results) -> list[str]:
    """Return the families that are measured at lengths, in the order in which they first appear."""
    parts = [split_metric(name) for arm in results.arms.values() for name in arm.metrics]
    return list(dict.fromkeys(part[0] for part in parts if part))


def single_metrics(results: Results) -> list[str]:
    """Return the metrics that are not measured at lengths, in the order in which they first appear."""
    names = [name for arm in results.arms.values() for name in arm.metrics if split_metric(name) is None]
    return list(dict.fromkeys(names))


def primary_metric(results: Results) -> str | None:
    """Return the metric of the verdict: perplexity at the greatest length, else the first metric, None without any."""
    if lengths := lengths_of(results, "ppl"):
        return f"ppl@{lengths[-1]}"
    return next((name for arm in results.arms.values() for name in arm.metrics), None)


def ranking(results: Results, metric: str, *, streams: bool | None = None) -> list[str]:
    """Return the arms that measured a metric, best first; `streams` keeps only those with (True) or without (False)."""
    measured: list[tuple[float, str]] = []
    for name, arm in results.arms.items():
        value = mean_of(arm, metric)
        if value is not None and not math.isnan(value) and streams in (None, bool(arm.streams)):
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
    if ours is not None and not math.isnan(difference) and difference != 0:
        ahead = (difference > 0) == ours.higher_is_better
    decided = ahead is not None and (_excludes_zero(ci95) if paired else _apart(ours, theirs))
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


def verdict(results: Results) -> Verdict:
    """Say in one sentence whether the stream helped, then what a reader must know beside it."""
    metric = primary_metric(results)
    if metric is None or not ranking(results, metric):
        return Verdict(status="undecided", headline="Undecided: no arm has a finite result.", sentences=[])
    with_stream, without = ranking(results, metric, streams=True), ranking(results, metric, streams=False)
    if not with_stream or not without:
        return Verdict(
            status="no stream" if not any(arm.streams for arm in results.arms.values()) else "undecided",
            headline=_best_sentence(results, metric),
            sentences=_cautions(results),
        )
    result = contrast(results, metric, with_stream[0], without[0])
    status: Status = "undecided" if not result.decided else "helped" if result.ahead else "did not help"
    sentences = _length_sentences(results, with_stream[0]) + _growth_sentences(results) + _training_sentences(results)
    return Verdict(
        status=status,
        headline=_headline(results, status, result),
        sentences=sentences + _parameter_sentences(results, with_stream[0], without[0]) + _cautions(results),
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
    parts = split_metric(metric)
    if metric in printed or parts is None or parts[0] != "growth":
        return printed.get(metric)
    lengths = lengths_of(results, "ppl")
    far, near = printed.get(f"ppl@{parts[1]}"), printed.get(f"ppl@{lengths[0]}") if lengths else None
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


def _where(metric: str) -> tuple[str, str]:
    """Split the words for a metric: ("At 4,096 tokens", "perplexity"), or ("In accuracy", "accuracy")."""
    phrase = metric_phrase(metric)
    if split_metric(metric) is None:
        return f"In {phrase}", phrase
    quantity, length = phrase.rsplit(" at ", 1)
    return f"At {length}", quantity


def _headline(results: Results, status: Status, result: Contrast) -> str:
    where, quantity = _where(result.metric)
    best, peer = label_of(results, result.arm), label_of(results, result.baseline)
    ours, theirs = (
        measured(results, result.arm, result.metric),
        measured(results, result.baseline, result.metric),
    )
    because = evidence(result)
    if status == "undecided":
        return (
            f"{where} it is undecided whether the stream helped: {best} has {quantity} {ours}; {peer}, the best "
            f"without a stream, {theirs} ({because})."
        )
    if status == "helped":
        return (
            f"{where} the stream helped: {best} has {quantity} {ours}, against {theirs} for {peer}, the best without a "
            f"stream ({because})."
        )
    return (
        f"{where} the stream did not help: {peer}, without a stream, has {quantity} {theirs}, against {ours} for "
        f"{best}, the best with one ({because})."
    )


def _best_sentence(results: Results, metric: str) -> str:
    order = ranking(results, metric)
    where, quantity = _where(metric)
    best = f"{where} {label_of(results, order[0])} is best, with {quantity} {measured(results, order[0], metric)}"
    if len(order) == 1:
        return f"{best}; no other arm has a finite result."
    result = contrast(results, metric, order[0], order[1])
    second = f"{label_of(results, order[1])} follows with {measured(results, order[1], metric)} ({evidence(result)})"
    return f"{best}; {second}." if result.decided else f"{best}, but not decidedly: {second}."


def _length_sentences(results: Results, arm: str) -> list[str]:
    """Say at how many lengths an arm is ahead of every arm without a stream, and how it does at the shortest."""
    lengths = lengths_of(results, "ppl")
    peers = [name for name, other in results.arms.items() if not other.streams]
    if len(lengths) < 2:
        return []
    every = [[contrast(results, f"ppl@{length}", arm, peer) for peer in peers] for length in lengths]
    ahead = sum(all(result.ahead for result in results_here) for results_here in every)
    decided = sum(all(result.ahead and result.decided for result in results_here) for results_here in every)
    sentences = [
        f"{label_of(results, arm)} has a lower perplexity than every arm without a stream at {ahead} of {len(lengths)} "
        f"lengths, decidedly at {decided}."
    ]
    near = f"ppl@{lengths[0]}"
    if (with_stream := ranking(results, near, streams=True)) and (without := ranking(results, near, streams=False)):
        result = contrast(results, near, with_stream[0], without[0])
        relation = "not decidedly apart from" if not result.decided else "below" if result.ahead else "above"
        sentences.append(
            f"At {lengths[0]:,} tokens, the shortest length, {label_of(results, with_stream[0])} "
            f"({measured(results, with_stream[0], near)}) is {relation} {label_of(results, without[0])}, the best "
            f"without a stream ({measured(results, without[0], near)}; {evidence(result)})."
        )
    return sentences


def _growth_sentences(results: Results) -> list[str]:
    lengths, near = lengths_of(results, "growth"), lengths_of(results, "ppl")
    host = next((name for name, arm in results.arms.items() if not arm.streams), None)
    if not lengths or host is None:
        return []
    metric = f"growth@{lengths[-1]}"
    base = mean_of(results.arms[host], metric)
    parts = []
    for name, arm in results.arms.items():
        value = mean_of(arm, metric)
        if arm.streams and value is not None:
            parts.append(f"×{measured(results, name, metric)} for {arm.label}{_excess(value, base)}")
    if not parts or base is None:
        return []
    return [
        f"From {near[0]:,} to {lengths[-1]:,} tokens perplexity grows by ×{measured(results, host, metric)} for "
        f"{label_of(results, host)}, and by {joined(parts)}."
    ]


def _excess(value: float, base: float | None) -> str:
    """Say how much closer to 1 a growth is than the baseline's."""
    if base is None or not (math.isfinite(base) and math.isfinite(value)) or base <= 1:
        return ""
    closer = 1 - abs(value - 1) / (base - 1)
    return f" ({closer:.0%} closer to 1)" if closer >= 0 else f" ({-closer:.0%} further from 1)"


def _training_sentences(results: Results) -> list[str]:
    """Follow the lead of the first stream arm over the first arm without a stream along training, in every curve."""
    trained = {name: arm for name, arm in results.arms.items() if arm.weights_of is None and arm.curves}
    stream = next((name for name, arm in trained.items() if arm.streams), None)
    host = next((name for name, arm in trained.items() if not arm.streams), None)
    if stream is None or host is None:
        return []
    sentences = []
    for label, curve in trained[stream].curves.items():
        other = trained[host].curves.get(label)
        if other is None or other.x != curve.x or len(curve.x) < 2:
            continue
        pairs = [(row_mean(ours), row_mean(theirs)) for ours, theirs in zip(curve.values, other.values, strict=True)]
        ratios = [ours / theirs if theirs else math.nan for ours, theirs in pairs]
        if math.isfinite(ratios[0]) and math.isfinite(ratios[-1]):
            sentences.append(
                f"Along training, {label} of {label_of(results, stream)} is {ratios[0]:.3f} of that of "
                f"{label_of(results, host)} at the first measurement and {ratios[-1]:.3f} at the last."
            )
    return sentences


def row_mean(row: list[float | None]) -> float:
    """Return the mean of one point of a curve over the seeds that have it, NaN where none has."""
    values = [value for value in row if value is not None]
    return math.fsum(values) / len(values) if values else math.nan


def _parameter_sentences(results: Results, arm: str, peer: str) -> list[str]:
    ours, theirs = results.arms[arm].params_total, results.arms[peer].params_total
    if not theirs:
        return []
    relative = ours / theirs - 1
    matched = "matched within" if abs(relative) < 0.01 else "not matched:"
    difference = f"{abs(relative):.2%}" if abs(relative) < 0.01 else f"{relative:+.1%}".replace("-", "−")
    both = f"{label_of(results, arm)} {ours:,}, {label_of(results, peer)} {theirs:,}"
    return [f"Parameters are {matched} {difference}: {both}."]


def _cautions(results: Results) -> list[str]:
    num_seeds, num_documents = len(results.provenance.seeds), results.provenance.documents
    cautions = []
    if num_seeds == 1:
        cautions.append("One seed: intervals are over documents alone and say nothing about another initialisation.")
    elif num_seeds < 5:
        cautions.append(f"{num_seeds} seeds: the spread between seeds is itself uncertain.")
    if num_documents is not None and num_documents < FEW_DOCUMENTS:
        cautions.append(f"The evaluation text holds {num_documents} documents: intervals over so few are too narrow.")
    return cautions
