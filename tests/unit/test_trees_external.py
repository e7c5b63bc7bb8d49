"""Stanza's and benepar's trees, on recorded answers of theirs; a corpus parsed through a local Ray."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tree_support"))

import tree_cases as cases  # found through the line above

from keel.errors import KeelError
from keel.trees import BuildPlan, TreeCache, build, open_source
from keel.trees.external import as_nltk, placed

nltk = pytest.importorskip("nltk.tree", reason="the extra keel[trees] is not installed")

TEXT = "He doesn't know. Nobody does!"


def _node(label: str, *children: Any) -> Any:
    return SimpleNamespace(label=label, children=children)


def _word(tag: str, word: str) -> Any:
    return _node(tag, _node(word))


# What stanza 1.x gives for the text: "doesn't" is one token of two words, and their characters are said where it knows them.
STANZA = [
    SimpleNamespace(
        tokens=[
            SimpleNamespace(start_char=0, end_char=2, words=[SimpleNamespace(start_char=0, end_char=2)]),
            SimpleNamespace(
                start_char=3,
                end_char=10,
                words=[SimpleNamespace(start_char=3, end_char=7), SimpleNamespace(start_char=None, end_char=None)],
            ),
            SimpleNamespace(start_char=11, end_char=15, words=[SimpleNamespace(start_char=11, end_char=15)]),
            SimpleNamespace(start_char=15, end_char=16, words=[SimpleNamespace(start_char=15, end_char=16)]),
        ],
        constituency=_node(
            "ROOT",
            _node(
                "S",
                _node("NP-SBJ", _word("PRP", "He")),
                _node("VP", _word("VBZ", "does"), _word("RB", "n't"), _node("VP", _word("VB", "know"))),
                _word(".", "."),
            ),
        ),
    )
]


class _Stanza:
    __version__ = "1.9.2"

    def Pipeline(self, language: str, **options: Any) -> Any:
        if language != "en":
            raise FileNotFoundError("no models")
        assert options["download_method"] is None
        return lambda text: SimpleNamespace(sentences=STANZA)


def test_stanza(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stanza", _Stanza())
    source = open_source("stanza:en")
    (tree,) = source.parse(TEXT)
    assert source.version == "stanza 1.9.2" and source.parse(" \n") == []
    found = [(TEXT[span.start : span.end], span.depth, span.label) for span in tree.spans]
    assert found[0] == ("He doesn't know.", 0, "S")  # the root of its own is taken away
    assert ("He", 1, "NP") in found and ("doesn't know", 1, "VP") in found and ("n't", 2, "RB") in found
    with pytest.raises(KeelError, match=r"stanza:xx: no models; get its models with stanza.download\('xx'\)"):
        open_source("stanza:xx")


def test_a_word_that_has_no_character_of_its_own_is_in_no_tree() -> None:
    """As the second of Portuguese "à", which is a + a."""
    tree = nltk.Tree.fromstring("(ROOT (S (VP (VB Vai) (PP (IN a) (NP (DT a) (NN casa)))) (. .)))")
    found = placed(tree, [(0, 3), (4, 5), (5, 5), (6, 10), (10, 11)])
    text = "Vai à casa."
    assert found is not None
    words = [text[span.start : span.end] for span, leaf in zip(found.spans, found.leaves(), strict=True) if leaf]
    assert words == ["Vai", "à", "casa", "."] and "à casa" in [text[span.start : span.end] for span in found.spans]
    assert placed(nltk.Tree.fromstring("(ROOT (S (X a)))"), [(0, 0)]) is None


class _Benepar:
    __version__ = "0.2.0"

    def InputSentence(self, words: list[str]) -> list[str]:
        return words

    def Parser(self, name: str) -> Any:
        if name != "benepar_en3":
            raise LookupError(f"{name} not found")
        recorded = {
            "He does n't know .": "(TOP (S (NP (PRP He)) (VP (VBZ does) (RB n't) (VP (VB know))) (. .)))",
            "Nobody does !": "(TOP (S (NP (NN Nobody)) (VP (VBZ does)) (. !)))",
        }
        return SimpleNamespace(
            parse_sents=lambda given: (nltk.Tree.fromstring(recorded[" ".join(one)]) for one in given)
        )


def test_benepar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "benepar", _Benepar())
    source = open_source("benepar:benepar_en3")
    first, second = source.parse(TEXT)
    assert [TEXT[s.start : s.end] for s in first.spans][:4] == ["He doesn't know.", "He", "He", "doesn't know"]
    assert TEXT[second.spans[0].start : second.spans[0].end] == "Nobody does!"
    assert source.parse_all([TEXT, "", "Nobody does!"])[2][0].spans[0].start == 0  # type: ignore[attr-defined]
    with pytest.raises(KeelError, match=r"benepar:other: other not found; get it with benepar\.download"):
        open_source("benepar:other")


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stanza", "benepar"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(KeelError, match=rf"needs the package {name}; pip install 'keel\[{name}\]'"):
            open_source(f"{name}:any")


def test_a_tree_of_other_words_is_refused() -> None:
    tree = as_nltk(_node("S", _word("NN", "a"), _word("NN", "b")))
    with pytest.raises(KeelError, match="a tree of 2 words for 1"):
        placed(tree, [(0, 1)])
    assert placed(as_nltk(_word("NN", "a")), [(0, 1)]) is None


class _Ray:
    """What ``made_by_ray`` calls of Ray, in this process: on a machine with a cluster, or without one."""

    def __init__(self, running: bool) -> None:
        self.running, self.joined, self.workers = running, "", 0

    def is_initialized(self) -> bool:
        return bool(self.joined)

    def init(self, address: str, **options: Any) -> None:
        if address == "auto" and not self.running:
            raise ConnectionError("Could not find any running Ray instance")
        if address == "auto" and {"num_cpus", "include_dashboard"} & set(options):
            raise ValueError("When connecting to an existing cluster, num_cpus and num_gpus must not be provided.")
        self.joined = address

    def shutdown(self) -> None:
        self.joined = ""

    # ray.data
    DataContext = SimpleNamespace(get_current=lambda: SimpleNamespace())
    ActorPoolStrategy = staticmethod(lambda size: size)

    def from_items(self, items: list[Any], override_num_blocks: int) -> Any:
        assert self.joined and 0 < override_num_blocks <= len(items)
        self.items = items
        return self

    def map_batches(self, kind: Any, fn_constructor_args: Any, batch_size: int, compute: int) -> Any:
        self.workers, self.actor = compute, kind(*pickle.loads(pickle.dumps(fn_constructor_args)))
        return self

    def iter_batches(self, batch_size: int, batch_format: str) -> Any:
        for begin in range(0, len(self.items), batch_size):
            part = self.items[begin : begin + batch_size]
            yield self.actor({name: np.array([item[name] for item in part]) for name in part[0]})


@pytest.mark.parametrize("running", [True, False])
def test_what_ray_is_asked(running: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = _Ray(running)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", ray)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # the worker is this process
    tokenizer = cases.tokenizer().backend_tokenizer.to_str()
    caches = {name: tmp_path / f"{name}.sqlite" for name in ("local", "ray")}
    items: list[Any] = [("Question: Who has answered?\nAnswer:", f" Number {n}.") for n in range(70)]
    plans = {
        name: BuildPlan(cache=path, source="branching:right", tokenizer=tokenizer, start=0)
        for name, path in caches.items()
    }
    build(items, plans["local"])
    build(items[:9], plans["ray"])
    found = build(items, plans["ray"], workers=3, engine="ray")
    assert (found.parsed, found.known, found.without) == (61, 9, 0) and ray.workers == 3 and not ray.joined
    mine, theirs = (
        TreeCache(path)._connection().execute("SELECT * FROM chunks").fetchall() for path in caches.values()
    )
    assert sorted(mine) == sorted(theirs)


@pytest.mark.skipif("KEEL_SLOW_TESTS" not in os.environ, reason="starts a Ray of two workers; set KEEL_SLOW_TESTS=1")
def test_a_corpus_through_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra keel[ray] is not installed")
    tokenizer = cases.tokenizer().backend_tokenizer.to_str()
    texts = [f"The old man number {n} has answered. Nobody else did." for n in range(150)]
    caches = {name: tmp_path / f"{name}.sqlite" for name in ("local", "ray")}
    plans = {
        name: BuildPlan(cache=path, source="branching:right", tokenizer=tokenizer) for name, path in caches.items()
    }
    local = build(texts, plans["local"])
    build(texts[:20], plans["ray"])
    ray = build(texts, plans["ray"], workers=2, engine="ray")
    assert (local.parsed, ray.parsed, ray.known, ray.without) == (150, 130, 20, 0)
    mine, theirs = (
        TreeCache(path)._connection().execute("SELECT * FROM chunks").fetchall() for path in caches.values()
    )
    assert sorted(mine) == sorted(theirs)
