"""Chunks found by token ids alone: for callers that pass nothing else (lm-evaluation-harness does), and for decoding.

A lookup is named in one word, which is saved with the model: ``fixed:WIDTH``, or what was added to ``LOOKUPS``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from keel.errors import KeelError, suggest
from keel.trees.chunks import Chunks, Scope, fixed_chunks, joined

Lookup = Callable[[Sequence[int]], Chunks | None]
"""Token ids of a row or document from its beginning, without padding -> its chunks, None where it has none.

A lookup with a method ``missing(ids) -> str`` has to know every text that is begun: where it does not, that line is the error. It may
have nothing for what goes on behind a text, as in generation.

Under strict causality (scope ``prefix``) more ids may add chunks and say until when older ones are seen, no more.
"""


def _fixed(width: str, scope: Scope) -> Lookup:
    if not width.isdigit() or int(width) < 2:
        raise KeelError(f"lookup 'fixed:{width}': expected a number of tokens of at least 2, as in fixed:4")
    return lambda ids: fixed_chunks(len(ids), int(width), scope)


LOOKUPS: dict[str, Callable[[str, Scope], Lookup]] = {"fixed": _fixed}
"""Kind -> what makes a lookup from the rest of its name and the scope of the chunks that are wanted."""


def open_lookup(name: str, scope: Scope) -> Lookup:
    """Return the lookup that a name means. Raises: KeelError for an unknown kind, naming the known ones."""
    kind, _, rest = name.partition(":")
    if kind not in LOOKUPS:
        raise KeelError(f"no lookup of trees is called {name!r}; {suggest(kind, [f'{known}:…' for known in LOOKUPS])}")
    return LOOKUPS[kind](rest, scope)


def look_up(
    lookup: Lookup, ids: Sequence[Sequence[int]], marks: Sequence[Sequence[int]], length: int, scope: Scope
) -> tuple[list[Chunks], list[bool]]:
    """Look every document of a batch up by its ids.

    Args:
        ids, marks: a row each, of all tokens so far; a mark is 0 at padding, 2 where a document begins, else 1.
        length: columns of this pass; a document that begins in it is a text and not what was generated behind one.
    Returns: the chunks of each row; and whether it ends with a document that began earlier and goes on unknown, as behind a prompt: all
        that such a row reads is what it read before.
    Raises: KeelError for a text that the lookup should know and does not.
    """
    found, goes_on = [], []
    for row_ids, row_marks in zip(ids, marks, strict=True):
        attended = [(token, mark) for token, mark in zip(row_ids, row_marks, strict=True) if mark]
        begins = [0, *(i for i, (_, mark) in enumerate(attended) if mark == 2 and i), len(attended)]
        num_past = sum(mark > 0 for mark in row_marks[: len(row_marks) - length])
        parts, unknown = [], False
        for begin, end in itertools.pairwise(begins):
            document = [token for token, _ in attended[begin:end]]
            chunks = lookup(document)
            if chunks is not None:
                parts.append(chunks.shifted(begin))
            elif document and begin >= num_past and hasattr(lookup, "missing"):
                raise KeelError(lookup.missing(document))
            else:
                unknown = begin < num_past and end == len(attended)
        found.append(joined(parts, scope))
        goes_on.append(unknown)
    return found, goes_on
