"""The eight failure modes as detectors (§12.2 to §12.9), and the recursion governor (§12.10) that takes a row out of the recurrence.

    active ──instability──► safe mode ──stable again──► cool-down ──K stable tokens──► active
                               ▲───────instability─────────┘

In safe mode and cool-down the state is frozen and the head reads what the host gave, bit for bit. Everything is a tensor operation
over the rows of a batch: one row's failure is nothing to the others. The governor's memory is one vector a row, kept in the cache.

Shapes: B batch, M measures, F failure modes, Q numbers of the memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from keel.errors import KeelError

Made = TypeVar("Made", bound=tuple[Tensor, ...])
MEASURES = ("coherence", "alignment", "noise", "continuity", "substrate", "update", "change")
"""The signals as measured, before any remedy; ``change`` is the length of s_{t+1} - s_t."""
FAILURES = (
    "substrate_collapse", "temporal_fragmentation", "coherence_collapse", "noise_rampancy",
    "alignment_break", "feedback_explosion", "fixed_point_collapse", "identity_split",
)  # fmt: skip
# How much a detected failure adds to the instability of a row, which halves at every token: a failure of weight w that stays
# brings it to 2 w. A collapsed substrate is enough at once; noise, coherence and explosion after four tokens; a fixed point never.
SEVERITY = (1.0, 0.25, 0.5, 0.5, 0.25, 0.5, 0.0, 0.5)
DECAY = 0.5
# By which power of two each detected failure divides what is taken up: one for noise (§12.5) and for broken alignment (§12.6).
SLOWING = (0.0, 0.0, 0.0, -1.0, -1.0, 0.0, 0.0, 0.0)


class Mode(IntEnum):
    """The governor's states, as the signal ``governor`` gives them."""

    ACTIVE = 0
    SAFE = 1
    COOL_DOWN = 2


@dataclass(frozen=True, kw_only=True)
class SafeguardConfig:
    """Thresholds of the failure modes (§12) and of the recursion governor.

    The paper gives none. Those of I, N and C lie between what a path learns to say of clean and of disrupted text
    (``keel.training.signal_targets``): I 0.95 and 0.05, N 0.25 and 2, C 0.9 and 0.2.

    Attributes:
        substrate_least: S_min of §12.2; below it a row runs as the host alone.
        continuity_least: T below it is fragmentation (§12.3), and a moving average of T is used instead.
        coherence_least: I_min of §12.4, the floor of I; below it half of the state's effect is withheld.
        noise_most: N_max of §12.5; N is clamped to it, and from the next token on half as much is taken up.
        alignment_least: C_floor of §12.6, the floor of C; where it stays below, half as much is taken up, and the TPC is let go of.
        change_most: Δ_max of §12.7; a longer step of the state is halved.
        change_least: a state that moves less than this is frozen (§12.8), and is nudged.
        patience: tokens that alignment, and alignment with continuity (§12.9), must fail in a row to be detected; a fixed point
            twice as many. The other modes are detected at the first token.
        instability_most: governor's threshold, above 0 and at most 2.5, see ``SEVERITY``.
        cooldown: K of §12.10, stable tokens before a row takes part again.
    """

    substrate_least: float = 0.3
    continuity_least: float = 0.2
    coherence_least: float = 0.2
    noise_most: float = 1.2
    alignment_least: float = 0.1
    change_most: float = 1.0
    change_least: float = 1e-6
    patience: int = 8
    instability_most: float = 0.9
    cooldown: int = 16

    def __post_init__(self) -> None:
        if self.patience < 1 or self.cooldown < 1:
            raise KeelError(
                f"safeguards: patience={self.patience}, cooldown={self.cooldown}; give at least one token each"
            )
        if (
            not 0 < self.instability_most <= 2.5
        ):  # a token that is not a number brings 2.75 at once, and must never get through
            raise KeelError(
                f"safeguards: instability_most={self.instability_most}; give a threshold above 0 and at most 2.5"
            )
        if not 0 <= self.change_least < self.change_most:
            raise KeelError(
                f"safeguards: change_least={self.change_least}, change_most={self.change_most}; give 0 <= least < most"
            )

    def patiences(self) -> tuple[int, ...]:
        """Return for each of ``FAILURES`` how many tokens in a row detect it."""
        return 1, 1, 1, 1, self.patience, 1, 2 * self.patience, self.patience

    def thresholds(self) -> tuple[float, ...]:
        """Return for each of ``FAILURES`` the least value of its margin, see ``_margins``."""
        split = self.continuity_least + self.alignment_least
        return (
            self.substrate_least, self.continuity_least, self.coherence_least, -self.noise_most,
            self.alignment_least, -self.change_most, self.change_least, split,
        )  # fmt: skip


class Memory(NamedTuple):
    """What the governor keeps a row, each [B, ...]; all zeros at a beginning.

    Attributes:
        measures: the last token's, in the order of ``MEASURES``.
        counts: tokens in a row that each failure mode has failed.
        detected: 1 where its patience is over.
        discontinuity: moving average of 1 - T.
        instability: see ``SEVERITY``.
        timer: tokens until the row is active: 0 active, 1 to K cool-down, K + 1 safe mode.
        age: tokens seen.
        mode: a ``Mode``.
        reliance: how much of the state's effect reaches the head: 1, less in a conservative row, 0 where it is frozen.
    """

    measures: Tensor
    counts: Tensor
    detected: Tensor
    discontinuity: Tensor
    instability: Tensor
    timer: Tensor
    age: Tensor
    mode: Tensor
    reliance: Tensor


