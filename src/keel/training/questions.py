"""Questions as samples to learn from: the prompt is read, the right option is learnt (GTCA section 3.4, App. B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from keel.data import load_corpus
from keel.data.corpora import CorpusConfig
from keel.data.questions import Question, cloze_questions, prompt_of, read_questions
from keel.errors import KeelError
from keel.streams.tree import TreeStream
from keel.training.sections import Phase
from keel.training.tree_sections import TrainingQuestions
from keel.trees.fields import FieldReader, Row, row_inputs

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class QuestionData:
    """What phases of questions learn from.

    Attributes:
        train, valid: questions; none is in both.
        reader: turns them into rows, with the trees of the arm.
        num_layers: of the host.
    """

    train: Sequence[Question]
    valid: Sequence[Question]
    reader: FieldReader
    num_layers: int

    def samples(self, phase: Phase) -> tuple[QuestionSamples, list[Sample]]:
        """Return the samples of a phase and those of its validation curve.

        Raises: KeelError where no question is short enough for its window.
        """
        train, valid = (QuestionSamples(self, questions, phase) for questions in (self.train, self.valid))
        return train, valid.__getitems__(range(len(valid)))


class QuestionSamples(Dataset[Sample]):
    """Samples {"input_ids", "labels", "row"}: labels are the tokens of the right option, -100 before them.

    Questions of more than the phase's window of tokens are left out. ``collate`` makes a batch of samples.
    """

    def __init__(self, data: QuestionData, questions: Sequence[Question], phase: Phase) -> None:
        self.data, self.with_trees = data, phase.trees
        texts = [(prompt_of(question), question.continuations()[question.answer]) for question in questions]
        lengths = [len(data.reader.tokenizer.encode(a + b, add_special_tokens=False).ids) for a, b in texts]
        self.texts = [text for text, length in zip(texts, lengths, strict=True) if length < phase.window]
        if not self.texts:
            raise KeelError(
                f"phase {phase.name!r}: of {len(texts)} questions none has at most {phase.window} tokens; lengthen the window"
            )

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        """Return one question with its right option."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return several questions; a loader asks for those of a batch at once, and their fields are parsed together."""
        rows = self.data.reader.read_all([self.texts[index] for index in indices], with_trees=self.with_trees)
        return [_sample(row) for row in rows]

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Pad samples on the right and lay their trees out."""
        rows: list[Row] = [sample["row"] for sample in samples]
        longest = max(len(row.ids) for row in rows)
        batch: dict[str, Any] = {
            name: torch.stack([_padded(sample[name], longest, filling) for sample in samples])
            for name, filling in (("input_ids", 0), ("labels", -100))
        }
        batch["attention_mask"] = torch.stack([_padded(torch.ones(len(row.ids)), longest, 0).long() for row in rows])
        return {**batch, **row_inputs(rows, self.data.num_layers)}


def _sample(row: Row) -> Sample:
    ids = torch.tensor(row.ids)
    labels = ids.clone()
    labels[: row.num_prompt] = -100
    return {"input_ids": ids, "labels": labels, "row": row}


def _padded(values: Tensor, length: int, filling: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=filling)


def training_questions(
    wanted: TrainingQuestions, asked: Sequence[Question] = ()
) -> tuple[list[Question], list[Question]]:
    """Return the questions to learn from and those of the validation curve; the same for all arms and seeds.

    Args: asked: of the evaluation, which nobody may have learnt: MMLU's own splits share some.
    Raises: KeelError for a source that cannot be read, or has too little.
    """
    questions: list[Question] = []
    if wanted.cloze is not None:
        corpus = load_corpus(CorpusConfig(source=wanted.cloze.source))
        questions += cloze_questions(corpus.train, wanted.cloze.count)
    if wanted.mmlu is not None:
        known = {_content(question) for question in asked}
        questions += [question for question in read_questions("mmlu", wanted.mmlu) if _content(question) not in known]
    if len(questions) <= wanted.valid:
        raise KeelError(f"data.questions: {len(questions)} in all, {wanted.valid} are for validation; give more")
    kept = {index * len(questions) // wanted.valid for index in range(wanted.valid)}
    return (
        [question for index, question in enumerate(questions) if index not in kept],
        [question for index, question in enumerate(questions) if index in kept],
    )


def _content(question: Question) -> tuple[str, frozenset[str]]:
    """Return what two questions have in common that are the same, with the options in whatever order."""
    return question.text.strip(), frozenset(option.strip() for option in question.options)


def set_ramp(model: Any, phase: Phase, first_step: int) -> None:
    """Let the lambda of tree streams rise from 0 over the phase's ``ramp``, counted from its first step; without one it is whole."""
    for stream in getattr(getattr(model, "wires", None), "streams", {}).values():
        if isinstance(stream, TreeStream):
            steps = round(phase.ramp * phase.steps)
            start = first_step if steps else 0
            stream.config = replace(stream.config, start_step=start, warmup_steps=steps)
