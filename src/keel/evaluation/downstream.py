"""GLUE tasks and SQuAD as what an encoder is fine-tuned on: from texts to batches, from outputs to answers and scores.

Shapes: B examples of a batch, T tokens.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keel.data.glue import TextPair
from keel.data.squad import Question
from keel.evaluation.items import ItemMetric, accuracy, mean
from keel.evaluation.states import pad_rows

_STRIDE = 0.5  # of the room for a paragraph, between the starts of two windows
_QUESTION = 0.4  # most of a window that a question may take
_LONGEST_ANSWER = 30


class PairTask:
    """A class, or a number, for a text or a pair of texts, which stand between [CLS] and [SEP]: ``[CLS] a [SEP] b [SEP]``.

    Args:
        numeric: the label is a number, learnt in units of its spread among ``train`` and scored by Pearson's r; else accuracy.
        length: most tokens; the longer text is cut first.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, train: Sequence[TextPair], *, numeric: bool, length: int
    ) -> None:
        self.tokenizer, self.numeric, self.length = tokenizer, numeric, length
        labels = np.array([one.label for one in train])
        self.middle, self.scale = (float(labels.mean()), float(labels.std()) or 1.0) if numeric else (0.0, 1.0)
        self._rows: dict[TextPair, list[int]] = {}

    def row(self, pair: TextPair) -> list[int]:
        """Return the ids of a pair."""
        if pair not in self._rows:
            parts = [_ids(self.tokenizer, text) for text in (pair.first, pair.second) if text is not None]
            while sum(map(len, parts)) > self.length - 1 - len(parts):
                max(parts, key=len).pop()
            row = [int(self.tokenizer.cls_token_id)]
            for part in parts:
                row += [*part, int(self.tokenizer.sep_token_id)]
            self._rows[pair] = row
        return self._rows[pair]

    def batch(self, examples: Sequence[TextPair]) -> dict[str, Tensor]:
        """See ``Task``."""
        ids_BT, mask_BT = pad_rows(self.tokenizer, [self.row(pair) for pair in examples])
        labels_B = torch.tensor([(pair.label - self.middle) / self.scale for pair in examples])
        return {
            "input_ids": ids_BT,
            "attention_mask": mask_BT,
            "labels": labels_B.float() if self.numeric else labels_B.long(),
        }

    def answers(self, outputs: Any, examples: Sequence[TextPair]) -> list[float]:
        """See ``Task``."""
        logits = outputs.logits.float().cpu()
        found: list[float] = (logits[:, 0] * self.scale + self.middle if self.numeric else logits.argmax(-1)).tolist()
        return found

    def score(self, answers: Sequence[float], examples: Sequence[TextPair]) -> float:
        """See ``Task``; r of answers that are all alike is 0."""
        return self.metric("score", answers, examples).value

    def metric(self, name: str, answers: Sequence[float], examples: Sequence[TextPair]) -> ItemMetric:
        """Return accuracy or Pearson's r over examples."""
        labels = [pair.label for pair in examples]
        if self.numeric:
            return correlation(name, answers, labels)
        return accuracy(name, [float(guess == label) for guess, label in zip(answers, labels, strict=True)])


def correlation(name: str, guesses: Sequence[float], labels: Sequence[float]) -> ItemMetric:
    """Return Pearson's r as a mean over items: r plus each item's influence on it, whose own mean is zero.

    The value is r itself, and a resample's mean is the r of the resample to first order, so that intervals are those of r. 0 where
    either side does not vary.
    """
    x, y = np.array(guesses, dtype=np.float64), np.array(labels, dtype=np.float64)
    if x.std() < 1e-9 or y.std() < 1e-9:
        return mean(name, [0.0] * len(x), unit="Pearson's r", higher_is_better=True)
    x, y = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()
    r = float((x * y).mean())
    influence = x * y - r / 2 * (x**2 + y**2)
    return mean(name, (r + influence).tolist(), unit="Pearson's r", higher_is_better=True)


@dataclass(frozen=True)
class Span:
    """A window on a paragraph behind its question: ids, the characters of each id in the paragraph (none: -1), and the answer's tokens.

    An answer that is not in the window is (0, 0), the place of [CLS].
    """

    question: Question
    ids: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    answer: tuple[int, int]


