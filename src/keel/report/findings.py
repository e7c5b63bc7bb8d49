"""What the numbers of one results file say in words: the verdict, and the sentences around it.

Everything that a report claims in words is computed here, so that the page and the documentation cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from keel.evaluation.results import Curve, Metric, Results
from keel.report.contrasts import (
    Contrast,
    contrast,
    evidence,
    label_of,
    mean_of,
    measured,
    ranking,
    reference_value,
)
from keel.report.metrics import (
    condition_phrase,
    is_extrapolation,
    lengths_of,
    metric_phrase,
    primary_metrics,
    quantity_phrase,
    split_metric,
)
from keel.report.reproduction import reproduction
from keel.report.text import capitalised, joined, number

FEW_DOCUMENTS = 20
"""Below so many documents a percentile bootstrap is visibly too narrow, and the report says so."""
_DESCRIPTION = "A description: more is neither better nor worse in anything that was measured."
_MOST_OUTCOMES = 6
"""So many measurements are put into words; the tables hold all."""
Status = Literal["helped", "undecided", "did not help", "mixed", "no stream"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The headline and the sentences that qualify it."""

    status: Status
    headline: str
    sentences: list[str]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one metric says: `result` is the best arm with a stream against the best without, None where one is missing."""

    metric: str
    status: Status
    sentence: str
    result: Contrast | None


def verdict(results: Results) -> Verdict:
    """Say in one sentence whether the stream helped, then what a reader must know beside it.

    Perplexity at the greatest length decides where it was measured over lengths; else the headline counts in how many of
    the primary metrics the stream helped, or gives the outcome of the only one that can be compared.
    """
    metrics = primary_metrics(results)
    if not metrics and any(arm.metrics for arm in results.arms.values()):
        return Verdict(status="no stream", headline=_DESCRIPTION, sentences=_reproduced(results))
    outcomes = [_outcome(results, metric) for metric in metrics if ranking(results, metric)]
    if not outcomes:
        return Verdict(status="undecided", headline="Undecided: no arm has a finite result.", sentences=[])
    compared = [outcome for outcome in outcomes if outcome.result is not None]
    over_lengths = is_extrapolation(outcomes[0].metric)
    lead = outcomes[0] if over_lengths or not compared else compared[0]
    summary = len(compared) > 1 and not over_lengths
    sentences = _extrapolation_sentences(results, lead.result) if over_lengths else []
    sentences += _outcome_sentences(results, outcomes, None if summary else lead)
    lost = [metric_phrase(metric) for metric in metrics if not ranking(results, metric)]
    sentences += [f"No arm has a finite result in {joined(lost)}."] if lost else []
    if lead.result is not None:
        sentences += _training_sentences(results) + _parameter_sentences(results, lead.result.arm, lead.result.baseline)
    return Verdict(
        status=_common_status(compared) if summary else lead.status,
        headline=_summary(compared) if summary else lead.sentence,
        sentences=sentences + _cautions(results, several=len(compared) > 1),
    )


def _reproduced(results: Results) -> list[str]:
    marks = {True: "as the paper has it", False: "not as the paper has it", None: "undecided"}
    return [
        f"{capitalised(f.claim)} in the paper; here {f.here}: {marks[f.reproduced]}." for f in reproduction(results)
    ]


def _outcome(results: Results, metric: str) -> Outcome:
    with_stream, without = ranking(results, metric, streams=True), ranking(results, metric, streams=False)
    if not with_stream or not without:
        any_stream = any(arm.streams for arm in results.arms.values())
        status: Status = "undecided" if any_stream else "no stream"
        return Outcome(metric=metric, status=status, sentence=_best_sentence(results, metric), result=None)
    result = contrast(results, metric, with_stream[0], without[0])
    status = "undecided" if not result.decided else "helped" if result.ahead else "did not help"
    return Outcome(metric=metric, status=status, sentence=_contrast_sentence(results, status, result), result=result)


def _summary(compared: list[Outcome]) -> str:
    """Count the measurements in which the stream helped, did not help, and that are undecided."""
    parts = []
    for status, words in (
        ("helped", "helped in {}"),
        ("did not help", "did not help in {}"),
        ("undecided", "left {} undecided"),
    ):
        names = [metric_phrase(outcome.metric) for outcome in compared if outcome.status == status]
        if names:
            how_many = f"all {len(names)}" if len(names) == len(compared) else str(len(names))
            parts.append(f"{words.format(how_many)} ({joined(names)})")
    return f"Of {len(compared)} measurements, the stream {joined(parts)}."


def _common_status(compared: list[Outcome]) -> Status:
    statuses = {outcome.status for outcome in compared}
    return statuses.pop() if len(statuses) == 1 else "mixed"


def _outcome_sentences(results: Results, outcomes: list[Outcome], headline: Outcome | None) -> list[str]:
    """Put each metric into words, with the paper's values behind it; the headline has already said its own."""
    # Where not all can be told, an undecided one is the first that nobody misses.
    told = sorted(outcomes, key=lambda outcome: outcome.status == "undecided")[:_MOST_OUTCOMES]
    sentences = []
    for outcome in (outcome for outcome in outcomes if outcome in told):
        words = [] if outcome is headline else [outcome.sentence]
        if not is_extrapolation(outcome.metric):
            words += _paper_sentences(results, outcome.metric)
        sentences += [" ".join(words)] if words else []
    left = len(outcomes) - _MOST_OUTCOMES
    return sentences + ([f"The tables hold {left} more measurement{'s' * (left > 1)}."] if left > 0 else [])


