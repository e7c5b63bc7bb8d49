"""Position schemes: fast attention against its dense twin, the host around it, and the way back to the original."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config
from transformers.modeling_utils import PreTrainedModel

from keel import positions as module
from keel.errors import KeelError, ShapeError
from keel.positions import (
    Positions,
    alibi_slopes,
    blockwise_attention,
    get_positions,
    reference_alibi_attention,
    reference_window_attention,
    set_positions,
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CHANGED = {
    "nope": Positions(scheme="nope"),
    "alibi": Positions(scheme="alibi"),
    "window": Positions(scheme="window", window=5),
    "yarn": Positions(scheme="yarn", factor=4.0, original_length=16),
}
HOSTS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=4),
    "llama_gqa": LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "mistral_window_7": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 queries, so that short sequences cross several blocks and end inside one."""
    monkeypatch.setattr(module, "QUERY_BLOCK", 8)


def make_host(name: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    host = AutoModelForCausalLM.from_config(copy.deepcopy(HOSTS[name]))
    for parameter in host.parameters():  # the default initialisation is too flat for attention to matter
        torch.nn.init.normal_(parameter, std=0.3)
    return host.eval()


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("past", [0, 11])
@pytest.mark.parametrize("length", [1, 8, 21])
@pytest.mark.parametrize("window", [None, 1, 11, 100])
def test_fast_attention_equals_the_dense_twin_in_values_and_gradients(
    window: int | None, length: int, past: int, padded: bool
) -> None:
    torch.manual_seed(0)
    heads, keys = 3, past + length
    token = torch.ones(2, keys, dtype=torch.bool)
    if padded:
        token[1, : keys // 2] = False
    tensors = [torch.randn(2, heads, size, 4, dtype=torch.float64, requires_grad=True) for size in (length, keys, keys)]
    twins = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    mask = token if padded else None
    if window is None:
        fast = blockwise_attention(*tensors, window=keys, slopes_H=alibi_slopes(heads), token_BS=mask, scaling=0.3)
        naive = reference_alibi_attention(*twins, token_BS=mask, scaling=0.3)
    else:
        fast = blockwise_attention(*tensors, window=window, token_BS=mask, scaling=0.3)
        naive = reference_window_attention(*twins, window=window, token_BS=mask, scaling=0.3)
    torch.testing.assert_close(fast, naive)
    weights = torch.randn_like(naive)
    (fast * weights).sum().backward()
    (naive * weights).sum().backward()
    for tensor, twin in zip(tensors, twins, strict=True):
        assert twin.grad is not None
        torch.testing.assert_close(tensor.grad, twin.grad)


def test_the_twins_differ_from_plain_causal_attention() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 4) for _ in range(3))
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert not torch.allclose(reference_alibi_attention(query, key, value), plain, atol=1e-2)
    assert not torch.allclose(reference_window_attention(query, key, value, 3), plain, atol=1e-2)
    torch.testing.assert_close(reference_window_attention(query, key, value, 9), plain)


def test_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    expected = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]  # 4 heads, then every other of the 8
    torch.testing.assert_close(alibi_slopes(6), torch.tensor(expected))
    assert len(alibi_slopes(12)) == 12


@pytest.mark.parametrize("scheme", sorted(CHANGED))
@pytest.mark.parametrize("name", sorted(HOSTS))
def test_scheme_changes_the_output_and_the_way_back_is_bitwise(name: str, scheme: str) -> None:
    host, tokens = make_host(name), ids(2, 21)
    before, attention = host(tokens).logits, host.config._attn_implementation
    set_positions(host, CHANGED[scheme])
    assert get_positions(host) == CHANGED[scheme]
    changed = host(tokens).logits
    assert not torch.allclose(before, changed, atol=1e-2)
    set_positions(host, CHANGED[scheme])  # idempotent
    assert torch.equal(changed, host(tokens).logits)
    set_positions(host, Positions())
    assert torch.equal(before, host(tokens).logits)
    assert host.config._attn_implementation == attention
    assert get_positions(host) == Positions()
    assert [key for key, _ in host.named_modules()] == [key for key, _ in make_host(name).named_modules()]


