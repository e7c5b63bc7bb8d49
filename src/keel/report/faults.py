"""The failure-mode table of a path under safeguards: what was injected, when it was detected, if it stayed bounded, when it was over."""

from __future__ import annotations

from keel.evaluation.results import Arm, Results
from keel.report.contrasts import mean_of
from keel.report.metrics import FAULTS, split_metric
from keel.report.tables import Cell, Row, Table
from keel.report.text import capitalised, number

_COLUMNS = {
    "detected_after": "detected after, tokens",
    "bounded": "bounded, share",
    "recovered_after": "recovered after, tokens",
    "others_untouched": "other rows untouched, share",
}


def fault_tables(results: Results) -> list[Table]:
    """Return a table of modes for every arm that faults were injected into."""
    return [_table(name, arm) for name, arm in results.arms.items() if _modes(arm)]


def _modes(arm: Arm) -> list[str]:
    """The modes of an arm, ``fault.<mode>.<measure>``, in the order in which they first appear."""
    names = [split_metric(metric)[0].split(".") for metric in arm.metrics if metric.startswith(FAULTS)]
    return list(dict.fromkeys(parts[1] for parts in names if len(parts) == 3))


def _table(name: str, arm: Arm) -> Table:
    rows = []
    for mode in _modes(arm):
        values = [mean_of(arm, f"{FAULTS}{mode}.{measure}") for measure in _COLUMNS]
        cells = [Cell(text=number(value)) for value in values]
        rows.append(Row(label=capitalised(mode.replace("_", " ")), arm=name, cells=cells))
    return Table(
        title=f"Failure modes: {arm.label}",
        note="Each fault was injected on purpose; means over rows and seeds. NaN: in some row never detected, or not recovered from.",
        corner="injected",
        columns=list(_COLUMNS.values()),
        rows=rows,
    )
