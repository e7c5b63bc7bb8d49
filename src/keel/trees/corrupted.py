"""Trees that are wrong on purpose, as controls (GTCA section 5.2, Table 6): does it take a true tree, or any?

Every tree keeps its words and its number of spans. ``random``: another tree over the same words, drawn at random. ``permuted``: the
shape of the true tree with the children of every node in another order, so that its parts cover the wrong words. Both are a
function of text and seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from keel.errors import KeelError, suggest
from keel.trees.sources import TreeSource
from keel.trees.together import ParsedTogether
from keel.trees.tree import Span, Tree

Corruption = Literal["random", "permuted"]
CORRUPTIONS: tuple[Corruption, ...] = ("random", "permuted")


@dataclass
class _Node:
    """A node and its children; one without any is a word."""

    label: str
    children: list[_Node] = field(default_factory=list)


class CorruptedSource:
    """A source whose trees are corrupted. Raises: KeelError for an unknown kind."""

    def __init__(self, source: TreeSource, kind: Corruption, seed: int = 0) -> None:
        if kind not in CORRUPTIONS:
            raise KeelError(f"corruption {kind!r} of trees; {suggest(str(kind), CORRUPTIONS)}")
        self.source, self.kind, self.seed = source, kind, seed
        self.name, self.version = f"{kind}:{source.name}", f"1 {seed} {source.version}"

    def parse(self, text: str) -> list[Tree]:
        """See ``TreeSource.parse``."""
        return self._corrupted(text, self.source.parse(text))

    def parse_all(self, texts: Sequence[str]) -> list[list[Tree]]:
        """Parse many texts, together where the source can."""
        source = ParsedTogether(self.source, texts)
        return [self._corrupted(text, source.parse(text)) for text in texts]

    def _corrupted(self, text: str, trees: Sequence[Tree]) -> list[Tree]:
        return [corrupted(tree, self.kind, f"{self.seed} {text}") for tree in trees]


def corrupted(tree: Tree, kind: Corruption, seed: str) -> Tree:
    """Return a tree over the same words with as many spans; it is equal to the first where there is no other."""
    words = [span for span, leaf in zip(tree.spans, tree.leaves(), strict=True) if leaf]
    chance = random.Random(hashlib.sha256(seed.encode()).digest())
    if kind == "permuted":
        root = _nodes(tree)
        _shuffle(root, chance)
    else:
        root = _drawn(len(words), len(tree.spans) - len(words), chance)
    return Tree(tuple(_lay_out(root, iter(words))))


def _nodes(tree: Tree) -> _Node:
    path: list[_Node] = []
    for span in tree.spans:
        node = _Node(span.label)
        del path[span.depth :]
        if path:
            path[-1].children.append(node)
        path.append(node)
    return path[0]


def _shuffle(root: _Node, chance: random.Random) -> None:
    """Put the children of every node into another order; no recursion, since a sum of code is as deep as it is long."""
    order = [root]
    for node in order:
        order += node.children
    size: dict[int, int] = {}
    for node in reversed(order):
        size[id(node)] = sum(size[id(child)] for child in node.children) or 1
    waiting = [root]
    while waiting:
        node = waiting.pop()
        before = sizes = [size[id(child)] for child in node.children]
        while len(set(sizes)) > 1 and before == sizes:  # an order that leaves every span where it was is none
            chance.shuffle(node.children)
            sizes = [size[id(child)] for child in node.children]
        waiting += reversed(node.children)


def _drawn(num_words: int, num_inner: int, chance: random.Random) -> _Node:
    """Draw a tree: neighbours that are put together at random, then nodes above a random node where more are wanted."""
    if not num_inner:
        return _Node("")
    root = _Node("", [_Node("") for _ in range(num_words)])
    inner = [root]
    while len(inner) < num_inner:
        wide = [node for node in inner if len(node.children) > 2]
        if wide:
            above = chance.choice(wide)
            length = chance.randrange(2, len(above.children))
            at = chance.randrange(len(above.children) - length + 1)
            node = _Node("", above.children[at : at + length])
            above.children[at : at + length] = [node]
        else:
            above = chance.choice(inner)
            node = _Node("", above.children)
            above.children = [node]
        inner.append(node)
    return root


def _lay_out(root: _Node, words: Iterator[Span]) -> list[Span]:
    """Return the spans of a tree in preorder, its leaves the words from left to right."""
    spans: list[Span] = []
    waiting: list[tuple[_Node, int]] = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        spans.append(Span(0, 0, depth, node.label) if node.children else next(words)._replace(depth=depth))
        waiting += [(child, depth + 1) for child in reversed(node.children)]
    # A node ends with the last of its leaves: from behind, the latest span of each depth is the first child of the one above.
    ends: dict[int, int] = {}
    for index in range(len(spans) - 1, -1, -1):
        span = spans[index]
        if index + 1 < len(spans) and spans[index + 1].depth > span.depth:
            span = spans[index] = span._replace(start=spans[index + 1].start, end=ends.pop(span.depth + 1))
        ends.setdefault(span.depth, span.end)
    return spans
