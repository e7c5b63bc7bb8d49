"""One constituency tree over a text, as plain immutable spans of characters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from keel.errors import KeelError


class Span(NamedTuple):
    """One node: characters ``[start, end)`` of the text, edges from the root, and the label that the source gave."""

    start: int
    end: int
    depth: int
    label: str


@dataclass(frozen=True)
class Tree:
    """A tree as its spans in preorder: a parent before its children, children from left to right. The leaves are words.

    Raises: KeelError for spans that are no tree: not nested, out of order, empty, or without one root.
    """

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        path: list[Span] = []  # from the root to the latest span, each with the end of its latest child
        ends: list[int] = []
        for index, span in enumerate(self.spans):
            if (index == 0) != (span.depth == 0) or not 0 <= span.depth <= len(path) or span.start >= span.end:
                raise KeelError(f"span {index} of a tree is {span}; expected a root, then children, none of them empty")
            del path[span.depth :], ends[span.depth :]
            if path and not (ends[-1] <= span.start and span.end <= path[-1].end):
                raise KeelError(
                    f"span {index} of a tree is {span}; expected it inside its parent, behind its elder sister"
                )
            if ends:
                ends[-1] = span.end
            path.append(span)
            ends.append(span.start)
        if not self.spans:
            raise KeelError("a tree without spans; give at least its root")

    def leaves(self) -> list[bool]:
        """Return for every span whether it is a leaf."""
        following = [*(span.depth for span in self.spans[1:]), 0]
        return [after <= span.depth for span, after in zip(self.spans, following, strict=True)]

    def shifted(self, characters: int) -> Tree:
        """Return the same tree as many characters further on, as a part of a longer text."""
        return Tree(
            tuple(span._replace(start=span.start + characters, end=span.end + characters) for span in self.spans)
        )
