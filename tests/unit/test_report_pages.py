"""The report as HTML and as Markdown, and its figures, from results that are usual and results that are not."""

from __future__ import annotations

import base64
import html.parser
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report_support"))

from report_cases import (
    ARMS,
    DYCK,
    PIXEL,
    make_dyck,
    make_measured,
    make_mixed,
    make_results,
    make_text,
    write_with_pictures,
)

from keel.drawing import DARK, LIGHT
from keel.errors import KeelError
from keel.evaluation.results import Curve, Metric, Results, write_results
from keel.report import keep_results, write_docs_page, write_report
from keel.report.drawing import looks_of
from keel.report.figures import draw_all
from keel.report.metrics import groups_of, metric_phrase, quantity_phrase
from keel.report.painting import Line, extent_of, limits_of, log_ticks, spaced, spread
from keel.report.tables import (
    against_table,
    beside_paper_table,
    comparison_tables,
    cost_table,
    detail_tables,
    group_table,
    single_table,
)
from keel.report.text import capitalised

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
    assert (
        "accuracy (share)" in text
        and "In accuracy only RoPE has a result: 0.5000." in text
        and "not in a checkout" in text
    )
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


OTHERS = {"dyck": (make_dyck, 8), "text": (make_text, 6), "mixed": (make_mixed, 9)}


@pytest.mark.parametrize("case", OTHERS)
def test_a_page_of_other_measurements_is_whole(tmp_path: Path, case: str) -> None:
    results, num_figures = OTHERS[case][0](), OTHERS[case][1]
    text = page_of(results, tmp_path)
    page = Page(text)
    assert page.loads == [] and page.arms == set(results.arms) and "img" not in page.tags
    assert len(page.ids) == len(set(page.ids)) and text.count('<figure role="group"') == num_figures
    files = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert len(files) == 2 * num_figures and all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in files)
    for metric in {name for arm in results.arms.values() for name in arm.metrics}:
        column = metric_phrase(metric) if "@" not in metric else quantity_phrase(metric.partition("@")[0])
        assert capitalised(column) in text or column in text, metric


def test_single_metrics_show_units_direction_the_best_and_the_paper() -> None:
    results = make_dyck()
    table = single_table(results)
    assert table is not None
    assert table.columns[::2] == ["Dyck structural accuracy (share) ↑", "Markov L1 ↓"]
    rows = {row.label: row.cells for row in table.rows if row.arm}
    assert rows["RoPE + structural stream"][0].best and rows["NoPE"][2].best  # the higher accuracy, the lower L1
    assert rows["NoPE"][1].text == "0.3000" and not rows["NoPE"][1].tied
    assert not rows["RoPE + structural stream"][3].best  # nothing to be better than
    printed = [(row.label, row.cells[0].text) for row in table.rows if row.arm is None]
    assert printed == [("paper", "0.5420"), ("paper", "0.7760"), ("paper", "0.9260"), ("fusion (paper only)", "0.9100")]


def test_each_group_of_conditions_has_a_table_with_what_they_count() -> None:
    results = make_dyck()
    tables = {group.title: group_table(results, group) for group in groups_of(results)}
    shape = {title: (table.corner, table.columns) for title, table in tables.items()}
    assert shape == {
        "Dyck structural accuracy by length": ("length", ["64", "80", "100"]),
        "Dyck structural accuracy by depth": ("depth", ["3", "4", "5", "6", "7", "8"]),
        "Dyck exact match by length": ("length", ["64", "80", "100"]),
        "JSON field F1 by condition": ("condition", ["seen", "unseen"]),
        "gate saturation by layer": ("layer", ["1", "2", "3", "4"]),
    }
    assert tables["gate saturation by layer"].note == "Share; lower is better."
    assert [row.arm for row in tables["gate saturation by layer"].rows] == ["structural"]


def test_conditions_are_sorted_by_their_number_and_unknown_kinds_name_themselves() -> None:
    measured: Any = {"a": ("A", [], {"x.y@head10": 0.1, "x.y@head9": 0.2, "x.y": 0.3, "x.y@t0.5": 0.1})}
    [heads, others] = groups_of(make_measured(measured))
    assert (heads.columns, heads.axis, heads.metrics) == (["9", "10"], "head", ["x.y@head9", "x.y@head10"])
    assert (others.columns, others.axis) == (["0.5"], "t")


