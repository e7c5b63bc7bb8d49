"""What the linguistic probes are asked, made from annotated text: UD English EWT and a treebank in brackets.

| probe | of | target | from |
|---|---|---|---|
| ``pos`` | word | universal part of speech | dependencies |
| ``dependency_depth`` | word | edges to the root | dependencies |
| ``subject_number`` | sentence | number of the main verb's subject (SentEval's SubjNum) | dependencies |
| ``sentence_order`` | two sentences that follow one another | in order or swapped (Holmes) | dependencies |
| ``top_constituents`` | sentence | labels under the root: the 19 commonest, or another (SentEval's TopConst) | brackets |
| ``tree_depth`` | sentence | depth of the constituency tree | brackets |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keel.data.conllu import DependencySentence, data_path, read_conllu, read_text
from keel.errors import KeelError
from keel.trees.brackets import read_brackets

_COMMONEST = 19
_OTHER = "other"
_TEST_SHARE = 0.25  # of a treebank's documents
_PUNCTUATION = frozenset({".", ",", ":", "``", "''", "-LRB-", "-RRB-", "#", "$"})


@dataclass(frozen=True, kw_only=True)
class Example:
    """One text to be read.

    Attributes:
        text: what the encoder reads.
        words: its words, for the baselines.
        places: characters of the words that are probed; none for a probe of the whole text.
        labels: one for each place, or one for the text: a class or a number.
    """

    text: str
    words: tuple[str, ...]
    places: tuple[tuple[int, int], ...] = ()
    labels: tuple[str, ...] | tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A question with its examples; ``numeric`` where a number is to be told, else a class."""

    name: str
    numeric: bool
    train: tuple[Example, ...]
    test: tuple[Example, ...]


Maker = Callable[[Sequence[Any], np.random.Generator], list[Example]]


def make_probes(
    names: Sequence[str], dependencies: str, treebank: str, *, train: int, test: int, max_words: int, seed: int = 0
) -> list[Probe]:
    """Make probes from annotated text.

    Args:
        names: of ``PROBES``.
        dependencies: folder with ``*-ud-train.conllu`` and ``*-ud-test.conllu`` (each also .gz), as ``data:NAME`` or a path.
        treebank: folder with one ``.mrg`` file (also .gz) and, where its documents are known, ``*.docs.tsv`` with the columns
            document, first tree (from 0), number of trees; a quarter of the documents is the test part. Without it, of the trees.
        train, test: most examples of a probe, chosen by ``seed``.
        max_words: longer texts are left out, so that every encoder reads them whole.
    Raises: KeelError for an unknown probe, missing files, or a probe without examples.
    """
    found = []
    sources: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {}
    for name in names:
        kind, numeric, maker = PROBES[name]
        if kind not in sources:
            sources[kind] = _dependencies(dependencies) if kind == "dependencies" else _treebank(treebank, seed)
        parts = []
        for part, (sentences, most) in enumerate(zip(sources[kind], (train, test), strict=True)):
            random = np.random.default_rng((seed, part))
            examples = [one for one in maker(sentences, random) if 2 <= len(one.words) <= max_words]
            if not examples:
                raise KeelError(f"linguistic probe {name!r}: no example; give more annotated text or more max_words")
            parts.append(tuple(examples[index] for index in sorted(random.permutation(len(examples))[:most].tolist())))
        found.append(Probe(name=name, numeric=numeric, train=parts[0], test=parts[1]))
    return [_with_classes(probe) for probe in found]


def _with_classes(probe: Probe) -> Probe:
    """Of the top constituents keep the commonest of the training part as classes."""
    if probe.name != "top_constituents":
        return probe
    common = {label for label, _ in Counter(example.labels[0] for example in probe.train).most_common(_COMMONEST)}

    def kept(example: Example) -> Example:
        return Example(
            text=example.text,
            words=example.words,
            labels=example.labels if example.labels[0] in common else (_OTHER,),
        )

    train, test = (tuple(map(kept, part)) for part in (probe.train, probe.test))
    return Probe(name=probe.name, numeric=False, train=train, test=test)


def _dependencies(source: str) -> tuple[list[DependencySentence], list[DependencySentence]]:
    folder = data_path(source)
    train, test = (read_conllu(_only(folder, f"*{split}.conllu*")) for split in ("train", "test"))
    return train, test


