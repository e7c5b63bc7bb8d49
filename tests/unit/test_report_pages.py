"""The report as HTML and as Markdown, and its figures, from results that are usual and results that are not."""

from __future__ import annotations

import html.parser
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report_support"))

from report_cases import ARMS, make_results

from keel.errors import KeelError
from keel.evaluation.results import Curve, Metric, Results, write_results
from keel.report import write_docs_page, write_report
from keel.report.drawing import DARK, LIGHT, looks_of
from keel.report.figures import _limits, _Line, _log_ticks, _spaced, _spread, draw_all
from keel.report.metrics import groups_of
from keel.report.tables import against_table, comparison_tables, cost_table, group_table

LOADING = {"src", "href", "srcset", "data", "poster", "action", "xlink:href", "background", "cite"}


class Page(html.parser.HTMLParser):
    """Collects what a page would load, its text, and the arms of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.arms: set[str] = set()
        self.text: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in LOADING and not (value or "").startswith("#"):
                self.loads.append(f"{tag} {name}={value}")
            self.arms |= {value or ""} if name == "data-arm" else set()
            self.ids += [value or ""] if name == "id" else []

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def usual() -> Results:
    return make_results()


@pytest.fixture(scope="module")
def report(usual: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report([write_results(usual, folder / "results.json")], folder / "out")


def small(**changes: Any) -> Results:
    """Two arms at two lengths, quick to draw; `changes` are merged into the file's top level."""
    arms: dict[str, Any] = {name: ARMS[name] for name in ("rope", "structural")}
    data = make_results(arms, lengths=(256, 1024)).model_dump(by_alias=True)
    return Results.model_validate(data | changes)


def page_of(results: Results, tmp_path: Path) -> str:
    return write_report([write_results(results, tmp_path / "results.json")], tmp_path / "out").read_text(
        encoding="utf-8"
    )


