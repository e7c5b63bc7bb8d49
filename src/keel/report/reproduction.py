"""What of the paper did and did not reproduce: orderings of arms, and growth, beside the values that it printed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from keel.evaluation.results import Results
from keel.report.findings import (
    contrast,
    evidence,
    families_of,
    label_of,
    lengths_of,
    measured,
    reference_value,
    single_metrics,
)
from keel.report.text import family_title, joined, metric_phrase, number


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim of the paper beside ours: reproduced (True), not (False), or not decided by our intervals (None)."""

    claim: str
    here: str
    reproduced: bool | None


def reproduction(results: Results) -> list[Finding]:
    """Compare orderings of arms and their growth with the paper's; empty without a reference to compare with."""
    arms = [name for name in results.arms if results.reference and name in results.reference.values]
    findings = [_ordering(results, family, *pair) for family in families_of(results) for pair in combinations(arms, 2)]
    if lengths := lengths_of(results, "growth"):
        findings += [_growth_finding(results, name, f"growth@{lengths[-1]}") for name in arms]
    findings += [
        _single_ordering(results, metric, *pair) for metric in single_metrics(results) for pair in combinations(arms, 2)
    ]
    return [finding for finding in findings if finding is not None]


def _ordering(results: Results, family: str, first: str, second: str) -> Finding | None:
    """Compare the paper's ordering of two arms with ours, at all lengths where it is as at the greatest."""
    signs = {
        length: _reference_sign(results, f"{family}@{length}", first, second) for length in lengths_of(results, family)
    }
    known = {length: sign for length, sign in signs.items() if sign is not None}
    if not known:
        return None
    direction = known[max(known)]
    low, high = (first, second) if direction < 0 else (second, first)
    claimed = [length for length, sign in known.items() if sign == direction]
    every = {length: contrast(results, f"{family}@{length}", low, high) for length in claimed}
    undecided = [length for length, result in every.items() if not result.decided]
    opposite = [length for length, result in every.items() if result.decided and result.difference > 0]
    here = f"so at {len(claimed) - len(undecided) - len(opposite)} of {len(claimed)}"
    here += f", reversed at {_lengths(opposite)}" if opposite else ""
    here += f", undecided at {_lengths(undecided)}" if undecided else ""
    order = f"{label_of(results, low)} below {label_of(results, high)}"
    return Finding(
        claim=f"{family_title(family)}: {order} at {_lengths(claimed)}",
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


def _growth_finding(results: Results, arm: str, metric: str) -> Finding | None:
    printed, entry = reference_value(results, arm, metric), results.arms[arm].metrics.get(metric)
    if printed is None or entry is None:
        return None
    inside = None if entry.ci95 is None or entry.mean is None else entry.ci95[0] <= printed <= entry.ci95[1]
    word = "" if inside is not False or entry.mean is None else ", smaller" if entry.mean < printed else ", larger"
    return Finding(
        claim=f"{metric_phrase(metric)} of {label_of(results, arm)}: ×{number(printed)}",
        here=f"×{measured(results, arm, metric)}{word}",
        reproduced=inside,
    )


def _lengths(lengths: list[int]) -> str:
    return joined([f"{length:,}" for length in lengths]) if len(lengths) <= 4 else f"{len(lengths)} lengths"
