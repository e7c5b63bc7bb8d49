"""Turbulence: what N and I may read besides the text's own readings, so that they tell disruptions beside a frozen host.

§4.2 wants N to see "unusually large fluctuations", "abrupt directional changes across tokens" and "divergence from recent
representational geometry"; the norm of one residual (§4.3) and one hidden state (§10.5) hold little of that. Here a token is held
against what the hidden state before it expected, and features of that are integrated over the last tokens:

    match_t = (A h_{t-1}) * (B e_t)                     e_t the token's embedding, of root mean square 1
    f_t = tanh(W [h_t, log rms(r_t), log rms(embedding), match_t] + P h_{t-1} + b)
    m_{t,i} = rho_i m_{t-1,i} + (1 - rho_i) f_t         rho_i in ``RATES``; a feature that is no number counts as 0 here
    y_t = [f_t, m_{t,1}, ..., m_{t,4}]
    added to the logits of I and N: V [y_t, tanh(L y_t + c)]

The sum of match_t is the logit of the token beside a tied head where A = B (as they begin) keeps inner products; what h_{t-1} and the
embedding's length say of the other logits makes a surprisal of it. All of it depends on the host alone and is computed for all tokens at
once; the reading is Keel's, not the paper's.

Shapes: B batch, T tokens, D hidden size, E rank of the match, F features, X = E + F, M = F times the number of rates, G units of the layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.ops.scan import linear_scan
from keel.streams.dynamic_state.dynamics import EPSILON

RANK = 64
LAYER = 32
RATES = (0.5, 0.8, 0.95, 0.99)


class TurbulenceWeights(NamedTuple):
    """A and B [E, D], P [F, D], W [F, D + 2 + E], b [F], L [G, F + M], c [G], and V [2, F + M + G]: the rows of I and of N."""

    expected_ED: Tensor
    seen_ED: Tensor
    before_FD: Tensor
    weight_FY: Tensor
    bias_F: Tensor
    layer_GZ: Tensor
    layer_bias_G: Tensor
    read_2Z: Tensor


class Turbulence(NamedTuple):
    """What is added to the logits of I and N [B, T, 2], and the state after every token: A h and P h [B, T, X], and m [B, T, M]."""

    logits_BT2: Tensor
    expectation_BTX: Tensor
    turbulence_BTM: Tensor


def state_sizes(num_features: int) -> dict[str, int]:
    """Return the sizes X and M of the state by name."""
    return {"expectation": RANK + num_features, "turbulence": num_features * len(RATES)}


def turbulence(
    weights: TurbulenceWeights,
    hidden_BTD: Tensor,
    residual_BTD: Tensor,
    embeddings_BTD: Tensor,
    expectation_BX: Tensor,
    turbulence_BM: Tensor,
    attended_BT: Tensor | None = None,
    document_starts_BT: Tensor | None = None,
) -> Turbulence:
    """Run over a whole pass from the state before it; frozen where there is padding, from zero where a document begins.

    Reference twin: ``reference_turbulence``.
    """
    starts_BT = document_starts_BT
    if starts_BT is not None and attended_BT is not None:
        starts_BT = starts_BT & attended_BT
    expects_XD = torch.cat([weights.expected_ED, weights.before_FD])
    after_BTX = _carried(hidden_BTD @ expects_XD.T, expectation_BX, attended_BT)
    before_BTX = torch.cat([expectation_BX.unsqueeze(1), after_BTX[:, :-1]], 1)
    if starts_BT is not None:
        before_BTX = before_BTX.masked_fill(starts_BT.unsqueeze(-1), 0.0)
    expected_BTE, before_BTF = before_BTX.split([len(weights.expected_ED), len(weights.before_FD)], -1)
    size_BT1 = _rms(embeddings_BTD)
    match_BTE = expected_BTE * ((embeddings_BTD / size_BT1) @ weights.seen_ED.T)
    inputs_BTY = torch.cat([hidden_BTD, _rms(residual_BTD).log(), size_BT1.log(), match_BTE], -1)
    features_BTF = torch.tanh(inputs_BTY @ weights.weight_FY.T + before_BTF + weights.bias_F)
    rate_M = rates(features_BTF)
    decay_BTM = rate_M.expand(*features_BTF.shape[:2], -1)
    # A feature that is no number counts at its token, and must not stay in the averages for ever.
    input_BTM = features_BTF.nan_to_num(0.0).repeat(1, 1, len(RATES)) * (1 - rate_M)
    if starts_BT is not None:
        decay_BTM = decay_BTM.masked_fill(starts_BT.unsqueeze(-1), 0.0)
    if attended_BT is not None:
        decay_BTM = decay_BTM.masked_fill(~attended_BT.unsqueeze(-1), 1.0)
        input_BTM = input_BTM.masked_fill(~attended_BT.unsqueeze(-1), 0.0)
    turbulence_BTM, _ = linear_scan(decay_BTM.contiguous(), input_BTM, turbulence_BM)
    return Turbulence(_read(weights, torch.cat([features_BTF, turbulence_BTM], -1)), after_BTX, turbulence_BTM)


def reference_turbulence(
    weights: TurbulenceWeights,
    hidden_BTD: Tensor,
    residual_BTD: Tensor,
    embeddings_BTD: Tensor,
    expectation_BX: Tensor,
    turbulence_BM: Tensor,
    attended_BT: Tensor | None = None,
    document_starts_BT: Tensor | None = None,
) -> Turbulence:
    """The same token by token, as the formulas of the module say it."""
    rows = []
    for t in range(hidden_BTD.shape[1]):
        attended_B1 = torch.ones_like(hidden_BTD[:, t, :1], dtype=torch.bool)
        if attended_BT is not None:
            attended_B1 = attended_BT[:, t, None]
        if document_starts_BT is not None:
            begins_B1 = document_starts_BT[:, t, None] & attended_B1
            expectation_BX, turbulence_BM = (
                torch.where(begins_B1, torch.zeros_like(x), x) for x in (expectation_BX, turbulence_BM)
            )
        h_BD, r_BD, e_BD = hidden_BTD[:, t], residual_BTD[:, t], embeddings_BTD[:, t]
        expected_BE, before_BF = (
            expectation_BX[:, : len(weights.expected_ED)],
            expectation_BX[:, len(weights.expected_ED) :],
        )
        match_BE = expected_BE * ((e_BD / _rms(e_BD)) @ weights.seen_ED.T)
        inputs_BY = torch.cat([h_BD, _rms(r_BD).log(), _rms(e_BD).log(), match_BE], -1)
        features_BF = torch.tanh(inputs_BY @ weights.weight_FY.T + before_BF + weights.bias_F)
        parts = [
            rate * m_BF + (1 - rate) * features_BF.nan_to_num(0.0)
            for rate, m_BF in zip(RATES, turbulence_BM.chunk(len(RATES), -1), strict=True)
        ]
        turbulence_BM = torch.where(attended_B1, torch.cat(parts, -1), turbulence_BM)
        expects_BX = torch.cat([h_BD @ weights.expected_ED.T, h_BD @ weights.before_FD.T], -1)
        expectation_BX = torch.where(attended_B1, expects_BX, expectation_BX)
        y_BY = torch.cat([features_BF, *parts], -1)
        layer_BG = torch.tanh(y_BY @ weights.layer_GZ.T + weights.layer_bias_G)
        logits_B2 = torch.cat([y_BY, layer_BG], -1) @ weights.read_2Z.T
        rows.append((logits_B2, expectation_BX, turbulence_BM))
    return Turbulence(*(torch.stack(column, 1) for column in zip(*rows, strict=True)))


def _read(weights: TurbulenceWeights, y_BTY: Tensor) -> Tensor:
    """Return V [y, tanh(L y + c)]."""
    layer_BTG = torch.tanh(y_BTY @ weights.layer_GZ.T + weights.layer_bias_G)
    return torch.cat([y_BTY, layer_BTG], -1) @ weights.read_2Z.T


def _carried(values_BTX: Tensor, before_BX: Tensor, attended_BT: Tensor | None) -> Tensor:
    """Put in place of what padding gave the value of the last attended column, or of the state before the pass."""
    if attended_BT is None:
        return values_BTX
    columns_T = torch.arange(attended_BT.shape[1], device=attended_BT.device)
    last_BT1 = torch.where(attended_BT, columns_T, -1).cummax(1).values.unsqueeze(-1)
    carried_BTX = values_BTX.gather(1, last_BT1.clamp(min=0).expand_as(values_BTX))
    return torch.where(last_BT1 >= 0, carried_BTX, before_BX.unsqueeze(1))


def rates(like_BTF: Tensor) -> Tensor:
    """Return rho for each of the M moving averages of these features."""
    return torch.tensor(RATES, dtype=like_BTF.dtype, device=like_BTF.device).repeat_interleave(like_BTF.shape[-1])


def _rms(vector: Tensor) -> Tensor:
    return (vector.square().mean(-1, keepdim=True) + EPSILON).sqrt()
