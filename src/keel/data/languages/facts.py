"""Stories of who is where: a language in which a contradiction is a matter of bookkeeping, and judged exactly (DTA §11.3, §11.7).

    Mara went to the garden. Tom is in the kitchen. Mara is in the garden.

A ``went to`` moves a person and contradicts nothing. An ``is in`` contradicts the story where the person's place is known and is another
one; it does not move the person. The stories are plain English, so that a tokenizer of ordinary text reads them too.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from keel.data.languages.base import Sample, draw_in_split
from keel.errors import KeelError

PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")
PLACES = ("garden", "kitchen", "library", "market", "station", "church", "river", "harbour")
WENT, IS = " went to the ", " is in the "
END = ". "
_STATEMENT = re.compile(f"({'|'.join(PEOPLE)})({WENT}|{IS})({'|'.join(PLACES)})(?=\\.)")
_TOKEN = re.compile("|".join(map(re.escape, sorted((*PEOPLE, *PLACES, WENT, IS, END), key=len, reverse=True))))
Verdict = Literal["new", "moved", "consistent", "contradiction"]


class Statement(NamedTuple):
    """One statement found in a text.

    Attributes:
        person, place: what it says.
        verdict: what it is to the statements before it.
        start, end: characters of the place's name, which is what may contradict.
    """

    person: str
    place: str
    verdict: Verdict
    start: int
    end: int


def judge_facts(text: str) -> list[Statement]:
    """Return every statement of ``text`` in order with its verdict; what is no statement is passed over."""
    known: dict[str, str] = {}
    found = []
    for match in _STATEMENT.finditer(text):
        person, verb, place = match.groups()
        before = known.get(person)
        verdict: Verdict
        if verb == WENT:
            verdict = "moved"
        elif before is None:
            verdict = "new"
        else:
            verdict = "consistent" if before == place else "contradiction"
        if verdict != "contradiction":
            known[person] = place
        found.append(Statement(person, place, verdict, *match.span(3)))
    return found


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The language, and how its stories are drawn.

    Attributes:
        people, places: how many there are, 2 to 8 each.
        statements: of a story before the one to complete, at least 1.
        moves: share of the statements about people already placed that move them, in [0, 1].
        seed: of all stories.
    """

    people: int = 4
    places: int = 8
    statements: int = 12
    moves: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in (("people", len(PEOPLE)), ("places", len(PLACES))):
            if not 2 <= getattr(self, name) <= most:
                raise KeelError(f"facts: {name}={getattr(self, name)}; give 2 to {most}")
        if self.statements < 1 or not 0 <= self.moves <= 1:
            raise KeelError(
                f"facts: statements={self.statements}, moves={self.moves}; give at least 1, and a share in [0, 1]"
            )

    @property
    def family(self) -> str:
        """What its metrics are called."""
        return "facts"

    @property
    def alphabet(self) -> list[str]:
        """The tokens of the language."""
        return [*PEOPLE[: self.people], *PLACES[: self.places], WENT, IS, END]

    @property
    def longest(self) -> int:
        """Tokens of the longest string."""
        return 4 * (self.statements + 1)

    def tokens(self, text: str) -> list[str]:
        """Split a story into tokens."""
        return _TOKEN.findall(text)

    def harder(self) -> dict[str, Facts]:
        """Return the sets of the extrapolation by name: two and four times as many statements."""
        counts = (2 * self.statements, 4 * self.statements)
        fields = {"people": self.people, "places": self.places, "moves": self.moves, "seed": self.seed}
        return {f"L{4 * count}": Facts(statements=count, **fields) for count in counts}  # type: ignore[arg-type]

    def judge(self, sample: Sample, generated: str) -> dict[str, tuple[float, float]]:
        """Return numerator and denominator of every metric for one completion: the place is right, or contradicts."""
        last = judge_facts(sample.prompt + generated.split(".")[0] + ".")
        wrong = bool(last) and last[-1].verdict == "contradiction"
        return {"exact_match": (float(generated == sample.target), 1.0), "contradiction": (float(wrong), 1.0)}

    def sample(self, split: str, index: int) -> Sample:
        """Return story ``index`` of a split: all up to ``NAME is in the`` is the prompt, the place the target."""
        return draw_in_split(split, self._draw, "facts", self, index)

    def story(self, source: random.Random, statements: int, contradictions: float = 0.0) -> str:
        """Return a story of so many statements; of those that could contradict, a share of ``contradictions`` does."""
        known: dict[str, str] = {}
        return "".join(self._statement(source, known, contradictions) for _ in range(statements))

    def _statement(self, source: random.Random, known: dict[str, str], contradictions: float) -> str:
        person, place = source.choice(PEOPLE[: self.people]), source.choice(PLACES[: self.places])
        if person not in known or source.random() < self.moves:
            known[person] = place
            return person + WENT + place + END
        if source.random() < contradictions:
            others = [other for other in PLACES[: self.places] if other != known[person]]
            return person + IS + source.choice(others) + END
        return person + IS + known[person] + END

    def _draw(self, source: random.Random) -> Sample:
        known: dict[str, str] = {}
        prompt = "".join(self._statement(source, known, 0.0) for _ in range(self.statements))
        person = source.choice(sorted(known))
        return Sample(prompt + person + IS, known[person] + END)
