"""Fault injection: every failure mode of §12 is detected in time, stays bounded, ends, and is nothing to the other rows.

Shapes: B batch, T tokens, D hidden size, K state size, F failure modes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.errors import KeelError
from keel.streams.base import PassInputs, PassResult
from keel.streams.dynamic_state import (
    FAILURES,
    DynamicStateStream,
    Mode,
    SafeguardConfig,
    TraceTelemetry,
    reference_governor,
    safeguards,
)
from keel.streams.dynamic_state.config import DynamicStateConfig
from keel.streams.dynamic_state.dynamics import StepWeights, TokenParts
from keel.streams.dynamic_state.governor import MEASURES, MEMORY_SIZE, SIZES, Memory, detect, detectors, govern, mode_of
from keel.streams.dynamic_state.safeguards import NUDGE, Guarded, guarded_step

sys.path.insert(0, str(Path(__file__).parents[1] / "dynamic_state_support"))

from dynamic_state_cases import SIZE, UNTRAINED, WIDTH, given_inputs, make_stream, run

LENGTH, BEGIN, END, ROW = 100, 20, 50, 1  # the fault is in one row, from BEGIN up to END
PATIENCE, COOLDOWN, FLOOR = 4, 6, 0.1
LIMITS = {
    **UNTRAINED, "patience": PATIENCE, "cooldown": COOLDOWN, "noise_most": 20.0, "change_most": 2.0, "change_least": 1e-4,
}  # fmt: skip


def steady_stream(**limits: Any) -> DynamicStateStream:
    """A stream whose signals are healthy for the steady input of ``steady_inputs``, written by hand.

    The TPC follows the hidden state (update gate half open, no memory of its own otherwise), the query of C is the hidden state
    too, I reads the first channel of the hidden state, and N the norm of the residual.
    """
    stream = DynamicStateStream(state_size=SIZE, retention=0.5, noise_floor=FLOOR, safeguards={**LIMITS, **limits})
    stream.build(_shape())
    stream.init_weights()
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.zero_()
        rows, eye = stream.hidden_rows, torch.eye(SIZE, WIDTH)
        stream.hidden_weight[rows["gates"]][2 * SIZE :] = eye  # the new value of the TPC is tanh(h)
        stream.hidden_weight[rows["alignment"]] = eye
        stream.hidden_weight[rows["coherence"], WIDTH - 1] = 10.0
        stream.noise_weight.fill_(1.0)
        stream.direction.copy_(torch.eye(SIZE))
        stream.integration.copy_(torch.randn(WIDTH, SIZE, generator=torch.Generator().manual_seed(5)))
        stream.gate.fill_(1.0)
    return stream.double().eval()


def _shape() -> Any:
    from keel.hosts import HostShape

    return HostShape(hidden_size=WIDTH, num_layers=1)


def steady_inputs() -> tuple[Tensor, Tensor]:
    """Hidden states [3, T, D] that keep one direction with a little noise, and residuals of norm about 1."""
    generator = torch.Generator().manual_seed(2)
    noise_BTD = 0.1 * torch.randn(3, LENGTH, WIDTH, generator=generator)
    hidden_BTD = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0]) + noise_BTD
    return hidden_BTD.double(), (hidden_BTD * 0.4).double()


@dataclass(frozen=True)
class Fault:
    """A fault of ``FAILURES``, what makes it, after how many tokens it is detected, and whether it leads to safe mode."""

    name: str
    inject: Callable[[DynamicStateStream, Tensor, Tensor], None]
    within: int = 1
    safe: bool = True


def _substrate(stream: DynamicStateStream, hidden: Tensor, residual: Tensor) -> None:
    trace_NR = torch.zeros(LENGTH, 6)
    trace_NR[BEGIN:END, 0] = 1.0  # memory is full
    stream.telemetry = _RowTrace(trace_NR)


class _RowTrace(TraceTelemetry):
    """A trace that one row of the batch sees, the others a healthy machine."""

    def read(self, positions_BT: Tensor | None) -> Tensor:
        features_BTR = super().read(positions_BT).clone()
        features_BTR[torch.arange(len(features_BTR)) != ROW] = 0.0
        return features_BTR


def _flipping(stream: DynamicStateStream, hidden: Tensor, residual: Tensor) -> None:
    hidden[ROW, BEGIN:END:2, :SIZE] *= -6.0  # the TPC jumps from one side to the other
    hidden[ROW, BEGIN + 1 : END : 2, :SIZE] *= 6.0


def _incoherent(stream: DynamicStateStream, hidden: Tensor, residual: Tensor) -> None:
    hidden[ROW, BEGIN:END, WIDTH - 1] = -3.0


def _noisy(stream: DynamicStateStream, hidden: Tensor, residual: Tensor) -> None:
    residual[ROW, BEGIN:END] *= 100.0


def _misaligned(stream: DynamicStateStream, hidden: Tensor, residual: Tensor) -> None:
    with torch.no_grad():  # the last channel but one of h turns the query of C around
        stream.hidden_weight[stream.hidden_rows["alignment"], WIDTH - 2] = torch.tensor([-9.0, 9.0, -9.0, 9.0]).double()
    hidden[..., WIDTH - 2] = 0.0
    hidden[ROW, BEGIN:END, WIDTH - 2] = 1.0


def _split(stream: DynamicStateStream, hidden: Tensor, residual: Tensor) -> None:
    _misaligned(stream, hidden, residual)
    _flipping(stream, hidden, residual)
    hidden[ROW, BEGIN:END:2, WIDTH - 2] = -7.0
    hidden[ROW, BEGIN + 1 : END : 2, WIDTH - 2] = 7.0


def _standstill(stream: DynamicStateStream, hidden: Tensor, residual: Tensor) -> None:
    for each in (hidden, residual):
        each[ROW, BEGIN:END] = each[ROW, BEGIN : BEGIN + 1]


FAULTS = [
    Fault("substrate_collapse", _substrate),
    Fault("temporal_fragmentation", _flipping, within=2, safe=False),
    Fault("coherence_collapse", _incoherent),
    Fault("noise_rampancy", _noisy),
    Fault("alignment_break", _misaligned, within=PATIENCE, safe=False),
    Fault("identity_split", _split, within=PATIENCE + 2),
    # The state notices late that the input stands still: TPC and s both halve what is left to go.
    Fault("fixed_point_collapse", _standstill, within=2 * PATIENCE + 16, safe=False),
]


def _pass(stream: DynamicStateStream, hidden: Tensor, residual: Tensor) -> tuple[Tensor, PassResult]:
    with torch.no_grad():
        return run(stream, hidden, residual, {})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_detected_bounded_and_recovered_from(fault: Fault) -> None:
    stream, (hidden, residual) = steady_stream(), steady_inputs()
    _, calm = _pass(stream, hidden, residual)
    clean_hidden, clean_residual = hidden.clone(), residual.clone()
    fault.inject(stream, hidden, residual)
    written, result = _pass(stream, hidden, residual)
    index = FAILURES.index(fault.name)
    failures_TF, modes_T = result.signals["failures"][ROW], result.signals["governor"][ROW]
    assert not calm.signals["failures"].any() and not calm.signals["governor"].any()
    # In time, and not before it begins.
    assert not failures_TF[:BEGIN, index].any()
    assert failures_TF[BEGIN : BEGIN + fault.within, index].any()
    # Bounded.
    assert result.history["s"].isfinite().all()
    assert result.history["s"].norm(dim=-1).max() <= 1 / FLOOR + NUDGE
    # In safe mode and cool-down what the head reads is the host's, bit for bit, and the state stands still.
    frozen_T = modes_T > 0
    assert frozen_T.any() == fault.safe
    assert torch.equal(written[ROW, frozen_T], hidden[ROW, frozen_T])
    assert (written[ROW, ~frozen_T] != hidden[ROW, ~frozen_T]).any(-1).all()
    for name in ("tpc", "s"):
        states_TK = result.history[name][ROW]
        assert torch.equal(states_TK[1:][frozen_T[1:]], states_TK[:-1][frozen_T[1:]])
    # Recovered: active again within cool-down and the few tokens in which instability fades, and nothing is detected any more.
    after = END + COOLDOWN + 6
    assert (modes_T[after:] == Mode.ACTIVE).all() and not failures_TF[after:, index].any()
    # Other rows: untouched, bit for bit.
    if fault.name not in ("alignment_break", "identity_split"):  # whose injection changes the weights
        others = [row for row in range(3) if row != ROW]
        straight, _ = _pass(stream, clean_hidden, clean_residual)
        assert torch.equal(written[others], straight[others])
    assert not result.signals["governor"][[0, 2]].any()


def test_an_explosion_in_memory_is_damped_and_falls_back_to_the_baseline() -> None:
    """§12.7: a state that something made a thousand times too long is halved, then taken out, and comes back bounded."""
    stream, (hidden, residual) = steady_stream(), steady_inputs()
    with torch.no_grad():
        _, first = run(stream, hidden[:, :BEGIN], residual[:, :BEGIN], {})
        broken = {name: value.clone() for name, value in first.state.items()}
        broken["s"][ROW] *= 1e4
        written, result = run(stream, hidden[:, BEGIN:], residual[:, BEGIN:], broken)
        expected, straight = run(stream, hidden[:, BEGIN:], residual[:, BEGIN:], first.state)
    lengths_T = result.history["s"][ROW].norm(dim=-1)
    assert result.signals["failures"][ROW, 0, FAILURES.index("feedback_explosion")] == 1
    assert lengths_T[0] < 0.5 * broken["s"][ROW].norm() and (lengths_T[4:] < 1 / FLOOR).all()
    assert (result.signals["governor"][ROW, 4 : 4 + COOLDOWN] > 0).all()
    assert (result.signals["governor"][ROW, COOLDOWN + 10 :] == Mode.ACTIVE).all()
    torch.testing.assert_close(lengths_T[-1], straight.history["s"][ROW, -1].norm(), rtol=0.1, atol=0.0)
    assert torch.equal(written[[0, 2]], expected[[0, 2]])


def test_numbers_that_are_none_never_enter_the_state() -> None:
    stream, (hidden, residual) = steady_stream(), steady_inputs()
    residual[ROW, BEGIN:END:3] = torch.nan
    hidden[ROW, BEGIN + 1 : END : 3] = torch.inf
    _, result = _pass(stream, hidden, residual)
    assert all(value.isfinite().all() for name, value in result.history.items() if name != "governor")
    assert (result.signals["governor"][ROW, BEGIN:END] > 0).all()
    assert (result.signals["governor"][ROW, END + COOLDOWN + 6 :] == Mode.ACTIVE).all()


def test_a_state_that_stands_still_is_nudged() -> None:
    """§12.8: with the input constant for ever the state converges without safeguards, and keeps moving under them."""
    hidden, residual = (x[:, :1].expand(-1, 400, -1).clone() for x in steady_inputs())
    moved = {}
    for name, least in (("left alone", 0.0), ("nudged", 1e-4)):
        _, result = _pass(steady_stream(change_least=least), hidden, residual)
        moved[name] = (result.history["s"][:, 1:] - result.history["s"][:, :-1]).norm(dim=-1)[:, -60:]
    assert moved["left alone"].max() < 1e-8
    assert (moved["nudged"].max(-1).values > 1e-4).all()


def test_what_noise_slows_moves_less() -> None:
    """§12.5: under noise the uptake is halved from the next token on, so the state keeps more of what it was."""
    hidden, residual = steady_inputs()
    residual[:, BEGIN:] *= 30.0  # N about 30, beyond 20, with severity switched off
    _, guarded = _pass(steady_stream(instability_most=2.5, change_least=0.0), hidden, residual)
    _, free = _pass(steady_stream(instability_most=2.5, change_least=0.0, noise_most=1e6), hidden, residual)
    kept = [result.history["s"][:, BEGIN + 10].norm(dim=-1) for result in (guarded, free)]
    assert (kept[0] > 1.2 * kept[1]).all()


@pytest.mark.parametrize("seed", range(6))
def test_the_governor_equals_its_twin(seed: int) -> None:
    """Random walks of the measures over all thresholds, with holes that are not numbers."""
    config, rows, length = SafeguardConfig(patience=3, cooldown=4, noise_most=1.0, change_least=0.3), 5, 120
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(rows, length, len(MEASURES), generator=generator, dtype=torch.float64)
    measures_BTM = 0.5 + 0.12 * seed * steps.cumsum(1).sin()
    measures_BTM[torch.rand(rows, length, generator=generator) < 0.02] = torch.nan
    found = detectors(config, torch.float64, torch.device("cpu"))
    counts, instability, timer = (torch.zeros(rows, n, dtype=torch.float64) for n in (len(FAILURES), 1, 1))
    got = []
    for t in range(length):
        _, counts, detected = detect(found, measures_BTM[:, t], counts)
        instability, timer = govern(config, found, detected, instability, timer)
        got.append((mode_of(config, timer), detected))
    seen = set()
    for row in range(rows):
        tokens = [dict(zip(MEASURES, values.tolist(), strict=True)) for values in measures_BTM[row]]
        for t, (mode, failing) in enumerate(reference_governor(config, tokens)):
            assert Mode(int(got[t][0][row])) is mode, (row, t)
            assert {name for name, flag in zip(FAILURES, got[t][1][row], strict=True) if flag} == failing, (row, t)
            seen.add(mode)
    assert Mode.SAFE in seen and Mode.COOL_DOWN in seen


def test_pieces_with_padding_and_documents_equal_rows_alone() -> None:
    """The governor's memory lies in the cache: a row goes through safe mode over any boundary between passes."""
    stream, (hidden, residual) = steady_stream(), steady_inputs()
    _incoherent(stream, hidden, residual)
    whole_written, whole = _pass(stream, hidden, residual)
    state: dict[str, Tensor] = {}
    pieces = []
    with torch.no_grad():
        for begin, end in ((0, 22), (22, 23), (23, 24), (24, 43), (43, LENGTH)):
            written, result = run(stream, hidden[:, begin:end], residual[:, begin:end], state)
            state = result.state
            pieces.append(written)
        torch.testing.assert_close(torch.cat(pieces, 1), whole_written, rtol=1e-10, atol=1e-12)
        for name, value in whole.state.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)
        attended_BT = torch.ones(3, LENGTH + 4, dtype=torch.bool)
        attended_BT[:, 30:34] = False
        padded = [torch.cat([x[:, :30], torch.randn(3, 4, WIDTH).double(), x[:, 30:]], 1) for x in (hidden, residual)]
        written, result = run(stream, *padded, {}, attended_BT=attended_BT)
        torch.testing.assert_close(written[attended_BT].view_as(hidden), whole_written, rtol=1e-10, atol=1e-12)
        starts_BT = torch.zeros(3, LENGTH, dtype=torch.bool)
        starts_BT[:, 25] = True  # amid the fault: a new document begins with a clean record
        written, _ = run(stream, hidden, residual, {}, document_starts_BT=starts_BT)
        alone, _ = run(stream, hidden[:, 25:], residual[:, 25:], {})
        torch.testing.assert_close(written[:, 25:], alone, rtol=1e-10, atol=1e-12)


