"""Training on made-up languages: padded strings score their targets alone, attention learns a matrix, cuts change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from keel.data.languages import Dyck, JsonObjects, Markov
from keel.data.tasks import TaskData
from keel.evaluation.attention_match import attention_match
from keel.model import KeelForCausalLM, attach
from keel.streams import StructuralStream
from keel.training.phases import train
from keel.training.sections import Phase
from keel.training.settings import PhaseSettings
from keel.training.trainer import PhaseTrainer, pad_together

WORDS = TaskData(Dyck(max_length=12), train_samples=32, valid_samples=5)
MATRIX = TaskData(Markov(num_blocks=2, block_size=3, neighbours=2), train_samples=1, valid_samples=1)
PHASE = Phase(name="train", steps=2, batch_size=6, learning_rate=1e-2, validate_every=1)


def _model(data: TaskData, penalty: float = 0.2) -> KeelForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(data.tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        bos_token_id=None,
        eos_token_id=None,
    )
    return attach(LlamaForCausalLM(config), StructuralStream(init="paper", confidence_penalty=penalty))


def _weights(data: TaskData, folder: Path, **changes: int) -> dict[str, Tensor]:
    model = _model(data)
    train(model, data, [PHASE.model_copy(update=changes)], arm="a", seed=1, folder=folder, device="cpu")
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_shorter_samples_are_padded_behind_and_equal_ones_have_no_mask() -> None:
    samples = [WORDS.train()[index] for index in range(6)]
    assert len({len(sample["input_ids"]) for sample in samples}) > 1
    batch = pad_together(samples)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        assert torch.equal(batch["input_ids"][row, :length], sample["input_ids"])
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (batch["input_ids"].shape[1] - length)
        assert (batch["labels"][row, length:] == -100).all()
    assert set(pad_together(samples[:1] * 2)) == {"input_ids", "labels"}


def test_the_curve_holds_the_loss_of_every_target_and_the_tokens_that_were_read(tmp_path: Path) -> None:
    model = _model(WORDS)
    before = _model(WORDS).eval()
    trainer = PhaseTrainer(
        model,
        WORDS.train(),
        [WORDS.valid()[index] for index in range(5)],
        PhaseSettings(phase=PHASE, arm="a", seed=1, folder=tmp_path / "c", logs=tmp_path / "l", device="cpu"),
    )
    nats, count = 0.0, 0
    for index in range(5):
        sample = WORDS.valid()[index]
        with torch.no_grad():
            scores = before(sample["input_ids"][None]).logits[0, :-1].log_softmax(-1)
        for score, label in zip(scores, sample["labels"][1:], strict=True):
            if label != -100:
                nats, count = nats - float(score[label]), count + 1
    assert trainer.validation_nll() == pytest.approx(nats / count, rel=1e-5)
    trainer.run(resume=False)
    lengths = sorted(len(WORDS.train()[index]["input_ids"]) for index in range(32))
    assert 12 * lengths[0] < trainer.record.tokens < 12 * lengths[-1]
    assert [point["tokens"] for point in trainer.record.curve][-1] == trainer.record.tokens


@pytest.mark.parametrize("data", [WORDS, MATRIX], ids=["words", "matrix"])
def test_an_accumulated_step_is_the_same_step(data: TaskData, tmp_path: Path) -> None:
    whole = _weights(data, tmp_path / "whole")
    cut = _weights(data, tmp_path / "cut", accumulation=3)
    moved = _model(data).state_dict()
    for name, weights in whole.items():
        torch.testing.assert_close(cut[name], weights, rtol=1e-4, atol=2e-5)
    assert any(not torch.equal(weights, moved[name]) for name, weights in whole.items() if weights.is_floating_point())


def test_attention_learns_the_matrix(tmp_path: Path) -> None:
    model = _model(MATRIX, penalty=0.0)
    before = attention_match(model, MATRIX)
    rows = MATRIX.train()
    with torch.no_grad():
        attention = model(rows[4]["input_ids"][None], output_attentions=True).attentions[-1][0].mean(0)
    torch.testing.assert_close(before.estimate_VV[4], attention[-1, :-1])
    phase = PHASE.model_copy(update={"steps": 80, "learning_rate": 2e-2, "validate_every": 80})
    report = train(model, MATRIX, [phase], arm="a", seed=1, folder=tmp_path, device="cpu")
    after = attention_match(model, MATRIX)
    values = [match.metrics()[0].value for match in (before, after)]
    assert values[1] < values[0] / 2
    expected = (after.estimate_VV - after.target_VV).abs().sum(1).mean()
    assert values[1] == pytest.approx(float(expected), rel=1e-5)
    target = after.target_VV
    divergence = torch.xlogy(target, target / (after.estimate_VV + 1e-9)).sum(1).mean()
    assert report.curve[-1]["nll"] == pytest.approx(float(divergence), rel=1e-2)


def test_json_strings_train_too(tmp_path: Path) -> None:
    data = TaskData(JsonObjects(max_length=48), train_samples=8, valid_samples=2)
    assert all(tensor.isfinite().all() for tensor in _weights(data, tmp_path).values())
