"""Penn Treebank brackets, read through nltk: what is only annotation is taken away, and words are as they stood in the text."""

from __future__ import annotations

import gzip
import importlib
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.trees.tree import Span, Tree

_ESCAPES = {"-LRB-": "(", "-RRB-": ")", "-LCB-": "{", "-RCB-": "}", "-LSB-": "[", "-RSB-": "]"}
_ROOTS = ("", "ROOT", "TOP", "S1")


def optional(module: str, package: str, extra: str = "trees") -> Any:
    """Import a module of an optional package, which is in this extra. Raises: KeelError saying what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise KeelError(f"reading trees needs the package {package}; pip install 'keel[{extra}]'") from error


def read_brackets(path: str | Path) -> list[Any]:
    """Read every tree of a bracket file (``.gz`` or plain, UTF-8), cleaned; see ``clean``.

    Returns: nltk.Tree objects in file order; a tree of traces alone is left out.
    Raises: KeelError for a file that cannot be read or whose brackets do not close, or without nltk.
    """
    nltk_tree = optional("nltk.tree", "nltk")
    tokenizer = optional("nltk.tokenize.sexpr", "nltk").SExprTokenizer()
    try:
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
        trees = [clean(nltk_tree.Tree.fromstring(part)) for part in tokenizer.tokenize(text) if part.strip()]
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise KeelError(
            f"{path} is no readable file of bracketed trees ({reason}); expected ( (S (NP …) …) )"
        ) from error
    return [tree for tree in trees if tree is not None]


def clean(tree: Any) -> Any:
    """Take away traces, nodes left empty, function tags (NP-SBJ-1 is NP) and the unlabelled root; unescape the words.

    Args: tree: an nltk.Tree. Returns: a new one with a root that is a constituent, or None where nothing is left.
    """
    if not isinstance(tree, str) and len(tree) == 1 and isinstance(tree[0], str):
        return None if tree.label() == "-NONE-" else type(tree)(_category(tree.label()), [_word(tree[0])])
    children = [child for child in map(clean, tree) if child is not None]
    if not children:
        return None
    if tree.label() in _ROOTS and len(children) == 1 and not isinstance(children[0][0], str):
        return children[0]
    return type(tree)(_category(tree.label()) or "S", children)


def to_tree(tree: Any, places: list[tuple[int, int]] | None = None) -> Tree:
    """Turn an nltk.Tree (benepar's and Stanza's are alike) into spans; a part of speech and its word are one leaf.

    Args: places: the characters of every word; without them the text is the words with one space between.
    """
    if places is None:
        places, at = [], 0
        for word in tree.leaves():
            places.append((at, at + len(word)))
            at += len(word) + 1
    spans: list[Span] = []
    _add(tree, 0, 0, places, spans)
    return Tree(tuple(spans))


def _add(tree: Any, depth: int, word: int, places: list[tuple[int, int]], spans: list[Span]) -> int:
    """Append the spans of a subtree that begins at ``word``; return the word after it."""
    mine = len(spans)
    spans.append(Span(0, 0, depth, tree.label()))
    after = word
    for child in tree:
        after = after + 1 if isinstance(child, str) else _add(child, depth + 1, after, places, spans)
    spans[mine] = Span(places[word][0], places[after - 1][1], depth, tree.label())
    return after


def _category(label: str) -> str:
    return label if label.startswith("-") else label.split("-")[0].split("=")[0].split("|")[0]


def _word(word: str) -> str:
    return _ESCAPES.get(word, word.replace("\\/", "/").replace("\\*", "*"))
