"""Every site of every host family: what is written there reaches the output, and reaches what it should reach only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import HOST_CASES, Case, close, pad, tokens
from torch import Tensor, nn
from transformers import initialization as init

import keel
from keel.hosts import LAYER_SITES, SITES, HostShape
from keel.streams.base import Flow, PassInputs, PassResult, State, Stream

LENGTH = 11
PLACES = [(site, layer) for site in SITES for layer in ((0, 1) if site in LAYER_SITES else (-1,))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShiftConfig:
    site: str
    layer: int


class ShiftStream(Stream):
    """Adds one learnt vector at one site. It has no state and no loss."""

    type_name = "shift"
    config_class = ShiftConfig

    def build(self, shape: HostShape) -> None:
        self.shift = nn.Parameter(torch.empty(shape.hidden_size))

    def init_weights(self) -> None:
        init.zeros_(self.shift)
        init.zeros_(self.step)

    def write_sites(self) -> list[tuple[str, int]]:
        return [(self.config.site, self.config.layer)]

    def open(self, inputs: PassInputs, state: State) -> Flow:
        return Flow()

    def write(self, site: str, layer: int, hidden_BTD: Tensor, flow: Flow) -> Tensor:
        assert (site, layer) == (self.config.site, self.config.layer)
        return hidden_BTD + self.shift

    def close(self, flow: Flow) -> PassResult:
        return PassResult()


every_host = pytest.mark.parametrize("host_name", HOST_CASES)
every_place = pytest.mark.parametrize(("site", "layer"), PLACES)


def _shifted(
    host_name: str, site: str, layer: int, change: Callable[[Any], None] | None = None
) -> keel.KeelForCausalLM:
    host = Case(host_name, "").host()
    if change is not None:
        with torch.no_grad():
            change(host)
    model = keel.attach(host, ShiftStream(site=site, layer=layer))
    with torch.no_grad():
        model.streams["shift"].shift.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    return model


def _logits(model: keel.KeelForCausalLM) -> tuple[Tensor, Tensor]:
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        written = model(ids).logits
        with model.disable_streams():
            return written, model(ids).logits


@every_place
@every_host
def test_what_is_written_reaches_the_output(host_name: str, site: str, layer: int) -> None:
    model = _shifted(host_name, site, layer)
    written, bare = _logits(model)
    assert (written - bare).abs().max() > 1e-2
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        close(model.logits_from_hidden(model.final_hidden(ids).last_hidden_state), written, atol=0)
    model.train()(ids, labels=ids).loss.backward()
    assert model.streams["shift"].shift.grad.abs().sum() > 0


@pytest.mark.parametrize("site", ["attention_norm_input", "mlp_norm_input"])
@every_host
def test_norm_inputs_leave_the_residual_stream_alone(host_name: str, site: str) -> None:
    """S-Former Eq. 6: where the part behind the norm gives nothing, nothing is left of what was written."""
    written, bare = _logits(_shifted(host_name, site, 1))
    assert not torch.allclose(written, bare, atol=1e-2)

    def mute(host: Any) -> None:
        block = _block(host, 1)
        part = block.mlp if site == "mlp_norm_input" else _attention(block)
        for parameter in part.parameters():
            parameter.zero_()

    written, bare = _logits(_shifted(host_name, site, 1, change=mute))
    assert torch.equal(written, bare)


@every_host
def test_queries_and_keys_see_what_values_do_not(host_name: str) -> None:
    """S-Former Eq. 4. A token that attends to itself alone reads its own value, whatever query and key are."""
    model, ids = _shifted(host_name, "attention_qk", 1), tokens(2, LENGTH)
    alone = ids[:, :1]
    with torch.no_grad():
        written = model(alone).logits
        with model.disable_streams():
            close(written, model(alone).logits)
        # Shifting what the whole projection reads instead is seen, so the comparison above could fail.
        norm = _shifted(host_name, "attention_norm_input", 1)
        norm.streams.load_state_dict(model.streams.state_dict())
        assert (norm(alone).logits - written).abs().max() > 1e-2


@every_host
def test_a_query_and_its_key_are_written_once(host_name: str) -> None:
    model, ids = _shifted(host_name, "attention_qk", 1), tokens(2, LENGTH)
    stream, calls = model.streams["shift"], []
    write = stream.write
    stream.write = lambda *given: calls.append(given[:2]) or write(*given)
    model(ids)
    assert calls == [("attention_qk", 1)]


def _block(host: Any, layer: int) -> nn.Module:
    return (host.base_model.h if hasattr(host.base_model, "h") else host.base_model.layers)[layer]


def _attention(block: nn.Module) -> nn.Module:
    return next(getattr(block, name) for name in ("self_attn", "attn", "attention") if hasattr(block, name))


@every_host
def test_a_write_at_the_attention_output_needs_no_attention(host_name: str) -> None:
    def mute(host: Any) -> None:
        for parameter in _attention(_block(host, 1)).parameters():
            parameter.zero_()

    written, bare = _logits(_shifted(host_name, "attention_output", 1, change=mute))
    assert (written - bare).abs().max() > 1e-2


@every_host
def test_a_write_at_the_final_norm_input_goes_through_the_norm(host_name: str) -> None:
    model, ids, seen = _shifted(host_name, "final_norm_input", -1), tokens(2, LENGTH), []
    norm = getattr(model.host.base_model, model.family.final_norm)
    with torch.no_grad():
        with model.disable_streams():
            handle = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
            model(ids)
            handle.remove()
        assert torch.equal(model.final_hidden(ids).last_hidden_state, norm(seen[0] + model.streams["shift"].shift))


@every_host
def test_a_write_at_the_final_hidden_is_what_the_head_reads(host_name: str) -> None:
    model, ids = _shifted(host_name, "final_hidden", -1), tokens(2, LENGTH)
    shift = model.streams["shift"].shift
    with torch.no_grad():
        with model.disable_streams():
            hidden = model.final_hidden(ids).last_hidden_state
        assert torch.equal(model(ids).logits, model.logits_from_hidden(hidden + shift))


@every_host
def test_a_write_at_the_embeddings_is_a_change_of_the_embeddings(host_name: str) -> None:
    model, ids = _shifted(host_name, "embeddings", -1), tokens(2, LENGTH)
    with torch.no_grad():
        changed = model.get_input_embeddings()(ids) + model.streams["shift"].shift
        with model.disable_streams():
            expected = model(inputs_embeds=changed).logits
        assert torch.equal(model(ids).logits, expected)


@every_host
def test_a_stream_without_state_decodes_like_any_other(host_name: str) -> None:
    model = _shifted(host_name, "attention_output", 0)
    rows = [tokens(1, length, seed=length)[0] for length in (LENGTH, 4)]
    batch = pad(rows, "left")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": batch.attention_mask}
    uncached = model.generate(batch.input_ids, use_cache=False, **options)
    assert torch.equal(model.generate(batch.input_ids, **options), uncached)
    alone = tokens(1, 4).repeat(1, 3)
    options["attention_mask"] = torch.ones_like(alone)
    uncached = model.generate(alone, use_cache=False, **options)
    assert torch.equal(model.generate(alone, prompt_lookup_num_tokens=3, **options), uncached)
    helper = Case(host_name, "").host()
    assert torch.equal(model.generate(alone, assistant_model=helper, **options), uncached)


@pytest.mark.parametrize("site", LAYER_SITES)
@every_host
def test_checkpointed_layers_write_at_every_site(host_name: str, site: str) -> None:
    plain, checkpointed = _shifted(host_name, site, 0).train(), _shifted(host_name, site, 0).train()
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        losses = [model(ids, labels=ids).loss for ids in (tokens(2, LENGTH), tokens(2, 5, seed=6))]
        (losses[0] + 2 * losses[1]).backward()
    for expected, found in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


class DoubleStream(ShiftStream):
    """Doubles instead, so that its order relative to a shift shows."""

    type_name = "twice"

    def write(self, site: str, layer: int, hidden_BTD: Tensor, flow: Flow) -> Tensor:
        return 2 * hidden_BTD


@pytest.mark.parametrize("names", [("shift", "twice"), ("twice", "shift")])
def test_streams_write_in_the_order_in_which_they_were_given(names: tuple[str, str]) -> None:
    kinds = {"shift": ShiftStream, "twice": DoubleStream}
    host, ids = Case("llama", "").host(), tokens(2, LENGTH)
    model = keel.attach(host, {name: kinds[name](site="final_hidden", layer=-1) for name in names})
    with torch.no_grad():
        model.streams["shift"].shift.fill_(0.5)
        with model.disable_streams():
            hidden = model.final_hidden(ids).last_hidden_state
        expected = 2 * (hidden + 0.5) if names[0] == "shift" else 2 * hidden + 0.5
        assert torch.equal(model.final_hidden(ids).last_hidden_state, expected)