def test_the_page_loads_nothing_and_runs_nothing(report: Path) -> None:
    page = Page(report.read_text(encoding="utf-8"))
    assert page.loads == []
    assert not {"script", "link", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    style = report.read_text(encoding="utf-8").split("<style>")[1].split("</style>")[0]
    assert "@import" not in style and "url(" not in style
    assert "default-src 'none'" in report.read_text(encoding="utf-8")
    assert Page('<img src="https://example.org/x.png">').loads  # the check itself can fail


def test_every_arm_is_in_the_table_with_its_numbers(report: Path, usual: Results) -> None:
    page = Page(report.read_text(encoding="utf-8"))
    assert page.arms == set(usual.arms)
    text = " ".join(page.text)
    assert all(arm.label in text and f"{arm.params_total:,}" in text for arm in usual.arms.values())
    assert "fusion (paper only)" in text and "32.84" in text and "3f2c1ab" in text and "2 CPU cores" in text


def test_ids_are_unique_and_every_reference_inside_is_answered(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    ids = Page(text).ids
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    assert references and references <= set(ids)


def test_colours_of_inline_figures_are_variables(report: Path) -> None:
    figures = re.findall(r"<figure.*?</figure>", report.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(figures) == 3
    for figure in figures:
        assert "var(--series-0)" in figure and "var(--muted)" in figure and "#0b0b" not in figure
        assert not re.findall(r"(?:fill|stroke): #(?!fff)[0-9a-f]{6}", figure)


def test_figures_lie_beside_the_page_as_svg_with_both_palettes_and_png(report: Path) -> None:
    names = {path.name for path in (report.parent / "figures").iterdir()}
    stem = "s_former-wikitext103_extrapolation.small"
    assert names == {f"{stem}.{n}.{s}" for n in ("perplexity", "growth-at-40960", "training-0") for s in ("svg", "png")}
    for path in (report.parent / "figures").glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        ElementTree.fromstring(text)
        assert LIGHT["paper"] in text and DARK["paper"] in text and "prefers-color-scheme: dark" in text
    for path in (report.parent / "figures").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    assert page_of(small(), tmp_path / "a") == page_of(small(), tmp_path / "b")


def test_labels_are_escaped_and_never_read_as_formulas(tmp_path: Path) -> None:
    data = small().model_dump(by_alias=True)
    data["title"] = "<script>alert(1)</script>"
    data["arms"]["rope"]["label"] = 'a<b> & "$x_1$" | *c*'
    text = page_of(Results.model_validate(data), tmp_path)
    assert "<script" not in text and "&lt;script&gt;" in text and "$x_1$" in text
    ElementTree.fromstring(next((tmp_path / "out" / "figures").glob("*perplexity.svg")).read_text(encoding="utf-8"))
    docs = write_docs_page([tmp_path / "results.json"], tmp_path / "docs" / "page.md").read_text(encoding="utf-8")
    assert r"a\<b\>" in docs and r"\| \*c\*" in docs and r"# \<script\>" in docs


def broken(**metric: Any) -> Results:
    data = make_results(
        {name: ARMS[name] for name in ("rope", "nope", "structural")}, lengths=(256, 1024, 4096)
    ).model_dump()
    data["schema"] = data.pop("schema_id")
    for name in ("ppl@1024", "ppl@4096", "growth@4096"):
        data["arms"]["nope"]["metrics"][name] |= metric
    return Results.model_validate(data)


@pytest.mark.parametrize(
    ("metric", "shown"),
    [
        ({"mean": 1e9, "values": [1e9] * 3, "ci95": [1e8, 1e10]}, "NoPE ↑ 1.0×10⁹"),
        ({"mean": math.inf, "values": [math.inf] * 3, "ci95": [5.0, math.inf]}, "∞"),
        ({"mean": math.nan, "values": [math.nan] * 3, "ci95": [math.nan, math.nan]}, "NaN"),
        ({"mean": None, "values": [None] * 3, "ci95": None}, "–"),
        ({"mean": 0.0, "values": [0.0] * 3, "ci95": [-1.0, 0.0]}, "0.000"),
    ],
)
def test_values_that_break_axes_do_not_break_the_report(tmp_path: Path, metric: dict[str, Any], shown: str) -> None:
    text = page_of(broken(**metric), tmp_path)
    assert shown in text and text.count("<figure") == 3
    assert "nan" not in re.sub(r"NaN", "", " ".join(re.findall(r'd="[^"]*"', text)))


def test_an_arm_without_any_finite_value_is_named_under_the_figure(tmp_path: Path) -> None:
    data = small().model_dump(by_alias=True)
    for metric in data["arms"]["rope"]["metrics"].values():
        metric |= {"mean": math.nan, "values": [math.nan] * 3, "ci95": None}
    assert "Not drawn, for want of a finite value: RoPE." in page_of(Results.model_validate(data), tmp_path)


def test_sparse_results_still_give_a_page(tmp_path: Path) -> None:
    data = small(comparisons=[], reference=None).model_dump(by_alias=True)
    del data["arms"]["structural"]
    data["provenance"] |= {"git": None, "seeds": [0]}
    accuracy = Metric(values=[0.5], mean=0.5, ci95=None, unit="share", higher_is_better=True)
    data["arms"]["rope"] |= {"metrics": {"accuracy": accuracy.model_dump()}, "curves": {}, "train_tokens_per_s": None}
    text = page_of(Results.model_validate(data), tmp_path)
    assert "accuracy (share)" in text and "In accuracy only RoPE has a result: 0.5000." in text and "not in a checkout" in text
    data["arms"]["rope"]["metrics"] = {}
    assert "no arm has a finite result" in page_of(Results.model_validate(data), tmp_path)


def test_many_arms_keep_distinct_looks(tmp_path: Path) -> None:
    arms: dict[str, Any] = {
        f"arm{i}": (
            f"Arm {i} with a name so long that it has to be cut",
            ["structural"] * (i % 2),
            None,
            4.5 + i / 50,
            0.01,
        )
        for i in range(12)
    }
    results = make_results(arms, lengths=(256, 1024), compare=False)
    looks = looks_of(results)
    assert len({(look.series, look.marker, str(look.dash)) for look in looks.values()}) == 12
    assert all(look.solid == bool(results.arms[name].streams) for name, look in looks.items())
    assert len(draw_all(results, "x")) == 3


def test_missing_seeds_of_a_curve_are_left_out(tmp_path: Path) -> None:
    data = small().model_dump(by_alias=True)
    curve = Curve(x_label="steps", x=[0.0, 1.0], values=[[3.0, None, 5.0], [None, None, None]])
    data["arms"]["rope"]["curves"] = {"loss": curve.model_dump()}
    text = page_of(Results.model_validate(data), tmp_path)
    assert "Loss over training" in text and "RoPE 4.000" in text and "(then not finite)" in text


def test_tables_mark_the_best_and_what_is_not_apart_from_it(usual: Results) -> None:
    table = group_table(usual, groups_of(usual)[0])
    best = [row.label for row in table.rows if row.arm and row.cells[-1].best]
    assert best == ["Window + structural stream"]
    assert [row.label for row in table.rows if row.arm is None] == ["paper", "paper", "fusion (paper only)"]
    same: dict[str, Any] = {"a": ("A", [], None, 4.7, 0.0), "b": ("B", ["structural"], None, 4.7, 0.0)}
    close = make_results(same, lengths=(256, 512), noise=0.05)
    rows = group_table(close, groups_of(close)[0]).rows
    assert sorted((cell.best, cell.tied) for row in rows if row.arm for cell in row.cells[:1]) == [
        (False, True),
        (True, False),
    ]


def test_comparisons_turn_the_stream_first_and_keep_the_ends(usual: Results) -> None:
    main, every = comparison_tables(usual)
    assert len(main.rows) == 11 and len(every.rows) == 21  # 2 stream arms × 5 others and each other; all 21 pairs
    assert [column for column in main.columns if "tokens" in column] == [
        "perplexity at 256 tokens",
        "perplexity at 40,960 tokens",
        "growth of perplexity at 40,960 tokens",
    ]
    assert all(row.label.endswith("structural stream") for row in main.rows)
    assert main.rows[0].cells[1].text.startswith("−") and main.rows[0].cells[1].best


def test_cost_names_the_lender_of_weights(usual: Results) -> None:
    rows = {row.arm: row for row in cost_table(usual).rows}
    assert rows["window"].cells[2].text == "weights of RoPE" and rows["rope"].cells[2].interval == "(1.00)"
    against = against_table(usual)
    assert against is not None and against.rows[1].cells[0].text == "10 · 0 · 0"


def test_the_docs_page_has_ours_beside_theirs_and_what_failed(usual: Results, tmp_path: Path) -> None:
    data = write_results(usual, tmp_path / "docs" / "results" / "data" / "x.small.json")
    page = write_docs_page([data], tmp_path / "docs" / "results" / "s_former.md")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# S-Former\n") and "[`data/x.small.json`](data/x.small.json)" in text
    assert "RoPE, ours | RoPE, theirs" in text and "fusion, theirs" in text and "| 40,960 |" in text
    failed = text.split("### What did not reproduce\n")[1].split("###")[0]
    assert "×9.787" in failed and "### What reproduced" in text and "### Provenance" in text
    for image in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (page.parent / image).is_file()
    for line in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({row.replace(r"\|", "").count("|") for row in line.strip().splitlines()}) == 1


def test_several_results_share_a_page(tmp_path: Path) -> None:
    first = write_results(small(), tmp_path / "a.json")
    second = write_results(small(recipe="demo", title="Another"), tmp_path / "b.json")
    text = write_report([first, second], tmp_path / "out").read_text(encoding="utf-8")
    ids = Page(text).ids
    assert len(ids) == len(set(ids)) and text.count('<section class="run"') == 2 and 'href="#demo.small"' in text
    with pytest.raises(KeelError, match="is given 2 times"):
        write_report([first, first], tmp_path / "out")


def test_bad_input_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="no results file given"):
        write_report([], tmp_path)
    file = write_results(small(), tmp_path / "results.json")
    with pytest.raises(KeelError, match="is a file; give the folder"):
        write_report([file], file)
    with pytest.raises(KeelError, match="cannot be read"):
        write_report([tmp_path / "none.json"], tmp_path / "out")


def test_labels_are_moved_apart_and_stay_inside() -> None:
    placed = _spaced([0.5, 0.5, 0.51, 0.99, 1.0, 0.0], gap=0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in zip(sorted(placed), sorted(placed)[1:], strict=False))
    assert min(placed) >= 0 and max(placed) <= 1 and placed[5] == min(placed)


def test_axes_choose_readable_ticks_and_leave_outliers_out() -> None:
    assert _spread([256, 512, 1024, 2194, 38912, 40960], 4)[0] == 256 and _spread([256, 40960], 8) == [256, 40960]
    assert _log_ticks(80, 320) == [100, 150, 200, 300] and len(_log_ticks(99.0, 101.0)) >= 2
    usual, wild = (_Line(arm="a", label="a", x=[1, 2], y=y, low=y, high=y) for y in ([80.0, 100.0], [90.0, 1e9]))
    assert _limits([usual], math.inf) == (80.0, 100.0)
    assert _limits([usual, wild], math.inf)[1] < 200
