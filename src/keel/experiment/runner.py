"""Run all arms and seeds of a recipe, several at a time, a process each, and keep results.json up to date.

Units are processes so that peak memory is an arm's own and several single-threaded units can share the cores, which
for small models is faster than several threads in one. Under torchrun (``WORLD_SIZE`` > 1) they run one after the
other in the processes that are there. A unit talks to the runner in lines of JSON on its standard output; its log is
OUT/<arm>/seed<k>/log.txt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from keel.data import SlidingWindows, TokenCorpus, evaluation_segments
from keel.errors import KeelError, suggest
from keel.evaluation.results import Results, write_results
from keel.experiment.before import check_before
from keel.experiment.collect import collect, git_commit
from keel.experiment.display import Display
from keel.experiment.measure import is_measured
from keel.experiment.trees import prepare_trees
from keel.experiment.unit import Plan, Unit, read_plan, run_unit
from keel.files import write_atomically
from keel.training import Recipe, load_recipe
from keel.training.build import load_data, matched_widths
from keel.training.processor import native_precision

_MOST_JOBS = 4
_SMALL_BYTES = 2**28  # of weights
# Where the system's allocator reads these, large tensors' memory is kept for the next ones, and is of large pages. Given back and taken
# anew, it costs a fifth of a training step's processor time (logits of 8 x 512 tokens over 4,096 words) in pages that are zeroed; in
# small pages another seventh.
_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_MAY_CHANGE = {"evaluation", "seeds", "title", "serves", "expected_minutes", "reference", "label", "control", "stage"}


def run_experiment(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    device: str | None = None,
    seeds: Sequence[int] | None = None,
    jobs: int | None = None,
    only: Sequence[str] | None = None,
) -> Results:
    """Train every arm with every seed, evaluate all, and return what ``OUT/results.json`` then holds.

    The file is written after every finished unit and is valid from the first one on.

    Args:
        out: a new or empty folder; with ``resume`` also one of an earlier call, whose finished units are kept.
        device: ``cpu``, ``cuda`` or None for the fastest there is.
        seeds: instead of the recipe's.
        jobs: units at a time; None for one a core (at most 4) on a CPU and a host from scratch or of less than 256 MiB, else 1. On CPU each
            unit gets an equal share of the cores as threads; the last bits of a result depend on that number.
        only: arms to run (with those whose weights they use); None for all.
    Raises: KeelError for a folder that holds another run, unknown arms, and whatever stops a unit.
    """
    if seeds is not None:
        recipe = recipe.model_copy(update={"seeds": list(seeds)})
    begun = read_plan(out) if resume else None
    precision = native_precision(_place(device)) if begun is None else begun.precision
    recipe = recipe.in_precision(precision)
    units = _units(recipe, only)
    _check_folder(recipe, out, resume)
    check_before(recipe)
    if _world_size() > 1:  # the processes must have looked at the folder before the first of them writes there
        PartialState(cpu=device == "cpu", timeout=datetime.timedelta(days=1))
        torch.distributed.barrier()
    jobs = _jobs(recipe, device) if jobs is None else jobs
    started = time.monotonic()
    with full_disk_in_one_line(out):
        plan = _prepare(recipe, out, precision)
        before = plan.wall_s

        def publish() -> Results | None:
            current = dataclasses.replace(plan, wall_s=before + time.monotonic() - started)
            current.write(out)
            results = collect(recipe, current, out)
            if results is not None:
                write_results(results, out / "results.json")
            return results

        if _world_size() > 1:
            torch.distributed.barrier()
        todo = [unit for unit in units if not is_measured(recipe, unit.folder(out))]
        with Display(recipe, out, done=len(units) - len(todo), total=len(units), silent=_rank() > 0) as display:
            if _world_size() > 1:
                _run_here(recipe, plan, todo, out, device, display, publish)
            else:
                _Pool(recipe, todo, out, device, min(jobs, max(1, len(todo))), display, publish).run()
        results = publish() if _rank() == 0 else collect(recipe, plan, out)
    if results is None:
        raise KeelError(f"{out}: no arm was finished")
    return results


def _units(recipe: Recipe, only: Sequence[str] | None) -> list[Unit]:
    """All units in the order of their start: seed by seed, arms with weights of their own first."""
    chosen = list(recipe.arms if only is None else only)
    for arm in chosen:
        if arm not in recipe.arms:
            raise KeelError(f"no arm {arm!r}; {suggest(arm, recipe.arms)}")
    for arm in chosen:  # an arm that is needed may need one itself: it is looked at in its turn
        chosen += [other for other in recipe.needed_by(arm) if other not in chosen]
    ordered = sorted((arm for arm in recipe.arms if arm in chosen), key=functools.partial(_depth, recipe))
    return [Unit(arm, seed) for seed in recipe.seeds for arm in ordered]


def _depth(recipe: Recipe, arm: str) -> int:
    """How many arms must be finished before this one."""
    return max((1 + _depth(recipe, other) for other in recipe.needed_by(arm)), default=0)


def _height(recipe: Recipe, arm: str) -> int:
    """How many arms wait for this one, one after the other."""
    return max((1 + _height(recipe, other) for other in recipe.arms if arm in recipe.needed_by(other)), default=0)


def _check_folder(recipe: Recipe, out: Path, resume: bool) -> None:
    path = out / "recipe.yaml"
    if not path.is_file():
        return
    if not resume:
        raise KeelError(f"{out} already holds a run; go on with --resume, or choose another folder with --out")
    earlier = load_recipe(path)
    changed = _difference(_settled(earlier), _settled(recipe), ())
    if changed is not None:
        where, before, now = changed
        raise KeelError(
            f"{out} was begun with {where} = {before!r}, now it is {now!r}; resume as begun, or choose another --out"
        )


def _settled(recipe: Recipe) -> dict[str, Any]:
    """Return what may not change once a run is begun."""
    questions, asked = recipe.data.questions, recipe.evaluation.mmlu
    # What is asked later is left out of what is learnt (``training_questions``): with others asked, the arms would have learnt some.
    held = asked.source if asked is not None and questions is not None and questions.mmlu is not None else None
    return {**_kept(recipe.model_dump(mode="json")), "evaluation.mmlu.source": held}


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _kept(entry) for key, entry in value.items() if key not in _MAY_CHANGE}
    return [_kept(entry) for entry in value] if isinstance(value, list) else value


def _difference(before: Any, now: Any, path: tuple[str, ...]) -> tuple[str, Any, Any] | None:
    """The first place where two recipes differ, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        # Arms may be added to a run; no other field may appear or go.
        added = path == ("arms",)
        keys = [key for key in before if before[key] is not None] if added else {**before, **now}
        pairs = [(str(key), before.get(key), now.get(key)) for key in keys]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(str(i), *values) for i, values in enumerate(zip(before, now, strict=True))]
    else:
        return None if before == now else (".".join(path), before, now)
    found = (_difference(old, new, (*path, key)) for key, old, new in pairs)
    return next((difference for difference in found if difference is not None), None)


