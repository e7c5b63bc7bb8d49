"""Corpora: what is read from where, how it is split, and what each unusable input is told."""

from __future__ import annotations

import gzip
import itertools
import json
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from keel.data import Corpus, CorpusConfig, Document, load_corpus
from keel.data.corpora import read_documents
from keel.data.sources import join_wikitext, line_width, unwrap_lines
from keel.errors import KeelError

TEXTS = [f"Text number {index}.\nIts second line, naïve – 字 🙂 {index * index}.\n" for index in range(40)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def jsonl(texts: list[str], field: str = "text") -> str:
    return "".join(json.dumps({"title": "t", field: text}) + "\n" for text in texts)


def parquet(texts: list[Any], field: str = "text") -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({field: texts}), sink)
    return bytes(sink.getvalue())


def load(source: Path | str, **fields: Any) -> Corpus:
    return load_corpus(CorpusConfig(source=str(source), **fields))


def texts_of(corpus: Corpus) -> dict[str, list[str]]:
    return {split: [document.text for document in documents] for split, documents in corpus.splits().items()}


def all_texts(corpus: Corpus) -> list[str]:
    return [text for texts in texts_of(corpus).values() for text in texts]


FORMATS: dict[str, str | bytes] = {
    "a.jsonl": jsonl(TEXTS),
    "a.jsonl.gz": jsonl(TEXTS),
    "a.JSONL": jsonl(TEXTS),
    "a.parquet": parquet(TEXTS),
    "a.parquet.gz": parquet(TEXTS),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_file_are_documents(tmp_path: Path, name: str) -> None:
    corpus = load(write(tmp_path / name, FORMATS[name]))
    assert sorted(all_texts(corpus)) == sorted(TEXTS)
    assert {document.name for document in corpus.train} <= {f"{name}:{row}" for row in range(1, 41)}
    assert corpus.name == name


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".txt.gz", ".md.gz", ".py.gz"])
def test_files_of_a_folder_are_documents_in_sorted_order(tmp_path: Path, suffix: str) -> None:
    for index, text in enumerate(TEXTS):
        write(tmp_path / f"d{index % 3}" / f"{index:02}{suffix}", text)
    write(tmp_path / "picture.png", b"\x89PNG\0")
    write(tmp_path / ".git" / "hidden.txt", "hidden")
    write(tmp_path / "__pycache__" / "compiled.py", "compiled")
    corpus = load(tmp_path)
    assert sorted(all_texts(corpus)) == sorted(TEXTS)
    names = [document.name for document in corpus.train]
    assert names == sorted(names)
    assert corpus.name == tmp_path.name


def test_text_is_verbatim(tmp_path: Path) -> None:
    odd = "\ufeff  a\r\nb\u2028c\x0bd \n\n"
    for index, text in enumerate([odd, *TEXTS[:3]]):
        write(tmp_path / f"{index}.txt", text)
    assert odd in all_texts(load(tmp_path))
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in [odd, *TEXTS[:3]]]
    assert odd in all_texts(load(write(tmp_path / "rows" / "a.jsonl", "\n\n".join(rows))))


def test_text_field_and_encoding_are_followed(tmp_path: Path) -> None:
    assert sorted(all_texts(load(write(tmp_path / "a.jsonl", jsonl(TEXTS, "body")), text_field="body"))) == sorted(
        TEXTS
    )
    for index in range(5):
        write(tmp_path / "old" / f"{index}.txt", f"fiancé {index}".encode("latin-1"))
        write(tmp_path / "wide" / f"{index}.txt", f"fiancé {index}".encode("utf-16"))
    wanted = [f"fiancé {index}" for index in range(5)]
    assert sorted(all_texts(load(tmp_path / "old", encoding="latin-1"))) == wanted
    assert sorted(all_texts(load(tmp_path / "wide", encoding="utf-16"))) == wanted


