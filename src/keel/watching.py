"""``keel generate --signals``: the streams' signals of every token while a text is written, drawn live or as plain lines, and as JSON.

In a terminal one curve a signal over the newest tokens, the governor's state below them, and the text, with what was read outside
the active state marked. Elsewhere a line a token. Shapes: B batch (one row), S tokens read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from keel.cache import new_cache, signals_of
from keel.errors import KeelError
from keel.files import write_atomically
from keel.model import KeelForCausalLM
from keel.pretrained import dynamic_state_as, open_continuation
from keel.streams.dynamic_state import FAILURES, Mode

LETTERS = {"coherence": "I", "alignment": "C", "noise": "N", "continuity": "T", "substrate": "S"}
"""Signals that come first, and what the paper calls them; all but N lie in [0, 1]."""
VECTORS = ("tpc", "state")  # a whole state and no signal of one number
BARS = "▁▂▃▄▅▆▇█"
MODES = {
    Mode.ACTIVE: ("active", "·", "green"),
    Mode.SAFE: ("safe mode", "█", "red"),
    Mode.COOL_DOWN: ("cool-down", "▒", "yellow"),
}
NOT_A_NUMBER = "×"
FIGURES_WIDTH = 30  # columns for a signal's name and its newest value


class Record:
    """What was read so far: ``pieces`` of text, each signal's values by its whole name, mode and failures of the governor."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.values: dict[str, list[float]] = {}
        self.modes: list[Mode] = []
        self.failures: list[tuple[str, ...]] = []

    def take(self, ids_S: Tensor, signals: Mapping[str, Tensor]) -> None:
        """Add the tokens that are new among these, with their signals: [1, S], or [1, S, L] of L layers, whose mean is kept."""
        new = slice(len(self.ids), None)
        added = ids_S[new].tolist()
        self.ids += added
        self.pieces += [self.tokenizer.decode([token]) for token in added]
        for name, signal in signals.items():
            if name.endswith(".governor"):
                self.modes += [Mode(int(mode)) for mode in signal[0, new].tolist()]
            elif name.endswith(".failures"):
                self.failures += [_named(row) for row in signal[0, new].tolist()]
            elif _short(name) not in VECTORS:
                token_S = signal[0, new] if signal.dim() == 2 else signal[0, new].mean(-1)
                self.values.setdefault(name, []).extend(token_S.tolist())

    def ordered(self) -> list[str]:
        """Return the names of the signals, those with a letter first."""
        known = list(LETTERS)
        last = len(known)
        return sorted(self.values, key=lambda name: known.index(_short(name)) if _short(name) in known else last)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON-able values; what is not a number is None."""
        values = {name: [x if math.isfinite(x) else None for x in xs] for name, xs in self.values.items()}
        told: dict[str, Any] = {"ids": self.ids, "pieces": self.pieces, "signals": values}
        if self.modes:
            told["governor"] = [MODES[mode][0] for mode in self.modes]
            told["failures"] = [list(names) for names in self.failures]
        return told


class Watch(LogitsProcessor):
    """Calls ``see`` before each token is chosen: by then the cache holds the signals of all that was read."""

    def __init__(self, cache: Cache, record: Record, see: Any) -> None:
        self.cache, self.record, self.see = cache, record, see

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores as they are."""
        layer = self.cache.layers[-1]
        if not getattr(layer, "signals", None) or not any(layer.signals.values()):  # type: ignore[attr-defined]
            raise KeelError("signals: the streams of this checkpoint have none a token")
        self.record.take(input_ids[0], signals_of(self.cache))
        self.see(self.record)
        return scores


