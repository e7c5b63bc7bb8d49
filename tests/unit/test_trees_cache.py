"""The cache of trees: what is put in comes out, or nothing does, whoever was killed or wrote beside."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1] / "tree_support"))

import tree_cases as cases  # found through the line above

from keel.data.questions import Question, prompt_of
from keel.errors import KeelError
from keel.trees import BuildPlan, Chunks, Span, Tree, TreeCache, build, fixed_chunks, sources
from keel.trees.build import BuildCounts, Builder
from keel.trees.cache import Making, decode, encode
from keel.trees.chunks import ARRAYS, Scope
from keel.trees.fields import FieldReader
from keel.trees.lookup import open_lookup

MAKING = Making(tokenizer="t", source="s", version="1", scope="prefix", max_chunks=64)


def _same(found: Chunks | None, expected: Chunks) -> bool:
    return found is not None and found.scope == expected.scope and all(
        np.array_equal(getattr(found, name), getattr(expected, name)) for name in ARRAYS
    )  # fmt: skip


def _put(cache: TreeCache, ids: list[int], chunks: Chunks, making: Making = MAKING) -> None:
    key = making.key(ids)
    cache.put(making, [(key, encode(key, chunks))])


@pytest.mark.parametrize("chunks", [fixed_chunks(9, 2), fixed_chunks(0, 2), fixed_chunks(3, 2).shifted(70_000)])
def test_what_is_put_comes_back(tmp_path: Path, chunks: Chunks) -> None:
    cache = TreeCache(tmp_path / "deep" / "trees.sqlite")
    ids = [5, 70_000, 3]
    assert cache.get(MAKING, ids) is None
    _put(cache, ids, chunks)
    for reader in (cache, TreeCache(cache.path, read_only=True), copy.deepcopy(cache)):
        assert _same(reader.get(MAKING, ids), chunks) and len(reader) == 1 and reader.makings() == [MAKING]
        assert reader.get(MAKING, ids[:2]) is None
    cache.close()
    assert _same(cache.get(MAKING, ids), chunks)


@pytest.mark.parametrize("field", ["tokenizer", "source", "version", "max_chunks", "scope"])
def test_another_making_is_another_row(tmp_path: Path, field: str) -> None:
    cache = TreeCache(tmp_path / "trees.sqlite")
    _put(cache, [1, 2], fixed_chunks(2, 2))
    other = replace(MAKING, **{field: {"max_chunks": 1, "scope": "sentence"}.get(field, "other")})
    assert cache.get(other, [1, 2]) is None


def test_every_flipped_byte_and_every_cut_is_noticed() -> None:
    key, other = MAKING.key([1]), MAKING.key([2])
    value = encode(key, fixed_chunks(5, 2))
    assert _same(decode(key, value, "prefix"), fixed_chunks(5, 2)) and decode(other, value, "prefix") is None
    for place in range(len(value)):
        changed = bytearray(value)
        changed[place] ^= 1
        assert decode(key, bytes(changed), "prefix") is None
        assert decode(key, value[:place], "prefix") is None


def test_a_file_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database at all" * 300)
    for path in (tmp_path / "text", tmp_path):  # of the user's own: nobody is told to delete it
        with pytest.raises(KeelError, match="is no cache of trees; name another file"):
            TreeCache(path)
    with pytest.raises(KeelError, match="keel trees build"):
        TreeCache(tmp_path / "missing", read_only=True)
    with pytest.raises(KeelError, match="cannot be used"):
        TreeCache(tmp_path / "text" / "below")
    (tmp_path / "damaged").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(KeelError, match="delete it and build it again"):
        TreeCache(tmp_path / "damaged")


def test_a_reader_leaves_a_folder_as_it_is_that_it_may_not_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TreeCache(tmp_path / "trees.sqlite")
    _put(cache, [1], fixed_chunks(3, 2))
    cache.close()
    assert [path.name for path in tmp_path.iterdir()] == ["trees.sqlite"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    reader = TreeCache(cache.path, read_only=True)
    assert _same(reader.get(MAKING, [1]), fixed_chunks(3, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["trees.sqlite"]


def test_a_new_file_that_another_builder_has_locked_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "trees.sqlite"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(0.3, other.execute, ("COMMIT",))
    timer.start()
    begin = time.monotonic()
    _put(TreeCache(path), [1], fixed_chunks(1, 2))
    assert time.monotonic() - begin > 0.2
    timer.join()
    other.close()


def test_what_is_no_lock_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trees.sqlite"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE other (x)")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda where, **how: connect(where.replace("mode=rwc", "mode=ro"), **how))
    begin = time.monotonic()
    with pytest.raises(KeelError, match=r"readonly database\); see to that"):
        TreeCache(path)
    assert time.monotonic() - begin < 30  # it would be 60


def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    cache = TreeCache(tmp_path / "trees.sqlite")
    connection = cache._connection()
    connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0] + 1}")
    rows = [(MAKING.key([n]), os.urandom(5000)) for n in range(20)]
    with pytest.raises(KeelError, match=r"disk is full\); see to that and start again"):
        cache.put(MAKING, rows)
    connection.execute("PRAGMA max_page_count = 100000")
    cache.put(MAKING, rows)
    assert len(cache) == 20


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = TreeCache(tmp_path / "trees.sqlite")

    def rows() -> Any:
        yield b"k" * 16, b"value"
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        cache.put(MAKING, rows())
    assert len(cache) == 0 and cache.makings() == []
    _put(cache, [1], fixed_chunks(1, 2))


WRITER = """
import sys
from keel.trees import TreeCache, fixed_chunks
from keel.trees.cache import Making, encode

