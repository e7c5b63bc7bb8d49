"""The failure-mode table of a report: one row a mode, and none of its numbers among the measurements."""

from __future__ import annotations

import sys
from pathlib import Path

from keel.evaluation.results import Arm, Metric, Results, write_results
from keel.report.faults import fault_tables
from keel.report.metrics import primary_metrics, single_metrics
from keel.report.page import load_sections

sys.path.insert(0, str(Path(__file__).parents[1] / "report_support"))

from report_cases import PROVENANCE


def metric(value: float, higher_is_better: bool | None = True) -> Metric:
    return Metric(values=[value] * 3, mean=value, ci95=None, unit="u", higher_is_better=higher_is_better)


def arm(label: str, **metrics: Metric) -> Arm:
    named = {name.replace("__", "."): value for name, value in metrics.items()}
    cost = {"params_total": 9, "params_trainable": 9, "train_tokens_per_s": None, "peak_memory_bytes": None}
    return Arm(label=label, streams=["dynamic_state"], metrics=named, **cost)  # type: ignore[arg-type]


def results() -> Results:
    faults = {
        "fault__noise_rampancy__detected_after": metric(0.0, False),
        "fault__noise_rampancy__bounded": metric(1.0),
        "fault__noise_rampancy__recovered_after": metric(16.5, False),
        "fault__noise_rampancy__others_untouched": metric(1.0),
        "fault__identity_split__detected_after": metric(float("nan"), False),
        "fault__identity_split__bounded": metric(0.25),
        "fault__identity_split__recovered_after": metric(3.0, False),
    }
    shared = {"dta__lcds": metric(0.5), "baseline__auroc_surprisal": metric(0.7, None)}
    arms = {"path": arm("Path", **shared), "guarded": arm("Guarded", **shared, **faults)}
    return Results(recipe="dta/signals", scale="tiny", title="T", provenance=PROVENANCE, arms=arms, comparisons=[])


def test_every_mode_has_a_row_and_only_arms_with_faults_a_table() -> None:
    (table,) = fault_tables(results())
    assert table.title == "Failure modes: Guarded" and len(table.columns) == 4
    shown = {row.label: [cell.text for cell in row.cells] for row in table.rows}
    assert shown == {
        "Noise rampancy": ["0.000", "1.000", "16.50", "1.000"],
        "Identity split": ["NaN", "0.2500", "3.000", "–"],
    }


def test_faults_are_in_no_other_table_and_baselines_in_no_verdict(tmp_path: Path) -> None:
    assert single_metrics(results()) == ["dta.lcds", "baseline.auroc_surprisal"]
    assert primary_metrics(results()) == ["dta.lcds"]
    write_results(results(), tmp_path / "results.json")
    (section,) = load_sections([tmp_path / "results.json"], tmp_path)
    assert [table.title for table in section.more] == ["Failure modes: Guarded"]
    assert not any("fault" in figure.name for figure in section.figures)
