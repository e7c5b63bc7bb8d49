"""Judges of generated text: its topic, its contradictions, and whether an early fact is still known (DTA §11.3, §11.4, §11.7).

The topic is what a classifier of scikit-learn makes of a passage: the corpus's own documents are clustered, and the classifier learns
which cluster the passages of a document belong to. Contradictions are those of the language of facts, judged exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.naive_bayes import ComplementNB
from transformers import PreTrainedTokenizerBase

from keel.data import TokenStream
from keel.data.languages.base import generator
from keel.data.languages.facts import END, IS, PEOPLE, PLACES, WENT, Facts, judge_facts
from keel.errors import KeelError
from keel.evaluation.scoring import evaluating

DOCUMENT_TOKENS = 2000
WORDS = 5000


class TopicJudge:
    """Which topic a text is of, and how far one is from another.

    Attributes:
        accuracy: share of passages of held-out documents that are given their document's topic.
    """

    def __init__(self, documents: Sequence[str], held_out: Sequence[str], *, topics: int, passage: int) -> None:
        """Fit on documents.

        Args:
            held_out: documents for ``accuracy``.
            topics: clusters of documents.
            passage: words of the passages that the classifier learns from.
        Raises: KeelError for fewer documents than topics.
        """
        if len(documents) < topics or not held_out:
            raise KeelError(
                f"topics: {len(documents)} documents and {len(held_out)} held out; give at least {topics} and 1, or fewer topics"
            )
        self.vectorizer = TfidfVectorizer(max_features=WORDS, stop_words="english", sublinear_tf=True)
        whole = self.vectorizer.fit_transform(documents)
        clusters = KMeans(topics, n_init=4, random_state=0).fit(whole)
        parts, labels = _passages(documents, clusters.labels_, passage)
        self.classifier = ComplementNB().fit(self.vectorizer.transform(parts), labels)
        theirs = clusters.predict(self.vectorizer.transform(held_out))
        parts, labels = _passages(held_out, theirs, passage)
        self.accuracy = float(np.mean(self.topics(parts) == labels))

    def topics(self, texts: Sequence[str]) -> Any:
        """Return the topic of each text, int [N]."""
        return self.classifier.predict(self.vectorizer.transform(texts))

    def drift(self, first: str, later: str) -> float:
        """Return 1 less the cosine of the TF-IDF vectors of two texts, in [0, 1]; 1 where either has no known word."""
        vectors = self.vectorizer.transform([first, later])
        return float(1 - (vectors[0] @ vectors[1].T).sum())


def _passages(documents: Sequence[str], labels: Any, size: int) -> tuple[list[str], list[int]]:
    parts, found = [], []
    for document, label in zip(documents, labels, strict=True):
        words = document.split()
        for start in range(0, max(1, len(words) - size + 1), size):
            parts.append(" ".join(words[start : start + size]))
            found.append(int(label))
    return parts, found


def documents_of(stream: TokenStream, tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """Return the beginnings of up to ``count`` documents, spread evenly over the stream, as text."""
    chosen = np.linspace(0, len(stream.starts) - 1, min(count, len(stream.starts))).astype(int)
    ends = [*stream.starts[1:], len(stream)]
    texts = []
    for index in chosen:
        start = int(stream.starts[index])
        ids = stream.ids[start : min(int(ends[index]), start + DOCUMENT_TOKENS)]
        texts.append(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
    return texts


def count_contradictions(prompt: str, generated: str) -> tuple[int, int]:
    """Return how many statements of ``generated`` contradict the story so far, and how many statements it has."""
    found = [s for s in judge_facts(prompt + generated) if s.start >= len(prompt)]
    return sum(statement.verdict == "contradiction" for statement in found), len(found)


def planted_fact(
    tokenizer: PreTrainedTokenizerBase, distance: int, seed: int
) -> tuple[list[int], list[list[int]], int]:
    """Return a story that begins with a fact and asks for it ``distance`` tokens later, the possible answers, and the true one's index.

    All that stands between is about other people.
    """
    source = generator("planted", seed, distance)
    told = PEOPLE[: Facts().people]  # of others no story that a model learns from tells anything
    person = told[seed % len(told)]
    others = [other for other in told if other != person]
    place = source.randrange(len(PLACES))
    known: dict[str, str] = {}
    between = ""
    while len(_ids(tokenizer, between)) < distance:
        who = source.choice(others)
        moves = who not in known or source.random() < 0.3
        if moves:
            known[who] = source.choice(PLACES)
        between += who + (WENT if moves else IS) + known[who] + END
    story = person + WENT + PLACES[place] + END + between + person + IS.rstrip()
    return _ids(tokenizer, story), [_ids(tokenizer, f" {answer}.") for answer in PLACES], place


def answer_probabilities(model: Any, story: Sequence[int], answers: Sequence[Sequence[int]]) -> list[float]:
    """Return the probability of each answer after the story."""
    device, longest = next(model.parameters()).device, max(map(len, answers))
    rows = torch.tensor([[*story, *answer, *[answer[-1]] * (longest - len(answer))] for answer in answers])
    with evaluating(model):
        logits = model(input_ids=rows.to(device), use_cache=False, logits_to_keep=longest + 1).logits
        scores = logits[:, :-1].float().log_softmax(-1).cpu()
    targets = rows[:, len(story) :]
    log_probabilities = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1).double()
    return [float(row[: len(answer)].sum().exp()) for row, answer in zip(log_probabilities, answers, strict=True)]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
