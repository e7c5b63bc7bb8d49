"""Training a host on a processor: its loss and its attention, computed as is quickest there.

Nothing of a model is changed for good: what is set here is taken back, and a checkpoint knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from keel.ops.attention import attention, better_by_products
from keel.ops.cross_entropy import IGNORED, cross_entropy_sum

_NAME = "keel_processor"


def native_precision(place: torch.device) -> str:
    """Return ``bf16`` where a GPU or a processor multiplies bfloat16 itself, else ``fp32``: emulated, bf16 takes several times as long."""
    if place.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    able = torch.cpu.get_capabilities()
    return "bf16" if able.get("avx512_bf16") or able.get("amx_bf16") else "fp32"


@contextmanager
def quick_on_processor(model: nn.Module) -> Iterator[None]:
    """While the body runs, hosts inside ``model`` take Keel's cross-entropy and, for ``sdpa``, its attention by products.

    Both equal what they stand for to rounding, on any device; off a processor they are what they stand for.
    """
    hosts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    # To set the attention of a config that holds others (Keel's holds the host's) would set theirs too, whatever they have.
    leaves = [host.config for host in hosts if not host.config.sub_configs]
    configs = {id(config): config for config in leaves if config._attn_implementation == "sdpa"}
    losing = [host for host in hosts if host.loss_type in (None, "ForCausalLM") and not hasattr(host, "_loss_function")]
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    for config in configs.values():
        config._attn_implementation = _NAME
    for host in losing:
        host.loss_function = causal_loss
    try:
        yield
    finally:
        for config in configs.values():
            config._attn_implementation = "sdpa"
        for host in losing:
            del host._loss_function


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return what transformers' ``ForCausalLMLoss`` does: the mean over targets, or their sum by ``num_items_in_batch``."""
    assert ignore_index == IGNORED
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    flat = shift_labels.reshape(-1).to(logits.device)
    count = (flat != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return cross_entropy_sum(logits.view(-1, vocab_size), flat, divisor=count)


def _attention(
    module: Any,
    query_BHTK: Tensor,
    key_BGSK: Tensor,
    value_BGSK: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as ``sdpa`` does."""
    length, keys = query_BHTK.shape[2], key_BGSK.shape[2]
    causal = attention_mask is None and (module.is_causal if is_causal is None else is_causal)
    whole = length == keys if attention_mask is None else attention_mask.dtype == torch.bool
    plain = not dropout and not any(
        kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias", "cache")
    )
    if not (plain and whole and better_by_products(query_BHTK, key_BGSK, value_BGSK)):
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_BHTK, key_BGSK, value_BGSK, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return attended
    groups = query_BHTK.shape[1] // key_BGSK.shape[1]
    key_BHSK, value_BHSK = repeat_kv(key_BGSK, groups), repeat_kv(value_BGSK, groups)
    found = attention(query_BHTK, key_BHSK, value_BHSK, mask=attention_mask, is_causal=causal, scale=scaling)
    return found.transpose(1, 2).contiguous(), None