def _prepare(recipe: Recipe, out: Path, precision: str) -> Plan:
    """Read the data once, settle what all units must agree on, and write it down."""
    data = load_data(recipe)
    if isinstance(data, TokenCorpus):
        _check_sizes(recipe, data)
    plan = read_plan(out)
    if plan is None:
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        widths = matched_widths(recipe, data.tokenizer)
        plan = Plan(
            tokens=data.fingerprint,
            vocabulary=len(data.tokenizer),
            widths=widths,
            precision=precision,
            started=started,
        )
    elif plan.tokens != data.fingerprint:
        raise KeelError(
            f"{out}: the corpus or the tokenizer has changed since this run was begun; choose another folder"
        )
    elif set(plan.widths) != set(recipe.trained_arms()):
        plan = dataclasses.replace(plan, widths=_widths_with_new_arms(recipe, data.tokenizer, plan.widths, out))
    commit = git_commit()
    if commit is not None and commit not in plan.commits:
        plan = dataclasses.replace(plan, commits=[*plan.commits, commit])
    if _rank() == 0:
        prepare_trees(recipe, out)
        plan.write(out)
        write_atomically(out / "recipe.yaml", recipe.to_yaml().encode())
    return plan


def _check_sizes(recipe: Recipe, tokens: TokenCorpus) -> None:
    """Refuse windows and stretches that the text is too short for before anything is trained.  Raises: KeelError."""
    for arm in recipe.trained_arms():
        for phase in (phase for phase in recipe.phases_of(arm) if phase.learns == "text"):
            SlidingWindows(tokens.train, phase.window, phase.window_stride)
            SlidingWindows(tokens.valid, phase.window, phase.window)
    wanted = recipe.evaluation
    if wanted.extrapolation is not None:
        split = getattr(tokens, wanted.extrapolation.split)
        evaluation_segments(split, wanted.extrapolation.lengths[-1], wanted.extrapolation.segments)
    if wanted.blocks is not None:
        evaluation_segments(getattr(tokens, wanted.blocks.split), wanted.blocks.length, wanted.blocks.count)
    if wanted.masked is not None:
        evaluation_segments(getattr(tokens, wanted.masked.split), wanted.masked.length, wanted.masked.count)
    for probe in (wanted.position_probe, wanted.heads, wanted.inter_model):
        if probe is not None:
            evaluation_segments(tokens.test, probe.length - 1, probe.documents)
    if wanted.geometry is not None:
        evaluation_segments(tokens.test, wanted.geometry.length, wanted.geometry.sequences)
    if wanted.span is not None:
        evaluation_segments(tokens.test, wanted.span.lengths[-1], wanted.span.sequences)


def _widths_with_new_arms(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, before: dict[str, int | None], out: Path
) -> dict[str, int | None]:
    """Widths of the hosts, now that arms were added.  Raises: KeelError where those of the earlier arms would change."""
    widths = matched_widths(recipe, tokenizer)
    changed = next((arm for arm, width in before.items() if widths[arm] != width), None)
    if changed is not None:
        raise KeelError(
            f"{out}: with the arms added now, matched parameters give arm {changed!r} a width of {widths[changed]} instead of "
            f"{before[changed]}; run all arms in another folder"
        )
    return widths


