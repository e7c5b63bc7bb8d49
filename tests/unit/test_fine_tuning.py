"""Fine-tuning: what is read, how it becomes batches and answers, when training stops, which settings win, a run that resumes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from keel.data import TokenCorpus, TokenStream
from keel.data.glue import GLUE_TASKS, TextPair, load_glue
from keel.data.masking import with_mask_tokens
from keel.data.squad import Question, divide_by_article, load_squad
from keel.encoder import DstgConfig, DstgForMaskedLM, DstgForQuestionAnswering
from keel.errors import KeelError
from keel.evaluation.downstream import (
    PairTask,
    SpanTask,
    best_of_windows,
    correlation,
    f1,
    normalised,
    squad_metrics,
)
from keel.evaluation.finetuning import FineTuning, fine_tune
from keel.experiment import downstream
from keel.experiment.subject import Subject
from keel.training import load_recipe, parse_recipe

WORDS = ["good", "bad", "a", "the", "who", "sat", "cat", "dog", "on", "mat", ".", "?"]


def tokenizer_of() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["[UNK]", *WORDS])}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return with_mask_tokens(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


@pytest.fixture
def glue(tmp_path: Path) -> str:
    """Two examples to train and one to develop on of every task; the last of the two is the one to develop on, written otherwise."""
    pairs = [json.dumps({"sentence1": "Good  cat .", "sentence2": "the dog", "label": 1})]
    files: dict[str, str] = {
        "SST-2/dev.tsv": "label\tcontent\n1\tgood cat\n",
        "MRPC/msr_paraphrase_train.txt": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        '0\t1\t2\t"a ""dog"""\tcat\n1\t1\t2\tgood cat\tThe Dog\n',
        "MRPC/glue_dev.jsonl": pairs[0],
        "RTE/rte1_dev.xml": '<entailment-corpus><pair id="1" value="TRUE"><t>a\ndog</t><h>cat</h></pair></entailment-corpus>',
        "RTE/rte2_test.xml": '<entailment-corpus><pair id="1" entailment="NO"><t>good cat.</t><h>the dog</h></pair></entailment-corpus>',
        "RTE/glue_dev.jsonl": pairs[0],
        "STS-B/stsb-en-train.csv": '"a, dog",cat,2.5\nGood cat,the dog,1\n',
        "STS-B/stsb-en-dev.csv": "good cat,the dog,1.0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "SST-2" / "train.tsv.gz").write_bytes(gzip.compress(b"label\tsentence\n0\ta dog\n1\tgood cat .\n"))
    return str(tmp_path)


FIRST = {
    "sst2": TextPair(first="a dog", label=0),
    "mrpc": TextPair(first='a "dog"', second="cat", label=0),
    "rte": TextPair(first="a dog", second="cat", label=0),
    "stsb": TextPair(first="a, dog", second="cat", label=2.5),
}


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_a_task_is_read_and_what_it_is_scored_on_is_not_learnt(glue: str, name: str) -> None:
    task = load_glue(name, glue)
    assert task.train == (FIRST[name],) and len(task.dev) == task.dropped == 1 and task.dev[0].label == 1
    assert task.numeric == (name == "stsb")


def test_missing_and_damaged_tasks(glue: str) -> None:
    with pytest.raises(KeelError, match="no GLUE task 'rtee'; did you mean 'rte'"):
        load_glue("rtee", glue)
    (Path(glue) / "STS-B" / "stsb-en-dev.csv").write_text("only,two\n", encoding="utf-8")
    with pytest.raises(KeelError, match="another shape"):
        load_glue("stsb", glue)
    (Path(glue) / "STS-B" / "stsb-en-dev.csv").unlink()
    with pytest.raises(KeelError, match=r"no stsb-en-dev\.csv"):
        load_glue("stsb", glue)


