"""Which tokens carry the barrier: support tokens, section 7.4.

A token's barrier is ``b_t = -log|det|``; how barriers become weights is said in ``keel.ops.support``, and both readings are measured.

Shapes: N windows, T tokens, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.robustness import EmbeddedModel
from keel.hosts import HostShape
from keel.ops.support import cumulative_share, effective_size, first_share, pressures, support_weights, top_share
from keel.streams import MarginPrior
from keel.streams.margin import PriorTerms


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
    Returns: ``support.top5_share``, ``support.first5_share`` (of the first five tokens, which hardly have a past),
        ``support.effective_size``, ``support.pressing`` and ``support.crossings`` (shares of tokens with a determinant below 1, and
        beyond the boundary) and ``support.barrier`` (mean); for the fresh prior with ``@random``; under the other reading with
        ``@softmax``.
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
        found = [prior_terms(each, embed(row[None].to(device))).logdets for row in ids_NT]
        barriers_NT = torch.cat([logdets.barrier() for logdets in found]).cpu()
        signs_NT = torch.cat([logdets.sign_BT for logdets in found]).cpu()
        curves[name or "learned"] = cumulative_share(support_weights(barriers_NT)).tolist()
        for reading in ("pressure", "softmax"):
            weights_NT = support_weights(barriers_NT, reading)
            at = "+".join(part for part in (name, "softmax" if reading == "softmax" else "") if part)
            at = f"@{at}" if at else ""
            shares = [
                mean(f"support.top5_share{at}", top_share(weights_NT).tolist(), unit="share", higher_is_better=None),
                mean(f"support.first5_share{at}", first_share(weights_NT).tolist(), unit="share", higher_is_better=None),
                mean(f"support.effective_size{at}", effective_size(weights_NT).tolist(), unit="tokens", higher_is_better=None),
            ]  # fmt: skip
            metrics += shares
        at = f"@{name}" if name else ""
        crossed = (signs_NT < 0).double().mean(1).tolist()
        pressing = (pressures(barriers_NT) > 0).double().mean(1).tolist()
        metrics.append(mean(f"support.pressing{at}", pressing, unit="share of tokens", higher_is_better=None))
        metrics.append(mean(f"support.crossings{at}", crossed, unit="share of tokens", higher_is_better=None))
        metrics.append(
            mean(f"support.barrier{at}", barriers_NT.double().mean(1).tolist(), unit="nats", higher_is_better=None)
        )
    return SupportTokens(metrics, curves)


@torch.inference_mode()
def prior_terms(prior: MarginPrior, embeddings_1TD: Tensor) -> PriorTerms:
    """Return what a prior says of the embeddings of a whole window, token by token [1, T]."""
    return prior.terms(embeddings_1TD)


def _fresh_like(prior: MarginPrior | None, width: int, rank: int, device: str) -> MarginPrior:
    """Return a prior with the initial weights of its kind, from a seed of its own."""
    config = MarginPrior(rank=rank).config if prior is None else prior.config
    fresh = MarginPrior(config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh.build(HostShape(hidden_size=width, num_layers=1))
        fresh.init_weights()
    return fresh.to(device).eval()