@pytest.mark.parametrize("scheme", sorted(CHANGED))
@pytest.mark.parametrize("name", sorted(HOSTS))
def test_cached_decoding_equals_the_full_forward(name: str, scheme: str) -> None:
    host, tokens = make_host(name), ids(2, 26)
    set_positions(host, CHANGED[scheme])
    full = host(tokens).logits
    cache, pieces, start = DynamicCache(config=host.config), [], 0
    for size in (9, 1, 1, 11, 1, 3):  # prefill, single steps and chunks
        output = host(tokens[:, start : start + size], past_key_values=cache, use_cache=True)
        pieces.append(output.logits)
        start += size
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", sorted(CHANGED))
def test_left_padding_changes_nothing(scheme: str) -> None:
    host, tokens = make_host("llama_gqa"), ids(1, 19)
    set_positions(host, CHANGED[scheme])
    alone = host(tokens).logits
    padded = torch.cat([torch.zeros(1, 10, dtype=torch.long), tokens], dim=1)
    batch = torch.cat([padded, ids(1, 29)])
    mask = torch.ones_like(batch)
    mask[0, :10] = 0
    where = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = host(batch, attention_mask=mask, position_ids=where).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:1, 10:], alone, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(host(batch).logits[:1, 10:], alone, atol=1e-2)  # the mask matters


@pytest.mark.parametrize("scheme", ["alibi", "window"])
def test_generation_of_a_left_padded_batch_equals_one_by_one(scheme: str) -> None:
    host = make_host("llama_gqa")
    set_positions(host, CHANGED[scheme])
    short, long = ids(1, 6), ids(1, 15)
    batch = torch.cat([torch.cat([torch.zeros(1, 9, dtype=torch.long), short], dim=1), long])
    mask = torch.ones_like(batch)
    mask[0, :9] = 0
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    together = host.generate(batch, attention_mask=mask, **options)[:, 15:]
    assert torch.equal(together[:1], host.generate(short, **options)[:, 6:])
    assert torch.equal(together[1:], host.generate(long, **options)[:, 15:])


@pytest.mark.parametrize("training", [False, True])
def test_window_that_covers_everything_is_plain_rope(training: bool) -> None:
    host, tokens = make_host("llama_gqa").train(training), ids(2, 24)
    plain = host(tokens).logits
    set_positions(host, Positions(scheme="window", window=24))
    assert torch.equal(host(tokens).logits, plain)
    set_positions(host, Positions(scheme="window", window=23))
    assert not torch.equal(host(tokens).logits[:, -1], plain[:, -1])


def test_window_limits_what_one_layer_sees() -> None:
    """Two layers of window 5 see 9 tokens back: a change further back is invisible, one inside is not."""
    host, tokens = make_host(), ids(1, 30)
    set_positions(host, CHANGED["window"])
    last = host(tokens).logits[0, -1]
    for distance, seen in ((8, True), (9, False)):
        other = tokens.clone()
        other[0, -1 - distance] = (other[0, -1 - distance] + 1) % 61
        assert torch.equal(host(other).logits[0, -1], last) != seen


def test_nope_sees_no_order_at_one_layer_and_alibi_does() -> None:
    host = make_host()
    host.config.num_hidden_layers = 1
    tokens = ids(1, 20)
    shuffled = torch.cat([tokens[:, :-1].flip(1), tokens[:, -1:]], dim=1)
    set_positions(host, CHANGED["nope"])
    torch.testing.assert_close(host(tokens).logits[0, -1], host(shuffled).logits[0, -1], atol=1e-4, rtol=1e-4)
    set_positions(host, CHANGED["alibi"])
    assert not torch.allclose(host(tokens).logits[0, -1], host(shuffled).logits[0, -1], atol=1e-2)


