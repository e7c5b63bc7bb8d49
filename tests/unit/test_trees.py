"""Trees from their sources, and tokens under them: by hand on small texts, by their oracle on random trees."""

from __future__ import annotations

import gzip
import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from keel.errors import KeelError
from keel.trees import Span, Tree, collate, fixed_chunks, open_source, prefix_chunks, sentence_chunks, token_spans
from keel.trees.align import Nodes, TokenSpans, own_heights, parsed_prefixes, reference_visible, tree_nodes
from keel.trees.chunks import ALWAYS, SHELF, Chunks, joined

TEXT = "the cat sat on the mats"
# (S (NP the cat) (VP sat (PP on (NP the mats)))), the words as leaves
CAT = Tree(
    tuple(
        Span(*span)
        for span in [
            (0, 23, 0, "S"), (0, 7, 1, "NP"), (0, 3, 2, "DT"), (4, 7, 2, "NN"), (8, 23, 1, "VP"), (8, 11, 2, "VBD"),
            (12, 23, 2, "PP"), (12, 14, 3, "IN"), (15, 23, 3, "NP"), (15, 18, 4, "DT"), (19, 23, 4, "NNS"),
        ]
    )
)  # fmt: skip
WORDS = [(0, 3), (4, 7), (8, 11), (12, 14), (15, 18), (19, 23)]


def _spans(offsets: list[tuple[int, int]], text: str = TEXT) -> TokenSpans:
    return token_spans(text, offsets)


def _listed(chunks: Chunks) -> list[tuple[int, int, int]]:
    return [(int(a), int(b), int(h)) for a, b, h in zip(chunks.left, chunks.right, chunks.height, strict=True)]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("right", "(one (two (three (four five))))"),
        ("left", "((((one two) three) four) five)"),
        ("balanced", "(((one two) three) (four five))"),
    ],
)
def test_trees_that_need_no_parser(shape: str, expected: str) -> None:
    text, source = "one two three four five", open_source(f"branching:{shape}")

    def written(spans: tuple[Span, ...]) -> str:
        inner = [i for i, span in enumerate(spans) if span.depth == spans[0].depth + 1]
        parts = [written(spans[a:b]) for a, b in itertools.pairwise([*inner, len(spans)])]
        return f"({' '.join(parts)})" if parts else text[spans[0].start : spans[0].end]

    (found,) = source.parse(text)
    assert written(found.spans) == expected
    first, second = source.parse("One, two. Six")
    assert len(first.spans) == 7 and second.spans == (Span(10, 13, 0, ""),)


def test_a_shape_that_there_is_not_is_told() -> None:
    with pytest.raises(KeelError, match="branching:rigth: no such shape; did you mean 'right'"):
        open_source("branching:rigth")


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (Span(0, 3, 1, "S"),),
        (Span(0, 0, 0, "S"),),
        (Span(0, 3, 0, "S"), Span(0, 3, 0, "S")),
        (Span(0, 3, 0, "S"), Span(0, 1, 2, "A")),
        (Span(0, 3, 0, "S"), Span(0, 4, 1, "A")),
        (Span(0, 3, 0, "S"), Span(0, 2, 1, "A"), Span(1, 3, 1, "B")),
    ],
)
def test_spans_that_are_no_tree_are_refused(spans: tuple[Span, ...]) -> None:
    with pytest.raises(KeelError, match="tree"):
        Tree(spans)


def test_a_shifted_tree_lies_further_on() -> None:
    assert [span.start for span in CAT.shifted(5).spans] == [span.start + 5 for span in CAT.spans]
    assert sum(CAT.leaves()) == 6


# -- sources ------------------------------------------------------------------------------------------------------------

BRACKETS = """( (S (NP-SBJ-1 (DT The) (NNP Co.)) (VP (VBD said) (`` ``) (S (NP (-NONE- *-1)) (VP (VB no)))) ('' '') (. .)) )

((S (NP=2 (-LRB- -LRB-) (NN tax) (-RRB- -RRB-)) (VP (VBZ 1\\/2))))
(TOP (FRAG (NP (-NONE- *))))"""


