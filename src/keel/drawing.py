"""How a figure is rendered: palettes, one canvas, SVG with colours as CSS variables, and PNG.

A figure is drawn twice as SVG, wide and narrow (for a phone); one drawing serves light and dark, since its colours are
CSS variables. The SVG file carries both palettes inside.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keel.files import write_atomically

LIGHT = {"paper": "#fdfdfb", "ink": "#1c1e21", "muted": "#5d6166", "rule": "#dcdcd5"}
DARK = {"paper": "#16181b", "ink": "#e8e6e1", "muted": "#a3a39e", "rule": "#34373c"}
# Okabe and Ito's palette, darkened or lightened until each colour stands at 3:1 or more from its paper.
SERIES_LIGHT = ("#0067a5", "#c4480b", "#00795a", "#a03e86", "#8a6700", "#4d5966", "#23829c", "#7a4a2b")
_SERIES_DARK = ("#5cb5ee", "#f58d50", "#3fc89c", "#e290cb", "#e2bb42", "#a9b4bf", "#66d2e4", "#cf9f7f")
LIGHT |= {f"series-{index}": colour for index, colour in enumerate(SERIES_LIGHT)}
DARK |= {f"series-{index}": colour for index, colour in enumerate(_SERIES_DARK)}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One figure of a report, ready for the page and for files.

    `wide` and `narrow` are inline SVG elements with colours as CSS variables; the wide one labels its lines, for the
    narrow one `legend` holds (arm, label, last value). `alt` says in words what is seen.
    """

    name: str
    title: str
    caption: str
    alt: str
    wide: str
    narrow: str
    legend: list[tuple[str, str, str]]
    file_svg: str
    png: bytes

    def write(self, folder: Path, prefix: str) -> None:
        """Write `PREFIX.NAME.svg` and `PREFIX.NAME.png` into a folder."""
        stem = f"{prefix}.{self.name}"
        write_atomically(folder / f"{stem}.svg", self.file_svg.encode())
        write_atomically(folder / f"{stem}.png", self.png)


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """What a painter may use: the axes, the colours, and whether the figure is the narrow one."""

    axes: Axes
    palette: dict[str, str]
    narrow: bool

    @property
    def font_size(self) -> float:
        """In points."""
        return 8.0 if self.narrow else 8.5

    def bare(self, equal: bool = True) -> None:
        """Take grid, ticks and frame away, for a picture that is no chart; ``equal``: one unit is as long on both axes."""
        if equal:
            self.axes.set_aspect("equal")
        self.axes.grid(visible=False)
        self.axes.set_xticks([])
        self.axes.set_yticks([])
        for spine in self.axes.spines.values():
            spine.set_visible(False)


Painter = Callable[[Canvas], None]


def render(
    paint: Painter,
    *,
    heights: tuple[float, float],
    label_width: int,
    labels_left: bool,
    name: str,
    title: str,
    caption: str,
    alt: str,
    prefix: str,
    legend: list[tuple[str, str, str]],
) -> Drawing:
    """Draw both widths as SVG with CSS variables, and the wide one as PNG in light colours."""
    variables = {key: f"#0b0b{index:02x}" for index, key in enumerate(LIGHT)}

    def svg(narrow: bool, ident: str) -> str:
        buffer = io.StringIO()
        with _settings():
            figure = _figure(paint, variables, narrow, heights[narrow], label_width, labels_left)
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return _with_variables(buffer.getvalue(), variables, ident)

    picture = io.BytesIO()
    with _settings():
        figure = _figure(paint, LIGHT, False, heights[0], label_width, labels_left)
        figure.savefig(picture, format="png", dpi=200, facecolor=LIGHT["paper"], metadata={"Software": None})
    wide = svg(False, f"{prefix}-{name}-wide")
    return Drawing(
        name=name,
        title=title,
        caption=caption,
        alt=alt,
        wide=wide,
        narrow=svg(True, f"{prefix}-{name}-narrow"),
        legend=legend,
        file_svg=_standalone(wide),
        png=picture.getvalue(),
    )


def _settings() -> AbstractContextManager[None]:
    # Not the user's matplotlibrc: the same results give the same figure everywhere. Labels are never read as formulas.
    own: dict[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "keel",
        "text.parse_math": False,
        "font.family": "DejaVu Sans",
    }
    return matplotlib.style.context(["default", own])


def _figure(
    paint: Painter, palette: dict[str, str], narrow: bool, height: float, label_width: int, labels_left: bool
) -> Figure:
    width = 3.6 if narrow else 7.6
    figure = Figure(figsize=(width, height), facecolor="none")
    names = (0.06 if labels_left else 0.05) if narrow else min(0.3, (label_width * 0.66 * 8.5 + 18) / 72 / width)
    left, right = (names, 1 - 0.62 / width) if labels_left else (0.58 / width, 1 - names)
    bottom = 0.3 if labels_left else 0.52
    axes = figure.add_axes((left, bottom / height, right - left, 1 - (bottom + 0.1) / height))
    canvas = Canvas(axes=axes, palette=palette, narrow=narrow)
    axes.set_facecolor("none")
    axes.grid(visible=True, color=palette["rule"], linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(palette["muted"])
        spine.set_linewidth(0.8)
    paint(canvas)
    axes.tick_params(colors=palette["muted"], labelsize=canvas.font_size, width=0.6, length=3, which="both")
    axes.tick_params(axis="y", length=0)
    for label in axes.get_yticklabels() if labels_left else ():
        label.set_color(palette["ink"])
    for axis_label in (axes.xaxis.label, axes.yaxis.label):
        axis_label.set_color(palette["muted"])
        axis_label.set_fontsize(canvas.font_size)
    return figure


def _with_variables(svg: str, variables: dict[str, str], ident: str) -> str:
    """Turn matplotlib's SVG file into an element to inline: no prolog, no metadata, own ids, colours as variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(?<=[ ]id=")|(?<=url\(#)|(?<=href="#)', f"{ident}-", svg)
    svg = re.sub(r"font-family: [^;\"]*|'DejaVu Sans'(?:, [^;\"]*)?", _own_font, svg)
    for name, colour in variables.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)


def _own_font(match: re.Match[str]) -> str:
    family = "system-ui, 'Helvetica Neue', Arial, sans-serif"
    return f"font-family: {family}" if match[0].startswith("font-family") else family


def css_variables(palette: dict[str, str]) -> str:
    """Return a palette as CSS declarations."""
    return " ".join(f"--{name}: {colour};" for name, colour in palette.items())


def _standalone(svg: str) -> str:
    """Give an inline SVG its own palettes and paper, so that it can be read as a file on any page."""
    style = (
        f"<style>:root {{ {css_variables(LIGHT)} }} "
        f"@media (prefers-color-scheme: dark) {{ :root {{ {css_variables(DARK)} }} }}</style>"
        '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    )
    end = svg.index(">", svg.index("<svg")) + 1
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg[:end].replace(' aria-hidden="true"', "") + style + svg[end:]
