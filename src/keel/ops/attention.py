"""Attention by plain products, where a processor's fused kernel is slower.

In bfloat16 PyTorch's fused attention takes two to four times as long on a processor, forward and backward (2.13), and in float32 up to
twice as long where keys are few (64 heads of 128 tokens, 64 wide: 14.7 ms, by products 8.4; 32 wide: alike); in float32 with more of
them, without gradients, or on a GPU it is the better one and is taken. ``benchmarks/processor.py`` has numbers.

Shapes: B batch, H heads, T queries, S keys, K width of queries and keys, V width of values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST = 2**25  # weights of attention that a call may keep: 64 MiB in bfloat16
_MOST_KEYS = 128  # up to which products are quicker in float32


def attention(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    value_BHSV: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(q kᵀ scale) v, [B, H, T, V], as ``F.scaled_dot_product_attention`` does.

    By products the logits have the precision of what is given, or of autocast. In bfloat16, as transformers' eager attention has
    them, the larger they are the more of their digits are lost (a weight is off by 1 % at a logit of 50, by 0.3 % at 5; with the
    fused kernel by 0.2 %).

    Args:
        mask: bool, True where a query sees a key; it broadcasts to [B, H, T, S]. A query that sees nothing gets zeros.
        is_causal: query t sees keys up to t alone; without ``mask``, and T = S.
        scale: default K^-0.5.
    Reference twin: ``F.scaled_dot_product_attention``.
    """
    if not better_by_products(query_BHTK, key_BHSK, value_BHSV):
        return F.scaled_dot_product_attention(
            query_BHTK, key_BHSK, value_BHSV, attn_mask=mask, is_causal=is_causal, scale=scale
        )
    dtype = _precision(query_BHTK)
    query_BHTK, key_BHSK, value_BHSV = (part.to(dtype) for part in (query_BHTK, key_BHSK, value_BHSV))
    width, length = query_BHTK.shape[-1], query_BHTK.shape[-2]
    logits_BHTS = (query_BHTK * (width**-0.5 if scale is None else scale)) @ key_BHSK.mT
    if is_causal:
        logits_BHTS = logits_BHTS + logits_BHTS.new_full((length, length), -torch.inf).triu_(1)
    elif mask is not None:
        # Added and not filled in: the gradient of a sum needs no pass of its own.
        hidden = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        logits_BHTS = logits_BHTS + hidden.masked_fill_(~mask, torch.finfo(dtype).min)
    weights_BHTS = torch.softmax(logits_BHTS, -1, dtype=dtype)
    if mask is not None and not mask.any(-1).all():  # a row without a key would be even
        weights_BHTS = weights_BHTS.masked_fill(~mask, 0.0)
    return weights_BHTS @ value_BHSV


def better_by_products(query_BHTK: Tensor, key_BHSK: Tensor, value_BHSV: Tensor) -> bool:
    """Return whether ``attention`` multiplies: on a processor, for gradients, in bfloat16 or of few keys, and not too much."""
    if query_BHTK.device.type != "cpu" or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if not any(part.requires_grad for part in (query_BHTK, key_BHSK, value_BHSV)):
        return False
    batch, heads, length, _ = query_BHTK.shape
    keys, dtype = key_BHSK.shape[2], _precision(query_BHTK)
    quicker = dtype == torch.bfloat16 or (dtype == torch.float32 and keys <= _MOST_KEYS)
    return quicker and batch * heads * length * keys <= _MOST


def _precision(query_BHTK: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query_BHTK.dtype
