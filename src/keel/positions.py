"""Position schemes of a rotary host: RoPE, NoPE, ALiBi, sliding window and YaRN, set and taken back in place.

These are the arms that a side stream has to beat at long context. ALiBi and the window go through transformers'
``AttentionInterface`` and are computed in blocks of queries, so no [T, T] tensor exists at any length: ALiBi holds
[H, 128, S] at most, the window [128, 128 + window]. ``rope``, ``nope`` and ``yarn`` keep the host's own attention; with
"sdpa", no padding and no window of the host's own, transformers makes no mask there either.

Shapes: B batch, T queries, S keys (S ≥ T with a KV cache, the last T keys being the queries' own), H query heads, G
key-value heads, K head size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from keel.errors import KeelError, ShapeError, suggest

SCHEMES = ("rope", "nope", "alibi", "window", "yarn")
QUERY_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Positions:
    """How a host sees the order of its tokens.

    Attributes:
        scheme: "rope" (the host as it is), "nope" (no positions), "alibi" (Press et al. 2022: a linear penalty on
            distance, no rotation), "window" (RoPE, a query sees ``window`` tokens) or "yarn" (Peng et al. 2023).
        window: tokens that a query sees, itself included, ≥ 1; "window" only.
        factor: evaluated length / ``original_length``, ≥ 1; "yarn" only.
        original_length: tokens of the training context, ≥ 1; "yarn" only.

    Raises: KeelError for an unknown scheme, a missing field or one that the scheme does not use.
    """

    scheme: str = "rope"
    window: int | None = None
    factor: float | None = None
    original_length: int | None = None

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise KeelError(f"positions: unknown scheme {self.scheme!r}; {suggest(self.scheme, SCHEMES)}")
        used = {"window": ("window",), "yarn": ("factor", "original_length")}.get(self.scheme, ())
        for name in ("window", "factor", "original_length"):
            value = getattr(self, name)
            if (value is not None) != (name in used):
                problem = f"needs {name!r}" if name in used else f"takes no {name!r}, got {value!r}"
                raise KeelError(f"positions: scheme {self.scheme!r} {problem}")
            if value is not None and not value >= 1:
                raise KeelError(f"positions: {name} must be at least 1, got {value!r}")


@dataclass(frozen=True)
class _Applied:
    """What was set on a backbone, and the attention that it had before."""

    positions: Positions
    attention: str


class _Rotary(nn.Module):
    """Stands in for a host's rotary module; the original stays inside until ``set_positions`` puts it back."""

    def __init__(self, original: nn.Module, scaled: nn.Module | None) -> None:
        super().__init__()
        self.original = original
        self.scaled = scaled

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return cos and sin in the original's shape: those of ``scaled``, or without it 1 and 0 (NoPE)."""
        if self.scaled is not None:
            return self.scaled(*args, **kwargs)
        cos, sin = self.original(*args, **kwargs)
        return torch.ones_like(cos), torch.zeros_like(sin)


def set_positions(host: nn.Module, positions: Positions) -> None:
    """Give a host, in place, another position scheme; ``Positions()`` gives back the original exactly, bit for bit.

    No parameter is touched, so it may be called before or after loading weights, between training and evaluation, and
    again at every evaluated length (YaRN).

    Args:
        host: any module with Hugging Face decoders inside that turn queries and keys by one ``rotary_emb`` module.
        positions: the scheme to set.

    Raises: KeelError when there is no rotary module, or YaRN is asked of a host whose RoPE is already scaled.
    """
    backbones = [module for module in host.modules() if isinstance(getattr(module, "rotary_emb", None), nn.Module)]
    if not backbones:
        raise KeelError(
            f"positions: {type(host).__name__} has no rotary_emb module; schemes can be set on rotary hosts only "
            "(Llama, Mistral, Qwen2, Qwen3, Gemma, Phi-3, OLMo2, GPT-NeoX)"
        )
    for backbone in backbones:
        _restore(backbone)
        _apply(backbone, positions)


def get_positions(host: nn.Module) -> Positions:
    """Return what ``set_positions`` last set on ``host``; ``Positions()`` when it never did."""
    for module in host.modules():
        applied = getattr(module, "keel_positions", None)
        if isinstance(applied, _Applied):
            return applied.positions
    return Positions()


def _restore(backbone: Any) -> None:
    if isinstance(backbone.rotary_emb, _Rotary):
        backbone.rotary_emb = backbone.rotary_emb.original
    applied = getattr(backbone, "keel_positions", None)
    if applied is not None:
        backbone.config._attn_implementation = applied.attention
        del backbone.keel_positions


