"""Token streams: documents one after the other, bytes exact to the last, cached by content and rebuilt when damaged."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from keel.data import Corpus, Document, TokenCorpus, TokenStream, tokenize_corpus, train_bpe
from keel.data import tokens as module
from keel.data.tokens import bytes_by_offsets
from keel.errors import KeelError

TEXTS = [
    "Plain words, and more plain words.\n",
    "naïve café – 東京都 🙂👩‍👩‍👧 e\u0301\n",
    "🙂",
    "  leading and trailing  \n\n",
    "a text that spells <|endoftext|> and <|pad|> and </s> out",
    "\ufeff\r\n\tﬁne Ⅷ ｆｕｌｌ\u2028x",
    "x" * 3000,
]
ASCII = [chr(point) for point in range(33, 127)]


def make_corpus(train: list[str], valid: str = "valid text", test: str = "test text 字") -> Corpus:
    documents = [Document(f"document {index}", text) for index, text in enumerate(train)]
    return Corpus("made up", documents, [Document("v", valid)], [Document("t", test)], "fingerprint")


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|endoftext|>", *alphabet, "Ġw", "Ġwo", "x" * 2])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "w"), ("Ġw", "o"), ("x", "x")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_level_nfkc() -> Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.NFKC()
    return backend


def byte_level_prefix_space() -> Tokenizer:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def byte_level_added_token() -> Tokenizer:
    backend = byte_level()
    backend.add_tokens(["plain words", "東京"])
    return backend


def byte_fallback() -> Tokenizer:
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *ASCII, "▁▁", "東"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "▁")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def lossy_words() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(["[UNK]", "</s>", "plain", "words", *ASCII])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


BACKENDS = [byte_level, byte_level_nfkc, byte_level_prefix_space, byte_level_added_token, byte_fallback, lossy_words]


def wrap(backend: Tokenizer) -> PreTrainedTokenizerBase:
    end = "</s>" if "</s>" in backend.get_vocab() else "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)


def tokenize(corpus: Corpus, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> TokenCorpus:
    return tokenize_corpus(corpus, tokenizer or wrap(byte_level()), folder)


def parts(stream: TokenStream) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    bounds = [*map(int, stream.starts), len(stream)]
    for low, high in pairwise(bounds):
        yield stream.ids[low:high], stream.token_bytes[low:high]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)
def test_documents_in_order_and_bytes_exact(tmp_path: Path, backend: Any) -> None:
    tokenizer = wrap(backend())
    stream = tokenize(make_corpus(TEXTS), tmp_path, tokenizer).train
    assert stream.names == [f"document {index}" for index in range(len(TEXTS))]
    assert (stream.ids.dtype, stream.starts.dtype, stream.token_bytes.dtype) == (np.int32, np.int64, np.uint16)
    assert len(stream.ids) == len(stream.token_bytes) == len(stream)
    for text, (ids, counts) in zip(TEXTS, parts(stream), strict=True):
        expected = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ids.tolist() == [*expected, tokenizer.eos_token_id]
        assert counts[-1] == 0
        assert counts.sum() == len(text.encode())


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_cover_the_bytes_that_they_spell(tmp_path: Path, text: str) -> None:
    tokenizer = train_bpe(make_corpus(["plain words " * 50, "字🙂 " * 50]), 300, tmp_path)
    ids, counts = next(parts(tokenize(make_corpus([text]), tmp_path, tokenizer).train))
    spelt = [len(tokenizer.convert_ids_to_tokens(int(index))) for index in ids[:-1]]  # a character a byte
    assert counts[:-1].tolist() == spelt
    assert sum(spelt) == len(text.encode())


def test_a_character_over_several_tokens_is_shared_among_them(tmp_path: Path) -> None:
    corpus = make_corpus(["a🙂東"])
    assert tokenize(corpus, tmp_path).train.token_bytes.tolist() == [1, *[1] * 4, *[1] * 3, 0]
    added = byte_level()
    added.add_tokens(["éé"])  # é is a letter of the byte alphabet as well
    assert tokenize(make_corpus(["éé🙂"]), tmp_path, wrap(added)).train.token_bytes.tolist() == [4, 1, 1, 1, 1, 0]
    fallback = tokenize(corpus, tmp_path, wrap(byte_fallback())).train
    assert fallback.token_bytes.tolist() == [1, 0, 4, 0, 0, 0, 3, 0]  # ▁, a, four bytes of 🙂, 東, end


@pytest.mark.parametrize(
    ("text", "ends", "expected"),
    [
        ("abc", [1, 2, 3], [1, 1, 1]),
        ("é字🙂", [1, 2, 3], [2, 3, 4]),
        ("é字🙂", [3], [9]),
        ("🙂a", [1, 1, 1, 2], [4, 0, 0, 1]),
        (" a b ", [2, 4], [2, 3]),
        ("ab", [0, 2], [0, 2]),
        ("abcd", [3, 1, 4], [3, 0, 1]),
        ("abé", [1, 1], [1, 3]),
        ("\x7f\x80\u07ff\u0800\uffff\U00010000", [1, 2, 3, 4, 5, 6], [1, 2, 2, 3, 3, 4]),
    ],
)
def test_bytes_by_offsets(text: str, ends: list[int], expected: list[int]) -> None:
    assert bytes_by_offsets(text, ends).tolist() == expected
    assert sum(expected) == len(text.encode())


def test_settings_of_the_callers_tokenizer_are_ignored_and_kept(tmp_path: Path) -> None:
    tokenizer = wrap(byte_level())
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    before = tokenizer.backend_tokenizer.to_str()
    stream = tokenize(make_corpus(TEXTS), tmp_path, tokenizer).train
    assert stream.ids.tolist() == tokenize(make_corpus(TEXTS), tmp_path / "b").train.ids.tolist()
    assert tokenizer.backend_tokenizer.to_str() == before
    assert stream.ids.tolist().count(tokenizer.eos_token_id) == len(TEXTS)  # text that spells it is not an end


def test_documents_at(tmp_path: Path) -> None:
    stream = tokenize(make_corpus(TEXTS), tmp_path).train
    expected = [index for index, (ids, _) in enumerate(parts(stream)) for _ in ids]
    assert stream.documents_at(np.arange(len(stream))).tolist() == expected


def test_batches_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokenize(make_corpus(TEXTS), tmp_path / "a").train
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 30)
    monkeypatch.setattr(module, "_LONG_CHARACTERS", 0)  # the progress bar too
    split = tokenize(make_corpus(TEXTS), tmp_path / "b").train
    assert all(np.array_equal(getattr(whole, name), getattr(split, name)) for name in ("ids", "starts", "token_bytes"))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the documents that were really encoded, in order."""
    names: list[str] = []
    encode = module._Encoder.encode

    def counted(self: Any, documents: list[Document]) -> Any:
        names.extend(document.name for document in documents)
        return encode(self, documents)

    monkeypatch.setattr(module._Encoder, "encode", counted)
    return names


