"""How concentrated barriers are over tokens: support tokens, section 7.4.

The paper normalises the barriers of a window to weights over its tokens, and does not print how. The default here keeps the pressure
alone, ``w_t = max(b_t, 0) / sum``: a token near the boundary presses, and one with a determinant above 1 does not. The other reading,
``w_t = softmax(b)_t``, is the option.

A pressure within the rounding of a float32 log-determinant is none: where a prior has learned to push every determinant above 1, what
is left is rounding, and its weights would look as concentrated as support tokens do.

Shapes: N windows, B batch, T tokens that are asked for, S tokens so far (the last T of them are asked for).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keel.ops.logdet import WORKSPACE

Reading = Literal["pressure", "softmax"]
TOP = 5
ROUNDING = 1e-4  # nats: to which float32 log-determinants are exact (keel.ops.logdet)


def pressures(barriers: Tensor) -> Tensor:
    """Return how much each token presses, in float64: its barrier where that is above 0 and above ``ROUNDING``, else 0."""
    return barriers.double() * (barriers > ROUNDING)


def support_weights(barriers_NT: Tensor, reading: Reading = "pressure") -> Tensor:
    """Return weights over the tokens of each window [N, T], summing to one; uniform where no token presses."""
    if reading == "softmax":
        return torch.softmax(barriers_NT.double(), -1)
    pressures_NT = pressures(barriers_NT)
    sums_N1 = pressures_NT.sum(-1, keepdim=True)
    return torch.where(sums_N1 > 0, pressures_NT / sums_N1.clamp(min=1e-300), 1 / barriers_NT.shape[-1])


def top_share(weights_NT: Tensor, count: int = TOP) -> Tensor:
    """Return the weight of the ``count`` heaviest tokens [N], in (0, 1]; more is more concentrated."""
    return weights_NT.topk(min(count, weights_NT.shape[-1]), -1).values.sum(-1)


def first_share(weights_NT: Tensor, count: int = TOP) -> Tensor:
    """Return the weight of the first ``count`` tokens [N]: near ``top_share`` where the heaviest are those without much of a past."""
    return weights_NT[:, :count].sum(-1)


def effective_size(weights_NT: Tensor) -> Tensor:
    """Return the exponential of the weights' entropy [N], in [1, T]: how many tokens carry the barrier."""
    return torch.special.entr(weights_NT).sum(-1).exp()


def cumulative_share(weights_NT: Tensor) -> Tensor:
    """Return, for k = 1 … T, the mean weight of the k heaviest tokens [T] (Fig. 7.6)."""
    return weights_NT.sort(-1, descending=True).values.cumsum(-1).mean(0)


class RunningSupport(NamedTuple):
    """For each token, over the tokens of its row up to itself, by pressure; all [B, T].

    Attributes:
        weight_BT: the token's own weight, in [0, 1].
        top_share_BT: weight of the ``TOP`` heaviest tokens, in (0, 1].
        effective_size_BT: in [1, S].
    """

    weight_BT: Tensor
    top_share_BT: Tensor
    effective_size_BT: Tensor


def running_support(barriers_BS: Tensor, counted_BTS: Tensor) -> RunningSupport:
    """Return what ``support_weights``, ``top_share`` and ``effective_size`` say of the tokens so far, at each of the last T tokens.

    Args:
        barriers_BS: barriers of all tokens so far.
        counted_BTS: which tokens count at each token [1 or B, T, S]: itself and earlier ones of its document, no padding
            (``keel.ops.logdet.visible_past`` with ``include_self``). A token at which nothing counts has zeros.
    """
    batch, num_tokens = barriers_BS.shape
    pressures_BS = pressures(barriers_BS)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for counted in counted_BTS.expand(batch, -1, -1).split(max(1, WORKSPACE // (batch * num_tokens)), 1):
        pressed = pressures_BS.unsqueeze(1) * counted
        sums = pressed.sum(-1, keepdim=True)
        # Uniform over what counts where no token presses, as for whole windows.
        weights = torch.where(
            sums > 0, pressed / sums.clamp(min=1e-300), counted / counted.sum(-1, keepdim=True).clamp(min=1)
        )
        first = num_tokens - counted_BTS.shape[1] + sum(part[0].shape[1] for part in parts)
        own = weights.diagonal(first, 1, 2)
        something = counted.any(-1)
        parts.append((own, top_share(weights), effective_size(weights) * something))
    return RunningSupport(*(torch.cat(values, 1).to(barriers_BS.dtype) for values in zip(*parts, strict=True)))
