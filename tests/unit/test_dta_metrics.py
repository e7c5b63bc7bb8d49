"""Every metric of DTA §11: a case where it must be high and one where it must be low."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from keel.evaluation import dta_metrics as dta

RANDOM = np.random.default_rng(0)
STEADY = np.tile([1.0, 0.0, 0.0], (600, 1))
WANDERING = RANDOM.normal(size=(600, 3))
CALM, WILD = np.full(100, 0.9), np.full(100, 0.1)


def signals(level: float, state: Any = STEADY) -> dict[str, Any]:
    return {
        "coherence": np.full(9, level),
        "continuity": np.full(9, level),
        "alignment": np.full(9, level),
        "state": state,
    }


# name: (the case with the higher value, the case with the lower one, value of each)
CASES: dict[str, tuple[Any, Any, float, float]] = {
    "lcds": ((CALM,), (WILD,), 0.9, 0.1),
    "cpi": ((5, 100), (0, 100), 0.05, 0.0),
    "tcs": (([True, True], [50, 50]), ([True, False], [25, 75]), 1.0, 0.25),
    "pf": ((STEADY,), (np.vstack([STEADY[:500], -STEADY[:100]]),), 1.0, -1.0),
    "ict": ((CALM, CALM), (CALM, WILD), 1.0, 1 / 9),
    "dct": (([0.2, 0.01, 0.01], 0), ([0.2, 0.01, 0.01], 1), 0.2 / 0.22, 0.01 / 0.22),
    "nsr": ((np.array([0.2, 3.0, 0.2]), np.full(5, 0.2)), (np.full(3, 0.2), np.full(5, 0.2)), 2.8, 0.0),
    "isi": ((np.array([[0.0, 0], [2, 2], [0, 0]]),), (STEADY,), 2.0, 0.0),
    "rdt": (
        ([np.array([1.0, 50.0]), np.array([1.0, math.nan])], CALM), ([np.array([1.0, 2.0])] * 2, CALM), 1.0, 0.0
    ),
    "acs": ((STEADY, 3 * STEADY), (STEADY, -STEADY), 1.0, -1.0),
    "doi": ((CALM,), (np.array([0.9, 0.9, 0.2, 0.9]),), 100.0, 2.0),
    "rscs": ((WILD, CALM), (CALM, CALM), 9.0, 1.0),
    "sss": ((np.arange(9.0), np.arange(9.0) ** 1.0), (np.arange(9.0), np.zeros(9)), 1.0, 0.0),
    "gdi": ((signals(0.9), signals(0.1)), (signals(0.9), signals(0.9)), 0.6, 0.0),
    "ssr": ((CALM,), (WILD,), 0.9, 0.1),
    "dtss": (
        ({"lcds": 1, "pf": 1, "isi": 0, "acs": 1, "nsr": 0, "gdi": 0, "rscs": 5.0},),
        ({"lcds": 0, "pf": 0, "isi": 1, "acs": 0, "nsr": 2, "gdi": 1, "rscs": 0.0},),
        5 / 7,
        -3 / 7,
    ),
}  # fmt: skip


def test_every_metric_of_the_suite_has_a_case() -> None:
    assert set(CASES) == set(dta.METRICS) and len(dta.METRICS) == 16


@pytest.mark.parametrize("name", CASES)
def test_a_metric_is_high_and_low_where_it_must_be(name: str) -> None:
    high, low, expected_high, expected_low = CASES[name]
    metric, about = getattr(dta, name), dta.METRICS[name]
    values = metric(*high), metric(*low)
    assert values == pytest.approx((expected_high, expected_low))
    assert values[0] > values[1] and all(about.least <= value <= about.most for value in values)


def test_coherence_is_recorded_every_twenty_tokens() -> None:
    coherence = np.zeros(60)
    coherence[[19, 39, 59]] = 1.0
    assert dta.lcds(coherence) == 1.0 and math.isnan(dta.lcds(coherence[:10]))


def test_a_wandering_state_loses_its_fidelity() -> None:
    assert abs(dta.pf(WANDERING)) < 0.95 < dta.pf(STEADY + 0.01 * WANDERING)
    assert dta.isi(WANDERING) > 10 * dta.isi(0.01 * WANDERING)


def test_a_substrate_that_does_not_change_says_nothing() -> None:
    assert dta.sss(np.zeros(5), np.arange(5.0)) == 0.0
    assert dta.sss(np.arange(9.0), -np.arange(9.0)) == pytest.approx(-1.0)


def test_contradictions_of_free_text_come_from_a_judge() -> None:
    def opposite(before: Sequence[str], sentence: str) -> bool:
        return any(sentence == f"not {each}" for each in before)

    sentences = ["it rains", "it is late", "not it rains", "not it is late"]
    assert dta.contradicting_pairs(sentences, opposite) == 2
    assert dta.contradicting_pairs(sentences, opposite, reach=1) == 0
    assert dta.contradicting_pairs(sentences[:2], opposite) == 0


def test_repetition_counts_n_grams_that_came_before() -> None:
    assert dta.repetition([1, 2, 3, 4] * 25) == pytest.approx(1 - 4 / 97)
    assert dta.repetition(list(range(100))) == 0.0


def test_passages_cover_everything_once() -> None:
    assert dta.passages(10, 4) == [(0, 4), (4, 10)] and dta.passages(3, 4) == [(0, 3)]
