"""One phase of training on ``transformers.Trainer``: its loop, our losses, data order, checkpoints and guards.

What is ours, and why:

- the loss: cross-entropy and auxiliary losses are divided by counts over all micro-batches and processes, label
  smoothing included, so that accumulation and data parallelism change nothing but rounding;
- the data order: a function of seed and step (``BatchPlan``), so that a resume reads on where it stopped;
- checkpoints: atomic, verified, unpickled (``checkpoints``, ``state``);
- a loss or gradient that is not finite stops the run before the optimizer steps.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback

from keel.data.languages.markov import kl_to_attention
from keel.errors import KeelError
from keel.model import KeelForCausalLM
from keel.training.checkpoints import (
    close_checkpoint,
    newest_checkpoint,
    one_line_on_full_disk,
    open_checkpoint,
    removed_on_failure,
)
from keel.training.dynamics import disrupted_pass
from keel.training.labelled import by_length, head_at_labels
from keel.training.losses import last_attention, smoothing_sum
from keel.training.schedules import BatchPlan, PlannedBatches, cosine_with_warmup
from keel.training.settings import PhaseRecord, PhaseSettings, training_arguments
from keel.training.sharding import shard_on_cpu, wants_fsdp
from keel.training.state import (
    load_optimizer,
    load_random_state,
    load_weights,
    save_random_state,
    save_training_state,
)

KEEP_CHECKPOINTS = 2
VALIDATION_BATCH = 16


class PhaseTrainer(Trainer):
    """``transformers.Trainer`` for one phase of one arm and seed.

    Args:
        model: a KeelForCausalLM whose ``trainable`` is already set (the optimizer takes what needs gradients now), or an encoder.
        train: windows, each {"input_ids", "labels"} of equal length, or samples of different lengths with an "attention_mask".
        valid: the same for the validation curve; all are scored at every point.
        settings: see PhaseSettings.
    Raises: KeelError for a batch that the processes cannot share evenly.
    """

    def __init__(
        self, model: nn.Module, train: Dataset[Any], valid: Sequence[dict[str, Tensor]], settings: PhaseSettings
    ) -> None:
        self.settings, self.phase, self.record = settings, settings.phase, PhaseRecord()
        self.valid_windows, self.has_streams = valid, isinstance(model, KeelForCausalLM)
        self.collate = getattr(train, "collate", pad_together)  # questions bring trees
        self._sums: dict[str, Tensor] = {}
        self._num_tokens: Tensor | int = 1
        self._last_point = 0
        self.lr_scheduler: Any = None
        args = training_arguments(settings)
        sharded = wants_fsdp() and args.device.type == "cpu"
        if sharded:
            shard_on_cpu(model)
        super().__init__(
            model=model, args=args, train_dataset=train, callbacks=[_Events(self)], data_collator=self.collate
        )
        if sharded:  # accelerate would wrap it for DDP: it knows FSDP on accelerators alone
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.loss_is_scaled_for_ga = True
        self.remove_callback(PrinterCallback)
        tensorboard = self.pop_callback(TensorBoardCallback)
        if tensorboard is not None and self.is_world_process_zero():
            tensorboard.logging_dir = str(settings.logs)
            self.add_callback(tensorboard)
        ways = self.phase.accumulation * self.args.world_size
        if self.phase.batch_size % ways:
            raise KeelError(
                f"{settings.where}: batch_size {self.phase.batch_size} cannot be shared by {self.args.world_size} "
                f"processes with accumulation {self.phase.accumulation}; use a multiple of {ways}"
            )

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, *, resume: bool) -> PhaseRecord:
        """Train to the end of the phase, from the newest whole checkpoint where ``resume`` finds one.

        Returns: what was measured, over all sessions.
        Raises: KeelError for a loss that is not finite, a full disk, a checkpoint of another run.
        """
        found = newest_checkpoint(self.settings.folder) if resume else None
        if found is not None:
            self._check_manifest(*found)
        if found is not None and found[1]["step"] >= self.phase.steps:
            self._load_from_checkpoint(str(found[0]))
            self._load_record(found[0])
            return self.record
        last_good = "no checkpoint was written yet" if found is None else f"the last good checkpoint is {found[0]}"
        with one_line_on_full_disk(
            f"{self.settings.where}: stopped", f"free some space and run again with --resume; {last_good}"
        ):
            self.train(resume_from_checkpoint=None if found is None else str(found[0]))
        return self.record

    def _check_manifest(self, folder: Path, manifest: dict[str, Any]) -> None:
        for name, value in self._about().items():
            if manifest.get(name) != value:
                raise KeelError(
                    f"{folder}: written with {name} {manifest.get(name)!r}, this run has {value!r}; resume as it was "
                    "begun, or use another output folder"
                )

    def _about(self) -> dict[str, Any]:
        """What a checkpoint must agree on with the run that resumes from it."""
        return {
            "arm": self.settings.arm,
            "seed": self.settings.seed,
            # Checkpoints that were written before a phase could have dynamics say nothing of them.
            "phase": self.phase.model_dump(mode="json", exclude={"dynamics"} if self.phase.dynamics is None else None),
            "processes": self.args.world_size,
        }

    # -- data ---------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this process's micro-batches, the whole phase as one pass."""
        plan = BatchPlan(
            num_windows=len(self.train_dataset),
            steps=self.phase.steps,
            batch_size=self.phase.batch_size,
            accumulation=self.phase.accumulation,
            num_processes=self.args.world_size,
            seed=self.settings.seed,
            first_entry=self.settings.first_entry,
            count_passes=getattr(self.train_dataset, "varies_by_pass", False),
        )
        batches = PlannedBatches(plan, self.args.process_index)
        # A generator of its own: the loader must not draw from the one that dropout uses.
        return DataLoader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=self.collate,
            generator=torch.Generator().manual_seed(0),
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """Return a step's micro-batches and its label tokens over all processes; keep the count of attended tokens."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        # The model shifts: the first label of a window is no target.
        items = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches)
        tokens = sum(int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()) for batch in batches)
        counts = torch.tensor([items, tokens], device=device)
        if self.args.world_size > 1:
            dist.all_reduce(counts)
        self._num_tokens = counts[1]
        return batches, counts[0]

    # -- loss ---------------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the share of this micro-batch and process in the loss of the whole step.

        The shares of all micro-batches and processes add up to: mean cross-entropy (smoothed as the phase says) +
        named losses.
        """
        passes = [self._one_pass(model, part, num_items_in_batch) for part in self._parts(inputs)]
        loss, outputs = sum(part for part, _ in passes), passes[-1][1]
        # Data-parallel gradients are averaged over processes; these are shares of a sum.
        loss = loss * self.args.world_size
        return (loss, outputs) if return_outputs else loss

    def _parts(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a batch of questions without most of its padding, in parts, and any other as it is.

        Only in one process on a processor: elsewhere it is passes that cost, and processes expect one each. The noise of NEFTune
        depends on the length of the padded row.
        """
        alone = self.args.device.type == "cpu" and self.args.world_size == 1
        return by_length(inputs) if alone and self._asks and not self.phase.neftune_alpha else [inputs]

    def _one_pass(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None
    ) -> tuple[Tensor, Any]:
        """Return the share of some rows in the loss of the whole step; keep its parts by name for the log."""
        if "attention_target" in inputs:
            loss, outputs = self._attention_loss(model, inputs, num_items_in_batch)
        elif self.phase.dynamics is not None:
            wanted = self.phase.dynamics
            loss, outputs = disrupted_pass(model, inputs, wanted, num_items_in_batch, self._num_tokens)
        else:
            for_streams = {"num_tokens_in_batch": self._num_tokens} if self.has_streams else {}
            # Smoothing reads the logits of all tokens, and which of them have a label.
            head = head_at_labels(inputs["labels"]) if self._asks and not self.phase.label_smoothing else {}
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch, **for_streams, **head)
            loss = outputs.loss
        named = {f"loss.{name}": value for name, value in _losses(outputs).items()}
        self._add("nll", loss - sum(named.values()))
        for name, value in named.items():
            self._add(name, value)
        for name, value in (getattr(outputs, "shares", None) or {}).items():
            self._add(f"share.{name}", value)
        if self.phase.label_smoothing:
            assert num_items_in_batch is not None
            extra = smoothing_sum(outputs.logits, inputs["labels"]) / num_items_in_batch
            loss = loss + self.phase.label_smoothing * extra
        return loss, outputs

    @property
    def _asks(self) -> bool:
        """Whether samples are questions, of which the answers alone have labels."""
        return self.has_streams and self.phase.learns == "questions"

    def _attention_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], num_rows: Tensor | int | None
    ) -> tuple[Tensor, Any]:
        """KL from each row's target to the last layer's attention at the last token, and the auxiliary losses."""
        outputs = model(
            input_ids=inputs["input_ids"], output_attentions=True, use_cache=False, num_tokens_in_batch=self._num_tokens
        )
        target_BV = inputs["attention_target"]
        divergence = kl_to_attention(last_attention(outputs), target_BV) * len(target_BV)
        return divergence / (num_rows or len(target_BV)) + sum(_losses(outputs).values()), outputs

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().float()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the loss with its parts by name, each averaged over the steps since the last point."""
        if "grad_norm" in logs and self._sums:
            steps = self.state.global_step - self._last_point
            sums = torch.stack(list(self._sums.values()))
            if self.args.world_size > 1:
                dist.all_reduce(sums)
            logs.update(zip(self._sums, (sums / steps).tolist(), strict=True))
            self._sums, self._last_point = {}, self.state.global_step
            self.record.log.append({"step": self.state.global_step, **logs})
            self._tell("log", loss=logs["loss"])
        super().log(logs, start_time)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the gradient norm; stop here, before the optimizer steps, when it or the loss is not finite."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        value = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
        finite = (torch.isfinite(value).all() & torch.isfinite(self._tr_loss).all()).to(torch.int32)
        if self.args.world_size > 1:
            finite = finite.to(self.args.device)
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not finite:
            kept = newest_checkpoint(self.settings.folder)
            raise KeelError(
                f"{self.settings.where}: the loss or its gradient is not finite at step {self.state.global_step + 1}; "
                f"lower the learning rate (now {self.phase.learning_rate:g}) or clip; "
                + (f"the last good checkpoint is {kept[0]}" if kept else "no checkpoint was written yet")
            )
        return value

    # -- optimizer ----------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make AdamW; streams and an encoder's relative bias have a learning rate, and embeddings a weight decay of their own.

        Each where the phase names one.
        """
        made_before = self.optimizer is not None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        rates = {".streams.": self.phase.stream_learning_rate, ".relative_bias.": self.phase.bias_learning_rate}
        for part, rate in rates.items():
            if rate is not None and not made_before:
                names = (self.model if model is None else model).named_parameters()
                chosen = {id(parameter) for name, parameter in names if part in f".{name}"}
                optimizer.param_groups = _split(optimizer.param_groups, chosen, lr=rate)
        decay = self.phase.embedding_weight_decay
        if decay is not None and not made_before:
            whole: Any = self.model if model is None else model
            table = whole.get_input_embeddings().weight
            optimizer.param_groups = _split(optimizer.param_groups, {id(table)}, weight_decay=decay)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """Make the warm-up and cosine schedule of the phase."""
        if self.lr_scheduler is None:
            factor = functools.partial(cosine_with_warmup, warmup_steps=self.phase.warmup_steps, steps=self.phase.steps)
            self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        step, writes = self.state.global_step, self.is_world_process_zero()
        folder = self.settings.folder
        kept = newest_checkpoint(folder)
        last_good = "no checkpoint was written yet" if kept is None else f"the last good checkpoint is {kept[0]}"
        temporary = folder / f".writing-{step}"
        explain = one_line_on_full_disk(
            f"{self.settings.where}: cannot write the checkpoint of step {step}",
            f"free some space and run again with --resume; {last_good}",
        )
        with explain, removed_on_failure(temporary):
            if writes:
                open_checkpoint(folder, step)
            self._barrier()
            save_training_state(temporary, self.model_wrapped, _inner(self.optimizer), writes=writes)
            save_random_state(temporary, self.args.process_index)
            if writes:
                self._save_json(temporary)
            self._barrier()
            if writes:
                close_checkpoint(temporary, step, self._about(), KEEP_CHECKPOINTS)
            self._barrier()

    def _save_json(self, folder: Path) -> None:
        self.state.save_to_json(str(folder / "trainer_state.json"))
        (folder / "record.json").write_text(json.dumps(vars(self.record)), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_weights(Path(resume_from_checkpoint), self.model if model is None else model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        load_optimizer(folder, self.model_wrapped, _inner(self.optimizer))
        # The schedule is a function of the step, and the step is in the state that the library has read.
        self.lr_scheduler.last_epoch = self.state.global_step
        self.lr_scheduler._step_count = self.state.global_step + 1
        self.lr_scheduler._last_lr = [group["lr"] for group in _inner(self.optimizer).param_groups]
        self._load_record(folder)

    def _load_record(self, folder: Path) -> None:
        self.record = PhaseRecord(**json.loads((folder / "record.json").read_text(encoding="utf-8")))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_random_state(Path(checkpoint), self.args.process_index)

    def _barrier(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()

    # -- measuring ----------------------------------------------------------------------------------------------------

    def tokens_in_step(self) -> int:
        """Attended tokens of the last step, over all processes."""
        return int(self._num_tokens)

    @torch.no_grad()
    def validation_nll(self) -> float:
        """Return the loss on the validation windows, nats a target; every process computes all of it, so all agree."""
        self.model.eval()
        total, count = 0.0, 0
        windows = list(self.valid_windows)
        for start in range(0, len(windows), VALIDATION_BATCH):
            batch = self._prepare_inputs(self.collate(windows[start : start + VALIDATION_BATCH]))
            targets = batch["labels"][:, 1:].ne(-100).sum()
            with self.accelerator.autocast():
                if "attention_target" in batch:
                    loss, outputs = self._attention_loss(self.model, batch, targets)
                else:
                    head = head_at_labels(batch["labels"]) if self._asks else {}
                    outputs = self.model(**batch, num_items_in_batch=targets, **head)
                    loss = outputs.loss
            total += float((loss - sum(_losses(outputs).values())) * targets)
            count += int(targets)
        self.model.train()
        return total / count

    def measure(self) -> None:
        """Add a point to the validation curve."""
        point = {"step": self.state.global_step, "tokens": self.record.tokens, "nll": self.validation_nll()}
        self.record.curve.append(point)
        super().log({"valid_nll": point["nll"]})
        self._tell("valid", nll=point["nll"])

    def _tell(self, event: str, **about: Any) -> None:
        if self.settings.progress is not None and self.is_world_process_zero():
            step = {"phase": self.phase.name, "step": self.state.global_step, "steps": self.phase.steps}
            self.settings.progress({"event": event, **step, **about})


class _Events(TrainerCallback):
    """Hooks of the trainer's loop: schedules before a step, time and memory around it, validation after it."""

    def __init__(self, trainer: PhaseTrainer) -> None:
        self.trainer = trainer
        self.started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give every process its own dropout; a resume restores the saved generators afterwards."""
        trainer = self.trainer
        torch.manual_seed(
            ((trainer.settings.seed * 1_000_003 + trainer.settings.first_step) * 4096 + args.process_index) % 2**63
        )
        trainer._last_point, trainer._sums = state.global_step, {}
        trainer._tell("begin")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the streams' schedules."""
        trainer = self.trainer
        if trainer.has_streams:
            trainer.accelerator.unwrap_model(trainer.model).set_step(trainer.settings.first_step + state.global_step)
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count, and validate where it is due."""
        trainer, record = self.trainer, self.trainer.record
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        record.seconds += time.perf_counter() - self.started
        record.tokens += trainer.tokens_in_step()
        record.peak_memory_bytes = max(record.peak_memory_bytes, peak_memory_bytes(args.device))
        trainer._tell("step")
        last = state.global_step == trainer.phase.steps
        if last or state.global_step % trainer.phase.validate_every == 0:
            trainer.measure()
        # Set here and not by the library's own callback, since logging a validation point clears ``should_log``.
        control.should_log = state.global_step % args.logging_steps == 0 or last
        control.should_save = state.global_step % trainer.phase.checkpoint_every == 0 or last


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory used so far: allocated on a GPU, or resident of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pad_together(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack samples; shorter ones are padded on the right, and only then is there an attention mask."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    if all(len(sample["input_ids"]) == longest for sample in samples):
        names = [name for name in samples[0] if name != "attention_mask"]
        return {name: torch.stack([sample[name] for sample in samples]) for name in names}
    return {
        name: torch.stack([F.pad(sample[name], (0, longest - len(sample[name])), value=padding) for sample in samples])
        for name, padding in (("input_ids", 0), ("labels", -100), ("attention_mask", 0))
    }


def _split(groups: list[dict[str, Any]], apart: set[int], **fields: float) -> list[dict[str, Any]]:
    """Parameter groups with the parameters in ``apart`` (by id) in groups of their own, which have these fields."""
    others = [{**group, "params": [p for p in group["params"] if id(p) not in apart]} for group in groups]
    own = [{**group, "params": [p for p in group["params"] if id(p) in apart], **fields} for group in groups]
    return [group for group in (*others, *own) if group["params"]]


def _losses(outputs: Any) -> dict[str, Tensor]:
    """The streams' named losses; an encoder has none."""
    return getattr(outputs, "losses", None) or {}


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
