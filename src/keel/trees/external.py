"""Trees of other people's parsers: ``stanza:LANGUAGE`` and ``benepar:MODEL``, each through its own package.

Their weights come through those packages; nothing here fetches them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from keel.errors import KeelError
from keel.trees.brackets import clean, optional, to_tree
from keel.trees.trained import Place, sentence_places
from keel.trees.tree import Tree


class StanzaSource:
    """Stanza's constituency parser; it cuts sentences and words itself.

    Args: language: of the models, as in ``stanza.download(language)``.
    Raises: KeelError without the package or the models.
    """

    def __init__(self, language: str) -> None:
        stanza = optional("stanza", "stanza", "stanza")
        self.name, self.version = f"stanza:{language}", f"stanza {stanza.__version__}"
        try:
            self._pipeline = stanza.Pipeline(
                language, processors="tokenize,pos,constituency", download_method=None, verbose=False
            )
        except Exception as error:
            reason = " ".join(str(error).split())
            raise KeelError(
                f"stanza:{language}: {reason}; get its models with stanza.download({language!r})"
            ) from error

    def parse(self, text: str) -> list[Tree]:
        """See ``TreeSource.parse``."""
        if not text.strip():
            return []
        trees = [self._tree(sentence) for sentence in self._pipeline(text).sentences]
        return [tree for tree in trees if tree is not None]

    def _tree(self, sentence: Any) -> Tree | None:
        places = [place for token in sentence.tokens for place in _word_places(token)]
        return placed(as_nltk(sentence.constituency), places)


def _word_places(token: Any) -> list[Place]:
    """Return the characters of each word of a Stanza token; words whose characters it does not say share those that are left."""
    starts: list[int | None] = [word.start_char for word in token.words]
    ends: list[int | None] = [word.end_char for word in token.words]
    places: list[Place] = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if start is None or end is None:
            start = places[-1][1] if places else token.start_char
            until = next((one for one in starts[index:] if one is not None), token.end_char)
            sharing = next((n for n, one in enumerate(starts[index:]) if one is not None), len(starts) - index)
            end = start + max(1, (until - start) // sharing) if sharing > 1 else until
        places.append((start, end))
    return places


class BeneparSource:
    """The Berkeley Neural Parser (Kitaev and Klein 2018), which GTCA has its trees from. Words are cut as in the Penn Treebank, by nltk.

    Args: model: its name, as in ``benepar.download(model)``.
    Raises: KeelError without the package or the model.
    """

    def __init__(self, model: str) -> None:
        self._benepar = optional("benepar", "benepar", "benepar")
        self._words = optional("nltk.tokenize", "nltk").NLTKWordTokenizer()
        self.name = f"benepar:{model}"
        self.version = f"benepar {getattr(self._benepar, '__version__', 'of unknown version')}, {model}"
        try:
            self._parser = self._benepar.Parser(model)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise KeelError(f"benepar:{model}: {reason}; get it with benepar.download({model!r})") from error

    def parse(self, text: str) -> list[Tree]:
        """See ``TreeSource.parse``."""
        return self.parse_all([text])[0]

    def parse_all(self, texts: Sequence[str]) -> list[list[Tree]]:
        """Parse many texts together."""
        cut = [
            (number, self._cut(text, *place)) for number, text in enumerate(texts) for place in sentence_places(text)
        ]
        given = [self._benepar.InputSentence(words=[texts[number][a:b] for a, b in places]) for number, places in cut]
        trees: list[list[Tree]] = [[] for _ in texts]
        for (number, places), found in zip(cut, self._parser.parse_sents(given) if given else (), strict=True):
            tree = placed(found, places)
            if tree is not None:
                trees[number].append(tree)
        return trees

    def _cut(self, text: str, begin: int, end: int) -> list[Place]:
        sentence = text[begin:end]
        try:
            places = list(self._words.span_tokenize(sentence))
        except ValueError:  # as in ``keel.trees.trained``: quotation marks that nltk does not find again
            places = [match.span() for match in re.finditer(r"\S+", sentence)]
        return [(begin + a, begin + b) for a, b in places]


def as_nltk(node: Any) -> Any:
    """Return an nltk.Tree of a tree like Stanza's, whose nodes have ``label`` and ``children``, words being nodes without any."""
    if not node.children:
        return str(node.label)
    return optional("nltk.tree", "nltk").Tree(node.label, [as_nltk(child) for child in node.children])


def placed(tree: Any, places: Sequence[Place]) -> Tree | None:
    """Return an nltk.Tree over words with these characters, without its annotation; None where nothing is left of it.

    Raises: KeelError where it has another number of words.
    """
    if len(tree.leaves()) != len(places):
        raise KeelError(
            f"a parser gave a tree of {len(tree.leaves())} words for {len(places)}; expected one leaf a word"
        )
    cleaned = clean(tree)
    if cleaned is None or isinstance(cleaned[0], str):
        return None
    # Of two words in one letter (Portuguese "à", a + a) the second has none left, and no place in a tree of characters.
    for position, (start, end) in reversed(list(zip(cleaned.treepositions("leaves"), places, strict=True))):
        if start == end:
            while position and len(cleaned[position[:-1]]) == 1:
                position = position[:-1]
            if not position:
                return None
            del cleaned[position]
    return to_tree(cleaned, [place for place in places if place[0] < place[1]])
