"""What is asked of a recipe's arms, and what of a paper reproduced: met or missed, and how surely."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report_support"))

from report_cases import ARMS, PAPER, make_dyck, make_measured, make_results, replace_metric

from keel.evaluation.results import Target
from keel.report.contrasts import reference_value
from keel.report.reproduction import reproduction
from keel.report.targets import targets_table
from keel.report.text import number


def outcome(arm: str, *, why: str = "", **fields: Any) -> list[str]:
    """The cells of one target of the bracket words: what is asked, what is there, the outcome, whose it is and why."""
    target = Target(says="it is so", metric="dyck.structural_accuracy", arm=arm, why=why, **fields)
    table = targets_table(make_dyck(reference=PAPER.model_copy(update={"targets": [target]})))
    assert table is not None and [row.label for row in table.rows] == ["it is so"]
    assert table.note.startswith("1 of 1 met." if table.rows[0].cells[2].text.startswith("met") else "0 of 1 met.")
    return [cell.text for cell in table.rows[0].cells]


def test_targets_are_met_or_missed_by_the_mean_and_decidedly_by_the_interval() -> None:
    mean = make_dyck().arms["structural"].metrics["dyck.structural_accuracy"].mean
    low, high = make_dyck().arms["structural"].metrics["dyck.structural_accuracy"].ci95 or (0.0, 0.0)
    assert mean is not None and low < mean < high
    words = {
        bound: outcome("structural", least=bound)[2]
        for bound in (low - 0.1, (low + mean) / 2, (mean + high) / 2, high + 0.1)
    }
    assert list(words.values()) == ["met", "met, not decidedly", "missed, not decidedly", "missed"]
    assert outcome("structural", most=high + 0.1)[2] == "met" and outcome("structural", most=low - 0.1)[2] == "missed"


def test_targets_against_a_baseline_are_differences_or_ratios() -> None:
    arms = make_dyck().arms
    ours, theirs = (arms[name].metrics["dyck.structural_accuracy"].mean or 0.0 for name in ("structural", "rope"))
    asked, here, said, whose = outcome("structural", baseline="rope", least=0.01, why="Never mind.")
    assert (asked, said) == ("> +0.0100", "met") and here == number(ours - theirs, signed=True)
    assert whose == "RoPE + structural stream minus RoPE.", "why it was missed is for what was missed"
    asked, here, said, whose = outcome("rope", baseline="structural", ratio=True, most=0.1, why="Too near.")
    assert (asked, here, said) == ("≤ 0.1000", number(theirs / ours), "missed")
    assert whose == "RoPE over RoPE + structural stream. Too near."


def test_as_much_as_a_baseline_is_not_more() -> None:
    same = make_measured(
        {"a": ("A", ["structural"], {"x.y": 0.5}), "b": ("B", [], {"x.y": 0.5})},
        reference=PAPER.model_copy(
            update={"targets": [Target(says="more", metric="x.y", arm="a", baseline="b", least=0.0)], "values": {}}
        ),
    )
    table = targets_table(same)
    assert table is not None and table.rows[0].cells[2].text.startswith("missed")


def test_a_target_of_what_is_no_number_is_missed() -> None:
    target = Target(says="it is over", metric="dyck.structural_accuracy", arm="structural", most=60.0)
    lost = {"mean": math.nan, "values": [math.nan] * 3, "ci95": None}
    results = replace_metric(make_dyck(), "structural", "dyck.structural_accuracy", **lost)
    for asked in (target, target.model_copy(update={"baseline": "rope", "most": 0.0})):
        table = targets_table(results.model_copy(update={"reference": PAPER.model_copy(update={"targets": [asked]})}))
        assert table is not None
        assert [cell.text for cell in table.rows[0].cells[1:3]] == ["NaN", "missed"]


def test_targets_of_arms_that_were_not_run_are_left_out() -> None:
    target = Target(says="it is so", metric="dyck.structural_accuracy", arm="nobody", least=0.5)
    assert targets_table(make_dyck(reference=PAPER.model_copy(update={"targets": [target]}))) is None
    assert targets_table(make_dyck(reference=None)) is None
    for bad in ({}, {"least": 0.1, "most": 0.2}, {"least": 0.1, "ratio": True}):
        with pytest.raises(ValueError, match=r"least and most|needs a baseline"):
            Target(says="it is so", metric="x", arm="a", **bad)


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


def test_reproduction_tells_single_orderings_and_values_apart() -> None:
    outcomes = {finding.claim: finding.reproduced for finding in reproduction(make_dyck())}
    assert outcomes == {
        "Dyck structural accuracy: RoPE below RoPE + structural stream at length 64": True,
        "Dyck structural accuracy of RoPE below NoPE": True,
        "Dyck structural accuracy of RoPE below RoPE + structural stream": True,
        "Dyck structural accuracy of NoPE below RoPE + structural stream": True,
        "Dyck structural accuracy at length 64 of RoPE: 0.6000": False,
        "Dyck structural accuracy at length 64 of RoPE + structural stream: 0.9300": False,
        "Dyck structural accuracy of RoPE: 0.5420": False,
        "Dyck structural accuracy of NoPE: 0.7760": True,
        "Dyck structural accuracy of RoPE + structural stream: 0.9260": True,
        "α depth r of RoPE + structural stream: 0.8660": False,
    }
    claims = {"a": {f"x.y@d{depth}": 0.1 for depth in range(5)}, "b": {f"x.y@d{depth}": 0.2 for depth in range(5)}}
    arms: dict[str, Any] = {
        "a": ("A", [], {**claims["a"], "x.z@unseen": 0.2}),
        "b": ("B", [], {**claims["b"], "x.z@unseen": 0.1}),
    }
    paper = PAPER.model_copy(
        update={"values": {name: means | {"x.z@unseen": means["x.y@d0"]} for name, means in claims.items()}}
    )
    every, unseen, *_ = reproduction(make_measured(arms, reference=paper))
    assert (every.claim, every.here) == ("x y: A below B at 5 conditions", "so at 5 of 5")
    assert unseen.claim == "x z (unseen) of A below B" and unseen.reproduced is False


def test_values_of_several_conditions_are_one_finding() -> None:
    arms: dict[str, Any] = {"a": ("A", [], {f"x.y@layer{layer}": 0.5 for layer in range(3)})}
    values = {"a": {"x.y@layer0": 0.5, "x.y@layer2": 0.9}}
    [finding] = reproduction(make_measured(arms, reference=PAPER.model_copy(update={"values": values})))
    assert finding.claim == "x y of A at layer 0 and 2: 0.5000 and 0.9000"
    assert finding.here == "0.5000 and 0.5000; 1 of 2 agree within their intervals" and finding.reproduced is False
    assert not reproduction(make_measured(arms, reference=PAPER.model_copy(update={"values": {"a": {"x.z": 1.0}}})))
