"""Whether a model knows when it is wrong: calibration, and what is gained by abstaining (support tokens, section 9).

A next token is predicted with the likeliest one, and a score says how sure that is. Scores: the probability of the likeliest token, minus
the entropy of the distribution, and, with a margin prior, minus the barrier of the token that is read: near degeneracy less is sure.

    ECE = sum_b n_b / N |accuracy_b - confidence_b|     in 15 bins of equal width (Guo et al. 2017)
    AURC = mean over k of the error rate of the k surest predictions (Geifman and El-Yaniv 2017); lower is better

Both are given token by token, so that they can be resampled over windows: with the bins' signs and the ranks of the whole text, which
makes the value exact and the intervals those of its linearisation.

Shapes: N tokens of all windows, B bins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from keel.data import Segment
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric
from keel.evaluation.last_word import Passage
from keel.evaluation.robustness import EmbeddedModel
from keel.evaluation.scoring import HEAD_TOKENS, evaluating
from keel.evaluation.statistics import Array
from keel.evaluation.support import prior_terms
from keel.streams import MarginPrior

BINS = 15
_MOST_NATS = 700.0  # of a determinant's logarithm: its exponential is still finite in float64
COVERAGES = tuple(percent / 100 for percent in range(5, 101, 5))  # of a risk-coverage curve that is drawn


def calibration_terms(confidence_N: Array, correct_N: Array, bins: int = BINS) -> Array:
    """Return what each prediction adds to the expected calibration error [N]; their mean is the ECE, in [0, 1].

    Args:
        confidence_N: in [0, 1]; the bins are right-closed, zero belongs to the first.
        correct_N: 0 or 1.
    """
    bin_N = np.clip(np.ceil(confidence_N * bins).astype(int) - 1, 0, bins - 1)
    gaps_N = confidence_N - correct_N
    signs_B = np.sign(np.bincount(bin_N, weights=gaps_N, minlength=bins))
    terms_N: Array = signs_B[bin_N] * gaps_N
    return terms_N


def risk_terms(score_N: Array, wrong_N: Array) -> Array:
    """Return what each prediction adds to the area under the risk-coverage curve [N]; their mean is the AURC, in [0, 1].

    Args:
        score_N: larger is surer. Equal scores share their places, so that no order of the text decides.
        wrong_N: 1 where the prediction is wrong, else 0.
    """
    count = len(score_N)
    # A prediction at rank i counts in every coverage from i on: (1/N) sum_{k >= i} 1/k, times N for a mean.
    weight_N = np.cumsum((1 / np.arange(1, count + 1))[::-1])[::-1]
    order_N = np.argsort(-score_N, kind="stable")
    _, group_N, size_G = np.unique(-score_N[order_N], return_inverse=True, return_counts=True)
    shared_N = (np.bincount(group_N, weights=weight_N) / size_G)[group_N]
    terms_N = np.empty(count)
    terms_N[order_N] = shared_N * wrong_N[order_N]
    return terms_N


def risk_coverage(score_N: Array, wrong_N: Array) -> Array:
    """Return the error rate of the k surest predictions for k = 1 … N."""
    curve_N: Array = np.cumsum(wrong_N[np.argsort(-score_N, kind="stable")]) / np.arange(1, len(score_N) + 1)
    return curve_N


class Predictions(NamedTuple):
    """Predictions of one item: how sure the model was of each, by several scores, and which were wrong.

    Attributes:
        confidence_T: the probability of what was predicted, in [0, 1].
        wrong_T: 1 or 0.
        scores: by name, larger is surer [T].
    """

    confidence_T: Array
    wrong_T: Array
    scores: dict[str, Array]


class Selective(NamedTuple):
    """Metrics by item, and by score the error rate at each coverage of ``COVERAGES``."""

    metrics: list[ItemMetric]
    curves: dict[str, list[float]]


def selective(
    model: EmbeddedModel,
    prior: MarginPrior | None,
    windows: Sequence[Segment],
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Selective:
    """Measure next-token predictions over windows, each of which is one item.

    Args:
        prior: the model's margin prior; None for a model without one.
        progress: called with the number of finished windows.
    Returns: ``ece``; ``aurc``, of the largest probability, ``aurc@entropy`` and, with a prior, ``aurc@barrier``.
    Raises: KeelError for no windows.
    """
    if not windows:
        raise KeelError("selective: no windows to score; give more text or shorter windows")
    items = []
    with evaluating(model):
        for index, window in enumerate(windows):
            ids_1T = window.ids[:-1].unsqueeze(0).to(device)
            predicted = _predict(model, ids_1T, window.ids[1:].to(device))
            if prior is not None:
                predicted.scores["barrier"] = _sureness(prior, model.get_input_embeddings()(ids_1T))
            items.append(predicted)
            if progress is not None:
                progress(index + 1)
    return summary(items)


def selective_words(
    model: EmbeddedModel,
    prior: MarginPrior | None,
    passages: Sequence[Passage],
    family: str,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Selective:
    """Measure the prediction of the last word of passages, each of which is one item with one prediction.

    A word is right where each of its tokens is the likeliest after the true ones before it. Its probability is the product of theirs,
    its entropy their sum, and its barrier that of the last token before it.

    Args:
        family: what the metrics' names begin with; the rest is as for ``selective``.
    Raises: KeelError for no passages.
    """
    if not passages:
        raise KeelError(f"{family}: no passages to score; give some")
    items = []
    with evaluating(model):
        for index, passage in enumerate(passages):
            ids_1T = torch.tensor([passage.ids[:-1]], device=device)
            first = len(passage.ids) - passage.num_targets
            tokens = _predict(model, ids_1T, torch.tensor(passage.ids[1:], device=device), first - 1)
            word = as_word(tokens, passage.num_targets)
            if prior is not None:
                word.scores["barrier"] = _sureness(prior, model.get_input_embeddings()(ids_1T[:, :first]))[-1:]
            items.append(word)
            if progress is not None:
                progress(index + 1)
    return summary(items, f"{family}.")


def _sureness(prior: MarginPrior, embeddings_1TD: torch.Tensor) -> Array:
    """Return the determinant of every token [T], which falls as its barrier rises and is negative beyond the boundary."""
    logabs_1T, sign_1T = prior_terms(prior, embeddings_1TD).logdets
    determinant_1T = sign_1T.double() * logabs_1T.double().clamp(max=_MOST_NATS).exp()
    found: Array = determinant_1T[0].cpu().numpy()
    return found


def summary(items: Sequence[Predictions], prefix: str = "") -> Selective:
    """Return the metrics of predictions, and the risk-coverage curve of each score."""
    wrong_N = np.concatenate([item.wrong_T for item in items])
    confidence_N = np.concatenate([item.confidence_T for item in items])
    ends = np.cumsum([len(item.wrong_T) for item in items])[:-1]
    metrics = [_metric(f"{prefix}ece", calibration_terms(confidence_N, 1 - wrong_N), ends)]
    curves = {}
    for name in items[0].scores:
        score_N = np.concatenate([item.scores[name] for item in items])
        at = "" if name == "max_probability" else f"@{name}"
        metrics.append(_metric(f"{prefix}aurc{at}", risk_terms(score_N, wrong_N), ends))
        curve_N = risk_coverage(score_N, wrong_N)
        places = [max(0, round(coverage * len(curve_N)) - 1) for coverage in COVERAGES]
        curves[name] = [float(curve_N[place]) for place in places]
    return Selective(metrics, curves)


def as_word(tokens: Predictions, num_targets: int) -> Predictions:
    """Return the one prediction of a word that the last ``num_targets`` predictions of tokens are: right where all of them are."""
    sure, entropies = tokens.confidence_T[-num_targets:], tokens.scores["entropy"][-num_targets:]
    scores = {"max_probability": np.array([sure.prod()]), "entropy": np.array([entropies.sum()])}
    return Predictions(scores["max_probability"], np.array([tokens.wrong_T[-num_targets:].max()]), scores)


def _predict(model: EmbeddedModel, ids_1T: torch.Tensor, targets_T: torch.Tensor, first: int = 0) -> Predictions:
    """Predict the tokens behind a text from position ``first`` on, with the likeliest; the scores are its probability and -entropy."""
    hidden_TD = model.final_hidden(input_ids=ids_1T).last_hidden_state[0, first:]
    surest, entropies, hits = [], [], []
    for hidden, targets in zip(hidden_TD.split(HEAD_TOKENS), targets_T[first:].split(HEAD_TOKENS), strict=True):
        probabilities = torch.softmax(model.logits_from_hidden(hidden[None])[0].double(), -1)
        best = probabilities.max(-1)
        surest.append(best.values)
        entropies.append(torch.special.entr(probabilities).sum(-1))
        hits.append((best.indices == targets).double())
    surest_T, entropy_T, hit_T = (torch.cat(parts).cpu().numpy() for parts in (surest, entropies, hits))
    return Predictions(surest_T, 1 - hit_T, {"max_probability": surest_T, "entropy": -entropy_T})


def _metric(name: str, terms_N: Array, ends: Array) -> ItemMetric:
    parts = np.split(terms_N, ends)
    return ItemMetric(
        name=name, unit="share", higher_is_better=False,
        numerators=tuple(float(part.sum()) for part in parts), denominators=tuple(float(len(part)) for part in parts),
    )  # fmt: skip
