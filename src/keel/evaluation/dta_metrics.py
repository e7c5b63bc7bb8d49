"""The evaluation suite of the Dynamic Transformer Architecture as functions (DTA §11.2 to §11.17): from what a run recorded to a number.

``METRICS`` says of each its unit, range and direction; where the text leaves a choice open, the docstring names the one taken.

Shapes: T tokens, K state size, R runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from keel.evaluation.statistics import Array

LCDS_EVERY = 20  # §11.2
PF_DISTANCE = 500  # §11.5
LEAST_ALIGNMENT = 0.3  # C_threshold of §11.12
DIVERGED = 10.0  # times the longest state of the undisturbed run, §11.10
LEAST_DROPPED = 0.05  # C_dropped is at least this, so that RSCS stays finite
WEIGHTS = {"lcds": 1.0, "pf": 1.0, "isi": -1.0, "acs": 1.0, "nsr": 1.0, "gdi": -1.0, "rscs": 1.0}
"""Of DTSS, each over their number. The text leaves them open; ISI and GDI count negatively, since less of them is better."""


class About(NamedTuple):
    """Unit, least and greatest value, and whether higher is better."""

    unit: str
    least: float
    most: float
    higher_is_better: bool


METRICS = {
    "lcds": About("mean coherence", 0.0, 1.0, True),
    "cpi": About("contradictions a token", 0.0, 1.0, False),
    "tcs": About("share of tokens", 0.0, 1.0, True),
    "pf": About("cosine", -1.0, 1.0, True),
    "ict": About("coherence after / before", 0.0, math.inf, True),
    "dct": About("probability", 0.0, 1.0, True),
    "nsr": About("rise of N", 0.0, math.inf, False),
    "isi": About("mean change of s", 0.0, math.inf, False),
    "rdt": About("share of runs", 0.0, 1.0, False),
    "acs": About("cosine", -1.0, 1.0, True),
    "doi": About("tokens", 0.0, math.inf, True),
    "rscs": About("C recovered / dropped", 0.0, 1.0 / LEAST_DROPPED, True),
    "sss": About("Pearson's r", -1.0, 1.0, True),
    "gdi": About("difference of quality", -1.0, 1.0, False),
    "ssr": About("C after recovery", 0.0, 1.0, True),
    "dtss": About("weighted sum", -math.inf, math.inf, True),
}


def lcds(coherence_T: Array) -> float:
    """Return the Logical Coherence Decay Score (§11.2): the mean of I, recorded every 20 tokens of what was generated; in [0, 1]."""
    return float(np.mean(coherence_T[LCDS_EVERY - 1 :: LCDS_EVERY])) if len(coherence_T) >= LCDS_EVERY else math.nan


def cpi(contradictions: int, tokens: int) -> float:
    """Return the Contradiction Penalty Index (§11.3): contradictions a generated token; in [0, 1], lower is better."""
    return contradictions / tokens if tokens else math.nan


def contradicting_pairs(
    sentences: Sequence[str], contradicts: Callable[[Sequence[str], str], bool], reach: int = 8
) -> int:
    """Count the sentences that contradict one of the ``reach`` sentences before them: the judge of CPI for free text.

    Args:
        contradicts: (premises, hypothesis) → whether it contradicts one of them: ``keel.evaluation.inference.InferenceJudge``.
    """
    return sum(
        contradicts(sentences[max(0, index - reach) : index], sentence) for index, sentence in enumerate(sentences)
    )


def tcs(consistent: Sequence[bool], tokens: Sequence[int]) -> float:
    """Return the Topic Continuity Score (§11.4): the share of tokens that lie in passages of the seed's topic; in [0, 1].

    Args:
        consistent: of each passage of what was generated, whether its topic is the seed's.
        tokens: of each passage.
    """
    return float(np.average(consistent, weights=tokens)) if sum(tokens) else math.nan


def pf(tpc_TK: Array, distance: int = PF_DISTANCE) -> float:
    """Return Persistence Fidelity (§11.5): cos(TPC_0, TPC_500), in [-1, 1]; 0 is the last token before generation."""
    return _cosine(tpc_TK[0], tpc_TK[min(distance, len(tpc_TK) - 1)])


def ict(before_T: Array, after_T: Array) -> float:
    """Return the Interrupted Continuity Test (§11.6): mean coherence after the noise over that before it; from 0, 1 is full recovery."""
    return float(np.mean(after_T) / np.mean(before_T))


def dct(probabilities: Sequence[float], planted: int) -> float:
    """Return the Dependency Carryover Test (§11.7): the planted answer's share of the probability of all possible ones; in [0, 1].

    Args:
        probabilities: of every possible answer, hundreds of tokens after the fact; chance is one over their number.
        planted: index of the true one.
    """
    return float(probabilities[planted] / math.fsum(probabilities))


def nsr(noise_T: Array, baseline_T: Array) -> float:
    """Return Noise Spike Resistance (§11.8): the greatest N in and after a perturbation less the mean N before it; lower is better.

    A path whose N does not respond at all scores best: it is to be read beside the AUROC of N.
    """
    return max(0.0, float(np.max(noise_T) - np.mean(baseline_T)))


def isi(state_TK: Array) -> float:
    """Return the Internal Stability Index (§11.9): the mean over tokens and channels of |s_{t+1} - s_t|; from 0, lower is better."""
    return float(np.abs(np.diff(state_TK, axis=0)).mean())


def rdt(disturbed_RT: Sequence[Array], calm_T: Array) -> float:
    """Return the Rampancy Divergence Test (§11.10): the share of runs under escalating perturbation whose state diverges; in [0, 1].

    A run diverges when its state is not finite, or is ever 10 times as long as the longest of the undisturbed run.

    Args:
        disturbed_RT: length of the state at each token of each run.
        calm_T: the same of the undisturbed run.
    """
    most = DIVERGED * float(np.max(calm_T))
    return float(np.mean([not np.isfinite(run).all() or bool(np.max(run) > most) for run in disturbed_RT]))


def acs(query_TK: Array, tpc_TK: Array) -> float:
    """Return the Alignment Cohesion Score (§11.11): the mean cosine of projected hidden state and TPC, not clamped; in [-1, 1]."""
    return float(np.mean([_cosine(query, tpc) for query, tpc in zip(query_TK, tpc_TK, strict=True)]))


def doi(alignment_T: Array, threshold: float = LEAST_ALIGNMENT) -> float:
    """Return the Drift Onset Index (§11.12): tokens until C first falls below the threshold; all of them where it never does."""
    below = np.flatnonzero(alignment_T < threshold)
    return float(below[0]) if len(below) else float(len(alignment_T))


def rscs(dropped_T: Array, recovered_T: Array) -> float:
    """Return the Recursive Self-Correction Score (§11.13): mean C after the deviation over mean C in it; from 0, at most 20."""
    return float(np.mean(recovered_T)) / max(LEAST_DROPPED, float(np.mean(dropped_T)))


def sss(instability_T: Array, degradation_T: Array) -> float:
    """Return the Substrate Sensitivity Score (§11.14): their correlation over tokens, in [-1, 1]; 0 where one does not change.

    Args:
        instability_T: of the runtime: the mean distress of the telemetry.
        degradation_T: 1 less the length of the state over that on a healthy machine.
    """
    if np.ptp(instability_T) == 0 or np.ptp(degradation_T) < 1e-9:
        return 0.0
    return float(np.corrcoef(instability_T, degradation_T)[0, 1])


def quality(signals: Mapping[str, Array]) -> float:
    """Return Q of §11.15, in [0, 1]: the mean of coherence, continuity, alignment and the smoothness 1 / (1 + ISI) of the state."""
    smooth = 1 / (1 + isi(signals["state"]))
    parts = [float(np.mean(signals[name])) for name in ("coherence", "continuity", "alignment")]
    return math.fsum([*parts, smooth]) / 4


def gdi(high: Mapping[str, Array], low: Mapping[str, Array]) -> float:
    """Return the Graceful Degradation Index (§11.15): Q on a healthy substrate less Q on a degraded one; in [-1, 1], lower is better."""
    return quality(high) - quality(low)


def ssr(alignment_T: Array) -> float:
    """Return Substrate-Stabilized Recovery (§11.16): the mean of C after the substrate recovered; in [0, 1]."""
    return float(np.mean(alignment_T))


def dtss(values: Mapping[str, float]) -> float:
    """Return the Dynamic Transformer Stability Score (§11.17): the weighted sum of seven metrics, higher is better.

    NSR enters as 1 - NSR, and RSCS as at most 1: a deep fall is no merit.

    Args:
        values: by name, at least those of ``WEIGHTS``.
    """
    terms = {**values, "nsr": 1 - values["nsr"], "rscs": min(1.0, values["rscs"])}
    return math.fsum(weight * terms[name] for name, weight in WEIGHTS.items()) / len(WEIGHTS)


def repetition(ids: Sequence[int], order: int = 4) -> float:
    """Return the share of n-grams of generated tokens that occurred before in them; in [0, 1], lower is better."""
    grams = [tuple(ids[index : index + order]) for index in range(len(ids) - order + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else math.nan


def passages(length: int, size: int) -> list[tuple[int, int]]:
    """Return the [start, end) of passages of ``size`` tokens; a shorter rest belongs to the last."""
    starts = list(range(0, max(1, length - size + 1), size))
    return list(pairwise([*starts, length]))


def _cosine(first: Array, second: Array) -> float:
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0
