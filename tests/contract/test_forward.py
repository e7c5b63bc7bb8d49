"""One forward pass: what a stream may and may not change."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import WINDOW, Case, close, every_case, host_cases, pad, perturb, recurrent_cases, stream_cases, tokens
from transformers.cache_utils import DynamicCache, StaticCache

import keel
from keel.cache import StreamCacheLayer

LENGTH = 13  # longer than the sliding window


@every_case
def test_attaching_changes_nothing_until_the_stream_is_perturbed(case: Case) -> None:
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        expected = case.host()(ids).logits
        model = case.attached()
        assert torch.equal(model(ids).logits, expected) is case.stream.identity
        assert not torch.allclose(perturb(model)(ids).logits, expected, atol=1e-2)


@every_case
def test_disabled_or_detached_gives_the_host_bitwise(case: Case) -> None:
    ids, model = tokens(2, LENGTH), case.model()
    weights = {name: weight.clone() for name, weight in model.host.named_parameters()}
    with torch.no_grad():
        expected = case.host()(ids).logits
        with model.disable_streams():
            assert torch.equal(model(ids).logits, expected)
        assert not torch.equal(model(ids).logits, expected)
    _train_streams_once(model, ids)
    host = model.detach()
    with torch.no_grad():
        assert torch.equal(host(ids).logits, expected)
    assert all(torch.equal(weights[name], weight) for name, weight in host.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in host.modules())


def _train_streams_once(model: keel.KeelForCausalLM, ids: torch.Tensor) -> None:
    model.trainable("streams").train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = {name: p.detach().clone() for name, p in model.streams.named_parameters()}
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in model.streams.named_parameters())
    model.eval()


@pytest.mark.parametrize("side", ["left", "right", "interior"])
@every_case
def test_padding_changes_nothing(case: Case, side: str) -> None:
    # A sliding window counts columns, padded ones too: behind interior padding a host itself sees less, unless all fits.
    lengths, width = ((6, 4, 2), WINDOW) if side == "interior" else ((LENGTH, 7, 3), LENGTH)
    rows, model = [tokens(1, length, seed=length)[0] for length in lengths], case.model()
    batch = pad(rows, side, width)
    with torch.no_grad():
        padded = model(**batch._asdict(), collect_signals=True)
        unpadded = [model(row[None], collect_signals=True) for row in rows]
    for index, alone in enumerate(unpadded):
        attended = batch.attention_mask[index].bool()
        close(padded.logits[index, attended], alone.logits[0])
        for name, signal in alone.signals.items():
            close(padded.signals[name][index, attended], signal[0])


@every_case
def test_whole_chunked_and_token_by_token_agree_through_the_cache(case: Case) -> None:
    rows, model = [tokens(1, length, seed=length)[0] for length in (LENGTH, 5)], case.model()
    ids, mask, positions = pad(rows, "left")
    attended = mask.bool()
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for sizes in ([5, 1, 7], [1] * LENGTH):
            cache, pieces, start = None, [], 0
            for size in sizes:
                here = slice(start, start + size)
                output = model(
                    ids[:, here], attention_mask=mask[:, : start + size], position_ids=positions[:, here],
                    past_key_values=cache, use_cache=True,
                )  # fmt: skip
                cache, start = output.past_key_values, start + size
                pieces.append(output.logits)
            close(torch.cat(pieces, 1)[attended], whole[attended])


@every_case
def test_later_tokens_never_change_earlier_outputs(case: Case) -> None:
    ids, model = tokens(2, LENGTH), case.model()
    changed = ids.clone()
    changed[:, 6:] = tokens(2, LENGTH - 6, seed=9)
    with torch.no_grad():
        before, after = model(ids, collect_signals=True), model(changed, collect_signals=True)
    close(after.logits[:, :6], before.logits[:, :6])
    assert not torch.allclose(after.logits[:, 6:], before.logits[:, 6:], atol=1e-2)
    for name, signal in before.signals.items():
        close(after.signals[name][:, :6], signal[:, :6])


@every_case
def test_permuting_the_batch_permutes_the_output(case: Case) -> None:
    rows, model = [tokens(1, length, seed=length)[0] for length in (LENGTH, 9, 5)], case.model()
    batch, order = pad(rows, "left"), torch.tensor([2, 0, 1])
    with torch.no_grad():
        straight = model(**batch._asdict()).logits
        permuted = model(**{name: value[order] for name, value in batch._asdict().items()}).logits
    attended = batch.attention_mask.bool()[order]
    close(permuted[attended], straight[order][attended])
    assert not torch.allclose(permuted[attended], straight[attended], atol=1e-2)


@recurrent_cases
def test_document_starts_give_separate_documents_stream_states(case: Case) -> None:
    first, second, model = tokens(2, 5), tokens(2, 6, seed=4), case.model()
    packed = torch.cat([first, second], 1)
    starts = torch.zeros_like(packed, dtype=torch.bool)
    starts[:, [0, 5]] = True
    after = _signals_at_the_end if case.stream.reads_host else _stream_states
    with torch.no_grad():
        alone, reset, continued = (
            after(model, ids, where) for ids, where in ((second, None), (packed, starts), (packed, None))
        )
    for name, value in alone.items():
        close(reset[name], value)
    for name in ("tpc", "state") if case.stream.reads_host else alone:
        name = f"dynamic_state.{name}" if case.stream.reads_host else name
        assert not torch.allclose(continued[name], alone[name], atol=1e-2)


def _stream_states(
    model: keel.KeelForCausalLM, ids: torch.Tensor, starts: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    layer = model(ids, document_starts=starts, use_cache=True).past_key_values.layers[-1]
    assert isinstance(layer, StreamCacheLayer)
    return {f"{name}.{key}": value for name, state in layer.states.items() for key, value in state.items()}


def _signals_at_the_end(
    model: keel.KeelForCausalLM, ids: torch.Tensor, starts: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """A stream that reads the host's hidden states sees what the host attends to: here positions that restart keep it to a document."""
    positions = torch.arange(ids.shape[1]) if ids.shape[1] == 6 else torch.tensor([*range(5), *range(6)])
    output = model(
        ids, position_ids=positions.expand_as(ids), document_starts=starts, use_cache=False, collect_signals=True
    )
    return {name: signal[:, -1] for name, signal in output.signals.items()}


