"""What is asked of a recipe's arms beside what they have: met or missed, how surely, and why."""

from __future__ import annotations

import math

from keel.evaluation.results import Results, Target
from keel.report.contrasts import contrast, label_of, mean_of
from keel.report.tables import Cell, Row, Table
from keel.report.text import interval, number


def targets_table(results: Results) -> Table | None:
    """Return one row a target whose arms were measured; None where there is none.

    A target is met or missed by the mean over seeds, decidedly so where the 95 % interval lies on that side of the bound.
    """
    given = [] if results.reference is None else results.reference.targets
    rows = [row for target in given if (row := _row(results, target)) is not None]
    if not rows:
        return None
    met = sum(cell.best for row in rows for cell in row.cells)
    return Table(
        title="Targets",
        note=(
            f"{met} of {len(rows)} met. Met or missed by the mean over seeds; decidedly, where the 95 % interval lies on that side too. "
            "A ratio is of means."
        ),
        corner="what is asked",
        columns=["asked", "here", "outcome", "what the measurements say"],
        rows=rows,
    )


def _row(results: Results, target: Target) -> Row | None:
    found = _measured(results, target)
    if found is None:
        return None
    value, ci95 = found
    bound = target.least if target.least is not None else target.most
    assert bound is not None
    upward = target.least is not None
    met = value >= bound if upward else value <= bound
    is_difference = target.baseline is not None and not target.ratio
    if is_difference and value == bound:
        met = False  # "more than" is not "as much as"
    # The end of the interval that is next to the bound.
    near = None if ci95 is None else ci95[0] if met == upward else ci95[1]
    sure = near is not None and ((near >= bound if upward else near <= bound) == met) and near != bound
    sign = (">" if upward else "<") if is_difference else "≥" if upward else "≤"
    outcome = ("met" if met else "missed") + ("" if sure or ci95 is None else ", not decidedly")
    return Row(
        label=target.says,
        cells=[
            Cell(text=f"{sign} {number(bound, signed=is_difference)}"),
            Cell(text=number(value, signed=is_difference), interval=interval(ci95, like=value, signed=is_difference)),
            Cell(text=outcome, best=met),
            Cell(text=_subject(results, target) + (f" {target.why}" if target.why and not met else "")),
        ],
    )


def _subject(results: Results, target: Target) -> str:
    """Say whose number it is."""
    ours = label_of(results, target.arm)
    if target.baseline is None:
        return f"{ours}."
    return f"{ours} {'over' if target.ratio else 'minus'} {label_of(results, target.baseline)}."


def _measured(results: Results, target: Target) -> tuple[float, tuple[float, float] | None] | None:
    """Return the number that a target is about and its interval; NaN where it is no number, None where an arm lacks the metric."""
    arms = [target.arm, *([target.baseline] if target.baseline else [])]
    means = [mean_of(results.arms[arm], target.metric) if arm in results.arms else None for arm in arms]
    ours = means[0]
    if ours is None or None in means:
        return None
    if any(mean is not None and math.isnan(mean) for mean in means):
        return math.nan, None
    if target.baseline is None:
        return ours, results.arms[target.arm].metrics[target.metric].ci95
    theirs = means[1]
    assert theirs is not None
    if target.ratio:
        return (ours / theirs, None) if theirs else None
    found = contrast(results, target.metric, target.arm, target.baseline)
    return ours - theirs, found.ci95