def _apply(backbone: Any, positions: Positions) -> None:
    if positions.scheme == "rope":
        return
    original = backbone.rotary_emb
    if positions.scheme == "yarn":
        backbone.rotary_emb = _Rotary(original, _yarn(original, backbone.config, positions))
    elif positions.scheme in ("nope", "alibi"):
        backbone.rotary_emb = _Rotary(original, None)
    backbone.keel_positions = _Applied(positions, backbone.config._attn_implementation)
    if positions.scheme in ("alibi", "window"):
        backbone.config._attn_implementation = _register(positions)


def _yarn(original: nn.Module, config: Any, positions: Positions) -> nn.Module:
    """Build the host's own rotary class over a copy of its config that asks for YaRN, with its temperature."""
    config = copy.deepcopy(config)
    rope = config.rope_parameters
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in per_layer_type or [rope]:
        if parameters.get("rope_type", "default") != "default":
            kind = parameters["rope_type"]
            raise KeelError(f"positions: yarn needs a host with plain RoPE, this one has rope_type {kind!r}")
        parameters.update(rope_type="yarn", factor=float(positions.factor or 1))
        parameters["original_max_position_embeddings"] = positions.original_length
    device = next(original.buffers()).device
    with torch.device(device):
        return type(original)(config).to(device)  # type: ignore[call-arg]


def _register(positions: Positions) -> str:
    """Make the scheme known to transformers under a name of its own, and return that name."""
    name = "keel_alibi" if positions.scheme == "alibi" else f"keel_window_{positions.window}"
    AttentionInterface.register(name, partial(_attention, window=positions.window))
    AttentionMaskInterface.register(name, _padding_mask)
    return name


def _padding_mask(
    *, q_length: int, kv_length: int, q_offset: Any, kv_offset: int, attention_mask: Tensor | None, **kwargs: Any
) -> Tensor | None:
    """Hand the 2-D padding mask through as [B, S] bool (True: a token), or None when nothing is padded."""
    compiling = torch.compiler.is_compiling()
    if not compiling and (kwargs.get("use_vmap") or not kwargs.get("allow_is_causal_skip", True)):
        raise KeelError(
            "positions: alibi and window take causal masks with 2-D padding only, not packed documents: give each a row"
        )
    if not isinstance(q_offset, int) or kv_offset + kv_length != q_offset + q_length:
        raise KeelError(
            f"positions: alibi and window need a cache that ends at the last query: {kv_length} keys from {kv_offset}, "
            f"{q_length} queries from {q_offset}; use the dynamic cache (the default), not a static one"
        )
    if attention_mask is None:
        return None
    token_BS = attention_mask[:, kv_offset : kv_offset + kv_length]
    return None if not compiling and bool(token_BS.all()) else token_BS


def _attention(
    module: nn.Module,
    query_BHTK: Tensor,
    key_BGSK: Tensor,
    value_BGSK: Tensor,
    attention_mask: Tensor | None,
    *,
    window: int | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``sdpa`` does, to a window or with ALiBi (``window`` None); returns [B, T, H, K]."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise KeelError(
            "positions: alibi and window do not support attention soft-capping or sinks: take rope, nope or yarn"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        given = tuple(attention_mask.shape)
        raise KeelError(f"positions: alibi and window take a [B, S] padding mask, got shape {given}")
    length, keys = query_BHTK.shape[2], key_BGSK.shape[2]
    slopes_H = None if window is not None else alibi_slopes(query_BHTK.shape[1]).to(query_BHTK.device)
    reach = min(window or keys, sliding_window or keys, keys)
    if slopes_H is None and attention_mask is None and reach == keys and length in (1, keys):
        return sdpa_attention_forward(module, query_BHTK, key_BGSK, value_BGSK, None, dropout=dropout, scaling=scaling)
    groups = query_BHTK.shape[1] // key_BGSK.shape[1]
    key_BHSK, value_BHSK = repeat_kv(key_BGSK, groups), repeat_kv(value_BGSK, groups)
    options: dict[str, Any] = {"token_BS": attention_mask, "scaling": scaling, "dropout": dropout}
    attended_BHTK = blockwise_attention(query_BHTK, key_BHSK, value_BHSK, window=reach, slopes_H=slopes_H, **options)
    return attended_BHTK.transpose(1, 2).contiguous(), None


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slope of each head, [H] float32, per token of distance (Press et al. 2022, section 3).

    For H a power of two: 2^(-8/H), 2^(-16/H), …; otherwise, as in their code, those of the power of two below H, then
    every other one of the power above.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (index + 1) / power) for index in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * index + 1) / power) for index in range(heads - power)]
    return torch.tensor(slopes)


