"""Completion of compact JSON objects (S-Former, section 4.1.2 and App. A.3).

A string is one object without white space. All its objects have the same number of keys (the width), drawn without repetition from a
fixed vocabulary; values are short words, numbers below 100, ``true``, ``false``, ``null``, nested objects, or arrays of one to three
values. The depth counts objects and arrays inside one another; one chain of values is made to reach it exactly. Tokens are characters,
so that keys that were never seen in training can be spelled. A string is cut at a random character between a quarter and three quarters.

Where depth, width and length are drawn and do not fit together they are drawn again, so long strings are rarer at small widths than they
would be by themselves.
"""

from __future__ import annotations

import dataclasses
import json
import random
import string
from dataclasses import dataclass
from typing import Any

from keel.data.languages.base import Sample, draw_in_split, generator
from keel.errors import KeelError

KEYS = ("name", "id", "value", "items", "meta", "ts", "type", "tags", "user", "data", "size", "next")
UNSEEN_KEYS = ("code", "path", "rank", "unit", "note", "link", "area", "mode")
WORDS = (
    "red",
    "blue",
    "ok",
    "new",
    "old",
    "cat",
    "dog",
    "sun",
    "moon",
    "tree",
    "fox",
    "sea",
    "ice",
    "day",
    "one",
    "two",
)
_PUNCTUATION = '{}[]:,"'
_MOST_DRAWS = 2000


