"""Sources of trees: text in, trees out.

A source is named in one word, as in a recipe: ``bracketed:FILE``, ``treesitter:python``, ``keel:FILE`` (our own parser),
``branching:right``, ``stanza:en``, ``benepar:benepar_en3``.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from keel.errors import KeelError, suggest
from keel.trees.brackets import optional, read_brackets, to_tree
from keel.trees.branching import BranchingSource
from keel.trees.external import BeneparSource, StanzaSource
from keel.trees.trained import ParserSource
from keel.trees.tree import Span, Tree


class TreeSource(Protocol):
    """What makes trees.

    Attributes:
        name: what the user called it.
        version: changes whenever the same text could give another tree; the cache never mixes versions.
    """

    name: str
    version: str

    def parse(self, text: str) -> list[Tree]:
        """Return the trees of a text from left to right, their spans in its characters; what no tree covers is in none.

        Raises: KeelError for a text that this source has no tree for.
        """
        ...


class BracketedSource:
    """Trees of a Penn Treebank file, gold or parsed beforehand, found by their words.

    A text has one sentence a line. White space between words does not count, so that running text finds its tree too.
    Raises: KeelError for a file that cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = f"bracketed:{path}"
        self.trees = read_brackets(path)
        if not self.trees:
            raise KeelError(f"{self.name} has no tree; expected brackets as in a Penn Treebank file")
        self.version = hashlib.sha256(repr([str(tree) for tree in self.trees]).encode()).hexdigest()[:16]
        self._found = {_letters("".join(tree.leaves())): tree for tree in self.trees}

    def sentences(self) -> Iterator[tuple[str, Tree]]:
        """Yield every tree of the file with its text, the words with one space between."""
        for tree in self.trees:
            yield " ".join(tree.leaves()), to_tree(tree)

    def parse(self, text: str) -> list[Tree]:
        """See ``TreeSource.parse``."""
        trees, at = [], 0
        for line in text.splitlines(keepends=True):
            if line.strip():
                tree = self._found.get(_letters("".join(line.split())))
                if tree is None:
                    raise KeelError(f"{self.name} has no tree for {line.strip()[:60]!r}; expected one sentence a line")
                trees.append(to_tree(tree, [(at + a, at + b) for a, b in _places(tree.leaves(), line)]))
            at += len(line)
        return trees


def _letters(word: str) -> str:
    """What is compared: the treebank's quotation marks are those of any text."""
    return word.replace("``", '"').replace("''", '"')


def _places(words: list[str], text: str) -> list[tuple[int, int]]:
    """Return the characters of each word; the text is known to have these words and nothing else but white space."""
    places, at = [], 0
    for word in words:
        start = end = at
        wanted = _letters(word)
        while end == at or _letters("".join(text[start:end].split())) != wanted:
            end += 1
            if not text[start:end].strip():
                start = end
            assert end <= len(text)
        places.append((start, end))
        at = end
    return places


class TreeSitterSource:
    """Concrete syntax trees of code and data, through the maintained tree-sitter packages; every text has one, also a broken one.

    Leaves are the tokens of the language, brackets and commas too.

    Args: language: ``python`` for the package tree-sitter-python, ``c_sharp`` for tree-sitter-c-sharp: any that is installed.
    Raises: KeelError without the package of the language, or for one of another making.
    """

    def __init__(self, language: str) -> None:
        self.name = f"treesitter:{language}"
        core, package = optional("tree_sitter", "tree-sitter"), f"tree-sitter-{language.replace('_', '-')}"
        grammar = _grammar(language, package)
        # A package of several dialects has a function for each: tree_sitter_typescript.language_typescript.
        make = getattr(grammar, "language", None) or getattr(grammar, f"language_{language}", None)
        try:
            known = core.Language(make())  # type: ignore[misc]
        except (TypeError, ValueError) as error:
            raise KeelError(
                f"{self.name}: the package {package} has no grammar that this tree-sitter reads ({error}); install versions that fit"
            ) from error
        self.version = f"abi {known.abi_version}, {_installed('tree-sitter')}, {_installed(package)}"
        self._parser = core.Parser(known)

    def parse(self, text: str) -> list[Tree]:
        """See ``TreeSource.parse``; one tree, or none for a text of white space."""
        raw = text.encode("utf-8")
        starts = _character_of_byte(text, raw)
        spans: list[Span] = []
        cursor, depth, climbing = self._parser.parse(raw).walk(), 0, False
        while True:
            node = cursor.node
            if not climbing and node.start_byte < node.end_byte:
                spans.append(Span(starts[node.start_byte], starts[node.end_byte], depth, node.type))
            if not climbing and cursor.goto_first_child():
                depth += 1
            elif cursor.goto_next_sibling():
                climbing = False
            elif cursor.goto_parent():
                depth, climbing = depth - 1, True
            else:
                return [Tree(tuple(spans))] if text.strip() else []


def _grammar(language: str, package: str) -> Any:
    """Import the package of a language.  Raises: KeelError that names it, and those that are here."""
    module, here = f"tree_sitter_{language}", [name for _, name, _ in pkgutil.iter_modules()]
    try:
        return importlib.import_module(module) if language.isidentifier() else None
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        known = [name.removeprefix("tree_sitter_") for name in here if name.startswith("tree_sitter_")]
        raise KeelError(
            f"treesitter:{language}: needs the package {package}, which is not installed; pip install {package}, or choose: "
            + suggest(language, known)
        ) from error


def _installed(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:  # a module that nobody installed: one of the user's own
        return f"{package} of unknown version"


def _character_of_byte(text: str, raw: bytes) -> range | list[int]:
    """Return for each byte (and the end) the character that it is of."""
    if len(text) == len(raw):
        return range(len(raw) + 1)
    return [index for index, letter in enumerate(text) for _ in letter.encode("utf-8")] + [len(text)]


_KINDS: dict[str, Any] = {
    "benepar": BeneparSource,
    "bracketed": BracketedSource,
    "branching": BranchingSource,
    "keel": ParserSource,
    "stanza": StanzaSource,
    "treesitter": TreeSitterSource,
}


def open_source(name: str) -> TreeSource:
    """Return the source that a name means: ``bracketed:FILE``, ``keel:FILE``, ``treesitter:LANGUAGE``, ``branching:SHAPE``,
    ``stanza:LANGUAGE`` or ``benepar:MODEL``.

    Raises: KeelError for an unknown kind, file or language, or a missing optional package.
    """
    kind, rest = _parted(name)
    source: TreeSource = _KINDS[kind](rest)
    return source


def check_source(name: str) -> None:
    """Do what takes no time of ``open_source``.  Raises: KeelError for an unknown kind, or a file that is not there."""
    kind, rest = _parted(name)
    if kind in ("bracketed", "keel") and not Path(rest).is_file():
        raise KeelError(f"{name}: there is no file {rest}; give one")


def _parted(name: str) -> tuple[str, str]:
    kind, separator, rest = name.partition(":")
    if kind not in _KINDS or not separator or not rest:
        kinds = suggest(kind, [f"{known}:…" for known in _KINDS])
        raise KeelError(f"no source of trees is called {name!r}; {kinds}")
    return kind, rest