def _bracketed(folder: Path, zipped: bool = False) -> Any:
    pytest.importorskip("nltk", reason="the extra keel[trees] is not installed")
    path = folder / "trees.mrg"
    raw = BRACKETS.encode()
    path.write_bytes(gzip.compress(raw) if zipped else raw)
    return open_source(f"bracketed:{path}")


@pytest.mark.parametrize("zipped", [False, True])
def test_bracketed_trees_are_cleaned_and_found_by_their_words(tmp_path: Path, zipped: bool) -> None:
    source = _bracketed(tmp_path, zipped)
    texts = [text for text, _ in source.sentences()]
    assert texts == ["The Co. said `` no '' .", "( tax ) 1/2"]
    running = 'The Co. said "no".\n\n(tax) 1/2\n'
    first, second = source.parse(running)
    assert [(running[s.start : s.end], s.depth, s.label) for s in first.spans] == [
        ('The Co. said "no".', 0, "S"), ("The Co.", 1, "NP"), ("The", 2, "DT"), ("Co.", 2, "NNP"), ('said "no', 1, "VP"),
        ("said", 2, "VBD"), ('"', 2, "``"), ("no", 2, "S"), ("no", 3, "VP"), ("no", 4, "VB"), ('"', 1, "''"), (".", 1, "."),
    ]  # fmt: skip
    assert [running[s.start : s.end] for s in second.spans] == ["(tax) 1/2", "(tax)", "(", "tax", ")", "1/2", "1/2"]
    with pytest.raises(KeelError, match="no tree for 'The Co'"):
        source.parse("The Co")


def test_broken_brackets_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("nltk", reason="the extra keel[trees] is not installed")
    (tmp_path / "bad.mrg").write_text("((S (NP a)")
    for name in ("bad.mrg", "missing.mrg"):
        with pytest.raises(KeelError, match=name):
            open_source(f"bracketed:{tmp_path / name}")


@pytest.mark.parametrize(
    ("language", "text"), [("python", "def f(x):\n    # é\n    return 'ä' + x\n"), ("json", '{"ключ": [1, 2]}')]
)
def test_code_has_trees(language: str, text: str) -> None:
    pytest.importorskip("tree_sitter", reason="the extra keel[trees] is not installed")
    pytest.importorskip(f"tree_sitter_{language}", reason="the extra keel[trees] is not installed")
    source = open_source(f"treesitter:{language}")
    (tree,) = source.parse(text)
    pieces = {(span.label, text[span.start : span.end]) for span in tree.spans}
    wanted = {
        "python": {("function_definition", text.strip()), ("identifier", "f"), ("string", "'ä'"), ("comment", "# é")},
        "json": {("document", text), ("array", "[1, 2]"), ("string", '"ключ"'), ("number", "2"), ("{", "{")},
    }
    assert wanted[language] <= pieces
    assert source.parse(" \n") == []
    assert source.parse("(((") or source.parse("{{{")


def test_any_grammar_that_is_installed_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tree_sitter", reason="the extra keel[trees] is not installed")
    json_grammar = pytest.importorskip("tree_sitter_json", reason="the extra keel[trees] is not installed")
    for name, maker in (("mine", "language"), ("two_dialects", "language_two_dialects"), ("empty", "other")):
        package = SimpleNamespace(**{maker: json_grammar.language})
        monkeypatch.setitem(sys.modules, f"tree_sitter_{name}", package)
    for name in ("mine", "two_dialects"):
        source = open_source(f"treesitter:{name}")
        assert source.parse("[1]")[0].spans[0].label == "document" and "unknown version" in source.version
    message = (
        r"treesitter:cobol: needs the package tree-sitter-cobol, .* pip install tree-sitter-cobol, .*valid: .*json"
    )
    with pytest.raises(KeelError, match=message):
        open_source("treesitter:cobol")
    for name in ("empty", "no-language"):
        with pytest.raises(KeelError, match=f"the package tree-sitter-{name} has no grammar"):
            open_source(f"treesitter:{name}")


