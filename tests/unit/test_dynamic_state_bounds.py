"""What the recursion can and cannot do, whatever its parameters: it is bounded (§9E.2), and broadcast it keeps one number only.

Shapes: B batch, T tokens, D hidden size, K state size.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keel.streams.base import PassInputs

sys.path.insert(0, str(Path(__file__).parents[1] / "dynamic_state_support"))

from dynamic_state_cases import make_stream

BATCH, LENGTH, WIDTH, SIZE = 3, 40, 6, 4


def states_of(stream: torch.nn.Module, scale: float, seed: int, start: Tensor | None = None) -> Tensor:
    """The states after every token of a pass over random hidden states and residuals of this scale, [B, T, K]."""
    generator = torch.Generator().manual_seed(seed)
    hidden, residual = (torch.randn(BATCH, LENGTH, WIDTH, generator=generator).double() * scale for _ in range(2))
    zeros = torch.zeros(BATCH, SIZE, dtype=torch.float64)
    flow = stream.open(PassInputs(embeddings_BTD=hidden), {"tpc": zeros, "s": zeros if start is None else start})
    with torch.no_grad():
        stream.write("final_norm_input", -1, residual, flow)
        stream.write("final_hidden", -1, hidden, flow)
    return flow.states["s"]


@pytest.mark.parametrize("update", ["directional", "broadcast"])
@pytest.mark.parametrize("retention", [0.0, 0.9, 0.999])
def test_the_state_is_bounded_over_random_parameters(update: str, retention: float) -> None:
    """‖s‖ <= max(‖s_0‖, 1 / n_min), √K / n_min broadcast: S, T, I and C are at most 1, N at least n_min, alpha below 1."""
    largest = 0.0
    for seed in range(12):
        floor = 0.05
        stream = make_stream(seed, update=update, retention=retention, noise_floor=floor)
        with torch.no_grad():
            for parameter in stream.parameters():
                parameter.mul_(10.0 ** (seed % 4 - 1))  # from nearly linear to saturated
            if seed % 2:
                stream.noise_bias.fill_(-40.0)  # N at its floor: the largest update there can be
        start = torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(seed)).double() * (seed % 3) * 30
        states_BTK = states_of(stream, 10.0 ** (seed % 3 - 1), seed, start)
        one_update = (SIZE**0.5 if update == "broadcast" else 1.0) / floor
        bound_B1 = start.norm(dim=-1, keepdim=True).clamp(min=one_update)
        assert states_BTK.isfinite().all()
        assert (states_BTK.norm(dim=-1) <= bound_B1 * (1 + 1e-12)).all()
        largest = max(largest, float((states_BTK[:, -1].norm(dim=-1) / one_update).max()))
    if retention < 0.99:
        assert largest > 0.1, "no state came near the bound: this test could not fail"


def test_a_broken_noise_floor_breaks_the_bound() -> None:
    """The bound rests on the floor of N: it is reached from below, and would not hold for one ten times as high."""
    stream = make_stream(3, retention=0.0, noise_floor=0.05)
    with torch.no_grad():
        stream.noise_bias.fill_(-40.0)
        stream.noise_weight.zero_()
        stream.hidden_bias[stream.hidden_rows["coherence"]] = 20.0
    assert 2.0 < states_of(stream, 1.0, 0).norm(dim=-1).max() <= 20.0


def rank_of(stream: torch.nn.Module) -> tuple[float, int]:
    """How far the states are from multiples of the all-ones vector, relative to the largest; and the rank of all of them."""
    states_NK = states_of(stream, 1.0, 1).flatten(0, 1)
    from_ones = states_NK - states_NK.mean(-1, keepdim=True)
    return float(from_ones.abs().max() / states_NK.abs().max()), int(torch.linalg.matrix_rank(states_NK, rtol=1e-9))


def test_the_broadcast_update_keeps_one_number_and_the_directional_one_does_not() -> None:
    """§10.7 adds the same x to every channel, and alpha, S and T multiply all channels alike: from zero, s_t stays a multiple of 1.

    So the 'vector' state of §6.3 carries one number, whatever its size, and W3 s is one fixed direction.
    """
    distance, rank = rank_of(make_stream(0, update="broadcast"))
    assert distance < 1e-12 and rank == 1
    distance, rank = rank_of(make_stream(0, update="directional"))
    assert distance > 0.1 and rank == SIZE