def _paper_sentences(results: Results, metric: str) -> list[str]:
    """Set our numbers beside those that the paper printed for the same arms; empty where it printed none."""
    parts = []
    for name, arm in results.arms.items():
        printed, ours = reference_value(results, name, metric), mean_of(arm, metric)
        if printed is None or ours is None or math.isnan(ours):
            continue
        ci95 = arm.metrics[metric].ci95
        relation = "is lower" if ours < printed else "is higher"
        if ci95 is None or any(math.isnan(bound) for bound in ci95):
            relation = "has no interval"
        elif ci95[0] <= printed <= ci95[1]:
            relation = "agrees within its interval"
        parts.append(f"{number(printed)} for {arm.label} (ours, {measured(results, name, metric)}, {relation})")
    return [f"The paper has {metric_phrase(metric)} {joined(parts)}."] if parts else []


def _where(metric: str) -> tuple[str, str]:
    """Return how a sentence begins and what its numbers are: ("At 4,096 tokens", "perplexity "), or ("In accuracy", "").

    The second ends in a space unless it is empty.
    """
    quantity, condition = split_metric(metric)
    place = condition_phrase(condition, quantity)
    return (
        (capitalised(place), f"{quantity_phrase(quantity)} ")
        if place.startswith("at ")
        else (f"In {metric_phrase(metric)}", "")
    )


def _contrast_sentence(results: Results, status: Status, result: Contrast) -> str:
    where, quantity = _where(result.metric)
    best, peer = label_of(results, result.arm), label_of(results, result.baseline)
    ours, theirs = (
        measured(results, result.arm, result.metric),
        measured(results, result.baseline, result.metric),
    )
    because = evidence(result)
    means = [mean_of(arm, result.metric) for arm in results.arms.values()]
    if status == "undecided" and len(set(means)) == 1:
        return f"{where} nothing can be told: every arm has {quantity}{number(means[0])}."
    if status == "undecided":
        return (
            f"{where} it is undecided whether the stream helped: {best} has {quantity}{ours}; {peer}, the best "
            f"baseline, {theirs} ({because})."
        )
    if status == "helped":
        return (
            f"{where} the stream helped: {best} has {quantity}{ours}, against {theirs} for {peer}, the best baseline "
            f"({because})."
        )
    return (
        f"{where} the stream did not help: {peer}, the best baseline, has {quantity}{theirs}, against {ours} for "
        f"{best}, the best with the stream ({because})."
    )


def _best_sentence(results: Results, metric: str) -> str:
    order = ranking(results, metric)
    where, quantity = _where(metric)
    ours = f"{quantity}{measured(results, order[0], metric)}"
    if len(order) == 1:
        return f"{where} only {label_of(results, order[0])} has a result: {ours}."
    best = f"{where} {label_of(results, order[0])} is best, with {ours}"
    result = contrast(results, metric, order[0], order[1])
    second = f"{label_of(results, order[1])} follows with {measured(results, order[1], metric)} ({evidence(result)})"
    return f"{best}; {second}." if result.decided else f"{best}, but not decidedly: {second}."


def _extrapolation_sentences(results: Results, result: Contrast | None) -> list[str]:
    return [] if result is None else _length_sentences(results, result.arm) + _growth_sentences(results)


