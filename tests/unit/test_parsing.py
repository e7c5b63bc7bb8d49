"""``keel trees``: from a treebank to a parser, from a parser and a text to a cache that a stream reads."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import keel
from keel import cli, parsing
from keel.data import Corpus, Document, train_bpe
from keel.errors import KeelError
from keel.experiment import trees as runs
from keel.training import parse_recipe
from keel.trees import open_source
from keel.trees.fields import reader_of
from keel.trees.lookup import open_lookup
from keel.trees.parser_training import TrainingConfig, train_parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tree_support"))

from tree_cases import staged_recipe, tokenizer  # found through the line above

pytest.importorskip("nltk", reason="the extra keel[trees] is not installed")


def _bracketed(rng: random.Random) -> str:
    noun = lambda: f"(NP (DT the) (NN {rng.choice(['dog', 'cat', 'king'])}))"  # noqa: E731
    return f"( (S {noun()} (VP (VBD {rng.choice(['saw', 'met'])}) {noun()}) (. .)) )"


@pytest.fixture(scope="module")
def treebank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("trees") / "bank.mrg.gz"
    path.write_bytes(gzip.compress("\n".join(_bracketed(rng) for _ in range(60)).encode()))
    return path


def _keel(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return int(ended.value.code or 0), *capsys.readouterr()


def test_from_a_treebank_to_a_stream_that_reads_the_cache(
    treebank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, cache = tmp_path / "parser.safetensors", tmp_path / "trees.sqlite"
    code, said, _ = _keel(capsys, "trees", "train", treebank, "--out", parser, "--held-out", 10, "--epochs", 4)
    assert code == 0 and "parser.f1" in said and parser.is_file()
    code, _, told = _keel(capsys, "trees", "train", treebank, "--out", parser)
    assert code == 2 and "is there already" in told

    lines = ["the dog saw the king.", "the king met the cat.", "", "the cat saw the dog."]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    documents = [Document(name="a", text=" ".join(lines))]
    tokenizer = train_bpe(Corpus(name="a", train=documents, valid=[], test=[], fingerprint="x"), 300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = [
        "trees",
        "build",
        tmp_path / "text.txt",
        "--source",
        f"keel:{parser}",
        "--tokenizer",
        tmp_path / "tokenizer",
    ]
    code, said, _ = _keel(capsys, *command, "--out", cache)
    assert code == 0 and "3 parsed, 0 there already, 0 without a tree" in said
    assert "0 parsed, 3 there already" in _keel(capsys, *command, "--out", cache)[1]

    host = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    )
    model = keel.attach(host.eval(), keel.TreeStream(lookup=f"cache:{cache}", init="paper", coefficient=5.0))
    with torch.no_grad():
        ids = torch.tensor([tokenizer(lines[0])["input_ids"]])
        with model.disable_streams():
            bare = model(ids).logits
        assert not torch.equal(model(ids).logits, bare)
        model.generate(ids, max_new_tokens=3, do_sample=False)  # what follows a text is in no cache, and need not be
        other = torch.tensor([tokenizer("the dog met the king.")["input_ids"]])
        build = (
            f"has none for {other.shape[1]} tokens .* keel trees build TEXT --source keel:{parser} .* --out {cache}$"
        )
        for rows in (other, torch.cat([ids, other.repeat(1, 9)[:, : ids.shape[1]]])):
            with pytest.raises(KeelError, match=r"trees\.sqlite has none for"):
                model(rows)
        with pytest.raises(KeelError, match=build):
            model(other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda bank, folder: parsing.train(bank, folder / "p", held_out=60), "60 trees and 60 are held out"),
        (
            lambda bank, folder: parsing.build_cache(folder / "no", folder / "c", source="x:y", tokenizer="t"),
            "is no file",
        ),
        (
            lambda bank, folder: parsing.build_cache(bank, folder / "c", source="x:y", tokenizer=str(folder)),
            "cannot be loaded",
        ),
        (
            lambda bank, folder: parsing.train(bank, bank / "p", held_out=12),
            "nothing can be written to .*; name another file with --out",
        ),
    ],
)
def test_what_cannot_be_used_is_named(call: Any, message: str, treebank: Path, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=message):
        call(treebank, tmp_path)


@pytest.mark.parametrize(
    ("text", "bank", "message"),
    [
        ("\n \n", "(S (NN cats))", "corpus.txt has no line with text"),
        ("dogs\nmice", "(S (NN cats))", "none of the 2 texts of .* has a tree; of the first: .*no tree for 'dogs'"),
        ("dogs", "\n", "bracketed:.* has no tree; expected brackets"),
    ],
)
def test_a_cache_of_nothing_is_no_success(text: str, bank: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(text)
    (tmp_path / "bank.mrg").write_text(bank)
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(KeelError, match=message):
        parsing.build_cache(
            tmp_path / "corpus.txt",
            tmp_path / "c",
            source=f"bracketed:{tmp_path / 'bank.mrg'}",
            tokenizer=str(tmp_path / "tokenizer"),
        )


def test_the_scores_of_a_parser(treebank: Path, tmp_path: Path) -> None:
    scores = parsing.train(treebank, tmp_path / "p", held_out=12, training=TrainingConfig(epochs=1, learning_rate=0.0))
    assert set(scores) == {
        f"parser.{name}" for name in ("f1", "precision", "recall", "exact", "tag_accuracy", "sentences_per_second")
    }
    assert 0 <= scores["parser.f1"] < 60 and scores["parser.sentences_per_second"] > 0


def test_prompts_of_questions_are_built_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [Document(name="a", text="Question: Who saw the dog?\nAnswer: the king the cat " * 9)]
    tokenizer = train_bpe(Corpus(name="a", train=documents, valid=[], test=[], fingerprint="x"), 300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"prompt": "Question: Who saw the dog?\nAnswer:", "options": [" the king", " the cat"]}, {"prompt": "Who?"}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "--prompts",
        "--source",
        "branching:right",
        "--tokenizer",
        tmp_path / "tokenizer",
        "--out",
        tmp_path / "trees.sqlite",
    ]
    code, said, _ = _keel(capsys, "trees", "build", tmp_path / "asked.jsonl", *command)
    assert code == 0 and "4 parsed, 0 there already, 0 without a tree" in said
    reader, lookup = (
        reader_of(tokenizer, source=open_source("branching:right")),
        open_lookup(f"cache:{tmp_path / 'trees.sqlite'}", "sentence"),
    )
    row = reader.read(rows[0]["prompt"], " the cat")
    found = lookup(row.ids)
    assert found is not None and row.chunks is not None and found.left.tolist() == row.chunks.left.tolist()
    assert "--prompts --source branching:right" in lookup.missing([1, 2])  # type: ignore[attr-defined]
    for wrong in ("no json", '["a"]', '{"options": []}', '{"prompt": "a", "options": "b"}'):
        (tmp_path / "wrong.jsonl").write_text(f'{{"prompt": "a"}}\n{wrong}\n')
        code, _, told = _keel(capsys, "trees", "build", tmp_path / "wrong.jsonl", *command)
        assert code == 2 and "row 2: not a prompt; expected" in " ".join(told.split())


def test_a_parser_that_an_earlier_run_trained_is_taken_again(
    treebank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_CACHE", str(tmp_path / "cache"))
    trained: list[int] = []

    def train(trees: Any, training: TrainingConfig) -> Any:
        trained.append(len(trees))
        return train_parser(trees, training=training)

    monkeypatch.setattr(runs, "train_parser", train)

    def prepare(name: str, **parser: int) -> tuple[bytes, dict[str, float]]:
        given = staged_recipe()
        given["trees"] = {"treebank": str(treebank), "held_out": 10, "parsers": {"strong": {"epochs": 1, **parser}}}
        given["arms"]["tree"] = {"host_of": "host", "streams": {"tree": {}}, "trees": {"source": "strong"}}
        given["phases"] = [{"name": "joint", "steps": 1, "learning_rate": 1e-3, "learns": "questions"}]
        runs.prepare_trees(parse_recipe(given), tmp_path / name)
        folder = tmp_path / name / "trees"
        return (folder / "strong.safetensors").read_bytes(), json.loads((folder / "strong.json").read_text())

    first, again = prepare("first"), prepare("again")
    assert trained == [50] and first == again and 0 <= first[1]["parser.f1"] <= 100
    assert prepare("fewer", sentences=20)[0] != first[0] and trained == [50, 20]
    kept = next(path for path in (tmp_path / "cache/parsers").iterdir() if path.read_bytes() == first[0])
    kept.write_bytes(first[0][:-1])
    assert prepare("mended")[0] == first[0] == kept.read_bytes() and trained == [50, 20, 50]
