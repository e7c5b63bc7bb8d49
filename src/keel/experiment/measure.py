"""Everything that a recipe measures on one trained arm and seed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keel.data import CorpusConfig, TaskData, TokenCorpus, evaluation_segments, read_documents
from keel.data.languages.dyck import depths
from keel.errors import KeelError, build_config
from keel.evaluation.attention_match import attention_match
from keel.evaluation.blocks import block_scores
from keel.evaluation.completion import completion
from keel.evaluation.extrapolation import ExtrapolationResult, extrapolation
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.last_word import last_word, read_passages
from keel.model import KeelForCausalLM
from keel.positions import Positions, set_positions
from keel.probes.gates import MEAN_SITE, gate_depth
from keel.streams import StructuralStream
from keel.training import Recipe
from keel.training.trainer import Progress


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured on one unit.

    Attributes:
        extrapolation: sums per length and document, None where the recipe does not ask for it.
        metrics: by name, whatever is a ratio over items.
        seconds: how long it took.
    """

    extrapolation: ExtrapolationResult | None = None
    metrics: dict[str, ItemMetric] = field(default_factory=dict)
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        found: dict[str, Any] = {"seconds": self.seconds}
        if self.extrapolation is not None:
            found["extrapolation"] = self.extrapolation.to_json()
        if self.metrics:
            found["metrics"] = {name: metric.to_json() for name, metric in self.metrics.items()}
        return found


