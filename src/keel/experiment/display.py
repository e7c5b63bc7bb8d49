"""Show a running experiment: a line a unit with its time left on a terminal, a line a finished unit elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from keel.experiment.measure import Evaluation, read_evaluation
from keel.experiment.unit import Unit
from keel.training import Recipe


class Display:
    """What is seen of a run, on standard error.

    Args:
        done, total: units finished by earlier sessions, and of the whole run.
        silent: show nothing (the processes of a distributed run but the first).
    """

    def __init__(self, recipe: Recipe, out: Path, *, done: int, total: int, silent: bool = False) -> None:
        self.recipe, self.out, self.done, self.total = recipe, out, done, total
        self.console = Console(stderr=True, highlight=False, quiet=silent)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[what]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=False),
        )
        self.bars = Progress(*columns, console=self.console, disable=not self.console.is_terminal, transient=True)
        self.whole = self.bars.add_task(recipe.name, total=total, completed=done, what="arms × seeds")
        self.tasks: dict[Unit, TaskID] = {}
        self.begun: dict[Unit, float] = {}
        self.loss: dict[Unit, float] = {}

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def begin(self, unit: Unit) -> None:
        """Add the line of a unit."""
        self.begun[unit] = time.monotonic()
        self.tasks[unit] = self.bars.add_task(self._name(unit), total=1, what="starting")

    def show(self, unit: Unit, event: dict[str, Any]) -> None:
        """Show what a unit says that happened."""
        task, kind = self.tasks[unit], event["event"]
        if kind == "begin":
            self.bars.reset(task, total=event["steps"], completed=event["step"], what=f"steps of {event['phase']}")
        elif kind == "log":
            self.loss[unit] = event["loss"]
        elif kind == "step":
            loss = f", loss {self.loss[unit]:.3f}" if unit in self.loss else ""
            self.bars.update(task, completed=event["step"], what=f"steps of {event['phase']}{loss}")
        elif kind == "evaluate":
            self.bars.update(task, total=event["of"])
            self.bars.update(task, completed=event["done"], what=event["what"])

    def finish(self, unit: Unit) -> None:
        """Replace the line of a unit by its result."""
        self.done += 1
        self.bars.remove_task(self.tasks.pop(unit))
        self.bars.update(self.whole, completed=self.done)
        evaluation = read_evaluation(self.recipe, unit.folder(self.out))
        if evaluation is None:
            return
        seconds = time.monotonic() - self.begun[unit]
        self.console.print(
            f"[{self.done}/{self.total}] {self._name(unit)}: {_in_words(evaluation)} ({seconds:.0f} s)", markup=False
        )

    def _name(self, unit: Unit) -> str:
        return f"{self.recipe.label_of(unit.arm)}, seed {unit.seed}"


def _in_words(evaluation: Evaluation) -> str:
    """The first figures of a unit."""
    words = []
    result = evaluation.extrapolation
    if result is not None:
        near, far = result.lengths[0], result.lengths[-1]
        words.append(f"perplexity {result.ppl(near):.2f} at {near:,} tokens, {result.ppl(far):.2f} at {far:,}")
    words += [f"{name} {metric.value:.3f}" for name, metric in list(evaluation.metrics.items())[:3]]
    return ", ".join(words)
