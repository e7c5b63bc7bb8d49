"""The tables of a report, as plain data: the page and the documentation render the same ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from keel.evaluation.results import Arm, Results
from keel.report.contrasts import Contrast, contrast, label_of, mean_of, ranking, reference_value, tally
from keel.report.metrics import (
    DIRECTIONS,
    Group,
    details_of,
    lengths_of,
    metric_phrase,
    primary_metrics,
    quantity_phrase,
    single_metrics,
    unit_of,
)
from keel.report.text import capitalised, interval, number, probability, size_of


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A value, its interval, a remark, and whether it is best, or not decidedly apart from the best, of its column."""

    text: str
    interval: str = ""
    remark: str = ""
    best: bool = False
    tied: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row; `arm` names the arm of our own measurements, None for the paper's values."""

    label: str
    cells: list[Cell]
    arm: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose first column holds the labels of the rows; `metrics` are those of its columns, where it is of metrics."""

    title: str
    note: str
    corner: str
    columns: list[str]
    rows: list[Row] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)


_ARROWS = {True: "↑", False: "↓", None: ""}


def group_table(results: Results, group: Group) -> Table:
    """Return arms × conditions for one group of metrics, the paper's values in rows of their own below each arm."""
    unit, higher_is_better = unit_of(results, group.metrics[0])
    better = DIRECTIONS[higher_is_better]
    return Table(
        title=capitalised(group.title),
        note=_NOTES.get(group.quantity) or f"{capitalised(f'{unit}; {better}' if unit else better)}.",
        corner=group.axis,
        columns=group.columns,
        rows=_metric_rows(results, group.metrics),
        metrics=group.metrics,
    )


def single_table(results: Results) -> Table | None:
    """Return arms × metrics for the metrics without a condition, None without any; parts of others have tables of their own."""
    parts = {name for names in details_of(results).values() for name in names}
    metrics = [name for name in single_metrics(results) if name not in parts]
    return (
        _single_table(results, "Measurements", "↑ higher is better, ↓ lower is better.", metrics) if metrics else None
    )


def detail_tables(results: Results) -> list[Table]:
    """Return arms × parts for every family of metrics of which one is the mean of many others, such as BLiMP's paradigms."""
    return [
        _single_table(results, f"{capitalised(quantity_phrase(family))} by part", f"{len(metrics)} parts.", metrics)
        for family, metrics in details_of(results).items()
    ]


def _single_table(results: Results, title: str, note: str, metrics: list[str]) -> Table:
    return Table(
        title=title,
        note=note,
        corner="",
        columns=[_heading(results, metric) for metric in metrics],
        rows=_metric_rows(results, metrics),
        metrics=metrics,
    )


def _heading(results: Results, metric: str) -> str:
    unit, higher_is_better = unit_of(results, metric)
    return f"{metric_phrase(metric)}{f' ({unit})' if unit else ''} {_ARROWS[higher_is_better]}".rstrip()


def cost_table(results: Results) -> Table:
    """Return what every arm cost: parameters, training speed, peak memory."""
    fastest = max((arm.train_tokens_per_s or 0.0 for arm in results.arms.values()), default=0.0)
    rows = [
        Row(label=arm.label, arm=name, cells=_cost_cells(results, arm, fastest)) for name, arm in results.arms.items()
    ]
    return Table(
        title="Cost",
        note="Speed and memory are of training; in brackets the share of the fastest arm.",
        corner="",
        columns=["parameters", "of them trained", "training tokens/s", "peak memory"],
        rows=rows,
    )


def comparison_tables(results: Results) -> tuple[Table, Table]:
    """Return the paired comparisons that matter most, and all of them.

    The first holds the pairs with a stream in one arm or both, in perplexity and its growth at the shortest and the
    greatest length and in the other metrics that the verdict speaks of. Pairs are turned so that the arm with a stream comes first.
    """
    lengths = lengths_of(results, "ppl")
    ends = {f"{family}@{length}" for family in ("ppl", "growth") for length in (lengths[:1] + lengths[-1:])}
    metrics = list(dict.fromkeys(given.metric for given in results.comparisons))
    main = [name for name in metrics if name in ends or name in primary_metrics(results)]
    pairs = list(dict.fromkeys(_stream_first(results, given.arm, given.baseline) for given in results.comparisons))
    order = list(results.arms)
    pairs.sort(key=lambda pair: (not results.arms[pair[0]].streams, order.index(pair[0]), order.index(pair[1])))
    with_stream = [pair for pair in pairs if results.arms[pair[0]].streams]
    return (
        _comparison_table(results, "Paired comparisons", with_stream or pairs, main),
        _comparison_table(results, "All paired comparisons", pairs, metrics),
    )


def _stream_first(results: Results, arm: str, baseline: str) -> tuple[str, str]:
    turn = not results.arms[arm].streams and results.arms[baseline].streams
    return (baseline, arm) if turn else (arm, baseline)


def _comparison_table(results: Results, title: str, pairs: list[tuple[str, str]], metrics: list[str]) -> Table:
    rows = []
    for arm, baseline in pairs:
        cells = [_comparison_cell(contrast(results, metric, arm, baseline)) for metric in metrics]
        other = Cell(text=label_of(results, baseline))
        rows.append(Row(label=label_of(results, arm), arm=arm, cells=[other, *cells]))
    return Table(
        title=title,
        note="Difference arm − other arm on the same documents and seeds, its 95 % interval, and a two-sided p that is "
        "not corrected for the number of comparisons. Bold where the arm is decidedly better.",
        corner="arm",
        columns=["against", *(metric_phrase(metric) for metric in metrics)],
        rows=rows,
    )


