"""What the probes read while a model runs: a stream's writes, the layers' outputs, a quiet model.

Everything here lives inside a ``with`` block and is gone after it: nothing is kept on a module, and hooks are taken off.

Shapes: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from keel.errors import KeelError
from keel.model import KeelForCausalLM
from keel.streams.base import Flow, Stream


@dataclass(frozen=True, kw_only=True)
class Write:
    """One call of a stream's ``write``.

    Attributes:
        stream: the stream's name in the model.
        site: where it wrote; ``layer`` is -1 outside the layers.
        given_BTD: what it was given, the content.
        written_BTD: what it returned; the bias is the difference, exact to the rounding of this dtype.
    """

    stream: str
    site: str
    layer: int
    given_BTD: Tensor
    written_BTD: Tensor


class _Recorded:
    """Stands in for a stream in the wires: writes as it does and tells of every write. Anything else is the stream's own."""

    def __init__(self, name: str, stream: Stream, sink: Callable[[Write], None]) -> None:
        self._name, self._stream, self._sink = name, stream, sink

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, site: str, layer: int, hidden_BTD: Tensor, flow: Flow) -> Tensor:
        """See ``Stream.write``."""
        written_BTD = self._stream.write(site, layer, hidden_BTD, flow)
        self._sink(
            Write(stream=self._name, site=site, layer=layer, given_BTD=hidden_BTD, written_BTD=written_BTD),
        )
        return written_BTD


@contextmanager
def recording_writes(model: KeelForCausalLM, sink: Callable[[Write], None]) -> Iterator[None]:
    """Call ``sink`` after every write of every stream while the body runs.

    The streams are not touched: inside the body the model's wires hold stand-ins for them. Not for a compiled model, which
    has the streams' code inside.
    """
    before = model.wires.streams
    model.wires.streams = {name: cast(Stream, _Recorded(name, stream, sink)) for name, stream in before.items()}
    try:
        yield
    finally:
        model.wires.streams = before


@contextmanager
def recording_layers(model: KeelForCausalLM, sink: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``sink`` with a layer's index and its output [B, T, D] whenever a layer of the host has run."""

    def hook_of(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: sink(layer, output[0] if isinstance(output, tuple) else output)

    layers = getattr(model.host.base_model, model.family.layers)
    handles = [layer.register_forward_hook(hook_of(index)) for index, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode and without gradients, then give the model back in the mode it was in."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def check_ids(ids_NT: Tensor, least: int = 2) -> None:
    """Raise KeelError unless ``ids_NT`` are whole-number ids [N, T] with N >= 1 and T >= ``least``."""
    if ids_NT.dim() != 2 or ids_NT.is_floating_point() or len(ids_NT) < 1 or ids_NT.shape[1] < least:
        raise KeelError(
            f"probe: expected token ids [sequences >= 1, tokens >= {least}] without padding, got {ids_NT.dtype} "
            f"{list(ids_NT.shape)}; cut the text into rows of one length"
        )
