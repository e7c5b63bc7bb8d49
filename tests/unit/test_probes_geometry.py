"""Geometry of what a stream writes: known biases give known numbers, twins agree, and the model is left as it was.

Shapes: B batch, T tokens, D hidden size, N vectors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import keel
from keel.errors import KeelError
from keel.hosts import HostShape
from keel.probes import Geometry, measure_geometry, run_geometry
from keel.probes.attention import SeenAttention
from keel.probes.geometry import BIAS_METRICS, SPECTRAL_METRICS, bias_metrics, reference_bias_metrics
from keel.probes.recording import recording_writes
from keel.probes.spectra import Moments, attention_spectra, reference_effective_rank, reference_spectrum, spectrum_of
from keel.streams.base import Flow, PassInputs, PassResult, State, Stream

WIDTH, LAYERS, LENGTH = 32, 2, 12
SITE = "attention_norm_input"


@dataclass(frozen=True, kw_only=True)
class MadeUpConfig:
    """No fields."""


class MadeUpStream(Stream):
    """Adds ``bias_of(hidden_BTD)`` at one site of every layer."""

    type_name = "made_up"
    config_class = MadeUpConfig
    bias_of: Callable[[Tensor], Tensor]

    def build(self, shape: HostShape) -> None:
        self.shape = shape

    def init_weights(self) -> None:
        pass

    def write_sites(self) -> list[tuple[str, int]]:
        return [(SITE, layer) for layer in range(self.shape.num_layers)]

    def open(self, inputs: PassInputs, state: State) -> Flow:
        return Flow()

    def write(self, site: str, layer: int, hidden_BTD: Tensor, flow: Flow) -> Tensor:
        return hidden_BTD + self.bias_of(hidden_BTD)

    def close(self, flow: Flow) -> PassResult:
        return PassResult()


def host() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=32, initializer_range=0.2)
    return GPT2LMHeadModel(config).eval()


def with_bias(bias_of: Callable[[Tensor], Tensor]) -> keel.KeelForCausalLM:
    stream = MadeUpStream()
    stream.bias_of = bias_of
    return keel.attach(host(), stream)


def structural(scale: float = 0.4, inject: str = "bias", beside: PreTrainedModel | None = None) -> keel.KeelForCausalLM:
    model = keel.attach(beside or host(), keel.StructuralStream(inject=inject))
    with torch.no_grad():
        for parameter in model.streams.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * scale)
    return model


def ids(count: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(50, (count, length), generator=torch.Generator().manual_seed(2))


def quarter_turn(hidden_BTD: Tensor) -> Tensor:
    """The same length, at a right angle."""
    return torch.stack([-hidden_BTD[..., 1::2], hidden_BTD[..., ::2]], -1).flatten(-2)


def cycling(rank: int) -> Callable[[Tensor], Tensor]:
    """Token t gets the unit vector of axis t mod ``rank``."""
    return lambda hidden_BTD: torch.eye(WIDTH)[torch.arange(hidden_BTD.shape[1]) % rank].expand_as(hidden_BTD)


def alternating(hidden_BTD: Tensor) -> Tensor:
    sign_T1 = (-1.0) ** torch.arange(hidden_BTD.shape[1])[:, None]
    return (sign_T1 * torch.ones(WIDTH)).expand_as(hidden_BTD)


@pytest.mark.parametrize(
    ("bias_of", "metric", "expected"),
    [
        (lambda h: 0.5 * h, "relative_strength", 0.5),
        (lambda h: 0.5 * h, "orthogonality", 0.0),
        (lambda h: -2.0 * h, "orthogonality", 0.0),
        (quarter_turn, "relative_strength", 1.0),
        (quarter_turn, "orthogonality", 1.0),
        (torch.ones_like, "temporal_consistency", 1.0),
        (alternating, "temporal_consistency", -1.0),
        (cycling(2), "temporal_consistency", 0.0),
        (torch.ones_like, "effective_rank", 1),
        (cycling(1), "effective_rank", 1),
        (cycling(4), "effective_rank", 4),
        (cycling(4), "effective_rank_centred", 3),
        (cycling(6), "effective_rank", 6),
    ],
)
def test_a_known_bias_gives_known_numbers(bias_of: Callable[[Tensor], Tensor], metric: str, expected: float) -> None:
    result = measure_geometry(with_bias(bias_of), ids(), spectra=False)
    for layer in range(LAYERS):
        assert result.metrics()[f"geometry.{metric}@layer{layer}"] == pytest.approx(expected, abs=2e-5)
        assert result.metrics()[f"geometry.{metric}_{SITE}@layer{layer}"] == pytest.approx(expected, abs=2e-5)


def test_a_stream_that_writes_nothing_has_no_direction() -> None:
    row = measure_geometry(with_bias(torch.zeros_like), ids()).layers()[0]
    assert row.values["relative_strength"] == row.values["effective_rank"] == row.values["representation_shift"] == 0
    assert math.isnan(row.values["orthogonality"]) and math.isnan(row.values["temporal_consistency"])
    for name in SPECTRAL_METRICS:
        assert row.values[f"{name}_ratio"] == 1.0 and row.values[f"{name}_hidden_ratio"] == 1.0


def test_a_stronger_stream_gives_other_numbers_everywhere() -> None:
    weak, strong = (measure_geometry(structural(scale), ids()).metrics() for scale in (0.1, 0.4))
    same = [name for name in weak if weak[name] == strong[name] and "without" not in name and "rank" not in name]
    assert same == []
    assert all(weak[name] == strong[name] for name in weak if "without" in name)


@pytest.mark.parametrize("case", ["bias", "fusion", "fusion, one projection"])
def test_per_token_metrics_equal_their_twin_and_batches_do_not_matter(case: str) -> None:
    beside, inject = (gpt2() if "one" in case else host()), case.partition(",")[0]
    model, given = structural(inject=inject, beside=beside), ids(5)
    writes: list[tuple[str, int, Tensor, Tensor]] = []
    with (
        recording_writes(model, lambda w: writes.append((w.site, w.layer, w.given_BTD, w.written_BTD))),
        torch.no_grad(),
    ):
        model(given)
    whole, split = measure_geometry(model, given, batch_size=5), measure_geometry(model, given, batch_size=2)
    for site, layer, given_BTD, written_BTD in writes:
        row = next(r for r in whole.rows if (r.layer, r.site) == (layer, site))
        other = next(r for r in split.rows if (r.layer, r.site) == (layer, site))
        for sequence in range(5):
            bias_TD = written_BTD[sequence] - given_BTD[sequence]
            expected = reference_bias_metrics(bias_TD, given_BTD[sequence])
            for name in BIAS_METRICS:
                assert row.per_sequence[name][sequence] == pytest.approx(expected[name], abs=1e-5)
                assert other.per_sequence[name][sequence] == pytest.approx(expected[name], abs=1e-5)
        bias_ND = (written_BTD - given_BTD).flatten(0, 1)
        for centred, name in ((False, "effective_rank"), (True, "effective_rank_centred")):
            assert row.values[name] == other.values[name] == reference_effective_rank(bias_ND, centred=centred)
    assert len(writes) == LAYERS * (2 if inject == "bias" else 1)
    assert {site for site, *_ in writes} == {row.site for row in whole.rows if row.site}


def test_representation_shift_is_of_the_layers_outputs() -> None:
    model, given = structural(), ids(2)
    with torch.no_grad():
        biased = model(given, output_hidden_states=True).hidden_states
        with model.disable_streams():
            bare = model(given, output_hidden_states=True).hidden_states
    expected = ((biased[1] - bare[1]).norm(dim=-1) / bare[1].norm(dim=-1)).mean()
    found = measure_geometry(model, given, spectra=False).metrics()["geometry.representation_shift@layer0"]
    assert found == pytest.approx(float(expected), rel=1e-5) and found > 1e-3


def test_attention_spectra_equal_those_of_eager_attention() -> None:
    model, given = structural(), ids(2)
    result = measure_geometry(model, given)
    model.host.set_attn_implementation("eager")
    with torch.no_grad():
        for streams in (True, False):
            if streams:
                attentions = model(given, output_attentions=True).attentions
            else:
                with model.disable_streams():
                    attentions = model(given, output_attentions=True).attentions
            for layer, attention_BHTT in enumerate(attentions):
                twins = [reference_spectrum(head_TT) for head_TT in attention_BHTT.flatten(0, 1)]
                for name in SPECTRAL_METRICS:
                    expected = sum(getattr(twin, name) for twin in twins) / len(twins)
                    found = result.layers()[layer].values[name if streams else f"{name}_without"]
                    assert found == pytest.approx(
                        expected, rel=1e-3
                    )  # the twin squares A, and so loses half its digits


def test_spectra_of_known_matrices() -> None:
    flat, one = attention_spectra(torch.eye(6))[0], attention_spectra(torch.ones(6, 6) / 6)[0]
    assert (flat.effective_dimension, flat.participation_ratio) == pytest.approx((6, 6))
    assert flat.spectral_entropy == pytest.approx(math.log(6))
    assert (one.effective_dimension, one.participation_ratio) == pytest.approx((1, 1), abs=1e-4)
    assert one.spectral_entropy == pytest.approx(0, abs=1e-4)
    by_hand = spectrum_of(torch.tensor([3.0, 1.0]))
    assert (by_hand.effective_dimension, by_hand.participation_ratio) == pytest.approx((16 / 10, 100 / 82))
    assert by_hand.spectral_entropy == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    causal = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert attention_spectra(causal)[1].effective_dimension == pytest.approx(1.5**2 / 1.25)


def test_moments_of_batches_equal_the_stacked_matrix() -> None:
    vectors_ND = torch.randn(40, 8) * torch.logspace(0, -3, 8) + 2
    moments = Moments()
    for start in range(0, 40, 7):
        moments.add(vectors_ND[start : start + 7])
    for centred in (True, False):
        assert moments.effective_rank(centred=centred) == reference_effective_rank(vectors_ND, centred=centred)
    assert moments.effective_rank(centred=False) < moments.effective_rank(centred=True)
    values = torch.linalg.eigvalsh(torch.cov(vectors_ND.double().T))
    assert moments.spectrum().participation_ratio == pytest.approx(spectrum_of(values).participation_ratio)


def test_bias_metrics_leave_zero_vectors_out() -> None:
    bias_BTD = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]])
    found = bias_metrics(bias_BTD, torch.ones(1, 3, 2))
    assert found["orthogonality"].isnan().tolist() == [[False, True, False]]
    assert found["temporal_consistency"].isnan().all()


def test_the_model_is_left_as_it_was() -> None:
    model, given = structural(), ids(1)
    model.train()
    streams, implementation = dict(model.wires.streams), model.host.config._attn_implementation
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with torch.no_grad():
        before = model(given).logits
    measure_geometry(model, given)
    assert model.training and model.wires.streams == streams and model.streams_enabled
    assert all(model.wires.streams[name] is stream for name, stream in streams.items())
    assert model.host.config._attn_implementation == implementation
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    with torch.no_grad():
        assert torch.equal(model(given).logits, before)


def test_recording_is_undone_after_an_error() -> None:
    model = structural()
    before = model.wires.streams
    with pytest.raises(ZeroDivisionError), recording_writes(model, lambda write: print(1 / 0)):
        model(ids(1))
    assert model.wires.streams is before


def test_a_stream_in_some_layers_leaves_gaps_in_the_rest() -> None:
    model = keel.attach(gpt2(), keel.StructuralStream(layers=(1,), init="paper"))
    first, second = measure_geometry(model, ids(), spectra=False).layers()
    assert "relative_strength" not in first.values and first.values["representation_shift"] == 0
    assert second.values["relative_strength"] > 0 and second.values["representation_shift"] > 0


@pytest.mark.parametrize(
    ("given", "stream", "words"),
    [
        (torch.zeros(2, 5), None, "expected token ids"),
        (torch.zeros(5, dtype=torch.long), None, "expected token ids"),
        (torch.zeros(2, 1, dtype=torch.long), None, "tokens >= 2"),
        (torch.zeros(2, 5, dtype=torch.long), "structual", "did you mean 'structural'"),
    ],
)
def test_unusable_input_is_named(given: Tensor, stream: str | None, words: str) -> None:
    with pytest.raises(KeelError, match=words):
        measure_geometry(structural(), given, stream=stream)


def test_a_model_without_a_writing_stream_is_refused() -> None:
    with pytest.raises(KeelError, match="no stream of this model writes"):
        measure_geometry(keel.attach(host(), {}), ids())


def test_run_writes_table_and_figures(tmp_path: Path) -> None:
    result = run_geometry(structural(), ids(), tmp_path)
    assert isinstance(result, Geometry)
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["schema"] == "keel.probe/1" and table["metrics"] == pytest.approx(result.metrics())
    assert len(table["rows"][0]["per_sequence"]["relative_strength"]) == 3
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"geometry.{name}.{kind}" for name in ("bias", "spectra") for kind in ("svg", "png")} < names
    assert result.table().row_count == LAYERS


def test_a_window_hides_what_lies_before_it() -> None:
    seen = SeenAttention(
        layer=0, query_BHTK=torch.zeros(1, 1, 6, 2), key_BGTK=torch.zeros(1, 1, 6, 2), mask=None, scaling=1.0, window=2
    )  # fmt: skip
    assert seen.rows(0, 6, 0)[0, 0, 5].tolist() == [0, 0, 0, 0, 0.5, 0.5]