@dataclass(frozen=True, kw_only=True)
class JsonObjects:
    """The language, and how its strings are drawn.

    Attributes:
        min_length, max_length: characters of a string.
        min_depth, max_depth: objects and arrays inside one another, the whole string being the first.
        min_width, max_width: keys of every object of a string, uniform between them.
        unseen_keys: take the keys from a vocabulary that no other string has.
        seed: of all strings.
    """

    min_length: int = 24
    max_length: int = 128
    min_depth: int = 2
    max_depth: int = 6
    min_width: int = 2
    max_width: int = 8
    unseen_keys: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("length", 24), ("depth", 1), ("width", 1)):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if not least <= low <= high:
                raise KeelError(f"json: {name}s from {low} to {high}; give at least {least}, and the smaller first")
        if self.max_width > len(UNSEEN_KEYS):
            raise KeelError(f"json: max_width={self.max_width}; there are {len(UNSEEN_KEYS)} keys to draw from")

    @property
    def family(self) -> str:
        """What its metrics are called."""
        return "json"

    @property
    def alphabet(self) -> list[str]:
        """The tokens of the language."""
        return [*_PUNCTUATION, *string.ascii_lowercase, *string.digits]

    @property
    def longest(self) -> int:
        """Tokens of the longest string."""
        return self.max_length

    def tokens(self, text: str) -> list[str]:
        """Split a string into tokens."""
        return list(text)

    def harder(self) -> dict[str, JsonObjects]:
        """Return the sets of the extrapolation by name: depths, widths, lengths (each at least half of it), unseen keys."""
        sets = {
            f"d{depth}": dataclasses.replace(self, min_depth=depth, max_depth=depth, max_width=4, max_length=256)
            for depth in range(2, 7)
        }
        sets |= {
            f"w{width}": dataclasses.replace(self, min_width=width, max_width=width, max_depth=3, max_length=256)
            for width in (2, 4, 6, 8)
        }
        sets |= {
            f"L{length}": dataclasses.replace(self, min_length=length // 2 + 1, max_length=length)
            for length in (128, 256, 512)
        }
        return sets | {"unseen": dataclasses.replace(self, unseen_keys=True)}

    def judge(self, sample: Sample, generated: str) -> dict[str, tuple[float, float]]:
        """Return numerator and denominator of every metric of App. A.3 for one completion.

        ``field_f1`` is micro F1 over the key paths of the whole string; one that is not JSON has none.
        """
        expected, found = key_paths(sample.whole), key_paths(sample.prompt + generated)
        fits = found is not None
        shared = len(expected & found) if expected and found else 0
        return {
            "validity": (float(fits), 1.0),
            "exact_match": (float(generated == sample.target), 1.0),
            "field_f1": (2.0 * shared, float(len(expected or ()) + len(found or ()))),
            "syntax_error": (float(not fits), 1.0),
        }

    def sample(self, split: str, index: int) -> Sample:
        """Return string ``index`` of a split."""
        return draw_in_split(split, self._draw, "json", self, index)

    def invalid(self, split: str, index: int) -> str:
        """Return string ``index``, damaged (App. A.3) such that it is not JSON: a bracket, quote, comma or colon lost or moved."""
        source = generator("json invalid", self, split, index)
        text = self.sample(split, index).whole
        while key_paths(text) is not None:
            place = source.choice([at for at, character in enumerate(text) if character in _PUNCTUATION])
            rest = text[:place] + text[place + 1 :]
            moved = source.randrange(len(rest) + 1)
            text = source.choice(
                [
                    rest,
                    rest[:moved] + text[place] + rest[moved:],
                    text[:place] + source.choice(_PUNCTUATION) + text[place + 1 :],
                ]
            )
        return text

    def _draw(self, source: random.Random) -> Sample:
        keys = UNSEEN_KEYS if self.unseen_keys else KEYS
        for _ in range(_MOST_DRAWS):
            depth = source.randint(self.min_depth, self.max_depth)
            width = source.randint(self.min_width, self.max_width)
            # Long strings need values that branch; a draw of how much covers all lengths.
            tree = _object(source, keys, depth, width, source.choice((0.0, 0.1, 0.2, 0.35, 0.5)))
            text = json.dumps(tree, separators=(",", ":"))
            if self.min_length <= len(text) <= self.max_length:
                cut = source.randint((len(text) + 3) // 4, 3 * len(text) // 4)
                return Sample(text[:cut], text[cut:])
        raise KeelError(
            f"json: no string of {self.min_length} to {self.max_length} characters in {_MOST_DRAWS:,} draws of depth {self.min_depth} "
            f"to {self.max_depth} and width {self.min_width} to {self.max_width}; allow longer strings, or smaller ones"
        )


def _object(source: random.Random, keys: tuple[str, ...], depth: int, width: int, branching: float) -> dict[str, Any]:
    """Return an object of exactly ``depth`` levels: one of its values has ``depth - 1``, others may have fewer."""
    deep = source.randrange(width) if depth > 1 else -1
    return {
        key: _nested(source, keys, depth - 1, width, branching)
        if place == deep
        else _value(source, keys, depth - 1, width, branching)
        for place, key in enumerate(source.sample(keys, width))
    }


def _nested(source: random.Random, keys: tuple[str, ...], depth: int, width: int, branching: float) -> Any:
    """Return an object or an array of exactly ``depth`` levels."""
    if source.random() < 0.7:
        return _object(source, keys, depth, width, branching)
    first = _nested(source, keys, depth - 1, width, branching) if depth > 1 else _scalar(source)
    values = [first, *(_value(source, keys, depth - 1, width, branching) for _ in range(source.randint(0, 2)))]
    source.shuffle(values)
    return values


def _value(source: random.Random, keys: tuple[str, ...], depth: int, width: int, branching: float) -> Any:
    if depth >= 1 and source.random() < branching:
        return _nested(source, keys, source.randint(1, depth), width, branching)
    return _scalar(source)


def _scalar(source: random.Random) -> Any:
    return source.choice((source.choice(WORDS), source.randint(0, 99), source.choice((True, False, None))))


def depth_of(text: str) -> int:
    """Return the levels of objects and arrays of a JSON string."""

    def levels(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + max((levels(child) for child in value.values()), default=0)
        return 1 + max((levels(child) for child in value), default=0) if isinstance(value, list) else 0

    return levels(json.loads(text))


def key_paths(text: str) -> set[str] | None:
    """Return the paths of all keys and array places, such as ``.meta.items[0].id``; None where the text is no JSON object."""
    try:
        tree = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict):
        return None
    paths: set[str] = set()
    _add_paths(tree, "", paths)
    return paths


def _add_paths(value: Any, path: str, paths: set[str]) -> None:
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        children = [(f"{path}.{key}", child) for key, child in value.items()]
    elif isinstance(value, list):
        children = [(f"{path}[{place}]", child) for place, child in enumerate(value)]
    for name, child in children:
        paths.add(name)
        _add_paths(child, name, paths)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
