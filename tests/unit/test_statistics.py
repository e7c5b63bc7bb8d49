"""The bootstrap against cases whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keel.errors import KeelError, ShapeError
from keel.evaluation.statistics import (
    Bootstrap,
    TokenScores,
    bits_per_byte,
    growth,
    perplexity,
)


def make_scores(nats: float, num_seeds: int, num_documents: int, *, seed: int = 0, shift: float = 0.0) -> TokenScores:
    """Documents that differ in difficulty and length, seeds that differ a little; `shift` in nats a token."""
    random = np.random.default_rng(seed)
    tokens_D = random.integers(50, 500, num_documents).astype(np.float64)
    rate_SD = nats + random.normal(0, 0.3, num_documents) + random.normal(0, 0.02, (num_seeds, 1)) + shift
    return TokenScores(nll_SD=rate_SD * tokens_D, tokens_D=tokens_D, bytes_D=4 * tokens_D)


def test_the_values_are_the_ratios_of_the_sums() -> None:
    scores = TokenScores(
        nll_SD=np.array([[2.0, 6.0], [4.0, 4.0]]), tokens_D=np.array([1, 3]), bytes_D=np.array([5, 11])
    )
    bootstrap = Bootstrap(2, 2)
    assert bootstrap.estimate(perplexity(scores)).values == pytest.approx([math.exp(2), math.exp(2)])
    assert bootstrap.estimate(bits_per_byte(scores)).mean == pytest.approx(8 / math.log(2) / 16)
    doubled = TokenScores(nll_SD=2 * scores.nll_SD, tokens_D=scores.tokens_D, bytes_D=scores.bytes_D)
    assert bootstrap.estimate(growth(doubled, scores)).values == pytest.approx([math.exp(2), math.exp(2)])


def test_the_resamples_equal_a_loop() -> None:
    scores = make_scores(4.0, 3, 5)
    bootstrap = Bootstrap(3, 5, resamples=39, seed=3)
    means = []
    for counts_D, seeds_S in zip(bootstrap._counts_RD, bootstrap._seeds_RS, strict=True):
        drawn = np.repeat(np.arange(5), counts_D.astype(int))
        each = [math.exp(scores.nll_SD[s, drawn].sum() / scores.tokens_D[drawn].sum()) for s in seeds_S]
        means.append(sum(each) / 3)
    low, high = np.percentile(means, [2.5, 97.5], method="inverted_cdf")
    assert bootstrap.estimate(perplexity(scores)).ci95 == pytest.approx((low, high))


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    random = np.random.default_rng(1)
    bits_D = random.normal(5.0, 1.0, 400)
    scores = TokenScores(nll_SD=bits_D[None] * math.log(2), tokens_D=np.ones(400), bytes_D=np.ones(400))
    estimate = Bootstrap(1, 400).estimate(bits_per_byte(scores))
    half = 1.96 * bits_D.std() / 20
    assert estimate.ci95 == pytest.approx((bits_D.mean() - half, bits_D.mean() + half), abs=0.02)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for trial in range(200):
        random = np.random.default_rng(trial)
        nll_SD = random.normal(3.0, 0.5, 60) + random.normal(0, 0.1, (12, 1))
        scores = TokenScores(nll_SD=nll_SD, tokens_D=np.ones(60), bytes_D=np.ones(60))
        ci95 = Bootstrap(12, 60, resamples=499, seed=trial).estimate(bits_per_byte(scores)).ci95
        assert ci95 is not None
        covered += ci95[0] <= 3.0 / math.log(2) <= ci95[1]
    assert 0.89 <= covered / 200 <= 0.985


def test_no_difference_gives_p_of_one_and_a_clear_one_the_floor() -> None:
    scores, bootstrap = make_scores(4.0, 3, 40), Bootstrap(3, 40, resamples=999)
    same = bootstrap.compare(perplexity(scores), perplexity(scores))
    assert (same.difference, same.ci95, same.p) == (0.0, (0.0, 0.0), 1.0)
    better = bootstrap.compare(perplexity(make_scores(4.0, 3, 40, shift=-0.2)), perplexity(scores))
    assert better.difference < 0 and better.ci95 is not None and better.ci95[1] < 0
    assert better.p == pytest.approx(1 / 1000)


def test_p_of_noise_is_spread_over_the_unit_interval() -> None:
    ps = []
    for trial in range(200):
        random = np.random.default_rng(trial)
        arms = [random.normal(3.0, 0.5, (1, 50)) for _ in range(2)]
        both = [perplexity(TokenScores(nll_SD=nll_SD, tokens_D=np.ones(50), bytes_D=np.ones(50))) for nll_SD in arms]
        ps.append(Bootstrap(1, 50, resamples=499, seed=trial).compare(*both).p)
    assert 0.01 <= np.mean(np.array(ps) < 0.05) <= 0.11
    assert 0.4 <= np.mean(ps) <= 0.6


def test_pairing_removes_what_the_arms_share() -> None:
    arm, baseline, bootstrap = make_scores(4.0, 3, 40, shift=-0.02), make_scores(4.0, 3, 40), Bootstrap(3, 40)
    interval, paired = (
        bootstrap.estimate(perplexity(baseline)).ci95,
        bootstrap.compare(perplexity(arm), perplexity(baseline)),
    )
    assert interval is not None and paired.ci95 is not None
    assert paired.ci95[1] - paired.ci95[0] < (interval[1] - interval[0]) / 10
    assert paired.p is not None and paired.p < 0.01


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    statistic = perplexity(make_scores(4.0, 3, 20))
    first, again, other = (Bootstrap(3, 20, seed=seed).estimate(statistic).ci95 for seed in (0, 0, 1))
    assert first == again != other


def test_one_seed_and_one_document_have_no_interval() -> None:
    statistic, bootstrap = perplexity(make_scores(4.0, 1, 1)), Bootstrap(1, 1)
    assert bootstrap.estimate(statistic).ci95 is None
    assert bootstrap.compare(statistic, statistic).p is None
    assert Bootstrap(2, 1).estimate(perplexity(make_scores(4.0, 2, 1))).ci95 is not None


def test_overflow_and_nan_come_through_without_breaking() -> None:
    bootstrap, good = Bootstrap(2, 3), make_scores(4.0, 2, 3)
    far = TokenScores(nll_SD=np.full((2, 3), 1e6), tokens_D=good.tokens_D, bytes_D=good.bytes_D)
    assert bootstrap.estimate(perplexity(far)).ci95 == (math.inf, math.inf)
    assert bootstrap.compare(perplexity(far), perplexity(good)).p == pytest.approx(1 / 5000)
    assert bootstrap.compare(perplexity(far), perplexity(far)).p is None  # infinite minus infinite
    broken = TokenScores(nll_SD=np.array([[1, np.nan, 1], [1, 1, 1]]), tokens_D=good.tokens_D, bytes_D=good.bytes_D)
    estimate = bootstrap.estimate(perplexity(broken))
    assert math.isnan(estimate.values[0]) and math.isfinite(estimate.values[1]) and math.isnan(estimate.mean)
    assert bootstrap.compare(perplexity(broken), perplexity(good)).p is None


@pytest.mark.parametrize(
    "build",
    [
        lambda: TokenScores(nll_SD=np.ones((1, 3)), tokens_D=np.ones(2), bytes_D=np.ones(3)),
        lambda: TokenScores(nll_SD=np.ones(3), tokens_D=np.ones(3), bytes_D=np.ones(3)),
        lambda: growth(make_scores(1, 1, 2), make_scores(1, 1, 3)),
        lambda: Bootstrap(1, 4).estimate(perplexity(make_scores(1, 1, 3))),
        lambda: Bootstrap(2, 3).estimate(perplexity(make_scores(1, 1, 3))),
    ],
)
def test_shapes_that_do_not_fit_raise(build) -> None:
    with pytest.raises(ShapeError, match="expected"):
        build()


def test_an_estimate_becomes_the_entry_of_a_results_file() -> None:
    estimate = Bootstrap(3, 20).estimate(perplexity(make_scores(4.0, 3, 20)))
    metric = estimate.metric("perplexity per token", higher_is_better=False)
    assert (metric.values, metric.mean, metric.ci95) == (estimate.values, estimate.mean, estimate.ci95)
    assert metric.mean == pytest.approx(np.mean(estimate.values))


def test_nothing_scored_and_nothing_resampled_raise() -> None:
    with pytest.raises(KeelError, match="at least one scored token"):
        TokenScores(nll_SD=np.ones((1, 2)), tokens_D=np.zeros(2), bytes_D=np.ones(2))
    with pytest.raises(KeelError, match="at least one seed"):
        Bootstrap(1, 2, resamples=0)
