"""Three stages of training beside a trained host: what learns when, what a batch brings, and that all of it resumes exactly."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tree_support"))

import tree_cases as cases  # found through the line above

from keel.data.questions import Question, prompt_of
from keel.errors import KeelError
from keel.model import KeelForCausalLM
from keel.ops.padding import rows_of_length
from keel.training import Recipe, parse_recipe, train
from keel.training.adapters import add_adapters, has_adapters, merge_adapters, set_trainable
from keel.training.build import build_model
from keel.training.labelled import by_length
from keel.training.questions import QuestionData, QuestionSamples, set_ramp, training_questions
from keel.training.settings import PhaseSettings
from keel.training.trainer import PhaseTrainer
from keel.training.tree_sections import Adapters, TrainingQuestions
from keel.trees.fields import reader_of

pytest.importorskip("peft")
TOKENIZER = cases.tokenizer()
QUESTIONS = [
    Question(text=f"Which of the {n} cats were asleep?", options=("all", "none", f"the {n}"), answer=n % 3)
    for n in range(8)
]
PHASE: dict[str, Any] = {
    "steps": 2, "batch_size": 2, "window": 400, "learning_rate": 1e-2, "learns": "questions", "validate_every": 2, "checkpoint_every": 1,
}  # fmt: skip


def recipe(**changes: Any) -> Recipe:
    """A recipe of two arms: one trains the host, the other begins with it."""
    given = cases.staged_recipe()
    given["trees"] = {"sources": {"right": "branching:right"}}
    given["arms"]["gtca"] = {
        "host_of": "host",
        "adapters": {"rank": 2},
        "streams": {"tree": {}},
        "trees": {"source": "right"},
    }
    given["phases"] = [
        {"name": "adaptation", **PHASE, "trainable": "adapters", "trees": False},
        {"name": "structure", **PHASE, "trainable": "streams", "ramp": 0.5},
        {"name": "joint", **PHASE, "trainable": "adapters_and_streams"},
    ]
    arms = changes.pop("arms", {})
    given["arms"] = {**given["arms"], **{name: {**given["arms"].get(name, {}), **arm} for name, arm in arms.items()}}
    return parse_recipe({**given, **changes})


def built(folder: Path) -> KeelForCausalLM:
    """The model of the arm "gtca", beside the host that the arm "host" would have trained."""
    host = build_model(recipe(), "host", 0, TOKENIZER)
    host.save_pretrained(folder / "host")
    model = build_model(recipe(), "gtca", 0, TOKENIZER, trained_host=folder / "host")
    assert isinstance(model, KeelForCausalLM) and has_adapters(model)
    for name, weight in host.host.named_parameters():  # LoRA's maps are in between in the names of the wrapped ones
        assert torch.equal(weight, dict(_plain(model))[name])
    return model


def _plain(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name.replace(".base_layer", ""), p) for name, p in model.host.named_parameters() if "lora_" not in name]


def question_data() -> QuestionData:
    return QuestionData(
        train=QUESTIONS[2:], valid=QUESTIONS[:2], reader=reader_of(TOKENIZER, source=cases.MadeUpSource()), num_layers=2
    )


class _Data:
    """What ``train`` needs of the text besides its windows, which no phase here reads."""

    tokenizer = TOKENIZER


def test_what_learns_in_which_phase(tmp_path: Path) -> None:
    model = built(tmp_path)
    for phase in recipe().phases_of("gtca"):
        set_trainable(model, phase.trainable)
        learning = [name for name, p in model.named_parameters() if p.requires_grad]
        kinds = {"lora" if "lora_" in name else name.split(".")[0] for name in learning}
        assert kinds == {"adaptation": {"lora"}, "structure": {"streams"}, "joint": {"lora", "streams"}}[phase.name]


def test_lambda_rises_from_the_first_step_of_its_phase(tmp_path: Path) -> None:
    model = cases.model(len(TOKENIZER), tree_scope="sentence")
    stream, phases = model.streams["tree"], recipe().phases_of("gtca")
    set_ramp(model, phases[1].model_copy(update={"steps": 20}), first_step=100)
    found = []
    for step in (100, 105, 110, 119):
        model.set_step(step)
        found.append(float(stream.coefficient()))
    assert found == pytest.approx([0.0, 0.5, 1.0, 1.0])
    set_ramp(model, phases[2], first_step=120)
    model.set_step(0)
    assert stream.coefficient() == 1.0


def test_a_batch_of_questions_brings_trees_and_mask() -> None:
    data, phases = question_data(), recipe().phases_of("gtca")
    train_set, valid = data.samples(phases[1])
    assert len(train_set) == 6 and len(valid) == 2
    batch = train_set.collate([train_set[0], train_set[4]])
    first = batch["labels"][0]
    said = TOKENIZER.decode(first[first >= 0])
    assert said == QUESTIONS[2].continuations()[QUESTIONS[2].answer]
    assert set(batch["trees"]) >= {"left", "right", "height"} and batch["trees"]["left"].shape[0] == 2
    hidden = TOKENIZER.decode(batch["input_ids"][0][: batch["update_mask"].shape[1]][~batch["update_mask"][0]])
    assert "Instruction" in hidden and "asleep" not in hidden
    bare, _ = data.samples(phases[0])
    assert "trees" not in bare.collate([bare[0]])
    with pytest.raises(KeelError, match="none has at most 5 tokens"):
        data.samples(phases[0].model_copy(update={"window": 5}))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_without_the_padding_is_the_step_with_it(tmp_path: Path, smoothing: float) -> None:
    """Long and short questions in one batch: they go through the host apart, and loss and gradients are those of all together."""
    texts = {f"Who {'of the old cats ' * (60 * (n % 2))}was {n}?": n for n in range(4)}
    questions = [Question(text=text, options=("one", "two words"), answer=n // 2) for text, n in texts.items()]
    reader = reader_of(TOKENIZER, source=cases.MadeUpSource())
    data = QuestionData(train=questions, valid=questions[:1], reader=reader, num_layers=3)
    phase = recipe().phases_of("gtca")[2].model_copy(update={"window": 2000, "label_smoothing": smoothing})
    model = cases.model(len(TOKENIZER), tree_scope="sentence")
    add_adapters(model.host, Adapters(rank=2))
    set_trainable(model, phase.trainable)
    samples, valid = data.samples(phase)
    settings = PhaseSettings(phase=phase, arm="a", seed=0, folder=tmp_path, logs=tmp_path, device="cpu")
    trainer = PhaseTrainer(model, samples, valid, settings)
    batch = samples.collate([samples[index] for index in range(4)])
    items = batch["labels"].ne(-100).sum()

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        learning = [p for p in model.parameters() if p.requires_grad]
        return [torch.zeros(1) if g is None else g for g in torch.autograd.grad(loss, learning, allow_unused=True)]

    logits = model(**batch).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    counted, chosen = labels >= 0, logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = -((1 - smoothing) * chosen + smoothing * logits.mean(-1))[counted].sum() / items
    widths: list[int] = []
    hook = model.host.base_model.register_forward_hook(lambda module, args, output: widths.append(output[0].shape[1]))
    found = trainer.compute_loss(model, batch, num_items_in_batch=items)
    hook.remove()
    assert len(widths) == 2 and widths[0] * 3 < widths[1] == batch["input_ids"].shape[1]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)  # transformers' loss is of float32
    mine, theirs = gradients(found), gradients(expected)
    assert sum(float(g.abs().max()) > 0 for g in theirs) > 10
    for ours, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_rows_are_put_apart_where_it_saves_more_than_a_pass_costs() -> None:
    def parts(*lengths: int) -> list[list[int]]:
        mask = torch.stack([torch.arange(max(lengths)) < length for length in lengths]).long()
        rows = torch.arange(len(lengths))[:, None].expand_as(mask)
        found = by_length({"input_ids": rows, "attention_mask": mask, "trees": {"left": rows[:, :1]}})
        for part in found:
            assert part["attention_mask"].shape[1] == max(lengths[row] for row in part["input_ids"][:, 0])
            assert torch.equal(part["trees"]["left"], part["input_ids"][:, :1])
        return [part["input_ids"][:, 0].tolist() for part in found]

    assert parts(500, 100, 90, 110) == [[1, 2, 3], [0]]
    assert parts(200, 100, 190) == [[0, 1, 2]]
    assert parts(294, 131, 193, 222, 131, 221, 131, 160) == [[1, 4, 6], [2, 3, 5, 7], [0]]
    assert parts(1000, 100, 500, 90, 480) == [[1, 3], [2, 4], [0]]
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randrange(1, 60) for _ in range(6)]
        costs = []
        for cuts in itertools.product([False, True], repeat=5):  # every way to cut the rows in order of length
            begins = [0, *(place for place, cut in enumerate(cuts, 1) if cut), 6]
            groups = [sorted(lengths)[a:b] for a, b in itertools.pairwise(begins)]
            costs.append(sum(len(group) * max(group) + 30 for group in groups))
        found = rows_of_length(lengths, 30)
        assert sorted(row for group in found for row in group) == list(range(6))
        assert sum(len(group) * max(lengths[row] for row in group) + 30 for group in found) == min(costs)
    assert len(by_length({"input_ids": torch.ones(2, 3)})) == 1


def test_merged_adapters_compute_the_same(tmp_path: Path) -> None:
    model = cases.model(len(TOKENIZER), tree_scope="sentence")
    add_adapters(model.host, Adapters(rank=2))
    ids = torch.arange(12)[None]
    before = model(ids).logits
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tuned = model(ids).logits
    assert (tuned - before).abs().max() > 1e-2
    merge_adapters(model)
    assert not has_adapters(model)
    torch.testing.assert_close(model(ids).logits, tuned, rtol=0, atol=1e-9)


def test_stages_resume_where_they_stopped(tmp_path: Path) -> None:
    phases = recipe().phases_of("gtca")

    def run(name: str, *, resume: bool, stop: bool = False, keep: Collection[str] = ()) -> Any:
        def progress(event: dict[str, Any]) -> None:
            if stop and event.get("phase") == "structure" and event["event"] == "step" and event["step"] == 2:
                raise KeyboardInterrupt

        return train(
            built(tmp_path), _Data(), phases, arm="gtca", seed=0, folder=tmp_path / name, device="cpu", resume=resume,
            progress=progress, questions=question_data(), keep=keep,
        )  # type: ignore[arg-type]  # fmt: skip

    report = run("whole", resume=False)
    with pytest.raises(KeyboardInterrupt):
        run("parts", resume=False, stop=True)
    run("parts", resume=True)
    whole, parts = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and not any("lora" in name for name in whole)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    start = built(tmp_path)
    assert any(
        not torch.equal(weight, whole[f"host.{name}"]) for name, weight in _plain(start) if f"host.{name}" in whole
    )
    assert not torch.equal(start.streams["tree"].weight_height, whole["streams.tree.weight_height"])
    assert len(report.log) == 3 and report.params_trainable < report.params_total
    KeelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    run("kept", resume=False, keep={"structure"})
    kept = load_file(tmp_path / "kept" / "model" / "model.safetensors")
    assert all(torch.equal(whole[name], kept[name]) for name in whole), "what is kept on the way changes nothing"
    after = KeelForCausalLM.from_pretrained(tmp_path / "kept" / "after_structure").state_dict()
    assert not any("lora" in name for name in after)
    lent = [name for name in whole if name.endswith("q_proj.weight")]
    assert lent and any(not torch.equal(after[name], dict(_plain(start))[name.removeprefix("host.")]) for name in lent)
    assert any(not torch.equal(after[name], whole[name]) for name in whole), "the last stage has gone on from there"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no host": ({"arms": {"gtca": {"host_of": "hots"}}}, "no arm 'hots' trains a host of its own; did you mean 'host'"),
    "no adapters": ({"arms": {"gtca": {"adapters": None}}}, "a phase trains adapters, but the arm has none"),
    "no trees": ({"arms": {"gtca": {"trees": None}}}, "stream 'tree' reads trees, name their source"),
    "unknown trees": ({"arms": {"gtca": {"trees": {"source": "left"}}}}, "unknown 'left'"),
    "a host with a stream": (
        {"arms": {"gtca": {"save_host": True}}},
        r"arms.gtca.save_host: only of a bare .* or streams",
    ),
    "useless adapters": ({"arms": {"host": {"adapters": {}}}}, "no phase trains them"),
    "a parser from nothing": ({"trees": {"parsers": {"a": {}}}}, "parsers need a treebank"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_what_contradicts_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        recipe(**changes)


def test_questions_to_learn_and_to_validate_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "\n".join(f'{{"question": "{n}?", "choices": ["a", "b"], "answer": 0}}' for n in range(20))
    (tmp_path / "m.jsonl").write_text(rows, encoding="utf-8")
    learnt, valid = training_questions(TrainingQuestions(mmlu=str(tmp_path / "m.jsonl"), valid=4))
    assert len(learnt) == 16 and len(valid) == 4 and not set(learnt) & set(valid)
    asked = [Question(text=f"{n}? ", options=("b", "a"), answer=1) for n in (0, 3)]
    again = training_questions(TrainingQuestions(mmlu=str(tmp_path / "m.jsonl"), valid=4), asked)
    assert {q.text for q in again[0] + again[1]} == {f"{n}?" for n in range(20) if n not in (0, 3)}


def test_stages_share_one_pass_over_the_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages read what one stage of as many steps reads, in the same order."""
    read: list[str] = []
    plain = QuestionSamples.__getitems__

    def remember(self: QuestionSamples, indices: Any) -> Any:
        read.extend(self.texts[index][0] for index in indices)
        return plain(self, indices)

    monkeypatch.setattr(QuestionSamples, "__getitems__", remember)
    stages = recipe().phases_of("gtca")
    learnt, sequences = {prompt_of(question) for question in QUESTIONS[2:]}, []
    for name, phases in (("three", stages), ("one", [stages[2].model_copy(update={"steps": 6})])):
        read.clear()
        train(
            built(tmp_path), _Data(), phases, arm="gtca", seed=3, folder=tmp_path / name, device="cpu", resume=False,
            questions=question_data(),
        )  # type: ignore[arg-type]  # fmt: skip
        sequences.append([text for text in read if text in learnt][:12])
    three, one = sequences
    assert three == one and len(three) == 12 and set(three) == learnt
