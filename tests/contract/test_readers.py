"""Streams that read and write nothing: the host stays bitwise what it is, losses and signals are those of the tokens alone.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from cases import HOST_CASES, READER_CASES, VOCABULARY, Case, close, pad, tokens
from torch import Tensor
from transformers.cache_utils import DynamicCache

import keel
from keel.ops.logdet import reference_logdet

LENGTH = 13
every_reader = pytest.mark.parametrize("name", READER_CASES)
every_reader_and_host = pytest.mark.parametrize(
    ("host", "name"), [(host, name) for host in HOST_CASES for name in READER_CASES]
)


def reader(name: str, host: str = "llama", trained: bool = True) -> keel.KeelForCausalLM:
    """A host with embeddings of size 0.7 and a perturbed reader."""
    bare = Case(host, "gru_model").host()
    torch.manual_seed(1)
    table = bare.get_input_embeddings()
    with torch.no_grad():
        table.weight.copy_(torch.randn(VOCABULARY, 32))
        table.weight.mul_(0.7 / table(tokens(4, LENGTH)).square().mean().sqrt())  # Gemma scales what it looks up
    model = keel.attach(bare, READER_CASES[name]())
    if trained:
        model.set_step(3)
        with torch.no_grad():
            for parameter in model.streams.parameters():
                parameter.mul_(1.5)
    return model.eval()


def signals(model: keel.KeelForCausalLM, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return model(*args, **kwargs, collect_signals=True).signals


@every_reader_and_host
def test_the_host_stays_bitwise_what_it_is(host: str, name: str) -> None:
    model, ids = reader(name, host), tokens(2, LENGTH)
    with torch.no_grad():
        with model.disable_streams():
            expected = model(ids).logits
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model(ids, collect_signals=True).logits, expected)


@every_reader_and_host
def test_the_barrier_is_the_determinant_of_the_embeddings_own_attention(host: str, name: str) -> None:
    model, ids = reader(name, host), tokens(2, 7)
    stream = model.streams["margin"]
    found = signals(model, ids)
    left = stream.left.double()
    coupling = {"margin_self": left.T, "margin_positive": left.T @ left}.get(name)
    coupling = left.T @ stream.right.double() if coupling is None else coupling
    embeddings = model.get_input_embeddings()(ids).detach()
    expected = reference_logdet(embeddings, coupling.detach(), name == "margin_self")
    reflected = expected.logabs_BT + 2 * math.log(1e6)  # beyond the boundary, with the smallest pivot of float32
    barrier = torch.where(expected.sign_BT < 0, reflected, -expected.logabs_BT)
    assert (found["margin.barrier"] - barrier).abs().max() < 1e-3
    assert found["margin.barrier"].abs().max() > 0.1, "the barrier is flat: this test could not fail"
    torch.testing.assert_close(
        found["margin.margin"].double(), expected.sign_BT * expected.logabs_BT.exp(), atol=1e-3, rtol=1e-3
    )


@every_reader
def test_the_loss_is_the_mean_over_tokens_and_is_added_with_its_weight(name: str) -> None:
    model, ids = reader(name), tokens(2, LENGTH)
    output = model(ids, labels=ids, collect_signals=True)
    expected = output.signals["margin.barrier"].mean()
    if name == "margin_self":  # with the squared error
        assert output.losses["margin.barrier"] > 0.5 * expected
    else:
        close(output.losses["margin.barrier"], 0.5 * expected)
    with model.disable_streams():
        close(output.loss, model(ids, labels=ids).loss + output.losses["margin.barrier"])


@every_reader
def test_gradients_reach_the_prior_and_the_embeddings(name: str) -> None:
    model, ids = reader(name), tokens(2, LENGTH)
    model(ids, labels=ids).losses["margin.barrier"].backward()
    for parameter in (*model.streams.parameters(), model.get_input_embeddings().weight):
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


@every_reader
def test_nothing_is_computed_where_nobody_asks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = reader(name), tokens(2, LENGTH)

    def fail(*_: object) -> None:
        raise AssertionError("the prior was computed")

    monkeypatch.setattr(type(model.streams["margin"]), "_compute", fail)
    with torch.no_grad():
        output = model(ids, use_cache=True)
    assert output.losses is None
    assert not output.past_key_values.layers[-1].rows
    model.generate(ids, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("side", ["left", "right", "interior"])
@every_reader
def test_padding_changes_nothing(name: str, side: str) -> None:
    rows, model = [tokens(1, length, seed=length)[0] for length in (8, 5, 3)], reader(name)
    batch = pad(rows, side, 9)
    padded = signals(model, **batch._asdict())
    for index, row in enumerate(rows):
        attended = batch.attention_mask[index].bool()
        for key, signal in signals(model, row[None]).items():
            close(padded[key][index, attended], signal[0], atol=1e-3)


@every_reader
def test_later_tokens_never_change_earlier_signals(name: str) -> None:
    model, ids = reader(name), tokens(2, LENGTH)
    changed = ids.clone()
    changed[:, 6:] = tokens(2, LENGTH - 6, seed=9)
    before, after = signals(model, ids), signals(model, changed)
    for key, signal in before.items():
        close(after[key][:, :6], signal[:, :6])
        assert not torch.allclose(after[key][:, 6:], signal[:, 6:], atol=1e-2)


@every_reader
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    model, first, second = reader(name), tokens(2, 5), tokens(2, 6, seed=4)
    starts = torch.zeros(2, 11, dtype=torch.bool)
    starts[:, [0, 5]] = True
    packed = signals(model, torch.cat([first, second], 1), document_starts=starts)
    for key, signal in signals(model, second).items():
        close(packed[key][:, 5:], signal)


@every_reader
def test_in_pieces_through_the_cache_as_whole(name: str) -> None:
    rows, model = [tokens(1, length, seed=length)[0] for length in (LENGTH, 5)], reader(name)
    ids, mask, positions = pad(rows, "left")
    whole = signals(model, ids, attention_mask=mask, position_ids=positions, use_cache=False)
    for sizes in ([5, 1, 7], [1] * LENGTH):
        cache, start = DynamicCache(config=model.host.config), 0
        for size in sizes:
            here = slice(start, start + size)
            start += size
            signals(
                model, ids[:, here], attention_mask=mask[:, :start], position_ids=positions[:, here],
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
        for key, signal in keel.signals_of(cache).items():
            close(signal[mask.bool()], whole[key][mask.bool()], atol=1e-3)


def test_signals_of_generation_greedy_and_beam() -> None:
    model, ids = reader("margin"), tokens(2, 5)
    for beams in (1, 3):
        options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "return_dict_in_generate": True}
        output = model.generate(ids, collect_signals=True, **options)
        assert torch.equal(output.sequences, model.generate(ids, **options).sequences)
        found = keel.signals_of(output.past_key_values)["margin.barrier"]
        if beams == 1:
            close(found, signals(model, output.sequences[:, :-1])["margin.barrier"])
        else:
            assert found.shape == (2 * beams, 10)


def test_rolling_back_cuts_signals_and_past() -> None:
    model, ids = reader("margin"), tokens(2, LENGTH)
    cache = DynamicCache(config=model.host.config)
    cache = model(ids[:, :4], past_key_values=cache, use_cache=True, collect_signals=True).past_key_values
    cache.activate_past_recording()
    with torch.no_grad():
        model(tokens(2, 5, seed=8), past_key_values=cache, use_cache=True, collect_signals=True)
        cache.crop(-5)
        model(ids[:, 4:], past_key_values=cache, use_cache=True, collect_signals=True)
    close(keel.signals_of(cache)["margin.barrier"], signals(model, ids)["margin.barrier"])


def test_signals_cannot_be_asked_for_late() -> None:
    model, ids = reader("margin"), tokens(2, LENGTH)
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
        with pytest.raises(keel.KeelError, match="no signals"):
            keel.signals_of(cache)
        with pytest.raises(keel.KeelError, match="after 4 tokens whose embeddings were not kept"):
            model(ids[:, 4:], past_key_values=cache, use_cache=True, collect_signals=True)


@every_reader
def test_saving_and_loading(name: str, tmp_path: Path) -> None:
    model, ids = reader(name), tokens(2, LENGTH)
    model.save_pretrained(tmp_path)
    again = keel.load(tmp_path).eval()
    for key, signal in signals(model, ids).items():
        assert torch.equal(signals(again, ids)[key], signal)


@every_reader
def test_gradient_checkpointing_compile_and_bf16(name: str) -> None:
    ids = tokens(2, LENGTH)
    grads = []
    for checkpointing in (False, True):
        model = reader(name)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        model(ids, labels=ids).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*grads, strict=True):
        close(checkpointed, plain)
    model = reader(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(ids, labels=ids)
        assert output.losses["margin.barrier"].isfinite()
        assert output.losses["margin.barrier"].dtype == torch.float32
    half = reader(name).to(torch.bfloat16)
    assert half(ids, labels=ids).loss.isfinite()
    compiled = torch.compile(reader(name), backend="aot_eager")
    close(compiled(ids, labels=ids).loss, reader(name)(ids, labels=ids).loss)
