"""A text with each of its tokens shaded by a number, as a page of its own: which tokens a prior leans on, where a signal falls.

Shapes: T tokens of a row.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --paper: #ffffff; --shade: #2a7fbf; --rule: #c8d0d8; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde4ea; --paper: #14191e; --shade: #3d9be0; --rule: #3a444d; } }
body { font: 16px/1.9 Georgia, serif; color: var(--ink); background: var(--paper); max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; line-height: 1.3; } h2 { font-size: 1rem; margin: 2rem 0 .3rem; } .note { opacity: .75; font-size: .9rem; }
p.text { white-space: pre-wrap; overflow-wrap: anywhere; border-top: 1px solid var(--rule); padding-top: .6rem; margin: 0; }
i { font-style: normal; border-radius: 3px; background: color-mix(in srgb, var(--shade) calc(var(--s) * 1%), transparent); }
i.marked { outline: 2px solid var(--shade); outline-offset: -1px; font-weight: bold; }
"""


@dataclass(frozen=True, kw_only=True)
class ShadedRow:
    """One row: its ``pieces`` of text, a shade for each in [0, 1], what is said of each when it is pointed at, and which are marked."""

    heading: str
    pieces: Sequence[str]
    shades: Sequence[float]
    notes: Sequence[str]
    marked: frozenset[int]


def token_page(title: str, note: str, rows: Sequence[ShadedRow]) -> str:
    """Return an HTML page that needs no network: every row as text, shaded and marked."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1>{html.escape(title)}</h1><p class="note">{html.escape(note)}</p>',
    ]
    for row in rows:
        tokens = (
            _token(piece, shade, said, index in row.marked)
            for index, (piece, shade, said) in enumerate(zip(row.pieces, row.shades, row.notes, strict=True))
        )
        parts.append(f'<h2>{html.escape(row.heading)}</h2><p class="text">{"".join(tokens)}</p>')
    return "\n".join([*parts, "</body></html>", ""])


def _token(piece: str, shade: float, said: str, is_marked: bool) -> str:
    # A line end keeps its effect and can be seen where it is shaded.
    text = html.escape(piece).replace("\n", "⏎\n")
    percent = round(85 * min(1.0, max(0.0, shade)))
    marked = ' class="marked"' if is_marked else ""
    return f'<i{marked} style="--s:{percent}" title="{html.escape(said)}">{text}</i>'
