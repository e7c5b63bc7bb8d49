"""What every benchmark shares: arms that take turns, ratios of neighbours in time, and the file that the results page is made from.

The arms of a benchmark run one after the other in every round, each round in the opposite order of the one before. A ratio is
formed within a round, so that whatever else the machine does weighs on both sides; shown are the median, the least and the
greatest over the rounds. Processor time (all threads of the process) is given beside wall time: on a machine that does other work
it is the steadier of the two.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from keel.files import write_atomically

SCHEMA = "keel.performance/1"
ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "results" / "data"


class Sample(NamedTuple):
    """Seconds that one run took: by the clock, and of processor time over all threads."""

    wall_s: float
    processor_s: float


class Target(NamedTuple):
    """What a median ratio is held against."""

    least: float = 0.0
    most: float = float("inf")

    def met(self, ratio: float) -> bool:
        return self.least <= ratio <= self.most

    def __str__(self) -> str:
        return f"≥ {self.least:.2f}" if self.most == float("inf") else f"≤ {self.most:.2f}"


def measure(run: Callable[[], object], device: torch.device) -> Sample:
    """Time one call, to the end of what it gave a GPU to do."""
    wait(device)
    wall, processor = time.perf_counter(), time.process_time()
    run()
    wait(device)
    return Sample(time.perf_counter() - wall, time.process_time() - processor)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(arms: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[Sample]]:
    """Run every arm once to warm up, then ``rounds`` times in turns. Returns the samples by arm, in the order of the rounds."""
    for run in arms.values():
        run()
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    for turn in range(rounds):
        for name in list(arms) if turn % 2 == 0 else reversed(arms):
            samples[name].append(measure(arms[name], device))
    return samples


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def time_ratios(samples: Mapping[str, list[Sample]], arm: str, baseline: str) -> dict[str, dict[str, float]]:
    """Return how many times the baseline's seconds the arm takes, round by round: spread of wall and of processor time."""
    pairs = list(zip(samples[arm], samples[baseline], strict=True))
    return {
        "wall": spread([ours.wall_s / theirs.wall_s for ours, theirs in pairs]),
        "processor": spread([ours.processor_s / theirs.processor_s for ours, theirs in pairs]),
    }


def comparison(
    label: str, ratios: dict[str, dict[str, float]], target: Target | None, judged: str = "wall"
) -> dict[str, Any]:
    """Return one line of a result: named spreads of ratios, and whether the median of the ``judged`` one meets the target."""
    verdict = None if target is None else {"text": str(target), "met": target.met(ratios[judged]["median"])}
    return {"label": label, "ratios": ratios, "judged": judged, "target": verdict}


def add_options(parser: argparse.ArgumentParser, rounds: int = 10) -> None:
    """Add what all benchmarks understand."""
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="interleaved pairs; ten or more for a result to keep"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads on a processor")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--size", choices=("toy", "small", "deep", "large"), default="small", help="see benchmarks/models.py"
    )
    parser.add_argument(
        "--peak-tflops", type=float, help="the device's dense peak in this dtype, to give the share reached"
    )
    parser.add_argument(
        "--record", type=Path, help=f"also write the result to this file, such as {DATA.relative_to(ROOT)}/…"
    )


def prepare(given: argparse.Namespace) -> torch.device:
    """Set threads and seeds as the options say; returns the device."""
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    return torch.device(given.device)


def finish(
    name: str, given: argparse.Namespace, setup: str, arms: list[dict[str, Any]], comparisons: list[Any]
) -> None:
    """Print the result of a benchmark and, where asked, put it into the record beside those of other benchmarks."""
    entry = {"setup": setup, "arms": arms, "comparisons": comparisons, "conditions": conditions(given)}
    print(setup)
    for arm in arms:
        print("  " + "  ".join(f"{key}: {shown(value)}" for key, value in arm.items()))
    for line in comparisons:
        spreads = "; ".join(f"{kind} {shown_spread(values)}" for kind, values in line["ratios"].items())
        verdict = line["target"]
        judged = (
            f"  target {verdict['text']} ({line['judged']}): {'met' if verdict['met'] else 'MISSED'}" if verdict else ""
        )
        print(f"  {line['label']}: {spreads}{judged}")
    print(f"  load over the last minute at the end: {entry['conditions']['load']}")
    if given.record is not None:
        record(given.record, name, entry)


def shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def shown_spread(values: Mapping[str, float]) -> str:
    """Write ``median (min to max)``."""
    return f"{values['median']:.3f} ({values['min']:.3f} to {values['max']:.3f})"


def conditions(given: argparse.Namespace) -> dict[str, Any]:
    """Return under which circumstances the numbers came about."""
    return {
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else processor_name(),
        "threads": given.threads,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "dtype": given.dtype,
        "size": given.size,
        "rounds": given.rounds,
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Return the short commit of the checkout, marked where the code that is measured differs from it."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "src", "benchmarks")
    return f"{commit}-dirty" if commit and changed else commit


def record(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Replace the entry ``name`` of the record at ``path``, which holds one a benchmark."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"schema": SCHEMA, "benchmarks": {}}
    known["benchmarks"][name] = entry
    write_atomically(path, (json.dumps(known, indent=1, ensure_ascii=False, sort_keys=True) + "\n").encode())


def peak_bytes() -> int:
    """Highest resident size of this process so far; Linux counts it in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