def continue_with_signals(
    checkpoint: str,
    prompt: str,
    *,
    console: Console | None,
    file: Path | None = None,
    device: str | None = None,
    seed: int = 0,
    safeguards: bool = False,
    telemetry: str | None = None,
    **options: Any,
) -> str:
    """Return ``prompt`` and what the checkpoint writes after it, as ``keel.pretrained.continue_text``, and show the signals.

    Args:
        safeguards, telemetry: see ``keel.pretrained.dynamic_state_as``.
        console: where to draw; None shows nothing.
        file: where all signals go as JSON at the end.
        options: of ``generate``; no beams, which have no one text to show.
    Raises: KeelError also for a model without signals of its tokens.
    """
    model, tokenizer, inputs, options = open_continuation(checkpoint, prompt, device=device, options=options)
    if options.get("num_beams", 1) != 1:
        raise KeelError("signals: beams have no one text to follow; leave --beams or --signals out")
    if not isinstance(model, KeelForCausalLM) or not model.wires.streams:
        raise KeelError(
            f"signals: {checkpoint} has no streams, so nothing to show; give a checkpoint that was trained with one"
        )
    cache, record = new_cache(model.host.config), Record(tokenizer)
    view = View(console)
    processors = LogitsProcessorList([Watch(cache, record, view.see)])
    num_tokens = inputs["input_ids"].shape[1] + options.get("max_new_tokens", 0)
    with dynamic_state_as(model, num_tokens, safeguards=safeguards, telemetry=telemetry, seed=seed), view:
        torch.manual_seed(seed)
        ids_BT = model.generate(
            **inputs, **options, past_key_values=cache, collect_signals=True, logits_processor=processors
        )
    text: str = tokenizer.decode(ids_BT[0], skip_special_tokens=True)
    if file is not None:
        write_atomically(file, (json.dumps({"text": text, **record.as_json()}, indent=1) + "\n").encode())
    return text


class View:
    """Draws a record in a terminal, prints a line a token elsewhere; nothing without a console."""

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self.live = Live(console=console, refresh_per_second=8) if console is not None and console.is_terminal else None
        self.printed = 0

    def see(self, record: Record) -> None:
        """Show what the record holds now."""
        if self.live is not None and self.console is not None:
            self.live.update(picture(record, self.console.width))
        elif self.console is not None:
            for index in range(self.printed, len(record.ids)):
                self.console.print(Text(line(record, index)))
            self.printed = len(record.ids)

    def __enter__(self) -> View:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live is not None:
            self.live.stop()


def picture(record: Record, width: int) -> RenderableType:
    """Return curves over the newest tokens that fit, the governor's line, and the text."""
    columns = max(8, width - FIGURES_WIDTH)
    table = Table.grid(padding=(0, 1))
    for name in record.ordered():
        values = record.values[name][-columns:]
        letter, newest = LETTERS.get(_short(name), ""), record.values[name][-1]
        low, high = (0.0, 1.0) if letter and letter != "N" else (0.0, _highest(record.values[name]))
        table.add_row(Text(letter, "bold"), _short(name), f"{newest:.3g}", Text(curve(values, low, high), "cyan"))
    if record.modes:
        marks = Text()
        for mode in record.modes[-columns:]:
            marks.append(MODES[mode][1], MODES[mode][2])
        name, _, colour = MODES[record.modes[-1]]
        table.add_row("", "governor", Text(name, colour), marks)
        failing = ", ".join(name.replace("_", " ") for name in record.failures[-1]) or "none"
        table.add_row("", "failures", "", Text(failing, "red" if record.failures[-1] else ""))
    text = Text()
    for index, piece in enumerate(record.pieces):
        mode = record.modes[index] if record.modes else Mode.ACTIVE
        text.append(piece, "" if mode is Mode.ACTIVE else f"{MODES[mode][2]} underline")
    return Group(table, Text(), text)


def line(record: Record, index: int) -> str:
    """Return one token as a plain line."""
    figures = [
        f"{LETTERS.get(_short(name), _short(name))} {record.values[name][index]:.4f}" for name in record.ordered()
    ]
    if record.modes:
        figures.append(f"governor {MODES[record.modes[index]][0]}")
        figures += record.failures[index]
    return "  ".join([f"{index + 1:>5}", f"{json.dumps(record.pieces[index], ensure_ascii=False):<16}", *figures])


def curve(values: Sequence[float], low: float, high: float) -> str:
    """Return a bar for each value, from ``low`` to ``high``; what is not a number is crossed out."""
    spread = (high - low) or 1.0
    steps = len(BARS) - 1
    shares = (min(1.0, max(0.0, (value - low) / spread)) if math.isfinite(value) else None for value in values)
    return "".join(NOT_A_NUMBER if share is None else BARS[round(share * steps)] for share in shares)


def _highest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=1.0)


def _named(row: Sequence[float]) -> tuple[str, ...]:
    return tuple(name for name, detected in zip(FAILURES, row, strict=True) if detected)


def _short(name: str) -> str:
    return name.rpartition(".")[2]
