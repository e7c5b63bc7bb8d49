"""Questions about paragraphs, as SQuAD has them; official JSON and JSON lines, divided by article where there is no training split."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from keel.data.conllu import data_path, read_text
from keel.data.rows import read_rows
from keel.errors import KeelError


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question: the article and paragraph that it is about, its right answers, and where in the paragraph the first stands."""

    ident: str
    title: str
    context: str
    question: str
    answers: tuple[str, ...]
    start: int


def load_squad(source: str) -> list[Question]:
    """Read every question of a file, of the JSON files of a folder or of a dataset of the Hub, each question once.

    Official JSON (``data`` → ``paragraphs`` → ``qas``), or JSON lines with ``id``, ``title``, ``context``, ``question`` and ``answers``
    (``{"text": […]}``). Questions without an answer are left out; an answer without its place is looked for in the paragraph.

    Raises: KeelError for a missing or damaged file, or an answer that is not in its paragraph.
    """
    found: dict[str, Question] = {}
    for where, questions in _sources(source):
        try:
            for question in questions:
                found.setdefault(question.ident, question)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KeelError(f"{where}: not questions in a shape of SQuAD ({error!r})") from error
    if not found:
        raise KeelError(f"{source}: no questions; give SQuAD's JSON, or JSON lines")
    return list(found.values())


def _sources(source: str) -> Iterator[tuple[str, Iterator[Question]]]:
    """Yield the files of a source, or the splits of a dataset, with their questions."""
    if source.startswith("hub:"):
        for split in ("train", "validation"):
            name = f"{source}::{split}"
            yield name, (question for row in read_rows(name) for question in _of_row(row))
        return
    path = data_path(source)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if ".json" in file.name)
    for file in files:
        yield str(file), _questions(read_text(file))


def _questions(text: str) -> Iterator[Question]:
    start = text.lstrip()[:400]
    if '"data"' in start or '"version"' in start:
        for article in json.loads(text)["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    answers = [(one["text"], one.get("answer_start", -1)) for one in asked["answers"]]
                    yield from _question(
                        asked["id"], article["title"], paragraph["context"], asked["question"], answers
                    )
        return
    for line in text.split("\n"):
        if line.strip():
            yield from _of_row(json.loads(line))


def _of_row(row: Mapping[str, Any]) -> Iterator[Question]:
    places = row["answers"].get("answer_start") or [-1] * len(row["answers"]["text"])
    answers = list(zip(row["answers"]["text"], places, strict=True))
    yield from _question(row["id"], row["title"], row["context"], row["question"], answers)


def _question(
    ident: str, title: str, context: str, question: str, answers: list[tuple[str, Any]]
) -> Iterator[Question]:
    if not answers:
        return
    text, place = answers[0]
    start = int(place) if place >= 0 else context.find(text)
    if start < 0 or context[start : start + len(text)] != text:
        raise ValueError(f"the answer {text!r} of question {ident} does not stand in its paragraph")
    texts = tuple(dict.fromkeys(answer for answer, _ in answers))
    yield Question(ident=ident, title=title, context=context, question=question, answers=texts, start=start)


def divide_by_article(
    questions: list[Question], shares: tuple[float, float] = (0.1, 0.2), seed: int = 0
) -> tuple[list[Question], list[Question], list[Question]]:
    """Divide questions into those to train, to hold out and to test on, such that no article is in two parts.

    Args:
        shares: of the articles that are held out and tested on; at least one each.
        seed: which articles these are.
    Raises: KeelError for fewer than three articles.
    """
    titles = sorted({question.title for question in questions})
    if len(titles) < 3:
        raise KeelError(f"{len(titles)} articles cannot be divided into three parts; give questions about more")
    order = np.random.default_rng(seed).permutation(len(titles)).tolist()
    held, test = (max(1, round(share * len(titles))) for share in shares)
    part_of = {
        titles[index]: 1 if place < held else 2 if place < held + test else 0 for place, index in enumerate(order)
    }
    parts: tuple[list[Question], list[Question], list[Question]] = ([], [], [])
    for question in questions:
        parts[part_of[question.title]].append(question)
    return parts
