"""The contract of a side stream: open a pass, write at named sites, close it.

A stream module holds parameters and configuration only. Whatever lives during one forward pass is in its *flow*; whatever lives
between passes is the *state* that ``close`` returns and the HF cache keeps (``keel.cache``).

Shapes: B batch, T tokens of this pass, D hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from keel.errors import build_config
from keel.hosts import FusedProjection, HostShape

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PassInputs:
    """What a stream may read when a pass opens.

    Attributes:
        embeddings_BTD: token embeddings, as the host's embedding module gives them.
        attended_BT: bool, False where a token is padding; None where nothing is padded.
        document_starts_BT: bool, True where a packed document begins (a recurrent state restarts there); None for none.
        input_ids_BT: token ids, None when the caller gave embeddings only.
        num_past: columns of the row before this pass, padding among them.
        trees: parse trees of the whole row, past included, as ``keel.trees.collate`` lays them out; None for none.
        updated_BT: bool, False at tokens that a stream may read and not write to; None where all are written to.
        keep_history: also return the state after every token, for an exact rollback.
        collect_signals: also return per-token signals.
    """

    embeddings_BTD: Tensor
    attended_BT: Tensor | None = None
    document_starts_BT: Tensor | None = None
    input_ids_BT: Tensor | None = None
    num_past: int = 0
    trees: Mapping[str, Tensor] | None = None
    updated_BT: Tensor | None = None
    keep_history: bool = False
    collect_signals: bool = False


class Flow:
    """One stream's working memory during one forward pass. Subclasses add what their ``write`` needs.

    ``query_input`` is what the query projection was given and what it read instead: the key projection, given the same, reads that.
    """

    query_input: tuple[Tensor, Tensor] | None = None

    def replay(self) -> Flow:
        """Return the flow under which a checkpointed layer is recomputed: the same tensors, and nothing is recorded twice."""
        return self


@dataclass(frozen=True, kw_only=True)
class StreamLoss:
    """One named auxiliary loss: a sum over attended tokens, to be divided by their number in the whole (accumulated) batch."""

    token_sum: Tensor
    weight: Tensor | float = 1.0


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """What a stream leaves behind when a pass closes.

    Attributes:
        state: recurrent state after the last token, each [B, ...].
        history: for every entry of ``state`` its value after each token, [B, T, ...]; empty unless asked for.
        rows: what is kept for each token of this pass, [B, T, ...]. Like keys and values they are put behind those of earlier
            passes, and cut at a rollback. State, rows and memory
            together are what the next pass is opened with.
        memory: what stays as it is, [B, ...], until a pass leaves another one; a rollback does not touch it.
        losses: named auxiliary losses.
        counts: named numbers of attended tokens, of which training logs the share; no part of the loss.
        signals: named [B, T] or [B, T, L] tensors; empty unless asked for.
    """

    state: State = field(default_factory=dict)
    history: State = field(default_factory=dict)
    rows: State = field(default_factory=dict)
    memory: State = field(default_factory=dict)
    losses: Mapping[str, StreamLoss] = field(default_factory=dict)
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    signals: Mapping[str, Tensor] = field(default_factory=dict)


class Stream(nn.Module):
    """Base of every side stream.

    A stream is made from its configuration alone and gets its parameters in ``build``, when the host's sizes are known.
    ``step`` is the training step that schedules follow; it is saved with the model. ``is_baseline`` marks what a mechanism is
    compared with: a report counts an arm that has nothing else as a baseline.
    """

    type_name: ClassVar[str]
    is_baseline: ClassVar[bool] = False
    config_class: ClassVar[type]
    config: Any
    step: Tensor

    def __init__(self, config: Any = None, **fields: Any) -> None:
        super().__init__()
        self.config = build_config(self.config_class, fields, type(self).__name__) if config is None else config
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def build(self, shape: HostShape) -> None:
        """Create parameters and buffers for a host of this shape; called once, at attach."""
        raise NotImplementedError

    def init_weights(self) -> None:
        """(Re)initialise every parameter and buffer (``step`` too) with ``transformers.initialization`` functions."""
        raise NotImplementedError

    def write_sites(self) -> list[tuple[str, int]]:
        """Return the ``(site, layer)`` pairs that this stream writes at."""
        raise NotImplementedError

    def open(self, inputs: PassInputs, state: State) -> Flow:
        """Begin a pass from the previous ``state`` (empty at a beginning)."""
        raise NotImplementedError

    def write(self, site: str, layer: int, hidden_BTD: Tensor, flow: Flow) -> Tensor:
        """Return what the host shall read at this site instead of ``hidden_BTD``."""
        raise NotImplementedError

    def close(self, flow: Flow) -> PassResult:
        """End the pass."""
        raise NotImplementedError

    def to_config(self) -> dict[str, Any]:
        """Return the configuration as JSON-able values, with its type."""
        return {"type": self.type_name, **dataclasses.asdict(self.config)}


Kind = TypeVar("Kind", bound="Stream")


class Wires:
    """What connects hooks in the host to the pass in progress.

    Hooks are registered once and hold this plain object; during a forward pass it holds that pass's flows. A checkpointed layer
    runs again in the backward pass, long after its forward: ``checkpoint_contexts`` captures the flows when the checkpoint is made
    and installs them for the recomputation, so gradients are those of the same pass.
    """

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.flows: dict[str, Flow] | None = None

    def first(self, kind: type[Kind]) -> tuple[str, Kind] | None:
        """Return the first stream of a kind with its name, None where there is none."""
        return next(((name, stream) for name, stream in self.streams.items() if isinstance(stream, kind)), None)

    @contextmanager
    def carrying(self, flows: dict[str, Flow] | None) -> Iterator[None]:
        """Hold ``flows`` while the body runs."""
        before, self.flows = self.flows, flows
        try:
            yield
        finally:
            self.flows = before

    def checkpoint_contexts(self) -> tuple[Any, Any]:
        """The ``context_fn`` of non-reentrant checkpointing."""
        flows = self.flows
        again = None if flows is None else {name: flow.replay() for name, flow in flows.items()}
        return self.carrying(flows), self.carrying(again)


class SiteHook:
    """A forward hook that lets the wired streams rewrite a module's first input or its (first) output.

    It is an object and not a closure, so that a deep copy of the model gets hooks that point at the copy's own wires.
    """

    def __init__(self, wires: Wires, names: list[str], site: str, layer: int) -> None:
        self.wires, self.names, self.site, self.layer = wires, names, site, layer

    def rewrite(self, hidden_BTD: Tensor, flows: Mapping[str, Flow]) -> Tensor:
        """Let each stream in turn write at this site."""
        for name in self.names:
            hidden_BTD = self.wires.streams[name].write(self.site, self.layer, hidden_BTD, flows[name])
        return hidden_BTD


class InputHook(SiteHook):
    """Rewrites what the module reads: its first argument, or ``hidden_states`` where that is passed by name."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the rewritten arguments, or None where no pass is in progress."""
        flows = self.wires.flows
        if flows is None:
            return None
        if args:
            return (self.rewrite(args[0], flows), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.rewrite(kwargs["hidden_states"], flows)}


