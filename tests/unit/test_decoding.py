"""Decoding with uncertainty: the average over sampled embeddings against the sum written out, and abstaining.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessorList

import keel
from keel.cache import new_cache
from keel.decoding import Abstain, posterior_predictive
from keel.errors import KeelError

VOCABULARY = 40


def make_model(prior: bool = True) -> keel.KeelForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.5, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    stream = keel.MarginPrior(rank=4) if prior else keel.StructuralStream()
    return keel.attach(AutoModelForCausalLM.from_config(config), stream).eval()


PROMPT = torch.tensor([[5, 9, 3, 7], [8, 2, 2, 6]])


@pytest.mark.parametrize("prior", [True, False])
def test_one_sample_without_noise_is_generate(prior: bool) -> None:
    model = make_model(prior)
    expected = model.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert torch.equal(posterior_predictive(model, PROMPT, samples=1, noise=0.0, max_new_tokens=6), expected)
    assert torch.equal(posterior_predictive(model, PROMPT, samples=3, noise=0.0, max_new_tokens=6), expected)


@pytest.mark.parametrize("prior", [True, False])
def test_the_next_token_is_the_likeliest_of_the_weighted_mean(prior: bool) -> None:
    model, samples, noise, differs = make_model(prior), 6, 1.5, 0
    for seed in range(8):
        found = posterior_predictive(model, PROMPT, samples=samples, noise=noise, seed=seed, max_new_tokens=1)
        rows = PROMPT.repeat_interleave(samples, 0)
        embeddings = model.get_input_embeddings()(rows)
        drawn = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            output = model(inputs_embeds=embeddings + noise * drawn, collect_signals=True)
        probabilities = torch.softmax(output.logits[:, -1].double(), -1).view(2, samples, -1)
        weights = torch.full((2, samples), 1 / samples, dtype=torch.float64)
        if prior:
            weights = torch.softmax(-output.signals["margin.barrier"].double().sum(1).view(2, samples), 1)
            assert weights.max() > 1.2 / samples, "the weights are flat: they are not tested"
        expected = (weights.unsqueeze(-1) * probabilities).sum(1).argmax(-1)
        assert torch.equal(found[:, -1], expected)
        differs += int((expected != model(PROMPT).logits[:, -1].argmax(-1)).sum())
    assert differs, "the mean is always what the model says anyway: this test could not fail"


def test_a_seed_fixes_what_is_drawn_and_rows_of_a_group_agree() -> None:
    model = make_model()
    options = {"samples": 4, "noise": 0.5, "do_sample": True, "max_new_tokens": 8}
    first = posterior_predictive(model, PROMPT, seed=1, **options)
    assert first.shape == (2, 12)
    assert torch.equal(posterior_predictive(model, PROMPT, seed=1, **options), first)
    assert not torch.equal(posterior_predictive(model, PROMPT, seed=2, **options), first)
    assert not model.get_input_embeddings()._forward_hooks, "the noise outlives the call"


def test_left_padding_changes_nothing_without_noise() -> None:
    model = make_model()
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), PROMPT], 1)
    mask = (padded != 0).long()
    found = posterior_predictive(model, padded, attention_mask=mask, samples=2, noise=0.0, max_new_tokens=4)
    plain = posterior_predictive(model, PROMPT, samples=2, noise=0.0, max_new_tokens=4)
    assert torch.equal(found[:, 2:], plain)


def test_abstaining_above_an_entropy_and_below_a_margin() -> None:
    model = make_model()
    with torch.no_grad():
        output = model(PROMPT, collect_signals=True)
    entropies = torch.special.entr(torch.softmax(output.logits[:, -1], -1)).sum(-1)
    margins = output.signals["margin.margin"][:, -1]
    plain = model.generate(PROMPT, max_new_tokens=1, do_sample=False)[:, -1]
    assert (plain != 11).all()

    def first_token(**thresholds: float) -> torch.Tensor:
        cache = new_cache(model.host.config)
        processors = LogitsProcessorList([Abstain(11, cache=cache, **thresholds)])
        return model.generate(
            PROMPT, max_new_tokens=1, do_sample=False, past_key_values=cache, collect_signals=True,
            logits_processor=processors,
        )[:, -1]  # fmt: skip

    between = float(entropies.mean())
    assert torch.equal(first_token(max_entropy=between), torch.where(entropies > between, 11, plain))
    between = float(margins.mean())
    assert torch.equal(first_token(min_margin=between), torch.where(margins < between, 11, plain))
    assert torch.equal(first_token(min_margin=-1e9, max_entropy=1e9), plain)


def test_what_cannot_be_is_refused() -> None:
    model = make_model()
    with pytest.raises(KeelError, match="samples=0"):
        posterior_predictive(model, PROMPT, samples=0, noise=0.1)
    with pytest.raises(KeelError, match="num_beams=2"):
        posterior_predictive(model, PROMPT, samples=2, noise=0.1, num_beams=2)
    with pytest.raises(KeelError, match="no threshold"):
        Abstain(1)
    with pytest.raises(KeelError, match="needs the cache"):
        Abstain(1, min_margin=0.5)