def test_tasks_and_questions_come_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, name: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((path, name, split))
        if path == "someone/squad":
            answers = {"text": ["cat"], "answer_start": [2]}
            return [{"id": split, "title": "t", "context": "a cat", "question": "?", "answers": answers}]
        if name == "sst2":
            return [{"sentence": f"good {split}", "label": 1, "idx": 0}]
        return [{"sentence1": split, "sentence2": "b", "label": 2.5}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    sst2, stsb = (load_glue(name, "hub:someone/glue") for name in ("sst2", "stsb"))
    assert asked == [("someone/glue", name, split) for name in ("sst2", "stsb") for split in ("train", "validation")]
    assert sst2.train == (TextPair(first="good train", label=1),) and not sst2.numeric
    assert stsb.dev == (TextPair(first="validation", second="b", label=2.5),) and stsb.numeric
    questions = load_squad("hub:someone/squad")
    assert [(one.ident, one.answers, one.start) for one in questions] == [
        ("train", ("cat",), 2),
        ("validation", ("cat",), 2),
    ]


def test_pairs_become_rows_that_fit() -> None:
    tokenizer = tokenizer_of()
    pair, alone = TextPair(first="the cat sat on the mat", second="a dog", label=1), TextPair(first="good", label=0)
    task = PairTask(tokenizer, [pair, alone], numeric=False, length=9)
    read = [tokenizer.convert_ids_to_tokens(task.row(one)) for one in (pair, alone)]
    assert read == [["[CLS]", "the", "cat", "sat", "on", "[SEP]", "a", "dog", "[SEP]"], ["[CLS]", "good", "[SEP]"]]
    batch = task.batch([pair, alone])
    assert batch["attention_mask"].sum(1).tolist() == [9, 3] and batch["labels"].tolist() == [1, 0]
    numbers = PairTask(tokenizer, [pair, alone], numeric=True, length=9)
    outputs = type("Output", (), {"logits": torch.tensor([[1.0], [-1.0]])})
    assert numbers.batch([pair, alone])["labels"].tolist() == [1.0, -1.0]
    assert numbers.answers(outputs, [pair, alone]) == [1.0, 0.0] and numbers.score([0.2, 0.1], [pair, alone]) == 1.0


def test_a_correlation_is_pearsons_and_moves_as_it_does_without_an_item() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=200)
    y = 0.7 * x + random.normal(size=200)
    metric = correlation("r", x.tolist(), y.tolist())
    assert metric.value == pytest.approx(np.corrcoef(x, y)[0, 1])
    left_out = [np.corrcoef(np.delete(x, index), np.delete(y, index))[0, 1] for index in range(200)]
    ours = [np.delete(metric.numerators, index).mean() for index in range(200)]
    assert np.abs(np.subtract(left_out, ours)).max() < 0.2 * np.std(left_out)
    assert correlation("r", [1.0, 1.0], [1.0, 2.0]).value == 0.0


class Counting:
    """A task whose model learns one number; looks at the held-out examples are counted."""

    def __init__(self) -> None:
        self.looks = 0

    def batch(self, examples: Any) -> dict[str, Tensor]:
        return {"labels": torch.tensor(examples)}

    def answers(self, outputs: Any, examples: Any) -> list[float]:
        return [float(outputs.guess)] * len(examples)

    def score(self, answers: Any, examples: Any) -> float:
        self.looks += 1
        return -abs(answers[0] - examples[0])


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.guess = nn.Parameter(torch.randn(1) * 0.01)

    def forward(self, labels: Tensor) -> Any:
        return type("Output", (), {"loss": ((self.guess - labels) ** 2).mean(), "guess": self.guess.detach()})


def test_the_best_settings_are_chosen_and_the_best_step_kept() -> None:
    settings = FineTuning(learning_rates=(1e-4, 3e-2), batch_sizes=(2,), epochs=40, evaluate_every=5, patience=100)
    found = fine_tune(Number, Counting(), [2.0] * 8, [1.0], [1.0] * 3, settings)
    # The labels to learn pull on to 2; the step that was nearest to the held-out 1 is the one that answers.
    assert found.chosen == (3e-2, 2, 0.01) and len(found.answers) == 3 and 0 < found.steps < 160
    assert found.answers[0] == pytest.approx(1 + found.held_out, abs=1e-6) or found.answers[0] == pytest.approx(
        1 - found.held_out
    )
    assert abs(found.held_out) < 0.1 and [combination[0] for combination, _ in found.tried] == [1e-4, 3e-2]


def test_training_stops_when_nothing_improves() -> None:
    task = Counting()
    settings = FineTuning(learning_rates=(0.1,), batch_sizes=(2,), epochs=100, evaluate_every=1, patience=4)
    found = fine_tune(Number, task, [5.0] * 8, [-5.0], [0.0], settings)  # every step away from the held-out is worse
    assert task.looks == 5 and found.steps == 1


