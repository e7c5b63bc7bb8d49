"""Attention of the encoder: one fused call over the concatenated heads of both streams, biased by relative position.

The logits of two streams add, and so do inner products over concatenated channels: with [q_sem, q_pos] and [k_sem, k_pos] in one
call the fused kernel gives their sum, and with [v_sem, v_pos] both outputs (DSTG-NeoBERT Eq. 2).

Shapes: B batch, G rows of a batch that are worked on together, T tokens, H heads, K channels a head of queries and keys (of both
streams), V of values, N buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from keel.ops.attention import attention

# Elements of logits that are worked on at once. On a processor one row at a time stays in its cache; an accelerator wants more.
_ROWS_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}


def buckets_of(offset: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each offset from query to key, long of the same shape: T5's, bidirectional (DSTG-NeoBERT App. A.1).

    Half of the buckets are for keys after the query. Of each half one half is a distance each, the rest grows logarithmically up
    to ``max_distance``, from where on all distances share the last. Reference twin: ``reference_bucket``.
    """
    half, exact = num_buckets // 2, num_buckets // 4
    distance = offset.abs()
    growth = torch.log(distance.clamp(min=1).double() / exact) / math.log(max_distance / exact)
    coarse = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(distance < exact, distance, coarse) + half * (offset > 0)


def reference_bucket(offset: int, num_buckets: int, max_distance: int) -> int:
    """Return the bucket of one pair, ``offset`` tokens from query to key: the definition that ``buckets_of`` meets."""
    half, exact, distance = num_buckets // 2, num_buckets // 4, abs(offset)
    side = half if offset > 0 else 0
    if distance < exact:
        return side + distance
    growth = math.log(distance / exact) / math.log(max_distance / exact)
    return side + min(half - 1, exact + int(growth * (half - exact)))


@dataclass(frozen=True)
class Layout:
    """Which tokens of a batch are special and which pairs may see each other.

    Attributes:
        special: [B, T] bool, or [1, T] where all rows agree; None where a bias by distance is not used.
        visible: [B, T] bool, the keys that every query may see; or [B, T, T] bool by query; None for all.
    """

    special: Tensor | None
    visible: Tensor | None

    @property
    def shared(self) -> bool:
        """Whether all rows have the same bias."""
        return self.visible is None and (self.special is None or len(self.special) == 1)

    def mask(self) -> Tensor | None:
        """Return ``visible`` as it broadcasts against [B, H, T, T]."""
        if self.visible is None:
            return None
        return self.visible[:, None] if self.visible.dim() == 3 else self.visible[:, None, None]

    def bias(self, distance_HTT: Tensor, special_H3: Tensor, rows: slice) -> Tensor:
        """Return what is added to the logits of some rows, [G, H, T, T] (G = 1 where the rows agree); Eq. 1.

        Args:
            distance_HTT: bias by relative position.
            special_H3: the scalars of special↔special, special→regular and regular→special, in this order.
        """
        bias = distance_HTT[None]
        if self.special is not None:
            special_GT = self.special if len(self.special) == 1 else self.special[rows]
            query, key = special_GT[:, None, :, None], special_GT[:, None, None, :]
            both, from_special, to_special = special_H3[None, :, None, None].unbind(-1)
            bias = torch.where(query, torch.where(key, both, from_special), torch.where(key, to_special, bias))
        mask = self.mask()
        return bias if mask is None else bias.masked_fill(~mask[rows], torch.finfo(bias.dtype).min / 2)


class RelativeBias(nn.Module):
    """T5's learned bias by bucket of distance, and TUPE's three scalars for special tokens."""

    def __init__(self, num_heads: int, num_buckets: int, max_distance: int) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.bucket = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.special = nn.Parameter(torch.empty(num_heads, 3))

    def forward(self, length: int) -> Tensor:
        """Return the bias by distance, [H, T, T]."""
        offsets = torch.arange(1 - length, length, device=self.bucket.device)
        diagonals = self.bucket[buckets_of(offsets, len(self.bucket), self.max_distance)]
        # Row i of the matrix is the stretch of T offsets that begins with -i: stretches in the reverse order.
        return diagonals.mT.unfold(1, length, 1).flip(1)


