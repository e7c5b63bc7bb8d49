"""A text with each of its tokens shaded by its barrier and the support tokens framed, as a picture for a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.patches import Rectangle

from keel.drawing import Canvas, Drawing, render
from keel.ops.support import TOP, pressures

_COLUMNS = (96, 44)  # characters a line, wide and narrow
_CHARACTER = 0.602  # width of a character of the font below, in its size
_LINE_INCHES = 0.205


class Piece(NamedTuple):
    """A stretch of one line: the number of its token, where it stands and what it says."""

    token: int
    line: int
    column: int
    text: str


def laid_out(pieces: Sequence[str], columns: int) -> list[Piece]:
    """Break tokens into lines of at most ``columns`` characters, at line ends of the text and where a token does not fit."""
    found: list[Piece] = []
    line = column = 0
    for token, piece in enumerate(pieces):
        shown = piece.replace("\t", " ")
        for index, part in enumerate(shown.split("\n")):
            if index:  # a line end is shown, and has its effect
                found.append(Piece(token, line, column, "⏎"))
                line, column = line + 1, 0
            while part:
                if column and column + len(part) > columns:
                    line, column = line + 1, 0
                found.append(Piece(token, line, column, part[:columns]))
                column += len(part[:columns])
                part = part[columns:]
    return found


def draw_tokens(pieces: Sequence[str], barriers: Sequence[float], name: str, label: str, seed: int) -> Drawing:
    """Draw a text.

    Args:
        pieces: what each token says.
        barriers: of each token, in nats; darker is more, from the least to the most of this text.
        name, label: of the arm, for the file and for people.
    """
    low, high = min(barriers), max(barriers)
    pressure_T = pressures(torch.tensor(barriers))
    support = [t for t in pressure_T.topk(min(TOP, len(pieces))).indices.tolist() if pressure_T[t] > 0]
    layouts = [laid_out(pieces, columns) for columns in _COLUMNS]
    heights = [0.75 + _LINE_INCHES * (layout[-1].line + 1) for layout in layouts]

    def paint(canvas: Canvas) -> None:
        axes, columns, layout = canvas.axes, _COLUMNS[canvas.narrow], layouts[canvas.narrow]
        figure = axes.get_figure()
        assert figure is not None
        # One unit is a character across and a line down.
        inches = figure.get_figwidth() * axes.get_position().width  # type: ignore[union-attr]
        size = inches * 72 / columns / _CHARACTER
        for piece in layout:
            shade = (barriers[piece.token] - low) / (high - low) if high > low else 0.0
            framed = piece.token in support
            axes.add_patch(
                Rectangle(
                    (piece.column, piece.line), len(piece.text), 0.92, facecolor=canvas.palette["series-0"],
                    alpha=0.55 * shade, linewidth=0,
                )
            )  # fmt: skip
            if framed:
                axes.add_patch(
                    Rectangle(
                        (piece.column, piece.line), len(piece.text), 0.92, facecolor="none",
                        edgecolor=canvas.palette["series-1"], linewidth=1.0,
                    )
                )  # fmt: skip
            axes.text(
                piece.column, piece.line + 0.46, piece.text, fontsize=size, family="DejaVu Sans Mono", va="center",
                color=canvas.palette["ink"],
            )  # fmt: skip
        axes.set_xlim(0, columns)
        axes.set_ylim(layout[-1].line + 1, 0)
        canvas.bare(equal=False)

    title = f"Barrier of every token of a text: {label}"
    marked = (
        f"Framed: the {len(support)} tokens that press most"
        if support
        else "No token presses: every determinant is 1 or more"
    )
    caption = f"Darker: a larger barrier, from {low:.2f} to {high:.2f} nats. {marked}. First window, seed {seed}."
    return render(
        paint,
        heights=(heights[0], heights[1]),
        label_width=0,
        labels_left=False,
        name=name,
        title=title,
        caption=caption,
        alt=f"{title}. {caption}",
        prefix="tokens",
        legend=[],
    )
