"""Train one arm with one seed: its phases in order, a trainer each, then the finished model and what training measured.

FOLDER/checkpoints/0-train/checkpoint-100/    while it runs; removed when it is done
FOLDER/logs/                                  TensorBoard
FOLDER/model/                                 the finished model with its tokenizer
FOLDER/host/                                  where asked for: the bare host as an ordinary checkpoint, and the tokenizer
FOLDER/training.json                          a ``TrainingReport``; it is written last, so that its presence means done
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from keel.data import MaskedCorpus, SlidingWindows, TaskData, TokenCorpus, TokenStream
from keel.encoder import DstgForMaskedLM
from keel.errors import KeelError
from keel.files import write_atomically
from keel.model import KeelForCausalLM
from keel.training.adapters import has_adapters, merge_adapters, set_trainable
from keel.training.checkpoints import flush_folder, one_line_on_full_disk
from keel.training.dynamics import disrupted_windows, prepare
from keel.training.processor import quick_on_processor
from keel.training.questions import QuestionData, set_ramp
from keel.training.sections import Phase
from keel.training.settings import PhaseRecord, PhaseSettings, Progress
from keel.training.shadow import save_with_shadow, shadow_of
from keel.training.trainer import PhaseTrainer

VALIDATION_WINDOWS = 64


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """What training one arm with one seed measured.

    Attributes:
        params_total, params_trainable: parameters, tied ones once; trainable in the last phase.
        tokens_per_s: training tokens a second inside training steps, over all processes.
        peak_memory_bytes: see ``PhaseRecord``.
        curve: points of {"tokens", "nll"}: training tokens so far over all phases, validation loss in nats a token.
        log: for every phase its points of loss, named losses, learning rate and gradient norm.
        seconds: spent inside training steps.
        threads, processes, device: how it ran; on CPU the bits of the weights depend on the first two.
    """

    arm: str
    seed: int
    params_total: int
    params_trainable: int
    tokens_per_s: float
    peak_memory_bytes: int
    curve: list[dict[str, float]]
    log: dict[str, list[dict[str, float]]]
    seconds: float
    threads: int
    processes: int
    device: str


def train(
    model: KeelForCausalLM | DstgForMaskedLM,
    data: TokenCorpus | TaskData,
    phases: Sequence[Phase],
    *,
    arm: str,
    seed: int,
    folder: Path,
    device: str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    keep: Collection[str] = (),
    questions: QuestionData | None = None,
    save_host: bool = False,
) -> TrainingReport:
    """Train ``model`` through ``phases`` and leave model and report in ``folder``.

    Runs as it is in one process or as one of several under torchrun (DDP, or FSDP2 as accelerate is configured).

    Args:
        model: untrained, made from ``seed``; trained in place (under FSDP it ends sharded: read it from the folder).
        resume: go on from the newest whole checkpoint of an earlier call with the same arguments; on CPU with the
            same number of threads the weights end bitwise as if it had never stopped.
        device: ``cpu``, or None for the fastest there is.
        progress: called on the first process with what just happened.
        keep: phases whose model at their end is kept as well, as ``folder/after_PHASE``.
        questions: of phases that learn these.
        save_host: also keep the host alone, as ``folder/host``, which transformers loads like any checkpoint.
    Raises: KeelError for a loss that is not finite, a full disk, a checkpoint of another run, a window longer than
    the text.
    """
    first_step, num_asked, records, trainer = 0, 0, [], None
    if isinstance(data, TaskData) and data.trains_attention:
        model.set_attn_implementation("eager")  # the only one that gives its weights
    for index, phase in enumerate(phases):
        asked = questions if phase.learns == "questions" else None
        settings = PhaseSettings(
            phase=phase,
            arm=arm,
            seed=seed,
            folder=folder / "checkpoints" / f"{index}-{phase.name}",
            logs=folder / "logs" / phase.name,
            first_step=first_step,
            # Stages of questions share one pass over them: else arms of three stages saw a third of what arms of one see.
            first_entry=num_asked if asked else 0,
            device=device,
            progress=progress,
        )
        if not resume and settings.folder.exists() and _rank() == 0:
            shutil.rmtree(settings.folder)
        if isinstance(model, KeelForCausalLM):
            set_trainable(model, phase.trainable)
            prepare(model, phase)
            set_ramp(model, phase, first_step)
        samples, valid = _samples(data, phase, seed) if asked is None else asked.samples(phase)
        trainer = PhaseTrainer(model, samples, valid, settings)
        with quick_on_processor(trainer.model) if trainer.args.device.type == "cpu" else nullcontext():
            records.append(trainer.run(resume=resume))
        first_step += phase.steps
        num_asked += phase.steps * phase.batch_size if asked else 0
        if phase.name in keep:
            with _saving(arm, seed):
                save_model(_without_adapters(trainer.model), data.tokenizer, folder / f"after_{phase.name}")
    if isinstance(model, KeelForCausalLM):
        model.set_step(first_step)
    report = _report(arm, seed, phases, records, model if trainer is None else trainer)
    model = model if trainer is None else trainer.model
    merge_adapters(model)
    with _saving(arm, seed):
        save_model(model, data.tokenizer, folder / "model")
        if save_host:
            save_model(model, data.tokenizer, folder / "host", bare=True)
        if _rank() == 0:
            write_json(folder / "training.json", dataclasses.asdict(report))
            shutil.rmtree(folder / "checkpoints", ignore_errors=not phases)
    return report


def _without_adapters(model: nn.Module) -> nn.Module:
    """Return the model as it is kept: where it has adapters, which go on learning, a copy that has them in its weights."""
    if not has_adapters(model):
        return model
    copied = copy.deepcopy(model)
    merge_adapters(copied)
    return copied


def _saving(arm: str, seed: int) -> AbstractContextManager[None]:
    return one_line_on_full_disk(
        f"arm {arm!r}, seed {seed}: cannot save the model", "free some space and run again with --resume"
    )


def read_training_report(folder: Path) -> TrainingReport | None:
    """Return the report of a finished training in ``folder``, None where there is none.

    Raises: KeelError when it is damaged.
    """
    path = folder / "training.json"
    if not path.is_file():
        return None
    try:
        return TrainingReport(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise KeelError(f"{path}: not a training report ({error}); remove it to train this arm again") from error


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, *, bare: bool = False) -> None:
    """Write a model, or its ``bare`` host, with its tokenizer, whole or not at all; every process takes part, the first writes."""
    whole = _unsharded(model)
    whole = whole.host if bare else whole
    if _rank() == 0:
        write_model(whole, tokenizer, folder)
    if dist.is_initialized():
        dist.barrier()


def write_model(whole: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model that is whole in this process with its tokenizer, in place of what the folder holds, whole or not at all."""
    temporary = folder.with_name(f".writing-{folder.name}")
    for path in (temporary, folder):
        if path.exists():
            shutil.rmtree(path)
    if isinstance(whole, KeelForCausalLM) and shadow_of(whole.host) is not None:
        save_with_shadow(whole, temporary)
    else:
        whole.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    flush_folder(temporary)
    os.rename(temporary, folder)


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all."""
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return the numbers of all and of trainable parameters; a tied one counts once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _samples(
    data: TokenCorpus | TaskData, phase: Phase, seed: int
) -> tuple[Dataset[dict[str, Tensor]], list[dict[str, Tensor]]]:
    if isinstance(data, TaskData):
        valid = data.valid()
        return data.train(), [valid[index] for index in range(len(valid))]
    if isinstance(data, MaskedCorpus):
        # What is validated on is masked alike for all arms and seeds.
        valid_windows = data.windows(data.valid, phase.window, phase.window, seed=0)
        return data.windows(data.train, phase.window, phase.window_stride, seed), spread_out(valid_windows)
    if phase.dynamics is not None:
        return disrupted_windows(data, phase, seed), validation_windows(data.valid, phase.window)
    train = SlidingWindows(data.train, phase.window, phase.window_stride)
    return train, validation_windows(data.valid, phase.window)


def validation_windows(stream: TokenStream, length: int) -> list[dict[str, Tensor]]:
    """Return up to ``VALIDATION_WINDOWS`` windows, spread evenly over the stream and not overlapping."""
    return spread_out(SlidingWindows(stream, length, length))


def spread_out(windows: Any) -> list[dict[str, Tensor]]:
    """Return up to ``VALIDATION_WINDOWS`` of these windows, evenly spread."""
    count = min(VALIDATION_WINDOWS, len(windows))
    return [windows[index * len(windows) // count] for index in range(count)]


def _report(
    arm: str,
    seed: int,
    phases: Sequence[Phase],
    records: Sequence[PhaseRecord],
    trained: PhaseTrainer | torch.nn.Module,
) -> TrainingReport:
    """What was measured; without phases there is a model alone, of which nothing is trainable."""
    trainer = trained if isinstance(trained, PhaseTrainer) else None
    total, trainable = count_parameters(trained.model if isinstance(trained, PhaseTrainer) else trained)
    seconds, before, curve = sum(record.seconds for record in records), 0, []
    for record in records:
        curve += [{"tokens": before + point["tokens"], "nll": point["nll"]} for point in record.curve]
        before += record.tokens
    return TrainingReport(
        arm=arm,
        seed=seed,
        params_total=total,
        params_trainable=trainable if records else 0,
        tokens_per_s=before / seconds if records else 0.0,
        peak_memory_bytes=max((record.peak_memory_bytes for record in records), default=0),
        curve=curve,
        log={phase.name: record.log for phase, record in zip(phases, records, strict=True)},
        seconds=seconds,
        threads=torch.get_num_threads(),
        processes=1 if trainer is None else trainer.args.world_size,
        device="cpu" if trainer is None else str(trainer.args.device),
    )


def _unsharded(model: Any) -> Any:
    """Return ``model``, or on the first process a whole copy of one that FSDP has sharded."""
    if not any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        return model
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if _rank() != 0:
        return model
    whole_class = DstgForMaskedLM if isinstance(model, DstgForMaskedLM) else KeelForCausalLM
    whole = whole_class(copy.deepcopy(model.config))
    whole.load_state_dict(weights)
    return whole


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
