"""``branching:right``, ``:left`` and ``:balanced``: trees that need no parser, the usual baselines of unsupervised parsing."""

from __future__ import annotations

import re

from keel.errors import KeelError, suggest
from keel.trees.trained import sentence_places
from keel.trees.tree import Span, Tree

Place = tuple[int, int]  # characters of a word
_WORD = re.compile(r"\w+(?:['’]\w+)?|[^\w\s]")
_LONGEST = 150  # words; a longer sentence is cut there, since the tree is as deep


class BranchingSource:
    """In every sentence each word but the last begins a constituent to its end (right), each but the first ends one (left), or each
    constituent is parted into halves, of which the first has the word more (balanced).

    Raises: KeelError for another shape.
    """

    def __init__(self, shape: str) -> None:
        if shape not in _SHAPES:
            raise KeelError(f"branching:{shape}: no such shape; {suggest(shape, list(_SHAPES))}")
        self.name, self.version, self._spans = f"branching:{shape}", "1", _SHAPES[shape]

    def parse(self, text: str) -> list[Tree]:
        """See ``TreeSource.parse``."""
        trees = []
        for begin, end in sentence_places(text):
            words = [(match.start(), match.end()) for match in _WORD.finditer(text, begin, end)]
            for at in range(0, len(words), _LONGEST):
                trees.append(Tree(tuple(self._spans(words[at : at + _LONGEST]))))
        return trees


def _right(words: list[Place]) -> list[Span]:
    last = len(words) - 1
    inner = [(Span(words[i][0], words[-1][1], i, ""), Span(*words[i], i + 1, "")) for i in range(last)]
    return [span for pair in inner for span in pair] + [Span(*words[last], last, "")]


def _left(words: list[Place]) -> list[Span]:
    last = len(words) - 1
    chain = [Span(words[0][0], words[last - i][1], i, "") for i in range(last)]
    return [*chain, *(Span(*word, last - max(i - 1, 0), "") for i, word in enumerate(words))]


def _balanced(words: list[Place], depth: int = 0) -> list[Span]:
    whole = Span(words[0][0], words[-1][1], depth, "")
    if len(words) == 1:
        return [whole]
    middle = (len(words) + 1) // 2
    return [whole, *_balanced(words[:middle], depth + 1), *_balanced(words[middle:], depth + 1)]


_SHAPES = {"right": _right, "left": _left, "balanced": _balanced}
