"""The span parser: its charts against their oracle, its scores against nltk, and that it learns a small grammar."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.errors import KeelError, ShapeError
from keel.trees.charts import best_splits, reference_best_splits, tree_spans
from keel.trees.evalb import PUNCTUATION, Score, brackets, score
from keel.trees.parser import ParserConfig, SpanParser, features_of, load_parser, save_parser
from keel.trees.parser_training import TrainingConfig, to_example, train_parser
from keel.trees.sources import open_source
from keel.trees.trained import ParserSource, tree_of


@pytest.mark.parametrize("length", [1, 2, 7])
def test_charts_equal_their_oracle(length: int) -> None:
    scores = torch.randn(3, length, length + 1)
    best, splits = best_splits(scores)
    for row in range(3):
        expected, expected_splits = reference_best_splits(scores[row])
        for i, j in itertools.combinations(range(length + 1), 2):
            torch.testing.assert_close(best[row, i, j], expected[i, j])
            assert splits[row, i, j] == expected_splits[i, j]
        spans = tree_spans(splits[row].numpy(), length)
        assert len(spans) == 2 * length - 1 and spans[0] == (0, length)
        torch.testing.assert_close(sum(scores[row, i, j] for i, j in spans), best[row, 0, length])
    with pytest.raises(ShapeError, match="words"):
        best_splits(scores[..., :-1])


def test_the_best_of_all_binary_trees_is_found() -> None:
    def trees(i: int, j: int) -> list[list[tuple[int, int]]]:
        if j - i == 1:
            return [[(i, j)]]
        return [[(i, j), *a, *b] for k in range(i + 1, j) for a in trees(i, k) for b in trees(k, j)]

    scores = torch.randn(1, 6, 7)
    best = max(sum(float(scores[0, i, j]) for i, j in tree) for tree in trees(0, 6))
    assert abs(float(best_splits(scores)[0][0, 0, 6]) - best) < 1e-5


def test_what_a_word_is_known_by() -> None:
    assert features_of("U.S.-backed")[:2] == ["=u.s.-backed", "~X.X.-xx"]
    assert features_of("1,200")[1] == "~9,99"
    assert features_of("Is")[2:] == ["<i", "s>", "<is", "is>", "<is", "is>", "<is", "is>"]


# -- evalb ----------------------------------------------------------------------------------------------------------------


def _tree(text: str) -> Any:
    return pytest.importorskip("nltk", reason="the extra keel[trees] is not installed").Tree.fromstring(text)


def _constituents(tree: Any) -> list[tuple[int, int, str]]:
    example = to_example(tree)
    return [(i, j, name) for (i, j), label in example.labels.items() for name in label.split("+")]


GOLD = "(S (NP (PRP He)) (, ,) (VP (VBD gave) (PRT (RP up)) (S (VP (TO to) (VP (VB win))))) (. .))"


def test_evalb_by_hand() -> None:
    gold = _tree(GOLD)
    counted = brackets(_constituents(gold), to_example(gold).tags)
    assert counted == {
        (0, 5, "S"): 1, (0, 1, "NP"): 1, (1, 5, "VP"): 1, (2, 3, "ADVP"): 1, (3, 5, "S"): 1, (3, 5, "VP"): 1, (4, 5, "VP"): 1,
    }  # fmt: skip
    given = [
        (0, 7, "TOP"),
        (0, 7, "S"),
        (0, 2, "NP"),
        (2, 6, "VP"),
        (3, 4, "ADVP"),
        (1, 2, "X"),
        (4, 6, "VP"),
        (4, 6, "VP"),
    ]
    found = score([given], [_constituents(gold)], [to_example(gold).tags])
    # 2 to 6 is VP without the comma; the comma alone and the second VP do not count as matched.
    assert found == Score(matched=5, given=6, wanted=7, exact=0, sentences=1)
    assert abs(found.f1 - 200 * 5 / 13) < 1e-9 and found.recall < found.precision
    perfect = score([_constituents(gold)], [_constituents(gold)], [to_example(gold).tags])
    assert perfect.f1 == perfect.precision == 100 and perfect.exact == 1
    assert Score().f1 == Score().precision == Score().recall == 0
    with pytest.raises(KeelError, match="as many of each"):
        score([given], [], [])


def _by_nltk(tree: Any, tags: list[str]) -> Counter[tuple[str, tuple[int, ...]]]:
    """The same brackets another way: nltk's subtrees, each as its label and which of the words that count it holds."""
    tree = tree.copy(deep=True)
    for number, place in enumerate(tree.treepositions("leaves")):
        tree[place] = number
    counted: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for node in tree.subtrees(lambda node: node.height() > 2):
        words = tuple(number for number in node.leaves() if tags[number] not in PUNCTUATION)
        if words:
            counted["ADVP" if node.label() == "PRT" else node.label(), words] += 1
    return counted


