"""How an arm looks in the figures and tables of a report; how a figure is rendered is in ``keel.drawing``.

Colour never stands alone: an arm also has its marker and its dash, solid for arms with a stream, broken for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keel.drawing import SERIES_LIGHT
from keel.evaluation.results import Results

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: tuple[Any, ...] = ((0, (5, 2)), (0, (1.2, 1.4)), (0, (7, 2, 1.2, 2)), (0, (3, 1.2)), (0, (9, 3)))


@dataclass(frozen=True, kw_only=True)
class Look:
    """How one arm is drawn, the same in every figure and in the tables."""

    series: str
    marker: str
    dash: Any
    solid: bool


def looks_of(results: Results) -> dict[str, Look]:
    """Give every arm its colour, marker and dash: arms with a stream first, in solid lines."""
    order = sorted(results.arms, key=lambda name: not results.arms[name].streams)
    looks, broken = {}, 0
    for index, name in enumerate(order):
        solid = bool(results.arms[name].streams)
        dash: Any = "solid" if solid else _DASHES[broken % len(_DASHES)]
        broken += not solid
        looks[name] = Look(
            series=f"series-{index % len(SERIES_LIGHT)}",
            marker=_MARKERS[index % len(_MARKERS)],
            dash=dash,
            solid=solid,
        )
    return {name: looks[name] for name in results.arms}


def swatch(look: Look) -> str:
    """Return a small inline SVG of an arm's line and mark, for its row in a table."""
    colour = f"var(--{look.series})"
    dash = "" if look.dash == "solid" else f' stroke-dasharray="{" ".join(str(part) for part in look.dash[1])}"'
    fill = colour if look.solid else "var(--paper)"
    return (
        '<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true">'
        f'<path d="M1 5H27" stroke="{colour}" stroke-width="{2 if look.solid else 1.5}" fill="none"{dash}/>'
        f'<path d="{_SWATCH_MARKS[look.marker]}" transform="translate(14 5)" stroke="{colour}" fill="{fill}"/></svg>'
    )


_SWATCH_MARKS = {
    "o": "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0Z",
    "s": "M-2.7 -2.7H2.7V2.7H-2.7Z",
    "^": "M0 -3.4L3.2 2.6H-3.2Z",
    "D": "M0 -3.6L3.6 0L0 3.6L-3.6 0Z",
    "v": "M0 3.4L3.2 -2.6H-3.2Z",
    "P": "M-1.2 -3.4H1.2V-1.2H3.4V1.2H1.2V3.4H-1.2V1.2H-3.4V-1.2H-1.2Z",
    "X": "M-3.2 -1.6L-1.6 -3.2L0 -1.6L1.6 -3.2L3.2 -1.6L1.6 0L3.2 1.6L1.6 3.2L0 1.6L-1.6 3.2L-3.2 1.6L-1.6 0Z",
    "*": "M0 -3.8L1 -1.2L3.8 -1.2L1.6 0.5L2.4 3.3L0 1.7L-2.4 3.3L-1.6 0.5L-3.8 -1.2L-1 -1.2Z",
}
