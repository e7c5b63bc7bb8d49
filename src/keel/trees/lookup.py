"""Chunks found by token ids alone: for callers that pass nothing else (lm-evaluation-harness does), and for decoding.

A lookup is named in one word, which is saved with the model: ``fixed:WIDTH``, or what was added to ``LOOKUPS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keel.errors import KeelError, suggest
from keel.trees.chunks import Chunks, Scope, fixed_chunks

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
