"""Which tokens carry the barrier: support tokens, section 7.4.

A token's barrier is ``b_t = -log|det|``. The paper normalises the barriers of a window to weights over its tokens, and does not print how.
The default here keeps the pressure alone, ``w_t = max(b_t, 0) / sum``: a token inside the boundary presses and one with a
determinant above 1 does not. The other reading, ``w_t = softmax(b)_t``, is the option.

Shapes: N windows, T tokens, D width.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.robustness import EmbeddedModel
from keel.hosts import HostShape
from keel.ops.logdet import attention_logdet, visible_past
from keel.streams import MarginPrior

Reading = Literal["pressure", "softmax"]
TOP = 5


def support_weights(barriers_NT: Tensor, reading: Reading = "pressure") -> Tensor:
    """Return weights over the tokens of each window [N, T], summing to one; uniform where no token presses."""
    if reading == "softmax":
        return torch.softmax(barriers_NT.double(), -1)
    pressures_NT = barriers_NT.double().clamp(min=0)
    sums_N1 = pressures_NT.sum(-1, keepdim=True)
    return torch.where(sums_N1 > 0, pressures_NT / sums_N1.clamp(min=1e-300), 1 / barriers_NT.shape[-1])


def top_share(weights_NT: Tensor, count: int = TOP) -> Tensor:
    """Return the weight of the ``count`` heaviest tokens [N], in (0, 1]; more is more concentrated."""
    return weights_NT.topk(min(count, weights_NT.shape[-1]), -1).values.sum(-1)


def effective_size(weights_NT: Tensor) -> Tensor:
    """Return the exponential of the weights' entropy [N], in [1, T]: how many tokens carry the barrier."""
    return torch.special.entr(weights_NT).sum(-1).exp()


def cumulative_share(weights_NT: Tensor) -> Tensor:
    """Return, for k = 1 … T, the mean weight of the k heaviest tokens [T] (Fig. 7.6)."""
    return weights_NT.sort(-1, descending=True).values.cumsum(-1).mean(0)


class SupportTokens(NamedTuple):
    """Metrics by window, and the curves of Fig. 7.6 by prior: ``learned`` and ``random``."""

    metrics: list[ItemMetric]
    curves: dict[str, list[float]]


def support_tokens(
    model: EmbeddedModel, prior: MarginPrior | None, ids_NT: Tensor, *, rank: int, device: str = "cpu"
) -> SupportTokens:
    """Measure how concentrated the barrier is, under a learned prior and a freshly initialised one on the same embeddings.

    Args:
        prior: the model's own, None for a model without one.
        ids_NT: token ids of windows; each window is one item.
        rank: of the fresh prior's coupling where there is none of the model's.
    Returns: ``support.top5_share``, ``support.effective_size``, ``support.crossings`` (share of tokens beyond the boundary) and
        ``support.barrier`` (mean of -log|det|); for the fresh prior with ``@random``; under the other reading with ``@softmax``.
    Raises: KeelError for no windows.
    """
    if not len(ids_NT):
        raise KeelError("support: no windows to look at; give more text or shorter windows")
    embed = model.get_input_embeddings()
    metrics: list[ItemMetric] = []
    curves = {}
    fresh = _fresh_like(prior, embed(ids_NT[:1, :1].to(device)).shape[-1], rank, device)
    for name, each in (("", prior), ("random", fresh)):
        if each is None:
            continue
        parts = [barriers(each, embed(row[None].to(device))) for row in ids_NT]
        barriers_NT = torch.cat([part[0] for part in parts]).cpu()
        signs_NT = torch.cat([part[1] for part in parts]).cpu()
        curves[name or "learned"] = cumulative_share(support_weights(barriers_NT)).tolist()
        for reading in ("pressure", "softmax"):
            weights_NT = support_weights(barriers_NT, reading)
            at = "+".join(part for part in (name, "softmax" if reading == "softmax" else "") if part)
            at = f"@{at}" if at else ""
            shares = [
                mean(f"support.top5_share{at}", top_share(weights_NT).tolist(), unit="share", higher_is_better=None),
                mean(f"support.effective_size{at}", effective_size(weights_NT).tolist(), unit="tokens", higher_is_better=None),
            ]  # fmt: skip
            metrics += shares
        at = f"@{name}" if name else ""
        crossed = (signs_NT < 0).double().mean(1).tolist()
        metrics.append(mean(f"support.crossings{at}", crossed, unit="share of tokens", higher_is_better=None))
        metrics.append(
            mean(f"support.barrier{at}", barriers_NT.double().mean(1).tolist(), unit="nats", higher_is_better=None)
        )
    return SupportTokens(metrics, curves)


@torch.inference_mode()
def barriers(prior: MarginPrior, embeddings_1TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return every token's barrier ``-log|det|`` and the sign of its determinant [1, T], from the embeddings of a whole window."""
    queries_1TR, keys_1TR = prior.project(embeddings_1TD)
    length, width = embeddings_1TD.shape[1:]
    includes = prior.config.include_self
    visible = visible_past(length, length, includes, device=embeddings_1TD.device)
    found = attention_logdet(queries_1TR, keys_1TR, visible, width if includes else None)
    return -found.logabs_BT, found.sign_BT


def _fresh_like(prior: MarginPrior | None, width: int, rank: int, device: str) -> MarginPrior:
    """Return a prior with the initial weights of its kind, from a seed of its own."""
    config = MarginPrior(rank=rank).config if prior is None else prior.config
    fresh = MarginPrior(config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh.build(HostShape(hidden_size=width, num_layers=1))
        fresh.init_weights()
    return fresh.to(device).eval()
