"""What the signals of a dynamic state path should have been, from the exact level of disruption of every token (DTA §9B, §9C.1).

The rule: a disruption of level u leaves a trace that is u at once and halves every so many tokens after it, a signal's own number,

    d_t = max over k <= t of u_k 2^-((t - k) / half-life)

    I*_t = high - (high - low) d_t              C*, T* alike, each with its own levels and half-life
    N*_t = calm + (disrupted - calm) d_t
    TPC*_t = (1 - d_t) e_t                       e_t the unit moving average of the query over the clean tokens so far
    s*_{t+1} = S_t T*_t (alpha s*_t + (1 - alpha) I*_t C*_t / N*_t u_t)      u_t the model's own direction

so that I*, C*, T*, the length of TPC* and what s* takes up fall in a disruption and recover after it, and N* does the opposite.

Shapes: B batch, T tokens, K state size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from keel.ops.scan import linear_scan

HALF_LIFE = {"coherence": 2.0, "noise": 1.0, "alignment": 4.0, "continuity": 4.0, "tpc": 4.0}
CALM = {"coherence": 0.95, "noise": 0.25, "alignment": 0.9, "continuity": 0.98}
DISRUPTED = {"coherence": 0.05, "noise": 2.0, "alignment": 0.2, "continuity": 0.6}
TREND = 0.9  # what the moving average of the query keeps at a clean token


class SignalTargets(NamedTuple):
    """Targets of the signals, [B, T] each but ``tpc`` and ``state``, [B, T, K]; no gradient goes through them."""

    coherence: Tensor
    noise: Tensor
    alignment: Tensor
    continuity: Tensor
    tpc: Tensor
    state: Tensor


def trace_of(level_BT: Tensor, half_life: float) -> Tensor:
    """Return the trace d [B, T] of levels in [0, 1], in [0, 1]; see the module.  Reference twin: ``reference_trace``."""
    slope = math.log(2) / half_life
    time_T = torch.arange(level_BT.shape[1], device=level_BT.device, dtype=torch.float64)
    grown_BT = (level_BT.double().log() + slope * time_T).cummax(1).values
    return (grown_BT - slope * time_T).exp().to(level_BT.dtype)


def reference_trace(level_T: list[float], half_life: float) -> list[float]:
    """One row of ``trace_of``, token by token: the larger of the level now and what is left of the trace before."""
    found, trace = [], 0.0
    for level in level_T:
        trace = max(level, trace * 0.5 ** (1 / half_life))
        found.append(trace)
    return found


def signal_target(name: str, level_BT: Tensor) -> Tensor:
    """Return I*, N*, C* or T* [B, T] (``coherence``, ``noise``, ``alignment``, ``continuity``)."""
    return CALM[name] + (DISRUPTED[name] - CALM[name]) * trace_of(level_BT, HALF_LIFE[name])


def tpc_target(level_BT: Tensor, query_BTK: Tensor) -> Tensor:
    """Return TPC* [B, T, K], of length 1 - d_t; zero until the first clean token.

    Args:
        query_BTK: the hidden states projected to the state, of unit length (§5.3).
    """
    new_BT1 = (1 - TREND) * (1 - level_BT).unsqueeze(-1).to(query_BTK.dtype)
    trend_BTK, _ = linear_scan((1 - new_BT1).expand_as(query_BTK).contiguous(), new_BT1 * query_BTK)
    length_BT = 1 - trace_of(level_BT, HALF_LIFE["tpc"])
    return F.normalize(trend_BTK, dim=-1) * length_BT.unsqueeze(-1).to(query_BTK.dtype)


def state_target(targets: dict[str, Tensor], substrate_BT: Tensor, direction_BTK: Tensor, retention: float) -> Tensor:
    """Return s* after every token [B, T, K], the recursive integration of the targets (§9C.1)."""
    update_BT = targets["coherence"] * targets["alignment"] / targets["noise"]
    kept_BT = substrate_BT * targets["continuity"]
    decay_BTK = (retention * kept_BT).unsqueeze(-1).expand_as(direction_BTK).contiguous()
    taken_BTK = ((1 - retention) * kept_BT * update_BT).unsqueeze(-1) * direction_BTK
    return linear_scan(decay_BTK, taken_BTK)[0]


@torch.no_grad()
def signal_targets(
    level_BT: Tensor, query_BTK: Tensor, substrate_BT: Tensor, direction_BTK: Tensor, retention: float
) -> SignalTargets:
    """Return all targets of a batch of disrupted windows that begin with an empty state.

    Args:
        level_BT: u, in [0, 1], 0 exactly where a token is clean.
        query_BTK, substrate_BT, direction_BTK: the model's own, see ``tpc_target`` and ``state_target``.
        retention: alpha.
    """
    scalars = {name: signal_target(name, level_BT) for name in ("coherence", "noise", "alignment", "continuity")}
    state_BTK = state_target(scalars, substrate_BT, direction_BTK, retention)
    return SignalTargets(**scalars, tpc=tpc_target(level_BT, query_BTK), state=state_BTK)