making = Making(tokenizer="t", source="s", version="1", scope="prefix", max_chunks=64)
cache = TreeCache(sys.argv[1])
print("ready", flush=True)
for batch in range(int(sys.argv[2])):
    keys = [(making.key([batch, row]), row + 2) for row in range(20)]
    cache.put(making, [(key, encode(key, fixed_chunks(length, 2))) for key, length in keys])
    print(batch, flush=True)
"""


def _writer(path: Path, batches: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(batches)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )


def _check_rows(cache: TreeCache, batches: int) -> None:
    for batch in range(batches):
        for row in range(20):
            assert _same(cache.get(MAKING, [batch, row]), fixed_chunks(row + 2, 2))


def test_a_builder_that_is_killed_loses_its_last_batch_at_most(tmp_path: Path) -> None:
    path = tmp_path / "trees.sqlite"
    writer = _writer(path, 1_000_000)
    assert writer.stdout is not None
    written = [
        int(line) for line, _ in zip((line for line in writer.stdout if line != "ready\n"), range(15), strict=False)
    ]
    writer.send_signal(signal.SIGKILL)
    written += [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    cache = TreeCache(path)
    assert written[-1] >= 14 and len(cache) % 20 == 0 and 0 <= len(cache) - 20 * len(written) <= 20
    _check_rows(cache, len(written))
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    _put(cache, [-1], fixed_chunks(3, 2))


def test_two_builders_at_once_and_a_reader_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "trees.sqlite"
    TreeCache(path)
    writers = [_writer(path, 150) for _ in range(2)]
    reader, seen = TreeCache(path, read_only=True), 0
    while any(writer.poll() is None for writer in writers):
        found = [reader.get(MAKING, [batch, 3]) for batch in range(0, 150, 10)]
        assert all(chunks is None or _same(chunks, fixed_chunks(5, 2)) for chunks in found)
        seen = max(seen, sum(chunks is not None for chunks in found))
        time.sleep(0.01)
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(reader) == 3000
    _check_rows(reader, 150)


# -- building -------------------------------------------------------------------------------------------------------------


class FlatSource:
    """One tree over all words; it counts what it is asked, and has none for a text with a question mark."""

    version = "1"
    asked = 0

    def __init__(self, rest: str) -> None:
        self.name = f"flat:{rest}"

    def parse(self, text: str) -> list[Tree]:
        FlatSource.asked += 1
        if "?" in text:
            raise KeelError("no questions")
        words, at = [], 0
        for word in text.split():
            at = text.index(word, at)
            words.append(Span(at, at + len(word), 1, "W"))
            at += len(word)
        return [Tree((Span(words[0].start, words[-1].end, 0, "S"), *words))]


def _plan(folder: Path, **fields: Any) -> BuildPlan:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(500)} | {"?": 999}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return BuildPlan(
        **{"cache": folder / "trees.sqlite", "source": "flat:x", "tokenizer": tokenizer.to_str(), **fields}
    )


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources._KINDS, "flat", FlatSource)
    FlatSource.asked = 0


TEXTS = [f"w{i} w{i + 1} w{i + 2}" for i in range(150)]


@pytest.mark.usefixtures("flat")
def test_a_build_goes_on_where_it_was(tmp_path: Path) -> None:
    plan, seen = _plan(tmp_path), []

    def stop(counts: BuildCounts) -> None:
        seen.append(counts.parsed)
        if counts.parsed >= 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(TEXTS, plan, progress=stop)
    assert seen == [64, 128]
    counts = build([*TEXTS, "w1 ?", "w2 ?"], plan)
    assert counts == BuildCounts(parsed=22, known=128, without=2, reason="no questions") and FlatSource.asked == 152
    builder = Builder(plan)
    for text in TEXTS:
        ids, make = builder.chunks(text)
        assert _same(builder.cache.get(builder.making, ids), make()) and len(make()) == 4
    assert len(open_lookup(f"cache:{plan.cache}", "sentence")([7, 8, 9]) or ()) == 4
    assert open_lookup(f"cache:{plan.cache}", "sentence")([7, 8]) is None


@pytest.mark.usefixtures("flat")
def test_damaged_rows_are_built_anew(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    build(TEXTS, plan)
    connection = sqlite3.connect(plan.cache)
    keys = [row[0] for row in connection.execute("SELECT key FROM chunks ORDER BY key LIMIT 7")]
    for index, key in enumerate(keys):
        wrong = connection.execute("SELECT value FROM chunks WHERE key = ?", (keys[index - 1],)).fetchone()[0]
        connection.execute("UPDATE chunks SET value = ? WHERE key = ?", (wrong if index % 2 else wrong[:9], key))
    connection.commit()
    connection.close()
    lookup = open_lookup(f"cache:{plan.cache}", "sentence")
    assert sum(lookup([i, i + 1, i + 2]) is None for i in range(150)) == 7
    assert build(TEXTS, plan) == BuildCounts(parsed=7, known=143)
    assert all(len(lookup([i, i + 1, i + 2]) or ()) == 4 for i in range(150))


@pytest.mark.usefixtures("flat")
def test_prefix_chunks_are_kept_apart_and_texts_are_cut(tmp_path: Path) -> None:
    plan = _plan(tmp_path, scope="prefix", max_tokens=2)
    build(["w1 w2 w3"], plan)
    chunks = open_lookup(f"cache:{plan.cache}", "prefix")([1, 2])
    assert chunks is not None and chunks.scope == "prefix" and chunks.right.max() == 0
    with pytest.raises(KeelError, match="0 ways of making trees of scope 'sentence'"):
        open_lookup(f"cache:{plan.cache}", "sentence")
    with pytest.raises(KeelError, match="at least one worker"):
        build([], plan, workers=0)


@pytest.mark.usefixtures("flat")
def test_the_tree_of_a_text_that_was_cut_knows_nothing_of_the_rest(tmp_path: Path) -> None:
    """Else the same tokens would have the tree of whichever text was met first."""
    found = []
    for number, texts in enumerate((["w1 w2 w3", "w1 w2"], ["w1 w2", "w1 w2 w3"])):
        plan = _plan(tmp_path, cache=tmp_path / str(number), max_tokens=2)
        assert build(texts, plan).without == 0
        found.append(open_lookup(f"cache:{plan.cache}", "sentence")([1, 2]))
    assert found[0] is not None and found[1] is not None and _same(found[0], found[1])


def test_a_treebank_has_no_trees_of_beginnings(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="and of no sentence's beginnings"):
        _plan(tmp_path, source="bracketed:x.mrg", scope="prefix")
    with pytest.raises(KeelError, match=r"with max_tokens=9: a treebank has trees of whole sentences"):
        _plan(tmp_path, source="bracketed:x.mrg", max_tokens=9)
    with pytest.raises(KeelError, match="at least 1 chunk"):
        _plan(tmp_path, max_chunks=0)


def test_what_is_missing_is_built_as_the_others_were(tmp_path: Path) -> None:
    def said(**fields: Any) -> str:
        cache = TreeCache(tmp_path / "_".join(map(str, fields.values())))
        _put(cache, [1], fixed_chunks(1, 2), replace(MAKING, **fields))
        return open_lookup(f"cache:{cache.path}", "prefix").missing([7, 8])  # type: ignore[attr-defined, no-any-return]

    assert "build it: keel trees build TEXT --source s --tokenizer TOKENIZER --scope prefix --out " in said(source="s")
    for fields in ({"source": "permuted:s"}, {"max_chunks": 16}):
        assert "keel trees build" not in said(**fields) and str(*fields.values()) in said(**fields)


@pytest.mark.parametrize("scope", ["sentence", "prefix"])
def test_a_batch_is_parsed_in_one_call(scope: Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    class Together(FlatSource):
        def parse_all(self, texts: list[str]) -> list[list[Tree]]:
            calls.append(texts)
            return [self.parse(text) for text in texts]

    monkeypatch.setitem(sources._KINDS, "flat", FlatSource)
    alone = _plan(tmp_path, cache=tmp_path / "alone", scope=scope)
    texts = [*TEXTS[:5], TEXTS[0], *TEXTS[5:8]]
    assert build(texts, alone).parsed == 9
    monkeypatch.setitem(sources._KINDS, "flat", Together)
    plan = _plan(tmp_path, scope=scope)
    assert build(texts, plan) == BuildCounts(parsed=9)
    expected = [TEXTS[:8]] if scope == "sentence" else [[text[:2], text[:5], text] for text in texts]
    assert calls == expected
    first, second = (open_lookup(f"cache:{one.cache}", scope) for one in (alone, plan))
    assert all(_same(second([i, i + 1, i + 2]), first([i, i + 1, i + 2]) or fixed_chunks(0, 2)) for i in range(8))
    if scope == "sentence":  # one of the batch without a tree takes none from the others
        calls.clear()
        assert build(["w400 w401", "w402 ?", "w403"], plan) == BuildCounts(parsed=2, without=1, reason="no questions")
        assert len(calls) == 1


@pytest.mark.parametrize("scope", ["sentence", "prefix"])
def test_prompts_are_read_field_by_field(scope: Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources._KINDS, "made", lambda rest: cases.MadeUpSource())
    backend = cases.tokenizer().backend_tokenizer.to_str()
    question = Question(text="Which cats were asleep? None of them.", options=("all cats", "none"), answer=1)
    prompt = prompt_of(question)
    items: list[Any] = [prompt, *((prompt, one) for one in question.continuations())]
    plan = BuildPlan(cache=tmp_path / "trees.sqlite", source="made:x", tokenizer=backend, scope=scope, start=0)
    assert build(items, plan) == BuildCounts(parsed=3) and build(items, plan) == BuildCounts(known=3)
    lookup = open_lookup(f"cache:{plan.cache}", scope)
    reader = FieldReader(backend, 0, source=cases.MadeUpSource(), scope=scope)
    for row in (reader.read(prompt), *(reader.read(prompt, one) for one in question.continuations())):
        assert row.chunks is not None and len(row.chunks) > 10 and _same(lookup(row.ids), row.chunks)
    with pytest.raises(KeelError, match="prompts are not cut off"):
        replace(plan, max_tokens=5)


BUILDER = """
import itertools, signal, sys
from pathlib import Path
from keel.trees import BuildPlan, build

