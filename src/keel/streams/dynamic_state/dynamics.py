"""One token of the dynamic state path: the five signals and the recursive integration, each a function of the field's name.

Shapes: B batch, T tokens, K state size, R features of telemetry. Every function works on any leading dimensions; a signal keeps a
last dimension of 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.streams.dynamic_state.config import DynamicStateConfig

EPSILON = 1e-6  # added to a norm before something is divided by it (§10.6)


class TokenParts(NamedTuple):
    """What depends on the host alone and is therefore known for all tokens before the first step, [B, T, ...] or [B, ...].

    Attributes:
        gates_B3K: what hidden state and residual add to the gates (reset, update, new) of the temporal core.
        query_BK: the hidden state projected to the state (§10.6), of unit length.
        coherence_B1: what the hidden state adds to the logit of I.
        noise_B1: N, at least the noise floor.
        substrate_B1: S.
    """

    gates_B3K: Tensor
    query_BK: Tensor
    coherence_B1: Tensor
    noise_B1: Tensor
    substrate_B1: Tensor


class StepWeights(NamedTuple):
    """The weights that work inside the recurrence: what the gates read from s and from the TPC, I from the TPC, and u from it."""

    state_3KK: Tensor
    tpc_3KK: Tensor
    tpc_bias_3K: Tensor
    coherence_K: Tensor
    direction_KK: Tensor | None


class Signals(NamedTuple):
    """The signals of a token, each [..., 1]: I, C, N, T, S and x = I C / N."""

    coherence: Tensor
    alignment: Tensor
    noise: Tensor
    continuity: Tensor
    substrate: Tensor
    update: Tensor


def norm(vector: Tensor) -> Tensor:
    """Return the length [..., 1] plus ``EPSILON``, safe to divide by."""
    return torch.linalg.vector_norm(vector, dim=-1, keepdim=True) + EPSILON


def temporal_core(gates_B3K: Tensor, weights: StepWeights, state_BK: Tensor, tpc_BK: Tensor) -> Tensor:
    """Advance the temporal persistence core by one token: TPC_t = GRU([h, s, r], TPC_{t-1}) (§2.2), [B, K]."""
    size = tpc_BK.shape[-1]
    from_input_B3K = torch.addmm(gates_B3K, state_BK, weights.state_3KK.T)
    from_tpc_B3K = torch.addmm(weights.tpc_bias_3K, tpc_BK, weights.tpc_3KK.T)
    reset, update, _ = torch.sigmoid(from_input_B3K + from_tpc_B3K).chunk(3, -1)
    new = torch.addcmul(from_input_B3K[:, 2 * size :], reset, from_tpc_B3K[:, 2 * size :])
    return torch.lerp(torch.tanh(new), tpc_BK, update)


def coherence(from_hidden: Tensor, weights: StepWeights, tpc: Tensor) -> Tensor:
    """Return I = sigmoid(W1 [h, TPC]) (§3.3), in (0, 1)."""
    return torch.sigmoid(from_hidden + tpc @ weights.coherence_K.unsqueeze(-1))


def noise(raw: Tensor, floor: float) -> Tensor:
    """Return N = softplus(raw) + n_min (§4.3, §10.5), at least ``floor``."""
    # Not F.softplus: under torch.compile its backward gives other strides than it says, for the gradients that come from here.
    return torch.logaddexp(raw, raw.new_zeros(())) + floor


def alignment(query: Tensor, tpc: Tensor, tpc_norm: Tensor) -> Tensor:
    """Return C, the cosine of projected hidden state and TPC (§5.3), clamped to [0, 1] as in §10.6."""
    return ((query * tpc).sum(-1, keepdim=True) / tpc_norm).clamp(0.0, 1.0)


def continuity(reading: str, tpc: Tensor, tpc_norm: Tensor, before: Tensor) -> Tensor:
    """Return T in [0, 1]: (1 + cos(TPC_t, TPC_{t-1})) / 2 (§2.5), or sigmoid(‖TPC‖ / √K) (§10.9).

    Before the first token TPC is zero and has no direction; T is then one half.
    """
    if reading == "magnitude":
        return torch.sigmoid((tpc_norm - EPSILON) * tpc.shape[-1] ** -0.5)
    return 0.5 + 0.5 * (tpc * before).sum(-1, keepdim=True) / (tpc_norm * norm(before))


def substrate_stability(reading: str, weight_R: Tensor, bias: Tensor, telemetry: Tensor) -> Tensor:
    """Return S from the features of telemetry [..., R]: exp(-softplus(w·v + b)) (§7.4) or sigmoid(w·v + b) (§10.8), in (0, 1)."""
    instability = (telemetry * weight_R).sum(-1, keepdim=True) + bias
    # exp(-softplus(z)) = 1 / (1 + exp(z)) = sigmoid(-z), in fewer calls
    return torch.sigmoid(instability if reading == "sigmoid" else -instability)


def direction(weights: StepWeights, tpc: Tensor) -> Tensor:
    """Return u: the unit direction of the TPC projected to the state, or all ones where x is broadcast (§10.7)."""
    if weights.direction_KK is None:
        return torch.ones_like(tpc)
    projected = tpc @ weights.direction_KK.T
    return projected / norm(projected)


def integrate(retention: float, signals: Signals, state: Tensor, direction: Tensor) -> Tensor:
    """Return s_{t+1} = S T (alpha s_t + (1 - alpha) x_t u_t) (§6.5)."""
    mixed = torch.lerp(state, signals.update * direction, 1 - retention)
    return mixed * (signals.substrate * signals.continuity)


def signals_of(
    config: DynamicStateConfig, parts: TokenParts, weights: StepWeights, tpc: Tensor, before: Tensor
) -> Signals:
    """Return the signals, given the TPC after a token and the one before it; for one token or for many at once."""
    length = norm(tpc)
    i = coherence(parts.coherence_B1, weights, tpc)
    c = alignment(parts.query_BK, tpc, length)
    t = continuity(config.continuity, tpc, length, before)
    return Signals(i, c, parts.noise_B1, t, parts.substrate_B1, i * c / parts.noise_B1)


def step(
    config: DynamicStateConfig, parts: TokenParts, weights: StepWeights, tpc_BK: Tensor, state_BK: Tensor
) -> tuple[Tensor, Tensor, Signals]:
    """Read one token. Returns TPC and s after it, and the signals that s was made with.

    Reference twin: ``reference_dynamic_state``.
    """
    new_tpc_BK = temporal_core(parts.gates_B3K, weights, state_BK, tpc_BK)
    signals = signals_of(config, parts, weights, new_tpc_BK, tpc_BK)
    return new_tpc_BK, integrate(config.retention, signals, state_BK, direction(weights, new_tpc_BK)), signals
