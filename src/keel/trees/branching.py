"""``branching:right`` and ``branching:left``: trees that need no parser, the usual baselines of unsupervised parsing."""

from __future__ import annotations

import re

from keel.errors import KeelError, suggest
from keel.trees.trained import sentence_places
from keel.trees.tree import Span, Tree

_WORD = re.compile(r"\w+(?:['’]\w+)?|[^\w\s]")
_LONGEST = 150  # words; a longer sentence is cut there, since the tree is as deep


class BranchingSource:
    """In every sentence each word but the last begins a constituent to its end (right), or each but the first ends one (left).

    Raises: KeelError for another direction.
    """

    def __init__(self, direction: str) -> None:
        if direction not in ("left", "right"):
            raise KeelError(f"branching:{direction}: no such direction; {suggest(direction, ('left', 'right'))}")
        self.name, self.version, self.right = f"branching:{direction}", "1", direction == "right"

    def parse(self, text: str) -> list[Tree]:
        """See ``TreeSource.parse``."""
        trees = []
        for begin, end in sentence_places(text):
            words = [(match.start(), match.end()) for match in _WORD.finditer(text, begin, end)]
            for at in range(0, len(words), _LONGEST):
                trees.append(Tree(tuple(self._spans(words[at : at + _LONGEST]))))
        return trees

    def _spans(self, words: list[tuple[int, int]]) -> list[Span]:
        last = len(words) - 1
        if not last:
            return [Span(*words[0], 0, "")]
        if self.right:
            inner = [(Span(words[i][0], words[-1][1], i, ""), Span(*words[i], i + 1, "")) for i in range(last)]
            return [span for pair in inner for span in pair] + [Span(*words[last], last, "")]
        chain = [Span(words[0][0], words[last - i][1], i, "") for i in range(last)]
        return [*chain, *(Span(*word, last - max(i - 1, 0), "") for i, word in enumerate(words))]