class QueryHook(InputHook):
    """At a query projection; keeps what was written for the key projection of the same layer, which is next."""

    def rewrite(self, hidden_BTD: Tensor, flows: Mapping[str, Flow]) -> Tensor:
        """Write, and remember it in the flow."""
        written_BTD = super().rewrite(hidden_BTD, flows)
        flows[self.names[0]].query_input = hidden_BTD, written_BTD
        return written_BTD


class KeyHook(InputHook):
    """At a key projection; what was written for the query is not computed again."""

    def rewrite(self, hidden_BTD: Tensor, flows: Mapping[str, Flow]) -> Tensor:
        """Take what the query projection reads; write anew where it was given something else."""
        flow = flows[self.names[0]]
        known, flow.query_input = flow.query_input, None
        return known[1] if known is not None and known[0] is hidden_BTD else super().rewrite(hidden_BTD, flows)


class FusedProjectionHook(SiteHook):
    """At a projection that makes query, key and value: the first two are made again from the rewritten input.

    The module runs twice, since it may be wrapped (LoRA) and its weight alone would not tell what it does.
    """

    def __init__(self, wires: Wires, names: list[str], site: str, layer: int, fused: FusedProjection) -> None:
        super().__init__(wires, names, site, layer)
        self.fused = fused

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Return query and key from the rewritten input, value as it was; None where no pass is in progress."""
        flows = self.wires.flows
        if flows is None:
            return None
        # Not by calling the module: its hooks, this one among them, would run again.
        written = module.forward(self.rewrite(args[0], flows)).unflatten(-1, (self.fused.groups, -1))
        value = output.unflatten(-1, (self.fused.groups, -1))[..., self.fused.query_key :]
        return torch.cat([written[..., : self.fused.query_key], value], -1).flatten(-2)


class OutputHook(SiteHook):
    """Rewrites what the module gives: its output, or the first of a tuple."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the rewritten output, or None where no pass is in progress."""
        flows = self.wires.flows
        if flows is None:
            return None
        if isinstance(output, tuple):
            return (self.rewrite(output[0], flows), *output[1:])
        return self.rewrite(output, flows)