def test_yarn_of_factor_one_is_rope_and_keeps_high_frequencies_otherwise() -> None:
    host, tokens = make_host(), ids(1, 30)
    plain = host(tokens).logits
    set_positions(host, Positions(scheme="yarn", factor=1, original_length=64))
    torch.testing.assert_close(host(tokens).logits, plain, atol=2e-4, rtol=1e-4)
    host.config.rope_parameters["rope_theta"] = 1e6
    original = make_host().base_model.rotary_emb
    set_positions(host, Positions(scheme="yarn", factor=8, original_length=4096))
    scaled = host.base_model.rotary_emb.scaled
    assert scaled.attention_scaling == pytest.approx(0.1 * math.log(8) + 1)  # Peng et al. 2023, Eq. 22
    assert scaled.inv_freq[0] == original.inv_freq[0]
    assert scaled.inv_freq[-1] == pytest.approx(float(1e6 ** -(10 / 12)) / 8)


@pytest.mark.parametrize("scheme", sorted(CHANGED))
def test_gradients_reach_every_parameter_and_saving_ignores_the_scheme(scheme: str, tmp_path: Any) -> None:
    host, tokens = make_host(), ids(2, 20)
    set_positions(host, CHANGED[scheme])
    host.train()(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in host.parameters())
    host.eval().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens).logits, make_host()(tokens).logits)
    set_positions(loaded, CHANGED[scheme])
    assert torch.equal(loaded(tokens).logits, host(tokens).logits)


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("scheme", ["rope", *sorted(CHANGED)])
def test_no_tensor_grows_with_the_square_of_the_length(scheme: str) -> None:
    host, length = make_host(), 1024
    set_positions(host, CHANGED.get(scheme, Positions()))
    with torch.no_grad(), _Largest() as largest:
        host.base_model(ids(1, length))
    assert largest.elements < length * length / 4
    if scheme == "rope":  # the probe sees a square when there is one
        host.set_attn_implementation("eager")
        with torch.no_grad(), _Largest() as largest:
            host.base_model(ids(1, length))
        assert largest.elements >= length * length


def test_errors_name_what_to_do() -> None:
    with pytest.raises(KeelError, match="did you mean 'alibi'"):
        Positions(scheme="alibbi")
    with pytest.raises(KeelError, match="needs 'window'"):
        Positions(scheme="window")
    with pytest.raises(KeelError, match="takes no 'window'"):
        Positions(scheme="alibi", window=3)
    with pytest.raises(KeelError, match="needs 'original_length'"):
        Positions(scheme="yarn", factor=2.0)
    for bad in (0, -1, float("nan")):
        with pytest.raises(KeelError, match="at least 1"):
            Positions(scheme="yarn", factor=bad, original_length=8)
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=61))
    with pytest.raises(KeelError, match="no rotary_emb"):
        set_positions(gpt2, CHANGED["nope"])
    scaled = copy.deepcopy(HOSTS["llama"])
    scaled.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(KeelError, match="plain RoPE"):
        set_positions(AutoModelForCausalLM.from_config(scaled), CHANGED["yarn"])
    with pytest.raises(ShapeError, match="3 queries but 2 keys"):
        blockwise_attention(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), window=2)


@pytest.mark.parametrize("scheme", ["alibi", "window"])
def test_what_the_blocks_cannot_do_is_refused(scheme: str) -> None:
    host, tokens = make_host(), ids(2, 12)
    set_positions(host, CHANGED[scheme])
    with pytest.raises(KeelError, match="static"):
        host.generate(tokens, max_new_tokens=2, do_sample=False, cache_implementation="static", pad_token_id=0)
    with pytest.raises(KeelError, match="packed"):
        host(tokens, position_ids=torch.arange(12).remainder(6)[None], use_cache=False)
    with pytest.raises(KeelError, match="padding mask"):
        host(tokens, attention_mask=torch.zeros(2, 1, 12, 12))


def test_failed_change_leaves_the_host_as_it_was() -> None:
    scaled = copy.deepcopy(HOSTS["llama"])
    scaled.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    host, tokens = AutoModelForCausalLM.from_config(scaled).eval(), ids(1, 9)
    set_positions(host, CHANGED["alibi"])
    before = host(tokens).logits
    with pytest.raises(KeelError):
        set_positions(host, CHANGED["yarn"])
    assert get_positions(host) in (Positions(), CHANGED["alibi"])
    set_positions(host, CHANGED["alibi"])
    assert torch.equal(host(tokens).logits, before)
