"""One block of the encoder: three streams that meet in the attention's logits and in SwiGLU, or one stream of a baseline.

Shapes: B batch, T tokens, H heads, K channels a head, S semantic size, P position size, D = S + P, F channels of SwiGLU. The streams
of a baseline: P = 0, and None in place of a position tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from keel.encoder.attention import Layout, RelativeBias, fused_attention
from keel.encoder.config import DstgConfig


@dataclass(frozen=True)
class Surroundings:
    """What all blocks of one forward pass share.

    Attributes:
        layout: special tokens and visible pairs.
        regular: [B or 1, 1, T, 1] 1 where a token is not special, else 0; "dstg" only.
        rotation: cos and sin, [B or 1, 1, T, K]; "rope" only.
    """

    layout: Layout
    regular: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None


class StreamNorm(nn.Module):
    """RMSNorm of each stream by itself, so that neither depends on the other's size (§3.1)."""

    def __init__(self, config: DstgConfig) -> None:
        super().__init__()
        self.semantic = nn.RMSNorm(config.semantic_size, eps=config.rms_norm_eps)
        self.position = nn.RMSNorm(config.position_size, eps=config.rms_norm_eps) if config.disentangled else None

    def forward(self, semantic_BTS: Tensor, position_BTP: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return both streams, normed."""
        if self.position is None or position_BTP is None:
            return self.semantic(semantic_BTS), None
        return self.semantic(semantic_BTS), self.position(position_BTP)


class StreamAttention(nn.Module):
    """Queries, keys and values of each stream from that stream alone; one set of weights; an output projection a stream.

    The bias by relative position is each block's own, so that the heads of one can be about words and those of another about places.
    """

    def __init__(self, config: DstgConfig) -> None:
        super().__init__()
        self.heads, semantic, position = config.num_attention_heads, config.semantic_size, config.position_size
        self.semantic_qkv = nn.Linear(semantic, 3 * semantic, bias=False)
        self.semantic_output = nn.Linear(semantic, semantic, bias=False)
        if config.disentangled:
            # Queries and keys as wide a head as the semantic ones, values as wide as their own stream.
            self.position_qkv = nn.Linear(position, 2 * semantic + position, bias=False)
            self.position_output = nn.Linear(position, position, bias=False)
        self.relative_bias = None
        if config.has_relative_bias:
            self.relative_bias = RelativeBias(self.heads, config.relative_buckets, config.relative_max_distance)
        streams = 2 if config.disentangled and config.attention_scale == "streams" else 1
        self.scale = 1 / math.sqrt(streams * config.head_size)

    def project(
        self, semantic_BTS: Tensor, position_BTP: Tensor | None, around: Surroundings
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor] | None]:
        """Return queries, keys and values of each stream, [B, H, T, channels]; those of "dstg" positions 0 at special tokens."""
        query, key, value = (self._by_head(part) for part in self.semantic_qkv(semantic_BTS).chunk(3, dim=-1))
        if around.rotation is not None:
            query, key = _rotate(query, *around.rotation), _rotate(key, *around.rotation)
        if position_BTP is None:
            return (query, key, value), None
        widths = (query.shape[-1] * self.heads,) * 2 + (position_BTP.shape[-1],)
        parts = self.position_qkv(position_BTP).split(widths, dim=-1)
        place_query, place_key, place_value = (self._by_head(part) for part in parts)
        if around.regular is not None:  # a zero query or key gives no absolute-position logit
            regular = around.regular.to(place_query.dtype)
            place_query, place_key = place_query * regular, place_key * regular
        return (query, key, value), (place_query, place_key, place_value)

    def forward(
        self, semantic_BTS: Tensor, position_BTP: Tensor | None, around: Surroundings
    ) -> tuple[Tensor, Tensor | None]:
        """Return what attention adds to each stream.  Reference twin: ``keel.encoder.attention.reference_attention``."""
        semantic, place = self.project(semantic_BTS, position_BTP, around)
        query, key, value = (
            semantic if place is None else (torch.cat(pair, dim=-1) for pair in zip(semantic, place, strict=True))
        )
        out = fused_attention(query, key, value, self.scale, around.layout, *self._bias(around, query.shape[-2]))
        if place is None:
            return self.semantic_output(_flat(out)), None
        split = semantic[2].shape[-1]
        return self.semantic_output(_flat(out[..., :split])), self.position_output(_flat(out[..., split:]))

    def logits(self, semantic_BTS: Tensor, position_BTP: Tensor | None, around: Surroundings) -> dict[str, Tensor]:
        """Return each component's logits, [B or 1, H, T, T]: "semantic", and where the model has them "ap" and "rp".

        Their sum, with invisible pairs taken out, is what the softmax of ``forward`` sees. "rp" of "rope" is inside "semantic".
        """
        semantic, place = self.project(semantic_BTS, position_BTP, around)
        parts = {"semantic": self.scale * semantic[0] @ semantic[1].mT}
        if place is not None:
            parts["ap"] = self.scale * place[0] @ place[1].mT
        if self.relative_bias is not None:
            anywhere = Layout(around.layout.special, None)
            parts["rp"] = anywhere.bias(
                self.relative_bias(semantic_BTS.shape[1]), self.relative_bias.special, slice(None)
            )
        return parts

    def _bias(self, around: Surroundings, length: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the bias by distance [H, T, T] and the scalars of special tokens [H, 3]; one bias where all rows have the same."""
        if self.relative_bias is None:
            return None, None
        distance, scalars = self.relative_bias(length), self.relative_bias.special
        if around.layout.shared:
            return around.layout.bias(distance, scalars, slice(None))[0], None
        return distance, scalars

    def _by_head(self, channels_BTC: Tensor) -> Tensor:
        batch, tokens, _ = channels_BTC.shape
        return channels_BTC.view(batch, tokens, self.heads, -1).transpose(1, 2)


class SwiGLU(nn.Module):
    """The only place where the streams mix: gate and up-projection read both, a down-projection for each (§3.2).

    The down-projections are the rows of one matrix, the semantic stream's first: one matrix product costs less than two.
    """

    def __init__(self, config: DstgConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.semantic_size = config.semantic_size
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, semantic_BTS: Tensor, position_BTP: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what the feed-forward network adds to each stream."""
        together_BTD = semantic_BTS if position_BTP is None else torch.cat((semantic_BTS, position_BTP), dim=-1)
        gate_BTF, up_BTF = self.gate_up(together_BTD).chunk(2, dim=-1)
        more_BTD = self.down(F.silu(gate_BTF) * up_BTF)
        if position_BTP is None:
            return more_BTD, None
        return more_BTD[..., : self.semantic_size], more_BTD[..., self.semantic_size :]


class DstgBlock(GradientCheckpointingLayer):
    """Norm, attention, norm, SwiGLU, each with a residual connection a stream (Fig. 1)."""

    def __init__(self, config: DstgConfig) -> None:
        super().__init__()
        self.keeps_normed = config.residual == "normed"
        self.attention_norm = StreamNorm(config)
        self.attention = StreamAttention(config)
        self.mlp_norm = StreamNorm(config)
        self.mlp = SwiGLU(config)

    def forward(
        self, semantic_BTS: Tensor, position_BTP: Tensor | None, around: Surroundings
    ) -> tuple[Tensor, Tensor | None]:
        """Return both streams after the block."""
        streams = semantic_BTS, position_BTP
        normed = self.attention_norm(*streams)
        streams = _add(*(normed if self.keeps_normed else streams), *self.attention(*normed, around))
        normed = self.mlp_norm(*streams)
        return _add(*(normed if self.keeps_normed else streams), *self.mlp(*normed))


def rotation_of(positions_BT: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of RoPE, [B, 1, T, K], halves rotated against each other as in NeoX."""
    frequency_K = theta ** (-torch.arange(0, head_size, 2, device=positions_BT.device).double() / head_size)
    angle = positions_BT[:, None, :, None].double() * torch.cat((frequency_K, frequency_K))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(channels_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = channels_BHTK.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return channels_BHTK * cos.to(channels_BHTK.dtype) + turned * sin.to(channels_BHTK.dtype)


def _add(
    semantic_BTS: Tensor, position_BTP: Tensor | None, more_BTS: Tensor, more_BTP: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if position_BTP is None or more_BTP is None:
        return semantic_BTS + more_BTS, None
    return semantic_BTS + more_BTS, position_BTP + more_BTP


def _flat(heads_BHTV: Tensor) -> Tensor:
    return heads_BHTV.transpose(1, 2).flatten(2)