def read_evaluation(folder: Path) -> Evaluation | None:
    """Return what was measured on a unit, None where it is not finished.

    Raises: KeelError when the file is damaged.
    """
    path = folder / "evaluation.json"
    if not path.is_file():
        return None
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        lengths = given.get("extrapolation")
        return Evaluation(
            extrapolation=None if lengths is None else ExtrapolationResult.from_json(lengths),
            metrics={name: ItemMetric.from_json(name, values) for name, values in given.get("metrics", {}).items()},
            seconds=given["seconds"],
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise KeelError(f"{path}: not an evaluation ({error}); remove it to evaluate this arm again") from error


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: a trained model of an arm, on a device, with the data it learnt from."""

    recipe: Recipe
    arm: str
    model: KeelForCausalLM
    data: TokenCorpus | TaskData
    device: str
    progress: Progress

    def tell(self, what: str, done: int, of: int) -> None:
        """Say how far the measurement is."""
        self.progress({"event": "evaluate", "what": what, "done": done, "of": of})

    def set_positions(self, length: int) -> None:
        """Set the positions with which the arm reads ``length`` tokens."""
        positions = self.recipe.positions_at(self.arm, length)
        if positions is not None:
            set_positions(self.model.host, positions)


def measure(subject: Subject) -> Evaluation:
    """Measure all that the recipe asks for."""
    started = time.perf_counter()
    wanted = subject.recipe.evaluation
    lengths = _extrapolation(subject) if wanted.extrapolation is not None else None
    metrics: list[ItemMetric] = []
    for name, run in _METRICS.items():
        if getattr(wanted, name) is not None:
            metrics += run(subject)
    return Evaluation(
        extrapolation=lengths,
        metrics={metric.name: metric for metric in metrics},
        seconds=time.perf_counter() - started,
    )


def _extrapolation(subject: Subject) -> ExtrapolationResult:
    wanted = subject.recipe.evaluation.extrapolation
    assert wanted is not None and isinstance(subject.data, TokenCorpus)
    segments = evaluation_segments(getattr(subject.data, wanted.split), wanted.lengths[-1], wanted.segments)
    return extrapolation(
        subject.model,
        segments,
        wanted.lengths,
        device=subject.device,
        token_budget=wanted.token_budget,
        before_length=_at_each_length(subject, wanted.lengths),
    )


def _at_each_length(subject: Subject, lengths: list[int]) -> Callable[[int], None]:
    """What is done before a length is scored: tell, and set positions that depend on it."""
    recipe, arm = subject.recipe, subject.arm
    fixed = recipe.positions_at(arm, lengths[0]) if recipe.arms[arm].weights_of is not None else None
    if fixed is not None:
        set_positions(subject.model.host, fixed)

    def before(length: int) -> None:
        subject.tell(f"length {length:,}", lengths.index(length), len(lengths))
        positions: Positions | None = recipe.positions_at(arm, length)
        if positions is not None and positions != fixed:
            set_positions(subject.model.host, positions)

    return before


def _last_word(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.last_word
    assert wanted is not None
    tokenizer = subject.data.tokenizer
    documents = read_documents(build_config(CorpusConfig, wanted.passages, "evaluation.last_word.passages"))
    passages = read_passages(documents, tokenizer, single_token=wanted.single_token)
    metrics: list[ItemMetric] = []
    for context in wanted.contexts:
        subject.set_positions(context)
        metrics += last_word(
            subject.model,
            passages,
            [context],
            wanted.name,
            separator=tokenizer.eos_token_id,
            num_passages=wanted.count,
            device=subject.device,
            progress=lambda length, done: subject.tell(f"last words after {length:,} tokens", done, wanted.count),
        )
    return metrics


def _blocks(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.blocks
    assert wanted is not None and isinstance(subject.data, TokenCorpus)
    subject.set_positions(wanted.length)
    return block_scores(
        subject.model,
        evaluation_segments(getattr(subject.data, wanted.split), wanted.length, wanted.count),
        wanted.name,
        device=subject.device,
        progress=lambda done: subject.tell(f"blocks of {wanted.length:,}", done, wanted.count),
    )


def _completion(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.completion
    assert wanted is not None and isinstance(subject.data, TaskData)
    # A corrupted stream shows how much the arm leans on it; an arm without one has nothing to corrupt.
    has_stream = any(isinstance(stream, StructuralStream) for stream in subject.model.wires.streams.values())
    return completion(
        subject.model,
        subject.data,
        wanted.samples,
        corruptions=wanted.corruptions if has_stream else (),
        corrupted_samples=wanted.corrupted_samples,
        progress=subject.tell,
    )


def _attention_match(subject: Subject) -> list[ItemMetric]:
    assert isinstance(subject.data, TaskData)
    return attention_match(subject.model, subject.data).metrics()


def _gates(subject: Subject) -> list[ItemMetric]:
    """Saturation of the gates by site, and on bracket words their correlation with depth (S-Former, Fig. 2, App. A.5)."""
    wanted, signal = subject.recipe.evaluation.gates, "structural.gate"
    assert wanted is not None
    stream = subject.model.wires.streams.get("structural")
    if not isinstance(stream, StructuralStream) or stream.config.gate == "none":
        return []
    subject.tell("gates", 0, 1)
    sequences, levels = _gated_sequences(subject, wanted.samples)
    found = gate_depth(subject.model, sequences, levels, signal=signal)
    metrics: list[ItemMetric] = []
    for row in found.rows:
        where = "" if row.site == MEAN_SITE else f"_{row.site}".replace("_attention_qk", "").replace(".layer", "@layer")
        # Of all sites together, the mean of their shares: the mean gate over sites may be far from 0 and 1 while they are not.
        chosen = [row] if where else [other for other in found.rows if other.site != MEAN_SITE]
        share = sum(other.low_share + other.high_share for other in chosen) / len(chosen)
        metrics.append(mean(f"gate.saturation{where}", [share], unit="share of tokens", higher_is_better=False))
        if isinstance(subject.data, TaskData):
            metrics.append(
                ItemMetric(
                    name=f"alpha_depth.r{where}",
                    unit="Pearson's r",
                    higher_is_better=True,
                    # A word in which gate or depth is constant has no r and counts nothing.
                    numerators=tuple(0.0 if math.isnan(r) else r for r in row.r),
                    denominators=tuple(0.0 if math.isnan(r) else 1.0 for r in row.r),
                )
            )
    return metrics


def _gated_sequences(subject: Subject, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Sequences of the test split with the depth of every token; text has none, and zeros stand for it."""
    data = subject.data
    if isinstance(data, TokenCorpus):
        length = subject.recipe.train_window(subject.arm)
        segments = evaluation_segments(data.test, length - 1, count)
        return [segment.ids for segment in segments], [torch.zeros(len(segment.ids)) for segment in segments]
    words = [data.language.sample("test", index).whole for index in range(count)]
    sequences = [torch.tensor([data.tokenizer.bos_token_id, *data.encode(word)]) for word in words]
    return sequences, [torch.tensor([0, *depths(word)]) for word in words]


_METRICS: dict[str, Callable[[Subject], list[ItemMetric]]] = {
    "attention_match": _attention_match,
    "completion": _completion,
    "gates": _gates,
    "last_word": _last_word,
    "blocks": _blocks,
}
