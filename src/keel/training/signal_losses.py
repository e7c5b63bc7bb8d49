"""The losses of DTA §9B to §9D by name, each a sum over tokens.

    coherence, noise, alignment     MSE of I, N, C to their targets                             §9B.1 to §9B.3
    tpc                             MSE of TPC to its target                                    §9B.4
    rio                             MSE of s_{t+1} to its target                                §9C.2
    continuity_kl                   KL(T* || T), both as chances of one of two outcomes         §9C.3
    stability                       ‖s_{t+1} - s_t‖_1                                           §9D.2
    drift                           max(0, C_thr - C)                                           §9D.3
    spike                           max(0, N_t - N_{t-1} - Δ_max)                               §9D.4
    continuity                      MSE of T to its target                                      §9D.5

MSE is the mean over channels. The regularisers of §9D count undisrupted tokens alone: in a disruption C shall fall and N rise.

Shapes: B batch, T tokens, K state size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from keel.training.signal_targets import SignalTargets

LEAST_ALIGNMENT = 0.5  # C_thr of §9D.3
MOST_RISE = 0.2  # Δ_max of §9D.4
_EPSILON = 1e-6

Signals = Mapping[str, Tensor]
"""As ``DynamicStateStream`` gives them: coherence, noise, alignment, continuity [B, T]; tpc, state [B, T, K]."""


def _square(name: str) -> Callable[[Signals, SignalTargets, Tensor], Tensor]:
    def loss(signals: Signals, targets: SignalTargets, calm_BT: Tensor) -> Tensor:
        error = (signals[name] - getattr(targets, name)).square()
        return error if error.dim() == 2 else error.mean(-1)

    return loss


def _continuity_kl(signals: Signals, targets: SignalTargets, calm_BT: Tensor) -> Tensor:
    given_BT, target_BT = signals["continuity"].clamp(_EPSILON, 1 - _EPSILON), targets.continuity
    entropy_BT = torch.special.entr(target_BT) + torch.special.entr(1 - target_BT)
    return F.binary_cross_entropy(given_BT, target_BT, reduction="none") - entropy_BT


def _stability(signals: Signals, targets: SignalTargets, calm_BT: Tensor) -> Tensor:
    return F.pad(signals["state"].diff(dim=1).abs().sum(-1), (1, 0)) * calm_BT


def _drift(signals: Signals, targets: SignalTargets, calm_BT: Tensor) -> Tensor:
    return F.relu(LEAST_ALIGNMENT - signals["alignment"]) * calm_BT


def _spike(signals: Signals, targets: SignalTargets, calm_BT: Tensor) -> Tensor:
    return F.pad(F.relu(signals["noise"].diff(dim=1) - MOST_RISE), (1, 0)) * calm_BT


LOSSES: dict[str, Callable[[Signals, SignalTargets, Tensor], Tensor]] = {
    "coherence": _square("coherence"),
    "noise": _square("noise"),
    "alignment": _square("alignment"),
    "tpc": _square("tpc"),
    "rio": _square("state"),
    "continuity_kl": _continuity_kl,
    "stability": _stability,
    "drift": _drift,
    "spike": _spike,
    "continuity": _square("continuity"),
}
"""Each loss by name: (signals, targets, 1 where a token is undisrupted) → [B, T]."""


def signal_losses(
    signals: Signals, targets: SignalTargets, level_BT: Tensor, names: Mapping[str, float]
) -> dict[str, Tensor]:
    """Return the named losses, each a sum over tokens times its weight; a scalar each.

    Args:
        level_BT: of disruption, 0 exactly where a token is clean.
        names: weight by name of ``LOSSES``; one of weight 0 is not computed.
    """
    calm_BT = (level_BT == 0).to(level_BT.dtype)
    return {name: weight * LOSSES[name](signals, targets, calm_BT).sum() for name, weight in names.items() if weight}
