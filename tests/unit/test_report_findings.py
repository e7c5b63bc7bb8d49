"""What a report claims in words: every verdict that the data can call for, and what of a paper reproduced."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report_support"))

from report_cases import ARMS, PAPER, make_results

from keel.evaluation.results import Metric, Results
from keel.report.contrasts import contrast, ranking, reference_value, tally
from keel.report.findings import verdict
from keel.report.metrics import metric_phrase, primary_metrics
from keel.report.reproduction import reproduction
from keel.report.text import duration, interval, joined, number, probability, size_of

NEAR_FAR = (256, 1024)


def two_arms(stream_nats: float, stream_slope: float, **options: Any) -> Results:
    """A host at 4.7 nats that grows by 0.06 a doubling, against a stream arm."""
    arms: dict[str, Any] = {
        "rope": ("RoPE", [], None, 4.7, 0.06),
        "structural": ("Stream", ["structural"], None, stream_nats, stream_slope),
    }
    return make_results(arms, lengths=NEAR_FAR, **{"reference": None, **options})


def replace_metric(results: Results, arm: str, metric: str, **changes: Any) -> Results:
    data = results.model_dump(by_alias=True)
    data["arms"][arm]["metrics"][metric] |= changes
    return Results.model_validate(data)


@pytest.mark.parametrize(
    ("nats", "status", "words"),
    [
        (
            4.3,
            "helped",
            ["At 1,024 tokens the stream helped: Stream has", "for RoPE, the best without", "p = "],
        ),
        (5.2, "did not help", ["the stream did not help: RoPE, without a stream", "for Stream, the best with one"]),
        (4.7, "undecided", ["it is undecided whether the stream helped"]),
    ],
)
def test_the_verdict_follows_the_numbers(nats: float, status: str, words: list[str]) -> None:
    result = verdict(two_arms(nats, 0.06, noise=0.02))
    assert result.status == status
    assert all(word in result.headline for word in words), result.headline


def test_without_paired_comparisons_overlapping_intervals_leave_it_undecided() -> None:
    close, far = (verdict(two_arms(nats, 0.06, compare=False)) for nats in (4.62, 3.0))
    assert close.status == "undecided" and "intervals overlap" in close.headline
    assert far.status == "helped" and "intervals are apart" in far.headline
    # The same close numbers, paired, are decided: the documents' difficulty is common to both arms.
    assert verdict(two_arms(4.62, 0.06)).status == "helped"


def test_without_a_stream_the_best_arm_is_named_and_doubt_is_said() -> None:
    arms: dict[str, Any] = {"rope": ("RoPE", [], None, 4.7, 0.06), "alibi": ("ALiBi", [], None, 4.6, 0.0)}
    result = verdict(make_results(arms, lengths=NEAR_FAR))
    assert (
        result.status == "no stream" and "ALiBi is best" in result.headline and "not decidedly" not in result.headline
    )
    arms["alibi"] = ("ALiBi", [], None, 4.7, 0.06)
    assert "not decidedly" in verdict(make_results(arms, lengths=NEAR_FAR, noise=0.05)).headline


def test_sentences_tell_lengths_growth_training_parameters_and_seeds() -> None:
    text = " ".join(verdict(make_results()).sentences)
    assert (
        "Window + structural stream has a lower perplexity than every arm without a stream at 10 of 10 lengths" in text
    )
    assert "At 256 tokens, the shortest length, " in text
    assert "From 256 to 40,960 tokens perplexity grows by ×" in text and "% closer to 1)" in text
    assert "Along training, validation perplexity of RoPE + structural stream is 1.000 of that of RoPE" in text
    assert "Parameters are matched within 0.11%" in text and "1,151,232" in text and "1,149,952" in text
    assert "3 seeds" in text


def test_few_seeds_and_few_documents_are_said() -> None:
    data = two_arms(4.3, 0.06).model_dump(by_alias=True)
    data["provenance"]["documents"] = 24
    assert "24 documents" not in " ".join(verdict(Results.model_validate(data)).sentences)
    data["provenance"]["documents"] = 3
    assert (
        "holds 3 documents: intervals over so few are too narrow" in verdict(Results.model_validate(data)).sentences[-1]
    )


def test_unmatched_parameters_are_said() -> None:
    data = make_results().model_dump(by_alias=True)
    data["arms"]["window_structural"]["params_total"] = 2_000_000
    assert "Parameters are not matched: +73.9%" in " ".join(verdict(Results.model_validate(data)).sentences)


def test_a_stream_that_wins_far_and_loses_near_says_both() -> None:
    result = verdict(two_arms(4.9, -0.2))
    text = " ".join(result.sentences)
    assert result.status == "helped"
    assert "Stream (" in text and "is above RoPE" in text and "at 1 of 2 lengths" in text


def test_arms_that_diverged_neither_win_nor_break_anything() -> None:
    results = replace_metric(make_results(), "structural", "ppl@40960", mean=math.nan, values=[math.nan] * 3, ci95=None)
    assert "structural" not in ranking(results, "ppl@40960")
    assert verdict(results).status == "helped"  # by the other stream arm
    infinite = replace_metric(make_results(), "rope", "ppl@40960", mean=math.inf, ci95=(math.inf, math.inf))
    assert ranking(infinite, "ppl@40960")[-1] == "rope" and verdict(infinite).headline
    lost = two_arms(4.3, 0.06, compare=False)
    for arm in lost.arms:
        lost = replace_metric(lost, arm, "ppl@1024", mean=math.nan, values=[math.nan] * 3, ci95=None)
    assert verdict(lost).headline == "Undecided: no arm has a finite result."


def test_a_contrast_reads_the_same_from_both_sides() -> None:
    results = make_results()
    one, other = (contrast(results, "ppl@40960", *pair) for pair in (("structural", "rope"), ("rope", "structural")))
    assert one.paired and other.paired and one.difference == -other.difference and one.p == other.p
    assert one.ahead is True and other.ahead is False
    assert one.ci95 is not None and other.ci95 == (-one.ci95[1], -one.ci95[0])


def test_higher_is_better_turns_the_ranking_and_the_verdict() -> None:
    data = two_arms(4.3, 0.06, compare=False).model_dump(by_alias=True)
    for name, mean in (("rope", 0.5), ("structural", 0.8)):
        metric = Metric(values=[mean] * 3, mean=mean, ci95=(mean - 0.1, mean + 0.1), unit="", higher_is_better=True)
        data["arms"][name]["metrics"] = {"accuracy": metric.model_dump()}
    results = Results.model_validate(data)
    assert primary_metrics(results) == ["accuracy"] and ranking(results, "accuracy") == ["structural", "rope"]
    assert verdict(results).headline.startswith("In accuracy the stream helped")


def test_the_tally_counts_better_undecided_and_worse_lengths() -> None:
    results = two_arms(4.9, -0.2, reference=None)
    assert tally(results, "ppl", "structural", "rope") == (1, 0, 1)
    assert tally(two_arms(4.7, 0.06, noise=0.05), "ppl", "structural", "rope") == (0, 2, 0)


def test_reproduction_tells_orderings_and_growth_apart() -> None:
    findings = reproduction(make_results())
    orderings = [f for f in findings if "below" in f.claim]
    assert orderings and all(f.reproduced for f in orderings)
    sizes = {f.claim.split(" of ")[-1].split(":")[0]: f for f in findings if "below" not in f.claim}
    assert sizes["RoPE"].reproduced is False and sizes["RoPE"].here.endswith("smaller")
    assert "×9.787" in sizes["RoPE"].claim


def test_a_reversed_ordering_did_not_reproduce() -> None:
    arms = dict(ARMS) | {"structural": ("Stream", ["structural"], None, 5.0, 0.1)}
    [finding] = [f for f in reproduction(make_results(arms)) if f.claim.startswith("perplexity")]
    assert finding.reproduced is False and "reversed at" in finding.here
    arms["structural"] = ("Stream", ["structural"], None, 4.71, 0.062)
    [finding] = [f for f in reproduction(make_results(arms, noise=0.1)) if f.claim.startswith("perplexity")]
    assert finding.reproduced is None and "undecided at" in finding.here


def test_growth_of_the_paper_is_taken_from_its_perplexities() -> None:
    results = make_results()
    assert reference_value(results, "rope", "growth@40960") == pytest.approx(321.40 / 32.84)
    assert reference_value(results, "rope", "growth@1024") is None
    assert reference_value(results, "alibi", "ppl@256") is None
    assert reproduction(make_results(reference=None)) == []
    assert reproduction(make_results(reference=PAPER.model_copy(update={"values": {"fusion": {"ppl@256": 1.0}}}))) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (0.0, "0.000"),
        (0.98765, "0.9877"),
        (2.9134, "2.913"),
        (111.34, "111.3"),
        (12345.6, "12,346"),
        (1e9, "1.0×10⁹"),
        (-4.56e12, "−4.6×10¹²"),
    ],
)
def test_numbers_are_written_for_a_reader(value: float | None, text: str) -> None:
    assert number(value) == text


def test_other_quantities_are_written_for_a_reader() -> None:
    assert number(2.0, signed=True) == "+2.000" and interval((1.0, 2.0), like=1.5) == "[1.00, 2.00]"
    assert interval(None, like=1.0) == "" and (probability(0.0002), probability(0.04), probability(None)) == (
        "0.0002",
        "0.040",
        "–",
    )
    assert (size_of(None), size_of(2**30), size_of(20 * 2**30)) == ("–", "1,024 MiB", "20.0 GiB")
    assert [duration(s) for s in (3.21, 200, 7300, 200000, math.nan)] == [
        "3.2 s",
        "3 min 20 s",
        "2 h 1 min",
        "2 d 7 h",
        "unknown",
    ]
    assert (joined(["a"]), joined(["a", "b", "c"])) == ("a", "a, b and c")
    assert (metric_phrase("ppl@4096"), metric_phrase("exact_match")) == ("perplexity at 4,096 tokens", "exact match")
