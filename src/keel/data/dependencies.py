"""Sentences with gold dependencies, from CoNLL-U files (Universal Dependencies)."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keel.data.corpora import data_root
from keel.errors import KeelError

CONTENT = ("NOUN", "PROPN", "VERB", "ADJ", "ADV")
_ENDINGS = ("ing", "ed", "ly", "s")
_ONSETS = [
    "b",
    "bl",
    "br",
    "c",
    "cl",
    "cr",
    "d",
    "dr",
    "f",
    "fl",
    "fr",
    "g",
    "gl",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "pr",
    "qu",
    "r",
    "s",
    "sk",
    "sl",
    "sm",
    "sn",
    "sp",
    "st",
    "t",
    "tr",
    "v",
    "w",
]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "oo", "ou"]
_CODAS = [
    "b",
    "ck",
    "d",
    "ft",
    "g",
    "l",
    "lb",
    "lk",
    "m",
    "mp",
    "n",
    "nd",
    "nk",
    "p",
    "r",
    "rb",
    "rk",
    "rn",
    "sk",
    "sp",
    "st",
    "t",
    "x",
]


@dataclass(frozen=True, kw_only=True)
class ParsedSentence:
    """Words with parts of speech (UPOS) and heads: the index of the word that each depends on, -1 for the root."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    heads: tuple[int, ...]

    @property
    def text(self) -> str:
        """The words with one space between."""
        return " ".join(self.words)

    def places(self) -> list[tuple[int, int]]:
        """Return the characters ``[start, end)`` of each word in the text."""
        places, at = [], 0
        for word in self.words:
            places.append((at, at + len(word)))
            at += len(word) + 1
        return places

    def edges(self) -> set[tuple[int, int]]:
        """Return the undirected dependencies between words that are no punctuation, the smaller index first."""
        pairs = ((min(i, head), max(i, head)) for i, head in enumerate(self.heads) if head >= 0)
        return {(a, b) for a, b in pairs if "PUNCT" not in (self.tags[a], self.tags[b])}


def read_dependencies(source: str, *, shortest: int = 4, longest: int = 40) -> list[ParsedSentence]:
    """Read the sentences of a CoNLL-U file, plain or ``.gz``, that have ``shortest`` to ``longest`` words.

    Args:
        source: a path, or ``data:PATH`` below the data root.
    Raises: KeelError for a file that cannot be read or is no CoNLL-U, or has no such sentence.
    """
    path = data_root() / source.removeprefix("data:") if source.startswith("data:") else Path(source).expanduser()
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            found = [one for one in _sentences(file, source) if shortest <= len(one.words) <= longest]
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise KeelError(f"{source} cannot be read ({error}); give a CoNLL-U file") from error
    if not found:
        raise KeelError(f"{source} has no sentence of {shortest} to {longest} words; give a CoNLL-U file that has")
    return found


def _sentences(lines: Iterator[str], source: str) -> Iterator[ParsedSentence]:
    rows: list[list[str]] = []
    for number, line in enumerate(lines, start=1):
        if line.startswith("#"):
            continue
        if line.strip():
            cells = line.rstrip("\n").split("\t")
            if len(cells) != 10:
                raise KeelError(f"{source}, line {number}: {len(cells)} columns; CoNLL-U has 10")
            if cells[0].isdigit():  # neither a contraction (3-4) nor a word that is not there (3.1)
                rows.append(cells)
        elif rows:
            yield _sentence(rows)
            rows = []
    if rows:
        yield _sentence(rows)


def _sentence(rows: Sequence[Sequence[str]]) -> ParsedSentence:
    words = tuple(row[1].replace(" ", "") for row in rows)
    return ParsedSentence(words=words, tags=tuple(row[3] for row in rows), heads=tuple(int(row[6]) - 1 for row in rows))


def with_nonsense(sentence: ParsedSentence, seed: int = 0) -> ParsedSentence:
    """Return the sentence with made-up words for its content words, which keep their endings and capitals: syntax without vocabulary.

    After Maudslay and Cotterell (2021), "Do syntactic probes probe syntax?". The same word becomes the same one everywhere.
    """
    words = [
        _made_up(word, seed) if tag in CONTENT and word.isalpha() else word
        for word, tag in zip(sentence.words, sentence.tags, strict=True)
    ]
    return replace(sentence, words=tuple(words))


def _made_up(word: str, seed: int) -> str:
    ending = next((one for one in _ENDINGS if word.endswith(one) and len(word) > len(one) + 2), "")
    chance = random.Random(f"{seed} {word.lower().removesuffix(ending)}")
    stem = chance.choice(_ONSETS) + chance.choice(_VOWELS) + chance.choice(_CODAS)
    made = stem + ending
    return made.capitalize() if word[0].isupper() else made
