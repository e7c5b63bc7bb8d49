"""Training: gradients reach the streams and nothing frozen, whatever batch, checkpointing or compilation does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import (
    FIRST_STREAM,
    STREAM_CASES,
    Case,
    close,
    every_case,
    host_cases,
    pad,
    perturb,
    spread_cases,
    thin_cases,
    tokens,
)
from torch import Tensor

import keel

LENGTH = 11


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_case
def test_every_stream_parameter_gets_a_gradient_and_the_frozen_host_none(case: Case) -> None:
    model, ids = case.model().trainable("streams").train(), tokens(2, LENGTH)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.streams.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert all(p.grad is None for p in model.host.parameters())


@spread_cases
def test_trainable_host_leaves_the_streams_frozen(case: Case) -> None:
    model, ids = case.model().trainable("host").train(), tokens(2, LENGTH)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is None for p in model.streams.parameters())
    assert all(p.grad is not None for p in model.host.parameters())


@pytest.mark.parametrize("what", ["all", "streams"])
@every_case
def test_checkpointing_gives_the_same_gradients(case: Case, what: str) -> None:
    # Two forwards before one backward: the recomputation of the first must not see the flow of the second.
    plain, checkpointed = case.model().trainable(what).train(), case.model().trainable(what).train()
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        first, second = (model(ids, labels=ids).loss for ids in (tokens(2, LENGTH), tokens(2, LENGTH - 3, seed=6)))
        (first + 2 * second).backward()
    expected, found = _gradients(plain), _gradients(checkpointed)
    assert expected.keys() == found.keys()
    assert any("streams." in name for name in expected)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_reentrant_checkpointing_is_refused() -> None:
    model = Case("llama", "gru_model").model()
    with pytest.raises(keel.KeelError, match="use_reentrant=False"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert not model.is_gradient_checkpointing


@spread_cases
def test_accumulated_batches_give_the_gradients_of_the_large_one(case: Case) -> None:
    rows = [tokens(1, length, seed=length)[0] for length in (LENGTH, 4, 9, 2)]
    batch = pad(rows, "left")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    items, attended = (labels[:, 1:] != -100).sum(), batch.attention_mask.sum()
    large, small = case.model().train(), case.model().train()
    output = large(**batch._asdict(), labels=labels)
    assert tuple(output.losses or ()) == case.stream.losses
    language = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    close(output.loss, language + sum((output.losses or {}).values()))
    output.loss.backward()
    total = 0.0
    for part in (slice(0, 1), slice(1, 4)):
        micro = {name: value[part] for name, value in batch._asdict().items()}
        piece = small(**micro, labels=labels[part], num_items_in_batch=items, num_tokens_in_batch=attended)
        piece.loss.backward()
        total += piece.loss.detach()
    close(total, output.loss.detach())
    expected, found = _gradients(large), _gradients(small)
    for name, gradient in expected.items():
        close(found[name], gradient)
    assert any("streams." in name and gradient.abs().max() > 1e-3 for name, gradient in expected.items())


@thin_cases
def test_compiled_forward_equals_eager(case: Case) -> None:
    model, ids = case.model(), tokens(2, LENGTH)
    torch.compiler.reset()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled, given = torch.compile(model, backend="eager", fullgraph=True), case.stream.inputs(ids)
        close(compiled(ids, use_cache=False, **given).logits, expected)
        perturb(model, seed=8)
        changed = compiled(ids, use_cache=False, **given).logits
        assert not torch.allclose(changed, expected, atol=1e-2)
        close(changed, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("stream_name", [name for name, stream in STREAM_CASES.items() if stream.everywhere])
def test_gradients_through_a_compiled_model_equal_eager(stream_name: str) -> None:
    model, ids = Case("llama", stream_name).model().train(), tokens(2, LENGTH)
    torch.compiler.reset()
    model(ids, labels=ids).loss.backward()
    expected = _gradients(model)
    model.zero_grad()
    given = STREAM_CASES[stream_name].inputs(ids)
    torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels=ids, **given).loss.backward()
    for name, gradient in _gradients(model).items():
        close(gradient, expected.pop(name))
    assert not expected


@host_cases
def test_lora_on_top_trains_and_generates(case: Case) -> None:
    from peft import LoraConfig, get_peft_model

    model, ids = case.model(), tokens(2, LENGTH)
    targets = [f"{model.family.attention}.{name}" for name in model.family.query_key]
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    model.streams.requires_grad_(True)
    wrapped.train()
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.5)
    before = wrapped(input_ids=ids, labels=ids).loss
    before.backward()
    lora = {name: p for name, p in wrapped.named_parameters() if "lora_B" in name}
    assert lora and all(p.grad is not None and p.grad.abs().sum() > 0 for p in lora.values())
    assert all(p.grad is not None for p in model.streams.parameters())
    optimizer.step()
    wrapped.eval()
    with torch.no_grad():
        assert wrapped(input_ids=ids, labels=ids).loss < before
    mask = torch.ones_like(ids)
    found, uncached = (
        wrapped.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False, use_cache=cached)
        for cached in (True, False)
    )
    assert torch.equal(found, uncached)


@pytest.mark.parametrize("stream_name", [name for name, stream in STREAM_CASES.items() if stream.everywhere])
@pytest.mark.parametrize("host_name", ["llama", "phi3", "gpt_neox_serial", "gpt2"])
def test_what_an_adapter_adds_reads_what_the_stream_wrote(host_name: str, stream_name: str) -> None:
    """An adapter wraps a projection; merged into its weight it gives the same, and then there is nothing to be missed."""
    from peft import LoraConfig, get_peft_model

    model, ids = Case(host_name, stream_name).model(), tokens(2, LENGTH)
    targets = [f"{model.family.attention}.{name}" for name in model.family.query_key]
    with torch.no_grad():
        before = model(ids).logits
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
        apart = wrapped(input_ids=ids).logits
        assert (apart - before).abs().max() > 1e-2
        merged = wrapped.merge_and_unload()
        close(merged(input_ids=ids).logits, apart, atol=1e-4)


def test_a_wrapped_norm_does_not_lose_the_stream() -> None:
    from peft import LoraConfig, get_peft_model

    model, ids = Case("llama", FIRST_STREAM).model(), tokens(2, LENGTH)
    with torch.no_grad():
        expected = model(ids).logits
        wrapped = get_peft_model(
            model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["input_layernorm"])
        ).eval()
        close(wrapped(input_ids=ids).logits, expected)