@pytest.mark.parametrize("name", ["", "bracketed", "bracketed:", "benepar_en:3"])
def test_an_unknown_source_names_the_known_ones(name: str) -> None:
    with pytest.raises(KeelError, match="bracketed:…"):
        open_source(name)


# -- tokens under trees ---------------------------------------------------------------------------------------------------


def test_heights_are_those_of_the_paper() -> None:
    chunks = sentence_chunks([CAT], _spans(WORDS))
    assert _listed(chunks) == [
        (4, 4, 0), (5, 5, 0), (3, 3, 1), (4, 5, 1), (0, 0, 2), (1, 1, 2), (2, 2, 2), (3, 5, 2), (0, 1, 3), (2, 5, 3), (0, 5, 4),
    ]  # fmt: skip
    assert (chunks.first == chunks.right).all() and (chunks.last == ALWAYS).all()
    assert [h for h, top in zip(chunks.height, chunks.top_last, strict=True) if top == ALWAYS] == [4]
    assert max(np.bincount(sentence_chunks([CAT], _spans(WORDS), max_chunks=2).height)) == 2


def test_a_word_of_several_tokens_is_a_node_over_its_tokens() -> None:
    pieces = [*WORDS[:5], (19, 21), (21, 23)]
    chunks = _listed(sentence_chunks([CAT], _spans(pieces)))
    assert {(5, 5, 0), (6, 6, 0), (5, 6, 1), (0, 6, 5)} <= set(chunks) and len(chunks) == 13


def test_truncation_cuts_spans_and_counts_heights_in_what_is_left() -> None:
    chunks = _listed(sentence_chunks([CAT], _spans(WORDS[:3])))
    assert chunks == [(0, 0, 0), (1, 1, 0), (2, 2, 0), (0, 1, 1), (2, 2, 1), (0, 2, 2)]
    assert not len(sentence_chunks([CAT.shifted(23)], _spans(WORDS, TEXT + " " * 23)))


TRAINING = ["the cats sat on mats", "naïve cafés — 日本語 texts, don't they?", "the the mats mats unbelievable"]


def _tokenizer(kind: str) -> Tokenizer:
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.train_from_iterator(
            TRAINING, trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]"], show_progress=False)
        )
        return tokenizer
    tokenizer = Tokenizer(models.BPE())
    if kind == "byte-level":
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer, tokenizer.decoder, alphabet = pre_tokenizers.Metaspace(), decoders.Metaspace(), []
    tokenizer.train_from_iterator(
        TRAINING,
        trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=sorted(alphabet), special_tokens=["<s>"], show_progress=False
        ),
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "wordpiece"])
def test_any_tokenizer_covers_every_word(kind: str) -> None:
    text = "the naïve  cats, don't 日本語 unbelievably"
    words, at = [], 0
    for word in text.split():
        at = text.index(word, at)
        words.append((at, at + len(word)))
        at += len(word)
    tree = Tree((Span(0, len(text), 0, "S"), *(Span(a, b, 1, "W") for a, b in words)))
    encoding = _tokenizer(kind).encode(text)
    spans = token_spans(text, encoding.offsets)
    nodes = tree_nodes(tree, spans)
    assert nodes is not None
    of_words = [(a, b) for a, b, depth in zip(*nodes, strict=True) if depth == 1]
    assert len(of_words) == len(words)
    for (left, right), (start, end) in zip(of_words, words, strict=True):
        assert (spans.start[left], spans.end[right]) == (start, end)
        assert right == left or spans.end[right - 1] <= end
    # Every token that is not white space is under exactly one word: no word boundary lies within a token here.
    assert sorted(t for a, b in of_words for t in range(a, b + 1)) == list(np.flatnonzero(spans.end > spans.start))


