"""Losses that the model does not compute itself.

Shapes: B batch, T tokens, V vocabulary, H heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def smoothing_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Return what label smoothing adds to the summed cross-entropy, per unit of smoothing.

    With a share e of every target spread over V entries the loss of a token is (1 - e)·(lse - z_y) + e·(lse - mean
    z), which is its cross-entropy plus e·(z_y - mean z). ``labels_BT`` are those of the inputs, as the model takes
    them: position t predicts t + 1.

    Returns: a scalar, float32; labels of -100 count nothing.
    Reference twin: ``torch.nn.functional.cross_entropy(label_smoothing=...)``.
    """
    targets_BT = labels_BT[:, 1:]
    logits_BTV = logits_BTV[:, :-1].float()
    chosen_BT = logits_BTV.gather(-1, targets_BT.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((chosen_BT - logits_BTV.mean(-1)) * targets_BT.ne(-100)).sum()


def last_attention(outputs: Any) -> Tensor:
    """Return the attention of the last layer at the last token, the mean over heads, [B, T] float32 (S-Former, App. A.1)."""
    attention_BHTT: Tensor = outputs.attentions[-1]
    return attention_BHTT[:, :, -1].float().mean(1)
