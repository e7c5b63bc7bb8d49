"""Questions with options, and the prompts that the tree paper asks them with (GTCA App. B).

A question's options are scored as continuations of its prompt. Every prompt ends with ``Answer:``, and an option follows behind a
space, as its full text; ``keel.trees.fields`` knows the labels.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from keel.data.rows import read_rows
from keel.data.sources import Document
from keel.errors import KeelError, suggest

Item = TypeVar("Item")
Style = Literal["question", "context", "acceptability"]
LETTERS = "ABCDEFGHIJ"
_CHOOSE = (
    "Instruction: Choose the correct option based on the question. Output the full text of the chosen option exactly as it appears "
    "under Options."
)
_JUDGE = (
    "Instruction: You are a linguist. Decide if the following English sentence is grammatically acceptable. Output 1 for acceptable, "
    "0 for unacceptable. Output only a single character: 0 or 1."
)
_CONTEXT = "Context: Read the context and choose the most plausible continuation."


@dataclass(frozen=True, kw_only=True)
class Question:
    """One item.

    Attributes:
        text: what is asked; white space is made single.
        options: in the order in which they are shown, at least two.
        answer: index of the right one.
        style: the prompt: App. B.1 and B.5, B.4, or B.3, which shows no options.
        group: items of which demonstrations are taken for it; MMLU's subject.
    Raises: KeelError for fewer than two options, or an answer that is none of them.
    """

    text: str
    options: tuple[str, ...]
    answer: int
    style: Style = "question"
    group: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", " ".join(self.text.split()))
        object.__setattr__(self, "options", tuple(" ".join(str(option).split()) for option in self.options))
        if not 2 <= len(self.options) <= len(LETTERS) or not 0 <= self.answer < len(self.options):
            raise KeelError(
                f"question {self.text[:60]!r}: {len(self.options)} options and answer {self.answer}; expected 2 to "
                f"{len(LETTERS)} options and the index of one of them"
            )

    def continuations(self) -> list[str]:
        """Return what may follow the prompt, one for each option."""
        return [f" {option}" for option in self.options]


def prompt_of(question: Question, demonstrations: Sequence[Question] = ()) -> str:
    """Return the prompt up to ``Answer:``, with demonstrations answered before it (k-shot)."""
    shown = [_asked(one) + one.continuations()[one.answer] for one in demonstrations]
    head = _JUDGE if question.style == "acceptability" else _CHOOSE
    return "\n".join([head, *shown, _asked(question)])


def _asked(question: Question) -> str:
    if question.style == "acceptability":
        return f"Sentence: {question.text}\nAnswer:"
    begin = f"{_CONTEXT}\n{question.text}" if question.style == "context" else f"Question: {question.text}"
    options = (f"{letter}. {option}" for letter, option in zip(LETTERS, question.options, strict=False))
    return "\n".join([begin, "Options:", *options, "Answer:"])


def _hellaswag(row: Mapping[str, Any]) -> Question:
    return Question(text=row["ctx"], options=tuple(row["endings"]), answer=int(row["label"]), style="context")


def _winogrande(row: Mapping[str, Any]) -> Question:
    return Question(text=row["sentence"], options=(row["option1"], row["option2"]), answer=int(row["answer"]) - 1)


def _mmlu(row: Mapping[str, Any]) -> Question:
    subject = str(row.get("subject", ""))
    return Question(text=row["question"], options=tuple(row["choices"]), answer=int(row["answer"]), group=subject)


def _cola(row: Mapping[str, Any]) -> Question:
    return Question(text=row["sentence"], options=("0", "1"), answer=int(row["label"]), style="acceptability")


_MAKERS: dict[str, Callable[[Mapping[str, Any]], Question]] = {
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
    "mmlu": _mmlu,
    "cola": _cola,
}


def read_questions(benchmark: str, source: str, count: int | None = None, seed: int = 0) -> list[Question]:
    """Read the items of a benchmark, with the fields of its own files.

    Args:
        benchmark: ``hellaswag``, ``winogrande``, ``mmlu`` or ``cola``.
        source: see ``keel.data.rows.read_rows``.
        count: as many, chosen at random by ``seed``, in the order of the source; None for all.
    Raises: KeelError for an unknown benchmark, or a source without its fields.
    """
    if benchmark not in _MAKERS:
        raise KeelError(f"no benchmark {benchmark!r} of questions; {suggest(benchmark, _MAKERS)}")
    rows = chosen(read_rows(source), count, seed)
    try:
        return [_MAKERS[benchmark](row) for row in rows]
    except (KeyError, TypeError) as error:
        raise KeelError(f"{source} is not of the form of {benchmark} (field {error}); give its own files") from error


def chosen(items: Sequence[Item], count: int | None, seed: int, disjoint_from: int | None = None) -> list[Item]:
    """Return ``count`` of the items at random, in their order; all where there are no more.

    With ``disjoint_from`` they are others than those that this count would choose.
    """
    if disjoint_from is not None:
        left = set(range(len(items))) - set(chosen(range(len(items)), disjoint_from, seed))
        items = [items[index] for index in sorted(left)]
    if count is None or count >= len(items):
        return list(items)
    return [items[index] for index in sorted(random.Random(seed).sample(range(len(items)), count))]


_CHARACTERS_A_GAP, _LEAST_CHARACTERS = 1000, 100_000  # of each document no more is read than so many gaps need
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_SENTENCE = re.compile(r"[A-Z][^.!?]*[.!?]")


def cloze_questions(documents: Sequence[Document], count: int, seed: int = 0, num_options: int = 4) -> list[Question]:
    """Make gaps in running text, as CLOTH has them: one word of a sentence is taken out, and stands among others.

    The sentence before is shown too. CLOTH's teachers thought the wrong options up; ours are words of these documents that are about as
    frequent as the right one, and end alike (-ed, -ing, -ly, -s) where it does.

    Args:
        documents: at least a few thousand words in all; of long ones the beginnings are enough.
        count: questions; every gap is in a sentence of its own, of 8 to 40 words.
    Raises: KeelError where the documents have fewer such sentences, or too few words to choose from.
    """
    share = max(_LEAST_CHARACTERS, count * _CHARACTERS_A_GAP // max(1, len(documents)))
    texts = [document.text[:share] for document in documents]
    counts = Counter(word for text in texts for word in _WORD.findall(text) if word.islower())
    kinds: dict[str, list[str]] = {}
    for word, number in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
        if number > 1 and len(word) > 3 and "'" not in word:
            kinds.setdefault(_ending(word), []).append(word)
    places = {word: (kind, index) for kind, words in kinds.items() for index, word in enumerate(words)}
    pairs = [pair for text in texts for pair in _neighbours(text)]
    chance = random.Random(seed)
    chance.shuffle(pairs)
    questions: list[Question] = []
    for before, sentence in pairs:
        gaps = [match for match in _WORD.finditer(sentence) if match.group() in places]
        if len(questions) == count:
            break
        if gaps and (question := _gap(before, sentence, chance.choice(gaps), kinds, places, chance, num_options)):
            questions.append(question)
    if len(questions) < count:
        raise KeelError(
            f"cloze: {len(documents)} document(s) give {len(questions)} gaps, {count} are wanted; give more text or lower the count"
        )
    return questions


def _neighbours(text: str) -> list[tuple[str, str]]:
    """Return every sentence of 8 to 40 words with the one before it."""
    sentences = [" ".join(match.group().split()) for match in _SENTENCE.finditer(text)]
    pairs = itertools.pairwise(sentences)
    return [(a, b) for a, b in pairs if 8 <= len(b.split()) <= 40 and len(a.split()) <= 40 and "_" not in a + b]


def _ending(word: str) -> str:
    return next((ending for ending in ("ing", "ed", "ly", "s") if word.endswith(ending)), "")


def _gap(
    before: str,
    sentence: str,
    gap: re.Match[str],
    kinds: Mapping[str, list[str]],
    places: Mapping[str, tuple[str, int]],
    chance: random.Random,
    num_options: int,
) -> Question | None:
    kind, place = places[gap.group()]
    near = kinds[kind][max(0, place - 40) : place + 41]
    others = [word for word in near if word != gap.group()]
    if len(others) < num_options - 1:
        return None
    options = [gap.group(), *chance.sample(others, num_options - 1)]
    chance.shuffle(options)
    text = f"{before} {sentence[: gap.start()]}_{sentence[gap.end() :]}"
    return Question(text=text, options=tuple(options), answer=options.index(gap.group()))