def test_special_tokens_and_white_space_are_under_no_node() -> None:
    nodes = tree_nodes(CAT, _spans([(0, 0), (0, 3), (3, 4), (3, 7), (7, 23), (0, 0)]))
    assert nodes is not None
    assert next(zip(*nodes, strict=True)) == (1, 4, 0) and nodes.left.min() == 1 and 2 not in nodes.left


@pytest.mark.parametrize("offsets", [[(0, 99)], [(4, 7), (0, 3)], [(-1, 3)]])
def test_offsets_of_another_text_are_refused(offsets: list[tuple[int, int]]) -> None:
    with pytest.raises(KeelError, match="offsets do not fit"):
        _spans(offsets)


# -- strictly causal ------------------------------------------------------------------------------------------------------


def test_heights_from_below() -> None:
    nodes = tree_nodes(CAT, _spans(WORDS))
    assert nodes is not None
    assert own_heights(nodes).tolist() == [4, 1, 0, 0, 3, 0, 2, 0, 1, 0, 0]


def _random_nodes(rng: random.Random, left: int, right: int, depth: int = 0) -> list[tuple[int, int, int]]:
    nodes = [(left, right, depth)]
    if left < right and rng.random() < 0.9:
        cut = rng.randrange(left, right)
        nodes += _random_nodes(rng, left, cut, depth + 1) + _random_nodes(rng, cut + 1, right, depth + 1)
    elif rng.random() < 0.3:
        nodes += _random_nodes(rng, left, right, depth + 1)
    return nodes


def _unstable(seed: int) -> Any:
    """A parser that changes its mind about everything at every token, as no parser does: all that it may say is tested."""

    def nodes_at(t: int) -> list[Nodes]:
        rng = random.Random(f"{seed} {t // 2}")
        cut = min(t, 3)
        pieces = [(0, cut), (cut + 1, t)] if t > cut else [(0, t)]
        return [Nodes(*np.array(_random_nodes(rng, *piece)).T) for piece in pieces]

    return nodes_at


def _visible(t: int, layer: int, chunks: Chunks) -> set[tuple[int, int, int]]:
    """What ``layer`` sees at token t, read from the batch as the model reads it."""
    batch = {name: tensor[0].numpy() for name, tensor in collate([chunks], layer + 1).items()}
    most, seen = batch["left"].shape[1], []
    for chunk, first, last in zip(*(batch[name][layer] for name in ("chunk", "first", "last")), strict=True):
        if first <= t <= last:
            place = divmod(int(chunk), most)
            seen.append((int(batch["left"][place]), int(batch["right"][place]), int(batch["height"][place[0]])))
    assert len(seen) == len(set(seen))
    return set(seen)


@pytest.mark.parametrize("most", [1, 64])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_token_sees_is_what_the_parse_up_to_it_gives(seed: int, most: int) -> None:
    nodes_at, length = _unstable(seed), 14
    chunks = prefix_chunks(length, nodes_at, most)
    seen = 0
    for t in range(length):
        for layer in range(6):
            expected = reference_visible(t, layer, nodes_at(t), most)
            assert _visible(t, layer, chunks) == expected, (t, layer)
            assert _visible(t, layer, prefix_chunks(t + 1, nodes_at, most)) == expected
            seen += len(expected)
    assert seen > 100 * (most > 1)


class HalvingSource:
    """Trees that depend on every character: each half of the words under a node, down to words."""

    name, version = "halving", "1"

    def parse(self, text: str) -> list[Tree]:
        places, at = [], 0
        for word in text.split():
            at = text.index(word, at)
            places.append((at, at + len(word)))
            at += len(word)

        def build(a: int, b: int, depth: int) -> list[Span]:
            spans = [Span(places[a][0], places[b - 1][1], depth, "X")]
            middle = (a + b + sum(map(ord, text)) % 2) // 2
            if b - a > 1 and a < middle < b:
                spans += build(a, middle, depth + 1) + build(middle, b, depth + 1)
            return spans

        return [Tree(tuple(build(0, len(places), 0)))] if places else []