def fused_attention(
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTV: Tensor,
    scale: float,
    layout: Layout,
    distance_HTT: Tensor | None = None,
    special_H3: Tensor | None = None,
) -> Tensor:
    """Attend with all channels of all streams at once; nothing of the size of all logits is kept for the backward pass.

    Args:
        scale: factor of the inner products.
        layout: special tokens and visible pairs.
        distance_HTT: the bias of all pairs of regular tokens; None for none. Where ``layout.shared``, the complete bias.
        special_H3: the scalars of special tokens; None where ``layout.shared``.
    Returns: [B, H, T, V].  Reference twin: ``reference_attention``.
    """
    if distance_HTT is None:
        return attention(query_BHTK, key_BHTK, value_BHTV, mask=layout.mask(), scale=scale)
    if (
        layout.shared and query_BHTK.device.type == "cuda"
    ):  # its kernel takes the bias' gradient without keeping the logits
        bias = distance_HTT[None].to(query_BHTK.dtype).expand(len(query_BHTK), -1, -1, -1)
        wide = widened(value_BHTV, query_BHTK.shape[-1])
        out = F.scaled_dot_product_attention(query_BHTK, key_BHTK, wide, attn_mask=bias, scale=scale)
        return out[..., : value_BHTV.shape[-1]]
    return _BiasedAttention.apply(query_BHTK, key_BHTK, value_BHTV, distance_HTT, special_H3, layout, scale)


