"""Multiple choice by the likelihood of options, and CoLA asked the same way (GTCA section 4.1, App. B).

An item is right when its right option has the greatest sum of log-probabilities; where two are the greatest alike, it is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from keel.data.questions import Question, prompt_of
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, accuracy
from keel.evaluation.options import Request, option_scores
from keel.model import KeelForCausalLM
from keel.trees.fields import FieldReader


def multiple_choice(
    model: KeelForCausalLM,
    reader: FieldReader,
    questions: Sequence[Question],
    family: str,
    *,
    shots: int = 0,
    demonstrations: Sequence[Question] = (),
    seed: int = 0,
    token_budget: int = 8192,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[ItemMetric]:
    """Ask every question.

    Args:
        family: ``<family>.accuracy`` is the metric; for questions of style ``acceptability``, ``<family>.mcc``.
        shots: demonstrations before each question, drawn by ``seed`` for the question's place, of its group where that has enough.
        demonstrations: to draw from; none of the questions may be among them.
    Raises: KeelError for fewer demonstrations than shots, or one that is asked.
    """
    if shots > len(demonstrations) or set(questions) & set(demonstrations[: None if shots else 0]):
        raise KeelError(
            f"{family}: {shots} shots from {len(demonstrations)} demonstrations; give at least as many, none of them asked"
        )
    requests = requests_of(questions, shots, demonstrations, seed)
    scores = option_scores(model, reader, requests, token_budget=token_budget, device=device, progress=progress)
    if questions[0].style == "acceptability":
        return [_matthews(family, questions, scores)]
    hits = [best(row) == question.answer for question, row in zip(questions, scores, strict=True)]
    return [accuracy(f"{family}.accuracy", hits)]


def requests_of(
    questions: Sequence[Question], shots: int, demonstrations: Sequence[Question], seed: int
) -> list[Request]:
    """Return prompt and options of every question; see ``multiple_choice``."""
    requests = []
    for index, question in enumerate(questions):
        of_group = [one for one in demonstrations if one.group == question.group]
        pool = of_group if len(of_group) >= shots else list(demonstrations)
        shown = random.Random(f"{seed} {index}").sample(pool, shots)
        requests.append(Request(prompt_of(question, shown), question.continuations()))
    return requests


def best(scores: Sequence[float]) -> int | None:
    """Return the index of the greatest score, None where it is not alone."""
    greatest = max(scores)
    return None if list(scores).count(greatest) > 1 else list(scores).index(greatest)


def _matthews(family: str, questions: Sequence[Question], scores: Sequence[Sequence[float]]) -> ItemMetric:
    """Matthews' correlation of what was judged with what is so; a draw is judged unacceptable."""
    return ItemMetric(
        name=f"{family}.mcc",
        unit="Matthews' correlation",
        higher_is_better=True,
        numerators=tuple(float(best(row) == 1) for row in scores),
        denominators=tuple(float(question.answer) for question in questions),
        matthews=True,
    )
