"""Perturbed embeddings and support tokens: perturbations, metrics against plain loops, the control that changes nothing, and
weights, shares and sizes on barriers whose answers are known.

Shapes: N windows, T tokens, D width.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import keel
from keel.data import Segment
from keel.errors import KeelError
from keel.evaluation import robustness as module
from keel.evaluation.items import ItemMetric
from keel.evaluation.last_word import Passage
from keel.evaluation.posterior import posterior_scores, posterior_words
from keel.evaluation.robustness import (
    Perturbation,
    perturb,
    rescale_embeddings,
    robustness,
    subsample_medians,
    subsampled,
)
from keel.evaluation.selective import (
    COVERAGES,
    calibration_terms,
    risk_coverage,
    risk_terms,
    selective,
    selective_words,
)
from keel.evaluation.support import prior_terms, support_tokens
from keel.experiment.token_picture import draw_tokens, laid_out
from keel.ops.logdet import LogDeterminants
from keel.ops.support import cumulative_share, effective_size, running_support, support_weights, top_share
from keel.probes.tokens import ShadedRow, token_page
from keel.streams.margin import PriorTerms

VOCABULARY, LENGTH = 40, 12


def make_model(tied: bool = True) -> keel.KeelForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.3, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip
    return keel.attach(AutoModelForCausalLM.from_config(config), keel.MarginPrior(rank=4)).eval()


def make_windows(count: int = 5) -> list[Segment]:
    generator = torch.Generator().manual_seed(1)
    nothing = torch.zeros(LENGTH - 1, dtype=torch.long)
    return [
        Segment(
            ids=torch.randint(0, VOCABULARY, (LENGTH,), generator=generator), document_T=nothing, bytes=nothing, start=0
        )
        for _ in range(count)
    ]


def by_name(metrics: list[ItemMetric]) -> dict[str, ItemMetric]:
    return {metric.name: metric for metric in metrics}


def test_noise_has_its_size_in_every_direction_and_drift_in_one() -> None:
    clean = torch.zeros(2, 4000, 6)
    noise, drift = perturb(clean, "noise", 0.5, [3, 4]), perturb(clean, "drift", 0.5, [3, 4])
    assert noise.std().item() == pytest.approx(0.5, rel=0.02)
    assert torch.linalg.svdvals(noise[0])[-1] > 0.4 * math.sqrt(4000)
    singular = torch.linalg.svdvals(drift[0])
    assert singular[0].item() == pytest.approx(0.5 * math.sqrt(4000), rel=0.03)
    assert singular[1] < 1e-4 * singular[0], "the drift has more than one direction"
    assert not torch.allclose(noise[0], noise[1])
    assert not torch.allclose(drift[0], drift[1])


def test_numbers_depend_on_the_window_alone() -> None:
    rows = torch.randn(3, 5, 4)
    together = perturb(rows, "noise", 1.0, [7, 8, 9])
    assert torch.equal(perturb(rows[1:2], "noise", 1.0, [8])[0], together[1])
    torch.testing.assert_close(perturb(rows, "noise", 2.0, [7, 8, 9]) - rows, 2 * (together - rows))


@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_metrics_are_those_of_a_plain_loop(batch_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_TOKENS", batch_tokens)
    model, windows = make_model(), make_windows()
    conditions = [Perturbation("noise", 0.5, False), Perturbation("noise", 0.5, True), Perturbation("drift", 2.0, True)]
    found = by_name(robustness(model, windows, conditions))
    table = model.get_input_embeddings().weight.detach()
    embedded = torch.stack([table[window.ids] for window in windows])
    rms = embedded.square().mean().sqrt().item()
    assert found["embedding_rms"].value == pytest.approx(rms, rel=1e-5)

    def nats(kind: str | None, sigma: float) -> float:
        total = 0.0
        for index, window in enumerate(windows):
            row = embedded[index : index + 1, :-1]
            row = row if kind is None else perturb(row, kind, sigma, [index])
            with torch.no_grad():
                logits = model(inputs_embeds=row).logits[0]
            total += float(F.cross_entropy(logits, window.ids[1:], reduction="sum"))
        return total / (len(windows) * (LENGTH - 1))

    clean = nats(None, 0)
    assert found["ppl"].value == pytest.approx(math.exp(clean), rel=1e-4)
    for condition in conditions:
        sigma = condition.sigma * (rms if condition.relative else 1)
        expected = math.exp(nats(condition.kind, sigma) - clean)
        assert found[condition.metric].value == pytest.approx(expected, rel=1e-3)
    assert {"noise.ratio@0.5", "noise.ratio_snr@0.5", "drift.ratio_snr@2"} <= found.keys()
    assert found["noise.ratio@0.5"].value != pytest.approx(found["noise.ratio_snr@0.5"].value, rel=1e-3)


def test_contextual_embedding_error() -> None:
    model, windows = make_model(), make_windows(2)
    table = model.get_input_embeddings().weight.detach()
    top = bottom = 0.0
    for window in windows:
        with torch.no_grad():
            predicted = torch.softmax(model(window.ids[None, :-1]).logits[0], -1) @ table
        true = table[window.ids[1:]]
        top, bottom = top + float((predicted - true).square().sum()), bottom + float(true.square().sum())
    found = by_name(robustness(model, windows, []))["contextual_embedding_error"]
    assert found.value == pytest.approx(top / bottom, rel=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_rescaled_embeddings_compute_the_same_and_bear_as_much_more_noise(tied: bool) -> None:
    plain, scaled, windows = make_model(tied), make_model(tied), make_windows()
    rescale_embeddings(scaled, 3.0)
    ids = torch.stack([window.ids for window in windows])
    with torch.no_grad():
        torch.testing.assert_close(scaled(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)
    conditions = [Perturbation("noise", sigma, relative) for sigma in (0.5, 1.5) for relative in (False, True)]
    before, after = (by_name(robustness(model, windows, conditions)) for model in (plain, scaled))
    assert after["embedding_rms"].value == pytest.approx(3 * before["embedding_rms"].value, rel=1e-5)
    assert after["ppl"].value == pytest.approx(before["ppl"].value, rel=1e-4)
    assert after["noise.ratio_snr@0.5"].value == pytest.approx(before["noise.ratio_snr@0.5"].value, rel=1e-3)
    assert after["noise.ratio@1.5"].value == pytest.approx(before["noise.ratio@0.5"].value, rel=1e-3)
    assert after["noise.ratio@0.5"].value != pytest.approx(before["noise.ratio@0.5"].value, rel=1e-2)


def test_rescaling_refuses_hosts_for_which_it_would_change_the_function() -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model = keel.attach(AutoModelForCausalLM.from_config(config), keel.MarginPrior(rank=4))
    with pytest.raises(KeelError, match="host 'gpt2'"):
        rescale_embeddings(model, 2.0)


def test_subsamples_are_the_papers() -> None:
    values = torch.linspace(0, 3, 64, dtype=torch.float64).tolist()
    metric = ItemMetric(
        name="noise.ratio@1", unit="ratio", higher_is_better=False, exponential=True,
        numerators=tuple(values), denominators=(1.0,) * 64,
    )  # fmt: skip
    found = subsampled(metric)
    assert found.values_K.shape == (100,)
    assert found.low < found.median < found.high
    assert found.median == pytest.approx(math.exp(1.5), rel=0.1)
    assert subsampled(metric).median == found.median
    everything = subsampled(metric, windows=64)
    assert everything.low == pytest.approx(everything.high) == pytest.approx(metric.value)


def test_no_windows() -> None:
    with pytest.raises(KeelError, match="no windows"):
        robustness(make_model(), [], [])


def test_weights_keep_what_presses() -> None:
    barriers = torch.tensor([[3.0, -5.0, 1.0, 0.0], [-1.0, -2.0, -3.0, -4.0]])
    weights = support_weights(barriers)
    assert weights[0].tolist() == pytest.approx([0.75, 0, 0.25, 0])
    assert weights[1].tolist() == pytest.approx([0.25] * 4), "nobody presses: all the same"
    torch.testing.assert_close(support_weights(barriers, "softmax"), torch.softmax(barriers.double(), -1))


def test_shares_and_sizes() -> None:
    one, even = torch.zeros(1, 20, dtype=torch.float64), torch.full((1, 20), 1 / 20, dtype=torch.float64)
    one[0, 7] = 1
    assert top_share(one).item() == 1
    assert top_share(even).item() == pytest.approx(5 / 20)
    assert effective_size(one).item() == pytest.approx(1)
    assert effective_size(even).item() == pytest.approx(20)
    mixed = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    assert effective_size(mixed).item() == pytest.approx(math.exp(1.5 * math.log(2)))
    assert cumulative_share(mixed).tolist() == pytest.approx([0.5, 0.75, 1.0])
    assert top_share(mixed, 2).item() == pytest.approx(0.75)


def test_a_model_is_measured_under_its_own_prior_and_a_fresh_one() -> None:
    model, windows = make_model(), make_windows(3)
    prior = model.streams["margin"]
    with torch.no_grad():
        prior.left.mul_(2)
    ids = torch.stack([window.ids for window in windows])
    found = support_tokens(model, prior, ids, rank=4)
    metrics = {metric.name: metric for metric in found.metrics}
    with torch.no_grad():
        barrier = model(ids, collect_signals=True).signals["margin.barrier"]
    assert metrics["support.barrier"].value == pytest.approx(barrier.mean().item(), abs=1e-5)
    assert metrics["support.top5_share"].value == pytest.approx(
        top_share(support_weights(barrier)).mean().item(), abs=1e-5
    )
    assert metrics["support.barrier@random"].value != pytest.approx(metrics["support.barrier"].value, rel=1e-2)
    assert {"support.effective_size@random", "support.effective_size@softmax", "support.crossings"} <= metrics.keys()
    assert set(found.curves) == {"learned", "random"}
    assert found.curves["learned"][-1] == pytest.approx(1)
    before = torch.random.get_rng_state()
    again = support_tokens(model, None, ids, rank=4)
    assert torch.equal(torch.random.get_rng_state(), before), "looking moves the random state"
    assert set(again.curves) == {"random"}


def test_no_windows_to_look_at() -> None:
    with pytest.raises(keel.KeelError, match="no windows"):
        support_tokens(make_model(), None, torch.zeros(0, 4, dtype=torch.long), rank=4)


# -- sure and wrong ---------------------------------------------------------------------------------------------------------


def test_calibration_is_the_textbooks() -> None:
    confidence = np.array([0.95, 0.9, 0.55, 0.6, 0.1, 0.0, 1.0])
    correct = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15) | ((low == 0) & (confidence == 0))
        if inside.any():
            expected += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    assert calibration_terms(confidence, correct).mean() == pytest.approx(expected)
    assert calibration_terms(correct, correct).mean() == 0


def test_area_under_the_risk_coverage_curve_is_the_textbooks() -> None:
    rng = np.random.default_rng(0)
    score, wrong = rng.permutation(50).astype(float), (rng.random(50) < 0.3).astype(float)
    assert risk_terms(score, wrong).mean() == pytest.approx(risk_coverage(score, wrong).mean())
    best, worst = risk_terms(-wrong, wrong).mean(), risk_terms(wrong, wrong).mean()
    assert best < risk_terms(score, wrong).mean() < worst
    assert risk_terms(np.zeros(50), wrong).mean() == pytest.approx(wrong.mean()), "no score at all is the error rate"
    order = rng.permutation(50)
    tied = np.round(score / 10)
    assert risk_terms(tied[order], wrong[order]).mean() == pytest.approx(risk_terms(tied, wrong).mean())


def test_predictions_of_a_model() -> None:
    model, windows = make_model(), make_windows()
    measured = selective(model, model.streams["margin"], windows)
    found = by_name(measured.metrics)
    assert set(found) == {"ece", "aurc", "aurc@entropy", "aurc@barrier"}
    ids = torch.stack([window.ids for window in windows])
    with torch.no_grad():
        output = model(ids[:, :-1], collect_signals=True)
    probabilities = torch.softmax(output.logits.double(), -1)
    surest = probabilities.max(-1)
    wrong = (surest.indices != ids[:, 1:]).double().flatten().numpy()
    assert 0 < wrong.mean() < 1
    sure = surest.values.flatten().numpy()
    assert found["ece"].value == pytest.approx(calibration_terms(sure, 1 - wrong).mean(), rel=1e-4)
    assert found["aurc"].value == pytest.approx(risk_terms(sure, wrong).mean(), rel=1e-4)
    entropy = torch.special.entr(probabilities).sum(-1).flatten().numpy()
    assert found["aurc@entropy"].value == pytest.approx(risk_terms(-entropy, wrong).mean(), rel=1e-4)
    barrier = output.signals["margin.barrier"].flatten().double().numpy()
    assert found["aurc@barrier"].value == pytest.approx(risk_terms(-barrier, wrong).mean(), rel=1e-3)
    assert "aurc@barrier" not in by_name(selective(model, None, windows).metrics)
    assert measured.curves["entropy"][-1] == pytest.approx(wrong.mean()), (
        "at full coverage every score has the error rate"
    )
    surest_half = np.argsort(-sure, kind="stable")[: round(0.5 * len(sure))]
    assert measured.curves["max_probability"][COVERAGES.index(0.5)] == pytest.approx(wrong[surest_half].mean())


def test_running_support_is_that_of_the_tokens_so_far() -> None:
    torch.manual_seed(0)
    barriers_BS = torch.randn(2, 9)
    barriers_BS[1, :4] = -1.0  # nobody presses at first
    counted = torch.ones(9, 9, dtype=torch.bool).tril()[3:].expand(2, 6, 9)
    found = running_support(barriers_BS, counted)
    for t in range(6):
        weights = support_weights(barriers_BS[:, : t + 4])
        torch.testing.assert_close(found.weight_BT[:, t].double(), weights[:, -1], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.top_share_BT[:, t].double(), top_share(weights), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            found.effective_size_BT[:, t].double(), effective_size(weights), atol=1e-5, rtol=1e-5
        )
    # Padding and other documents do not count: a row whose first five tokens are not its own.
    masked = counted.clone()
    masked[0, :, :5] = False
    alone = running_support(barriers_BS[:1, 5:], torch.ones(4, 4, dtype=torch.bool).tril()[None])
    for name, values in running_support(barriers_BS, masked)._asdict().items():
        torch.testing.assert_close(values[:1, 2:], getattr(alone, name))
        assert (values[0, :2] == 0).all(), "a token at which nothing counts has zeros"


def test_a_prediction_beyond_the_boundary_is_the_least_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = make_model(), make_windows()

    def crossed(prior: Any, embeddings_1TD: torch.Tensor) -> PriorTerms:
        """Far beyond it everywhere but at the first token, whose determinant is small."""
        logabs_1T = torch.full(embeddings_1TD.shape[:2], 9.0)
        logabs_1T[:, 0] = -5.0
        sign_1T = -torch.ones_like(logabs_1T)
        sign_1T[:, 0] = 1
        return PriorTerms(LogDeterminants(logabs_1T, sign_1T), None)

    monkeypatch.setattr("keel.evaluation.selective.prior_terms", crossed)
    found = by_name(selective(model, model.streams["margin"], windows).metrics)["aurc@barrier"].value
    ids = torch.stack([window.ids for window in windows])
    with torch.no_grad():
        wrong_NT = (model(ids[:, :-1]).logits.argmax(-1) != ids[:, 1:]).double().numpy()
    sure_NT = np.zeros_like(wrong_NT)
    sure_NT[:, 0] = 1
    assert found == pytest.approx(risk_terms(sure_NT.flatten(), wrong_NT.flatten()).mean(), rel=1e-4)


def test_last_words_are_right_where_all_their_tokens_are() -> None:
    model = make_model()
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, VOCABULARY, (9,), generator=generator).tolist() for _ in range(3)]
    with torch.no_grad():
        for row in rows[:2]:  # the last two tokens are what the model thinks likeliest: a right word
            for place in (7, 8):
                row[place] = int(model(torch.tensor([row[:place]])).logits[0, -1].argmax())
        rows[1][8] = (rows[1][8] + 1) % VOCABULARY  # and a half of this one is wrong
        output = model(torch.tensor(rows), collect_signals=True)
    passages = [Passage(ids=row, num_targets=2) for row in rows]
    found = by_name(selective_words(model, model.streams["margin"], passages, "lambada").metrics)
    assert set(found) == {f"lambada.{name}" for name in ("ece", "aurc", "aurc@entropy", "aurc@barrier")}
    probabilities = torch.softmax(output.logits.double(), -1)[:, 6:8]
    confidence = probabilities.max(-1).values.prod(-1).numpy()
    wrong = np.array([0.0, 1.0, 1.0])
    assert found["lambada.ece"].value == pytest.approx(calibration_terms(confidence, 1 - wrong).mean(), rel=1e-4)
    assert found["lambada.aurc"].value == pytest.approx(risk_terms(confidence, wrong).mean(), rel=1e-4)
    entropy = torch.special.entr(probabilities).sum((-1, -2)).numpy()
    assert found["lambada.aurc@entropy"].value == pytest.approx(risk_terms(-entropy, wrong).mean(), rel=1e-4)
    barrier = output.signals["margin.barrier"][:, 6].double().numpy()
    assert found["lambada.aurc@barrier"].value == pytest.approx(risk_terms(-barrier, wrong).mean(), rel=1e-3)
    with pytest.raises(KeelError, match="no passages"):
        selective_words(model, None, [], "lambada")


# -- the average over sampled embeddings ------------------------------------------------------------------------------------


def test_without_noise_the_average_is_the_model() -> None:
    model, windows = make_model(), make_windows()
    plain = by_name(selective(model, None, windows).metrics)
    for prior, samples in ((None, 1), (model.streams["margin"], 3)):
        found = by_name(posterior_scores(model, prior, windows, samples=samples, noise=0.0))
        assert found["posterior.ece"].value == pytest.approx(plain["ece"].value, rel=1e-4)
        assert found["posterior.aurc@entropy"].value == pytest.approx(plain["aurc@entropy"].value, rel=1e-4)
        assert found["posterior.sample_share"].value == pytest.approx(1 / samples, rel=1e-3)
        ids = torch.stack([window.ids for window in windows])
        with torch.no_grad():
            nll = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1).double(), ids[:, 1:].flatten())
        assert found["posterior.ppl"].value == pytest.approx(math.exp(nll), rel=1e-5)


def test_samples_are_averaged_with_the_priors_weights() -> None:
    model, (window, *_) = make_model(), make_windows()
    prior = model.streams["margin"]
    found = by_name(posterior_scores(model, prior, [window], samples=3, noise=0.5))
    with torch.no_grad():
        clean = model.get_input_embeddings()(window.ids[None, :-1])
        sigma = 0.5 * float(clean.square().mean().sqrt())
        drawn = perturb(clean.expand(3, -1, -1), "noise", sigma, [0, 1, 2])
        probabilities = torch.softmax(model(inputs_embeds=drawn).logits.double(), -1)
        logdet = torch.cat([-prior_terms(prior, row[None]).penalty() for row in drawn]).double()
    nats = 0.0
    for t in range(LENGTH - 1):
        weights = torch.exp(logdet[:, : t + 1].sum(1))
        mixed = (weights[:, None] * probabilities[:, t]).sum(0) / weights.sum()
        nats -= float(mixed[window.ids[t + 1]].log())
    assert found["posterior.ppl"].value == pytest.approx(math.exp(nats / (LENGTH - 1)), rel=1e-4)
    share = float(weights.max() / weights.sum())
    assert found["posterior.sample_share"].value == pytest.approx(share, rel=1e-4) and share > 0.34
    alike = by_name(posterior_scores(model, None, [window], samples=3, noise=0.5))
    assert alike["posterior.ppl"].value != pytest.approx(found["posterior.ppl"].value, rel=1e-6)
    with pytest.raises(KeelError, match="samples >= 1"):
        posterior_scores(model, None, [window], samples=0, noise=0.5)


def test_last_words_under_the_average_without_noise_are_the_models() -> None:
    model = make_model()
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, VOCABULARY, (9,), generator=generator).tolist() for _ in range(3)]
    with torch.no_grad():
        for place in (7, 8):
            rows[0][place] = int(model(torch.tensor([rows[0][:place]])).logits[0, -1].argmax())
    passages = [Passage(ids=row, num_targets=2) for row in rows]
    plain = by_name(selective_words(model, None, passages, "lambada").metrics)
    found = by_name(posterior_words(model, model.streams["margin"], passages, "lambada", samples=2, noise=0.0))
    assert found["lambada.posterior.accuracy"].value == pytest.approx(1 / 3)
    for name in ("ece", "aurc", "aurc@entropy"):
        assert found[f"lambada.posterior.{name}"].value == pytest.approx(plain[f"lambada.{name}"].value, rel=1e-4)
    noisy = by_name(posterior_words(model, None, passages, "lambada", samples=2, noise=1.0))
    assert noisy["lambada.posterior.ece"].value != pytest.approx(found["lambada.posterior.ece"].value, rel=1e-4)
    with pytest.raises(KeelError, match="0 passages"):
        posterior_words(model, None, [], "lambada", samples=2, noise=1.0)


def test_medians_of_subsamples_are_those_of_the_paper() -> None:
    values = np.random.default_rng(0).normal(2.0, 1.0, 40)
    ratio = ItemMetric(
        name="noise.ratio@0.4", unit="ratio", higher_is_better=False, exponential=True,
        numerators=tuple(values), denominators=(1.0,) * 40,
    )  # fmt: skip
    found = subsample_medians({3: {"noise.ratio@0.4": ratio, "ece": ratio}}, [1, 3])
    assert set(found) == {"noise.ratio.median@0.4"}
    metric = found["noise.ratio.median@0.4"]
    expected = subsampled(ratio)
    assert metric.values == [None, expected.median] and metric.mean == expected.median
    assert metric.ci95 == (expected.low, expected.high) and metric.higher_is_better is None


def test_a_picture_of_tokens_keeps_every_character_in_its_line() -> None:
    pieces = ["The", " barrier", "\nof", " a", " verylongword" * 3]
    layout = laid_out(pieces, 20)
    assert "".join(piece.text for piece in layout) == "".join(pieces).replace("\n", "⏎")
    assert all(piece.column + len(piece.text) <= 20 + (piece.text == "⏎") for piece in layout)
    assert [piece.line for piece in layout if piece.token == 2] == [0, 1]
    pressing = draw_tokens(pieces, [0.0, 2.0, -1.0, 0.5, 1e-6], "arm", "An arm", 0)
    assert "Framed: the 2 tokens" in pressing.caption and "-1.00 to 2.00" in pressing.caption
    assert "No token presses" in draw_tokens(pieces, [0.0, -2.0, -1.0, -0.5, 1e-6], "arm", "An arm", 0).caption


def test_the_page_of_tokens_shows_shades_marks_and_no_markup_of_the_text() -> None:
    row = ShadedRow(
        heading="Row <1>", pieces=["a<b", " c\n"], shades=[1.0, 0.5], notes=["2.0", "-1"], marked=frozenset({0})
    )
    page = token_page("Title & more", "A note", [row])
    assert '<i class="marked" style="--s:85" title="2.0">a&lt;b</i>' in page
    assert '<i style="--s:42" title="-1"> c⏎\n</i>' in page
    assert "Row &lt;1&gt;" in page and "Title &amp; more" in page and "http" not in page
