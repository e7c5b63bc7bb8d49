"""Fine-tuning of a pretrained encoder: a grid of settings, early stopping, the best on held-out examples (DSTG App. C).

Where the paper stops and chooses on the split that it reports, here a part of the training examples is held out for both, and the
reported split is read once, by the chosen model.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from keel.errors import KeelError
from keel.evaluation.scoring import evaluating

Example = TypeVar("Example", contravariant=True)
Answer = TypeVar("Answer")
_WARMUP = 0.1
_CLIP = 1.0
_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """How a model is fine-tuned.

    Attributes:
        learning_rates, batch_sizes, weight_decays: the grid; every combination is tried.
        epochs: most passes over the examples; the learning rate rises over a tenth of the steps, then falls linearly to 0.
        evaluate_every: steps between two looks at the held-out examples; the last step has one.
        patience: looks without improvement after which a combination is given up.
        seed: of the new head, of the order of the examples and of dropout.
        precision: "fp32", or "bf16" for autocast.
    """

    learning_rates: tuple[float, ...]
    batch_sizes: tuple[int, ...] = (16,)
    weight_decays: tuple[float, ...] = (0.01,)
    epochs: int = 10
    evaluate_every: int = 100
    patience: int = 15
    seed: int = 0
    precision: str = "fp32"

    def grid(self) -> list[tuple[float, int, float]]:
        """Return every combination of learning rate, batch size and weight decay."""
        return list(itertools.product(self.learning_rates, self.batch_sizes, self.weight_decays))


class Task(Protocol[Example, Answer]):
    """What a model learns: how examples become its arguments, and how its outputs become answers and a score."""

    def batch(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return the arguments of the model's forward pass, labels included."""

    def answers(self, outputs: Any, examples: Sequence[Example]) -> list[Answer]:
        """Return what the model answers, one for each example of a batch."""

    def score(self, answers: Sequence[Answer], examples: Sequence[Example]) -> float:
        """Return how good answers are; more is better."""


@dataclass(frozen=True, kw_only=True)
class FineTuned(Generic[Answer]):
    """What came of it.

    Attributes:
        answers: of the chosen model, one for each test example.
        chosen: learning rate, batch size and weight decay that did best on the held-out examples.
        held_out: its score there; ``steps``: after how many steps.
        tried: (combination, best held-out score) of the whole grid.
    """

    answers: list[Answer]
    chosen: tuple[float, int, float]
    held_out: float
    steps: int
    tried: list[tuple[tuple[float, int, float], float]]


def fine_tune(
    make_model: Callable[[], nn.Module],
    task: Task[Example, Answer],
    train: Sequence[Example],
    held_out: Sequence[Example],
    test: Sequence[Example],
    settings: FineTuning,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> FineTuned[Answer]:
    """Fine-tune over the grid and answer the test examples with the best model.

    Args:
        make_model: gives the pretrained model with a new head; called once a combination, with the seed set before.
        progress: called with the number of finished combinations and of all.
    Raises: KeelError for no examples to train on or to hold out.
    """
    if not train or not held_out or not test:
        raise KeelError(
            f"fine-tuning: {len(train)} examples to train, {len(held_out)} held out, {len(test)} to test; give some of each"
        )
    best: FineTuned[Answer] | None = None
    tried = []
    grid = settings.grid()
    for number, combination in enumerate(grid):
        if progress is not None:
            progress(number, len(grid))
        with _seeded(settings.seed):
            model = make_model()
            score, steps = _train(model, task, train, held_out, settings, combination)
        tried.append((combination, score))
        if best is None or score > best.held_out:
            answers = predict(model, task, test, settings.precision)
            best = FineTuned(answers=answers, chosen=combination, held_out=score, steps=steps, tried=tried)
    assert best is not None
    return best


def predict(
    model: nn.Module, task: Task[Example, Answer], examples: Sequence[Example], precision: str = "fp32"
) -> list[Answer]:
    """Return what a model answers to examples."""
    device = next(model.parameters()).device
    found: list[Answer] = []
    with evaluating(model), _autocast(device, precision):
        for start in range(0, len(examples), _BATCH):
            chosen = examples[start : start + _BATCH]
            inputs = {name: tensor.to(device) for name, tensor in task.batch(chosen).items()}
            found += task.answers(model(**inputs), chosen)
    return found


def _train(
    model: nn.Module,
    task: Task[Example, Answer],
    train: Sequence[Example],
    held_out: Sequence[Example],
    settings: FineTuning,
    combination: tuple[float, int, float],
) -> tuple[float, int]:
    """Train, leave the model as it did best on the held-out examples, and return that score and its step."""
    rate, batch_size, decay = combination
    batch_size = min(batch_size, len(train))
    a_pass = len(train) // batch_size
    steps = a_pass * settings.epochs
    warmup = max(1, round(_WARMUP * steps))
    optimizer = torch.optim.AdamW(_groups(model, decay), lr=rate, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    device = next(model.parameters()).device
    best, best_step, state, since = -math.inf, 0, copy.deepcopy(model.state_dict()), 0
    order: list[int] = []
    model.train()
    for step in range(1, steps + 1):
        if len(order) < batch_size:
            order = np.random.default_rng((settings.seed, step)).permutation(len(train)).tolist()
        chosen, order = [train[index] for index in order[:batch_size]], order[batch_size:]
        with _autocast(device, settings.precision):
            loss = model(**{name: tensor.to(device) for name, tensor in task.batch(chosen).items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if step % settings.evaluate_every and step != steps:
            continue
        score = task.score(predict(model, task, held_out, settings.precision), held_out)
        since += 1
        if score > best:
            best, best_step, state, since = score, step, copy.deepcopy(model.state_dict()), 0
        if since >= settings.patience:
            break
    model.load_state_dict(state)
    return best, best_step


def _autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Weight decay is for matrices alone, not for norms and biases."""
    given = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in given if parameter.dim() > 1], "weight_decay": decay},
        {"params": [parameter for parameter in given if parameter.dim() < 2], "weight_decay": 0.0},
    ]


class _seeded:
    """Draw from ``seed`` inside, and give the generators back as they were."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.kept = torch.random.fork_rng()

    def __enter__(self) -> None:
        self.kept.__enter__()
        torch.manual_seed(self.seed)

    def __exit__(self, *error: Any) -> None:
        self.kept.__exit__(*error)
