"""The structural stream against the formulas: its fast path equals ``reference_states`` and ``reference_bias``.

Everything runs in float64, so that a difference of 1e-10 is already an error of the formula and not of rounding.

Shapes: B batch, T tokens, D hidden size, G recurrences, S sites.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from keel.errors import KeelError
from keel.hosts import HostShape
from keel.streams.base import PassInputs
from keel.streams.structural import (
    StructuralFlow,
    StructuralStream,
    reference_bias,
    reference_fusion,
    reference_states,
)

WIDTH, LAYERS, BATCH, LENGTH = 6, 2, 3, 9
SHAPE = HostShape(hidden_size=WIDTH, num_layers=LAYERS)
TOLERANCE: dict[str, float] = {"rtol": 1e-10, "atol": 1e-10}

SHAPES_OF_A_STREAM = [
    {"inject": inject, "cell": cell, "share": share, "gate": gate, "init": init}
    for inject, cell, share, gate, init in itertools.product(
        ("bias", "fusion"),
        ("gru", "diagonal", "scan"),
        ("model", "layer"),
        ("scalar", "channel", "none"),
        ("identity", "paper"),
    )
]
every_stream = pytest.mark.parametrize("fields", SHAPES_OF_A_STREAM, ids=lambda fields: "-".join(fields.values()))


class Batch(NamedTuple):
    """What goes into a pass."""

    attended_BT: Tensor | None = None
    document_starts_BT: Tensor | None = None
    state_BGD: Tensor | None = None


def _mask(*rows: str) -> Tensor:
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


PADDED = _mask("000111111", "111111000", "110001101")  # left, right, interior
STARTS = _mask("100010000", "000001000", "101001000")  # one of them on a padded token
BATCHES = {
    "plain": Batch(),
    "padded": Batch(attended_BT=PADDED),
    "documents": Batch(document_starts_BT=STARTS),
    "padded documents": Batch(attended_BT=PADDED, document_starts_BT=STARTS),
    "nothing attended": Batch(attended_BT=_mask("000000000", "111111111", "000000001")),
}
every_batch = pytest.mark.parametrize("batch_name", BATCHES)


def _stream(**fields: Any) -> StructuralStream:
    stream = StructuralStream(**fields)
    stream.build(SHAPE)
    stream.init_weights()
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return stream.double()


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _embeddings() -> Tensor:
    return _normal(BATCH, LENGTH, WIDTH, seed=1).requires_grad_()


def _hidden(index: int) -> Tensor:
    return _normal(BATCH, LENGTH, WIDTH, seed=10 + index).requires_grad_()


def _previous(stream: StructuralStream) -> Tensor:
    return _normal(BATCH, stream.weight_input.shape[0], WIDTH, seed=2).requires_grad_()


def _open(stream: StructuralStream, embeddings_BTD: Tensor, batch: Batch, **options: bool) -> StructuralFlow:
    inputs = PassInputs(
        embeddings_BTD=embeddings_BTD,
        attended_BT=batch.attended_BT,
        document_starts_BT=batch.document_starts_BT,
        **options,
    )
    return stream.open(inputs, {} if batch.state_BGD is None else {"g": batch.state_BGD})


def _reference_states(stream: StructuralStream, embeddings_BTD: Tensor, batch: Batch) -> Tensor:
    return reference_states(stream, embeddings_BTD, batch.attended_BT, batch.document_starts_BT, batch.state_BGD)


def _reference_write(
    stream: StructuralStream, site: str, layer: int, hidden_BTD: Tensor, states_GBTD: Tensor
) -> Tensor:
    if stream.config.inject == "fusion":
        return reference_fusion(stream, layer, hidden_BTD, states_GBTD)
    return reference_bias(stream, site, layer, hidden_BTD, states_GBTD)


def _gradients(outputs: list[Tensor], stream: StructuralStream, others: list[Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of the outputs: in every parameter of the stream, then in the others."""
    total = sum((_normal(*output.shape, seed=20 + i) * output).sum() for i, output in enumerate(outputs))
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, [*stream.parameters(), *others]))