SPLIT_LAYOUTS = {
    "folders": ("train/a.txt", "train/b.txt.gz", "valid/c.txt", "test/d.txt"),
    "files": ("train-00000-of-00002.jsonl.gz", "train-00001-of-00002.jsonl.gz", "valid.jsonl.gz", "test.jsonl"),
    "numbered": ("train_0.txt", "train_1.txt", "validation.txt", "test.txt.gz"),
}


@pytest.mark.parametrize("layout", SPLIT_LAYOUTS)
def test_splits_of_a_folder_are_kept(tmp_path: Path, layout: str) -> None:
    for index, name in enumerate(SPLIT_LAYOUTS[layout]):
        write(tmp_path / name, jsonl([TEXTS[index]]) if "jsonl" in name else TEXTS[index])
    write(tmp_path / "README.md", "about the corpus")
    assert texts_of(load(tmp_path)) == {"train": TEXTS[:2], "valid": [TEXTS[2]], "test": [TEXTS[3]]}


def test_a_missing_split_is_taken_from_training(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", jsonl(TEXTS[:30]))
    write(tmp_path / "test.jsonl", jsonl(TEXTS[30:]))
    splits = texts_of(load(tmp_path, valid_fraction=0.1))
    assert splits["test"] == TEXTS[30:]
    assert len(splits["valid"]) == 3
    assert sorted(splits["valid"] + splits["train"]) == sorted(TEXTS[:30])


@pytest.mark.parametrize(
    "names",
    [
        ["train.py", "test_model.py", "test.py", "valid.py", "testing.txt"],
        ["train.txt", "trains.txt", "boats.txt", "planes.txt", "d/test.txt"],
        ["test.txt", "valid.txt", "a.txt", "b.txt", "c.txt"],
    ],
    ids=["code", "no held-out text", "no training text"],
)
def test_names_that_only_look_like_splits(tmp_path: Path, names: list[str]) -> None:
    for index, name in enumerate(names):
        write(tmp_path / name, TEXTS[index])
    corpus = load(tmp_path)
    assert sorted(all_texts(corpus)) == sorted(TEXTS[:5])
    assert len(corpus.valid) == len(corpus.test) == 1


def test_a_split_is_a_folder_or_a_file_of_a_known_kind(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", jsonl(TEXTS))
    write(tmp_path / "train.txt", "text")
    write(tmp_path / "test", "#!/bin/sh")
    assert sorted(all_texts(load(tmp_path))) == sorted([*TEXTS, "text"])


def test_split_follows_content_and_seed_only(tmp_path: Path) -> None:
    first = texts_of(load(write(tmp_path / "a.jsonl", jsonl(TEXTS)), valid_fraction=0.2, test_fraction=0.1))
    again = texts_of(load(write(tmp_path / "b.jsonl", jsonl(TEXTS[::-1])), valid_fraction=0.2, test_fraction=0.1))
    assert {split: len(texts) for split, texts in first.items()} == {"train": 28, "valid": 8, "test": 4}
    assert {split: sorted(texts) for split, texts in first.items()} == {
        split: sorted(texts) for split, texts in again.items()
    }
    other = texts_of(load(tmp_path / "a.jsonl", valid_fraction=0.2, test_fraction=0.1, seed=1))
    assert set(other["test"]) != set(first["test"])


def test_duplicates_leave_one_copy_and_test_wins(tmp_path: Path) -> None:
    a, b, c, d, e, f = TEXTS[:6]
    write(tmp_path / "train.jsonl", jsonl([a, b, c, d, a, e]))
    write(tmp_path / "valid.jsonl", jsonl([b, c, f]))
    write(tmp_path / "test.jsonl", jsonl([c, c]))
    assert texts_of(load(tmp_path)) == {"train": [a, d, e], "valid": [b, f], "test": [c]}


def test_no_text_is_in_two_splits(tmp_path: Path) -> None:
    found = all_texts(load(write(tmp_path / "a.jsonl", jsonl(TEXTS * 3)), valid_fraction=0.3, test_fraction=0.3))
    assert len(found) == len(set(found)) == len(TEXTS)


def test_several_sources_keep_their_splits_and_share_no_text(tmp_path: Path) -> None:
    for split, texts in (("train", TEXTS[:20]), ("valid", TEXTS[20:22]), ("test", TEXTS[22:24])):
        write(tmp_path / "divided" / f"{split}.jsonl", jsonl(texts))
    # 23 is in the test split of the one and would be trained on in the other.
    write(tmp_path / "whole.jsonl", jsonl([*TEXTS[23:], TEXTS[3]]))
    sources = (str(tmp_path / "divided"), str(tmp_path / "whole.jsonl"))
    both, config = load_corpus(CorpusConfig(sources=sources)), CorpusConfig(sources=sources)
    assert both.name == "divided + whole.jsonl" and config.label == " + ".join(sources)
    texts = texts_of(both)
    assert sorted(all_texts(both)) == sorted(TEXTS)
    assert texts["train"][:20] == TEXTS[:20] and set(texts["train"][20:]) < set(TEXTS[24:])
    assert texts["valid"][:2] == TEXTS[20:22] and len(texts["valid"]) == 3 and texts["test"][:2] == TEXTS[22:24]
    turned = load_corpus(CorpusConfig(sources=sources[::-1]))
    assert sorted(all_texts(turned)) == sorted(TEXTS) and TEXTS[23] in texts_of(turned)["test"]
    assert [one.text for one in read_documents(config)] == [*TEXTS[22:], TEXTS[3]]


@pytest.mark.parametrize("documents", [1, 2])
def test_few_documents_are_cut_at_line_ends(tmp_path: Path, documents: int) -> None:
    wholes = ["".join(f"{name}{line}\n" for line in range(100)) for name in "xy"[:documents]]
    for index, whole in enumerate(wholes):
        write(tmp_path / f"{index}.txt", whole)
    splits = texts_of(load(tmp_path, valid_fraction=0.1, test_fraction=0.2))
    assert ["".join(parts) for parts in zip(*splits.values(), strict=True)] == wholes
    assert all(text.endswith("\n") for texts in splits.values() for text in texts)
    sizes = {split: len("".join(texts)) / len("".join(wholes)) for split, texts in splits.items()}
    assert sizes == pytest.approx({"train": 0.7, "valid": 0.1, "test": 0.2}, abs=0.02)


def test_max_bytes_limits_training_text_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl(TEXTS))
    whole, limited = load(path), load(path, max_bytes=500)
    size = sum(len(document.text.encode()) for document in limited.train)
    assert 496 < size <= 500  # the last document is cut between characters, of 4 bytes at most
    assert (limited.valid, limited.test) == (whole.valid, whole.test)
    names = [document.name for document in whole.train]
    kept = [document.name for document in limited.train]
    assert kept == [name for name in names if name in kept]
    assert load(path, max_bytes=10**9).fingerprint == whole.fingerprint != limited.fingerprint


def test_fingerprint_follows_texts_and_splits_not_places(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl(TEXTS))
    same = load(write(tmp_path / "elsewhere" / "b.jsonl.gz", jsonl(TEXTS))).fingerprint
    changes = [
        load(path, seed=3).fingerprint,
        load(path, valid_fraction=0.2).fingerprint,
        load(write(tmp_path / "c.jsonl", jsonl([*TEXTS[:-1], TEXTS[-1] + "!"]))).fingerprint,
    ]
    fingerprint = load(path).fingerprint
    assert fingerprint == same == load(path).fingerprint
    assert len({fingerprint, *changes}) == 4


def test_stdlib_is_the_library_of_the_running_python() -> None:
    corpus = load("stdlib")
    names = [document.name for documents in corpus.splits().values() for document in documents]
    root = Path(sysconfig.get_path("stdlib"))
    source = {document.name: document.text for documents in corpus.splits().values() for document in documents}
    assert source["argparse.py"] == (root / "argparse.py").read_bytes().decode()
    assert "asyncio/tasks.py" in names
    assert not [name for name in names if {"site-packages", "test", "tests", "idlelib"} & set(name.split("/"))]
    assert sum(len(text.encode()) for text in source.values()) > 3_000_000
    assert min(len(corpus.valid), len(corpus.test)) > 10
    assert [document.name.split("/") for document in corpus.train] == sorted(d.name.split("/") for d in corpus.train)


def test_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "shared" / "data" / "words" / "a.jsonl", jsonl(TEXTS))
    (tmp_path / "project").mkdir()
    monkeypatch.delenv("KEEL_DATA", raising=False)
    monkeypatch.chdir(tmp_path / "project")
    assert load("data:words").name == "words"
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "shared" / "data"))
    with pytest.raises(KeelError, match=r"has no corpus 'wrods'; did you mean 'words'\?"):
        load("data:wrods")
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(KeelError, match=r"no data root .*nowhere.*KEEL_DATA"):
        load("data:words")


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[str, str | None]] = []

    def load_dataset(path: str, name: str | None = None, streaming: bool = False) -> datasets.DatasetDict:
        assert not streaming, "everything is asked for"
        asked.append((path, name))
        if path == "someone/missing":
            raise FileNotFoundError("Dataset 'someone/missing' doesn't exist on the Hub\nmore")
        lines = ["", " = One = \n", "", " a \n", " = = Part = = \n", " b \n", " = Two = \n", " c \n", " = Three = \n d"]
        splits = {
            "train": lines[:-1] if path.endswith("wikitext") else TEXTS[:10],
            "validation": TEXTS[10:12],
            "test": [*TEXTS[12:14], None],
        }
        if path == "someone/parts":
            del splits["train"]
        return datasets.DatasetDict({key: datasets.Dataset.from_dict({"text": rows}) for key, rows in splits.items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = load("hub:someone/stories:small")
    assert asked == [("someone/stories", "small")]
    assert texts_of(corpus) == {"train": TEXTS[:10], "valid": TEXTS[10:12], "test": TEXTS[12:14]}
    articles = texts_of(load("hub:someone/wikitext"))["train"]
    assert articles == [" = One = \n a \n = = Part = = \n b \n", " = Two = \n c \n"]
    with pytest.raises(KeelError, match=r"hub:someone/missing cannot be loaded \(Dataset .* on the Hub\);"):
        load("hub:someone/missing")
    with pytest.raises(KeelError, match=r"no train split \(found: valid, test\)"):
        load("hub:someone/parts")
    with pytest.raises(KeelError, match=r"no field 'txt'; .*did you mean 'text'"):
        load("hub:someone/stories", text_field="txt")


def test_of_a_hub_corpus_no_more_is_fetched_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    fetched: list[int] = []

    def endless() -> Iterator[dict[str, str]]:
        for index in itertools.count():
            fetched.append(index)
            yield {"text": f"{index:>10}" + "ä" * 45}

    def load_dataset(path: str, name: str | None = None, streaming: bool = False) -> Any:
        assert streaming
        found = {"train": datasets.IterableDataset.from_generator(endless)}
        if path == "someone/split":
            found["test"] = datasets.Dataset.from_dict({"text": TEXTS[:3]}).to_iterable_dataset()
        return datasets.IterableDatasetDict(found)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = load("hub:someone/endless", max_bytes=9_000, valid_fraction=0.05, test_fraction=0.05)
    assert len(fetched) < 110, "a hundred texts of 100 bytes, and what is read ahead"
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (90, 5, 5)
    assert [one.text for one in load("hub:someone/split", max_bytes=500).test] == TEXTS[:3]
    with pytest.raises(KeelError, match="no field 'txt'"):
        load("hub:someone/endless", max_bytes=500, text_field="txt")


def test_a_connection_that_breaks_while_rows_come_in_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def broken() -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise ConnectionError("reset by peer")

    found = datasets.IterableDatasetDict({"train": datasets.IterableDataset.from_generator(broken)})
    monkeypatch.setattr(datasets, "load_dataset", lambda *about, **more: found)
    with pytest.raises(KeelError, match="hub:someone/broken cannot be loaded"):
        load("hub:someone/broken", max_bytes=500)


PARAGRAPHS = """\
   The story of the town begins with a bridge of stone, which is older than the church beside it by some four hundred years.
   Length 40 m
   Width 4 m

   A second paragraph says who built it and when and why: the salt of the mines had to cross a river that took carts and \
horses with it each spring, and in some years a third time in the autumn, when the rain had been long in the hills above the town.
   By 1301 it was done, and
   paid for by a tax on salt that was never taken back, whatever the kings who came and went had promised to those who asked.
"""
VERSES = "\n".join(
    f"and in the {index}th year the king, who had not slept" + " well" * (index % 7) for index in range(42)
)


def wrapped(text: str, width: int) -> str:
    """Break lines as a printer does: at ``width``, with the paragraph's indent."""
    lines = [
        textwrap.wrap(line.strip(), width, subsequent_indent="   ", initial_indent="   ") or [""]
        for line in text.split("\n")
    ]
    return "\n".join(line for part in lines for line in part)


@pytest.mark.parametrize("width", [49, 60, 72])
def test_lines_that_were_broken_for_want_of_room_are_joined(tmp_path: Path, width: int) -> None:
    text = wrapped(PARAGRAPHS * 8, width)
    found = line_width(text)
    assert found is not None and width - 6 <= found <= width
    unwrapped = unwrap_lines(text).split("\n")
    whole = PARAGRAPHS.split("\n")[0].strip()
    assert sum(line.strip() == whole for line in unwrapped) == 8
    # A line on its own that begins in lower case is the rest of one; the last lines of two paragraphs end on purpose.
    left = [line for line in unwrapped if line.strip()[:1].islower() and not line.strip().startswith("paid")]
    assert len(left) <= 8 and {"   Length 40 m", "   Width 4 m", "   By 1301 it was done, and"} <= set(unwrapped)
    for other in (PARAGRAPHS, VERSES, PARAGRAPHS * 20, "", "one\ntwo"):
        assert line_width(other) is None and unwrap_lines(other) == other
    texts = [text.replace("town", f"town{index}") for index in range(5)]
    path = write(tmp_path / "a.jsonl", jsonl(texts))
    assert not any(
        "a bridge of stone, which is older than" in text for part in texts_of(load(path)).values() for text in part
    )
    assert all(
        "a bridge of stone, which is older than" in text
        for part in texts_of(load(path, unwrap=True)).values()
        for text in part
    )
    assert load(path).fingerprint != load(path, unwrap=True).fingerprint


def test_the_rows_of_a_wide_table_stay() -> None:
    rows = [
        f"   Population 190{year} 1,204 men 1,190 women 388 children, and in 1911 no more than half of them all"
        for year in "123"
    ]
    text = "\n".join([wrapped(PARAGRAPHS * 8, 60), *rows])
    assert unwrap_lines(text).split("\n")[-3:] == rows


def test_wikitext_lines_are_joined_without_loss() -> None:
    lines = ["", " lead \n", " = A = \n", " x = y = z \n", " = = B = = \n", " = = = C = = = \n", " = D e = \n", " \n"]
    articles = join_wikitext(Document(f"l{index}", line) for index, line in enumerate(lines))
    assert [article.name for article in articles] == ["l0", "l2", "l6"]
    assert "".join(article.text for article in articles) == "".join(lines)


PARQUET = parquet(TEXTS)
BAD_FILES: dict[str, tuple[str, str | bytes, str]] = {
    "empty file": ("a.txt", "", r"a\.txt is empty"),
    "white space": ("a.txt", " \n\t\n", r"is empty: no document with text"),
    "no rows": ("a.jsonl", "\n\n", r"is empty"),
    "binary": ("a.txt", b"GIF89a\x01\0\xff", r"a\.txt is binary: a NUL byte at byte offset 7"),
    "binary, valid UTF-8": ("a.txt", "naïve\0", r"a\.txt is binary: a NUL byte at byte offset 6"),
    "latin-1": (
        "a.txt",
        "naïve café".encode("latin-1"),
        r"a\.txt is not utf-8: byte 0xef at byte offset 2;.*`encoding`",
    ),
    "latin-1, gz": ("a.txt.gz", "café".encode("latin-1"), r"a\.txt\.gz is not utf-8: byte 0xe9 at byte offset 3"),
    "unknown suffix": ("a.docx", "text", r"unknown suffix '\.docx'; expected \.txt, \.md, \.py, \.jsonl, \.parquet"),
    "no suffix": ("a", "text", r"unknown suffix ''"),
    "too short": ("a.txt", "one line\n", r"too short: 9 characters in 1 document\(s\)"),
    "repeats": ("a.txt", "same\n" * 3, r"too short"),
    "not JSON": ("a.jsonl", '{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
    "JSON list": ("a.jsonl", "[1]\n", r"line 1: expected a JSON object"),
    "missing field": ("a.jsonl", '{"txt": "a"}\n', r"line 1: no field 'text'; set `text_field`: did you mean 'txt'"),
    "field of numbers": ("a.jsonl", '{"text": 3}\n', r"field 'text': expected text, found int"),
    "half a surrogate": ("a.jsonl", '{"text": "ab\\ud83d"}\n', r"a\.jsonl:1 has half a surrogate pair at character 2"),
    "not parquet": ("a.parquet", "PAR1 but not really", r"a\.parquet is not readable parquet"),
    "cut parquet": ("a.parquet", PARQUET[: len(PARQUET) // 2], r"a\.parquet is not readable parquet"),
    "parquet field": ("a.parquet", parquet(TEXTS, "content"), r"no field 'text'; .*did you mean 'content'"),
    "parquet numbers": ("a.parquet", parquet([1, 2]), r"row 1: expected text, found int"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_gets_one_clear_line(tmp_path: Path, case: str) -> None:
    name, content, message = BAD_FILES[case]
    with pytest.raises(KeelError, match=message) as caught:
        load(write(tmp_path / name, content))
    assert "\n" not in str(caught.value)
    if name.endswith((".txt", ".jsonl", ".gz")) and case not in ("white space", "no rows", "too short", "repeats"):
        write(tmp_path / "fine.txt", "text")
        if case != "empty file":
            with pytest.raises(KeelError, match=message):
                load(tmp_path)


@pytest.mark.parametrize("data", [b"plain text", gzip.compress(b"text " * 100, mtime=0)[:-9]], ids=["plain", "cut off"])
def test_bad_gzip(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt.gz").write_bytes(data)
    with pytest.raises(KeelError, match=r"a\.txt\.gz is not a whole gzip file"):
        load(tmp_path / "a.txt.gz")


def test_bad_places(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"nowhere does not exist; give a file, a folder, data:NAME"):
        load(tmp_path / "nowhere")
    with pytest.raises(KeelError, match=r"no file that can be read \(found: nothing\)"):
        load(tmp_path)
    write(tmp_path / "wiki.test.tokens", "text")
    with pytest.raises(KeelError, match=r"no file that can be read \(found: \.tokens\); expected \.txt"):
        load(tmp_path)


def test_split_that_only_repeats_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", jsonl(TEXTS[:2]))
    write(tmp_path / "valid.jsonl", jsonl(TEXTS[2:3]))
    write(tmp_path / "test.jsonl", jsonl(TEXTS[:3]))
    with pytest.raises(KeelError, match=r"no text left for the train split"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": ""}, "source is empty"),
        ({"source": "", "sources": ("stdlib", "")}, "source is empty"),
        ({"source": "", "sources": ("stdlib",)}, "at least two different sources"),
        ({"source": "", "sources": ("stdlib", "stdlib")}, "at least two different sources"),
        ({"sources": ("a", "b")}, r"sources \['a', 'b'\] with source 'stdlib'; give source alone"),
        ({"valid_fraction": 0.0}, "valid_fraction 0.0 and test_fraction 0.05 must each be above 0"),
        ({"valid_fraction": 0.5, "test_fraction": 0.5}, "together below 1"),
        ({"max_bytes": 0}, "max_bytes is 0, expected at least 1"),
        ({"encoding": "utf-9"}, "unknown encoding 'utf-9'"),
    ],
)
def test_bad_config(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        CorpusConfig(**{"source": "stdlib", **fields})
