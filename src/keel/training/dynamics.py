"""A training step of a dynamic state path on disrupted text: one pass, its signals, their targets and losses (DTA §9B to §9E).

Shapes: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from keel.data import TokenCorpus
from keel.data.disruptions import DisruptedWindows, DisruptionConfig, with_hidden_noise
from keel.errors import KeelError, build_config
from keel.hosts import rewritten_layer_input
from keel.model import KeelForCausalLM, KeelOutput
from keel.streams import DynamicStateStream
from keel.training.sections import Dynamics, Phase
from keel.training.signal_losses import signal_losses
from keel.training.signal_targets import signal_targets


def disrupted_windows(data: TokenCorpus, phase: Phase, seed: int) -> DisruptedWindows:
    """Return the training windows of a phase that has ``dynamics``; its data are a function of seed, phase and index."""
    assert phase.dynamics is not None
    config = build_config(DisruptionConfig, phase.dynamics.disruptions, f"phase {phase.name!r}: dynamics.disruptions")
    return DisruptedWindows(data.train, phase.window, phase.window_stride, data.tokenizer, config, seed=seed)


def prepare(model: KeelForCausalLM, phase: Phase) -> None:
    """Set what a phase lets learn: besides ``phase.trainable`` the parameters of the path it names, and the truncation.

    Raises: KeelError for a parameter that the path does not have.
    """
    found = model.wires.first(DynamicStateStream)
    if found is None:
        return
    name, stream = found
    wanted = phase.dynamics
    stream.truncation = None if wanted is None else wanted.truncation
    if wanted is None or wanted.parameters is None or phase.trainable == "host":
        return
    known = dict(stream.named_parameters())
    for parameter in wanted.parameters:
        if parameter not in known:
            raise KeelError(
                f"phase {phase.name!r}: dynamics.parameters: {name} has no {parameter!r}; it has {', '.join(known)}"
            )
    for parameter, tensor in known.items():
        tensor.requires_grad_(parameter in wanted.parameters)


def disrupted_pass(
    model: nn.Module,
    batch: dict[str, Tensor],
    wanted: Dynamics,
    num_items: Tensor | int | None,
    num_tokens: Tensor | int,
) -> tuple[Tensor, KeelOutput]:
    """Run one micro-batch of disrupted windows.

    Args:
        model: a KeelForCausalLM, or one wrapped for several processes.
        batch: of ``DisruptedWindows``.
        num_items, num_tokens: labels and tokens of the whole accumulated batch.
    Returns: base weight x cross-entropy + all named losses, and the output, whose ``losses`` are those of the streams and of §9 by
        name.
    """
    inner: Any = getattr(model, "module", model)
    found: tuple[str, DynamicStateStream] | None = inner.wires.first(DynamicStateStream) if wanted.active else None
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("level", "kind", "noise_seed")}
    if not wanted.base:  # the head of the whole window would be computed for nothing
        inputs = {"input_ids": inputs["input_ids"], "logits_to_keep": 1}  # type: ignore[dict-item]
    noisy = functools.partial(with_hidden_noise, batch["level"], batch["kind"], batch["noise_seed"])
    middle = inner.host.config.num_hidden_layers // 2
    with (
        nullcontext() if wanted.active else inner.disable_streams(),
        rewritten_layer_input(inner.host, inner.family, middle, noisy),
    ):
        output = model(
            **inputs,
            use_cache=False,
            num_items_in_batch=num_items,
            num_tokens_in_batch=num_tokens,
            collect_signals=found is not None and bool(wanted.losses),
        )
    streams: dict[str, Tensor] = output.losses or {}
    cross_entropy = output.loss - sum(streams.values()) if wanted.base else output.logits.new_zeros(())
    losses = dict(streams)
    if found is not None and wanted.losses:
        # Signals and targets are of float32, as the path is.
        with torch.autocast(batch["level"].device.type, enabled=False):
            losses |= _path_losses(*found, output, batch["level"], wanted.losses, num_tokens)
    output.losses = losses or None
    return wanted.base * cross_entropy + sum(losses.values()), output


def _path_losses(
    name: str,
    stream: DynamicStateStream,
    output: KeelOutput,
    level_BT: Tensor,
    weights: dict[str, float],
    num_tokens: Tensor | int,
) -> dict[str, Tensor]:
    assert output.signals is not None
    signals = {key.partition(".")[2]: value for key, value in output.signals.items() if key.startswith(f"{name}.")}
    with torch.no_grad():
        directions_BTK = stream.directions(signals["tpc"])
    targets = signal_targets(
        level_BT, signals["query"].detach(), signals["substrate"], directions_BTK, stream.config.retention
    )
    sums = signal_losses(signals, targets, level_BT, weights)
    return {f"{name}.{key}": value / num_tokens for key, value in sums.items()}