@every_case
def test_final_hidden_and_head_give_the_logits(case: Case) -> None:
    ids, model = tokens(2, LENGTH), case.model()
    with torch.no_grad():
        assert torch.equal(model.logits_from_hidden(model.final_hidden(ids).last_hidden_state), model(ids).logits)


@stream_cases
def test_the_output_is_as_every_model_output(case: Case) -> None:
    ids, model = tokens(1, 5), case.model()
    output = model(ids, labels=ids, collect_signals=True, output_hidden_states=True)
    keys = ["loss", "logits", "past_key_values", "hidden_states", "losses", "signals"]
    assert list(output) == [key for key in keys if key != "losses" or case.stream.losses]
    assert all(output[key] is getattr(output, key) for key in output) and output.attentions is None
    assert output.to_tuple() == tuple(output.values())
    output.attentions = ids
    assert output["attentions"] is ids
    again = type(output)(dict(output))  # as accelerate makes it anew
    assert list(again) == list(output) and again.loss is output.loss and again.losses is output.losses


@stream_cases
def test_a_deep_copy_is_independent(case: Case) -> None:
    ids, model = tokens(2, LENGTH), case.model()
    model.gradient_checkpointing_enable()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(twin(ids).logits, expected)
        perturb(twin, seed=7)
        assert not torch.allclose(twin(ids).logits, expected, atol=1e-2)
        assert torch.equal(model(ids).logits, expected)
    # Checkpointed layers of the copy are recomputed with the copy's own flows.
    twin.train()(ids, labels=ids).loss.backward()
    checkpointed = [parameter.grad for parameter in twin.parameters()]
    twin.zero_grad()
    twin.gradient_checkpointing_disable()
    twin(ids, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, found) for p, found in zip(twin.parameters(), checkpointed, strict=True))
    twin.detach()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("padded", [False, True])
@every_case
def test_bf16_stays_finite(case: Case, padded: bool) -> None:
    model = case.model().to(torch.bfloat16).trainable("all").train()
    ids = tokens(2, LENGTH)
    batch = pad([ids[0], ids[1, :4]], "left")._asdict() if padded else {"input_ids": ids}
    output = model(**batch, labels=ids)
    output.loss.backward()
    assert output.logits.dtype is torch.bfloat16
    assert output.logits.isfinite().all() and output.loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@host_cases
def test_a_cache_of_the_users_own_works(case: Case) -> None:
    ids, model = tokens(2, LENGTH), case.model()
    with torch.no_grad():
        expected = model(ids).logits
        for cache in (DynamicCache(), DynamicCache(config=model.host.config)):
            pieces = [model(piece, past_key_values=cache, use_cache=True).logits for piece in ids.split(5, 1)]
            close(torch.cat(pieces, 1), expected)
        cache = DynamicCache(config=model.host.config)
        for piece in ids.split(5, 1):  # hosts read and fill a cache that they are given, whatever use_cache says
            last = model(piece, past_key_values=cache, use_cache=False).logits
        close(last, expected[:, -last.shape[1] :])


@host_cases
def test_caches_that_would_lose_the_state_are_refused(case: Case) -> None:
    ids, model = tokens(2, 5), case.model()
    with pytest.raises(keel.KeelError, match="static cache"):
        model(ids, past_key_values=StaticCache(config=model.host.config, max_cache_len=32), use_cache=True)
    with pytest.raises(keel.KeelError, match="static"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")
    filled = DynamicCache(config=model.host.config)
    with model.disable_streams():
        model(ids, past_key_values=filled, use_cache=True)
    with pytest.raises(keel.KeelError, match="filled without the streams"):
        model(ids, past_key_values=filled, use_cache=True)
    own = model(ids, use_cache=True).past_key_values
    with model.disable_streams():
        model(ids, past_key_values=own, use_cache=True)
    with pytest.raises(keel.KeelError, match="holds 10 tokens, of which they saw 5"):
        model(ids, past_key_values=own, use_cache=True)


@host_cases
def test_a_mask_without_padding_is_heeded_beside_positions_that_restart(case: Case) -> None:
    """Without any mask a host takes such positions for packed documents; with one it does not, and neither may we."""
    model, ids = case.attached(), tokens(2, 8)
    positions = torch.arange(4).repeat(2).expand(2, -1)
    with torch.no_grad():
        expected = case.host()(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False).logits
        found = model(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False).logits
    assert torch.equal(found, expected)