def _same(found: Tensor | list[Tensor], expected: Tensor | list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("carried", [False, True])
@every_batch
@every_stream
def test_values_states_and_every_gradient_equal_the_references(
    fields: dict[str, str], batch_name: str, carried: bool
) -> None:
    stream, batch = _stream(**fields, temperature=(4.0, 2.0, 10)), BATCHES[batch_name]
    stream.step.fill_(4)
    previous = _previous(stream)
    if carried:
        batch = batch._replace(state_BGD=previous)
    embeddings, hidden = _embeddings(), [_hidden(index) for index in range(len(stream.write_sites()))]
    others = [embeddings, *hidden, *([previous] if carried else [])]

    flow = _open(stream, embeddings, batch, keep_history=True)
    fast = [stream.write(*pair, hidden[index], flow) for index, pair in enumerate(stream.write_sites())]
    result = stream.close(flow)

    states_GBTD = _reference_states(stream, embeddings, batch)
    slow = [
        _reference_write(stream, *pair, hidden[index], states_GBTD) for index, pair in enumerate(stream.write_sites())
    ]
    _same(fast, slow)
    _same(result.state["g"], states_GBTD[:, :, -1].transpose(0, 1))
    _same(result.history["g"], states_GBTD.permute(1, 2, 0, 3))
    _same(
        _gradients([*fast, result.history["g"]], stream, others),
        _gradients([*slow, states_GBTD.permute(1, 2, 0, 3)], stream, others),
    )
    assert all((found - before).abs().max() > 1e-2 for found, before in zip(fast, hidden, strict=True))


@every_stream
def test_what_stands_at_padding_has_no_influence(fields: dict[str, str]) -> None:
    stream, batch = _stream(**fields), BATCHES["padded"]
    embeddings = _embeddings()
    changed = torch.where(PADDED[..., None], embeddings, 7.0)
    first, second = (_open(stream, given, batch).final_GBD for given in (embeddings, changed))
    assert torch.equal(first, second)
    assert not torch.allclose(first, _open(stream, changed, Batch()).final_GBD)


@every_stream
def test_a_state_is_carried_from_piece_to_piece(fields: dict[str, str]) -> None:
    stream, embeddings = _stream(**fields), _embeddings()
    whole = _open(stream, embeddings, Batch()).states_GBTD
    pieces, state = [], None
    for piece in embeddings.split([4, 1, 3, 1], 1):
        flow = _open(stream, piece, Batch(state_BGD=state))
        pieces.append(flow.states_GBTD)
        state = stream.close(flow).state["g"]
    _same(torch.cat(pieces, 2), whole)
    assert not torch.allclose(_open(stream, embeddings[:, 4:], Batch()).states_GBTD, whole[:, :, 4:])


@pytest.mark.parametrize(
    ("temperature", "step", "expected"),
    [
        ((4.0, 2.0, 10), 0, 4.0),
        ((4.0, 2.0, 10), 5, 3.0),
        ((4.0, 2.0, 10), 10, 2.0),
        ((4.0, 2.0, 10), 99, 2.0),
        ((1.0, 3.0, 4), 1, 1.5),
        ((2.5, 2.5, 7), 3, 2.5),
        ((4.0, 2.0, 0), 0, 2.0),
    ],
)
@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_temperature_follows_its_schedule_into_the_gate(
    gate: str, temperature: tuple[float, float, int], step: int, expected: float
) -> None:
    scheduled, fixed = (
        _stream(gate=gate, temperature=temperature),
        _stream(gate=gate, temperature=(expected, expected, 0)),
    )
    fixed.load_state_dict(scheduled.state_dict())
    scheduled.step.fill_(step)
    assert float(scheduled.temperature()) == pytest.approx(expected, abs=1e-6)
    found, same, hotter = (
        stream.write("mlp_norm_input", 1, _hidden(0), _open(stream, _embeddings(), Batch()))
        for stream in (scheduled, fixed, _with_temperature(scheduled, 2 * expected))
    )
    # The schedule's temperature is computed in float32, so it differs in the eighth digit.
    torch.testing.assert_close(found, same, rtol=1e-6, atol=1e-6)
    assert (found - hotter).abs().max() > 1e-3


def _with_temperature(stream: StructuralStream, value: float) -> StructuralStream:
    other = _stream(gate=stream.config.gate, temperature=(value, value, 0))
    other.load_state_dict(stream.state_dict())
    return other


@pytest.mark.parametrize(("step", "share"), [(0, 0.0), (3, 0.375), (8, 1.0), (50, 1.0)])
@every_stream
def test_warm_up_scales_the_bias(fields: dict[str, str], step: int, share: float) -> None:
    stream, hidden = _stream(**fields, gate_warmup_steps=8), _hidden(0)
    site = stream.write_sites()[0]
    stream.step.fill_(step)
    written = stream.write(*site, hidden, _open(stream, _embeddings(), Batch()))
    full = _stream(**fields)
    full.load_state_dict(stream.state_dict())
    bias = full.write(*site, hidden, _open(full, _embeddings(), Batch())) - hidden
    _same(written - hidden, share * bias)
    _same(written, _reference_write(stream, *site, hidden, _reference_states(stream, _embeddings(), Batch())))
    assert bias.abs().max() > 1e-2


@pytest.mark.parametrize("gate", ["scalar", "channel"])
@pytest.mark.parametrize("batch_name", ["plain", "padded"])
def test_the_confidence_penalty_is_its_formula(gate: str, batch_name: str) -> None:
    """Eq. 8: minus the mean over sites (and channels) of alpha (1 - alpha), summed over attended tokens."""
    stream, batch = _stream(gate=gate, confidence_penalty=0.25), BATCHES[batch_name]
    flow = _open(stream, _embeddings(), batch, collect_signals=True)
    states = _reference_states(stream, _embeddings(), batch)
    alphas = []
    for index, pair in enumerate(stream.write_sites()):
        stream.write(*pair, _hidden(index), flow)
        alphas.append(_alpha(stream, index, _hidden(index), states[0]))
    result = stream.close(flow)
    loss = result.losses["confidence"]
    spread = torch.stack([(alpha * (1 - alpha)).mean(-1) for alpha in alphas]).mean(0)
    attended = torch.ones(BATCH, LENGTH, dtype=torch.bool) if batch.attended_BT is None else batch.attended_BT
    assert loss.weight == 0.25
    torch.testing.assert_close(loss.token_sum.double(), -spread[attended].sum(), rtol=1e-6, atol=1e-6)
    assert loss.token_sum < -1.0
    signal = torch.stack([alpha.mean(-1) for alpha in alphas], -1)
    _same(result.signals["gate"], signal)
    assert list(_open(stream, _embeddings(), batch).alphas) == []


def _alpha(stream: StructuralStream, index: int, hidden_BTD: Tensor, g_BTD: Tensor) -> Tensor:
    normed = (hidden_BTD - hidden_BTD.mean(-1, keepdim=True)) / (
        hidden_BTD.var(-1, keepdim=True, correction=0) + 1e-5
    ).sqrt()
    logit = g_BTD @ stream.gate_state[index].T + normed @ stream.gate_hidden[index].T + stream.gate_bias[index]
    return 1 / (1 + torch.exp(-logit))


def test_without_weight_there_is_no_penalty_and_unasked_no_signal_or_history() -> None:
    stream = _stream()
    flow = _open(stream, _embeddings(), Batch())
    stream.write("mlp_norm_input", 0, _hidden(0), flow)
    result = stream.close(flow)
    assert result.losses == result.signals == result.history == {}
    assert not flow.alphas  # kept gates are memory


def test_checkpointed_layers_are_not_counted_twice() -> None:
    stream = _stream(confidence_penalty=0.5)
    flow = _open(stream, _embeddings(), Batch())
    again = flow.replay()
    for _ in range(2):
        stream.write("mlp_norm_input", 0, _hidden(0), again)
    assert not flow.alphas and again.alphas and again.states_GBTD is flow.states_GBTD


@pytest.mark.parametrize(
    ("fields", "sites"),
    [
        ({}, [("attention_norm_input", 0), ("mlp_norm_input", 0), ("attention_norm_input", 1), ("mlp_norm_input", 1)]),
        ({"layers": (1,)}, [("attention_norm_input", 1), ("mlp_norm_input", 1)]),
        ({"norm_sites": ("mlp",)}, [("mlp_norm_input", 0), ("mlp_norm_input", 1)]),
        ({"inject": "fusion"}, [("attention_qk", 0), ("attention_qk", 1)]),
        ({"layers": (1,), "norm_sites": ("attention",), "share": "layer"}, [("attention_norm_input", 1)]),
    ],
)
def test_layers_and_norm_sites_choose_where_it_writes(fields: dict[str, Any], sites: list[tuple[str, int]]) -> None:
    stream = _stream(**fields)
    assert stream.write_sites() == sites
    assert stream.gate_state.shape[0] == len(sites)
    assert stream.weight_input.shape[0] == (1 if fields.get("share") != "layer" else len(fields["layers"]))
    states = _reference_states(stream, _embeddings(), Batch())
    for pair in sites:
        flow = _open(stream, _embeddings(), Batch())
        _same(stream.write(*pair, _hidden(0), flow), _reference_write(stream, *pair, _hidden(0), states))


def test_identity_starts_as_no_change_and_paper_does_not() -> None:
    for inject, init in itertools.product(("bias", "fusion"), ("identity", "paper")):
        stream = StructuralStream(inject=inject, init=init)
        stream.build(SHAPE)
        stream.init_weights()
        hidden = _hidden(0).float()
        written = stream.write(*stream.write_sites()[0], hidden, _open(stream, _embeddings().float(), Batch()))
        assert torch.equal(written, hidden) is (init == "identity")


def test_initialisation_covers_every_parameter_and_the_step() -> None:
    for fields in SHAPES_OF_A_STREAM:
        stream = StructuralStream(**fields)
        stream.build(SHAPE)
        for tensor in (*stream.parameters(), stream.step):
            tensor.data.fill_(77)
        stream.init_weights()
        assert all(not (parameter == 77).any() for parameter in stream.parameters()), fields
        assert stream.step == 0


def test_the_scan_starts_with_time_scales_from_the_present_to_256_tokens() -> None:
    stream = StructuralStream(cell="scan")
    stream.build(HostShape(hidden_size=64, num_layers=1))
    stream.init_weights()
    time_scales = 1 / torch.sigmoid(stream.bias_input[0, :64].detach())
    assert time_scales.min() == pytest.approx(2**0.5, rel=1e-4)
    assert time_scales.max() == pytest.approx(256, rel=1e-4)
    assert (stream.bias_input[0, 64:] == 0).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cel": "gru"}, "unknown field 'cel'; did you mean 'cell'"),
        ({"cell": "grut"}, "cell='grut'; did you mean 'gru'"),
        ({"share": "layers"}, "share='layers'; did you mean 'layer'"),
        ({"inject": "fuse"}, "inject='fuse'; did you mean 'fusion'"),
        ({"inject": "fusion", "norm_sites": ("mlp",)}, "leave norm_sites out"),
        ({"gate": 1}, "gate=1; valid: channel, none, scalar"),
        ({"gate": "none", "confidence_penalty": 0.1}, "no alpha to keep from saturating; leave it out"),
        ({"init": "zero"}, "init='zero'; valid: identity, paper"),
        ({"norm_sites": ()}, r"norm_sites=\(\); valid: attention, mlp"),
        ({"norm_sites": ("mlp", "atention")}, "did you mean 'attention'"),
        ({"confidence_penalty": -0.1}, ">= 0"),
        ({"gate_warmup_steps": -1}, ">= 0"),
        ({"temperature": (0.0, 1.0, 5)}, "temperature"),
        ({"temperature": (1.0, 1.0)}, "temperature"),
    ],
)
def test_a_wrong_option_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        StructuralStream(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", [(2,), (-1,), ()])
def test_a_layer_that_the_host_lacks_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(KeelError, match="the host has layers 0 to 1"):
        StructuralStream(layers=layers).build(SHAPE)