def test_without_failures_safeguards_change_nothing_and_in_training_they_are_off() -> None:
    hidden, residual = steady_inputs()
    guarded, plain = steady_stream(), steady_stream()
    object.__setattr__(plain.config, "safeguards", None)
    torch.testing.assert_close(_pass(guarded, hidden, residual)[0], _pass(plain, hidden, residual)[0])
    _incoherent(guarded, hidden, residual)
    assert not torch.allclose(_pass(guarded, hidden, residual)[0], _pass(plain, hidden, residual)[0])
    inputs = PassInputs(embeddings_BTD=hidden)
    outputs = []
    for stream in (guarded.train(), plain):
        flow = stream.open(inputs, {})
        stream.write("final_norm_input", -1, residual, flow)
        outputs.append(stream.write("final_hidden", -1, hidden, flow))
    assert torch.equal(*outputs)


def test_gradients_flow_through_a_guarded_pass_outside_training() -> None:
    stream, (hidden, residual, _) = make_stream(safeguards=UNTRAINED).eval(), given_inputs()
    run(stream, hidden, residual, {})[0].square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in stream.parameters())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"patience": 0}, "at least one token"),
        ({"change_least": 2.0}, "least < most"),
        ({"instability_most": 3.0}, "at most 2.5"),
        ({"substrate_leest": 0.1}, "did you mean 'substrate_least'"),
    ],
)
def test_wrong_thresholds_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        DynamicStateStream(safeguards=limits)


