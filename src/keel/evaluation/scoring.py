"""Score tokens from final hidden states in bounded memory: the head runs over a chunk of rows at a time.

Shapes: R rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from keel.evaluation.extrapolation import LanguageModel

HEAD_TOKENS = 512


class TokenScore(NamedTuple):
    """What every target got, on the CPU: -log p in nats [R] float64, and whether it was the likeliest token [R] bool."""

    nll_R: Tensor
    hit_R: Tensor


def score_tokens(model: LanguageModel, hidden_RD: Tensor, targets_R: Tensor) -> TokenScore:
    """Score each target under the hidden state that predicts it; never more than ``HEAD_TOKENS`` rows of logits exist."""
    losses, hits = [], []
    for hidden, targets in zip(hidden_RD.split(HEAD_TOKENS), targets_R.split(HEAD_TOKENS), strict=True):
        logits_RV = model.logits_from_hidden(hidden[None])[0].float()
        losses.append(F.cross_entropy(logits_RV, targets, reduction="none"))
        hits.append(logits_RV.argmax(-1) == targets)
    return TokenScore(torch.cat(losses).double().cpu(), torch.cat(hits).cpu())
