"""What the tests of the dynamic state path share: a stream with moved parameters, one pass of it, its inputs.

Shapes: B batch, T tokens, D hidden size, K state size, R features of telemetry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keel.hosts import HostShape
from keel.streams.base import PassInputs, PassResult
from keel.streams.dynamic_state import DynamicStateStream
from keel.streams.dynamic_state.telemetry import FEATURES

WIDTH, SIZE, BATCH, LENGTH = 6, 4, 3, 9
UNTRAINED = {"coherence_least": 0.05, "noise_most": 100.0, "alignment_least": 0.01}
"""Thresholds for weights that learnt nothing, whose N and C mean nothing: the default ones are those of a trained path."""


def make_stream(seed: int = 0, **fields: Any) -> DynamicStateStream:
    """A built stream in float64 with every parameter moved away from where it starts."""
    torch.manual_seed(seed)
    stream = DynamicStateStream(**{"state_size": SIZE, **fields})
    stream.build(HostShape(hidden_size=WIDTH, num_layers=1))
    stream.init_weights()
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return stream.double()


def run(
    stream: DynamicStateStream, hidden: Tensor, residual: Tensor, state: dict[str, Tensor], **given: Any
) -> tuple[Tensor, PassResult]:
    """One pass as the host makes it, with history and signals."""
    inputs = PassInputs(embeddings_BTD=hidden, keep_history=True, collect_signals=True, **given)
    flow = stream.open(inputs, state)
    assert stream.write("final_norm_input", -1, residual, flow) is residual
    written = stream.write("final_hidden", -1, hidden, flow)
    return written, stream.close(flow)


def given_inputs(seed: int = 1, with_state: bool = True) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    hidden, residual = (
        torch.randn(BATCH, LENGTH, WIDTH, generator=generator).double().requires_grad_() for _ in range(2)
    )
    names = ("tpc", "s") if with_state else ()
    return hidden, residual, {n: torch.randn(BATCH, SIZE, generator=generator).double().requires_grad_() for n in names}


def healthy() -> Tensor:
    return torch.zeros(BATCH, LENGTH, len(FEATURES), dtype=torch.float64)
