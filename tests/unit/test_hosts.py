"""The table of host families: what is accepted, what is refused and how, and what it says of a host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaModel,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

import keel
from keel.errors import KeelError
from keel.hosts import (
    FAMILIES,
    LAYER_SITES,
    SITES,
    fingerprint,
    host_family,
    host_shape,
    logits_from_hidden,
    site_modules,
)

_SIZES: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_GROUPED: dict[str, Any] = {
    **_SIZES,
    "intermediate_size": 16,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED),
    "gemma2": Gemma2Config(**_GROUPED, final_logit_softcapping=0.5, initializer_range=0.5),
    "gpt2": GPT2Config(**_SIZES),
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def _host(name: str = "llama", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()


def test_an_unknown_architecture_names_the_supported_ones_and_what_was_looked_for() -> None:
    sizes = {
        "hidden_size": 16,
        "ffn_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,
    }
    host = AutoModelForCausalLM.from_config(OPTConfig(vocab_size=20, **sizes))
    with pytest.raises(KeelError) as caught:
        keel.attach(host, keel.StructuralStream())
    message = str(caught.value)
    assert "'opt' (OPTForCausalLM)" in message and "\n" not in message
    assert all(family in message for family in FAMILIES)
    for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm", "layers.0.self_attn.q_proj"):
        assert name in message
    assert "missing: norm, layers.0" in message


def test_a_known_architecture_with_a_missing_module_is_refused() -> None:
    host = _host()
    del host.model.layers[0].self_attn.k_proj
    with pytest.raises(KeelError, match=r"'llama'.*missing: layers\.0\.self_attn\.k_proj;"):
        host_family(host)


def test_a_host_wrapped_by_peft_is_refused_with_what_to_do() -> None:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(_host(), LoraConfig(r=1, target_modules=["q_proj"]))
    with pytest.raises(KeelError, match=r"wrapped by PEFT .*attach first, then get_peft_model.*merge_and_unload\(\)"):
        keel.attach(wrapped, keel.StructuralStream())
    # transformers can also put an adapter into the model itself.
    host = _host()
    host.add_adapter(LoraConfig(r=1, target_modules=["q_proj"]))
    with pytest.raises(KeelError, match="wrapped by PEFT"):
        keel.attach(host, keel.StructuralStream())
    assert keel.attach(wrapped.merge_and_unload(), keel.StructuralStream()).stream_status()["hooks"] == 4


@pytest.mark.parametrize("attribute", ["is_quantized", "hf_quantizer"])
def test_a_quantised_host_is_refused_with_the_reason(attribute: str) -> None:
    host = _host()
    setattr(host, attribute, True)
    with pytest.raises(KeelError, match=r"quantised: .* load it unquantised"):
        keel.attach(host, keel.StructuralStream())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "a Hugging Face causal language model, got Linear"),
        (lambda: LlamaModel(CONFIGS["llama"]), "no language-model head: load it with AutoModelForCausalLM"),
        (lambda: keel.attach(_host(), keel.StructuralStream()), "already has streams"),
        (lambda: keel.attach(_host(), keel.StructuralStream()).host, "already has streams"),
    ],
)
def test_what_is_no_host_is_refused(make: Any, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        keel.attach(make(), keel.StructuralStream())


def test_a_detached_host_may_be_attached_to_again() -> None:
    model = keel.attach(_host(), keel.StructuralStream(init="paper"))
    again = keel.attach(model.detach(), keel.StructuralStream(init="paper"))
    with torch.no_grad():
        assert not torch.equal(again(IDS).logits, _host()(IDS).logits)


@pytest.mark.parametrize("name", ["double", "a.b", "", "training"])
def test_a_name_that_no_stream_can_have_is_refused(name: str) -> None:
    with pytest.raises(KeelError, match="cannot be named"):
        keel.attach(_host(), {name: keel.StructuralStream()})


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_from_hidden_equals_the_hosts_own(name: str) -> None:
    host = _host(name)
    with torch.no_grad():
        hidden = host.base_model(IDS).last_hidden_state
        logits = host(IDS).logits
        assert torch.equal(logits_from_hidden(host, hidden), logits)
        uncapped = host.get_output_embeddings()(hidden)
    if name == "gemma2":  # the cap does something, or this would not show that it is applied
        assert logits.abs().max() <= 0.5 < uncapped.abs().max()
    else:
        assert torch.equal(uncapped, logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_fingerprint_survives_a_dtype_and_sees_any_weight_change(name: str) -> None:
    host = _host(name)
    expected = fingerprint(host)
    assert expected == fingerprint(_host(name)) and len(expected) == 32
    assert fingerprint(_host(name).to(torch.bfloat16)) == expected
    assert fingerprint(_host(name, seed=1)) != expected
    for parameter in host.parameters():
        with torch.no_grad():
            before = parameter.clone()
            parameter.mul_(1.1).add_(0.1)
            assert fingerprint(host) != expected
            parameter.copy_(before)
    assert fingerprint(host) == expected


def test_the_fingerprint_of_a_large_weight_is_a_sample_that_sees_its_shape() -> None:
    linear = torch.nn.Linear(100, 50, bias=False)
    other = torch.nn.Linear(50, 100, bias=False)
    with torch.no_grad():
        other.weight.copy_(linear.weight.view(100, 50))
    assert fingerprint(linear) != fingerprint(other)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_site_has_its_module(name: str) -> None:
    host = _host(name)
    family = host_family(host)
    assert host_shape(host.config).hidden_size == 16 and host_shape(host.config).num_layers == 2
    found = set()
    for site in SITES[1:]:
        for layer in (0, 1) if site in LAYER_SITES else (-1,):
            module, is_input, _ = site_modules(host, family, site, layer)[0]
            assert isinstance(module, torch.nn.Module)
            assert is_input is (site.endswith("_input") or site == "attention_qk")
            found.add((id(module), is_input))
    assert len(found) == len(SITES) - 1 + len(LAYER_SITES)


def test_an_unknown_site_names_the_nearest() -> None:
    host = _host()
    with pytest.raises(KeelError, match="unknown site 'attention_inputs'; did you mean 'attention_input'"):
        site_modules(host, host_family(host), "attention_inputs", 0)
