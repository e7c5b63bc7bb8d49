"""What a report claims in words: every verdict that the data can call for, and what of a paper reproduced."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report_support"))

from report_cases import (
    ARMS,
    DYCK,
    PAPER,
    make_dyck,
    make_measured,
    make_mixed,
    make_results,
    make_text,
    replace_metric,
)

from keel.evaluation.results import Curve, Metric, Results
from keel.report.contrasts import contrast, ranking, tally
from keel.report.findings import verdict
from keel.report.metrics import groups_of, metric_phrase, primary_metrics
from keel.report.reproduction import reproduction
from keel.report.tables import group_table, single_table
from keel.report.text import duration, interval, joined, number, probability, size_of

NEAR_FAR = (256, 1024)


def two_arms(stream_nats: float, stream_slope: float, **options: Any) -> Results:
    """A host at 4.7 nats that grows by 0.06 a doubling, against a stream arm."""
    arms: dict[str, Any] = {
        "rope": ("RoPE", [], None, 4.7, 0.06),
        "structural": ("Stream", ["structural"], None, stream_nats, stream_slope),
    }
    return make_results(arms, lengths=NEAR_FAR, **{"reference": None, **options})


@pytest.mark.parametrize(
    ("nats", "status", "words"),
    [
        (
            4.3,
            "helped",
            ["At 1,024 tokens the stream helped: Stream has", "for RoPE, the best baseline (paired", "p = "],
        ),
        (
            5.2,
            "did not help",
            ["the stream did not help: RoPE, the best baseline", "for Stream, the best with the stream"],
        ),
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


def test_a_stage_on_the_way_neither_wins_nor_is_beaten() -> None:
    """A path that is not yet trained equals its host, and must not hide that the trained one is worse."""
    data = two_arms(5.2, 0.06, noise=0.02).model_dump(by_alias=True)
    untrained = {**data["arms"]["rope"], "label": "Untrained", "streams": ["structural"]}
    data["arms"] = {"untrained": untrained, **data["arms"]}
    assert verdict(Results.model_validate(data)).status == "undecided"
    data["arms"]["untrained"]["stage"] = True
    result = verdict(Results.model_validate(data))
    assert result.status == "did not help" and "Untrained" not in result.headline
    assert ranking(Results.model_validate(data), "ppl@1024")[0] in ("rope", "untrained"), "it is still shown"


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
    assert "Window + structural stream has a lower perplexity than every baseline at 10 of 10 lengths" in text
    assert "At 256 tokens, the shortest length, " in text
    assert "From 256 to 40,960 tokens perplexity grows by ×" in text
    assert re.search(r"for RoPE \+ structural stream \(\d+% closer to 1, 0\.\d+ of that of RoPE\)", text), (
        "both ways to say that growth was cut"
    )
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


def a_and_b(ours: float, theirs: float, streams: tuple[str, ...] = ("structural",), **options: Any) -> Results:
    """A host and another arm, which has a stream unless it is told otherwise, in two shares and one distance."""
    arms: dict[str, Any] = {
        "host": ("Host", [], {"x.share": theirs, "markov.l1": theirs}),
        "other": ("Other", list(streams), {"x.share": ours, "markov.l1": ours}),
    }
    return make_measured(arms, **options)


def test_several_measurements_are_counted_in_the_headline_and_told_one_by_one() -> None:
    result = verdict(make_dyck())
    assert result.status == "mixed"
    assert result.headline == (
        "Of 5 measurements, the stream helped in 4 (Dyck structural accuracy, Dyck exact match, Dyck structural accuracy at length "
        "100 and Dyck structural accuracy at depth 8) and did not help in 1 (Markov L1)."
    )
    accuracy, exact, l1, alpha = result.sentences[:4]
    assert accuracy.startswith(
        "In Dyck structural accuracy the stream helped: RoPE + structural stream has 0.9200 [0.911, 0.929], against "
        "0.7800 [0.772, 0.788] for NoPE, the best baseline (paired difference +0.1400 [+0.135, +0.145], p = 0.0002)."
    )
    assert exact.startswith("In Dyck exact match the stream helped") and "paper" not in exact
    assert l1.startswith("In Markov L1 the stream did not help: NoPE, the best baseline, has 0.2000")
    assert alpha.startswith("In α depth r only RoPE + structural stream has a result: 0.8500 [0.842, 0.858].")
    assert any("neither intervals nor p are corrected" in sentence for sentence in result.sentences)


def test_higher_and_lower_are_each_better_where_the_file_says_so() -> None:
    same_means = verdict(a_and_b(0.6, 0.5))
    assert "helped in 1 (x share) and did not help in 1 (Markov L1)" in same_means.headline
    other_way = verdict(a_and_b(0.5, 0.6))
    assert "helped in 1 (Markov L1) and did not help in 1 (x share)" in other_way.headline
    close = verdict(a_and_b(0.5, 0.5001))
    assert close.status == "undecided" and "left all 2 undecided (x share and Markov L1)" in close.headline
    assert close.sentences[0].startswith("In x share it is undecided whether the stream helped: Other has 0.5000 [0.4")
    assert "paired difference −0.0001" in close.sentences[0] and "p = 0.400" in close.sentences[0]
    assert verdict(make_text()).status == "helped" and "in all 4 (" in verdict(make_text()).headline


def test_where_all_arms_have_the_same_value_nothing_is_told() -> None:
    same, apart = verdict(a_and_b(0.0, 0.0)), verdict(a_and_b(0.0, 0.0001))
    assert same.status == "undecided" and same.sentences[0].startswith(
        "In x share nothing can be told: every arm has 0.000."
    )
    assert not any("nothing can be told" in sentence for sentence in apart.sentences)


def test_without_paired_comparisons_other_measurements_rest_on_their_intervals() -> None:
    apart, overlapping = (verdict(a_and_b(*means, compare=False)) for means in ((0.6, 0.5), (0.503, 0.5)))
    assert apart.status == "mixed" and "(their 95 % intervals are apart)" in apart.sentences[0]
    assert overlapping.status == "undecided" and "intervals overlap or are missing" in overlapping.sentences[0]


def test_a_single_comparison_is_the_headline_and_the_others_follow_it() -> None:
    arms = {name: (label, streams, dict(means)) for name, (label, streams, means) in DYCK.items()}
    for _, _, means in arms.values():
        for metric in [name for name in means if name in ("dyck.exact_match", "markov.l1") or "accuracy@" in name]:
            del means[metric]
    result = verdict(make_dyck().model_copy(update={"arms": make_measured(arms).arms}))
    assert result.status == "helped" and result.headline.startswith("In Dyck structural accuracy the stream helped")
    assert result.sentences[0].startswith("The paper has Dyck structural accuracy 0.5420 for RoPE")
    assert result.sentences[1].startswith("In α depth r only RoPE + structural stream has a result")
    assert not any("corrected" in sentence for sentence in result.sentences)


def test_other_measurements_without_any_stream_name_the_best() -> None:
    result = verdict(a_and_b(0.6, 0.5, streams=()))
    assert result.status == "no stream"
    assert result.headline.startswith("In x share Other is best, with 0.6000 [0.594, 0.606]; Host follows with 0.5000")
    assert result.sentences[0].startswith("In Markov L1 Host is best, with 0.5000")
    assert "but not decidedly: " in verdict(a_and_b(0.5, 0.5001, streams=())).headline


def test_our_numbers_stand_beside_those_of_the_paper() -> None:
    paper = PAPER.model_copy(
        update={"values": {"host": {"x.share": 0.4, "markov.l1": 0.502}, "other": {"x.share": 0.9}}}
    )
    text = " ".join(verdict(a_and_b(0.6, 0.5, reference=paper)).sentences)
    assert (
        "The paper has x share 0.4000 for Host (ours, 0.5000 [0.495, 0.505], is higher) and 0.9000 for Other (ours, 0.6000 "
        "[0.594, 0.606], is lower)." in text
    )
    assert "The paper has Markov L1 0.5020 for Host (ours, 0.5000 [0.495, 0.505], agrees within its interval)." in text
    bare = replace_metric(a_and_b(0.6, 0.5, reference=paper), "other", "x.share", ci95=None)
    assert "0.9000 for Other (ours, 0.6000, has no interval)" in " ".join(verdict(bare).sentences)


def test_an_arm_that_diverged_is_neither_above_nor_below_the_paper() -> None:
    paper = PAPER.model_copy(update={"values": {"host": {"x.share": 0.4}, "other": {"x.share": 0.9}}})
    results = a_and_b(0.6, 0.5, reference=paper, compare=False)
    lost = replace_metric(results, "host", "x.share", mean=math.nan, values=[math.nan] * 3, ci95=None)
    assert "The paper has x share 0.9000 for Other (" in (text := " ".join(verdict(lost).sentences))
    assert "for Host (" not in text
    [host] = [finding for finding in reproduction(lost) if finding.claim.startswith("x share of Host:")]
    assert (host.here, host.reproduced) == ("NaN", False)
    vague = replace_metric(results, "other", "x.share", ci95=(math.nan, math.nan))
    assert "has no interval" in " ".join(verdict(vague).sentences)
    [other] = [finding for finding in reproduction(vague) if finding.claim.startswith("x share of Other:")]
    assert other.reproduced is None and "smaller" not in other.here


def test_at_most_six_measurements_are_put_into_words() -> None:
    for count, more in ((7, "The tables hold 1 more measurement."), (9, "The tables hold 3 more measurements.")):
        means = {f"probe.m{index}": 0.5 for index in range(count)}
        arms: dict[str, Any] = {"a": ("A", [], means), "b": ("B", ["structural"], {name: 0.6 for name in means})}
        result = verdict(make_measured(arms))
        assert sum("the stream helped" in sentence for sentence in result.sentences) == 6 and more in result.sentences
        assert f"Of {count} measurements, the stream helped in all {count} (probe m0, " in result.headline


def test_a_decided_measurement_is_told_before_undecided_ones() -> None:
    means = {f"probe.m{index}": 0.5 for index in range(9)}
    close = {name: 0.5001 for name in means}
    arms: dict[str, Any] = {"a": ("A", [], means), "b": ("B", ["structural"], {**close, "probe.m8": 0.6})}
    told = [sentence for sentence in verdict(make_measured(arms)).sentences if "the stream helped" in sentence]
    assert [sentence for sentence in told if "undecided" not in sentence] == [told[-1]] and "probe m8" in told[-1]
    assert len(told) == 6 and "probe m0" in told[0], "the order of the file is kept"


def test_a_measurement_that_is_lost_is_said() -> None:
    lost = a_and_b(0.6, 0.5, compare=False)
    for arm in lost.arms:
        lost = replace_metric(lost, arm, "markov.l1", mean=math.nan, values=[math.nan] * 3, ci95=None)
    result = verdict(lost)
    assert result.headline.startswith("In x share the stream helped")
    assert "No arm has a finite result in Markov L1." in result.sentences


def test_with_conditions_alone_the_last_of_each_group_speaks() -> None:
    conditions = ("a.b@L64", "a.b@L128", "a.b@d2", "a.b@unseen", "a.b@512", "a.b@1024")
    arms: dict[str, Any] = {
        "a": ("A", [], dict.fromkeys(conditions, 0.5)),
        "b": ("B", ["structural"], dict.fromkeys(conditions, 0.6)),
    }
    results = make_measured(arms)
    assert primary_metrics(results) == ["a.b@L128", "a.b@d2", "a.b@unseen", "a.b@1024"]
    said = verdict(results).sentences
    assert [sentence.split(" the stream helped: ")[0] for sentence in said[:4]] == [
        "At length 128",
        "At depth 2",
        "In a b (unseen)",
        "At 1,024 tokens",
    ]
    assert "B has a b 0.6000" in said[0] and "B has 0.6000" in said[2]


def test_a_mixed_file_leads_with_perplexity_and_tells_the_rest() -> None:
    result, alone = (
        verdict(make_mixed()),
        verdict(make_results({n: ARMS[n] for n in ("rope", "structural")}, lengths=NEAR_FAR)),
    )
    assert result.headline == alone.headline and result.status == alone.status
    text = " ".join(result.sentences)
    assert "From 256 to 1,024 tokens perplexity grows" in text and "In LAMBADA accuracy the stream helped" in text
    assert set(alone.sentences) < set(result.sentences)


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("dyck.structural_accuracy", "Dyck structural accuracy"),
        ("dyck.exact_match@L80", "Dyck exact match at length 80"),
        ("dyck.structural_accuracy@d6", "Dyck structural accuracy at depth 6"),
        ("json.validity@w4", "JSON validity at width 4"),
        ("json.field_f1@unseen_keys", "JSON field F1 (unseen keys)"),
        ("gate.saturation@layer2", "gate saturation at layer 2"),
        ("lambada.ppl@512", "LAMBADA perplexity at 512 tokens"),
        ("pg19.ppl", "PG-19 perplexity"),
        ("uuas@layer3", "UUAS of the structural probe at layer 3"),
        ("probe.token_r2.ap@layer2", "R² of token positions in the position stream at layer 2"),
        ("glue.stsb", "STS-B"),
        ("cola.mcc", "CoLA Matthews' correlation"),
        ("growth@40960", "growth of perplexity at 40,960 tokens"),
        ("x.y@noise0.25", "x y at noise 0.25"),
        ("noise.ratio@0.4", "perplexity under noise / clean at σ 0.4"),
        ("drift.ratio_snr@8", "perplexity under drift / clean, σ in units of the embeddings at σ 8"),
    ],
)
def test_metrics_are_named_for_a_reader(name: str, phrase: str) -> None:
    assert metric_phrase(name) == phrase


def test_the_tally_counts_better_undecided_and_worse_lengths() -> None:
    results = two_arms(4.9, -0.2, reference=None)
    assert tally(results, "ppl", "structural", "rope") == (1, 0, 1)
    assert tally(two_arms(4.7, 0.06, noise=0.05), "ppl", "structural", "rope") == (0, 2, 0)


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


def test_what_describes_has_no_best_arm() -> None:
    measured: Any = {
        "rope": ("RoPE", [], {"dyck.structural_accuracy": 0.5, "span.distance@256": 30.0}),
        "structural": ("Stream", ["structural"], {"dyck.structural_accuracy": 0.6, "span.distance@256": 40.0}),
    }
    results = make_measured(measured)
    assert ranking(results, "span.distance@256") and primary_metrics(results) == ["dyck.structural_accuracy"]
    for arm in measured:
        for metric in ("span.distance@256", "dyck.structural_accuracy"):
            results = replace_metric(results, arm, metric, higher_is_better=None)
    assert ranking(results, "span.distance@256") == primary_metrics(results) == []
    assert contrast(results, "span.distance@256", "structural", "rope").ahead is None
    table = group_table(results, groups_of(results)[0])
    assert "more is neither better nor worse" in table.note and not any(
        cell.best for row in table.rows for cell in row.cells
    )
    single = single_table(results)
    assert single is not None and not single.columns[0].endswith(("↑", "↓"))


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ([100.0, 100.0, 100.0, 100.0], ""),
        ([100.0, 200.0, 160.0, 130.0], "; lowest, 0.500, after 2,000 training tokens"),
        ([100.0, 80.0, 90.0, 100.0], "; highest, 1.250, after 2,000 training tokens"),
    ],
)
def test_the_lead_along_training_says_where_it_was_largest(theirs: list[float], says: str) -> None:
    data = two_arms(4.3, 0.06).model_dump(by_alias=True)
    for arm, values in (("structural", [100.0] * 4), ("rope", theirs)):
        curve = {
            "x_label": "training tokens",
            "x": [1000, 2000, 3000, 4000],
            "values": [[value] * 3 for value in values],
        }
        data["arms"][arm]["curves"] = {"validation perplexity": curve}
    text = " ".join(verdict(Results.model_validate(data)).sentences)
    assert f"at the last{says}." in text


def test_seeds_that_read_other_numbers_of_tokens_are_joined_by_measurement() -> None:
    """Texts that are read whole: every seed is measured after as many steps, and never after as many tokens."""
    curve = Curve(
        x_label="training tokens",
        x=[90, 100, 110, 190, 210],
        values=[[None, 4.0, None], [5.0, None, None], [None, None, 3.0], [2.0, None, None], [None, 1.0, None]],
    )
    assert curve.joined() == Curve(x_label="training tokens", x=[100, 200], values=[[5.0, 4.0, 3.0], [2.0, 1.0, None]])
    for values in ([[1.0], [2.0], [None], [4.0]], [[1.0, 2.0], [1.0, None], [None, None], [3.0, 1.0]]):
        broken = Curve(x_label="training tokens", x=[1, 2, 3, 4], values=values)
        assert broken.joined() == broken, "not finite for a while, at x that the seeds share"
    data = two_arms(4.3, 0.06).model_dump(by_alias=True)
    for arm in ("structural", "rope"):
        data["arms"][arm]["curves"] = {"validation perplexity": curve.model_dump()}
    data["arms"]["structural"]["curves"]["validation perplexity"]["values"] = [
        [None if value is None else value / 2 for value in row] for row in curve.values
    ]
    text = " ".join(verdict(Results.model_validate(data)).sentences)
    assert "is 0.500 of that of RoPE at the first measurement and 0.500 at the last" in text


def test_arms_that_lack_seeds_are_named() -> None:
    results = make_dyck()
    assert not any("Not finished" in sentence for sentence in verdict(results).sentences)
    arm = results.arms["structural"]
    metrics = {
        name: metric.model_copy(update={"values": [metric.values[0], *[None] * (len(metric.values) - 1)]})
        for name, metric in arm.metrics.items()
    }
    partial = {**results.arms, "structural": arm.model_copy(update={"metrics": metrics})}
    sentences = verdict(results.model_copy(update={"arms": partial})).sentences
    assert any(s.startswith("Not finished: RoPE + structural stream has 1 of 3 seeds;") for s in sentences)
