"""The paper's per-token blueprint (§10), written from its text: specification and oracle of the dynamic state path.

Shapes: B batch, T tokens, D hidden size, K state size, R features of telemetry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from keel.streams.dynamic_state.turbulence import reference_turbulence, state_sizes

if TYPE_CHECKING:
    from keel.streams.dynamic_state.stream import DynamicStateStream

EPSILON = 1e-6


def reference_dynamic_state(
    stream: DynamicStateStream,
    hidden_BTD: Tensor,
    residual_BTD: Tensor,
    telemetry_BTR: Tensor,
    attended_BT: Tensor | None = None,
    document_starts_BT: Tensor | None = None,
    state: dict[str, Tensor] | None = None,
    embeddings_BTD: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Run §10.11 token by token, frozen where there is padding, without safeguards.

    Turbulence, which is not the paper's, is taken from its own twin; it alone reads ``embeddings_BTD``.
    Returns: what the head reads [B, T, D]; ``tpc`` and ``s`` after every token, [B, T, K]; the signals, [B, T].
    """
    config = stream.config
    batch, length, _ = hidden_BTD.shape
    tpc_BK = s_BK = hidden_BTD.new_zeros(batch, config.state_size)
    if state:
        tpc_BK, s_BK = state["tpc"], state["s"]
    more_BT2 = hidden_BTD.new_zeros(batch, length, 2)
    if config.turbulence:
        assert embeddings_BTD is not None
        weights, zero = stream.turbulence_weights(hidden_BTD.dtype), hidden_BTD.new_zeros
        before_BX, before_BM = (zero(batch, size) for size in state_sizes(config.turbulence).values())
        more_BT2 = reference_turbulence(
            weights, hidden_BTD, residual_BTD, embeddings_BTD, before_BX, before_BM, attended_BT, document_starts_BT
        ).logits_BT2
    gates = _gate_weights(stream)
    rows: list[list[Tensor]] = []
    for t in range(length):
        h_BD, r_BD = hidden_BTD[:, t], residual_BTD[:, t]
        if document_starts_BT is not None:
            begins_B1 = document_starts_BT[:, t, None]
            if attended_BT is not None:
                begins_B1 = begins_B1 & attended_BT[:, t, None]
            tpc_BK, s_BK = (torch.where(begins_B1, torch.zeros_like(x), x) for x in (tpc_BK, s_BK))
        new_tpc_BK = _update_tpc(stream, gates, h_BD, s_BK, r_BD, tpc_BK)
        from_hidden_B1 = _from_hidden(stream, "coherence", h_BD) + more_BT2[:, t, :1]
        i_B1 = torch.sigmoid(from_hidden_B1 + new_tpc_BK @ stream.coherence_tpc[:, None])
        n_B1 = _noise(stream, h_BD, r_BD, more_BT2[:, t, 1:])
        c_B1 = _cosine(_from_hidden(stream, "alignment", h_BD), new_tpc_BK).clamp(0.0, 1.0)
        x_B1 = i_B1 * c_B1 / n_B1
        substrate_B1 = _substrate(stream, telemetry_BTR[:, t])
        if config.continuity == "magnitude":
            t_B1 = torch.sigmoid(new_tpc_BK.norm(dim=-1, keepdim=True) / config.state_size**0.5)
        else:
            t_B1 = (1 + _cosine(new_tpc_BK, tpc_BK)) / 2
        signal_BK = x_B1 * _direction(stream, new_tpc_BK)
        new_s_BK = substrate_B1 * t_B1 * (config.retention * s_BK + (1 - config.retention) * signal_BK)
        if attended_BT is not None:
            new_tpc_BK = torch.where(attended_BT[:, t, None], new_tpc_BK, tpc_BK)
            new_s_BK = torch.where(attended_BT[:, t, None], new_s_BK, s_BK)
        tpc_BK, s_BK = new_tpc_BK, new_s_BK
        delta_BD = s_BK @ stream.integration.T
        final_BD = h_BD + (delta_BD * stream.gate if config.init == "identity" else delta_BD)
        rows.append([final_BD, tpc_BK, s_BK, i_B1, c_B1, n_B1, t_B1, substrate_B1, x_B1])
    final_BTD, tpc_BTK, s_BTK, *signals = (torch.stack(column, 1) for column in zip(*rows, strict=True))
    names = ("coherence", "alignment", "noise", "continuity", "substrate", "update")
    by_name = {name: signal.squeeze(-1) for name, signal in zip(names, signals, strict=True)}
    return final_BTD, {"tpc": tpc_BTK, "s": s_BTK}, by_name


def _gate_weights(stream: DynamicStateStream) -> tuple[Tensor, Tensor]:
    """The weight and bias of §2.2's GRU for the concatenation [h, s, r]; §10.3 without r."""
    rows = 3 * stream.config.state_size
    weights = [stream.hidden_weight[:rows], stream.state_weight]
    if stream.config.tpc_input == "hidden_state_residual":
        weights.append(stream.residual_weight)
    return torch.cat(weights, -1), stream.hidden_bias[:rows]


def _update_tpc(
    stream: DynamicStateStream, gates: tuple[Tensor, Tensor], h: Tensor, s: Tensor, r: Tensor, tpc: Tensor
) -> Tensor:
    """§2.2, with the concatenation; §10.3 without r."""
    inputs = [h, s, r] if stream.config.tpc_input == "hidden_state_residual" else [h, s]
    from_input = F.linear(torch.cat(inputs, -1), *gates)
    from_tpc = F.linear(tpc, stream.tpc_weight, stream.tpc_bias)
    reset_x, update_x, new_x = from_input.chunk(3, -1)
    reset_c, update_c, new_c = from_tpc.chunk(3, -1)
    update = torch.sigmoid(update_x + update_c)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_c) * new_c)
    return (1 - update) * new + update * tpc


def _from_hidden(stream: DynamicStateStream, part: str, h: Tensor) -> Tensor:
    rows = stream.hidden_rows[part]
    return h @ stream.hidden_weight[rows].T + stream.hidden_bias[rows]


def _noise(stream: DynamicStateStream, h: Tensor, r: Tensor, more: Tensor) -> Tensor:
    if stream.config.noise == "hidden":
        return F.softplus(_from_hidden(stream, "noise", h) + more) + stream.config.noise_floor
    raw = more + stream.noise_weight * r.norm(dim=-1, keepdim=True) + stream.noise_bias
    return F.softplus(raw) + stream.config.noise_floor


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    a = a / (a.norm(dim=-1, keepdim=True) + EPSILON)
    b = b / (b.norm(dim=-1, keepdim=True) + EPSILON)
    return (a * b).sum(-1, keepdim=True)


def _substrate(stream: DynamicStateStream, telemetry_BR: Tensor) -> Tensor:
    instability = telemetry_BR @ stream.substrate_weight[:, None] + stream.substrate_bias
    if stream.config.substrate == "sigmoid":
        return torch.sigmoid(instability)
    return torch.exp(-F.softplus(instability))


def _direction(stream: DynamicStateStream, tpc: Tensor) -> Tensor:
    if stream.config.update == "broadcast":
        return torch.ones_like(tpc)
    projected = tpc @ stream.direction.T
    return projected / (projected.norm(dim=-1, keepdim=True) + EPSILON)