def test_the_seed_alone_decides_and_nothing_is_drawn_from_elsewhere() -> None:
    settings = FineTuning(learning_rates=(1e-2,), batch_sizes=(2,), epochs=2, evaluate_every=1, seed=3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = fine_tune(Number, Counting(), [1.0] * 4, [1.0], [1.0], settings)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert fine_tune(Number, Counting(), [1.0] * 4, [1.0], [1.0], settings) == first
    other = FineTuning(learning_rates=(1e-2,), batch_sizes=(2,), epochs=2, evaluate_every=1, seed=4)
    assert fine_tune(Number, Counting(), [1.0] * 4, [1.0], [1.0], other) != first
    with pytest.raises(KeelError, match="4 examples to train, 0 held out"):
        fine_tune(Number, Counting(), [1.0] * 4, [], [1.0], settings)


def asked(ident: str, context: str, answer: str, title: str = "t") -> Question:
    return Question(
        ident=ident, title=title, context=context, question="who sat ?", answers=(answer,), start=context.find(answer)
    )


def test_questions_of_both_shapes_are_read_once(tmp_path: Path) -> None:
    context = "a dog . the cat sat ."
    official = {
        "id": "one", "question": "who sat ?",
        "answers": [{"text": "the cat", "answer_start": 8}, {"text": "cat", "answer_start": 12}],
    }  # fmt: skip
    none = {"id": "none", "question": "?", "answers": []}
    article = {"title": "t", "paragraphs": [{"context": context, "qas": [official, none]}]}
    (tmp_path / "a.json").write_text(json.dumps({"data": [article], "version": "1.1"}), encoding="utf-8")
    row = {"title": "t", "context": context, "question": "?", "answers": {"text": ["a dog"]}}
    lines = [json.dumps({**row, "id": ident}) for ident in ("two", "one")]
    (tmp_path / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    one, two = load_squad(str(tmp_path))
    assert (one.answers, one.start, two.answers, two.start) == (("the cat", "cat"), 8, ("a dog",), 0)
    lost = json.dumps({**row, "id": "x", "answers": {"text": ["fish"]}})
    (tmp_path / "b.jsonl").write_text(lost, encoding="utf-8")
    with pytest.raises(KeelError, match=r"b\.jsonl.*fish"):
        load_squad(str(tmp_path))


def test_no_article_is_in_two_parts() -> None:
    questions = [asked(str(index), "the cat", "cat", title=f"t{index % 10}") for index in range(40)]
    parts = divide_by_article(questions)
    titles = [{question.title for question in part} for part in parts]
    assert [len(each) for each in titles] == [7, 1, 2] and sum(map(len, parts)) == 40
    assert not titles[0] & titles[1] and not titles[0] & titles[2] and not titles[1] & titles[2]
    with pytest.raises(KeelError, match="2 articles"):
        divide_by_article(questions[:2])


def test_windows_hold_the_answer_where_they_say() -> None:
    task = SpanTask(tokenizer_of(), length=12)  # the question and the ends leave six tokens of the paragraph
    question = asked("q", "a dog . a dog . a dog . the cat sat on the mat .", "the cat sat")
    spans = task.windows([question])
    read = [" ".join(task.tokenizer.convert_ids_to_tokens(span.ids)) for span in spans]
    assert all(text.startswith("[CLS] who sat ? [SEP] ") and text.endswith(" [SEP]") for text in read)
    assert read[0].split()[5:-1] == ["a", "dog", ".", "a", "dog", "."] and read[-1].split()[-2] == "."
    told = [task.tokenizer.convert_ids_to_tokens(span.ids[span.answer[0] : span.answer[1] + 1]) for span in spans]
    assert ["the", "cat", "sat"] in told and all(each in (["[CLS]"], ["the", "cat", "sat"]) for each in told)
    answers = []
    for span in spans:  # logits that point at the answer, or in a window without it weakly at its first token
        start, end = span.answer if span.answer != (0, 0) else (5, 5)
        logits = [torch.nn.functional.one_hot(torch.tensor([at]), len(span.ids)).float() for at in (start, end)]
        if span.answer != (0, 0):
            logits = [3 * each for each in logits]
        output = type("Output", (), {"start_logits": logits[0], "end_logits": logits[1]})
        answers += task.answers(output, [span])
    assert best_of_windows(answers, spans) == (["the cat sat"], [question])


def test_answers_are_compared_as_the_official_script_does() -> None:
    assert normalised("The  Cat, sat-on a mat!") == "cat saton mat"
    assert f1("the big cat", ["cat", "dog"]) == pytest.approx(2 / 3)
    assert f1("fish", ["cat"]) == 0.0
    questions = [asked("1", "the cat", "the cat"), asked("2", "the dog sat", "dog sat")]
    em, overlap = squad_metrics(["Cat.", "dog"], questions)
    assert (em.name, em.value, overlap.name) == ("squad.em", 0.5, "squad.f1")
    assert overlap.value == pytest.approx((1 + 2 / 3) / 2)


def subject_of(folder: Path, sections: dict[str, Any]) -> Subject:
    tokenizer = tokenizer_of()
    given = load_recipe("dstg/pretrain", "tiny").model_dump(mode="json")
    given["evaluation"] = sections
    torch.manual_seed(0)
    config = DstgConfig(
        vocab_size=len(tokenizer), semantic_size=16, position_size=4, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, pad_token_id=tokenizer.pad_token_id,
        special_token_ids=[tokenizer.cls_token_id, tokenizer.sep_token_id],
    )  # fmt: skip
    stream = TokenStream(
        ids=np.zeros(9, np.int32), starts=np.array([0]), token_bytes=np.ones(9, np.uint16), names=["x"]
    )
    return Subject(
        recipe=parse_recipe(given),
        arm="dstg",
        model=DstgForMaskedLM(config),
        data=TokenCorpus(stream, stream, stream, tokenizer=tokenizer, fingerprint=""),
        device="cpu",
        progress=lambda event: None,
        folder=folder,
    )


GRID = {"learning_rates": [1e-2], "batch_sizes": [8], "epochs": 8, "evaluate_every": 8, "length": 24}


def test_a_task_of_a_unit_is_learnt_and_a_finished_one_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "glue" / "SST-2"
    root.mkdir(parents=True)
    random = np.random.default_rng(0)

    def rows(count: int, filler: list[str]) -> str:
        labels = random.integers(2, size=count)
        texts = (
            " ".join([*random.choice(filler, 3), WORDS[int(label == 0)], random.choice(filler)]) for label in labels
        )
        return "label\tsentence\n" + "\n".join(f"{label}\t{text}" for label, text in zip(labels, texts, strict=True))

    (root / "train.tsv").write_text(rows(120, ["cat", "dog", "mat"]), encoding="utf-8")
    (root / "dev.tsv").write_text(rows(30, ["sat", "on", "the"]), encoding="utf-8")
    section = {"glue": {**GRID, "source": str(tmp_path / "glue"), "tasks": ["sst2"], "test_samples": 20}}
    subject = subject_of(tmp_path / "unit", section)
    before = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    (metric,) = downstream.measure_glue(subject)
    assert metric.name == "glue.sst2" and metric.value > 0.8 and len(metric.numerators) == 20
    assert all(torch.equal(tensor, before[name]) for name, tensor in subject.model.state_dict().items())
    monkeypatch.setattr(downstream, "fine_tune", None)
    assert downstream.measure_glue(subject) == [metric]
    with pytest.raises(TypeError):  # other settings: the kept result is not theirs
        downstream.measure_glue(subject_of(tmp_path / "unit", {"glue": {**section["glue"], "epochs": 9}}))
    (tmp_path / "unit" / downstream.FOLDER / "glue.sst2.json").write_text("{", encoding="utf-8")
    with pytest.raises(KeelError, match="remove it to fine-tune again"):
        downstream.measure_glue(subject)


def test_questions_of_a_unit_are_answered(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = []
    for index in range(60):
        animal = str(random.choice(["cat", "dog"]))
        context = f"a mat . {animal} sat on the mat ." if index % 2 else f"{animal} sat ."
        row = {"id": str(index), "title": f"t{index % 10}", "context": context, "question": "who sat ?"}
        rows.append(json.dumps({**row, "answers": {"text": [animal]}}))
    (tmp_path / "questions.jsonl").write_text("\n".join(rows), encoding="utf-8")
    section = {"squad": {**GRID, "epochs": 16, "source": str(tmp_path / "questions.jsonl")}}
    em, overlap = downstream.measure_squad(subject_of(tmp_path / "unit", section))
    assert em.value > 0.8 and overlap.value >= em.value and len(em.numerators) == 12


def test_a_new_head_stands_on_a_copy_of_the_encoder(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, {"squad": {"length": 16}})
    model = downstream.with_head(subject, DstgForQuestionAnswering, 2)
    mine, theirs = (dict(one.encoder.named_parameters()) for one in (subject.model, model))
    assert all(torch.equal(tensor, theirs[name]) and tensor is not theirs[name] for name, tensor in mine.items())
    assert mine.keys() == theirs.keys()


def test_examples_longer_than_the_table_of_positions_are_refused() -> None:
    given = load_recipe("dstg/pretrain", "tiny").model_dump(mode="json")
    given["evaluation"] = {"glue": {"length": 65}}
    with pytest.raises(KeelError, match=r"evaluation\.glue\.length: 65 is longer than"):
        parse_recipe(given)
