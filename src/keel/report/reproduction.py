"""What of the paper did and did not reproduce: orderings of arms, and growth, beside the values that it printed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

from keel.evaluation.results import Results
from keel.report.contrasts import contrast, evidence, label_of, measured, reference_value
from keel.report.metrics import Group, count, groups_of, kind_name, metric_phrase, quantity_phrase, single_metrics
from keel.report.text import joined, number

# Perplexity per token and bits per byte are of a text and a tokenizer, and those are not the paper's: growth stands for them.
_OF_A_TOKENIZER = ("ppl", "bpb")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim of the paper beside ours: reproduced (True), not (False), or not decided by our intervals (None)."""

    claim: str
    here: str
    reproduced: bool | None


def reproduction(results: Results) -> list[Finding]:
    """Compare orderings of arms, their growth and single values with the paper's; empty without a reference."""
    arms = [name for name in results.arms if results.reference and name in results.reference.values]
    groups, pairs = groups_of(results), list(combinations(arms, 2))
    findings = [_ordering(results, group, *pair) for group in groups if group.values for pair in pairs]
    for group in groups:
        if group.quantity == "growth":
            findings += [_value_finding(results, name, group.metrics[-1], "×") for name in arms]
    single = single_metrics(results) + [metric for group in groups if not group.values for metric in group.metrics]
    for metric in single:
        findings += [_single_ordering(results, metric, *pair) for pair in pairs]
        findings += [_value_finding(results, name, metric) for name in arms]
    for group in groups:
        if group.values and group.quantity not in ("growth", *_OF_A_TOKENIZER):
            findings += [_values_finding(results, group, name) for name in arms]
    return [finding for finding in findings if finding is not None]


def _ordering(results: Results, group: Group, first: str, second: str) -> Finding | None:
    """Compare the paper's ordering of two arms with ours, under all conditions where it is as under the greatest."""
    metrics = dict(zip(group.values, group.metrics, strict=True))
    signs = {value: _reference_sign(results, metric, first, second) for value, metric in metrics.items()}
    known = {value: sign for value, sign in signs.items() if sign is not None}
    if not known:
        return None
    direction = known[max(known)]
    low, high = (first, second) if direction < 0 else (second, first)
    claimed = [value for value, sign in known.items() if sign == direction]
    every = {value: contrast(results, metrics[value], low, high) for value in claimed}
    undecided = [value for value, result in every.items() if not result.decided]
    opposite = [value for value, result in every.items() if result.decided and result.difference > 0]
    here = f"so at {len(claimed) - len(undecided) - len(opposite)} of {len(claimed)}"
    here += f", reversed at {_places(group, opposite)}" if opposite else ""
    here += f", undecided at {_places(group, undecided)}" if undecided else ""
    order = f"{label_of(results, low)} below {label_of(results, high)}"
    return Finding(
        claim=f"{quantity_phrase(group.quantity)}: {order} at {_places(group, claimed)}",
        here=here,
        reproduced=False if opposite else None if undecided else True,
    )


def _single_ordering(results: Results, metric: str, first: str, second: str) -> Finding | None:
    theirs = _reference_sign(results, metric, first, second)
    if theirs is None:
        return None
    low, high = (first, second) if theirs < 0 else (second, first)
    result = contrast(results, metric, low, high)
    same = result.difference < 0
    return Finding(
        claim=f"{metric_phrase(metric)} of {label_of(results, low)} below {label_of(results, high)}",
        here=f"{'undecided' if not result.decided else 'so' if same else 'reversed'} ({evidence(result)})",
        reproduced=same if result.decided else None,
    )


def _reference_sign(results: Results, metric: str, first: str, second: str) -> int | None:
    ours, theirs = reference_value(results, first, metric), reference_value(results, second, metric)
    if ours is None or theirs is None or ours == theirs:
        return None
    return -1 if ours < theirs else 1


def _value_finding(results: Results, arm: str, metric: str, times: str = "") -> Finding | None:
    """Ask whether our interval holds the value that the paper has; `times` is written before both."""
    printed, entry = reference_value(results, arm, metric), results.arms[arm].metrics.get(metric)
    if printed is None or entry is None:
        return None
    inside = word = None
    if entry.mean is not None and math.isnan(entry.mean):
        inside = False
    elif entry.mean is not None and entry.ci95 is not None and not any(math.isnan(bound) for bound in entry.ci95):
        inside = entry.ci95[0] <= printed <= entry.ci95[1]
        word = None if inside else "smaller" if entry.mean < printed else "larger"
    return Finding(
        claim=f"{metric_phrase(metric)} of {label_of(results, arm)}: {times}{number(printed)}",
        here=f"{times}{measured(results, arm, metric)}" + (f", {word}" if word else ""),
        reproduced=inside,
    )


def _values_finding(results: Results, group: Group, arm: str) -> Finding | None:
    """Ask of every condition whether our interval holds the paper's value, in one finding."""
    metrics = dict(zip(group.values, group.metrics, strict=True))
    single = {value: _value_finding(results, arm, metric) for value, metric in metrics.items()}
    found = {value: finding for value, finding in single.items() if finding is not None}
    if not found:
        return None
    if len(found) == 1:
        return next(iter(found.values()))
    theirs = joined([number(reference_value(results, arm, metrics[value])) for value in found])
    ours = joined([number(results.arms[arm].metrics[metrics[value]].mean) for value in found])
    held = sum(finding.reproduced is True for finding in found.values())
    every = {finding.reproduced for finding in found.values()}
    return Finding(
        claim=f"{quantity_phrase(group.quantity)} of {label_of(results, arm)} at {_places(group, list(found))}: {theirs}",
        here=f"{ours}; {held} of {len(found)} agree within their intervals",
        reproduced=False if False in every else None if None in every else True,
    )


def _places(group: Group, values: list[float]) -> str:
    """Write conditions after "at": "512 and 1,024", "depth 3 and 4", "8 lengths"."""
    if len(values) > 4:
        return f"{len(values)} {'lengths' if group.kind == '' else 'conditions'}"
    return (f"{kind_name(group.kind)} " if group.kind else "") + joined([count(value) for value in values])