def _random_tree(rng: random.Random, nltk: Any, words: int) -> Any:
    def grow(left: int, right: int) -> Any:
        if right - left == 1 and rng.random() < 0.6:
            return nltk.Tree(rng.choice(["NN", "VB", ",", ".", "``"]), [f"w{left}"])
        label = rng.choice(["S", "NP", "VP", "PRT", "ADVP"])
        cuts = sorted(rng.sample(range(left + 1, right), min(rng.randrange(3), right - left - 1)))
        edges = [left, *cuts, right]
        return nltk.Tree(label, [grow(a, b) for a, b in itertools.pairwise(edges)])

    return nltk.Tree("S", [grow(0, words)])


def test_scores_agree_with_nltk_on_random_trees() -> None:
    nltk = pytest.importorskip("nltk", reason="the extra keel[trees] is not installed")
    rng, matched = random.Random(0), 0
    for _ in range(60):
        words = rng.randrange(1, 9)
        given, wanted = (_random_tree(rng, nltk, words) for _ in range(2))
        tags = list(to_example(wanted).tags)
        found = score([_constituents(given)], [_constituents(wanted)], [tags])
        mine, theirs = _by_nltk(given, tags), _by_nltk(wanted, tags)
        assert (found.matched, found.given, found.wanted) == ((mine & theirs).total(), mine.total(), theirs.total())
        matched += found.matched
    assert matched > 60


# -- the parser -----------------------------------------------------------------------------------------------------------


def _grammar(rng: random.Random) -> str:
    """A sentence whose brackets follow from its words: who, what was done, to whom, and maybe where."""
    noun = lambda: f"(NP (DT the) (NN {rng.choice(['dog', 'cat', 'king', 'tree'])}))"  # noqa: E731
    where = f" (PP (IN {rng.choice(['near', 'under'])}) {noun()})" if rng.random() < 0.5 else ""
    if rng.random() < 0.3:
        return f"(S (NP (PRP it)) (VP (VBD {rng.choice(['slept', 'sang'])}){where}))"
    return f"(S {noun()} (VP (VBD {rng.choice(['saw', 'met'])}) {noun()}{where}))"


@pytest.fixture(scope="module")
def trained() -> SpanParser:
    rng = random.Random(1)
    trees = [_tree(_grammar(rng)) for _ in range(120)]
    seen: list[tuple[int, float]] = []
    parser = train_parser(
        trees, ParserConfig(width=32, num_layers=1, span_width=32, dropout=0.0),
        TrainingConfig(epochs=8, learning_rate=1e-2), lambda epoch, loss: seen.append((epoch, loss)),
    )  # fmt: skip
    assert [epoch for epoch, _ in seen] == list(range(1, 9)) and seen[-1][1] < 0.2 * seen[0][1]
    return parser


def test_it_learns_a_grammar_and_its_batches_do_not_matter(trained: SpanParser) -> None:
    rng = random.Random(2)
    examples = [to_example(_tree(_grammar(rng))) for _ in range(40)]
    found = trained.parse([example.words for example in examples])
    wanted = [[(i, j, name) for (i, j), label in e.labels.items() for name in label.split("+")] for e in examples]
    assert score([tree for tree, _ in found], wanted, [e.tags for e in examples]).f1 > 98
    assert sum(tuple(tags) == e.tags for (_, tags), e in zip(found, examples, strict=True)) > 38
    assert [trained.parse([example.words])[0] for example in examples] == found
    with pytest.raises(KeelError, match="without words"):
        trained.parse([["a"], []])


def test_unknown_words_and_single_words_have_a_tree(trained: SpanParser) -> None:
    (tree, tags), (single, _) = trained.parse([["the", "zebra", "met", "Ωmega", "☃"], ["dog"]])
    assert tree[0][:2] == (0, 5) and len(tags) == 5 and single[0][:2] == (0, 1)


