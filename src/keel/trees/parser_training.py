"""Training of the span parser on bracketed trees.

Shapes: B sentences, S spans, C labels.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from keel.errors import KeelError
from keel.trees.parser import ParserConfig, SpanParser, features_of

_LONGEST = 100  # words; longer sentences cost as their square and are left out of training


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a parser is trained.

    Attributes:
        epochs, batch_size, learning_rate: AdamW; the rate rises over the first 5 % of the steps and falls to zero on a cosine.
        word_dropout: share of words, in training, that are known by their shape and letters alone.
        rare: features, and labels, that occur less often are not learnt.
        tag_weight: weight of the cross-entropy over parts of speech, which are learnt beside the labels.
        seed: of everything random.
    """

    epochs: int = 14
    batch_size: int = 16
    learning_rate: float = 1.5e-3
    word_dropout: float = 0.3
    rare: int = 2
    tag_weight: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """A sentence: words, parts of speech, and labels by span (first word, word behind the last); a unary chain is one label."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    labels: dict[tuple[int, int], str]


def to_example(tree: Any) -> Example:
    """Turn a cleaned nltk.Tree (``keel.trees.brackets.clean``) into an example."""
    labels: dict[tuple[int, int], str] = {}
    words: list[str] = []
    tags: list[str] = []

    def visit(node: Any) -> None:
        if len(node) == 1 and isinstance(node[0], str):
            words.append(node[0])
            tags.append(node.label())
            return
        begin, known = len(words), len(labels)
        for child in node:
            visit(child)
        span = (begin, len(words))
        below = labels.get(span) if known < len(labels) else None
        labels[span] = node.label() if below is None else f"{node.label()}+{below}"

    visit(tree)
    return Example(tuple(words), tuple(tags), labels)


def train_parser(
    trees: Sequence[Any],
    config: ParserConfig | None = None,
    training: TrainingConfig | None = None,
    progress: Callable[[int, float], object] | None = None,
) -> SpanParser:
    """Train a parser on cleaned nltk trees (``keel.trees.brackets.read_brackets``), from random weights.

    Args: progress: called after each epoch with its number from 1 and the mean loss of its sentences.
    Raises: KeelError for no trees.
    """
    config, training = config or ParserConfig(), training or TrainingConfig()
    examples = [example for example in map(to_example, trees) if len(example.words) <= _LONGEST]
    if not examples:
        raise KeelError(f"{len(trees)} trees to train a parser on, none of up to {_LONGEST} words; give a treebank")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        parser = _new_parser(examples, config, training)
        _fit(parser, examples, training, progress or (lambda epoch, loss: None))
    return parser.eval()


def _new_parser(examples: list[Example], config: ParserConfig, training: TrainingConfig) -> SpanParser:
    features = Counter(feature for example in examples for word in example.words for feature in features_of(word))
    labels = Counter(label for example in examples for label in example.labels.values())
    tags = Counter(tag for example in examples for tag in example.tags)
    return SpanParser(config, _often(features, training.rare), _often(labels, training.rare), _often(tags, 1))


def _often(counts: Counter[str], least: int) -> list[str]:
    chosen = sorted(name for name, count in counts.items() if count >= least)
    return chosen or sorted(counts)


def _fit(
    parser: SpanParser, examples: list[Example], training: TrainingConfig, progress: Callable[[int, float], object]
) -> None:
    rng = random.Random(training.seed)
    label_of = {label: index for index, label in enumerate(parser.labels, 1)}
    # A rare chain is learnt as its longest known end: (S (VP …)) over the same words as VP.
    for label in {label for example in examples for label in example.labels.values()} - label_of.keys():
        parts = label.split("+")
        ends = ["+".join(parts[k:]) for k in range(1, len(parts))]
        label_of[label] = next((label_of[end] for end in ends if end in label_of), 0)
    tag_of = {tag: index for index, tag in enumerate(parser.tags)}
    steps = training.epochs * math.ceil(len(examples) / training.batch_size)
    optimizer = torch.optim.AdamW(parser.parameters(), lr=training.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step / steps))
    parser.train()
    for epoch in range(1, training.epochs + 1):
        total = 0.0
        for batch in _batches(examples, training.batch_size, rng):
            loss = _loss(parser, batch, label_of, tag_of, training)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parser.parameters(), 5.0)
            optimizer.step()
            rate.step()
            total += loss.item() * len(batch)
        progress(epoch, total / len(examples))


def _rate(done: float) -> float:
    return min(done / 0.05, 0.5 + 0.5 * math.cos(math.pi * min(done, 1.0)))


def _batches(examples: list[Example], size: int, rng: random.Random) -> list[list[Example]]:
    """Return all examples in batches of about the same length each, the batches in random order."""
    order = sorted(examples, key=lambda example: len(example.words) + rng.uniform(0, 4))
    batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
    rng.shuffle(batches)
    return batches


def _loss(
    parser: SpanParser, batch: list[Example], label_of: dict[str, int], tag_of: dict[str, int], training: TrainingConfig
) -> Tensor:
    """Return the cross-entropy over all spans and words, summed over a sentence and divided by its words, mean over sentences."""
    lengths = torch.tensor([len(example.words) for example in batch])
    longest = int(lengths.max())
    ids = parser.encode([example.words for example in batch])
    unknown = torch.rand(ids.shape[:2]) < training.word_dropout
    unknown[:, 0] = False
    unknown[torch.arange(len(batch)), lengths + 1] = False
    ids[..., 0] = ids[..., 0].masked_fill(unknown, 0)
    left, right = torch.triu_indices(longest, longest)
    right = right + 1
    gold = torch.zeros(len(batch), longest, longest + 1, dtype=torch.long)
    tags = torch.full((len(batch), longest), -100)
    for row, example in enumerate(batch):
        spans = torch.tensor(list(example.labels)).T
        gold[row, spans[0], spans[1]] = torch.tensor([label_of[label] for label in example.labels.values()])
        tags[row, : len(example.words)] = torch.tensor([tag_of[tag] for tag in example.tags])
    wanted = gold[:, left, right].masked_fill(right > lengths[:, None], -100)
    edges, words = parser(ids, lengths)
    logits = parser.span_logits(edges, left, right)
    spans_loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    tags_loss = F.cross_entropy(parser.tag(words).flatten(0, 1), tags.flatten(), reduction="sum")
    return (spans_loss + training.tag_weight * tags_loss) / lengths.sum()
