"""Time and peak memory of evaluating 40,960 tokens in one block: sliding window and ALiBi against RoPE.

    python benchmarks/extrapolation_memory.py [--length 40960] [--rounds 3] [--threads 2]

A Llama of d = 256, 4 layers, 8 heads and a vocabulary of 8,192, fp32, random weights. Every measurement is a process of its
own, the schemes take turns, and each is shown as a ratio to RoPE. Memory is the growth of the peak resident size over what
the process held before (imports, weights, one short evaluation); single values vary by a factor of two with how the
allocator fragments, so it takes the median of several rounds. As a yardstick, the last line gives the bytes that a
[T, V] tensor of logits and one [T, T] attention map would take.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import keel
from keel.data.windows import Segment
from keel.evaluation.extrapolation import extrapolation
from keel.positions import Positions, set_positions

VOCABULARY = 8192
SCHEMES = {"rope": Positions(), "window": Positions(scheme="window", window=256), "alibi": Positions(scheme="alibi")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=40_960)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--scheme", choices=SCHEMES, help="measure this one here and print JSON (used by the parent process)"
    )
    given = parser.parse_args()
    if given.scheme:
        print(json.dumps(measure(given.scheme, given.length, given.threads)))
    else:
        compare(given.length, given.rounds, given.threads)


def measure(scheme: str, length: int, threads: int) -> dict[str, float]:
    """Evaluate one block of ``length`` tokens; returns wall and processor seconds, and bytes above the start."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = keel.attach(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)), {})
    set_positions(model, SCHEMES[scheme])
    extrapolation(model, [segment(1024)], [1024])
    before, wall, processor = peak_bytes(), time.perf_counter(), time.process_time()
    extrapolation(model, [segment(length)], [length])
    return {
        "wall_s": time.perf_counter() - wall,
        "processor_s": time.process_time() - processor,
        "peak_bytes": peak_bytes() - before,
    }


def segment(targets: int) -> Segment:
    ids = torch.randint(0, VOCABULARY, (targets + 1,))
    nothing = np.zeros(targets, dtype=np.int64)
    return Segment(ids=ids, document_T=nothing, bytes=nothing + 4, start=0)


def peak_bytes() -> int:
    """Highest resident size of this process so far; Linux counts it in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def compare(length: int, rounds: int, threads: int) -> None:
    """Measure every scheme ``rounds`` times, in turns, and print medians and their ratios to RoPE."""
    runs: dict[str, list[dict[str, float]]] = {scheme: [] for scheme in SCHEMES}
    for _ in range(rounds):
        for scheme in SCHEMES:
            options = ["--scheme", scheme, "--length", str(length), "--threads", str(threads)]
            done = subprocess.run([sys.executable, __file__, *options], check=True, capture_output=True, text=True)
            runs[scheme].append(json.loads(done.stdout.splitlines()[-1]))
    middle = {
        scheme: {name: statistics.median(run[name] for run in taken) for name in taken[0]}
        for scheme, taken in runs.items()
    }
    print(f"{length:,} tokens in one block, {threads} thread(s), median of {rounds}; ratios to rope in brackets")
    for scheme, values in middle.items():
        cells = [
            f"{label} {values[name] / unit:9.2f} [{values[name] / middle['rope'][name]:.2f}]"
            for label, name, unit in (
                ("wall s", "wall_s", 1),
                ("processor s", "processor_s", 1),
                ("peak MiB", "peak_bytes", 2**20),
            )
        ]
        print(f"{scheme:8}", *cells, sep="  ")
    logits, attention = 4 * length * VOCABULARY / 2**20, 4 * length**2 / 2**20
    print(f"never allocated: logits [T, V] {logits:,.0f} MiB, one attention map [T, T] {attention:,.0f} MiB")


if __name__ == "__main__":
    main()
