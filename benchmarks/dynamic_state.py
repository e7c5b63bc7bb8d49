"""Forward and backward of the dynamic state path: the operator against the paper's per-token blueprint.

python benchmarks/dynamic_state.py
python benchmarks/dynamic_state.py --threads 1 --rounds 4

The path is that of DTA's recipe. Beside them stands the plain loop over ``dynamics.step`` with everything hoisted that depends on the host
alone: what hoisting gives without a backward of its own. What turbulence adds to I and N is hoisted too, and token by token in the
blueprint. The gradients of all three are those of hidden state, residual and every parameter.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import models
import timing
import torch
from torch import Tensor

from keel.hosts import HostShape
from keel.streams.base import PassInputs
from keel.streams.dynamic_state import DynamicStateStream, reference_dynamic_state
from keel.streams.dynamic_state.dynamics import StepWeights, TokenParts
from keel.streams.dynamic_state.telemetry import FEATURES

TARGET = timing.Target(least=15.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser, rounds=4)
    for name, default in (("batch", 8), ("length", 512), ("width", 256), ("state", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.size == "toy":
        given.batch, given.length, given.width, given.state = 2, 8, 8, 4
    device = timing.prepare(given)
    arms = make_arms(given, device)
    samples = timing.take_turns(arms, given.rounds, device)
    rows = [
        {"arm": name, **{k: 1e3 * statistics.median(getattr(s, f"{k}_s") for s in samples[name]) for k in s_names()}}
        for name in arms
    ]
    lines = [
        timing.comparison(
            f"blueprint / {name}", timing.time_ratios(samples, "blueprint", name), target, judged="processor"
        )
        for name, target in (("operator", TARGET), ("hoisted loop", None))
    ]
    shape = f"B={given.batch}, T={given.length}, d={given.width}, state {given.state}"
    timing.finish("dynamic_state", given, f"Dynamic state path, forward and backward, {shape}; ms", rows, lines)


def s_names() -> tuple[str, str]:
    """The two times of a sample."""
    return "wall", "processor"


def make_arms(given: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], None]]:
    stream = make_stream(given).to(device)
    looped = make_stream(given).to(device)
    looped._sequence = lambda *of: loop(looped, *of)  # type: ignore[method-assign]
    hidden, residual, embeddings, weigh = (
        torch.randn(given.batch, given.length, given.width, device=device, requires_grad=grad)
        for grad in (True, True, False, False)
    )
    telemetry = torch.zeros(given.batch, given.length, len(FEATURES), device=device)

    def passing(of: DynamicStateStream) -> Callable[[], None]:
        def run() -> None:
            flow = of.open(PassInputs(embeddings_BTD=embeddings), {})
            of.write("final_norm_input", -1, residual, flow)
            of.write("final_hidden", -1, hidden, flow).backward(weigh)

        return run

    def blueprint() -> None:
        reference_dynamic_state(stream, hidden, residual, telemetry, embeddings_BTD=embeddings)[0].backward(weigh)

    return {"operator": passing(stream), "hoisted loop": passing(looped), "blueprint": blueprint}


def make_stream(given: argparse.Namespace) -> DynamicStateStream:
    torch.manual_seed(0)
    stream = DynamicStateStream(**{**models.dynamic_state_fields(), "state_size": given.state})
    stream.build(HostShape(hidden_size=given.width, num_layers=1))
    stream.init_weights()
    with torch.no_grad():
        stream.gate.fill_(1.0)
    return stream


def loop(
    stream: DynamicStateStream, parts: TokenParts, weights: StepWeights, before_B2K: Tensor, starts_BT: None
) -> Tensor:
    """The stream's own loop, taken for every reading."""
    return stream._loop(parts, weights, before_B2K, starts_BT)


if __name__ == "__main__":
    main()
