"""A page of `docs/results/`: the same findings and tables as the report, in Markdown, with figures beside it."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from keel.evaluation.results import Picture, Results, read_results, write_results
from keel.files import write_atomically
from keel.report.page import Section, load_sections, read_picture
from keel.report.reproduction import Finding
from keel.report.tables import Cell, Table, beside_paper_table


def write_docs_page(results: list[Path], page: Path, more: Sequence[str] = ()) -> Path:
    """Write a Markdown page, and its figures into `figures/` beside it; return the path of the page.

    Args:
        results: results files; where they lie under the page's folder the page links to them.
        page: the file to write, such as `docs/results/s_former.md`.
        more: Markdown to stand at its end.
    Raises: KeelError for a bad results file, none at all, or a page that cannot be written.
    """
    sections = load_sections(results, page.parent)
    for section in sections:
        for figure in section.figures:
            figure.write(page.parent / "figures", section.slug)
    parts = [f"# {_title(sections)}\n", f"{_GENERATED}\n"]
    several = len(sections) > 1
    if several:
        parts += ["\n".join(f"- [{_escape(s.results.title)}](#{_anchor(s)})" for s in sections) + "\n"]
    for section, path in zip(sections, results, strict=True):
        parts += [f'<a id="{_anchor(section)}"></a>\n'] if several else []
        parts += _section_parts(section, path, page)
    parts += more
    write_atomically(page, ("\n".join(parts).rstrip() + "\n").encode())
    return page


def keep_results(source: Path, kept: Path) -> None:
    """Copy a results file, and the pictures that it lists into a folder that is called as the copy is.

    Args:
        source: the results file.
        kept: the copy, such as `docs/results/data/s_former/dyck.small.json`; its pictures go into `dyck.small/` beside it.
    Raises: KeelError for a bad results file, a picture that is missing, or a folder that cannot be written.
    """
    results = read_results(source)
    if source.resolve() == kept.resolve():
        return
    pictures = [picture.model_copy(update={"file": f"{kept.stem}/{picture.file}"}) for picture in results.figures]
    for old, new in zip(results.figures, pictures, strict=True):
        write_atomically(kept.parent / new.file, read_picture(old, source.parent))
    write_results(results.model_copy(update={"figures": pictures}), kept)


_GENERATED = "<!-- Written by `keel report DIR… --docs` from results files. Do not edit: run it again. -->"


def _title(sections: list[Section]) -> str:
    papers = [section.results.reference.paper for section in sections if section.results.reference]
    return _escape(papers[0] if papers else sections[0].results.title)


def _anchor(section: Section) -> str:
    return section.slug.replace(".", "-")


def _link(path: Path, page: Path) -> str:
    """Return a link to the data where it travels with the page, else only its name."""
    relative = _relative(path, page)
    return f"`{path.name}`" if relative.startswith("..") else f"[`{relative}`]({relative})"


def _relative(path: Path, page: Path) -> str:
    return Path(os.path.relpath(path.resolve(), page.parent.resolve())).as_posix()


def _place(section: Section, picture: Picture, page: Path) -> str:
    """Return where a page finds a picture: where it lies, if that travels with the page, else a copy in `figures/`."""
    content = read_picture(picture, section.folder)
    relative = _relative(section.folder / picture.file, page)
    if relative.startswith(".."):
        relative = f"figures/{section.slug}.{Path(picture.file).name}"
        write_atomically(page.parent / relative, content)
    return quote(relative)


def _section_parts(section: Section, path: Path, page: Path) -> list[str]:
    results = section.results
    parts = [f"## {_escape(results.title)}\n"]
    parts += [f"`{results.recipe}`, scale `{results.scale}`; data: {_link(path, page)}.\n"]
    parts += [f"**{_escape(section.verdict.headline)}**\n"]
    parts += ["\n".join(f"- {_escape(sentence)}" for sentence in section.verdict.sentences) + "\n"]
    if section.targets:
        parts += [*_table_parts(section.targets), "### Figures\n"]
    for figure in section.figures:
        parts += [
            f"![{_escape(figure.alt)}](figures/{section.slug}.{figure.name}.svg)\n",
            f"*{_escape(figure.caption)}*\n",
        ]
    for picture in results.figures:
        parts += [f"![{_escape(picture.title)}]({_place(section, picture, page)})\n"]
        parts += [f"*{_escape(' '.join([picture.title + '.', picture.caption]).strip())}*\n"]
    parts += _theirs_parts(results)
    tables = [*section.main, *section.more]
    besides = [beside_paper_table(results, table) for table in tables]
    for beside, table in zip(besides, tables, strict=True):
        parts += _table_parts(beside) if beside else []
        parts += _table_parts(_without_paper(table) if any(besides) else table, folded=table in section.more)
    parts += _table_parts(section.against) if section.against else []
    parts += _reproduction_parts(section.findings)
    parts += _table_parts(section.comparisons) if section.comparisons.rows else []
    parts += _table_parts(section.cost)
    parts += ["### Provenance\n", "| | |\n|---|---|"]
    parts[-1] += "".join(f"\n| {name} | {_escape(value)} |" for name, value in section.provenance) + "\n"
    return parts


def _theirs_parts(results: Results) -> list[str]:
    """Say what stands beside our numbers, and in what it differs."""
    reference = results.reference
    if reference is None:
        return []
    return [f"Theirs: {_escape(f'{reference.paper}, {reference.table}. {reference.note}'.strip())}\n"]


def _table_parts(table: Table, *, folded: bool = False) -> list[str]:
    """Render a table, folded if asked; one with many columns is turned on its side, so that a page shows it without scrolling."""
    header, rows = [table.corner, *table.columns], [[_escape(row.label), *map(_cell, row.cells)] for row in table.rows]
    header = [_escape(text) for text in header]
    if len(table.columns) > 8:
        turned = [list(line) for line in zip(header, *rows, strict=True)]
        header, rows = turned[0], turned[1:]
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    note = [f"{_escape(table.note)}\n"] if table.note else []
    body = [*note, "\n".join(lines) + "\n"]
    if folded:
        return [f"<details><summary>{html.escape(table.title)}</summary>\n", *body, "</details>\n"]
    return [f"### {_escape(table.title)}\n", *body]


def _without_paper(table: Table) -> Table:
    """Drop the rows of the paper's values, which stand in a table of their own."""
    return replace(table, rows=[row for row in table.rows if row.arm is not None])


def _cell(cell: Cell) -> str:
    text = f"**{_escape(cell.text)}**" if cell.best else _escape(cell.text) + (" ≈" if cell.tied else "")
    small = ", ".join(_escape(part) for part in (cell.interval, cell.remark) if part)
    return f"{text} <sub>{small}</sub>" if small else text


def _reproduction_parts(findings: list[Finding]) -> list[str]:
    if not findings:
        return []
    parts = []
    for title, reproduced, empty in (
        (
            "What did not reproduce",
            False,
            "Nothing among what the paper printed and was measured here.",
        ),
        ("What stayed undecided", None, ""),
        ("What reproduced", True, "Nothing among what the paper printed and was measured here."),
    ):
        lines = [f"- {_escape(f.claim)}. Here: {_escape(f.here)}." for f in findings if f.reproduced is reproduced]
        if lines or empty:
            parts += [f"### {title}\n", "\n".join(lines or [empty]) + "\n"]
    return parts


def _escape(text: str) -> str:
    return re.sub(r"([\\|*_<>\[\]`])", r"\\\1", text)
