"""Labelled precision, recall and F1 of parse trees by the rules of evalb with Collins' parameters.

The root (TOP) and parts of speech do not count, punctuation is taken out of sentence and spans, PRT counts as ADVP, and equal brackets
count as often as they occur.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keel.errors import KeelError

PUNCTUATION = frozenset([",", ":", "``", "''", "."])
_EQUAL = {"PRT": "ADVP"}
Constituent = tuple[int, int, str]
"""First word, word behind the last, label."""


@dataclass(frozen=True)
class Score:
    """Brackets that match, that were given, that were wanted, and sentences that match wholly; all counts."""

    matched: int = 0
    given: int = 0
    wanted: int = 0
    exact: int = 0
    sentences: int = 0

    @property
    def precision(self) -> float:
        """In percent; 0 where nothing was given."""
        return 100 * self.matched / self.given if self.given else 0.0

    @property
    def recall(self) -> float:
        """In percent; 0 where nothing was wanted."""
        return 100 * self.matched / self.wanted if self.wanted else 0.0

    @property
    def f1(self) -> float:
        """In percent."""
        both = self.given + self.wanted
        return 200 * self.matched / both if both else 0.0


def brackets(constituents: Iterable[Constituent], tags: Sequence[str]) -> Counter[Constituent]:
    """Return what counts of a tree: its labelled spans without punctuation, which ``tags`` (of the gold tree) tell."""
    place = [0]
    for tag in tags:
        place.append(place[-1] + (tag not in PUNCTUATION))
    counted: Counter[Constituent] = Counter()
    for begin, end, label in constituents:
        if place[begin] < place[end] and label not in ("TOP", "ROOT", "S1", ""):
            counted[place[begin], place[end], _EQUAL.get(label, label)] += 1
    return counted


def score(
    given: Sequence[Sequence[Constituent]], wanted: Sequence[Sequence[Constituent]], tags: Sequence[Sequence[str]]
) -> Score:
    """Score trees against gold trees with these parts of speech. Raises: KeelError for other numbers of sentences."""
    if not len(given) == len(wanted) == len(tags):
        raise KeelError(
            f"evalb: {len(given)} trees, {len(wanted)} gold trees, {len(tags)} rows of tags; give as many of each"
        )
    matched = sizes_given = sizes_wanted = exact = 0
    for mine, theirs, row in zip(given, wanted, tags, strict=True):
        found, expected = brackets(mine, row), brackets(theirs, row)
        matched += (found & expected).total()
        sizes_given, sizes_wanted = sizes_given + found.total(), sizes_wanted + expected.total()
        exact += found == expected
    return Score(matched, sizes_given, sizes_wanted, exact, len(given))