if __name__ == "__main__":
    # A test that runs in the background of a shell inherits that Ctrl-C is ignored; a terminal does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = BuildPlan(cache=Path(sys.argv[1]), source="branching:right", tokenizer=Path(sys.argv[2]).read_text())
    build((f"The {n} cats were asleep." for n in itertools.count()), plan, workers=2, progress=lambda _: print("on", flush=True))
"""


@pytest.mark.parametrize("how", ["kill -9", "Ctrl-C"])
def test_workers_end_with_the_process_that_asked(how: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").write_text(cases.tokenizer().backend_tokenizer.to_str())
    script = tmp_path / "builder.py"
    script.write_text(BUILDER)
    words = [sys.executable, str(script), str(tmp_path / "trees.sqlite"), str(tmp_path / "tokenizer")]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "on\n"
        workers = psutil.Process(parent.pid).children(recursive=True)
        assert len(workers) >= 2
        if how == "kill -9":
            parent.kill()
        else:  # a terminal sends it to all of them
            os.killpg(parent.pid, signal.SIGINT)
        said = parent.communicate(timeout=60)[1]
        _, left = psutil.wait_procs(workers, timeout=30)
        assert not left
        assert "SpawnProcess" not in said and (how == "kill -9" or said.strip().endswith("KeyboardInterrupt"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


def test_several_workers_build_the_same(tmp_path: Path) -> None:
    pytest.importorskip("nltk", reason="the extra keel[trees] is not installed")
    (tmp_path / "trees.mrg").write_text("\n".join(f"(S (NP (N w{i})) (VP (V w{i + 1})))" for i in range(150)))
    texts, source = [f"w{i} w{i + 1}" for i in range(150)], f"bracketed:{tmp_path / 'trees.mrg'}"
    one, two = (_plan(tmp_path, cache=tmp_path / name, source=source) for name in ("one", "two"))
    counts = BuildCounts(parsed=150, without=1, reason="x")
    for plan, workers in ((one, 1), (two, 2)):
        found = build([*texts, "w9 w9"], plan, workers)
        assert replace(found, reason="x") == counts and "no tree for 'w9 w9'" in found.reason
    first, second = (open_lookup(f"cache:{plan.cache}", "sentence") for plan in (one, two))
    assert all(_same(second([i, i + 1]), first([i, i + 1]) or fixed_chunks(0, 2)) for i in range(150))
