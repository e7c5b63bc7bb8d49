"""One token of the dynamic state path under its safeguards (§12): every failure mode's remedy around the plain step.

Floors, clamps and the smoothing of T act on the token that fails. What slows the recurrence, nudges it or pulls it back acts from
the token after its detection on. Where the governor has a row in safe mode or cool-down, state and TPC stay as they were.

Shapes: B batch, K state size, Q numbers of the governor's memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.streams.dynamic_state.config import DynamicStateConfig
from keel.streams.dynamic_state.dynamics import (
    Signals,
    StepWeights,
    TokenParts,
    direction,
    signals_of,
    temporal_core,
)
from keel.streams.dynamic_state.governor import SIZES, Memory, detect, detectors, govern, made_once, mode_of

SMOOTHING = 0.1  # weight of the newest token in the moving average of T (§12.3)
SHRINKING = 0.5  # γ of §12.7
CONSERVATIVE = 0.5  # share of the state's effect that a row without coherence keeps (§12.4)
NUDGE = 0.05  # ε of §12.8: by how much the bound of the state grows
PULL = 0.1  # how far towards its baseline a split state goes at a token: a step down the gradient of §12.9's penalty
RELEASE = 0.5  # share of itself that the TPC gives up at a token while alignment stays broken
BASELINE_RATE = 0.02  # weight of the newest state in the baseline


class Guarded(NamedTuple):
    """The whole state of a row under safeguards: TPC, s, the baseline of s (§12.9: "a historically stable attractor"), the memory."""

    tpc_BK: Tensor
    state_BK: Tensor
    baseline_BK: Tensor
    memory_BQ: Tensor


@made_once
def waves(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return frequencies and phases of §12.8's η: sines of a row's age, so that a rollback and a rerun meet the same ones.

    Multiples of the golden ratio lie far from each other and from common fractions, so no two channels go together for long.
    """
    with torch.inference_mode(False):
        golden_K = torch.arange(1, size + 1, dtype=torch.float64, device=device) * (5**0.5 - 1) / 2
        return (10 * golden_K.frac()).to(dtype), (10 * (7 * golden_K).frac()).to(dtype)


def guarded_step(config: DynamicStateConfig, parts: TokenParts, weights: StepWeights, before: Guarded) -> Guarded:
    """Read one token under safeguards; ``config.safeguards`` is not None.

    §9E.2's bound holds with ``NUDGE`` added to the largest update: every remedy shrinks the state, or mixes it with its own past.
    """
    limits = config.limits
    memory = Memory(*before.memory_BQ.split(SIZES, -1))
    found = detectors(limits, before.memory_BQ.dtype, before.memory_BQ.device)
    tpc_BK = temporal_core(parts.gates_B3K, weights, before.state_BK, before.tpc_BK)
    measured = signals_of(config, parts, weights, tpc_BK, before.tpc_BK)
    discontinuity_B1 = torch.lerp(memory.discontinuity, 1 - measured.continuity, SMOOTHING)
    used = _floored(config, measured, discontinuity_B1)
    # A lower share is a higher retention: with alpha = 0.9, half of it is alpha + 0.05.
    share_B1 = torch.exp2(memory.detected @ found.slowing_F1) * (1 - config.retention)
    towards_BK = _nudged(direction(weights, tpc_BK) * used.update, memory)
    state_BK = torch.lerp(before.state_BK, towards_BK, share_B1) * (used.substrate * used.continuity)
    change_B1 = torch.linalg.vector_norm(state_BK - before.state_BK, dim=-1, keepdim=True)
    measures_BM = torch.cat([*measured, change_B1], -1)
    within_BF, counts_BF, detected_BF = detect(found, measures_BM, memory.counts)
    instability_B1, timer_B1 = govern(limits, found, detected_BF, memory.instability, memory.timer)
    frozen_B1, exploding_B1 = timer_B1 > 0, ~within_BF[:, 5:6]
    state_BK = torch.where(exploding_B1, SHRINKING * state_BK, state_BK)
    state_BK = torch.lerp(state_BK, before.baseline_BK, PULL * memory.detected[:, 7:8])
    held_BK = torch.where(exploding_B1, before.baseline_BK, before.state_BK)
    # §12.6 slows the state and waits for alignment to recover. A TPC at the ends of its gates' range keeps itself there and never
    # does: let go of step by step, it is made of what the host says now.
    tpc_BK = tpc_BK * (1 - RELEASE * memory.detected[:, 4:5])
    healthy_B1 = within_BF.all(-1, keepdim=True).to(tpc_BK.dtype) * BASELINE_RATE
    old = torch.cat([before.tpc_BK, held_BK, before.baseline_BK, memory.discontinuity], -1)
    baseline_BK = torch.lerp(before.baseline_BK, state_BK, healthy_B1)
    new = torch.cat([tpc_BK, state_BK, baseline_BK, discontinuity_B1], -1)
    size = config.state_size
    tpc_BK, state_BK, baseline_BK, discontinuity_B1 = torch.where(frozen_B1, old, new).split([size, size, size, 1], -1)
    reliance_B1 = torch.where(within_BF[:, 2:3], 1.0, CONSERVATIVE).masked_fill(frozen_B1, 0.0)
    now = Memory(
        measures_BM, counts_BF, detected_BF, discontinuity_B1, instability_B1, timer_B1, memory.age + 1,
        mode_of(limits, timer_B1), reliance_B1,
    )  # fmt: skip
    return Guarded(tpc_BK, state_BK, baseline_BK, torch.cat(now, -1))


def _floored(config: DynamicStateConfig, measured: Signals, discontinuity_B1: Tensor) -> Signals:
    """Return the signals with the floors of I and C (§12.4, §12.6), N clamped (§12.5), and T smoothed where it breaks (§12.3)."""
    limits = config.limits
    i = measured.coherence.clamp(min=limits.coherence_least)
    c = measured.alignment.clamp(min=limits.alignment_least)
    n = measured.noise.clamp(max=max(limits.noise_most, config.noise_floor))
    whole = measured.continuity >= limits.continuity_least
    t = torch.where(whole, measured.continuity, 1 - discontinuity_B1)
    return Signals(i, c, n, t, measured.substrate, i * c / n)


def _nudged(towards_BK: Tensor, memory: Memory) -> Tensor:
    """Add §12.8's ε η, of length at most ε, where the state has stopped."""
    frequency_K, phase_K = waves(towards_BK.shape[-1], towards_BK.dtype, towards_BK.device)
    wave_BK = torch.sin(torch.addcmul(phase_K, memory.age, frequency_K))
    amplitude_B1 = memory.detected[:, 6:7] * (NUDGE * towards_BK.shape[-1] ** -0.5)
    return torch.addcmul(towards_BK, wave_BK, amplitude_B1)
