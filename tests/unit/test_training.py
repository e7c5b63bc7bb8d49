"""Training in one process: losses, data order, checkpoints and guards."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from keel.data import TokenCorpus, TokenStream
from keel.errors import KeelError
from keel.model import KeelForCausalLM, attach
from keel.streams import StructuralStream
from keel.training import Phase, PhaseSettings, PhaseTrainer, read_training_report, smoothing_sum, train
from keel.training import checkpoints as checkpoints_module
from keel.training.checkpoints import close_checkpoint, newest_checkpoint, open_checkpoint
from keel.training.phases import validation_windows
from keel.training.schedules import BatchPlan, PlannedBatches, cosine_with_warmup

VOCABULARY = 31
PHASE = Phase(
    name="train", steps=6, batch_size=4, window=12, stride=5, learning_rate=1e-2, validate_every=3, checkpoint_every=2
)


def stream_of(count: int, seed: int) -> TokenStream:
    """Made-up text in which each token follows from the one before, so that a model can learn something."""
    generator = np.random.default_rng(seed)
    steps = np.cumsum(generator.integers(1, 3, size=count)) % VOCABULARY
    return TokenStream(
        ids=steps.astype(np.int32),
        starts=np.array([0], dtype=np.int64),
        token_bytes=np.ones(count, dtype=np.uint16),
        names=["made up"],
    )


class NoTokenizer(PreTrainedTokenizerFast):
    """Stands where a tokenizer is saved beside the model."""

    def __init__(self) -> None:
        pass

    def save_pretrained(self, folder: Any, **kwargs: Any) -> tuple[str, ...]:
        return ()


CORPUS = TokenCorpus(
    train=stream_of(900, 0),
    valid=stream_of(200, 1),
    test=stream_of(200, 2),
    tokenizer=NoTokenizer(),
    fingerprint="made up",
)


def model_of(dropout: float = 0.0, seed: int = 0, penalty: float = 0.5) -> KeelForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return attach(LlamaForCausalLM(config), StructuralStream(init="paper", confidence_penalty=penalty))


def settings_of(folder: Path, phase: Phase = PHASE, **changes: Any) -> PhaseSettings:
    given = {
        "arm": "a",
        "seed": 3,
        "folder": folder / "checkpoints",
        "logs": folder / "logs",
        "device": "cpu",
        **changes,
    }
    return PhaseSettings(phase=phase, **given)


def trainer_of(folder: Path, model: KeelForCausalLM, phase: Phase = PHASE, **changes: Any) -> PhaseTrainer:
    windows = validation_windows(CORPUS.train, phase.window)
    dataset = [dict(window) for window in windows[:7]]
    valid = validation_windows(CORPUS.valid, phase.window)
    return PhaseTrainer(model, dataset, valid, settings_of(folder, phase, **changes))  # type: ignore[arg-type]


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train_here(folder: Path, phase: Phase = PHASE, dropout: float = 0.0, **changes: Any) -> dict[str, Tensor]:
    model = model_of(dropout)
    given = {"arm": "a", "seed": 3, "folder": folder, "device": "cpu", **changes}
    train(model, CORPUS, [phase], **given)
    return weights_of(model)


# -- losses ---------------------------------------------------------------------------------------


def test_smoothing_sum_completes_the_smoothed_cross_entropy() -> None:
    logits = torch.randn(2, 7, VOCABULARY, requires_grad=True)
    labels = torch.randint(VOCABULARY, (2, 7))
    labels[0, 3:5] = -100
    flat, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    ours = F.cross_entropy(flat, targets, reduction="sum") + 0.3 * smoothing_sum(logits, labels)
    expected = F.cross_entropy(flat, targets, reduction="sum", label_smoothing=0.3)
    assert not torch.isclose(expected, F.cross_entropy(flat, targets, reduction="sum"), rtol=1e-2)
    torch.testing.assert_close(ours, expected)
    ours_gradient, expected_gradient = (torch.autograd.grad(loss, logits)[0] for loss in (ours, expected))
    torch.testing.assert_close(ours_gradient, expected_gradient)


def gradients_of_a_step(folder: Path, phase: Phase, labels_hidden: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of the first step's whole batch, as the trainer accumulates them, and the losses by name."""
    model = model_of()
    trainer = trainer_of(folder, model, phase)
    for index, window in enumerate(trainer.train_dataset):
        window["labels"] = window["labels"].clone()
        window["labels"][1 : 1 + (index * labels_hidden) % 9] = -100  # micro-batches with unlike numbers of targets
    batches, items = trainer.get_batch_samples(
        iter(trainer.get_train_dataloader()), phase.accumulation, torch.device("cpu")
    )
    for batch in batches:
        trainer.compute_loss(model.train(), batch, num_items_in_batch=items).backward()
    losses = {name: float(value) for name, value in trainer._sums.items()}
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, losses


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_accumulated_batches_give_the_large_batch(tmp_path: Path, smoothing: float) -> None:
    results = []
    for parts in (1, 2, 4):
        phase = PHASE.model_copy(update={"accumulation": parts, "label_smoothing": smoothing})
        results.append(gradients_of_a_step(tmp_path / str(parts), phase, labels_hidden=4))
    (whole, losses), *others = results
    assert losses["loss.structural.confidence"] < 0 < losses["nll"]
    for gradients, named in others:
        assert named == pytest.approx(losses, rel=1e-5)
        assert gradients.keys() == whole.keys()
        for name, gradient in gradients.items():
            # Sums over micro-batches in another order: float32 rounding.
            torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-7, msg=name)


