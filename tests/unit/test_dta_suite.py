"""The suite of DTA §11 and the failure-mode table on a tiny model: what is measured, what a bare host has, what the judges say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from keel.data import TokenStream
from keel.data.disruptions import DisruptedWindows, DisruptionConfig
from keel.data.languages import Facts
from keel.data.languages.facts import PEOPLE, PLACES
from keel.data.tasks import language_tokenizer
from keel.errors import KeelError
from keel.evaluation import faults
from keel.evaluation.dta_metrics import METRICS
from keel.evaluation.dta_suite import SuiteSizes, dta_suite
from keel.evaluation.faults import fault_table, tokens_needed, watch
from keel.evaluation.judges import TopicJudge, answer_probabilities, count_contradictions, planted_fact
from keel.evaluation.rollout import read_signals, roll_out
from keel.evaluation.signals import auroc_terms, signal_quality
from keel.experiment.time_lines import draw_time_lines
from keel.model import KeelForCausalLM, attach
from keel.streams import DynamicStateStream
from keel.streams.dynamic_state import FAILURES

TOKENIZER = language_tokenizer(Facts(people=8).alphabet)
HOST_METRICS = {"dta.tcs", "generation.repetition", "generation.drift", "dta.cpi", "facts.statements", "dta.dct"}


def model_of(path: bool = True, **fields: Any) -> KeelForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=1024,
    )  # fmt: skip
    given = {"state_size": 4, "noise": "hidden", "init": "paper", **fields}
    streams = {"dynamic_state": DynamicStateStream(**given)} if path else {}
    return attach(LlamaForCausalLM(config), streams).eval()


def prompts(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, len(TOKENIZER), (rows, length), generator=torch.Generator().manual_seed(3))


# -- AUROC --------------------------------------------------------------------------------------------------------------


def test_the_terms_of_the_auroc_are_a_count_of_pairs() -> None:
    source = np.random.default_rng(0)
    score = [source.integers(0, 6, size=20).astype(float) for _ in range(3)]
    kind = [source.integers(0, 3, size=20) for _ in range(3)]
    tops, bottoms = auroc_terms(score, [k == 1 for k in kind], [k == 0 for k in kind])
    positives, negatives = (
        np.concatenate([s[k == wanted] for s, k in zip(score, kind, strict=True)]) for wanted in (1, 0)
    )
    pairs = [(p > n) + 0.5 * (p == n) for p in positives for n in negatives]
    assert tops.sum() / bottoms.sum() == pytest.approx(np.mean(pairs))
    assert bottoms.tolist() == [(k == 1).sum() for k in kind]
    with pytest.raises(KeelError, match="0 disrupted"):
        auroc_terms(score, [k == 7 for k in kind], [k == 0 for k in kind])


def test_signals_that_know_the_noise_score_one_and_others_do_not() -> None:
    model = model_of()
    ids = np.random.default_rng(3).integers(3, len(TOKENIZER), size=900).astype(np.int32)
    text = TokenStream(ids=ids, starts=np.array([0]), token_bytes=np.ones(900, dtype=np.uint16), names=["made up"])
    config = DisruptionConfig(kinds=("hidden",), share=0.3, span=(8, 16))
    windows = DisruptedWindows(text, 128, 64, TOKENIZER, config, seed=0)
    level = torch.stack([windows[index]["level"] for index in range(4)])

    def oracle(module: Any, args: Any, output: Any) -> None:
        output.signals["dynamic_state.noise"] = level.clone()
        output.signals["dynamic_state.coherence"] = level.clone()

    untouched = {m.name: m.value for m in signal_quality(model, [windows[index] for index in range(4)])}
    handle = model.register_forward_hook(oracle)
    found = {m.name: m.value for m in signal_quality(model, [windows[index] for index in range(4)])}
    handle.remove()
    assert found["signal.auroc_noise"] == found["signal.auroc_noise@hidden"] == 1.0
    assert found["signal.auroc_coherence"] == 0.0
    assert 0.0 < untouched["signal.auroc_noise"] < 1.0
    assert set(found) == set(untouched) and found["baseline.auroc_residual"] == untouched["baseline.auroc_residual"]
    bare = {m.name for m in signal_quality(model_of(path=False), [windows[0]])}
    assert {name.split("@")[0] for name in bare} == {"baseline.auroc_surprisal", "baseline.auroc_residual"}


# -- rollouts -----------------------------------------------------------------------------------------------------------


def test_a_rollout_keeps_the_signals_of_every_token() -> None:
    model = model_of()
    noise = prompts(length=5)
    run = roll_out(model, [prompts(), 7, noise, 6], seed=4)
    assert run.stages == ((0, 12), (12, 19), (19, 24), (24, 30)) and run.ids_BT.shape == (2, 30)
    assert torch.equal(run.ids_BT[:, 19:24], noise) and not (run.ids_BT == 2).any()
    again = read_signals(model, run.ids_BT)
    for name, signal in run.signals.items():
        np.testing.assert_allclose(signal, again[name], atol=1e-5)
    assert torch.equal(roll_out(model, [prompts(), 7, noise, 6], seed=4).ids_BT, run.ids_BT)
    assert not torch.equal(roll_out(model, [prompts(), 7, noise, 6], seed=5).ids_BT, run.ids_BT)
    with pytest.raises(KeelError, match="prompt"):
        roll_out(model, [3], seed=0)


# -- judges -------------------------------------------------------------------------------------------------------------


def test_topics_are_those_of_the_documents() -> None:
    ships, bread = "ship harbour captain sail wind mast " * 40, "flour oven baker crust dough yeast " * 40
    judge = TopicJudge([ships, bread] * 3, [ships, bread], topics=2, passage=20)
    assert judge.accuracy == 1.0
    topics = judge.topics(["the captain and the mast", "dough in the oven", "a sail in the wind"])
    assert topics[0] == topics[2] != topics[1]
    assert judge.drift(ships, ships) < 0.01 and judge.drift(ships, bread) > 0.99
    with pytest.raises(KeelError, match="topics"):
        TopicJudge([ships], [bread], topics=2, passage=20)


def test_contradictions_count_in_what_was_generated_alone() -> None:
    story = "Anna went to the garden. Anna is in the river. "
    assert count_contradictions(story, "Anna is in the garden. Ben is in the river. ") == (0, 2)
    assert count_contradictions(story, "Anna is in the church. ") == (1, 1)


def test_a_planted_fact_is_recalled_by_a_model_that_knows_it() -> None:
    told = set(PEOPLE[: Facts().people])
    for seed in range(12):
        words = (
            "".join(TOKENIZER.convert_ids_to_tokens(planted_fact(TOKENIZER, 40, seed=seed)[0]))
            .replace(".", " ")
            .split()
        )
        assert {word for word in words if word in PEOPLE} <= told, "nobody whom no story in training tells of"
    story, answers, planted = planted_fact(TOKENIZER, 40, seed=1)
    text = "".join(TOKENIZER.convert_ids_to_tokens(story))
    person = text.split(" ")[0]
    assert text.count(person) == 2 and PLACES[planted] == text.split(". ")[0].split(" ")[-1] and len(story) >= 40
    model = model_of()
    found = answer_probabilities(model, story, answers)
    with torch.no_grad():
        scores = model(torch.tensor([story + answers[0]])).logits[0, len(story) - 1 :].log_softmax(-1)
    expected = sum(scores[index, token] for index, token in enumerate(answers[0])).exp()
    assert found[0] == pytest.approx(expected.item(), rel=1e-4) and len(found) == len(PLACES)


# -- the suite ----------------------------------------------------------------------------------------------------------

SIZES = SuiteSizes(tokens=60, noise=6, around=20, distances=(8, 24), planted=2)


@pytest.mark.parametrize("path", [True, False])
def test_the_suite_measures_all_that_a_model_has(path: bool) -> None:
    documents = ["ship harbour captain sail " * 20, "flour oven baker crust " * 20, "Anna went to the garden. " * 20]
    topics = TopicJudge(documents, documents, topics=2, passage=10)
    model = model_of(path)
    metrics, run = dta_suite(model, prompts(), TOKENIZER, topics, SIZES)
    values = {metric.name: metric.value for metric in metrics}
    expected = {f"dta.{name}" for name in METRICS} | HOST_METRICS if path else HOST_METRICS
    assert set(values) == expected | {"dta.dct_near@8"}
    assert all(np.isfinite(value) for value in values.values()), values
    for name, about in METRICS.items():
        if f"dta.{name}" in values:
            assert about.least <= values[f"dta.{name}"] <= about.most, name
    assert bool(run.signals) == path
    again = {metric.name: metric.value for metric in dta_suite(model, prompts(), TOKENIZER, topics, SIZES)[0]}
    assert again == values


def test_time_lines_shade_the_disruption() -> None:
    run = roll_out(model_of(), [prompts(), 8, prompts(length=4), 8], seed=0)
    lines = {name: run.signals[name][0].tolist() for name in ("coherence", "noise")}
    drawing = draw_time_lines(lines, run.stages, "path", "Trained path", 0)
    guarded = draw_time_lines({**lines, "governor": [0.0, 1.0, 2.0, 0.0]}, run.stages, "path", "Trained path", 0)
    assert "governor (0 active" in guarded.wide and "governor" not in drawing.wide
    assert "I coherence" in drawing.wide and drawing.png.startswith(b"\x89PNG")
    unshaded = draw_time_lines(lines, run.stages[:2], "path", "Trained path", 0)
    assert drawing.wide.count("fill-opacity") != unshaded.wide.count("fill-opacity") or drawing.png != unshaded.png


# -- faults -------------------------------------------------------------------------------------------------------------

WITHIN = {"alignment_break": 4, "identity_split": 8, "temporal_fragmentation": 2, "fixed_point_collapse": 320}


def guarded(noise: str = "hidden", **limits: Any) -> KeelForCausalLM:
    fields = {"patience": 4, "cooldown": 6, "coherence_least": 0.02, "continuity_least": 0.1, "alignment_least": 0.001}
    return model_of(noise=noise, safeguards={**fields, "noise_most": 20.0, **limits})


@pytest.mark.parametrize("mode", FAILURES)
def test_a_fault_is_seen_bounded_and_over(mode: str) -> None:
    row = prompts(1, tokens_needed())
    found = watch(guarded(), row, mode)
    assert found.detected_after <= WITHIN.get(mode, 0)
    assert found.bounded == 1.0 and found.others_untouched == 1.0
    assert found.recovered_after <= 60


def test_a_fault_is_made_also_where_a_single_row_has_a_shorter_way() -> None:
    found = watch(guarded("residual_norm"), prompts(1, tokens_needed()), "coherence_collapse")
    assert (found.detected_after, found.bounded) == (0.0, 1.0) and found.recovered_after <= 60


def test_a_fault_that_reaches_the_other_row_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def tamper(parts: Any, fault: slice, stream: DynamicStateStream) -> None:
        stream.integration.data.mul_(1.1)

    monkeypatch.setitem(faults._TAMPERS, "noise_rampancy", tamper)
    assert watch(guarded(), prompts(1, tokens_needed()), "noise_rampancy").others_untouched == 0.0


def test_a_detector_that_is_off_sees_nothing() -> None:
    found = watch(guarded(substrate_least=-1.0), prompts(1, tokens_needed()), "substrate_collapse")
    assert np.isnan(found.detected_after)


def test_false_alarms_are_no_aftermath_of_a_fault() -> None:
    restless = guarded(coherence_least=0.52)  # about half of the tokens of random weights fail it, faults or not
    found = watch(restless, prompts(1, tokens_needed()), "noise_rampancy")
    assert found.detected_after == 0.0 and found.recovered_after <= 60


def test_the_table_ends_with_shares_over_all_faults() -> None:
    table = fault_table(guarded(substrate_least=-1.0), prompts(1, tokens_needed()))
    blind = {metric.name: metric.value for metric in table}
    assert blind["fault.detected"] == pytest.approx(7 / 8)
    assert [blind[f"fault.{name}"] for name in ("bounded", "recovered", "others_untouched")] == [1.0, 1.0, 1.0]


def test_the_table_wants_safeguards_and_enough_text() -> None:
    with pytest.raises(KeelError, match="no dynamic state path with safeguards"):
        fault_table(model_of(), prompts(1, tokens_needed()))
    with pytest.raises(KeelError, match="give at least"):
        fault_table(guarded(), prompts(1, 20))