def _length_sentences(results: Results, arm: str) -> list[str]:
    """Say at how many lengths an arm is ahead of every baseline, and how it does at the shortest."""
    lengths = lengths_of(results, "ppl")
    peers = [name for name, other in results.arms.items() if not other.streams]
    if len(lengths) < 2:
        return []
    every = [[contrast(results, f"ppl@{length}", arm, peer) for peer in peers] for length in lengths]
    ahead = sum(all(result.ahead for result in results_here) for results_here in every)
    decided = sum(all(result.ahead and result.decided for result in results_here) for results_here in every)
    sentences = [
        f"{label_of(results, arm)} has a lower perplexity than every baseline at {ahead} of {len(lengths)} "
        f"lengths, decidedly at {decided}."
    ]
    near = f"ppl@{lengths[0]}"
    if (with_stream := ranking(results, near, streams=True)) and (without := ranking(results, near, streams=False)):
        result = contrast(results, near, with_stream[0], without[0])
        relation = "not decidedly apart from" if not result.decided else "below" if result.ahead else "above"
        sentences.append(
            f"At {lengths[0]:,} tokens, the shortest length, {label_of(results, with_stream[0])} "
            f"({measured(results, with_stream[0], near)}) is {relation} {label_of(results, without[0])}, the best "
            f"baseline ({measured(results, without[0], near)}; {evidence(result)})."
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
            parts.append(
                f"×{measured(results, name, metric)} for {arm.label}{_excess(value, base, label_of(results, host))}"
            )
    if not parts or base is None:
        return []
    return [
        f"From {near[0]:,} to {lengths[-1]:,} tokens perplexity grows by ×{measured(results, host, metric)} for "
        f"{label_of(results, host)}, and by {joined(parts)}."
    ]


def _excess(value: float, base: float | None, host: str) -> str:
    """Say how much closer to 1 a growth is than the baseline's, and what part of it it is: both are called a cut of growth."""
    if base is None or not (math.isfinite(base) and math.isfinite(value)) or base <= 1:
        return ""
    closer = 1 - abs(value - 1) / (base - 1)
    way = f"{closer:.0%} closer to 1" if closer >= 0 else f"{-closer:.0%} further from 1"
    return f" ({way}, {number(value / base)} of that of {host})"


def _training_sentences(results: Results) -> list[str]:
    """Follow the lead of the first stream arm over the first arm without a stream along training, in every curve."""
    trained = {name: arm for name, arm in results.arms.items() if arm.weights_of is None and arm.curves}
    stream = next((name for name, arm in trained.items() if arm.streams), None)
    host = next((name for name, arm in trained.items() if not arm.streams), None)
    if stream is None or host is None:
        return []
    sentences = []
    for label in (label for label in trained[stream].curves if label in trained[host].curves):
        curve, other = (trained[arm].curves[label].joined() for arm in (stream, host))
        if other.x != curve.x or len(curve.x) < 2:
            continue
        pairs = [(row_mean(ours), row_mean(theirs)) for ours, theirs in zip(curve.values, other.values, strict=True)]
        ratios = [ours / theirs if theirs else math.nan for ours, theirs in pairs]
        if math.isfinite(ratios[0]) and math.isfinite(ratios[-1]):
            sentences.append(
                f"Along training, {label} of {label_of(results, stream)} is {ratios[0]:.3f} of that of "
                f"{label_of(results, host)} at the first measurement and {ratios[-1]:.3f} at the last{_extreme(curve, ratios)}."
            )
    return sentences


def _extreme(curve: Curve, ratios: list[float]) -> str:
    """Where along training the ratio was lowest or highest, if that was neither at the beginning nor at the end."""
    ends = ratios[0], ratios[-1]
    for word, best in (("lowest", min), ("highest", max)):
        value = best(ratios)
        if abs(value - best(ends)) > 0.02 * value:
            return f"; {word}, {value:.3f}, after {curve.x[ratios.index(value)]:,.0f} {curve.x_label}"
    return ""


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


def _num_seeds(metric: Metric) -> int:
    return sum(value is not None for value in metric.values)


def _cautions(results: Results, *, several: bool) -> list[str]:
    num_seeds, num_documents = len(results.provenance.seeds), results.provenance.documents
    cautions = (
        ["Several measurements are compared: neither intervals nor p are corrected for their number."]
        if several
        else []
    )
    if num_seeds == 1:
        cautions.append("One seed: intervals are over documents alone and say nothing about another initialisation.")
    elif num_seeds < 5:
        cautions.append(f"{num_seeds} seeds: the spread between seeds is itself uncertain.")
    partial = [
        f"{arm.label} has {done} of {num_seeds} seeds"
        for arm in results.arms.values()
        if arm.metrics and (done := max(_num_seeds(metric) for metric in arm.metrics.values())) < num_seeds
    ]
    if partial:
        cautions.append(f"Not finished: {joined(partial)}; comparisons are over the seeds that both have.")
    if num_documents is not None and num_documents < FEW_DOCUMENTS:
        cautions.append(f"The evaluation text holds {num_documents} documents: intervals over so few are too narrow.")
    return cautions
