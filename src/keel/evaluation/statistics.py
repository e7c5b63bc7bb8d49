"""Intervals and paired comparisons: a hierarchical bootstrap over documents and seeds.

Legend of the shapes: S seeds, D documents, R resamples, K rows of document counts.

Every metric here is a ratio of sums over documents (perplexity, bits per byte, growth), so a resample of the documents
is a row of counts and all resamples together are one matrix product. Documents are drawn once a resample and are the
same for every seed, every length and every arm; seeds are drawn with replacement beside them. What is reported is the
mean over seeds of the metric of each seed.

The variance between S seeds comes out (S − 1)/S of its size, and a handful of documents gives intervals that are too
narrow as well (percentile bootstrap; Efron and Tibshirani 1993, chapter 13). Read intervals of three seeds with that in
mind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keel.errors import KeelError, ShapeError
from keel.evaluation.results import Metric

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """What one arm scored at one length, summed a document.

    Args:
        nll_SD: negative log-likelihood in nats, one row a seed.
        tokens_D: number of scored tokens.
        bytes_D: UTF-8 bytes of the text that these tokens cover.
    Raises: ShapeError when the three do not agree on the documents.
    """

    nll_SD: Array
    tokens_D: Array
    bytes_D: Array

    def __post_init__(self) -> None:
        for name, dimensions in (("nll_SD", 2), ("tokens_D", 1), ("bytes_D", 1)):
            array = np.asarray(getattr(self, name), dtype=np.float64)
            if array.ndim != dimensions or 0 in array.shape or array.shape[-1] != np.shape(self.tokens_D)[-1]:
                raise ShapeError(f"{name}: expected {dimensions} dimensions over the same documents, got {array.shape}")
            object.__setattr__(self, name, array)
        if not self.tokens_D.sum() > 0:
            raise KeelError("tokens_D: expected at least one scored token; evaluate on a longer text")

    @property
    def shape(self) -> tuple[int, int]:
        """(S, D)."""
        return self.nll_SD.shape[0], self.nll_SD.shape[1]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A metric of one arm: a value per seed, their mean and its 95 % interval, None where nothing can be resampled."""

    values: list[float]
    mean: float
    ci95: tuple[float, float] | None

    def metric(self, unit: str, *, higher_is_better: bool) -> Metric:
        """Return the entry of a results file."""
        values: list[float | None] = list(self.values)
        return Metric(values=values, mean=self.mean, ci95=self.ci95, unit=unit, higher_is_better=higher_is_better)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A paired difference arm − baseline, its 95 % interval and two-sided p, None where nothing can be resampled."""

    difference: float
    ci95: tuple[float, float] | None
    p: float | None


@dataclass(frozen=True)
class Statistic:
    """A metric as a function of document counts.

    Args:
        shape: (S, D), the seeds and documents that it was scored on.
        measure: maps counts [K, D] to the metric of every seed [K, S]; counts of one give the measured value itself.
    """

    shape: tuple[int, int]
    measure: Callable[[Array], Array]


def perplexity(scores: TokenScores) -> Statistic:
    """Return exp(Σ nll / Σ tokens), a value per seed; infinite where that overflows, NaN where a nll is not finite."""
    return Statistic(scores.shape, lambda counts_KD: _perplexity(scores, counts_KD))


def bits_per_byte(scores: TokenScores) -> Statistic:
    """Return Σ nll / (ln 2 · Σ bytes), a value per seed."""
    return Statistic(scores.shape, lambda counts_KD: _ratio(scores.nll_SD, scores.bytes_D * math.log(2), counts_KD))


def growth(far: TokenScores, near: TokenScores) -> Statistic:
    """Return the perplexity at the far length over that at the near one; 1 means that length costs nothing.

    Raises: ShapeError when the two lengths were not scored on as many seeds and documents.
    """
    if far.shape != near.shape:
        raise ShapeError(
            f"growth: expected the same seeds and documents at both lengths, got {far.shape}, {near.shape}"
        )

    def measure(counts_KD: Array) -> Array:
        # One exponential of the difference: the ratio stays finite where both perplexities overflow.
        difference_KS = _ratio(far.nll_SD, far.tokens_D, counts_KD) - _ratio(near.nll_SD, near.tokens_D, counts_KD)
        return _exp(difference_KS)

    return Statistic(far.shape, measure)


def _perplexity(scores: TokenScores, counts_KD: Array) -> Array:
    return _exp(_ratio(scores.nll_SD, scores.tokens_D, counts_KD))


def _exp(nats_KS: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.exp(nats_KS)


def _ratio(numerator_SD: Array, denominator_D: Array, counts_KD: Array) -> Array:
    """Σ numerator / Σ denominator over the counted documents; NaN where these hold nothing.

    A nll that is not finite makes NaN of the resamples that drew its document, and of no other.
    """
    finite_SD = np.isfinite(numerator_SD)
    sums_KS = counts_KD @ np.where(finite_SD, numerator_SD, 0.0).T
    if not finite_SD.all():
        sums_KS[(counts_KD @ (~finite_SD).T.astype(np.float64)) > 0] = np.nan
    totals_K1 = (counts_KD @ denominator_D)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(totals_K1 > 0, sums_KS / totals_K1, np.nan)


class Bootstrap:
    """One fixed set of resamples, shared by every metric and arm, so that all comparisons are paired.

    Args:
        num_seeds: S. With one seed, only documents are resampled.
        num_documents: D. With one document, only seeds are resampled; with one of each there are no intervals.
        resamples: R; the smallest p that can come out is 1 / (R + 1).
        seed: of the resampling itself; the same seed gives the same intervals bit for bit.
    """

    def __init__(self, num_seeds: int, num_documents: int, *, resamples: int = 4999, seed: int = 0) -> None:
        if min(num_seeds, num_documents, resamples) < 1:
            given = f"{num_seeds}, {num_documents}, {resamples}"
            raise KeelError(f"bootstrap: expected at least one seed, document and resample, got {given}")
        random = np.random.default_rng(seed)
        self.resamples = resamples
        self._measurable = num_seeds > 1 or num_documents > 1
        even_D = np.full(num_documents, 1 / num_documents)
        self._counts_RD = random.multinomial(num_documents, even_D, size=resamples).astype(np.float64)
        self._seeds_RS = random.integers(num_seeds, size=(resamples, num_seeds))

    def estimate(self, statistic: Statistic) -> Estimate:
        """Measure one metric of one arm.  Raises: ShapeError when its seeds or documents are others than given."""
        values_S = self._measure(statistic)
        means_R = self._means(statistic)
        return Estimate(values=values_S.tolist(), mean=float(values_S.mean()), ci95=self._interval(means_R))

    def compare(self, arm: Statistic, baseline: Statistic) -> Difference:
        """Compare two arms on the same documents and seeds.

        p = 2 · min(P(d* ≤ 0), P(d* ≥ 0)) over the resampled differences d*, not below 1 / (R + 1), not above 1.
        """
        with np.errstate(invalid="ignore"):  # infinite minus infinite
            difference = float(self._measure(arm).mean() - self._measure(baseline).mean())
            differences_R = self._means(arm) - self._means(baseline)
        return Difference(difference=difference, ci95=self._interval(differences_R), p=self._p(differences_R))

    def _measure(self, statistic: Statistic) -> Array:
        expected = (self._seeds_RS.shape[1], self._counts_RD.shape[1])
        if statistic.shape != expected:
            raise ShapeError(f"statistic: expected (seeds, documents) {expected}, got {statistic.shape}")
        return statistic.measure(np.ones((1, expected[1])))[0]

    def _means(self, statistic: Statistic) -> Array:
        values_RS = statistic.measure(self._counts_RD)
        return np.take_along_axis(values_RS, self._seeds_RS, axis=1).mean(axis=1)

    def _interval(self, replicates_R: Array) -> tuple[float, float] | None:
        if not self._measurable:
            return None
        # An order statistic, not an interpolation: infinite replicates must not turn into NaN.
        low, high = np.percentile(replicates_R, [2.5, 97.5], method="inverted_cdf")
        return float(low), float(high)

    def _p(self, differences_R: Array) -> float | None:
        if not self._measurable or np.isnan(differences_R).any():
            return None
        tail = min((differences_R <= 0).mean(), (differences_R >= 0).mean())
        return float(np.clip(2 * tail, 1 / (self.resamples + 1), 1.0))
