"""What a phase of training is given and what it measures, and how ``transformers.Trainer`` is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from keel.training.processor import native_precision
from keel.training.sections import Phase

_LOG_POINTS = 100
Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class PhaseSettings:
    """Everything that a trainer needs besides model and data.

    Attributes:
        phase: the recipe's phase.
        arm, seed: for messages and for the manifest; ``seed`` also fixes data order and dropout.
        folder: checkpoints of this phase.
        logs: TensorBoard event files.
        first_step: training steps of earlier phases, which the streams' schedules have already seen.
        first_entry: samples that earlier phases read of the same data, after which this one goes on.
        device: ``cpu``, or None for the fastest device there is.
        progress: called on the first process with what just happened; None for silence.
    """

    phase: Phase
    arm: str
    seed: int
    folder: Path
    logs: Path
    first_step: int = 0
    first_entry: int = 0
    device: str | None = None
    progress: Progress | None = None

    @property
    def where(self) -> str:
        """Who this is, for messages."""
        return f"arm {self.arm!r}, seed {self.seed}, phase {self.phase.name!r}"


@dataclass
class PhaseRecord:
    """What a phase measured so far; saved with every checkpoint.

    Attributes:
        curve: points of {"step", "tokens", "nll"}: training tokens of this phase so far and validation loss in nats a
            token.
        log: points of {"step", "loss", named losses, named shares, "learning_rate", "grad_norm"}, averaged since the previous point.
        seconds, tokens: time inside training steps, and the tokens trained on in it; validation and checkpoints are
            left out.
        peak_memory_bytes: largest seen; on CPU of the whole process.
    """

    curve: list[dict[str, float]] = field(default_factory=list)
    log: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    peak_memory_bytes: int = 0


def training_arguments(settings: PhaseSettings) -> TrainingArguments:
    """Return what ``transformers.Trainer`` is to do in a phase; what Keel does itself is switched off there."""
    phase = settings.phase
    world = int(os.environ.get("WORLD_SIZE", "1"))
    on_processor = settings.device == "cpu" or not torch.accelerator.is_available()
    native = native_precision(torch.device("cpu" if on_processor else "cuda"))
    return TrainingArguments(
        output_dir=str(settings.folder),
        max_steps=phase.steps,
        per_device_train_batch_size=max(1, phase.batch_size // (phase.accumulation * world)),
        gradient_accumulation_steps=phase.accumulation,
        learning_rate=phase.learning_rate,
        weight_decay=phase.weight_decay,
        neftune_noise_alpha=phase.neftune_alpha,
        max_grad_norm=0.0 if phase.clip is None else phase.clip,
        bf16=(native if phase.precision == "auto" else phase.precision) == "bf16",
        seed=settings.seed,
        logging_steps=max(1, phase.steps // _LOG_POINTS),
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=["tensorboard"],
        disable_tqdm=True,
        remove_unused_columns=False,
        # Said also where there is nothing else: without it the library refuses bf16 on a machine that has no GPU.
        use_cpu=on_processor,
        dataloader_pin_memory=False,
        ddp_timeout=86_400,
        # On a processor one call for all tensors in place of a dozen a tensor: 2 ms of a small model's step instead of 17.
        optim="adamw_torch_fused" if on_processor and world == 1 else "adamw_torch",
    )
