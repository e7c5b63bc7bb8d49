"""One offline HTML file that says what results files hold; its figures also lie beside it as SVG and PNG."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from keel.drawing import DARK, LIGHT, Drawing, css_variables
from keel.errors import KeelError
from keel.evaluation.results import Picture, Results, read_results
from keel.files import write_atomically
from keel.report.drawing import looks_of, swatch
from keel.report.faults import fault_tables
from keel.report.figures import draw_all
from keel.report.findings import Verdict, verdict
from keel.report.metrics import groups_of, lengths_of
from keel.report.reproduction import Finding, reproduction
from keel.report.tables import (
    Table,
    against_table,
    comparison_tables,
    cost_table,
    detail_tables,
    group_table,
    single_table,
)
from keel.report.targets import targets_table
from keel.report.text import duration

_TEMPLATES = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Section:
    """All that the template shows of one results file, which lies in `folder`."""

    results: Results
    folder: Path
    slug: str
    verdict: Verdict
    main: list[Table]
    more: list[Table]
    against: Table | None
    targets: Table | None
    comparisons: Table
    all_comparisons: Table
    cost: Table
    findings: list[Finding]
    figures: list[Drawing]
    swatches: dict[str, Markup]
    provenance: list[tuple[str, str]]


def write_report(results: list[Path], out: Path) -> Path:
    """Write `report.html` and `figures/` into a folder and return the path of the page.

    Args:
        results: results files, shown one after the other.
        out: folder, made if it is missing.
    Raises: KeelError for a bad results file, none at all, or a folder that cannot be written.
    """
    sections = load_sections(results, out)
    for section in sections:
        for figure in section.figures:
            figure.write(out / "figures", section.slug)
    page = out / "report.html"
    write_atomically(page, render_page(sections).encode())
    return page


def load_sections(results: list[Path], out: Path) -> list[Section]:
    """Read results files and compute all that is shown of them.  Raises: KeelError, see `write_report`."""
    if not results:
        raise KeelError("report: no results file given; give at least one results.json")
    if out.is_file():
        raise KeelError(f"report: {out} is a file; give the folder that report.html goes into")
    sections = [_section(read_results(path), path.parent) for path in results]
    slugs = [section.slug for section in sections]
    for slug in slugs:
        if slugs.count(slug) > 1:
            raise KeelError(f"report: {slug} is given {slugs.count(slug)} times; give each recipe and scale once")
    return sections


def render_page(sections: list[Section]) -> str:
    """Return the page as HTML: no script, nothing loaded from anywhere."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup
    environment.globals["data_uri"] = _data_uri
    template = environment.get_template("page.html.j2")
    return template.render(sections=sections, light=Markup(css_variables(LIGHT)), dark=Markup(css_variables(DARK)))


def slug_of(results: Results) -> str:
    """Return a name for files and anchors: recipe and scale, with anything unusual replaced by a hyphen."""
    return ".".join(re.sub(r"[^A-Za-z0-9_-]+", "-", part) for part in (results.recipe, results.scale))


def provenance_of(results: Results) -> list[tuple[str, str]]:
    """Return the lines about where the numbers come from."""
    given = results.provenance
    return [
        ("Recipe", f"{results.recipe}, scale {results.scale}"),
        *([("Setting", given.setting)] if given.setting else []),
        ("Started", f"{given.started:%Y-%m-%d %H:%M %Z}"),
        ("Duration", duration(given.wall_s)),
        ("Device", given.device),
        ("Seeds", ", ".join(str(seed) for seed in given.seeds)),
        ("Evaluation documents", "not recorded" if given.documents is None else f"{given.documents:,}"),
        ("Commit", given.git or "not in a checkout"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in given.versions.items())),
    ]


def read_picture(picture: Picture, folder: Path) -> bytes:
    """Return the bytes of a picture that lies beside a results file.  Raises: KeelError if it cannot be read."""
    try:
        return (folder / picture.file).read_bytes()
    except OSError as error:
        raise KeelError(
            f"{folder / picture.file}: cannot be read ({error.strerror}); the results file lists it under figures: put "
            "it there, or take the entry out"
        ) from error


def _data_uri(section: Section, picture: Picture) -> str:
    kind = "svg+xml" if picture.file.endswith(".svg") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(read_picture(picture, section.folder)).decode()}"


def _section(results: Results, folder: Path) -> Section:
    single, groups = single_table(results), groups_of(results)
    tables = [group_table(results, group) for group in sorted(groups, key=lambda group: group.quantity != "ppl")]
    first = [single] if single else []
    comparisons, every = comparison_tables(results)
    slug = slug_of(results)
    return Section(
        results=results,
        folder=folder,
        slug=slug,
        verdict=verdict(results),
        main=tables[:1] + first if lengths_of(results, "ppl") else first + tables[:1],
        more=[*detail_tables(results), *tables[1:], *fault_tables(results)],
        against=against_table(results),
        targets=targets_table(results),
        comparisons=comparisons,
        all_comparisons=every,
        cost=cost_table(results),
        findings=reproduction(results),
        figures=draw_all(results, slug.replace(".", "-")),
        swatches={name: Markup(swatch(look)) for name, look in looks_of(results).items()},
        provenance=provenance_of(results),
    )