def test_ours_stand_beside_theirs_wherever_the_paper_printed_something() -> None:
    results = make_dyck()
    single = single_table(results)
    assert single is not None
    beside = beside_paper_table(results, single)
    assert beside is not None and beside.columns[:2] == ["RoPE, ours", "RoPE, theirs"]
    assert beside.columns[-1] == "fusion, theirs" and "Learned positions, ours" not in beside.columns
    assert [cell.text for cell in beside.rows[0].cells] == [
        *("0.5500", "0.5420", "0.7800", "0.7760", "0.9200", "0.9260", "0.9100")
    ]
    lengths, depths = (group_table(results, group) for group in groups_of(results)[:2])
    assert beside_paper_table(results, lengths) is not None and beside_paper_table(results, depths) is None
    assert beside_paper_table(make_dyck(reference=None), single) is None


def test_the_many_parts_of_a_measurement_are_folded_away_from_it(tmp_path: Path) -> None:
    parts = {f"blimp.paradigm_{part}": 0.5 for part in range(12)}
    results = make_measured({"a": ("A", [], {"blimp.overall": 0.6, "alpha": 1.0, **parts})})
    for name in parts:
        entry = results.arms["a"].metrics[name]
        results.arms["a"].metrics[name] = entry.model_copy(update={"higher_is_better": None})
    single, [details] = single_table(results), detail_tables(results)
    assert single is not None and single.metrics == ["blimp.overall", "alpha"]
    assert details.title == "BLiMP by part" and details.metrics == list(parts)
    text = write_docs_page([write_results(results, tmp_path / "x.json")], tmp_path / "x.md").read_text(encoding="utf-8")
    measured, folded = text.split("<details><summary>BLiMP by part</summary>\n\n")
    assert "BLiMP paradigm 3" in folded.split("</details>")[0] and "BLiMP paradigm 3" not in measured
    # A few are no parts: they are shown with the others.
    for name in list(parts)[9:]:
        del results.arms["a"].metrics[name]
    assert detail_tables(results) == []


def test_of_what_the_paper_printed_nothing_of_nothing_stands_beside_theirs() -> None:
    results = make_dyck()
    single = single_table(results)
    assert single is not None and results.reference is not None
    beside = beside_paper_table(results, single)
    assert beside is not None
    printed = {metric for values in results.reference.values.values() for metric in values}
    assert {row.label for row in beside.rows} == {
        label for label, metric in zip(single.columns, single.metrics, strict=True) if metric in printed
    }
    assert 0 < len(beside.rows) < len(single.columns)


def test_a_share_is_drawn_as_it_is_however_far_arms_are_apart() -> None:
    low, high = (Line(arm="a", label="a", x=[1, 2], y=y, low=y, high=y) for y in ([0.02, 0.01], [0.9, 0.8]))
    assert extent_of([low, high]) == (0.01, 0.9) and limits_of([low, high])[1] < 0.1
    assert extent_of([Line(arm="a", label="a", x=[1], y=[0.0], low=[0.0], high=[0.0])]) == (-0.05, 0.05)
    measured = {name: (label, streams, dict(means)) for name, (label, streams, means) in DYCK.items()}
    measured["rope"][2]["dyck.exact_match"] = 0.001
    figures = {drawing.name: drawing for drawing in draw_all(make_measured(measured), "x")}
    assert "RoPE 0.0010" in figures["dyck-exact-match"].alt
    assert "Not drawn" not in figures["gate-saturation-by-layer"].caption


