"""``keel:FILE``, the source of trees that needs nobody's weights: running text under a parser of ``keel trees train``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from keel.errors import KeelError
from keel.trees.brackets import optional
from keel.trees.parser import load_parser
from keel.trees.tree import Span, Tree

# The end of a sentence, and the blank after it: not after an initial or a short word with a capital (Mr., Co., U.S.).
_END = re.compile(
    r"(?<![A-Z]\.)(?<!\b[A-Z][a-z]\.)(?<!\b[A-Z][a-z]{2}\.)(?<=[.!?])[\"')\]”’]*\s+(?=[\"'(\[“‘]*[A-Z0-9])"
)
_LONGEST = 150  # words; what is longer is no sentence, and a chart costs as their square

Place = tuple[int, int]


class ParserSource:
    """Trees by our own parser. Words are cut as in the Penn Treebank, through nltk.

    A line break ends a sentence; within a line the usual marks do, where a capital or a number follows. A sentence of more than 150
    words is cut there. Raises: KeelError for a file that is no parser, or without nltk.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = f"keel:{path}"
        self.parser = load_parser(path)
        self.version = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
        self._words = optional("nltk.tokenize", "nltk").NLTKWordTokenizer()

    def parse(self, text: str) -> list[Tree]:
        """See ``TreeSource.parse``."""
        return self.parse_all([text])[0]

    def parse_all(self, texts: Sequence[str]) -> list[list[Tree]]:
        """Parse many texts together, which is faster than one after the other."""
        # The beginnings of a text, which strict causality parses one by one, have all but their last sentence in common.
        words: dict[str, list[tuple[str, Place]]] = {}
        sentences = []
        for number, text in enumerate(texts):
            for begin, end in sentence_places(text):
                sentence = text[begin:end]
                if sentence not in words:
                    words[sentence] = self._cut(sentence)
                placed = [(word, (begin + a, begin + b)) for word, (a, b) in words[sentence]]
                sentences += [(number, placed[at : at + _LONGEST]) for at in range(0, len(placed), _LONGEST)]
        rows = [tuple(word for word, _ in part) for _, part in sentences]
        different = list(dict.fromkeys(rows))
        found = dict(zip(different, self.parser.parse(different) if different else (), strict=True))
        trees: list[list[Tree]] = [[] for _ in texts]
        for (number, part), row in zip(sentences, rows, strict=True):
            trees[number].append(tree_of([place for _, place in part], *found[row]))
        return trees

    def _cut(self, sentence: str) -> list[tuple[str, Place]]:
        """Return the words of a sentence with their characters in it."""
        try:
            places = list(self._words.span_tokenize(sentence))
            quoted = '"' in sentence or "''" in sentence  # else nltk's words are those characters
            words = self._words.tokenize(sentence) if quoted else [sentence[a:b] for a, b in places]
        except ValueError:  # nltk does not find its own words again where quotation marks are mixed
            places = [match.span() for match in re.finditer(r"\S+", sentence)]
            words = [sentence[a:b] for a, b in places]
        if len(words) != len(places):
            words = [sentence[a:b] for a, b in places]
        return list(zip(words, places, strict=True))


def sentence_places(text: str) -> list[Place]:
    """Return the characters of each sentence, without white space at its sides."""
    places = []
    for line in re.finditer(r"[^\n]+", text):
        begin = line.start()
        for end in [*(match.end() for match in _END.finditer(line.group())), len(line.group())]:
            piece = text[begin : line.start() + end]
            if piece.strip():
                places.append((begin + len(piece) - len(piece.lstrip()), begin + len(piece.rstrip())))
            begin = line.start() + end
    return places


def tree_of(places: list[Place], constituents: list[tuple[int, int, str]], tags: list[str]) -> Tree:
    """Return the tree of constituents in preorder over words with these characters and parts of speech.

    Raises: KeelError for constituents that do not begin with the whole sentence.
    """
    if not constituents or constituents[0][:2] != (0, len(places)):
        raise KeelError(f"constituents {constituents[:2]} over {len(places)} words; expected the whole sentence first")
    spans: list[Span] = []
    open_ends: list[int] = []
    waiting = iter([*constituents, (len(places), len(places), "")])
    begin, end, label = next(waiting)
    for word, (first, last) in enumerate(places):
        while open_ends and open_ends[-1] <= word:
            open_ends.pop()
        while begin == word:
            spans.append(Span(first, places[end - 1][1], len(open_ends), label))
            open_ends.append(end)
            begin, end, label = next(waiting)
        spans.append(Span(first, last, len(open_ends), tags[word]))
    return Tree(tuple(spans))