SIZES = (len(MEASURES), len(FAILURES), len(FAILURES), 1, 1, 1, 1, 1, 1)
MEMORY_SIZE = sum(SIZES)


class Detectors(NamedTuple):
    """The thresholds as tensors."""

    margins_MF: Tensor
    thresholds_F: Tensor
    patience_F: Tensor
    severity_F1: Tensor
    slowing_F1: Tensor


def _margins() -> list[list[float]]:
    """Return the matrix that takes measures to margins: S, T, I, -N, C, -change, change, T + C."""
    by_failure: list[dict[str, float]] = [
        {"substrate": 1.0}, {"continuity": 1.0}, {"coherence": 1.0}, {"noise": -1.0},
        {"alignment": 1.0}, {"change": -1.0}, {"change": 1.0}, {"continuity": 1.0, "alignment": 1.0},
    ]  # fmt: skip
    return [[row.get(measure, 0.0) for row in by_failure] for measure in MEASURES]


def made_once(make: Callable[..., Made]) -> Callable[..., Made]:
    """Keep the tensors that a function makes of its arguments. What it makes for a tracer (compile, export) is not kept: a tracer's
    stand-ins for tensors must not outlive it.
    """
    known: dict[tuple[object, ...], Made] = {}

    @functools.wraps(make)
    def found(*arguments: object) -> Made:
        if torch.compiler.is_compiling():
            return make(*arguments)
        if arguments not in known:
            made = make(*arguments)
            if any(type(tensor) is not Tensor for tensor in made):
                return made
            known[arguments] = made
        return known[arguments]

    return found


@made_once
def detectors(config: SafeguardConfig, dtype: torch.dtype, device: torch.device) -> Detectors:
    """Return the thresholds as tensors, made once."""
    with torch.inference_mode(False):
        severity, slowing = ([[weight] for weight in weights] for weights in (SEVERITY, SLOWING))
        values = _margins(), config.thresholds(), config.patiences(), severity, slowing
        return Detectors(*(torch.tensor(value, dtype=dtype, device=device) for value in values))


def detect(found: Detectors, measures_BM: Tensor, counts_BF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which modes are within bounds now [B, F] (bool), for how long the others failed, and which are detected (0 or 1).

    A measure that is not a number makes every mode fail.
    """
    within_BF = measures_BM @ found.margins_MF >= found.thresholds_F
    counts_BF = (counts_BF + 1).masked_fill(within_BF, 0.0)
    return within_BF, counts_BF, (counts_BF >= found.patience_F).to(counts_BF.dtype)


def govern(
    config: SafeguardConfig, found: Detectors, detected_BF: Tensor, instability_B1: Tensor, timer_B1: Tensor
) -> tuple[Tensor, Tensor]:
    """Take the governor one token further (§12.10): the new instability and timer.

    Any mode goes to safe mode while instability is above the threshold; else safe mode goes to cool-down, cool-down counts down, and
    at 0 the row is active. Reference twin: ``reference_governor``.
    """
    instability_B1 = torch.addmm(instability_B1, detected_BF, found.severity_F1, beta=DECAY)
    timer_B1 = (timer_B1 - 1).clamp(min=0.0)
    return instability_B1, timer_B1.masked_fill(instability_B1 > config.instability_most, config.cooldown + 1.0)


def mode_of(config: SafeguardConfig, timer: Tensor) -> Tensor:
    """Return the ``Mode`` that a timer stands for, in the timer's dtype."""
    return (timer > 0).to(timer.dtype) + ((timer > 0) & (timer <= config.cooldown)).to(timer.dtype)


def reference_governor(
    config: SafeguardConfig, tokens: Sequence[dict[str, float]]
) -> list[tuple[Mode, frozenset[str]]]:
    """One row in plain words, token by token: the mode, and the failures detected. The oracle of ``detect`` and ``govern``."""
    mode, remaining, instability = Mode.ACTIVE, 0, 0.0
    failing = dict.fromkeys(FAILURES, 0)
    patience = dict(zip(FAILURES, config.patiences(), strict=True))
    weight = dict(zip(FAILURES, SEVERITY, strict=True))
    history = []
    for m in tokens:
        broken = any(math.isnan(value) for value in m.values())
        fails = {
            "substrate_collapse": m["substrate"] < config.substrate_least,
            "temporal_fragmentation": m["continuity"] < config.continuity_least,
            "coherence_collapse": m["coherence"] < config.coherence_least,
            "noise_rampancy": m["noise"] > config.noise_most,
            "alignment_break": m["alignment"] < config.alignment_least,
            "feedback_explosion": m["change"] > config.change_most,
            "fixed_point_collapse": m["change"] < config.change_least,
            "identity_split": m["continuity"] + m["alignment"] < config.continuity_least + config.alignment_least,
        }
        for name, fails_now in fails.items():
            failing[name] = failing[name] + 1 if fails_now or broken else 0
        detected = frozenset(name for name in FAILURES if failing[name] >= patience[name])
        instability = DECAY * instability + sum(weight[name] for name in detected)
        if instability > config.instability_most:
            mode = Mode.SAFE
        elif mode is Mode.SAFE:
            mode, remaining = Mode.COOL_DOWN, config.cooldown
        elif mode is Mode.COOL_DOWN:
            remaining -= 1
            mode = Mode.COOL_DOWN if remaining else Mode.ACTIVE
        history.append((mode, detected))
    return history