class SpanTask:
    """Which part of a paragraph answers a question: ``[CLS] question [SEP] paragraph [SEP]``, a long paragraph in several windows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length

    def windows(self, questions: Sequence[Question]) -> list[Span]:
        """Return all windows of all questions, in order."""
        return [span for question in questions for span in self._windows(question)]

    def _windows(self, question: Question) -> list[Span]:
        asked = _ids(self.tokenizer, question.question)[: int(self.length * _QUESTION)]
        found = self.tokenizer(question.context, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, places = found["input_ids"], [tuple(place) for place in found["offset_mapping"]]
        room = self.length - len(asked) - 3
        cls, sep = int(self.tokenizer.cls_token_id), int(self.tokenizer.sep_token_id)
        after = question.start + len(question.answers[0])
        inside = [at for at, (begin, end) in enumerate(places) if begin < after and end > question.start]
        spans = []
        for start in range(0, max(1, len(ids) - room + int(room * _STRIDE)), max(1, int(room * _STRIDE))):
            part = slice(start, start + room)
            ahead = len(asked) + 2
            whole = bool(inside) and start <= inside[0] and inside[-1] < start + room
            answer = (inside[0] - start + ahead, inside[-1] - start + ahead) if whole else (0, 0)
            row = (cls, *asked, sep, *ids[part], sep)
            where = ((-1, -1),) * ahead + tuple(places[part]) + ((-1, -1),)
            spans.append(Span(question, row, where, answer))
        return spans

    def batch(self, examples: Sequence[Span]) -> dict[str, Tensor]:
        """See ``Task``."""
        ids_BT, mask_BT = pad_rows(self.tokenizer, [span.ids for span in examples])
        starts, ends = ([span.answer[side] for span in examples] for side in (0, 1))
        return {
            "input_ids": ids_BT,
            "attention_mask": mask_BT,
            "start_positions": torch.tensor(starts),
            "end_positions": torch.tensor(ends),
        }

    def answers(self, outputs: Any, examples: Sequence[Span]) -> list[tuple[float, str]]:
        """Return for each window its likeliest answer with its logit; see ``Task``."""
        starts, ends = outputs.start_logits.float().cpu(), outputs.end_logits.float().cpu()
        return [_best(starts[row], ends[row], span) for row, span in enumerate(examples)]

    def score(self, answers: Sequence[tuple[float, str]], examples: Sequence[Span]) -> float:
        """Return the mean F1 of questions; see ``Task``."""
        texts, questions = best_of_windows(answers, examples)
        return float(np.mean([f1(text, question.answers) for text, question in zip(texts, questions, strict=True)]))


def best_of_windows(answers: Sequence[tuple[float, str]], spans: Sequence[Span]) -> tuple[list[str], list[Question]]:
    """Return for each question the answer of the window that is surest of its own, and the questions in order."""
    best: dict[str, tuple[float, str]] = {}
    questions: dict[str, Question] = {}
    for answer, span in zip(answers, spans, strict=True):
        ident = span.question.ident
        questions[ident] = span.question
        if ident not in best or answer[0] > best[ident][0]:
            best[ident] = answer
    return [best[ident][1] for ident in questions], list(questions.values())


def _best(start_T: Tensor, end_T: Tensor, span: Span) -> tuple[float, str]:
    inside = torch.tensor([place[0] >= 0 for place in span.places])
    count = len(span.places)
    both = start_T[:count, None] + end_T[None, :count]
    allowed = torch.ones(count, count, dtype=torch.bool).triu().tril(_LONGEST_ANSWER - 1) & inside[:, None] & inside
    if not bool(allowed.any()):
        return -float("inf"), ""
    at = int(both.masked_fill(~allowed, -torch.inf).argmax())
    begin, end = divmod(at, count)
    text = span.question.context[span.places[begin][0] : span.places[end][1]].strip()
    return float(both[begin, end]), text


def squad_metrics(texts: Sequence[str], questions: Sequence[Question]) -> list[ItemMetric]:
    """Return ``squad.em`` and ``squad.f1``, shares over questions, as the official script scores them."""
    pairs = list(zip(texts, questions, strict=True))
    exact = [float(any(normalised(text) == normalised(answer) for answer in one.answers)) for text, one in pairs]
    return [accuracy("squad.em", exact), accuracy("squad.f1", [f1(text, one.answers) for text, one in pairs])]


def normalised(text: str) -> str:
    """Return an answer as the official script compares it: lower case, without punctuation, articles and spare blanks."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1(text: str, answers: Sequence[str]) -> float:
    """Return the best F1 of an answer's words against the right answers."""
    return max(_f1(normalised(text).split(), normalised(answer).split()) for answer in answers)


def _f1(guess: list[str], right: list[str]) -> float:
    common = sum((Counter(guess) & Counter(right)).values())
    return 2 * common / (len(guess) + len(right)) if common else 0.0


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])
