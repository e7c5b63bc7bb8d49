"""The dynamic state path against the paper's blueprint: ``DynamicStateStream`` equals ``reference_dynamic_state``.

Everything runs in float64, so that a difference of 1e-10 is already an error of the formula and not of rounding.

Shapes: B batch, T tokens, D hidden size, K state size, R features of telemetry.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keel.errors import KeelError
from keel.hosts import HostShape
from keel.streams import stream_from_config
from keel.streams.base import PassInputs
from keel.streams.dynamic_state import DynamicStateStream, recurrence, reference_dynamic_state
from keel.streams.dynamic_state.turbulence import RANK

sys.path.insert(0, str(Path(__file__).parents[1] / "dynamic_state_support"))

from dynamic_state_cases import BATCH, LENGTH, SIZE, WIDTH, given_inputs, healthy, make_stream, run

TOLERANCE: dict[str, float] = {"rtol": 1e-9, "atol": 1e-10}
READINGS: list[dict[str, Any]] = [
    {},
    {"tpc_input": "hidden_state"},
    {"noise": "hidden"},
    {"continuity": "magnitude"},
    {"substrate": "sigmoid"},
    {"update": "broadcast"},
    {"init": "paper"},
    {"turbulence": 3},
    {
        "tpc_input": "hidden_state",
        "noise": "hidden",
        "continuity": "magnitude",
        "update": "broadcast",
        "init": "paper",
        "turbulence": 2,
    },
]
every_reading = pytest.mark.parametrize(
    "fields", READINGS, ids=lambda fields: "-".join(map(str, fields.values())) or "default"
)


def mask(*rows: str) -> Tensor:
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


PADDED = mask("000111111", "111111000", "110001101")  # left, right, interior
STARTS = mask("100010000", "000001000", "101001000")  # one of them on a padded token
BATCHES: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "padded": {"attended_BT": PADDED},
    "documents": {"document_starts_BT": STARTS},
    "padded documents": {"attended_BT": PADDED, "document_starts_BT": STARTS},
    "nothing attended": {"attended_BT": mask("000000000", "111111111", "000000001")},
}


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@every_reading
def test_a_pass_equals_the_blueprint(fields: dict[str, Any], batch: dict[str, Tensor], with_state: bool) -> None:
    stream, (hidden, residual, state) = make_stream(**fields), given_inputs(with_state=with_state)
    written, result = run(stream, hidden, residual, state, **batch)
    given = {**batch, "state": state, "embeddings_BTD": hidden}
    expected, states, signals = reference_dynamic_state(stream, hidden, residual, healthy(), **given)
    attended = batch.get("attended_BT", torch.ones(BATCH, LENGTH, dtype=torch.bool))
    torch.testing.assert_close(written, expected, **TOLERANCE)
    for name, value in states.items():
        torch.testing.assert_close(result.history[name], value, **TOLERANCE)
        torch.testing.assert_close(result.state[name], value[:, -1], **TOLERANCE)
    for name, value in signals.items():
        torch.testing.assert_close(result.signals[name][attended], value[attended], **TOLERANCE)
    weigh = torch.randn(written.shape, generator=torch.Generator().manual_seed(3)).double()
    wanted = [hidden, residual, *state.values(), *stream.parameters()]
    found, right = (
        torch.autograd.grad(
            (out * weigh).sum() + sum((value.sin() * attended[..., None]).sum() for value in pieces),
            wanted,
            allow_unused=True,
        )
        for out, pieces in (
            (written, [result.history["tpc"], result.history["s"], *(result.signals[n][..., None] for n in signals)]),
            (expected, [states["tpc"], states["s"], *(value[..., None] for value in signals.values())]),
        )
    )
    for one, other in zip(found, right, strict=True):
        if one is None or other is None:
            assert one is other is None
        else:
            torch.testing.assert_close(one, other, **TOLERANCE)


@every_reading
def test_pieces_equal_the_whole(fields: dict[str, Any]) -> None:
    stream, (hidden, residual, state) = make_stream(**fields), given_inputs()
    with torch.no_grad():
        whole, expected = run(stream, hidden, residual, state)
        pieces = []
        for here in (slice(0, 4), slice(4, 5), slice(5, LENGTH)):
            written, result = run(stream, hidden[:, here], residual[:, here], state)
            state = result.state
            pieces.append((written, result.signals))
    torch.testing.assert_close(torch.cat([written for written, _ in pieces], 1), whole, **TOLERANCE)
    for name, value in expected.signals.items():
        torch.testing.assert_close(torch.cat([signals[name] for _, signals in pieces], 1), value, **TOLERANCE)


@every_reading
def test_one_row_token_by_token_equals_the_whole(fields: dict[str, Any]) -> None:
    """As in decoding, where a path may take a shorter way through a single token of a single row."""
    stream, (hidden, residual, _) = make_stream(**fields).eval(), given_inputs()
    hidden, residual, state, pieces = hidden[:1], residual[:1], {}, []
    with torch.no_grad():
        whole, expected = run(stream, hidden, residual, {})
        for t in range(LENGTH):
            written, result = run(stream, hidden[:, t : t + 1], residual[:, t : t + 1], state)
            state = result.state
            pieces.append((written, result.signals))
    torch.testing.assert_close(torch.cat([written for written, _ in pieces], 1), whole, **TOLERANCE)
    for name, value in expected.signals.items():
        torch.testing.assert_close(torch.cat([signals[name] for _, signals in pieces], 1), value, **TOLERANCE)


def test_the_two_readings_of_the_substrate_are_one_function() -> None:
    """exp(-softplus(z)) = 1 / (1 + exp(z)) = sigmoid(-z): §7.4 made safe and §10.8 differ in the sign of w alone."""
    (hidden, residual, state), found = given_inputs(), []
    for reading in ("exponential", "sigmoid"):
        found.append(run(make_stream(substrate=reading), hidden, residual, state)[1].signals["substrate"])
    torch.testing.assert_close(*found, **TOLERANCE)
    assert (found[0] < 1).all() and (found[0] > 0.99).all()


def test_attaching_is_bitwise_identity_and_the_gate_opens_it() -> None:
    torch.manual_seed(0)
    stream = DynamicStateStream(state_size=SIZE)
    stream.build(HostShape(hidden_size=WIDTH, num_layers=1))
    stream.init_weights()
    hidden, residual, _ = (x.float() if isinstance(x, Tensor) else x for x in given_inputs())
    written, result = run(stream, hidden, residual, {})
    assert torch.equal(written, hidden)
    with torch.no_grad():
        stream.gate.fill_(1.0)
    assert not torch.equal(run(stream, hidden, residual, {})[0], hidden)
    assert result.state["s"].abs().sum() > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"retention": 1.0}, "below 1"),
        ({"noise_floor": 0.0}, "above 0"),
        ({"state_size": 0}, "at least 1"),
        ({"update": "direction"}, "did you mean 'directional'"),
        ({"retension": 0.5}, "did you mean 'retention'"),
    ],
)
def test_a_wrong_field_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        stream_from_config({"type": "dynamic_state", **fields})


def test_the_steps_run_on_one_thread_and_give_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, steps = [], recurrence._forward_steps
    monkeypatch.setattr(recurrence, "_compiled_for", lambda tensor: None)
    monkeypatch.setattr(recurrence, "_forward_steps", lambda *of: seen.append(torch.get_num_threads()) or steps(*of))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        hidden, residual, state = given_inputs()
        run(make_stream(), hidden, residual, state)[0].sum().backward()
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_turbulence_begins_by_holding_what_is_seen_against_what_was_expected() -> None:
    """With A = B of as many orthonormal rows as the width, a match sums to the inner product of h_{t-1} and the normed embedding."""
    stream = DynamicStateStream(state_size=4, turbulence=2)
    stream.build(HostShape(hidden_size=RANK, num_layers=1))
    stream.init_weights()
    assert torch.equal(stream.turbulence_seen, stream.turbulence_expected)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.zero_()
        for matrix in (stream.turbulence_expected, stream.turbulence_seen):
            matrix.copy_(torch.linalg.qr(torch.randn(RANK, RANK, generator=torch.Generator().manual_seed(1)))[0])
        stream.turbulence_weight[0, -RANK:] = (
            1e-3  # the first feature is the sum of the match, small enough for tanh to be linear
        )
        stream.turbulence_read[1, 0] = 1e3  # and N's logit reads it
    hidden, embeddings = torch.randn(2, 1, 5, RANK, generator=torch.Generator().manual_seed(2)).unbind(0)
    flow = stream.open(PassInputs(embeddings_BTD=embeddings, collect_signals=True), {})
    with torch.no_grad():
        stream.write("final_norm_input", -1, torch.zeros_like(hidden), flow)
        stream.write("final_hidden", -1, hidden, flow)
        noise_BT = stream.close(flow).signals["noise"]
    normed = embeddings / embeddings.square().mean(-1, keepdim=True).sqrt()
    logit_BT = F.pad((hidden[:, :-1] * normed[:, 1:]).sum(-1), (1, 0))  # nothing was expected before the first token
    torch.testing.assert_close(noise_BT, F.softplus(logit_BT) + 0.1, rtol=1e-3, atol=1e-3)
