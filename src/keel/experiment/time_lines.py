"""The signals of a dynamic state path along a generated text, each in a strip of its own, disruptions shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keel.drawing import Canvas, Drawing, render

NAMES = {
    "coherence": "I coherence",
    "alignment": "C alignment",
    "noise": "N noise",
    "continuity": "T continuity",
    "substrate": "S substrate",
    "governor": "governor (0 active, 1 safe mode, 2 cool-down)",
}
_GAP = 0.35  # of a strip's height, between two strips


def draw_time_lines(
    signals: Mapping[str, Sequence[float]], stages: Sequence[Sequence[int]], name: str, label: str, seed: int
) -> Drawing:
    """Draw signals by token.

    Args:
        signals: by name of ``NAMES``, a value a token.
        stages: [start, end) of the prompt, of what was generated, of the disruption that was read, and of what came after it.
        name, label: of the arm, for the file and for people.
    """
    lengths = [len(values) for values in signals.values()]
    height = 1 + _GAP

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes
        for start, end in stages[2::2]:
            axes.axvspan(start, end, color=canvas.palette["series-1"], alpha=0.18, linewidth=0, zorder=0)
        axes.axvspan(*stages[0], color=canvas.palette["rule"], alpha=0.5, linewidth=0, zorder=0)
        for index, (signal, values) in enumerate(signals.items()):
            floor = -index * height
            most = 2.0 if signal == "governor" else max(1.0, *values)
            axes.plot(
                range(len(values)),
                [floor + value / most for value in values],
                color=canvas.palette[f"series-{0 if signal != 'noise' else 1}"],
                linewidth=0.8,
                zorder=2,
                drawstyle="steps-post" if signal == "governor" else "default",
            )
            axes.axhline(floor, color=canvas.palette["rule"], linewidth=0.6, zorder=1)
            text = NAMES[signal] + ("" if most == 1.0 or signal == "governor" else f", top {most:.3g}")
            axes.text(
                0, floor + 1.04, text, fontsize=canvas.font_size, color=canvas.palette["ink"], va="bottom", zorder=3
            )
        axes.set_xlim(0, max(lengths))
        axes.set_ylim(-height * (len(signals) - 1) - 0.1, 1.3)
        axes.set_yticks([])
        axes.set_xlabel("tokens")
        axes.grid(visible=False)

    title = f"Signals along a text that random tokens interrupt: {label}"
    caption = (
        "Each strip runs from 0 to 1, or to the value it names. Grey is the prompt, coloured the random tokens that were read; the rest "
        f"was generated. First row, seed {seed}."
    )
    return render(
        paint,
        heights=(0.6 + 0.75 * len(signals), 0.5 + 0.6 * len(signals)),
        label_width=0,
        labels_left=False,
        name=name,
        title=title,
        caption=caption,
        alt=f"{title}. {caption}",
        prefix="signals",
        legend=[],
    )