def test_later_text_never_changes_what_earlier_tokens_see() -> None:
    tokenizer = _tokenizer("byte-level")
    texts = ["the cats 記 sat on the mats", "the cats 訊 unbelievable the texts"]
    encoded = [tokenizer.encode(text) for text in texts]
    shared = next(i for i, (a, b) in enumerate(zip(*(e.ids for e in encoded), strict=False)) if a != b)
    assert shared > 3
    chunks = []
    for text, encoding in zip(texts, encoded, strict=True):
        spans = token_spans(text, encoding.offsets)
        chunks.append(prefix_chunks(len(encoding.ids), parsed_prefixes(HalvingSource(), text, spans)))
    total = 0
    for t in range(shared + 2):
        for layer in range(4):
            first, second = (_visible(t, layer, part) for part in chunks)
            assert (first == second) or t >= shared
            total += len(first)
    assert total > 10
    assert _listed(chunks[0]) != _listed(chunks[1])


# -- batches --------------------------------------------------------------------------------------------------------------


def test_layers_above_the_root_read_the_root() -> None:
    chunks = sentence_chunks([CAT], _spans(WORDS))
    assert _visible(5, 9, chunks) == {(0, 5, 4)} and _visible(4, 9, chunks) == set()
    assert _visible(4, 1, chunks) == {(3, 3, 1)} and _visible(5, 1, chunks) == {(3, 3, 1), (4, 5, 1)}


def test_each_tree_of_a_row_has_its_own_root() -> None:
    flat = Tree((Span(24, 30, 0, "S"), Span(24, 26, 1, "A"), Span(27, 30, 1, "B")))
    text = TEXT + " " + "so far"
    chunks = sentence_chunks([CAT, flat], _spans([*WORDS, (24, 26), (27, 30)], text))
    assert _visible(7, 3, chunks) == {(0, 1, 3), (2, 5, 3), (6, 7, 1)}


def test_a_batch_of_unequal_rows() -> None:
    rows = [sentence_chunks([CAT], _spans(WORDS)), joined([]), fixed_chunks(3, 2, "sentence").shifted(4)]
    batch = collate(rows, 3)
    assert batch["left"].shape == (3, 3, SHELF) and batch["chunk"].shape[:2] == (3, 3)
    assert batch["height"].tolist() == [[0, 1, 2]] * 3
    assert collate([fixed_chunks(SHELF + 1, 2)], 3)["height"].tolist() == [[0, 0, 1, 2]]
    assert not (batch["first"][1] <= batch["last"][1]).any()
    assert batch["left"][2, 0, :3].tolist() == [4, 5, 6]
    assert "causal" not in batch and "causal" in collate([fixed_chunks(3, 2)], 3)
    with pytest.raises(KeelError, match="0 rows"):
        collate([], 3)
    with pytest.raises(KeelError, match="in one row or batch"):
        collate([*rows, fixed_chunks(3, 2)], 3)


@pytest.mark.parametrize(("length", "width"), [(0, 2), (1, 2), (7, 2), (8, 2), (9, 3), (26, 3)])
def test_fixed_chunks_are_there_as_soon_as_they_are_whole(length: int, width: int) -> None:
    chunks = fixed_chunks(length, width)
    assert chunks.scope == "prefix"
    for t in range(length):
        heights = [h for h in range(6) if width**h <= t + 1]
        for layer in range(6):
            size = width ** min(layer, max(heights))
            expected = {(a, a + size - 1, min(layer, max(heights))) for a in range(0, t + 2 - size, size)}
            assert _visible(t, layer, chunks) == expected
    with pytest.raises(KeelError, match="at least 2"):
        fixed_chunks(length, 1)


def test_chunks_that_would_be_seen_too_early_are_refused() -> None:
    column = np.array([3])
    with pytest.raises(KeelError, match="before its last token"):
        Chunks(column - 1, column, column * 0, column - 1, column, column, column)
    with pytest.raises(KeelError, match="shape"):
        Chunks(column, column, column, np.array([3, 4]), column, column, column)
