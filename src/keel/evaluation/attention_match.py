"""Did the attention learn a transition matrix? S-Former, App. A.1: mean l1 distance between the attention of every query and P*.

Shapes: V states, T = V + 1 tokens, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keel.data import TaskData
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.scoring import evaluating
from keel.model import KeelForCausalLM


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMatch:
    """``estimate_VV``: what each query attends to, its own position left out; ``target_VV``: P*."""

    estimate_VV: Tensor
    target_VV: Tensor

    def metrics(self) -> list[ItemMetric]:
        """Return ``markov.l1``, an item a query: the sum over states of the absolute difference, 0 to 2."""
        distances_V = (self.estimate_VV - self.target_VV).abs().sum(-1)
        return [mean("markov.l1", distances_V.tolist(), unit="l1 distance", higher_is_better=False)]


def attention_match(model: KeelForCausalLM, data: TaskData) -> AttentionMatch:
    """Read the attention of the last layer, the mean over heads, at the last token of every query of the task."""
    rows = data.train()
    ids_VT = torch.stack([rows[index]["input_ids"] for index in range(len(rows))])
    device = next(model.parameters()).device
    model.set_attn_implementation("eager")
    with evaluating(model):
        attention_VHTT = model(ids_VT.to(device), output_attentions=True, use_cache=False).attentions[-1]
    return AttentionMatch(
        estimate_VV=attention_VHTT[:, :, -1, :-1].float().mean(1).cpu(), target_VV=data.language.transitions()
    )