def test_a_saved_parser_comes_back(trained: SpanParser, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "parser.safetensors"
    digest = save_parser(trained, path)
    again = load_parser(path)
    sentences = [["the", "king", "saw", "it"], ["it", "sang"]]
    assert again.parse(sentences) == trained.parse(sentences) and not again.training and len(digest) == 64
    path.write_bytes(path.read_bytes()[:-100])
    for wrong in (path, tmp_path / "missing", Path(__file__)):
        with pytest.raises(KeelError, match="is no parser of keel trees train"):
            load_parser(wrong)


def test_running_text_has_a_tree_a_sentence(trained: SpanParser, tmp_path: Path) -> None:
    save_parser(trained, tmp_path / "parser.safetensors")
    source = open_source(f"keel:{tmp_path / 'parser.safetensors'}")
    text = 'The king saw the dog.  "It sang," said Mr. Li near the tree.\n\nthe cat can\'t sleep'
    trees = source.parse(text)
    assert [text[tree.spans[0].start : tree.spans[0].end] for tree in trees] == [
        "The king saw the dog.", '"It sang," said Mr. Li near the tree.', "the cat can't sleep",
    ]  # fmt: skip
    leaves = [[text[s.start : s.end] for s, leaf in zip(t.spans, t.leaves(), strict=True) if leaf] for t in trees]
    assert leaves[0] == ["The", "king", "saw", "the", "dog", "."] and leaves[2] == ["the", "cat", "ca", "n't", "sleep"]
    assert "The king" in {text[span.start : span.end] for span in trees[0].spans if span.label == "NP"}
    assert source.parse(" \n ") == [] and len(source.version) == 16
    assert len(source.parse("word " * 400)) == 3


@pytest.mark.parametrize(
    "sentence",
    ["Don't \"stop\" the (old) man's dog.", "``Well,'' he said--twice.", "It cost $5.50; they'll pay.", "'\" a \"'"],
)
def test_words_of_a_sentence_are_nltks(trained: SpanParser, tmp_path: Path, sentence: str) -> None:
    tokenize = pytest.importorskip("nltk.tokenize").NLTKWordTokenizer()
    save_parser(trained, tmp_path / "p.safetensors")
    source = ParserSource(tmp_path / "p.safetensors")
    words, places = zip(*source._cut(sentence), strict=True)
    try:
        assert list(places) == list(tokenize.span_tokenize(sentence))
        assert list(words) == tokenize.tokenize(sentence)
    except ValueError:  # of nltk, which does not find its own words there
        assert " ".join(words) == sentence


def test_constituents_become_a_tree() -> None:
    places = [(0, 2), (3, 5), (5, 6), (7, 8)]
    tree = tree_of(places, [(0, 4, "S"), (0, 2, "NP"), (2, 4, "VP"), (3, 4, "NP"), (3, 4, "QP")], ["A", "B", "C", "D"])
    assert [tuple(span) for span in tree.spans] == [
        (0, 8, 0, "S"), (0, 5, 1, "NP"), (0, 2, 2, "A"), (3, 5, 2, "B"), (5, 8, 1, "VP"), (5, 6, 2, "C"),
        (7, 8, 2, "NP"), (7, 8, 3, "QP"), (7, 8, 4, "D"),
    ]  # fmt: skip
    with pytest.raises(KeelError, match="the whole sentence first"):
        tree_of(places, [(0, 2, "NP")], ["A", "B", "C", "D"])


def test_training_is_the_same_for_the_same_seed() -> None:
    rng = random.Random(3)
    trees = [_tree(_grammar(rng)) for _ in range(12)]
    small = ParserConfig(width=16, num_layers=1, num_heads=2, span_width=16)
    first, second, other = (
        train_parser(trees, small, TrainingConfig(epochs=1, seed=seed)).state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(first["table.weight"], other["table.weight"])
    with pytest.raises(KeelError, match="0 trees"):
        train_parser([])


def test_unary_chains_are_one_label() -> None:
    example = to_example(_tree(GOLD))
    assert example.labels[4, 6] == "S+VP" and example.labels[0, 7] == "S" and example.labels[5, 6] == "VP"
    assert example.tags == ("PRP", ",", "VBD", "RP", "TO", "VB", ".")