def test_the_step_loss_is_the_mean_over_its_targets_plus_the_named_losses(tmp_path: Path) -> None:
    phase = PHASE.model_copy(update={"accumulation": 2, "label_smoothing": 0.1})
    model = model_of()
    trainer = trainer_of(tmp_path, model, phase)
    batches, items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 2, torch.device("cpu"))
    total = sum(trainer.compute_loss(model.train(), batch, num_items_in_batch=items).detach() for batch in batches)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    outputs = model(**whole)
    flat, targets = outputs.logits[:, :-1].flatten(0, 1), whole["labels"][:, 1:].flatten()
    expected = F.cross_entropy(flat, targets, label_smoothing=0.1) + sum(outputs.losses.values())
    torch.testing.assert_close(total, expected)


def test_named_losses_are_logged_and_add_up(tmp_path: Path) -> None:
    train_here(tmp_path)
    report = read_training_report(tmp_path)
    assert report is not None
    log = report.log["train"]
    assert [point["step"] for point in log] == [1, 2, 3, 4, 5, 6]
    for point in log:
        assert point["loss"] == pytest.approx(point["nll"] + point["loss.structural.confidence"], rel=1e-5)
    assert log[-1]["nll"] < log[0]["nll"]
    assert [point["tokens"] for point in report.curve] == [3 * 4 * 12, 6 * 4 * 12]
    assert any((tmp_path / "logs/train").glob("events.out.tfevents.*"))


# -- data order, schedules ------------------------------------------------------------------------


def test_every_cut_of_a_step_sees_the_same_windows() -> None:
    plain = BatchPlan(num_windows=7, steps=5, batch_size=8, seed=1)
    steps = [plain.micro_batch(step, 0, 0) for step in range(5)]
    for parts, processes in itertools.product((1, 2, 4), (1, 2)):
        plan = BatchPlan(num_windows=7, steps=5, batch_size=8, accumulation=parts, num_processes=processes, seed=1)
        cut = [
            [i for part in range(parts) for rank in range(processes) for i in plan.micro_batch(step, part, rank)]
            for step in range(5)
        ]
        assert cut == steps
    seen = [window for step in steps for window in step]
    for start in range(0, 35, 7):
        assert sorted(seen[start : start + 7]) == list(range(7)), "each pass has each window once"
    assert seen[:7] != seen[7:14], "passes differ in order"
    assert steps != [
        BatchPlan(num_windows=7, steps=5, batch_size=8, seed=2).micro_batch(step, 0, 0) for step in range(5)
    ]
    assert len(PlannedBatches(plan, 1)) == 20 and list(PlannedBatches(plan, 1))[5] == plan.micro_batch(1, 1, 1)