def test_pictures_of_probes_are_inside_the_page(tmp_path: Path) -> None:
    text = write_report([write_with_pictures(small(), tmp_path)], tmp_path / "out").read_text(encoding="utf-8")
    sources = re.findall(r'<img src="data:image/([a-z+]+);base64,([^"]+)" alt="([^"]+)">', text)
    assert [(kind, alt) for kind, _, alt in sources] == [("png", "Gate over depth"), ("svg+xml", "Heads")]
    assert base64.b64decode(sources[0][1]) == PIXEL and "A heat map." in text
    assert all(load.startswith("img src=data:") for load in Page(text).loads)
    assert "img-src data:" in text  # else the page's own policy would keep them out
    (tmp_path / "figures" / "heads.svg").unlink()
    with pytest.raises(KeelError, match=r"heads\.svg: cannot be read .* lists it under figures"):
        write_report([tmp_path / "results.json"], tmp_path / "out")


def test_pictures_are_kept_beside_the_results_that_a_docs_page_is_made_of(tmp_path: Path) -> None:
    source, kept = write_with_pictures(small(), tmp_path / "run"), tmp_path / "docs" / "data" / "p" / "one.small.json"
    keep_results(source, kept)
    again = kept.read_bytes()
    keep_results(kept, kept)  # a page written again from what is kept
    assert kept.read_bytes() == again and (kept.parent / "one.small" / "figures" / "alpha map.png").is_file()
    text = write_docs_page([kept], tmp_path / "docs" / "p.md").read_text(encoding="utf-8")
    assert (
        "![Gate over depth](data/p/one.small/figures/alpha%20map.png)" in text
        and "*Gate over depth. A heat map.*" in text
    )
    assert not list((tmp_path / "docs" / "figures").glob("*alpha*"))
    # Results that do not travel with the page: their pictures are copied to it.
    text = write_docs_page([source], tmp_path / "docs" / "q.md").read_text(encoding="utf-8")
    [name] = re.findall(r"!\[Gate over depth\]\(([^)]+)\)", text)
    assert name == "figures/s_former-wikitext103_extrapolation.small.alpha%20map.png"
    assert (tmp_path / "docs" / unquote(name)).read_bytes() == PIXEL


def test_a_docs_page_of_several_recipes_begins_with_links_to_them(tmp_path: Path) -> None:
    files = [write_results(results, tmp_path / f"{i}.json") for i, results in enumerate((make_dyck(), make_text()))]
    text = write_docs_page(files, tmp_path / "s_former.md").read_text(encoding="utf-8")
    assert (
        "- [Does a structural stream follow brackets?](#s_former-dyck-small)\n- [Next words](#s_former-text-small)"
        in text
    )
    assert text.index('<a id="s_former-dyck-small"></a>') < text.index('<a id="s_former-text-small"></a>')
    assert (
        "### Measurements, ours beside theirs" in text
        and "<summary>Dyck structural accuracy by depth</summary>" in text
    )
    assert (
        "- α depth r of RoPE + structural stream: 0.8660. Here: 0.8500" in text.split("### What did not reproduce")[1]
    )


def test_bad_input_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="no results file given"):
        write_report([], tmp_path)
    file = write_results(small(), tmp_path / "results.json")
    with pytest.raises(KeelError, match="is a file; give the folder"):
        write_report([file], file)
    with pytest.raises(KeelError, match="cannot be read"):
        write_report([tmp_path / "none.json"], tmp_path / "out")


def test_labels_are_moved_apart_and_stay_inside() -> None:
    placed = spaced([0.5, 0.5, 0.51, 0.99, 1.0, 0.0], gap=0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in zip(sorted(placed), sorted(placed)[1:], strict=False))
    assert min(placed) >= 0 and max(placed) <= 1 and placed[5] == min(placed)
    assert spaced([0.5, 0.9, 0.5], gap=0.1) == pytest.approx([0.45, 0.9, 0.55])  # no further than they must


def test_axes_choose_readable_ticks_and_leave_outliers_out() -> None:
    assert spread([256, 512, 1024, 2194, 38912, 40960], 4)[0] == 256 and spread([256, 40960], 8) == [256, 40960]
    assert log_ticks(80, 320) == [100, 150, 200, 300] and len(log_ticks(99.0, 101.0)) >= 2
    usual, wild = (Line(arm="a", label="a", x=[1, 2], y=y, low=y, high=y) for y in ([80.0, 100.0], [90.0, 1e9]))
    assert limits_of([usual], math.inf) == (80.0, 100.0)
    assert limits_of([usual, wild], math.inf)[1] < 200
