"""The recurrences of a structural stream, forward and backward: Keel's operators, torch.nn.GRU (cuDNN's on a GPU), the naive twins.

python benchmarks/recurrence.py
python benchmarks/recurrence.py --device cuda --dtype bf16 --batch 8 --length 4096 --width 1024

Each has its projections of the input with it. The target is that of a GPU at the size above: the diagonal GRU, solved in parallel, in
at most half of the time that cuDNN's GRU takes. On a processor it is shown without a target.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import timing
import torch
import torch.nn.functional as F
from torch import Tensor

from keel.ops.diagonal_gru import diagonal_gru, reference_diagonal_gru
from keel.ops.gru import gru, reference_gru
from keel.ops.scan import linear_scan, reference_linear_scan

GPU_TARGET = timing.Target(most=0.5)
LONGEST_NAIVE = 512  # tokens; beyond, the naive twins take minutes and say nothing new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser)
    for name, default in (("batch", 16), ("length", 256), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.size == "toy":
        given.batch, given.length, given.width = 2, 8, 8
    device = timing.prepare(given)
    arms = make_arms(given, device)
    samples = timing.take_turns(arms, given.rounds, device)
    rows = [
        {
            "arm": name,
            "wall ms": 1e3 * statistics.median(sample.wall_s for sample in samples[name]),
            "processor ms": 1e3 * statistics.median(sample.processor_s for sample in samples[name]),
        }
        for name in arms
    ]
    target = GPU_TARGET if device.type == "cuda" else None
    pairs = [("diagonal gru", "torch.nn.GRU", target), ("gru", "torch.nn.GRU", None), ("scan", "torch.nn.GRU", None)]
    pairs += [(name, f"{name}, naive", None) for name in ("gru", "diagonal gru", "scan") if f"{name}, naive" in arms]
    lines = [
        timing.comparison(f"{ours} / {theirs}", timing.time_ratios(samples, ours, theirs), judged)
        for ours, theirs, judged in pairs
    ]
    shape = f"B={given.batch}, T={given.length}, d={given.width}"
    timing.finish(
        "recurrence", given, f"Recurrences with their projections, forward and backward, {shape}", rows, lines
    )


def make_arms(given: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], None]]:
    dtype = torch.bfloat16 if given.dtype == "bf16" else torch.float32
    batch, length, width = given.batch, given.length, given.width
    inputs, weigh = (torch.randn(batch, length, width, device=device, dtype=dtype) for _ in range(2))
    inputs.requires_grad_()
    peer = torch.nn.GRU(width, width, batch_first=True).to(device, dtype)
    weights = [p.detach().clone().unsqueeze(0).requires_grad_() for p in peer.parameters()]
    project, halves = (torch.nn.Linear(width, rows * width).to(device, dtype) for rows in (3, 2))
    diagonal, bias = (torch.randn(1, size, device=device, dtype=dtype).requires_grad_() for size in (3 * width, width))

    zeros = torch.zeros(1, batch, width, device=device, dtype=dtype)

    def backward(states: Tensor) -> None:
        states.backward(weigh)

    def scanned(scan: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        rate, candidate = F.linear(inputs, halves.weight, halves.bias).chunk(2, -1)
        return scan(torch.sigmoid(rate), candidate)[0]

    arms: dict[str, Callable[[], None]] = {
        "torch.nn.GRU": lambda: backward(peer(inputs)[0]),
        "gru": lambda: backward(gru(inputs, *weights)[0][0]),
        "diagonal gru": lambda: backward(diagonal_gru(project(inputs).unsqueeze(0), diagonal, bias)[0][0]),
        "scan": lambda: backward(scanned(linear_scan)),
    }
    if length <= LONGEST_NAIVE:
        arms |= {
            "gru, naive": lambda: backward(reference_gru(inputs, *weights)[0][0]),
            "diagonal gru, naive": lambda: backward(
                reference_diagonal_gru(project(inputs).unsqueeze(0), diagonal, bias, zeros)[0][0]
            ),
            "scan, naive": lambda: backward(scanned(reference_linear_scan)),
        }
    return arms


if __name__ == "__main__":
    main()
