"""Everything that a recipe measures on one trained arm and seed."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError

from keel.data import CorpusConfig, MaskedCorpus, Segment, TaskData, TokenCorpus, evaluation_segments, read_documents
from keel.errors import KeelError, build_config
from keel.evaluation.attention_match import attention_match
from keel.evaluation.blocks import block_scores
from keel.evaluation.completion import completion
from keel.evaluation.extrapolation import ExtrapolationResult, extrapolation
from keel.evaluation.items import ItemMetric
from keel.evaluation.last_word import Passage, last_word, read_passages
from keel.evaluation.masked import masked_scores
from keel.evaluation.posterior import posterior_scores, posterior_words
from keel.evaluation.robustness import Perturbation, robustness
from keel.evaluation.selective import Selective, selective, selective_words
from keel.evaluation.support import prior_terms, support_tokens
from keel.experiment.asked import measure_benchmark, measure_blimp, measure_cloze, measure_leak, measure_syntax
from keel.experiment.downstream import measure_glue, measure_holmes, measure_linguistic, measure_mteb, measure_squad
from keel.experiment.dynamics import measure_dta, measure_faults, measure_signals
from keel.experiment.encoder_views import measure_inter_model
from keel.experiment.pictures import ATTENTION_FILE, RISK_FILE, SUPPORT_FILE
from keel.experiment.probed import (
    measure_gates,
    measure_geometry_of,
    measure_heads,
    measure_position_probe,
    measure_spans,
)
from keel.experiment.subject import Subject
from keel.files import write_atomically
from keel.positions import Positions, set_positions
from keel.streams import MarginPrior, StructuralStream
from keel.training import Recipe
from keel.training.evaluation_sections import SelectiveWords, Windows
from keel.training.section import Section

SHOWN_TOKENS = 192  # of the text that a report shows with its barriers


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one section of a recipe's ``evaluation`` found on a unit.

    Attributes:
        asked: the section's settings, as plain JSON values.
        metrics: by name, whatever is a ratio over items.
    """

    asked: dict[str, Any]
    metrics: dict[str, ItemMetric] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured on one unit.

    Attributes:
        extrapolation: sums per length and document, None where the recipe does not ask for it.
        measurements: by section of the recipe's ``evaluation``.
        seconds: how long it took.
    """

    extrapolation: ExtrapolationResult | None = None
    measurements: dict[str, Measurement]
    seconds: float

    @property
    def metrics(self) -> dict[str, ItemMetric]:
        """The metrics of all sections, by name."""
        return {name: metric for found in self.measurements.values() for name, metric in found.metrics.items()}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        found: dict[str, Any] = {"seconds": self.seconds}
        if self.extrapolation is not None:
            found["extrapolation"] = self.extrapolation.to_json()
        found["measurements"] = {
            section: {
                "asked": made.asked,
                "metrics": {name: metric.to_json() for name, metric in made.metrics.items()},
            }
            for section, made in self.measurements.items()
        }
        return found

    @staticmethod
    def from_json(given: dict[str, Any]) -> Evaluation:
        """Return what ``to_json`` wrote down.  Raises: ValueError, TypeError, KeyError, AttributeError for anything else."""
        lengths = given.get("extrapolation")
        return Evaluation(
            extrapolation=None if lengths is None else ExtrapolationResult.from_json(lengths),
            measurements={
                section: Measurement(
                    asked=made["asked"],
                    metrics={name: ItemMetric.from_json(name, values) for name, values in made["metrics"].items()},
                )
                for section, made in given["measurements"].items()
            },
            seconds=given["seconds"],
        )


def read_evaluation(recipe: Recipe, folder: Path) -> Evaluation | None:
    """Return what was measured on a unit as ``recipe`` asks for it, None where there is nothing.

    Sections that the recipe does not have, or has with other settings now, are left out.

    Raises: KeelError when the file is damaged.
    """
    path = folder / "evaluation.json"
    if not path.is_file():
        return None
    try:
        found = Evaluation.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise KeelError(f"{path}: not an evaluation ({error}); remove it to evaluate this arm again") from error
    wanted = wanted_sections(recipe)
    kept = {name: made for name, made in found.measurements.items() if _is_as_asked(wanted.get(name), made)}
    if not kept:
        return None
    lengths = found.extrapolation if "extrapolation" in kept else None
    return Evaluation(extrapolation=lengths, measurements=kept, seconds=found.seconds)


def wanted_sections(recipe: Recipe) -> dict[str, Section]:
    """Return what a recipe asks to measure, by name."""
    fields = ((name, getattr(recipe.evaluation, name)) for name in type(recipe.evaluation).model_fields)
    return {name: section for name, section in fields if section is not None}


def _is_as_asked(wanted: Section | None, made: Measurement) -> bool:
    if wanted is None:
        return False
    try:  # through the section, so that a setting that came later has its default
        return type(wanted).model_validate(made.asked) == wanted
    except ValidationError:
        return False


def is_measured(recipe: Recipe, folder: Path) -> bool:
    """Whether everything that the recipe asks for was measured on the unit in ``folder``."""
    found = read_evaluation(recipe, folder)
    return found is not None and set(wanted_sections(recipe)) <= set(found.measurements)


def measure(subject: Subject, before: Evaluation | None = None) -> Evaluation:
    """Measure all that the recipe asks for and ``before`` does not have; return both together."""
    started = time.perf_counter()
    made = {} if before is None else dict(before.measurements)
    lengths = None if before is None else before.extrapolation
    for name, wanted in wanted_sections(subject.recipe).items():
        if name in made:
            continue
        if name == "extrapolation":
            lengths, found = _extrapolation(subject), []
        else:
            found = _METRICS[name](subject)
        made[name] = Measurement(
            asked=wanted.model_dump(mode="json"), metrics={metric.name: metric for metric in found}
        )
    return Evaluation(
        extrapolation=lengths,
        measurements={name: made[name] for name in ("extrapolation", *_METRICS) if name in made},
        seconds=time.perf_counter() - started + (0.0 if before is None else before.seconds),
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


def _windows(subject: Subject, wanted: Windows) -> list[Segment]:
    assert isinstance(subject.data, TokenCorpus)
    return evaluation_segments(getattr(subject.data, wanted.split), wanted.length, wanted.windows)


def _robustness(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.robustness
    assert wanted is not None
    kinds: list[tuple[Literal["noise", "drift"], bool, list[float]]] = [
        ("noise", False, wanted.noise),
        ("noise", True, wanted.noise_snr),
        ("drift", False, wanted.drift),
        ("drift", True, wanted.drift_snr),
    ]
    conditions = [Perturbation(kind, sigma, relative) for kind, relative, sigmas in kinds for sigma in sigmas]
    return robustness(
        subject.model,
        _windows(subject, wanted),
        conditions,
        device=subject.device,
        progress=lambda name, done: subject.tell(name, done, len(conditions)),
    )


def _prior(subject: Subject) -> MarginPrior | None:
    found = subject.model.wires.first(MarginPrior)
    return None if found is None else found[1]


def _selective(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.selective
    assert wanted is not None
    found = selective(
        subject.model,
        _prior(subject),
        _windows(subject, wanted),
        device=subject.device,
        progress=lambda done: subject.tell("sure and wrong predictions", done, wanted.windows),
    )
    return _with_curves(subject, "next tokens", found)


def _selective_words(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.selective_words
    assert wanted is not None
    found = selective_words(
        subject.model,
        _prior(subject),
        _passages(subject, wanted, "selective_words"),
        wanted.name,
        device=subject.device,
        progress=lambda done: subject.tell("sure and wrong last words", done, wanted.count),
    )
    return _with_curves(subject, "last words", found)


def _with_curves(subject: Subject, what: str, found: Selective) -> list[ItemMetric]:
    """Keep the risk-coverage curves for a picture, beside those of other predictions; return the metrics."""
    path = subject.folder / RISK_FILE
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_atomically(path, json.dumps({**kept, what: found.curves}).encode())
    return found.metrics


def _posterior(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.posterior
    assert wanted is not None
    return posterior_scores(
        subject.model,
        _prior(subject),
        _windows(subject, wanted),
        samples=wanted.samples,
        noise=wanted.noise,
        device=subject.device,
        progress=lambda done: subject.tell("averages over embeddings", done, wanted.windows),
    )


def _posterior_words(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.posterior_words
    assert wanted is not None
    return posterior_words(
        subject.model,
        _prior(subject),
        _passages(subject, wanted, "posterior_words"),
        wanted.name,
        samples=wanted.samples,
        noise=wanted.noise,
        device=subject.device,
        progress=lambda done: subject.tell("last words under averages", done, wanted.count),
    )


def _passages(subject: Subject, wanted: SelectiveWords, section: str) -> list[Passage]:
    documents = read_documents(build_config(CorpusConfig, wanted.passages, f"evaluation.{section}.passages"))
    return read_passages(documents, subject.data.tokenizer, single_token=wanted.single_token, most=wanted.count)


def _support(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.support
    assert wanted is not None
    subject.tell("support tokens", 0, 1)
    windows, prior = _windows(subject, wanted), _prior(subject)
    found = support_tokens(
        subject.model,
        prior,
        torch.stack([window.ids for window in windows]),
        rank=wanted.rank,
        device=subject.device,
    )
    kept: dict[str, Any] = {"curves": found.curves}
    if prior is not None:
        shown_T = windows[0].ids[:SHOWN_TOKENS]
        logdets = prior_terms(prior, subject.model.get_input_embeddings()(shown_T[None].to(subject.device))).logdets
        kept["text"] = {
            "pieces": subject.data.tokenizer.batch_decode(shown_T.unsqueeze(1), clean_up_tokenization_spaces=False),
            "barriers": logdets.barrier()[0].tolist(),
        }
    write_atomically(subject.folder / SUPPORT_FILE, json.dumps(kept).encode())
    return found.metrics


def _masked(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.masked
    assert wanted is not None and isinstance(subject.data, MaskedCorpus)
    windows = subject.data.windows(getattr(subject.data, wanted.split), wanted.length, wanted.length, seed=0)
    return masked_scores(
        subject.model,
        [windows[index * len(windows) // wanted.count] for index in range(wanted.count)],
        wanted.name,
        seen_V=torch.bincount(
            torch.from_numpy(np.asarray(subject.data.train.ids)), minlength=len(subject.data.tokenizer)
        ),
        device=subject.device,
        progress=lambda done: subject.tell(f"masked windows of {wanted.length:,}", done, wanted.count),
    )


def _completion(subject: Subject) -> list[ItemMetric]:
    wanted = subject.recipe.evaluation.completion
    assert wanted is not None and isinstance(subject.data, TaskData)
    # A corrupted stream shows how much the arm leans on it; an arm without one has nothing to corrupt.
    has_stream = subject.model.wires.first(StructuralStream) is not None
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
    found = attention_match(subject.model, subject.data)
    matrices = {"estimate": found.estimate_VV.tolist(), "target": found.target_VV.tolist()}
    write_atomically(subject.folder / ATTENTION_FILE, json.dumps(matrices).encode())
    return found.metrics()


_METRICS: dict[str, Callable[[Subject], list[ItemMetric]]] = {
    "attention_match": _attention_match,
    "completion": _completion,
    "gates": measure_gates,
    "geometry": measure_geometry_of,
    "span": measure_spans,
    "last_word": _last_word,
    "blocks": _blocks,
    "robustness": _robustness,
    "support": _support,
    "selective": _selective,
    "selective_words": _selective_words,
    "posterior": _posterior,
    "posterior_words": _posterior_words,
    "signals": measure_signals,
    "dta": measure_dta,
    "faults": measure_faults,
    "masked": _masked,
    "position_probe": measure_position_probe,
    "heads": measure_heads,
    "inter_model": measure_inter_model,
    "linguistic": measure_linguistic,
    "glue": measure_glue,
    "squad": measure_squad,
    "blimp": measure_blimp,
    **{name: functools.partial(measure_benchmark, name=name) for name in ("cola", "hellaswag", "winogrande", "mmlu")},
    "cloze": measure_cloze,
    "leak": measure_leak,
    "syntax": measure_syntax,
    "holmes": measure_holmes,
    "mteb": measure_mteb,
}
