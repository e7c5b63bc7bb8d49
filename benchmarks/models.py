"""The models that the benchmarks measure, each at random weights.

``small`` is the size of the project's targets on 2 cores, ``large`` that on a GPU, ``deep`` the model of support tokens, ``toy`` only
shows that a benchmark runs.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import keel
from keel.training import load_recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Size(NamedTuple):
    """A Llama's sizes, and the batch of a training step."""

    width: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    length: int
    batch: int

    def __str__(self) -> str:
        return (
            f"d = {self.width}, {self.layers} layers, {self.heads} heads, feed-forward {self.inner}, "
            f"vocabulary {self.vocabulary:,}"
        )


SIZES = {
    "toy": Size(width=32, layers=2, heads=2, inner=64, vocabulary=64, length=16, batch=2),
    "small": Size(width=256, layers=4, heads=8, inner=688, vocabulary=8192, length=256, batch=16),
    "deep": Size(width=384, layers=12, heads=6, inner=1024, vocabulary=16_384, length=512, batch=4),
    "large": Size(width=1024, layers=24, heads=16, inner=2752, vocabulary=32_768, length=4096, batch=8),
}


def bare_host(size: Size, positions: int = 2048) -> LlamaForCausalLM:
    """Return a Llama on the processor, in float32."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=positions,
    )
    return LlamaForCausalLM(config)


def with_stream(host: LlamaForCausalLM, cell: str, copied: bool = True, shared: bool = False) -> keel.KeelForCausalLM:
    """Return the host, or a copy of it, with a structural stream whose write has an effect, as after some training.

    A copy with ``shared`` weights has the host's own tensors: where in memory weights lie makes a difference of some percent.
    """
    weights = {id(parameter): parameter for parameter in host.parameters()} if shared else {}
    model = keel.attach(copy.deepcopy(host, weights) if copied else host, keel.StructuralStream(cell=cell))
    for name, parameter in model.streams.named_parameters():
        if name.endswith("scale"):
            nn.init.normal_(parameter, std=0.1)
    return model


def with_dynamic_state(host: LlamaForCausalLM, shared: bool = False) -> keel.KeelForCausalLM:
    """Return a copy of the host, as ``with_stream`` does, beside the dynamic state path of DTA's recipe, which writes, under safeguards."""
    weights = {id(parameter): parameter for parameter in host.parameters()} if shared else {}
    path = keel.DynamicStateStream(**dynamic_state_fields(), safeguards={})
    model = keel.attach(copy.deepcopy(host, weights), path)
    nn.init.normal_(model.streams["dynamic_state"].gate, std=0.1)
    return model


def dynamic_state_fields() -> dict[str, Any]:
    """Return the fields of the path that ``recipes/dta/signals.yaml`` trains."""
    return load_recipe("dta/signals", "small").arms["path"].streams["dynamic_state"]


def x_transformer(size: Size) -> nn.Module:
    """Return the same architecture from x-transformers: rotary positions, RMSNorm, SwiGLU without biases, untied head."""
    from x_transformers import Decoder, TransformerWrapper

    decoder = Decoder(
        dim=size.width,
        depth=size.layers,
        heads=size.heads,
        attn_dim_head=size.width // size.heads,
        rotary_pos_emb=True,
        rotary_emb_dim=size.width // size.heads,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_mult=size.inner / size.width,
        ff_no_bias=True,
        attn_flash=True,
    )
    return TransformerWrapper(
        num_tokens=size.vocabulary, max_seq_len=size.length, attn_layers=decoder, use_abs_pos_emb=False
    )


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def step_flops(model: nn.Module, size: Size, embeddings: Any) -> float:
    """Return the floating-point operations of a training step: 6 a token and matrix weight, and causal attention's products.

    The usual count of a model's work (Chowdhery et al. 2022, App. B), with half of the attention matrix; the token table is
    looked up and not multiplied.
    """
    weights = num_parameters(model) - embeddings.weight.numel()
    attention = 6 * size.layers * size.length * size.width
    return size.batch * size.length * (6 * weights + attention)