def widened(value_BHTV: Tensor, key_width: int) -> Tensor:
    """Return values with columns of zeros, to be cut off again, up to a width that a fused kernel takes.

    On a processor that is the width of the keys. An accelerator's takes any multiple of eight channels, and those of the keys would nearly
    double the work (128 for 72 at the paper's sizes).
    """
    width = value_BHTV.shape[-1]
    wanted = max(width, key_width) if value_BHTV.device.type == "cpu" else -(-width // 8) * 8
    return value_BHTV if wanted == width else F.pad(value_BHTV, (0, wanted - width))


class _BiasedAttention(torch.autograd.Function):
    """Attention with a learned bias, whose logits are made anew in the backward pass, some rows of the batch at a time.

    PyTorch's fused kernel on a processor gives no gradient to a bias; its plain path would keep [B, H, T, T] in every layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_BHTK: Tensor,
        key_BHTK: Tensor,
        value_BHTV: Tensor,
        distance_HTT: Tensor,
        special_H3: Tensor | None,
        layout: Layout,
        scale: float,
    ) -> Tensor:
        wide_BHTK = widened(value_BHTV, query_BHTK.shape[-1])
        whole = [slice(None)] if layout.shared else _groups(query_BHTK)
        parts = []
        for rows in whole:
            # Detached, since the fused kernel is not chosen for a mask that wants a gradient.
            bias = _bias_of(layout, distance_HTT, special_H3, rows).detach().to(query_BHTK.dtype)
            bias = bias.expand(query_BHTK[rows].shape[0], -1, -1, -1)
            parts.append(
                F.scaled_dot_product_attention(
                    query_BHTK[rows], key_BHTK[rows], wide_BHTK[rows], attn_mask=bias, scale=scale
                )
            )
        out_BHTV = (parts[0] if len(parts) == 1 else torch.cat(parts))[..., : value_BHTV.shape[-1]]
        ctx.save_for_backward(query_BHTK, key_BHTK, value_BHTV, distance_HTT, special_H3, out_BHTV)
        ctx.layout, ctx.scale = layout, scale
        return out_BHTV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BHTV: Tensor) -> Any:
        query, key, value, distance_HTT, special_H3, out = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
        biases = [torch.zeros_like(tensor) for tensor in (distance_HTT, special_H3) if tensor is not None]
        delta_BHT1 = (gradient_BHTV * out).sum(-1, keepdim=True)
        learned = [tensor.detach().requires_grad_() for tensor in (distance_HTT, special_H3) if tensor is not None]
        for rows in _groups(query):
            with torch.enable_grad():
                bias = _bias_of(ctx.layout, learned[0], learned[1] if special_H3 is not None else None, rows)
            chance = _chance(query[rows] * ctx.scale, key[rows], bias.detach())
            gradients[2][rows] = chance.mT @ gradient_BHTV[rows]
            logit = (gradient_BHTV[rows] @ value[rows].mT).sub_(delta_BHT1[rows]).mul_(chance)
            gradients[0][rows] = (logit @ key[rows]).mul_(ctx.scale)
            gradients[1][rows] = (logit.mT @ query[rows]).mul_(ctx.scale)
            toward = logit.sum(0, keepdim=True) if len(bias) < len(logit) else logit
            if special_H3 is None:
                biases[0].add_(toward[0])
                continue
            for total, part in zip(biases, torch.autograd.grad(bias, learned, toward.to(bias.dtype)), strict=True):
                total.add_(part)
        return (*gradients, biases[0], biases[1] if special_H3 is not None else None, None, None)


def _bias_of(layout: Layout, distance_HTT: Tensor, special_H3: Tensor | None, rows: slice) -> Tensor:
    """Return the bias of some rows, [G, H, T, T]; without scalars it is already complete."""
    return distance_HTT[None] if special_H3 is None else layout.bias(distance_HTT, special_H3, rows)


def _chance(query_GHTK: Tensor, key_GHTK: Tensor, bias_GHTT: Tensor) -> Tensor:
    """Return the attention of some rows, [G, H, T, T]; the bias may have one row for all."""
    if query_GHTK.dtype != bias_GHTT.dtype:  # under autocast: the logits are added up in the bias' precision
        logits = (query_GHTK @ key_GHTK.mT).to(bias_GHTT.dtype).add_(bias_GHTT)
        return torch.softmax(logits, dim=-1).to(query_GHTK.dtype)
    bias = bias_GHTT.expand(len(query_GHTK), -1, -1, -1).flatten(0, 1)
    logits = torch.baddbmm(
        bias, query_GHTK.flatten(0, 1), key_GHTK.flatten(0, 1).mT
    )  # the sum costs no pass of its own
    return torch.softmax(logits, dim=-1).view(len(query_GHTK), *bias_GHTT.shape[1:])


def _groups(query_BHTK: Tensor) -> list[slice]:
    batch, heads, tokens, _ = query_BHTK.shape
    rows = max(1, _ROWS_ELEMENTS.get(query_BHTK.device.type, 1 << 25) // (heads * tokens * tokens))
    return [slice(start, min(start + rows, batch)) for start in range(0, batch, rows)]


def reference_attention(
    semantic_qkv: tuple[Tensor, Tensor, Tensor],
    position_qkv: tuple[Tensor, Tensor, Tensor] | None,
    bucket_NH: Tensor | None,
    special_H3: Tensor | None,
    special_BT: Tensor,
    visible_BTT: Tensor,
    scale: float,
    max_distance: int = 128,
) -> tuple[Tensor, Tensor | None]:
    """Sum three logits pair by pair, take the softmax, and read both streams' values: Eq. 1 and 2 as they stand.

    Args:
        semantic_qkv, position_qkv: queries, keys and values of a stream, each [B, H, T, channels]; positions None for a baseline.
        bucket_NH, special_H3: the learned bias, None for none.
        special_BT, visible_BTT: bool.
    Returns: the outputs of the semantic and of the position stream, [B, H, T, V] each.
    """
    query, key, value = semantic_qkv
    batch, heads, tokens, _ = query.shape
    outputs: list[list[Tensor]] = [[], []]
    for b in range(batch):
        for h in range(heads):
            for i in range(tokens):
                row = []
                for j in range(tokens):
                    from_special, to_special = bool(special_BT[b, i]), bool(special_BT[b, j])
                    logit = scale * (query[b, h, i] @ key[b, h, j])
                    if position_qkv is not None and not (from_special or to_special):
                        logit = logit + scale * (position_qkv[0][b, h, i] @ position_qkv[1][b, h, j])
                    if bucket_NH is not None and special_H3 is not None:
                        if from_special or to_special:
                            kind = 0 if from_special and to_special else 1 if from_special else 2
                            logit = logit + special_H3[h, kind]
                        else:
                            logit = logit + bucket_NH[reference_bucket(j - i, len(bucket_NH), max_distance), h]
                    row.append(logit if visible_BTT[b, i, j] else torch.full_like(logit, -torch.inf))
                chance_T = torch.softmax(torch.stack(row), dim=0)
                outputs[0].append(chance_T @ value[b, h])
                if position_qkv is not None:
                    outputs[1].append(chance_T @ position_qkv[2][b, h])
    semantic, position = (torch.stack(rows).view(batch, heads, tokens, -1) if rows else None for rows in outputs)
    assert semantic is not None
    return semantic, position
