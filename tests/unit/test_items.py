"""Metrics over items: their value, their statistic under resampling, their JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, accuracy, item_statistic, mean
from keel.evaluation.statistics import Bootstrap


def _f1(numerators: tuple[float, ...], denominators: tuple[float, ...], exponential: bool = False) -> ItemMetric:
    return ItemMetric(
        name="json.field_f1",
        unit="F1",
        higher_is_better=True,
        numerators=numerators,
        denominators=denominators,
        exponential=exponential,
    )


def test_the_value_is_the_ratio_of_the_sums_or_its_exponential() -> None:
    assert _f1((2, 0, 4), (4, 2, 4)).value == pytest.approx(0.6)
    assert _f1((2, 0, 4), (4, 2, 4), exponential=True).value == pytest.approx(math.exp(0.6))
    assert accuracy("dyck.exact_match", [True, False, True, True]).value == 0.75
    assert mean("markov.l1", [0.5, 1.5], unit="l1", higher_is_better=False).value == 1.0
    assert math.isnan(_f1((0.0,), (0.0,)).value)


def test_a_resample_counts_items() -> None:
    statistic = item_statistic([_f1((2, 0, 4), (4, 2, 4)), _f1((1, 1, 1), (4, 2, 4))])
    counts = np.array([[1.0, 1, 1], [0, 2, 1], [3, 0, 0]])
    np.testing.assert_allclose(statistic.measure(counts), [[0.6, 0.3], [0.5, 3 / 8], [0.5, 0.25]])


def test_an_item_that_is_not_finite_spoils_only_the_resamples_that_drew_it() -> None:
    statistic = item_statistic([_f1((2, math.inf), (4, 4))])
    found = statistic.measure(np.array([[1.0, 1], [2, 0]]))[:, 0]
    assert math.isnan(found[0]) and found[1] == 0.5


def test_intervals_hold_the_mean_and_arms_compare_in_pairs() -> None:
    random = np.random.default_rng(0)
    low, high = ([accuracy("a.b", random.random(400) < share) for _ in range(3)] for share in (0.4, 0.6))
    bootstrap = Bootstrap(3, 400, resamples=999)
    estimate = bootstrap.estimate(item_statistic(low))
    assert estimate.ci95 is not None and estimate.ci95[0] < 0.4 < estimate.ci95[1]
    difference = bootstrap.compare(item_statistic(high), item_statistic(low))
    assert difference.difference == pytest.approx(0.2, abs=0.05) and difference.p == pytest.approx(0.001)


@pytest.mark.parametrize("value", [0.1 + 0.2, math.inf, -math.inf, math.nan])
def test_json_gives_back_the_same_numbers(value: float) -> None:
    metric = _f1((value, 1.0), (3.0, 2.0))
    text = json.dumps(metric.to_json(), allow_nan=False)
    assert repr(ItemMetric.from_json(metric.name, json.loads(text))) == repr(metric)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KeelError, match=r"json\.field_f1: 2 numerators and 1 denominators"):
        _f1((1, 2), (1,))
    with pytest.raises(KeelError, match="at least one item"):
        _f1((), ())
    with pytest.raises(KeelError, match="over the same items"):
        item_statistic([_f1((1,), (1,)), _f1((1, 2), (1, 2))])
    with pytest.raises(KeelError, match="not a saved metric"):
        ItemMetric.from_json("a", {"unit": "share"})
