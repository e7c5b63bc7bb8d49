"""Dyck-3 completion: well-nested words over ``()``, ``[]``, ``{}`` (S-Former, section 4.1.2 and App. A.2).

A word of ``length`` brackets reaches depth ``depth`` exactly. It is drawn as a random path of openings and closings, uniformly over all
paths that end at zero, stay at or below ``depth`` and reach it; every opening takes one of the three kinds at random. A word is cut at a
random place between a quarter and three quarters of it where something is open; the first part is the prompt. The depth of a bracket is
the number of pairs that are open at it, itself included.

A prompt has many completions. ``exact`` asks for the one that was drawn, ``valid`` for any that closes everything and nothing else; closing
what is open, in order, and stopping is always valid, so a model that only counts well can be valid without ever being exact.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from dataclasses import dataclass

from keel.data.languages.base import Sample, draw_in_split, generator
from keel.errors import KeelError

PAIRS = {"(": ")", "[": "]", "{": "}"}
_OPENERS = "".join(PAIRS)
BRACKETS = "()[]{}"


@dataclass(frozen=True, kw_only=True)
class Dyck:
    """The language, and how its strings are drawn.

    Attributes:
        min_length, max_length: brackets of a word, even; the length is uniform over the even numbers between.
        min_depth, max_depth: greatest depth of a word, uniform between them, but never more than half its length.
        seed: of all strings.
    """

    min_length: int = 8
    max_length: int = 64
    min_depth: int = 3
    max_depth: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        lengths, depths = (self.min_length, self.max_length), (self.min_depth, self.max_depth)
        if self.min_length < 4 or self.max_length < self.min_length or any(length % 2 for length in lengths):
            raise KeelError(f"dyck: lengths {lengths}; give even numbers, min_length from 4 up to max_length")
        if self.min_depth < 1 or self.max_depth < self.min_depth or self.min_depth > self.min_length // 2:
            raise KeelError(
                f"dyck: depths {depths}; give min_depth from 1 up to max_depth, and at most half of min_length "
                f"({self.min_length // 2})"
            )

    @property
    def family(self) -> str:
        """What its metrics are called."""
        return "dyck"

    @property
    def alphabet(self) -> list[str]:
        """The tokens of the language."""
        return list(BRACKETS)

    @property
    def longest(self) -> int:
        """Tokens of the longest string."""
        return self.max_length

    def tokens(self, text: str) -> list[str]:
        """Split a string into tokens."""
        return list(text)

    def harder(self) -> dict[str, Dyck]:
        """Return the sets of the extrapolation by name: lengths 64, 80, 100 and greatest depths 3 to 8, each exactly."""
        lengths = {
            f"L{length}": dataclasses.replace(self, min_length=length, max_length=length) for length in (64, 80, 100)
        }
        depths = {
            f"d{depth}": dataclasses.replace(
                self, min_depth=depth, max_depth=depth, min_length=max(self.min_length, 2 * depth)
            )
            for depth in range(3, 9)
        }
        return lengths | depths

    def judge(self, sample: Sample, generated: str) -> dict[str, tuple[float, float]]:
        """Return numerator and denominator of every metric of App. A.2 for one completion."""
        return {name: (float(value), 1.0) for name, value in outcome(sample, generated).items()}

    def sample(self, split: str, index: int) -> Sample:
        """Return string ``index`` of a split."""
        return draw_in_split(split, self._draw, "dyck", self, index)

    def invalid(self, split: str, index: int) -> str:
        """Return string ``index`` with one to three random brackets deleted, replaced or inserted, such that it is no word."""
        source = generator("dyck invalid", self, split, index)
        word = self.sample(split, index).whole
        while valid(word):
            for _ in range(source.randint(1, 3)):
                word = _damaged(source, word)
        return word

    def _draw(self, source: random.Random) -> Sample:
        length = 2 * source.randint(self.min_length // 2, self.max_length // 2)
        depth = source.randint(self.min_depth, min(self.max_depth, length // 2))
        word = _word(source, length, depth)
        heights = [0, *itertools.accumulate(1 if bracket in PAIRS else -1 for bracket in word)]
        cut = source.choice([at for at in range((length + 3) // 4, 3 * length // 4 + 1) if heights[at]])
        return Sample(word[:cut], word[cut:])


def valid(text: str) -> bool:
    """Whether ``text`` is a word: every bracket is closed, by its own kind, in order. The empty string is one."""
    opened: list[str] = []
    for bracket in text:
        if bracket in PAIRS:
            opened.append(PAIRS[bracket])
        elif not opened or opened.pop() != bracket:
            return False
    return not opened


def outcome(sample: Sample, generated: str) -> dict[str, bool]:
    """Judge a completion (App. A.2): ``structural_accuracy``, ``exact_match``, ``valid_not_exact``, ``syntax_error``."""
    fits = valid(sample.prompt + generated)
    exact = generated == sample.target
    return {
        "structural_accuracy": fits,
        "exact_match": exact,
        "valid_not_exact": fits and not exact,
        "syntax_error": not fits,
    }


def depths(text: str) -> list[int]:
    """Return the depth of every bracket: the pairs open at it, itself included; below zero where too many close."""
    found, depth = [], 0
    for bracket in text:
        if bracket in PAIRS:
            depth += 1
            found.append(depth)
        else:
            found.append(depth)
            depth -= 1
    return found


def _damaged(source: random.Random, word: str) -> str:
    place, bracket = source.randrange(len(word)), source.choice(BRACKETS)
    before, after = word[:place], word[place + 1 :]
    return source.choice([before + after, before + bracket + after, before + bracket + word[place:]]) or bracket


def _word(source: random.Random, length: int, depth: int) -> str:
    """Return a word of ``length`` that reaches ``depth`` and no more, uniformly over the paths of openings and closings."""
    word: list[str] = []
    opened: list[str] = []
    reached = False
    for left in range(length, 0, -1):
        here = len(opened)
        up = _paths(left - 1, here + 1, depth, reached or here + 1 == depth)
        down = _paths(left - 1, here - 1, depth, reached)
        if source.randrange(up + down) < up:
            bracket = source.choice(_OPENERS)
            opened.append(PAIRS[bracket])
            word.append(bracket)
            reached = reached or here + 1 == depth
        else:
            word.append(opened.pop())
    return "".join(word)


@functools.cache
def _paths(left: int, height: int, depth: int, reached: bool) -> int:
    """Count the ways to come from ``height`` to zero in ``left`` steps between zero and ``depth``, touching ``depth`` if not yet."""
    if height < 0 or height > depth:
        return 0
    if left == 0:
        return int(height == 0 and reached)
    return _paths(left - 1, height - 1, depth, reached) + _paths(
        left - 1, height + 1, depth, reached or height + 1 == depth
    )