def test_the_learning_rate_rises_then_falls_as_a_cosine() -> None:
    factors = [cosine_with_warmup(step, warmup_steps=4, steps=12) for step in range(13)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[8] == pytest.approx(0.5) and factors[12] == pytest.approx(0.0)
    assert factors[4:] == sorted(factors[4:], reverse=True)


def test_streams_learn_at_a_rate_of_their_own(tmp_path: Path) -> None:
    """After one step of Adam a weight has moved by its learning rate, whatever its gradient; weight decay is off here."""
    moved = {}
    for rate in (None, 1e-3):
        phase = PHASE.model_copy(update={"steps": 1, "weight_decay": 0.0, "stream_learning_rate": rate})
        before, after = weights_of(model_of()), train_here(tmp_path / str(rate), phase)
        for part in ("host.", "streams."):
            names = [name for name in before if name.startswith(part) and "step" not in name]
            moved[rate, part] = max(float((after[name] - before[name]).abs().max()) for name in names)
    expected = {(None, "host."): 1e-2, (None, "streams."): 1e-2, (1e-3, "host."): 1e-2, (1e-3, "streams."): 1e-3}
    assert moved == pytest.approx(expected, rel=1e-3)


def test_embeddings_decay_at_a_rate_of_their_own(tmp_path: Path) -> None:
    """The same step but for the decay, which takes ``learning_rate x decay`` of a weight."""
    ends = {}
    for decay in (None, 0.0, 3.0):
        phase = PHASE.model_copy(update={"steps": 1, "weight_decay": 0.0, "embedding_weight_decay": decay})
        ends[decay] = train_here(tmp_path / str(decay), phase)
    before = weights_of(model_of())
    for name, weight in before.items():
        assert torch.equal(ends[None][name], ends[0.0][name])
        is_table = weight.shape[:1] == (VOCABULARY,)  # its name, and the head's that shares it
        lost = ends[0.0][name] - ends[3.0][name]
        expected = weight * 3.0 * PHASE.learning_rate if is_table else torch.zeros_like(weight)
        torch.testing.assert_close(lost, expected, atol=1e-6, rtol=1e-3)


def test_neftune_adds_noise_in_training_alone(tmp_path: Path) -> None:
    noisy = PHASE.model_copy(update={"neftune_alpha": 5.0})
    plain, with_noise, again = (
        train_here(tmp_path / str(index), phase) for index, phase in enumerate((PHASE, noisy, noisy))
    )
    assert any(not torch.equal(plain[name], with_noise[name]) for name in plain)
    assert all(torch.equal(with_noise[name], again[name]) for name in plain), "the noise is not of the seed"
    model = model_of()
    train(model, CORPUS, [noisy], arm="a", seed=0, folder=tmp_path / "after", device="cpu")
    embed, ids = model.get_input_embeddings(), torch.arange(4)
    model.train()
    assert torch.equal(embed(ids), embed.weight[ids]), "the noise outlives the training"


def test_one_seed_fixes_everything_and_another_changes_it(tmp_path: Path) -> None:
    first, again, other = (
        train_here(tmp_path / str(index), dropout=0.3, seed=seed) for index, seed in enumerate((3, 3, 4))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_stream_schedules_see_the_step_and_phases_count_on(tmp_path: Path) -> None:
    model = model_of()
    seen: list[int] = []
    before = model.set_step
    model.set_step = lambda step: (seen.append(step), before(step))[1]  # type: ignore[method-assign,func-returns-value]
    short = PHASE.model_copy(update={"steps": 3})
    second = short.model_copy(update={"name": "second", "trainable": "streams"})
    train(model, CORPUS, [short, second], arm="a", seed=0, folder=tmp_path, device="cpu")
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    loaded = KeelForCausalLM.from_pretrained(tmp_path / "model")
    assert int(loaded.streams["structural"].step) == 6
    report = read_training_report(tmp_path)
    assert report is not None and list(report.log) == ["train", "second"]
    assert [point["tokens"] for point in report.curve] == [144, 288]
    assert report.params_trainable < report.params_total


def test_a_phase_that_trains_streams_leaves_the_host_alone(tmp_path: Path) -> None:
    before = weights_of(model_of())
    after = train_here(tmp_path, PHASE.model_copy(update={"trainable": "streams"}))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("streams.") for name in changed)


def test_bf16_trains_finite_weights_in_float32(tmp_path: Path) -> None:
    weights = train_here(tmp_path, PHASE.model_copy(update={"precision": "bf16"}))
    floating = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
    assert all(tensor.dtype == torch.float32 and torch.isfinite(tensor).all() for tensor in floating.values())
    exact = train_here(tmp_path / "fp32")
    assert any(not torch.equal(weights[name], exact[name]) for name in floating), "autocast was not on"


# -- checkpoints ----------------------------------------------------------------------------------


class Interrupted(Exception):
    """Stands for a crash between two events."""


def crash_after(count: int, kind: str) -> Any:
    """A progress callback that raises at the ``count``-th event of a kind."""
    left = [count]

    def progress(event: dict[str, Any]) -> None:
        left[0] -= event["event"] == kind
        if left[0] == 0:
            left[0] = -1
            raise Interrupted

    return progress


@pytest.mark.parametrize("steps_before", [1, 3, 5])
def test_a_resumed_run_ends_bitwise_like_an_uninterrupted_one(tmp_path: Path, steps_before: int) -> None:
    phase = PHASE.model_copy(update={"accumulation": 2, "label_smoothing": 0.1, "stream_learning_rate": 3e-3})
    whole = train_here(tmp_path / "whole", phase, dropout=0.3)
    with pytest.raises(Interrupted):
        train_here(tmp_path / "cut", phase, dropout=0.3, progress=crash_after(steps_before, "step"))
    seen: list[int] = []
    progress = lambda event: seen.append(event["step"]) if event["event"] == "step" else None  # noqa: E731
    torch.manual_seed(99)
    resumed = train_here(tmp_path / "cut", phase, dropout=0.3, resume=True, progress=progress)
    assert seen[0] == (steps_before - 1) // 2 * 2 + 1, "it went on from the newest checkpoint"
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    one, two = (read_training_report(tmp_path / which) for which in ("whole", "cut"))
    assert one is not None and two is not None and one.curve == two.curve


def test_dropout_matters_in_the_test_above(tmp_path: Path) -> None:
    with_dropout, without = train_here(tmp_path / "a", dropout=0.3), train_here(tmp_path / "b")
    assert any(not torch.equal(with_dropout[name], without[name]) for name in without)


def test_a_second_phase_resumes_without_the_first_being_repeated(tmp_path: Path) -> None:
    phases = [PHASE, PHASE.model_copy(update={"name": "second", "learning_rate": 1e-3})]

    def run(folder: Path, **changes: Any) -> dict[str, Tensor]:
        model = model_of(0.3)
        train(model, CORPUS, phases, arm="a", seed=3, folder=folder, device="cpu", **changes)
        return weights_of(model)

    whole = run(tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", progress=crash_after(9, "step"))
    names: list[str] = []
    resumed = run(tmp_path / "cut", resume=True, progress=lambda event: names.append(event["phase"]))
    assert set(names) == {"second"}
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def checkpoints_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints/0-train").iterdir())


def test_two_checkpoints_are_kept_and_hold_no_pickle(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train_here(tmp_path, progress=crash_after(6, "log"))
    assert checkpoints_of(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "events.out" not in path.name]
    assert files and {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            load_file(path)


def test_training_starts_over_without_resume_and_leaves_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train_here(tmp_path, progress=crash_after(5, "step"))
    seen: list[int] = []
    train_here(tmp_path, progress=lambda event: seen.append(event["step"]))
    assert seen[0] == 0
    assert not (tmp_path / "checkpoints").exists()


def damage_nothing(folder: Path) -> None:
    pass


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def damage_cut(folder: Path) -> None:
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def damage_flip(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def damage_missing(folder: Path) -> None:
    (folder / "random-0.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "first_step"),
    [(damage_nothing, 5), (damage_manifest, 3), (damage_cut, 3), (damage_flip, 3), (damage_missing, 3)],
)
def test_a_damaged_checkpoint_is_never_picked_up(tmp_path: Path, damage: Any, first_step: int) -> None:
    whole = train_here(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_here(tmp_path / "cut", progress=crash_after(5, "step"))
    damage(tmp_path / "cut/checkpoints/0-train/checkpoint-4")
    seen: list[int] = []
    progress = lambda event: seen.append(event["step"]) if event["event"] == "step" else None  # noqa: E731
    resumed = train_here(tmp_path / "cut", resume=True, progress=progress)
    assert seen[0] == first_step
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_half_written_folders_are_ignored_and_removed(tmp_path: Path) -> None:
    half = tmp_path / ".writing-9"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"half")
    assert newest_checkpoint(tmp_path) is None
    for step in (10, 11, 12):
        temporary = open_checkpoint(tmp_path, step)
        (temporary / "state.json").write_text("{}")
        close_checkpoint(temporary, step, {"arm": "a"}, keep=2)
    assert not half.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-11", "checkpoint-12"]
    found = newest_checkpoint(tmp_path)
    assert found is not None and found[1]["step"] == 12 and found[1]["arm"] == "a"


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"seed": 4}, "seed 3, this run has 4"), ({"arm": "b"}, "arm 'a', this run has 'b'")],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(Interrupted):
        train_here(tmp_path, progress=crash_after(5, "step"))
    with pytest.raises(KeelError, match=what):
        train_here(tmp_path, resume=True, **changes)
    with pytest.raises(KeelError, match="written with phase"):
        train_here(tmp_path, PHASE.model_copy(update={"learning_rate": 0.5}), resume=True)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train_here(tmp_path, progress=crash_after(5, "step"))
    torch.manual_seed(0)
    config = copy.deepcopy(model_of().host.config)
    config.intermediate_size = 25
    model = attach(LlamaForCausalLM(config), StructuralStream(init="paper", confidence_penalty=0.5))
    with pytest.raises(KeelError, match="another model's") as caught:
        train(model, CORPUS, [PHASE], arm="a", seed=3, folder=tmp_path, device="cpu", resume=True)
    assert "\n" not in str(caught.value)


# -- guards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path, clip: float | None) -> None:
    model = model_of()

    def poison(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 3:
            with torch.no_grad():
                model.host.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan

    phase = PHASE.model_copy(update={"clip": clip, "validate_every": 100})
    with pytest.raises(KeelError) as caught:
        train(model, CORPUS, [phase], arm="a", seed=3, folder=tmp_path, device="cpu", progress=poison)
    for part in ("arm 'a'", "seed 3", "phase 'train'", "step 4", "checkpoint-2", "learning rate (now 0.01)"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert checkpoints_of(tmp_path) == ["checkpoint-2"]
    assert read_training_report(tmp_path) is None
    kept = load_file(tmp_path / "checkpoints/0-train/checkpoint-2/weights.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in kept.values() if tensor.is_floating_point())


def test_a_full_disk_is_one_line_and_the_previous_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_here(tmp_path / "whole")
    flush = checkpoints_module.flush_folder

    def full(folder: Path) -> None:
        if folder.name == ".writing-4":
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(folder)

    monkeypatch.setattr(checkpoints_module, "flush_folder", full)
    with pytest.raises(KeelError) as caught:
        train_here(tmp_path / "cut")
    message = str(caught.value)
    assert (
        "No space left on device" in message
        and "step 4" in message
        and "checkpoint-2" in message
        and "\n" not in message
    )
    assert checkpoints_of(tmp_path / "cut") == ["checkpoint-2"], "what could not be finished gives its space back"
    monkeypatch.undo()
    resumed = train_here(tmp_path / "cut", resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_window_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="does not fit into a split of 900 tokens"):
        train_here(tmp_path, PHASE.model_copy(update={"window": 901}))


def test_the_finished_model_loads_and_equals_the_trained_one(tmp_path: Path) -> None:
    weights = train_here(tmp_path)
    loaded = weights_of(KeelForCausalLM.from_pretrained(tmp_path / "model"))
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_damaged_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text('{"arm": 1')
    with pytest.raises(KeelError, match="not a training report"):
        read_training_report(tmp_path)
