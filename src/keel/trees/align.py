"""From trees over characters to chunks over tokens, for any tokenizer that gives offsets.

A word of several tokens is a node whose children are its tokens (GTCA section 3.1). Heights, GTCA section 3.2:

    sentence   height_j = D - depth_j, D the depth of the deepest leaf; a chunk is visible from its last token on
    prefix     height_j = 1 + the greatest height among the children of j, 0 for a leaf; a chunk is visible from the token
               after its last one, as long as the parse of the tokens so far contains it

``sentence`` is the paper's, and leaks: D, and the spans themselves, are those of a parse that has read the words to come.
``prefix`` is strictly causal: at token t there is only what a parse of tokens up to t gives. A node that ends at t may yet grow
and does not count as complete; heights are counted from below, because D - depth would change for every chunk whenever a new
word makes the tree deeper.

Shapes: T tokens, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from keel.errors import KeelError
from keel.trees.chunks import ALWAYS, ARRAYS, Chunks, joined
from keel.trees.sources import TreeSource
from keel.trees.tree import Tree

Array = np.ndarray[Any, np.dtype[np.int64]]
MAX_CHUNKS = 64  # a height and tree; GTCA section 3.2


class TokenSpans(NamedTuple):
    """Characters ``[start, end)`` of each token without white space at its sides, int64 [T]; empty for a special token."""

    start: Array
    end: Array


class Nodes(NamedTuple):
    """One tree in tokens, in preorder, int64 [N]: first and last token, and edges from the root."""

    left: Array
    right: Array
    depth: Array


def token_spans(text: str, offsets: Sequence[tuple[int, int]]) -> TokenSpans:
    """Return the characters of every token, as a fast tokenizer's ``offset_mapping`` gives them for ``text``.

    Byte-level BPE and SentencePiece may count the space before a word in, WordPiece does not: here it never counts.
    Raises: KeelError for offsets outside the text or out of order.
    """
    start, end = (np.array([pair[side] for pair in offsets], dtype=np.int64) for side in (0, 1))
    filled = end > start
    if len(start) and (
        end.max() > len(text) or start.min() < 0 or np.diff(start[filled]).min(initial=0) < 0 or np.diff(end[filled]).min(initial=0) < 0
    ):  # fmt: skip
        raise KeelError(
            f"offsets do not fit the text of {len(text)} characters; give return_offsets_mapping=True of this very text"
        )
    blank = np.array([letter.isspace() for letter in text] + [False], dtype=bool)
    places = np.arange(len(text) + 1)
    next_letter = np.minimum.accumulate(np.where(blank, len(text), places)[::-1])[::-1]
    last_letter = np.maximum.accumulate(np.concatenate([[0], np.where(blank[:-1], 0, places[1:])]))
    start = np.minimum(next_letter[start], end)
    return TokenSpans(start, np.maximum(last_letter[end], start))


def tree_nodes(tree: Tree, spans: TokenSpans) -> Nodes | None:
    """Return a tree's nodes in tokens; a node belongs to every token that it shares a character with.

    What lies beyond the last token (after truncation) is cut off. None where the tree has no token at all.
    """
    filled = np.flatnonzero(spans.end > spans.start)
    if not len(filled):
        return None
    starts, ends = (np.array([span[side] for span in tree.spans]) for side in (0, 1))
    left = np.searchsorted(spans.end[filled], starts, side="right")
    right = np.searchsorted(spans.start[filled], ends, side="left") - 1
    nodes = []
    for span, a, b, leaf in zip(tree.spans, left.tolist(), right.tolist(), tree.leaves(), strict=True):
        if a <= b:
            nodes.append((a, b, span.depth))
            if leaf and a < b:
                nodes += [(piece, piece, span.depth + 1) for piece in range(a, b + 1)]
    if not nodes:
        return None
    columns = np.array(nodes, dtype=np.int64).T
    return Nodes(filled[columns[0]], filled[columns[1]], columns[2])


def sentence_chunks(trees: Sequence[Tree], spans: TokenSpans, max_chunks: int = MAX_CHUNKS) -> Chunks:
    """Return the chunks of a row as the paper has them; see the module for what they leak.

    Args:
        trees: of the row's text, each with heights and a greatest height of its own.
        spans: of the row's tokens, after truncation.
        max_chunks: kept for each height of a tree, the first from left to right; >= 1.
    """
    parts = []
    for tree in trees:
        nodes = tree_nodes(tree, spans)
        if nodes is None:
            continue
        height = nodes.depth.max() - nodes.depth
        kept = _first_of_each_height(nodes.left, height, max_chunks)
        left, right, height = nodes.left[kept], nodes.right[kept], height[kept]
        always = np.full_like(left, ALWAYS)
        top_last = np.where(height == nodes.depth.max(), ALWAYS, -1)
        parts.append(Chunks(left, right, height, right, always, right, top_last))
    return joined(parts)


def own_heights(nodes: Nodes) -> Array:
    """Return the heights counted from below, [N]: 0 for a leaf, else one more than the highest child."""
    height = np.zeros(len(nodes.depth), dtype=np.int64)
    deepest = np.zeros(
        int(nodes.depth.max()) + 2, dtype=np.int64
    )  # by depth: 1 + the highest node seen there, of one parent
    for index in range(len(height) - 1, -1, -1):
        depth = nodes.depth[index]
        height[index] = deepest[depth + 1]
        deepest[depth + 1] = 0
        deepest[depth] = max(deepest[depth], height[index] + 1)
    return height


def prefix_chunks(num_tokens: int, nodes_at: Callable[[int], Sequence[Nodes]], max_chunks: int = MAX_CHUNKS) -> Chunks:
    """Return the chunks of a row under strict causality: at token t those of a parse of tokens up to t, complete before t.

    Args:
        nodes_at: given t, the trees over tokens 0 to t; it may read no later token. See ``parsed_prefixes``.
        max_chunks: kept for each height of a tree, the first from left to right; >= 1.
    Reference twin: ``reference_visible``.
    """
    rows: list[list[int]] = []
    alive: dict[tuple[int, int, int], list[int]] = {}
    topmost: dict[tuple[int, int, int], list[int]] = {}
    for t in range(num_tokens):
        seen = _complete_at(t, nodes_at(t), max_chunks)
        for key in [key for key in alive if key not in seen]:
            del alive[key]
        for key in [key for key in topmost if not seen.get(key)]:
            del topmost[key]
        for key, is_top in seen.items():
            row = alive.get(key)
            if row is None:
                row = alive[key] = [*key, t, t, t, t - 1]
                rows.append(row)
            row[4] = t
            if is_top:
                top = topmost.get(key)
                if top is None:  # the greatest from birth on, or once more: then in an entry of its own
                    top = row if row[3] == t else [*key, t, t - 1, t, t]
                    if top is not row:
                        rows.append(top)
                    topmost[key] = top
                top[6] = t
    for living in (alive, topmost):
        for row in living.values():
            row[4 if living is alive else 6] = ALWAYS
    columns = np.array(rows, dtype=np.int64).reshape(-1, 7).T
    return Chunks(**dict(zip(ARRAYS, columns, strict=True)), scope="prefix")


def _complete_at(t: int, trees: Sequence[Nodes], max_chunks: int) -> dict[tuple[int, int, int], bool]:
    """Return (left, right, height) of what is complete before t, and whether it is the greatest of its tree."""
    seen = {}
    for nodes in trees:
        height, complete = own_heights(nodes), nodes.right < t
        if complete.any():
            left, right, height = nodes.left[complete], nodes.right[complete], height[complete]
            greatest = height.max()
            for index in _first_of_each_height(left, height, max_chunks):
                seen[int(left[index]), int(right[index]), int(height[index])] = bool(height[index] == greatest)
    return seen


def reference_visible(
    t: int, layer: int, trees: Sequence[Nodes], max_chunks: int = MAX_CHUNKS
) -> set[tuple[int, int, int]]:
    """Return (left, right, height) of what ``layer`` sees at token t, from the parse of tokens up to t alone: the oracle."""
    visible = set()
    for nodes in trees:
        height = own_heights(nodes)
        done = [(int(a), int(b), int(h)) for a, b, h in zip(nodes.left, nodes.right, height, strict=True) if b < t]
        wanted = min(layer, max((h for _, _, h in done), default=0))
        visible |= set(sorted(chunk for chunk in done if chunk[2] == wanted)[:max_chunks])
    return visible


def parsed_prefixes(source: TreeSource, text: str, spans: TokenSpans) -> Callable[[int], list[Nodes]]:
    """Return the ``nodes_at`` of ``prefix_chunks`` for any source: it parses the text of tokens 0 to t anew for each t.

    A character of several tokens is there from the last of them on.
    """
    known: dict[int, list[Tree]] = {}
    filled = np.flatnonzero(spans.end > spans.start)
    start, end = spans.start[filled], spans.end[filled]
    whole = np.concatenate([np.minimum(end[:-1], np.maximum(start[1:], start[:-1])), end[-1:]])
    reached = np.zeros(len(spans.end), dtype=np.int64)
    reached[filled] = whole
    reached = np.maximum.accumulate(reached)  # a special token has no place in the text: what was there is there still

    def nodes_at(t: int) -> list[Nodes]:
        end = int(reached[t])
        if end not in known:
            known[end] = source.parse(text[:end]) if text[:end].strip() else []
        here = TokenSpans(spans.start[: t + 1], np.minimum(spans.end[: t + 1], end))
        found = (tree_nodes(tree, here) for tree in known[end])
        return [nodes for nodes in found if nodes is not None]

    return nodes_at


def _first_of_each_height(left: Array, height: Array, most: int) -> Array:
    """Return the indices of the first ``most`` of each height, by height and then from left to right."""
    order = np.lexsort((left, height))
    ordered = height[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered, side="left")
    return np.asarray(order[place < most])
