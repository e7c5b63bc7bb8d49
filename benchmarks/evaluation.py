"""Extrapolation evaluation of 40,960 tokens, time and peak memory: the host with a stream against the bare host.

    python benchmarks/evaluation.py [--lengths 256 40960]

The same tokens are scored in blocks of every length, as ``keel.evaluation.extrapolation`` does it: blocks of 256 in batches, and
one block of 40,960. Every measurement is a process of its own, the arms take turns. Memory is the growth of the peak over what the
process held before (imports, weights, one short evaluation); the whole peak is given beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import models
import numpy as np
import timing
import torch

import keel
from keel.data.windows import Segment
from keel.evaluation.extrapolation import extrapolation

TARGET = timing.Target(most=1.15)
ARMS = ("host", "gru", "scan")
KINDS = {"wall": "wall_s", "processor": "processor_s", "memory": "grown_bytes", "whole memory": "peak_bytes"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser)
    parser.add_argument("--tokens", type=int, default=40_960)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 40_960])
    parser.add_argument("--arms", nargs="+", choices=ARMS[1:], default=list(ARMS[1:]))
    parser.add_argument(
        "--alone", nargs=2, metavar=("ARM", "LENGTH"), help="measure one here and print JSON (used by the parent)"
    )
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(measure(given.alone[0], int(given.alone[1]), given)))
    else:
        compare(given)


def measure(arm: str, length: int, given: argparse.Namespace) -> dict[str, float]:
    """Evaluate the tokens in blocks of ``length``; returns seconds and bytes."""
    device, size = timing.prepare(given), models.SIZES[given.size]
    host = models.bare_host(size)
    model = keel.attach(host, {}) if arm == "host" else models.with_stream(host, arm, copied=False)
    model.to(device, models.DTYPES[given.dtype])
    extrapolation(model, [segment(min(1024, given.tokens), size)], [256], device=device)
    before = peak_bytes(device)
    scored = segment(given.tokens, size)
    taken = timing.measure(lambda: extrapolation(model, [scored], [length], device=device), device)
    peak = peak_bytes(device)
    # A growth that fits into what was freed before is not seen: count it as one page, so that a ratio exists.
    return {**taken._asdict(), "grown_bytes": max(peak - before, 4096), "peak_bytes": peak}


def segment(targets: int, size: models.Size) -> Segment:
    ids = torch.randint(0, size.vocabulary, (targets + 1,))
    nothing = np.zeros(targets, dtype=np.int64)
    return Segment(ids=ids, document_T=nothing, bytes=nothing + 4, start=0)


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else timing.peak_bytes()


def compare(given: argparse.Namespace) -> None:
    for length in given.lengths:
        runs = take_turns(length, given)
        lines = []
        for arm in given.arms:
            ratios = {kind: ratio(runs, arm, key) for kind, key in KINDS.items()}
            label = f"host + {arm} stream / host"
            time = {kind: ratios[kind] for kind in ("wall", "processor")}
            memory = {kind: ratios[kind] for kind in ("memory", "whole memory")}
            lines.append(timing.comparison(f"time, {label}", time, TARGET))
            lines.append(timing.comparison(f"peak, {label}", memory, TARGET, judged="memory"))
        size = models.SIZES[given.size]
        setup = f"Extrapolation evaluation of {given.tokens:,} tokens in blocks of {length:,}, {size}, {given.dtype}"
        rows = [row(arm, taken, given.tokens) for arm, taken in runs.items()]
        timing.finish(f"evaluation, blocks of {length}", given, setup, rows, lines)


def take_turns(length: int, given: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Measure every arm in every round, each round in the opposite order of the one before."""
    arms = ["host", *given.arms]
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    options = [f"--{name}={getattr(given, name)}" for name in ("tokens", "threads", "device", "dtype", "size")]
    for turn in range(given.rounds):
        for arm in arms if turn % 2 == 0 else reversed(arms):
            words = [sys.executable, __file__, *options, "--alone", arm, str(length)]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            runs[arm].append(json.loads(done.stdout.splitlines()[-1]))
    return runs


def ratio(runs: dict[str, list[dict[str, float]]], arm: str, key: str) -> dict[str, float]:
    """Return the spread of arm over host, round by round."""
    return timing.spread([ours[key] / theirs[key] for ours, theirs in zip(runs[arm], runs["host"], strict=True)])


def row(arm: str, taken: list[dict[str, float]], tokens: int) -> dict[str, Any]:
    middle = {key: statistics.median(run[key] for run in taken) for key in KINDS.values()}
    return {
        "arm": arm,
        "seconds": middle["wall_s"],
        "tokens/s": tokens / middle["wall_s"],
        "peak MiB": middle["peak_bytes"] / 2**20,
        "grown by MiB": middle["grown_bytes"] / 2**20,
    }


if __name__ == "__main__":
    main()