def blockwise_attention(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    *,
    window: int,
    slopes_H: Tensor | None = None,
    token_BS: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention of the last T of S positions to their last ``window`` keys, ``QUERY_BLOCK`` queries at a time.

    Args:
        query_BHTK, key_BHSK, value_BHSK: float, same dtype, S ≥ T.
        window: keys that a query sees, itself included, ≥ 1; S or more is all.
        slopes_H: float32; adds ``-slope * distance`` in tokens to the scores (ALiBi). None: nothing.
        token_BS: bool, False where a key is padding. A query always sees itself, so padded queries give finite values.
        scaling: of the scores; default K^-0.5.
        dropout: probability in [0, 1) of dropping an attention weight.

    Returns: [B, H, T, K], dtype of the query. Time goes as T * window; memory beyond that of the result is one bias of
        QUERY_BLOCK * (QUERY_BLOCK + window) values, H times that with slopes, B times with padding.
    Raises: ShapeError when S < T.  Reference twins: ``reference_alibi_attention``, ``reference_window_attention``.
    """
    length, keys = query_BHTK.shape[2], key_BHSK.shape[2]
    if keys < length:
        raise ShapeError(f"blockwise_attention: {length} queries but {keys} keys; the last keys are the queries' own")
    past = keys - length
    block = min(QUERY_BLOCK, length)
    bias_hQS = _bias(block, min(keys, block + window - 1), window, slopes_H, query_BHTK)
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first, last = max(0, past + start - window + 1), past + stop
        # The bias depends on distance alone and ends at a block's last query: a shorter block takes its lower rows.
        mask_BhQS = bias_hQS[None, :, block - (stop - start) :, bias_hQS.shape[-1] - (last - first) :]
        if mask_BhQS.is_cuda:
            mask_BhQS = mask_BhQS.contiguous()  # its kernels refuse a bias whose first element is not aligned
        if token_BS is not None:
            mask_BhQS = _with_padding(mask_BhQS, token_BS[:, first:last])
        visible = (query_BHTK[:, :, start:stop], key_BHSK[:, :, first:last], value_BHSK[:, :, first:last])
        attended_BHQK = F.scaled_dot_product_attention(*visible, attn_mask=mask_BhQS, dropout_p=dropout, scale=scaling)
        outputs.append(attended_BHQK.transpose(1, 2))
    return torch.cat(outputs, dim=1).transpose(1, 2)  # laid out as [B, T, H, K], which the host wants next


def _bias(queries: int, keys: int, window: int, slopes_H: Tensor | None, like: Tensor) -> Tensor:
    """Return what the scores of the last ``queries`` of ``keys`` positions get added: [H or 1, Q, S], -inf: unseen."""
    position_S = torch.arange(keys, device=like.device)
    distance_QS = position_S[keys - queries :, None] - position_S
    slopes_h11 = torch.zeros(1, 1, 1, device=like.device) if slopes_H is None else slopes_H[:, None, None]
    bias_hQS = (-slopes_h11 * distance_QS).to(like.dtype)
    return bias_hQS.masked_fill_((distance_QS < 0) | (distance_QS >= window), float("-inf"))


def _with_padding(mask_BhQS: Tensor, token_BS: Tensor) -> Tensor:
    """Hide padded keys, but never a query's own: a row without a visible key would be NaN."""
    queries, keys = mask_BhQS.shape[-2:]
    own_QS = torch.eye(keys, dtype=torch.bool, device=mask_BhQS.device)[keys - queries :]
    return mask_BhQS.masked_fill(~(token_BS[:, None, None, :] | own_QS), float("-inf"))


def reference_alibi_attention(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    token_BS: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """ALiBi as written, dense: softmax(q k^T * scaling - slope * distance) v (Press et al. 2022, section 3)."""
    slopes_H = alibi_slopes(query_BHTK.shape[1])
    return _dense(query_BHTK, key_BHSK, value_BHSK, key_BHSK.shape[2], slopes_H, token_BS, scaling)


def reference_window_attention(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    window: int,
    token_BS: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """Sliding-window attention as written: softmax over the last ``window`` keys up to the query's own, dense."""
    return _dense(query_BHTK, key_BHSK, value_BHSK, window, torch.zeros(query_BHTK.shape[1]), token_BS, scaling)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    slopes_H: Tensor,
    token_BS: Tensor | None,
    scaling: float | None,
) -> Tensor:
    length, keys, size = query.shape[2], key.shape[2], query.shape[3]
    scores_BHTS = query @ key.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
    for row in range(length):
        for column in range(keys):
            distance = keys - length + row - column
            scores_BHTS[:, :, row, column] -= slopes_H * distance
            if distance < 0 or distance >= window:
                scores_BHTS[:, :, row, column] = float("-inf")
            elif token_BS is not None and distance > 0:
                scores_BHTS[:, :, row, column].masked_fill_(~token_BS[:, column, None], float("-inf"))
    return scores_BHTS.softmax(-1) @ value