def _treebank(source: str, seed: int) -> tuple[list[Any], list[Any]]:
    folder = data_path(source)
    trees = read_brackets(_only(folder, "*.mrg*"))
    tables = sorted(folder.glob("*.docs.tsv"))
    bounds = _documents(tables[0], len(trees)) if tables else [(index, index + 1) for index in range(len(trees))]
    order = np.random.default_rng(seed).permutation(len(bounds))
    chosen = set(order[: max(1, round(_TEST_SHARE * len(bounds)))].tolist())
    parts: tuple[list[Any], list[Any]] = ([], [])
    for index, (first, after) in enumerate(bounds):
        parts[index in chosen].extend(trees[first:after])
    return parts


def _documents(table: Path, trees: int) -> list[tuple[int, int]]:
    """Return the first tree and the one after the last of every document."""
    rows = [line.split("\t") for line in read_text(table).splitlines()]
    try:
        bounds = [(int(row[1]), int(row[1]) + int(row[2])) for row in rows if len(row) >= 3 and row[1].isdigit()]
    except ValueError as error:
        raise KeelError(
            f"{table}: expected document, first tree, number of trees with tabs between ({error})"
        ) from error
    if not bounds or bounds[-1][1] != trees:
        raise KeelError(
            f"{table}: its documents end at tree {bounds[-1][1] if bounds else 0}, the file has {trees} trees"
        )
    return bounds


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise KeelError(f"{folder}: {len(found)} files {pattern!r}, expected one; give a folder with one")
    return found[0]


def _of_words(label: Callable[[DependencySentence], Sequence[Any]]) -> Maker:
    def make(sentences: Sequence[DependencySentence], random: np.random.Generator) -> list[Example]:
        return [
            Example(
                text=one.text,
                words=tuple(word.form for word in one.words),
                places=tuple(word.place for word in one.words),
                labels=tuple(label(one)),
            )
            for one in sentences
        ]

    return make


def _subject_number(sentences: Sequence[DependencySentence], random: np.random.Generator) -> list[Example]:
    found = []
    for one in sentences:
        roots = [index for index, word in enumerate(one.words) if word.head < 0]
        subjects = [word for word in one.words if word.relation == "nsubj" and word.head in roots]
        number = subjects[0].features.get("Number") if len(subjects) == 1 else None
        if number in ("Sing", "Plur"):
            found.append(Example(text=one.text, words=tuple(word.form for word in one.words), labels=(str(number),)))
    return found


def _sentence_order(sentences: Sequence[DependencySentence], random: np.random.Generator) -> list[Example]:
    found = []
    for first, second in zip(sentences[::2], sentences[1::2], strict=False):
        if first.document != second.document:
            continue
        swapped = bool(random.integers(2))
        pair = (second, first) if swapped else (first, second)
        words = tuple(word.form for one in pair for word in one.words)
        label = "swapped" if swapped else "in order"
        found.append(Example(text=f"{pair[0].text} {pair[1].text}", words=words, labels=(label,)))
    return found


def _of_trees(label: Callable[[Any], Any]) -> Maker:
    def make(trees: Sequence[Any], random: np.random.Generator) -> list[Example]:
        return [
            Example(text=" ".join(tree.leaves()), words=tuple(tree.leaves()), labels=(label(tree),)) for tree in trees
        ]

    return make


def _top(tree: Any) -> str:
    """Labels under the root, punctuation left out."""
    labels = (child.label() for child in tree if not isinstance(child, str))
    return " ".join(label for label in labels if label not in _PUNCTUATION) or tree.label()


PROBES: dict[str, tuple[str, bool, Maker]] = {
    "pos": ("dependencies", False, _of_words(lambda one: [word.upos for word in one.words])),
    "dependency_depth": ("dependencies", True, _of_words(lambda one: [float(depth) for depth in one.depths()])),
    "subject_number": ("dependencies", False, _subject_number),
    "sentence_order": ("dependencies", False, _sentence_order),
    "top_constituents": ("brackets", False, _of_trees(_top)),
    # nltk counts the words as a level.
    "tree_depth": ("brackets", True, _of_trees(lambda tree: float(tree.height() - 1))),
}
"""Every probe: where it is from, whether it is numeric, and how its examples are made."""
