"""Dependency trees in CoNLL-U: sentences with their words, where each word stands in the text, and the document that they are from."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keel.data.corpora import data_root
from keel.errors import KeelError, suggest


@dataclass(frozen=True, kw_only=True)
class Word:
    """One syntactic word.

    Attributes:
        form: as it is written (of a word inside a contraction: its own, not the contraction's).
        upos: universal part of speech.
        features: morphological features, {"Number": "Sing"}.
        head: place of its head among the words of the sentence, from 0; -1 for the root.
        relation: to the head, without subtype: "nsubj", not "nsubj:pass".
        place: characters of the text that it covers; those of a contraction for all words in it.
    """

    form: str
    upos: str
    features: dict[str, str]
    head: int
    relation: str
    place: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class DependencySentence:
    """A sentence: the text that its words stand in, the words, and its document's name ("" where none was named)."""

    text: str
    words: tuple[Word, ...]
    document: str

    def depths(self) -> list[int]:
        """Return for every word how many edges it is away from the root, which has 0.  Raises: KeelError for a circle."""
        found = []
        for index in range(len(self.words)):
            depth, at = 0, index
            while (at := self.words[at].head) >= 0:
                depth += 1
                if depth > len(self.words):
                    raise KeelError(f"the heads of {self.text!r} go in a circle; repair the file")
            found.append(depth)
        return found


def data_path(source: str) -> Path:
    """Return the file or folder that ``data:NAME`` (below the data root) or a path names.  Raises: KeelError where it is not there."""
    kind, _, rest = source.partition(":")
    if kind != "data":
        path = Path(source).expanduser()
        if not path.exists():
            raise KeelError(f"{path} does not exist; give a path, or data:NAME for what lies below the data root")
        return path
    root = data_root()
    if not rest or not (root / rest).exists():
        raise KeelError(f"data root {root} has no {rest!r}; {suggest(rest, [path.name for path in root.iterdir()])}")
    return root / rest


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file, plain or gzip.  Raises: KeelError for one that cannot be read."""
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode(encoding)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise KeelError(f"{path}: cannot be read as {encoding} ({error}); copy it anew") from error


def read_conllu(path: Path) -> list[DependencySentence]:
    """Read a CoNLL-U file, plain or gzip; empty nodes (8.1) are left out.  Raises: KeelError, naming the file and the line."""
    sentences: list[DependencySentence] = []
    document, rows = "", []
    for number, line in enumerate([*read_text(path).split("\n"), ""], start=1):
        if line.startswith("# newdoc"):
            document = line.partition("=")[2].strip() or f"document {number}"
        elif line.strip() and not line.startswith("#"):
            fields = line.split("\t")
            if len(fields) != 10:
                raise KeelError(f"{path}, line {number}: {len(fields)} columns; CoNLL-U has 10, with tabs between")
            rows.append(fields)
        elif not line.strip() and rows:
            try:
                sentences.append(_sentence(rows, document))
            except (ValueError, IndexError) as error:
                raise KeelError(f"{path}, sentence before line {number}: not CoNLL-U ({error})") from error
            rows = []
    if not sentences:
        raise KeelError(f"{path}: no sentence; expected CoNLL-U, ten columns a word")
    return sentences


def _sentence(rows: list[list[str]], document: str) -> DependencySentence:
    text, words = "", []
    contraction: tuple[int, tuple[int, int]] = (0, (0, 0))  # the last word inside, and where it stands
    for ident, form, _, upos, _, features, head, relation, _, misc in rows:
        if "." in ident:
            continue
        first, _, last = ident.partition("-")
        if last or int(first) > contraction[0]:
            place = (len(text), len(text) + len(form))
            text += form + ("" if "SpaceAfter=No" in misc.split("|") else " ")
        if last:
            contraction = (int(last), place)
            continue
        inside = int(first) <= contraction[0]
        words.append(
            Word(
                form=form,
                upos=upos,
                features=dict(_pairs(features)),
                head=int(head) - 1,
                relation=relation.partition(":")[0],
                place=contraction[1] if inside else place,
            )
        )
    if any(word.head >= len(words) for word in words):
        raise ValueError("a head that is not in the sentence")
    return DependencySentence(text=text.rstrip(), words=tuple(words), document=document)


def _pairs(features: str) -> Iterator[tuple[str, str]]:
    for pair in features.split("|"):
        name, equals, value = pair.partition("=")
        if equals:
            yield name, value
