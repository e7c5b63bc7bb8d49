"""A page of `docs/results/`: the same findings and tables as the report, in Markdown, with figures beside it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from keel.files import write_atomically
from keel.report.page import Section, load_sections
from keel.report.reproduction import Finding
from keel.report.tables import Cell, Table, beside_paper_table


def write_docs_page(results: list[Path], page: Path) -> Path:
    """Write a Markdown page, and its figures into `figures/` beside it; return the path of the page.

    Args:
        results: results files; where they lie under the page's folder the page links to them.
        page: the file to write, such as `docs/results/s_former.md`.
    Raises: KeelError for a bad results file, none at all, or a page that cannot be written.
    """
    sections = load_sections(results, page.parent)
    for section in sections:
        for figure in section.figures:
            figure.write(page.parent / "figures", section.slug)
    parts = [f"# {_title(sections)}\n", f"{_GENERATED}\n"]
    for section, path in zip(sections, results, strict=True):
        parts += _section_parts(section, _link(path, page))
    write_atomically(page, ("\n".join(parts).rstrip() + "\n").encode())
    return page


_GENERATED = "<!-- Written by `keel report DIR… --docs` from results files. Do not edit: run it again. -->"


def _title(sections: list[Section]) -> str:
    papers = [section.results.reference.paper for section in sections if section.results.reference]
    return _escape(papers[0] if papers else sections[0].results.title)


def _link(path: Path, page: Path) -> str:
    """Return a link to the data where it travels with the page, else only its name."""
    relative = Path(os.path.relpath(path.resolve(), page.parent.resolve())).as_posix()
    return f"`{path.name}`" if relative.startswith("..") else f"[`{relative}`]({relative})"


def _section_parts(section: Section, data: str) -> list[str]:
    results = section.results
    parts = [f"## {_escape(results.title)}\n", f"`{results.recipe}`, scale `{results.scale}`; data: {data}.\n"]
    parts += [f"**{_escape(section.verdict.headline)}**\n"]
    parts += ["\n".join(f"- {_escape(sentence)}" for sentence in section.verdict.sentences) + "\n"]
    for figure in section.figures:
        parts += [
            f"![{_escape(figure.alt)}](figures/{section.slug}.{figure.name}.svg)\n",
            f"*{_escape(figure.caption)}*\n",
        ]
    beside = beside_paper_table(results)
    tables = [*section.main, *section.more] + ([section.against] if section.against else [])
    parts += _table_parts(beside) if beside else []
    for table in tables:
        parts += _table_parts(_without_paper(table) if beside else table)
    parts += _reproduction_parts(section.findings)
    parts += _table_parts(section.comparisons) if section.comparisons.rows else []
    parts += _table_parts(section.cost)
    parts += ["### Provenance\n", "| | |\n|---|---|"]
    parts[-1] += "".join(f"\n| {name} | {_escape(value)} |" for name, value in section.provenance) + "\n"
    return parts


def _table_parts(table: Table) -> list[str]:
    """Render a table; one with many columns is turned on its side, so that a page shows it without scrolling."""
    header, rows = [table.corner, *table.columns], [[_escape(row.label), *map(_cell, row.cells)] for row in table.rows]
    header = [_escape(text) for text in header]
    if len(table.columns) > 8:
        turned = [list(line) for line in zip(header, *rows, strict=True)]
        header, rows = turned[0], turned[1:]
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return [
        f"### {_escape(table.title)}\n",
        *([f"{_escape(table.note)}\n"] if table.note else []),
        "\n".join(lines) + "\n",
    ]


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
            "Nothing that was compared: every ordering and growth is as the paper has it or undecided.",
        ),
        ("What stayed undecided", None, ""),
        ("What reproduced", True, "Nothing that was compared."),
    ):
        lines = [f"- {_escape(f.claim)}. Here: {_escape(f.here)}." for f in findings if f.reproduced is reproduced]
        if lines or empty:
            parts += [f"### {title}\n", "\n".join(lines or [empty]) + "\n"]
    return parts


def _escape(text: str) -> str:
    return re.sub(r"([\\|*_<>\[\]`])", r"\\\1", text)
