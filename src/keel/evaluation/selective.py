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

import numpy as np
import torch

from keel.data import Segment
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric
from keel.evaluation.robustness import EmbeddedModel
from keel.evaluation.scoring import HEAD_TOKENS, evaluating
from keel.evaluation.statistics import Array
from keel.evaluation.support import barriers
from keel.streams import MarginPrior

BINS = 15


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


def selective(
    model: EmbeddedModel,
    prior: MarginPrior | None,
    windows: Sequence[Segment],
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[ItemMetric]:
    """Measure next-token predictions over windows, each of which is one item.

    Args:
        prior: the model's margin prior; None for a model without one.
        progress: called with the number of finished windows.
    Returns: ``ece``, and ``aurc@max_probability``, ``aurc@entropy`` and, with a prior, ``aurc@barrier``.
    Raises: KeelError for no windows.
    """
    if not windows:
        raise KeelError("selective: no windows to score; give more text or shorter windows")
    confidence, wrong = [], []
    scores: dict[str, list[Array]] = {"max_probability": [], "entropy": []}
    with evaluating(model):
        for index, window in enumerate(windows):
            ids_1T = window.ids[:-1].unsqueeze(0).to(device)
            surest_T, entropy_T, hit_T = _predictions(model, ids_1T, window.ids[1:].to(device))
            confidence.append(surest_T)
            wrong.append(1 - hit_T)
            scores["max_probability"].append(surest_T)
            scores["entropy"].append(-entropy_T)
            if prior is not None:
                barrier_1T, _ = barriers(prior, model.get_input_embeddings()(ids_1T))
                scores.setdefault("barrier", []).append(-barrier_1T[0].double().cpu().numpy())
            if progress is not None:
                progress(index + 1)
    wrong_N, ends = np.concatenate(wrong), np.cumsum([len(part) for part in wrong])[:-1]
    metrics = [_metric("ece", calibration_terms(np.concatenate(confidence), 1 - wrong_N), ends)]
    for name, parts in scores.items():
        metrics.append(_metric(f"aurc@{name}", risk_terms(np.concatenate(parts), wrong_N), ends))
    return metrics


def _predictions(model: EmbeddedModel, ids_1T: torch.Tensor, targets_T: torch.Tensor) -> tuple[Array, Array, Array]:
    """Return the likeliest token's probability, the entropy in nats, and whether it was right, for each token of a window."""
    hidden_TD = model.final_hidden(input_ids=ids_1T).last_hidden_state[0]
    surest, entropies, hits = [], [], []
    for hidden, targets in zip(hidden_TD.split(HEAD_TOKENS), targets_T.split(HEAD_TOKENS), strict=True):
        probabilities = torch.softmax(model.logits_from_hidden(hidden[None])[0].double(), -1)
        best = probabilities.max(-1)
        surest.append(best.values)
        entropies.append(torch.special.entr(probabilities).sum(-1))
        hits.append((best.indices == targets).double())
    found = [torch.cat(parts).cpu().numpy() for parts in (surest, entropies, hits)]
    return found[0], found[1], found[2]


def _metric(name: str, terms_N: Array, ends: Array) -> ItemMetric:
    parts = np.split(terms_N, ends)
    return ItemMetric(
        name=name, unit="share", higher_is_better=False,
        numerators=tuple(float(part.sum()) for part in parts), denominators=tuple(float(len(part)) for part in parts),
    )  # fmt: skip