@pytest.mark.parametrize("release", [safeguards.RELEASE, 0.0])
def test_a_temporal_core_that_keeps_itself_out_of_alignment_is_let_go_of(
    release: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update gate all but shut, the TPC stands at one end, the query of C at the other: without a release C stays 0 for good."""
    monkeypatch.setattr(safeguards, "RELEASE", release)
    config = DynamicStateConfig(state_size=SIZE, safeguards={**LIMITS, "patience": PATIENCE})
    ones, zeros, nothing = torch.ones(1, SIZE), torch.zeros(1, SIZE), torch.zeros(3 * SIZE, SIZE)
    gates = torch.cat([zeros, 6 * ones, ones], -1)  # reset, update, new: the new value of the TPC is tanh(1)
    one = torch.ones(1, 1)
    parts = TokenParts(gates, ones * SIZE**-0.5, 5 * one, one, one)
    weights = StepWeights(nothing, nothing, torch.zeros(3 * SIZE), torch.zeros(SIZE), torch.eye(SIZE))
    before = Guarded(-0.9 * ones, zeros, zeros, torch.zeros(1, MEMORY_SIZE))
    detected = []
    for _ in range(60):
        before = guarded_step(config, parts, weights, before)
        detected.append(bool(Memory(*before.memory_BQ.split(SIZES, -1)).detected[0, FAILURES.index("alignment_break")]))
    assert detected.index(True) == PATIENCE - 1
    assert any(detected[PATIENCE + 16 :]) == (release == 0.0)
    assert bool((before.tpc_BK > 0).all()) == (release > 0.0)
