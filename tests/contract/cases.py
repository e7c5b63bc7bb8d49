"""The two tables that the contract suite crosses, hosts and streams, and what its tests share.

A new stream joins by one line in ``STREAM_CASES``: every behaviour in this folder is then asked of it on every host.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

import keel
from keel.streams.base import Stream
from keel.trees import collate, prefix_chunks
from keel.trees.align import Nodes
from keel.trees.chunks import Chunks
from keel.trees.lookup import LOOKUPS, open_lookup

VOCABULARY = 96
WINDOW = 8
# Far larger weights than a fresh model's, so that attention is not flat and logits are far from ties.
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, initializer_range=0.15, pad_token_id=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
_GROUPED: dict[str, Any] = dict(_COMMON, num_key_value_heads=2)
_GEMMA: dict[str, Any] = dict(
    _GROUPED, head_dim=8, query_pre_attn_scalar=8,
    sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip

HOST_CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GROUPED),
    "qwen2": lambda: Qwen2Config(**_GROUPED),
    "qwen3": lambda: Qwen3Config(**_GROUPED, head_dim=8),
    "mistral": lambda: MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(**_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA),
    "gpt_neox_parallel": lambda: GPTNeoXConfig(**_COMMON, use_parallel_residual=True),
    "gpt_neox_serial": lambda: GPTNeoXConfig(**_COMMON, use_parallel_residual=False),
    "gpt2": lambda: GPT2Config(**_COMMON, n_inner=48, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "phi3": lambda: Phi3Config(**_GROUPED),
    "olmo2": lambda: Olmo2Config(**_GROUPED),
}


@dataclass(frozen=True)
class StreamCase:
    """A stream of the suite.

    ``everywhere``: the costly behaviours run with it on every host, not on the first alone; for one or two a mechanism.
    ``identity``: attaching it changes nothing. ``losses``: the names of its auxiliary losses. ``reads_host``: it reads the host's
    hidden states and not the embeddings alone. ``recurrent``: it has a state that a packed document resets. ``inputs``: what a
    compiled forward needs beside the ids, where the stream would look it up otherwise.
    """

    make: Callable[[], Stream]
    everywhere: bool = False
    identity: bool = True
    losses: tuple[str, ...] = ()
    reads_host: bool = False
    recurrent: bool = True
    inputs: Callable[[Tensor], dict[str, Any]] = lambda ids: {}


def _structural(**fields: Any) -> Callable[[], Stream]:
    return lambda: keel.StructuralStream(**fields)


@functools.cache
def _toy_chunks(ids: tuple[int, ...]) -> Chunks:
    """A parser that changes its mind at every token, and about everything, by all tokens that it has read and no other."""

    def grow(rng: random.Random, left: int, right: int, depth: int) -> list[tuple[int, int, int]]:
        nodes = [(left, right, depth)]
        if left < right:
            cut = rng.randrange(left, right)
            nodes += grow(rng, left, cut, depth + 1) + grow(rng, cut + 1, right, depth + 1)
        return nodes

    def nodes_at(t: int) -> list[Nodes]:
        return [Nodes(*np.array(grow(random.Random(str(ids[: t + 1])), 0, t, 0)).T)]

    return prefix_chunks(len(ids), nodes_at)


LOOKUPS["toy"] = lambda rest, scope: lambda ids: _toy_chunks(tuple(ids))


def _tree(lookup: str, **fields: Any) -> StreamCase:
    def found(ids: Tensor) -> dict[str, Any]:
        return {
            "trees": collate([open_lookup(lookup, "prefix")(row) for row in ids.tolist()], _COMMON["num_hidden_layers"])
        }

    # Lambda is large: what chunks add is a mean over a few tokens, small beside what random attention gives.
    make = lambda: keel.TreeStream(tree_scope="prefix", lookup=lookup, coefficient=2.0, **fields)  # noqa: E731
    return StreamCase(make, everywhere=not fields, recurrent=False, inputs=found)


def _guarded(**fields: Any) -> StreamCase:
    # Thresholds that random weights cross now and then: rows go into safe mode and come back within the few tokens of a test.
    safeguards = {
        "coherence_least": 0.15, "noise_most": 100.0, "alignment_least": 0.01, "patience": 3, "cooldown": 1,
        "change_most": 3.0, "instability_most": 0.93,
    }  # fmt: skip
    return StreamCase(
        lambda: keel.DynamicStateStream(
            state_size=8, retention=0.3, noise_floor=0.015, safeguards=safeguards, **fields
        ),
        reads_host=True,
    )


_CONFIDENCE = ("structural.confidence",)
STREAM_CASES: dict[str, StreamCase] = {
    "gru_model": StreamCase(_structural(cell="gru", confidence_penalty=0.3), everywhere=True, losses=_CONFIDENCE),
    "gru_layer": StreamCase(_structural(cell="gru", share="layer", gate="channel", temperature=(4.0, 2.0, 10))),
    "scan_model": StreamCase(_structural(cell="scan", gate="channel", confidence_penalty=0.3), losses=_CONFIDENCE),
    "scan_layer": StreamCase(_structural(cell="scan", share="layer", gate_warmup_steps=4)),
    "diagonal_layer": StreamCase(_structural(cell="diagonal", share="layer", gate_warmup_steps=4), everywhere=True),
    "gru_paper": StreamCase(_structural(cell="gru", init="paper"), identity=False),
    "fusion_model": StreamCase(
        _structural(inject="fusion", confidence_penalty=0.3), everywhere=True, losses=_CONFIDENCE
    ),
    "fusion_layer": StreamCase(
        _structural(inject="fusion", cell="scan", share="layer", gate="channel", init="paper"), identity=False
    ),
    "no_gate": StreamCase(_structural(gate="none")),
    # It takes much up and keeps it, so that a few tokens suffice to see it, also where the last ones have no alignment.
    "dynamic_state": StreamCase(
        lambda: keel.DynamicStateStream(state_size=8, retention=0.6, noise_floor=0.002),
        everywhere=True,
        reads_host=True,
    ),
    "dynamic_state_guarded": _guarded(),
    "dynamic_state_turbulent": _guarded(turbulence=8),
    "tree_prefix": _tree("toy:"),
    "tree_fixed_width": _tree("fixed:2", gate="none", warmup_steps=4),
    "learned_positions": StreamCase(lambda: keel.LearnedPositionsStream(max_positions=64, std=0.0)),
}

# Streams that write nothing: they leave the host as it is, and are asked for losses and signals instead (test_readers.py).
READER_CASES: dict[str, Callable[[], Stream]] = {
    "margin": lambda: keel.MarginPrior(rank=4, weight=0.5),
    "margin_self": lambda: keel.MarginPrior(rank=None, include_self=True, noise=1.0, weight=0.5),
    "margin_positive": lambda: keel.MarginPrior(rank=5, coupling="positive", weight=0.5),
}


class Case(NamedTuple):
    """One host with one stream."""

    host_name: str
    stream_name: str

    def host(self) -> PreTrainedModel:
        """A fresh copy of the host, the same weights every time, in evaluation mode."""
        return copy.deepcopy(_host(self.host_name))

    @property
    def stream(self) -> StreamCase:
        """The row of ``STREAM_CASES``."""
        return STREAM_CASES[self.stream_name]

    def attached(self) -> keel.KeelForCausalLM:
        """Host and stream as ``attach`` leaves them."""
        host = self.host()  # before the seed: the first call makes the host and so moves the random state
        torch.manual_seed(1)
        return keel.attach(host, self.stream.make())

    def model(self) -> keel.KeelForCausalLM:
        """Host and perturbed stream, after some training steps; the stream is seen to change the output."""
        model = perturb(self.attached())
        check_visible(model)
        return model


@functools.cache
def _host(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(HOST_CASES[name]()).eval()


def perturb(model: keel.KeelForCausalLM, seed: int = 2) -> keel.KeelForCausalLM:
    """Move every stream parameter away from its initial value and the schedules into their third step, in place."""
    model.set_step(3)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.streams.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.4)
    return model


def check_visible(model: keel.KeelForCausalLM) -> None:
    """Fail unless the streams change the output, so that no comparison that follows can pass with dead streams."""
    ids = tokens(1, 6)
    with torch.no_grad():
        with_streams = model(ids).logits
        with model.disable_streams():
            without = model(ids).logits
    assert (with_streams - without).abs().max() > 1e-2, "the perturbed stream changes nothing: this test could not fail"


# every_case: the whole table. spread_cases: every host with the streams marked `everywhere`, every stream on the first
# host. thin_cases: every host with the first stream, every stream on the first host; host_cases and stream_cases: its halves.
ALL_CASES = [Case(host, stream) for host in HOST_CASES for stream in STREAM_CASES]
FIRST_HOST, FIRST_STREAM = next(iter(HOST_CASES)), next(iter(STREAM_CASES))
SPREAD_CASES = [case for case in ALL_CASES if case.host_name == FIRST_HOST or case.stream.everywhere]


def _named(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=["-".join(case) for case in cases])


every_case = _named(ALL_CASES)
recurrent_cases = _named([case for case in ALL_CASES if case.stream.recurrent])
spread_cases = _named(SPREAD_CASES)
stream_cases = _named([case for case in ALL_CASES if case.host_name == FIRST_HOST])
host_cases = _named([case for case in ALL_CASES if case.stream_name == FIRST_STREAM])
thin_cases = _named([case for case in ALL_CASES if case.host_name == FIRST_HOST or case.stream_name == FIRST_STREAM])


def tokens(batch: int, length: int, seed: int = 3) -> Tensor:
    """Random token ids [B, T] without the padding token 0."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


class Padded(NamedTuple):
    """Rows of different lengths in one batch, with the positions that ``generate`` would give."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor


def pad(rows: Sequence[Tensor], side: str, width: int | None = None) -> Padded:
    """Put 1-D ``rows`` into one batch with the padding on the ``side``: left, right or interior (amid the row)."""
    width = width or max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        columns = torch.arange(len(row))
        if side == "left":
            columns += width - len(row)
        elif side == "interior":
            columns[len(row) // 2 :] += width - len(row)
        ids[index, columns], mask[index, columns] = row, 1
    return Padded(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0))


def close(actual: Tensor, expected: Tensor, atol: float = 2e-5) -> None:
    """Equal up to float32 rounding: another shape makes another order of summation in the matrix products."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=atol)