def _comparison_cell(result: Contrast) -> Cell:
    if not result.paired:
        return Cell(text="–")
    outcome = "undecided" if not result.decided else "better" if result.ahead else "worse"
    return Cell(
        text=number(result.difference, signed=True),
        interval=interval(result.ci95, like=result.difference, signed=True),
        remark=f"{outcome}, p = {probability(result.p)}" if result.p is not None else outcome,
        best=outcome == "better",
    )


def against_table(results: Results, family: str = "ppl") -> Table | None:
    """Return arms with a stream × arms without: at how many lengths better, undecided, worse. None without both."""
    lengths = lengths_of(results, family)
    streams = [name for name, arm in results.arms.items() if arm.streams]
    peers = [name for name, arm in results.arms.items() if not arm.streams]
    if len(lengths) < 2 or not streams or not peers:
        return None
    rows = []
    for name in streams:
        counts = [tally(results, family, name, peer) for peer in peers]
        cells = [
            Cell(text=f"{better} · {undecided} · {worse}", best=better == len(lengths))
            for better, undecided, worse in counts
        ]
        rows.append(Row(label=label_of(results, name), arm=name, cells=cells))
    return Table(
        title="With a stream against without",
        note=f"At how many of the {len(lengths)} lengths the arm has a lower perplexity · is undecided · has a higher "
        "one. Decided by the paired difference, or by separate intervals where the file has no paired comparison.",
        corner="",
        columns=[label_of(results, peer) for peer in peers],
        rows=rows,
    )


def beside_paper_table(results: Results, table: Table) -> Table | None:
    """Turn a table of metrics into conditions × (ours, theirs) for the arms of the paper.

    Conditions of which it printed nothing are left out; the table itself has them. Returns None where it printed none of these metrics.
    Values that follow from what it printed do not count.
    """
    reference = results.reference
    if reference is None:
        return None
    names = dict.fromkeys([*results.arms, *reference.values])
    common = [name for name in names if {*table.metrics} & {*reference.values.get(name, {})}]
    if not common:
        return None
    printed = {metric for name in common for metric in reference.values[name]}
    kept = {metric: label for metric, label in zip(table.metrics, table.columns, strict=True) if metric in printed}
    columns, rows = [], [Row(label=label, cells=[]) for label in kept.values()]
    for name in common:
        ours = name in results.arms
        label = label_of(results, name) if ours else name
        columns += [f"{label}, ours", f"{label}, theirs"] if ours else [f"{label}, theirs"]
        for row, metric in zip(rows, kept, strict=True):
            row.cells.extend([_cell(results, name, metric, [])] if ours else [])
            row.cells.append(Cell(text=_printed(results, name, metric)))
    return Table(
        title=f"{table.title}, ours beside theirs",
        note="",
        corner=table.corner,
        columns=columns,
        rows=rows,
    )


_NOTES = {
    "ppl": "Perplexity per token of the same text, read in blocks of so many tokens; lower is better.",
    "bpb": "Bits per byte of the same text; lower is better, and comparable across tokenizers.",
    "growth": "Perplexity relative to that at the shortest length; 1 means that length costs nothing.",
}


def _metric_rows(results: Results, metrics: list[str]) -> list[Row]:
    orders = {metric: ranking(results, metric) for metric in metrics}
    rows = []
    for name, arm in results.arms.items():
        if any(metric in arm.metrics for metric in metrics):
            cells = [_cell(results, name, metric, orders[metric]) for metric in metrics]
            rows.append(Row(label=arm.label, arm=name, cells=cells))
        rows += _paper_row(results, name, "paper", metrics)
    for name in results.reference.values if results.reference else ():
        if name not in results.arms:
            rows += _paper_row(results, name, f"{name} (paper only)", metrics)
    return rows


def _paper_row(results: Results, name: str, label: str, metrics: list[str]) -> list[Row]:
    printed = [_printed(results, name, metric) for metric in metrics]
    return [Row(label=label, cells=[Cell(text=text) for text in printed])] if any(printed) else []


def _printed(results: Results, arm: str, metric: str) -> str:
    value = reference_value(results, arm, metric)
    return "" if value is None else number(value)


def _cell(results: Results, name: str, metric: str, order: list[str]) -> Cell:
    entry = results.arms[name].metrics.get(metric)
    if entry is None or entry.mean is None:
        return Cell(text="–")
    finite = entry.ci95 is not None and all(math.isfinite(bound) for bound in entry.ci95)
    best = len(order) > 1 and mean_of(results.arms[order[0]], metric) == entry.mean
    return Cell(
        text=number(entry.mean),
        interval=interval(entry.ci95, like=entry.mean) if finite else "",
        best=best,
        tied=bool(order) and not best and name in order and not contrast(results, metric, name, order[0]).decided,
    )


def _cost_cells(results: Results, arm: Arm, fastest: float) -> list[Cell]:
    speed = "–" if arm.train_tokens_per_s is None else f"{arm.train_tokens_per_s:,.0f}"
    share = "" if arm.train_tokens_per_s is None else f"({arm.train_tokens_per_s / fastest:.2f})"
    if arm.weights_of is not None:
        speed, share = f"weights of {label_of(results, arm.weights_of)}", ""
    return [
        Cell(text=f"{arm.params_total:,}"),
        Cell(text=f"{arm.params_trainable:,}"),
        Cell(text=speed, interval=share),
        Cell(text=size_of(arm.peak_memory_bytes)),
    ]
