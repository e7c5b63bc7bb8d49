"""Decoding through the cache equals its uncached or unbatched reference, whichever way tokens are chosen.

Tokens and the logits that they were chosen from are compared: a lost state shows even where the token is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from cases import Case, Padded, close, host_cases, pad, spread_cases, stream_cases, tokens
from torch import Tensor
from transformers.cache_utils import DynamicCache

import keel
from keel.cache import StreamCacheLayer

NEW = 7
PROMPT = 9


class Decoded(NamedTuple):
    """What was decoded [B, new] and, for each row, the logits [B, new, V] or, of beams, the score [B]."""

    new: Tensor
    evidence: Tensor
    cache: Any


def _decode(model: Any, ids: Tensor, **options: Any) -> Decoded:
    torch.manual_seed(5)
    options = {
        "max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids),
        "return_dict_in_generate": True, "output_logits": True, "output_scores": True, **options,
    }  # fmt: skip
    output = model.generate(ids, **options)
    evidence = output.sequences_scores if "num_beams" in options else torch.stack(output.logits, 1)
    return Decoded(output.sequences[:, ids.shape[1] :], evidence, output.past_key_values)


def _reference(model: keel.KeelForCausalLM, ids: Tensor, **options: Any) -> Decoded:
    """The same without any cache; fails where the streams make no difference to it."""
    expected = _decode(model, ids, use_cache=False, **options)
    with model.disable_streams():
        bare = _decode(model, ids, use_cache=False, **options)
    assert (bare.evidence - expected.evidence).abs().max() > 5e-4  # above what `_same` lets pass
    assert expected.cache is None
    return expected


def _same(found: Decoded, expected: Decoded) -> None:
    assert torch.equal(found.new, expected.new)
    close(found.evidence, expected.evidence)


def _left_padded() -> tuple[list[Tensor], Padded]:
    rows = [tokens(1, length, seed=length)[0] for length in (PROMPT, 4)]
    return rows, pad(rows, "left")


@pytest.fixture
def rollbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every rollback of a stream's state by at least one token: a decoding that rejects nothing tests nothing."""
    seen: list[int] = []
    crop = StreamCacheLayer.crop

    def recorded(layer: StreamCacheLayer, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            seen.append(tokens_to_remove)
        crop(layer, tokens_to_remove)

    monkeypatch.setattr(StreamCacheLayer, "crop", recorded)
    yield seen


@spread_cases
def test_greedy_from_a_left_padded_batch_equals_each_row_alone_uncached(case: Case) -> None:
    model, (rows, batch) = case.model(), _left_padded()
    together = _decode(model, batch.input_ids, attention_mask=batch.attention_mask)
    for index, row in enumerate(rows):
        here = slice(index, index + 1)
        _same(Decoded(together.new[here], together.evidence[here], None), _reference(model, row[None]))


@spread_cases
def test_sampling_equals_its_uncached_twin_for_the_same_seed(case: Case) -> None:
    model, ids = case.model(), tokens(2, PROMPT)
    found = _decode(model, ids, do_sample=True)
    _same(found, _reference(model, ids, do_sample=True))
    assert not torch.equal(_decode(model, ids).new, found.new)


@spread_cases
def test_beams_from_a_left_padded_batch_equal_each_row_alone_uncached(case: Case) -> None:
    model, (rows, batch) = case.model(), _left_padded()
    together = _decode(model, batch.input_ids, attention_mask=batch.attention_mask, num_beams=3)
    for index, row in enumerate(rows):
        here = slice(index, index + 1)
        _same(Decoded(together.new[here], together.evidence[here], None), _reference(model, row[None], num_beams=3))


def _proposer(helper: Any, expected: Decoded) -> Any:
    """Make an assistant of the model: always three proposals, but never a certain one of the tokens to come."""
    helper.generation_config.num_assistant_tokens = 3
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    helper.generation_config.assistant_confidence_threshold = 0.0
    with torch.no_grad():
        helper.get_output_embeddings().weight[expected.new[0, 2]] *= -1
    return helper


@spread_cases
def test_prompt_lookup_equals_greedy(case: Case, rollbacks: list[int]) -> None:
    model = case.model()
    ids = tokens(1, 4).repeat(1, 3)  # it repeats, so that there is something to look up and to reject
    _same(_decode(model, ids, prompt_lookup_num_tokens=3), _reference(model, ids))
    assert rollbacks


@pytest.mark.parametrize("assistant", ["keel", "bare"])
@spread_cases
def test_assisted_decoding_equals_greedy(case: Case, assistant: str, rollbacks: list[int]) -> None:
    model, ids = case.model(), tokens(1, PROMPT)
    expected = _reference(model, ids)
    helper = _proposer(case.model() if assistant == "keel" else case.host(), expected)
    _same(_decode(model, ids, assistant_model=helper), expected)
    assert rollbacks


@host_cases
def test_a_bare_host_may_be_assisted_by_streams(case: Case, rollbacks: list[int]) -> None:
    host, ids = case.host(), tokens(1, PROMPT)
    expected = _decode(host, ids, use_cache=False)
    _same(_decode(host, ids, assistant_model=_proposer(case.model(), expected)), expected)
    assert rollbacks


@spread_cases
def test_chunked_prefill_equals_greedy(case: Case) -> None:
    model, (_, batch) = case.model(), _left_padded()
    expected = _reference(model, batch.input_ids, attention_mask=batch.attention_mask)
    _same(_decode(model, batch.input_ids, attention_mask=batch.attention_mask, prefill_chunk_size=4), expected)


@stream_cases
def test_a_conversation_continues_from_the_returned_cache(case: Case) -> None:
    model, ids = case.model(), tokens(1, PROMPT)
    first = _decode(model, ids)
    longer = torch.cat([ids, first.new, tokens(1, 3, seed=8)], 1)
    expected = _reference(model, longer)
    _same(_decode(model, longer, past_key_values=first.cache), expected)


@stream_cases
def test_a_rollback_in_bf16_is_as_exact_as_the_state(case: Case) -> None:
    model, ids = case.model().to(torch.bfloat16), tokens(1, 8)
    with torch.no_grad():
        straight, rolled = (model(ids[:, :1], use_cache=True).past_key_values for _ in range(2))
        rolled.activate_past_recording()
        for token in ids[:, 1:4].split(1, 1):
            model(token, past_key_values=straight)
        for token in ids[:, 1:].split(1, 1):
            model(token, past_key_values=rolled)
        rolled.crop(-4)
    (name,) = model.wires.streams
    expected, found = (
        {**layer.states[name], **layer.rows.get(name, {})} for layer in (straight.layers[-1], rolled.layers[-1])
    )
    assert expected and found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@stream_cases
def test_a_cache_of_the_users_own_works_in_generate(case: Case) -> None:
    model, ids = case.model(), tokens(2, PROMPT)
    _same(_decode(model, ids, past_key_values=DynamicCache()), _reference(model, ids))


@stream_cases
def test_disabled_streams_generate_as_the_host(case: Case) -> None:
    model, ids = case.model(), tokens(2, PROMPT)
    expected = _decode(case.host(), ids)
    assert not torch.allclose(_decode(model, ids).evidence, expected.evidence, atol=1e-2)
    with model.disable_streams():
        found = _decode(model, ids)
    assert torch.equal(found.new, expected.new) and torch.equal(found.evidence, expected.evidence)
