"""Score tokens from final hidden states in bounded memory: the head runs over a chunk of rows at a time.

Shapes: B batch, T tokens, R rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_TOKENS = 512


class LanguageModel(Protocol):
    """What is evaluated: ``KeelForCausalLM``, or anything that gives its final hidden states and its head apart."""

    training: bool

    def train(self, mode: bool = True) -> Any:
        """Switch between training and evaluation."""

    def final_hidden(self, input_ids: Tensor) -> Any:
        """Return an object whose ``last_hidden_state`` is [B, T, D], from ids [B, T]."""

    def logits_from_hidden(self, hidden_BTD: Tensor) -> Tensor:
        """Return logits [B, T, V]."""


class TokenScore(NamedTuple):
    """What every target got, on the CPU: -log p in nats [R] float64, and whether it was the likeliest token [R] bool."""

    nll_R: Tensor
    hit_R: Tensor


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluate inside: without dropout and without gradients; the model's mode is put back afterwards."""
    was_training = model.training
    model.train(False)
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def score_tokens(
    model: LanguageModel, hidden_RD: Tensor, targets_R: Tensor, head_tokens: int = HEAD_TOKENS
) -> TokenScore:
    """Score each target under the hidden state that predicts it; the loss itself is computed in float32.

    Args:
        head_tokens: most rows of logits that exist at a time.
    """
    # One buffer each: a small tensor kept from every chunk would stand between the large ones that come and go, and the heap
    # would grow by nearly a chunk of logits each time.
    nll_R = torch.empty(targets_R.shape, device=hidden_RD.device)
    hit_R = torch.empty(targets_R.shape, device=hidden_RD.device, dtype=torch.bool)
    chunks = (tensor.split(head_tokens) for tensor in (hidden_RD, targets_R, nll_R, hit_R))
    for hidden, targets, nll, hit in zip(*chunks, strict=True):
        logits_RV = model.logits_from_hidden(hidden[None])[0].float()
        nll.copy_(F.cross_entropy(logits_RV, targets, reduction="none"))
        hit.copy_(logits_RV.argmax(-1) == targets)
    return TokenScore(nll_R.double().cpu(), hit_R.cpu())