def test_cache_is_by_content_and_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[str]) -> None:
    monkeypatch.setenv("KEEL_CACHE", str(tmp_path))
    first = tokenize_corpus(make_corpus(TEXTS[:2]), wrap(byte_level()))
    assert encoded == ["document 0", "document 1", "v", "t"]
    encoded.clear()
    again = tokenize_corpus(make_corpus(TEXTS[:2]), wrap(byte_level()))
    assert not encoded
    assert again.fingerprint == first.fingerprint
    assert again.train.ids.tolist() == first.train.ids.tolist()
    assert isinstance(again.train.ids, np.memmap)
    assert not again.train.ids.flags.writeable
    tokenize_corpus(make_corpus(TEXTS[1::-1]), wrap(byte_level()))  # another order
    assert encoded == ["document 0", "document 1"]
    encoded.clear()
    changed = tokenize_corpus(make_corpus(TEXTS[:2]), wrap(byte_level_added_token()))
    assert len(encoded) == 4
    assert changed.fingerprint != first.fingerprint


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lie(path: Path) -> None:
    path.write_text('{"sha256": []}')


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, lie], ids=["cut", "flipped", "missing", "other content"])
@pytest.mark.parametrize("name", ["ids.npy", "starts.npy", "token_bytes.npy", "json"])
def test_damaged_cache_is_built_again(tmp_path: Path, encoded: list[str], damage: Any, name: str) -> None:
    corpus = make_corpus(TEXTS[:3], valid=TEXTS[0] + "!", test=TEXTS[1] + "!")
    before = tokenize(corpus, tmp_path).train.ids.tolist()
    for path in list((tmp_path / "tokens").glob(f"*.{name}")):
        damage(path)
    encoded.clear()
    assert tokenize(corpus, tmp_path).train.ids.tolist() == before
    if (name, damage) != (
        "json",
        flip,
    ):  # a flipped last byte of the manifest is a brace: unreadable, so rebuilt as well
        assert encoded
    encoded.clear()
    assert tokenize(corpus, tmp_path).train.ids.tolist() == before
    assert not encoded


def test_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeelError, match=r"cannot write .*: No space left on device; .*KEEL_CACHE"):
        tokenize(make_corpus(TEXTS), tmp_path)
    assert not list((tmp_path / "tokens").iterdir())


def test_interrupted_write_is_never_picked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, done = os.replace, []

    def interrupted(source: str, target: str) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenize(make_corpus(TEXTS), tmp_path)
    assert sorted((tmp_path / "tokens").iterdir()) == sorted(map(Path, done))
    monkeypatch.setattr(os, "replace", replace)
    resumed, fresh = tokenize(make_corpus(TEXTS), tmp_path), tokenize(make_corpus(TEXTS), tmp_path / "fresh")
    assert resumed.train.ids.tolist() == fresh.train.ids.tolist()


def test_cache_in_an_impossible_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeelError, match=r"cannot write .*KEEL_CACHE"):
        tokenize(make_corpus(TEXTS), tmp_path / "file")


def test_unusable_tokenizers(tmp_path: Path) -> None:
    endless = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    with pytest.raises(KeelError, match="has no eos_token"):
        tokenize(make_corpus(TEXTS), tmp_path, endless)
    with pytest.raises(KeelError, match="document 0: the tokenizer finds no token"):
        tokenize(make_corpus(["\u200b\u200b"]), tmp_path, wrap(lossy_words()))
    with pytest.raises(KeelError, match="document 0: one token covers 70000 bytes"):
        tokenize(make_corpus(["x" * 70_000]), tmp_path, wrap(lossy_words()))
