"""Batches of which few tokens have a label and rows differ in length: the head for those tokens alone, rows without their padding.

Shapes: B rows, T tokens, K of all tokens that predict one with a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import modeling_utils

from keel.ops.cross_entropy import IGNORED
from keel.ops.padding import rows_of_length

_PASS_TOKENS = (
    128  # a pass of its own costs a small host as much as so many tokens more, forward and backward, on a processor
)
_TAKES_A_MASK = hasattr(
    modeling_utils, "slice_logits_to_keep"
)  # before it, a host's head took columns, the same of all rows


def head_at_labels(labels_BT: Tensor) -> dict[str, Tensor]:
    """Return what lets a host compute logits where the next token has a label, and there alone: the loss is the same.

    ``logits`` are then [K, V]. Nothing where transformers' hosts cannot do so.
    """
    if not _TAKES_A_MASK:
        return {}
    next_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
    counts_BT = next_BT != IGNORED
    return {"logits_to_keep": counts_BT, "shift_labels": next_BT[counts_BT]}


def by_length(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cut a batch that is padded on the right into parts of rows of about the same length each, without the padding beyond them.

    Args: batch: tensors [B, T] and maps of tensors [B, ...]; without an ``attention_mask`` it is one part.
    Returns: parts whose losses, each divided by the counts of the whole batch, add up to that of the batch.
    """
    if "attention_mask" not in batch:
        return [dict(batch)]
    lengths = batch["attention_mask"].sum(1).tolist()
    groups = rows_of_length(lengths, _PASS_TOKENS)
    return [_rows(batch, rows, max(lengths[row] for row in rows)) for rows in groups]


def _rows(batch: Mapping[str, Any], rows: list[int], longest: int) -> dict[str, Any]:
    return {
        name: value[rows, :longest] if isinstance(value, Tensor) else {key: part[rows] for key, part in value.items()}
        for name, value in batch.items()
    }
