"""Tokenizers: trained on the training split alone, the same every time, cached, and lossless."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from keel.data import Corpus, Document, load_tokenizer, train_bpe
from keel.data import tokenizers as module
from keel.errors import KeelError


def words(seed: int, count: int = 400) -> str:
    chosen = random.Random(seed)
    return " ".join("".join(chosen.choices("abcdef", k=chosen.randint(2, 6))) for _ in range(count))


def corpus(train: list[str], held_out: str = "held out") -> Corpus:
    documents = [Document(str(index), text) for index, text in enumerate(train)]
    return Corpus("made up", documents, [Document("v", held_out)], [Document("t", held_out)], "fingerprint")


def test_size_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = train_bpe(corpus([words(0)]), 320, tmp_path)
    assert len(tokenizer) == 320
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id} == {0, 1}


@pytest.mark.parametrize(
    "text", ["plain words", "  naïve\r\n\t字🙂👩‍👩‍👧 \x00\x7f", "\u2028é e\u0301 \ufeff", "def f():\n\n    return 1\n"]
)
def test_any_text_comes_back_exactly(tmp_path: Path, text: str) -> None:
    tokenizer = train_bpe(corpus([words(0)]), 300, tmp_path)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_training_is_deterministic(tmp_path: Path) -> None:
    texts = [words(seed) for seed in range(3)]
    made = [train_bpe(corpus(texts), 500, tmp_path / str(run)).backend_tokenizer.to_str() for run in range(3)]
    assert made[0] == made[1] == made[2]
    assert made[0] != train_bpe(corpus(texts[:2]), 500, tmp_path).backend_tokenizer.to_str()


def test_only_the_training_split_counts(tmp_path: Path) -> None:
    first = train_bpe(corpus([words(0)], held_out="zq" * 500), 400, tmp_path / "a")
    second = train_bpe(corpus([words(0)], held_out=words(9)), 400, tmp_path / "b")
    assert first.get_vocab() == second.get_vocab()
    assert "zq" not in first.get_vocab()
    assert "zq" in train_bpe(corpus(["zq" * 500]), 400, tmp_path).get_vocab()  # such text does leave a trace


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_CACHE", str(tmp_path))
    trained: list[int] = []
    train = module._train

    def counted(corpus: Corpus, vocab_size: int) -> Tokenizer:
        trained.append(vocab_size)
        return train(corpus, vocab_size)

    monkeypatch.setattr(module, "_train", counted)
    vocabulary = train_bpe(corpus([words(0)]), 300).get_vocab()
    assert train_bpe(corpus([words(0)], held_out="other"), 300).get_vocab() == vocabulary
    assert trained == [300]
    [path] = (tmp_path / "tokenizers").iterdir()
    whole = path.read_bytes()
    assert whole.count(b"fe") > 1
    for damaged in (whole[:-20], whole.replace(b"fe", b"ef", 1), b"[]", b"\xff"):
        path.write_bytes(damaged)
        trained.clear()
        assert train_bpe(corpus([words(0)]), 300).get_vocab() == vocabulary
        assert trained == [300]
        assert path.read_bytes() == whole
    train_bpe(corpus([words(0)]), 301)
    train_bpe(corpus([words(1)]), 300)
    assert trained == [300, 301, 300]
    assert len(list(path.parent.iterdir())) == 3


def test_too_small_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="vocab_size is 257, expected at least 258"):
        train_bpe(corpus([words(0)]), 257, tmp_path)
    assert len(train_bpe(corpus([words(0)]), 258, tmp_path)) == 258


def test_pretrained(tmp_path: Path) -> None:
    train_bpe(corpus([words(0)]), 300, tmp_path).save_pretrained(tmp_path / "saved")
    tokenizer = load_tokenizer(tmp_path / "saved")
    assert tokenizer.is_fast
    assert tokenizer("abc def")["input_ids"] == train_bpe(corpus([words(0)]), 300, tmp_path)("abc def")["input_ids"]


def test_bad_pretrained(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "tokenizer.json").write_text(json.dumps({"not": "a tokenizer"}))
    for name in ("nothing", "config"):
        with pytest.raises(KeelError, match=rf"tokenizer .*{name} cannot be loaded \(.*\); check") as caught:
            load_tokenizer(tmp_path / name)
        assert "\n" not in str(caught.value)
    endless = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    endless.save_pretrained(tmp_path / "endless")
    with pytest.raises(KeelError, match="has no eos_token"):
        load_tokenizer(tmp_path / "endless")
