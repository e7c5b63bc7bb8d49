"""Metrics that are ratios of sums over items: passages, strings, blocks of text, sequences.

An accuracy is hits over items, a micro F1 is 2 tp over 2 tp + fp + fn, a perplexity the exponential of nats over tokens. Kept item by
item, every one of them can be resampled for intervals and compared in pairs. Matthews' correlation is no such ratio, but a function of
four sums over items, and is resampled alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keel.errors import KeelError
from keel.evaluation.statistics import Array, Statistic


@dataclass(frozen=True, kw_only=True)
class ItemMetric:
    """One metric of one arm and seed, item by item.

    Attributes:
        name: ``family.metric`` or ``family.metric@condition``.
        unit: of the value.
        higher_is_better: the direction; None where more is neither better nor worse.
        numerators, denominators: one entry an item; the value is the sum of the first over that of the second.
        exponential: the value is the exponential of that ratio (perplexity).
        matthews: the value is Matthews' correlation of the numerators (guesses, 0 or 1) with the denominators (truths, 0 or 1).
    Raises: KeelError for no items or unequal numbers of them.
    """

    name: str
    unit: str
    higher_is_better: bool | None
    numerators: tuple[float, ...]
    denominators: tuple[float, ...]
    exponential: bool = False
    matthews: bool = False

    def __post_init__(self) -> None:
        if not self.numerators or len(self.numerators) != len(self.denominators):
            raise KeelError(
                f"{self.name}: {len(self.numerators)} numerators and {len(self.denominators)} denominators; expected one of each "
                "for every item, and at least one item"
            )

    @property
    def value(self) -> float:
        """The metric; NaN where the denominators sum to zero or an item is not finite."""
        return float(item_statistic([self]).measure(np.ones((1, len(self.numerators))))[0, 0])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; a number that is not finite becomes the string "nan", "inf" or "-inf"."""
        return {
            "unit": self.unit,
            "higher_is_better": self.higher_is_better,
            "exponential": self.exponential,
            **({"matthews": True} if self.matthews else {}),
            "numerators": [_plain(value) for value in self.numerators],
            "denominators": [_plain(value) for value in self.denominators],
        }

    @classmethod
    def from_json(cls, name: str, values: Mapping[str, Any]) -> ItemMetric:
        """Read what ``to_json`` wrote.  Raises: KeelError when the fields are others."""
        try:
            return cls(
                name=name,
                unit=values["unit"],
                higher_is_better=values["higher_is_better"],
                exponential=values["exponential"],
                matthews=values.get("matthews", False),
                numerators=tuple(float(value) for value in values["numerators"]),
                denominators=tuple(float(value) for value in values["denominators"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise KeelError(f"metric {name}: not a saved metric ({error!r}); evaluate again") from error


def accuracy(name: str, hits: Sequence[float], *, higher_is_better: bool = True) -> ItemMetric:
    """Return the share of hits (each in [0, 1]) over items."""
    return mean(name, hits, unit="share", higher_is_better=higher_is_better)


def mean(name: str, values: Sequence[float], *, unit: str, higher_is_better: bool | None) -> ItemMetric:
    """Return the plain mean of a value an item."""
    return ItemMetric(
        name=name,
        unit=unit,
        higher_is_better=higher_is_better,
        numerators=tuple(float(value) for value in values),
        denominators=(1.0,) * len(values),
    )


def item_statistic(seeds: Sequence[ItemMetric]) -> Statistic:
    """Return one metric of several seeds, scored on the same items, for the bootstrap.

    Raises: KeelError when there are none or they differ in more than their numbers.
    """
    kinds = {(metric.name, metric.exponential, metric.matthews, len(metric.numerators)) for metric in seeds}
    if len(kinds) != 1:
        raise KeelError(f"metrics of several seeds must be one metric over the same items, got {sorted(kinds)}")
    numerators_SN = np.array([metric.numerators for metric in seeds], dtype=np.float64)
    denominators_SN = np.array([metric.denominators for metric in seeds], dtype=np.float64)
    exponential = seeds[0].exponential
    if seeds[0].matthews:
        return Statistic(
            (len(seeds), numerators_SN.shape[1]),
            lambda counts_KN: _matthews(numerators_SN, denominators_SN, counts_KN),
        )

    def measure(counts_KN: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            # 0 · inf would make NaN of the resamples that did not draw the item as well.
            tops_KS, bottoms_KS = (_sums(values, counts_KN) for values in (numerators_SN, denominators_SN))
            ratios_KS = tops_KS / bottoms_KS
            return np.exp(ratios_KS) if exponential else ratios_KS

    return Statistic((len(seeds), numerators_SN.shape[1]), measure)


def _matthews(guesses_SN: Array, truths_SN: Array, counts_KN: Array) -> Array:
    """Matthews' correlation of every seed [K, S]; 0 where all guesses, or all truths, are the same, as usual."""
    both_KS, guessed_KS, true_KS = (
        counts_KN @ values_SN.T for values_SN in (guesses_SN * truths_SN, guesses_SN, truths_SN)
    )
    total_K1 = counts_KN.sum(1, keepdims=True)
    above_KS = both_KS * total_K1 - guessed_KS * true_KS
    spread_KS = np.sqrt(guessed_KS * (total_K1 - guessed_KS) * true_KS * (total_K1 - true_KS))
    # Whole numbers on both sides: a spread that is not 0 is at least 1.
    found_KS: Array = np.where(spread_KS > 0, above_KS / np.maximum(spread_KS, 1e-300), 0.0)
    return found_KS


def _sums(values_SN: Array, counts_KN: Array) -> Array:
    finite_SN = np.isfinite(values_SN)
    sums_KS: Array = counts_KN @ np.where(finite_SN, values_SN, 0.0).T
    if not finite_SN.all():
        sums_KS[(counts_KN @ (~finite_SN).T.astype(np.float64)) > 0] = np.nan
    return sums_KS


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)
