"""Attention spans against eager attention matrices on several hosts, and that the host is left as it was.

Shapes: B batch, T tokens, H heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

import keel
from keel.errors import KeelError
from keel.positions import Positions
from keel.probes import attention_spans, run_span
from keel.probes.attention import SeenAttention, observing_attention
from keel.probes.attention_span import METRICS, reference_spans, spans_of

LENGTH, WINDOW = 14, 5
_COMMON: dict[str, Any] = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, initializer_range=0.3, num_key_value_heads=2, head_dim=8,
)  # fmt: skip
HOSTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gpt2": lambda: GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
    "gemma2": lambda: Gemma2Config(
        **_COMMON, query_pre_attn_scalar=8, sliding_window=WINDOW, attn_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip


def make(name: str, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(HOSTS[name](), attn_implementation=implementation).eval()


def ids(count: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(50, (count, length), generator=torch.Generator().manual_seed(2))


def structural(host: PreTrainedModel) -> keel.KeelForCausalLM:
    return keel.attach(host, keel.StructuralStream(init="paper"))


# Gemma 2 caps its scores, which sdpa cannot do: transformers refuses it there.
CASES = [
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("mistral", "sdpa"),
    ("gpt2", "sdpa"),
    ("gpt2", "eager"),
    ("gemma2", "eager"),
]


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_spans_equal_those_of_whole_attention_matrices(name: str, implementation: str) -> None:
    given = ids()
    with torch.no_grad():
        attentions = make(name, "eager")(given, output_attentions=True, use_cache=False).attentions
    found = attention_spans(make(name, implementation), given, [LENGTH], beyond=4, query_block=3)
    assert len(found.rows) == len(attentions) == 2
    for row, attention_BHTT in zip(found.rows, attentions, strict=True):
        for sequence in range(2):
            expected = reference_spans(attention_BHTT[sequence], beyond=4)
            values = [row.per_sequence[metric][sequence] for metric in METRICS]
            assert values == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_the_host_computes_what_it_always_does(name: str, implementation: str) -> None:
    host, given, seen = make(name, implementation), ids(), []
    with torch.no_grad():
        before = host(given).logits
        with observing_attention(host, lambda attention: seen.append(attention.layer)):
            during = host(given).logits
        assert seen == [0, 1]
        assert torch.equal(during, before) and torch.equal(host(given).logits, before)
    assert host.config._attn_implementation == implementation
    assert len(seen) == 2  # nothing is observed after the body


@pytest.mark.parametrize("scheme", ["nope", "alibi", "window"])
def test_position_schemes_are_read_as_they_are(scheme: str) -> None:
    host, given = make("llama", "sdpa"), ids()
    plain = attention_spans(host, given, [LENGTH], beyond=WINDOW)
    positions = Positions(scheme=scheme, window=WINDOW if scheme == "window" else None)
    model = keel.attach(host, {}, positions=positions)
    found = attention_spans(model, given, [LENGTH], beyond=WINDOW)
    assert found.mean("distance", LENGTH) != pytest.approx(plain.mean("distance", LENGTH), rel=1e-3)
    assert found.lengths == [LENGTH] and model.host.config._attn_implementation.startswith(("sdpa", "keel_"))
    if scheme == "window":
        assert found.mean("beyond", LENGTH) == 0 < plain.mean("beyond", LENGTH)
    seen: list[tuple[SeenAttention, Tensor, Tensor]] = []
    _check_outputs(model, given, seen)


def _check_outputs(model: keel.KeelForCausalLM, given: Tensor, seen: list[Any]) -> None:
    """The rows, applied to the values, are what the attention module gave: they are the weights that it used."""
    values: list[Tensor] = []
    layer = model.host.model.layers[0].self_attn
    values_of = layer.v_proj.register_forward_hook(lambda module, args, output: values.append(output))
    attended_of = layer.o_proj.register_forward_pre_hook(lambda module, args: values.append(args[0]))
    with torch.no_grad(), observing_attention(model.host, seen.append):
        model(given)
    values_of.remove()
    attended_of.remove()
    value_BTGK = values[0].unflatten(-1, (2, 8))
    for group in range(2):
        rows_BRTT = seen[0].rows(0, LENGTH, group)
        expected_BTRK = torch.einsum("brts,bsk->btrk", rows_BRTT, value_BTGK[:, :, group])
        found_BTRK = values[1].unflatten(-1, (4, 8))[:, :, 2 * group : 2 * group + 2]
        torch.testing.assert_close(found_BTRK, expected_BTRK, rtol=1e-4, atol=1e-5)


def test_lengths_read_the_same_tokens_in_blocks() -> None:
    host, given = make("llama", "sdpa"), ids(2, 12)
    found = attention_spans(host, given, [12, 4], beyond=2)
    by_hand = attention_spans(host, given.reshape(6, 4), [4], beyond=2, tokens_per_batch=4)
    assert found.lengths == [4, 12]
    for row, other in zip(found.rows[:2], by_hand.rows, strict=True):
        for metric in METRICS:
            three = other.per_sequence[metric]
            means = [sum(three[:3]) / 3, sum(three[3:]) / 3]
            assert row.per_sequence[metric] == pytest.approx(means, abs=1e-6)
    assert found.mean("distance", 12) > found.mean("distance", 4) > 0


def test_a_stream_changes_the_spans() -> None:
    model, given = structural(make("llama", "sdpa")), ids()
    with_stream = attention_spans(model, given, [LENGTH]).metrics()
    with model.disable_streams():
        without = attention_spans(model, given, [LENGTH]).metrics()
    assert without == pytest.approx(attention_spans(make("llama", "sdpa"), given, [LENGTH]).metrics(), abs=1e-6)
    assert abs(with_stream[f"span.distance@{LENGTH}"] - without[f"span.distance@{LENGTH}"]) > 1e-3


def test_a_flat_and_a_sharp_row_by_hand() -> None:
    zero = torch.zeros(1, 1, 3, 2)
    flat = SeenAttention(layer=0, query_BHTK=zero, key_BGTK=zero, mask=None, scaling=1.0)
    rows = [[1.0], [0.5, 0.5], [1 / 3] * 3]
    distance = sum(w * (t - s) for t, row in enumerate(rows) for s, w in enumerate(row)) / 3
    entropy = sum(torch.tensor(float(len(row))).log().item() for row in rows) / 3
    assert spans_of(flat, beyond=2, query_block=2)[0].tolist() == pytest.approx([distance, 1 / 9, entropy])
    own = SeenAttention(
        layer=0, query_BHTK=zero, key_BGTK=zero, mask=torch.eye(3, dtype=torch.bool)[None, None], scaling=1.0
    )
    assert spans_of(own, beyond=1)[0].tolist() == [0, 0, 0]


def test_unreadable_attention_is_refused_and_the_implementation_put_back() -> None:
    host = make("llama", "sdpa")
    host.config._attn_implementation = "flex_attention"
    with pytest.raises(KeelError, match="cannot read attention of implementation 'flex_attention'"):
        attention_spans(host, ids(), [LENGTH])
    assert host.config._attn_implementation == "flex_attention"
    host.config._attn_implementation = "sdpa"
    with pytest.raises(ZeroDivisionError), observing_attention(host, lambda seen: print(1 / 0)):
        host(ids())
    assert host.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("lengths", [[], [0], [LENGTH + 1]])
def test_unusable_lengths_are_named(lengths: list[int]) -> None:
    with pytest.raises(KeelError, match="attention spans: lengths"):
        attention_spans(make("llama", "sdpa"), ids(), lengths)


def test_run_writes_table_and_figures(tmp_path: Path) -> None:
    models = {"RoPE": make("llama", "sdpa"), "S-Former": structural(make("llama", "sdpa"))}
    found = run_span(models, ids(), [4, LENGTH], tmp_path, beyond=3)
    table = json.loads((tmp_path / "table.json").read_text())
    for arm in models:
        assert table["arms"][arm]["metrics"] == pytest.approx(found[arm].metrics())
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"span.{name}.{kind}" for name in ("lengths", "layers") for kind in ("svg", "png")} < names
    assert "S-Former" in (tmp_path / "span.lengths.svg").read_text()