def _run_here(
    recipe: Recipe, plan: Plan, units: list[Unit], out: Path, device: str | None, display: Display, publish: Any
) -> None:
    """Run units one after the other in this process, one of several."""
    data = load_data(recipe)
    for unit in units:
        display.begin(unit)
        run_unit(recipe, plan, unit, out, data, device=device, progress=functools.partial(display.show, unit))
        if _rank() == 0:
            publish()
        display.finish(unit)


class _Pool:
    """Runs units as processes, at most ``jobs`` at a time; a unit that uses another's weights waits for it."""

    def __init__(
        self,
        recipe: Recipe,
        units: list[Unit],
        out: Path,
        device: str | None,
        jobs: int,
        display: Display,
        publish: Any,
    ) -> None:
        self.recipe, self.waiting, self.out, self.device, self.jobs = recipe, list(units), out, device, jobs
        self.display, self.publish = display, publish
        self.running: dict[Unit, subprocess.Popen[str]] = {}
        self.errors: dict[Unit, str] = {}
        self.events: queue.SimpleQueue[tuple[Unit, dict[str, Any] | None]] = queue.SimpleQueue()

    def run(self) -> None:
        """Run all units.  Raises: KeelError for the first that fails, after the others were stopped."""
        try:
            self._fill()
            while self.running:
                unit, event = self.events.get()
                if event is None:
                    self._finish(unit)
                elif event["event"] == "error":
                    self.errors[unit] = event["message"]
                else:
                    self.display.show(unit, event)
        finally:
            self._stop_all()

    def _fill(self) -> None:
        while len(self.running) < self.jobs and (unit := self._next()) is not None:
            self._start(unit)

    def _next(self) -> Unit | None:
        """Take from those that wait the one whose weights are most waited for, so that no long chain is left for the end."""
        ready = [unit for unit in self.waiting if self._can_start(unit)]
        if not ready:
            return None
        unit = max(ready, key=lambda unit: _height(self.recipe, unit.arm))  # of several the first
        self.waiting.remove(unit)
        return unit

    def _can_start(self, unit: Unit) -> bool:
        needed = [Unit(arm, unit.seed) for arm in self.recipe.needed_by(unit.arm)]
        # What does not differ from seed to seed is measured once: the other seeds take it over when it is done.
        shared = self.recipe.is_same_for_all_seeds(unit.arm)
        twins = [other for other in self.running if shared and other.arm == unit.arm]
        return not twins and not any(other in self.waiting or other in self.running for other in needed)

    def _start(self, unit: Unit) -> None:
        folder = unit.folder(self.out)
        folder.mkdir(parents=True, exist_ok=True)
        threads = max(1, _cores() // self.jobs)
        words = [sys.executable, "-m", "keel.experiment", str(self.out), unit.arm, str(unit.seed)]
        words += ["--threads", str(threads), *(["--device", self.device] if self.device else [])]
        of_threads = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        environment = {**_KEEP_MEMORY, **os.environ, **of_threads}
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self.running[unit] = process
        assert process.stdout is not None
        threading.Thread(target=self._listen, args=(unit, process.stdout), daemon=True).start()
        self.display.begin(unit)

    def _listen(self, unit: Unit, lines: TextIO) -> None:
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event:
                    self.events.put((unit, event))
        self.events.put((unit, None))

    def _finish(self, unit: Unit) -> None:
        code = self.running.pop(unit).wait()
        log = unit.folder(self.out) / "log.txt"
        if unit in self.errors:
            raise KeelError(self.errors[unit])
        if code != 0:
            reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            memory = "; was there too little memory? try fewer --jobs" if code == -signal.SIGKILL else ""
            raise KeelError(
                f"arm {unit.arm!r}, seed {unit.seed}: its process {reason}{memory}; see {log}, go on with --resume"
            )
        self._fill()  # first: to gather what all units found takes seconds, in which a core would lie idle
        self.publish()
        self.display.finish(unit)

    def _stop_all(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait()


@contextlib.contextmanager
def full_disk_in_one_line(out: Path) -> Iterator[None]:
    """Turn a failure to write below ``out`` into a KeelError."""
    try:
        yield
    except OSError as error:
        raise KeelError(f"{out}: {error.strerror or error}; what was finished is kept, go on with --resume") from error


def _jobs(recipe: Recipe, device: str | None) -> int:
    return 1 if _place(device).type != "cpu" or _is_large(recipe.host.get("checkpoint")) else min(_cores(), _MOST_JOBS)


def _is_large(checkpoint: Any) -> bool:
    """Whether a host is better read by one process at a time: it is not here to be weighed, or has many weights."""
    if checkpoint is None:
        return False
    sizes = [path.stat().st_size for path in Path(str(checkpoint)).glob("*.safetensors")]
    return not sizes or sum(sizes) > _SMALL_BYTES


def _place(device: str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
