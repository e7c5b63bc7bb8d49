"""Many texts parsed in one call, for sources that are faster that way (``parse_all``)."""

from __future__ import annotations

from collections.abc import Iterable

from keel.errors import KeelError
from keel.trees.align import TokenSpans
from keel.trees.sources import TreeSource
from keel.trees.tree import Tree


class ParsedTogether:
    """A source that has parsed these texts in one call, where it can; any other text, and all where one has no tree, it parses alone."""

    def __init__(self, source: TreeSource, texts: Iterable[str]) -> None:
        self.name, self.version, self.source = source.name, source.version, source
        self.known: dict[str, list[Tree]] = {}
        parse_all, wanted = getattr(source, "parse_all", None), list(dict.fromkeys(texts))
        if parse_all is None or len(wanted) < 2:
            return
        try:
            self.known = dict(zip(wanted, parse_all(wanted), strict=True))
        except KeelError:  # of one of them: whoever asks for that one is told
            self.known = {}

    def parse(self, text: str) -> list[Tree]:
        """See ``TreeSource.parse``."""
        found = self.known.get(text)
        return self.source.parse(text) if found is None else found


def beginnings(text: str, spans: TokenSpans) -> list[str]:
    """Return the beginnings of a text, up to the end of each token, that ``keel.trees.align.parsed_prefixes`` parses."""
    ends = sorted({int(end) for end in spans.end})
    return [text[:end] for end in ends if text[:end].strip()]
