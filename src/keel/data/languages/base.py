"""What the languages share: samples by random access, splits that share no string, random numbers from a hash."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import NamedTuple

from keel.errors import KeelError

SPLITS = ("train", "valid", "test")
# Of 16 equal parts of all strings, by a hash of the string, training has 14 and validation and testing have one each.
_PARTS = {"train": range(14), "valid": range(14, 15), "test": range(15, 16)}
_MOST_DRAWS = 10_000


class Sample(NamedTuple):
    """A string in two parts: the model sees the prompt and has to give the target."""

    prompt: str
    target: str

    @property
    def whole(self) -> str:
        """Prompt and target."""
        return self.prompt + self.target


def generator(*what: object) -> random.Random:
    """Return a generator that depends on ``what`` alone, on every machine."""
    return random.Random(hashlib.sha256("\0".join(map(str, what)).encode()).digest())


def draw_in_split(split: str, draw: Callable[[random.Random], Sample], *what: object) -> Sample:
    """Return the first draw whose whole string belongs to ``split``; ``what`` seeds the draws.

    A string belongs to one split by its hash, so splits share none, however many are drawn.
    Raises: KeelError for an unknown split, or where 10,000 draws give none (a language of a handful of strings).
    """
    if split not in _PARTS:
        raise KeelError(f"split {split!r}; expected one of {', '.join(SPLITS)}")
    source = generator(split, *what)
    for _ in range(_MOST_DRAWS):
        sample = draw(source)
        if hashlib.sha256(sample.whole.encode()).digest()[0] % 16 in _PARTS[split]:
            return sample
    raise KeelError(
        f"no string of the {split} split in {_MOST_DRAWS:,} draws: the language is too small; allow longer strings"
    )
