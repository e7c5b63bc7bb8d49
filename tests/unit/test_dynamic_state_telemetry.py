"""Telemetry of the substrate: what repeats repeats exactly, what is live costs decoding nothing.

Shapes: B batch, T tokens, N samples, R features.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from keel.errors import KeelError
from keel.streams.dynamic_state import (
    ConstantTelemetry,
    Disturbance,
    LiveTelemetry,
    TraceTelemetry,
    reference_dynamic_state,
    simulated_trace,
    telemetry,
)
from keel.streams.dynamic_state.telemetry import FEATURES, _open_gpu

sys.path.insert(0, str(Path(__file__).parents[1] / "dynamic_state_support"))

from dynamic_state_cases import LENGTH, given_inputs, make_stream, run

TOLERANCE: dict[str, float] = {"rtol": 1e-6, "atol": 1e-7}  # a trace is kept in float32
THROTTLED = [Disturbance(kind="throttling", start=3, length=3, recovery=1.0)]


def test_a_trace_moves_the_state_as_the_blueprint_says() -> None:
    trace_NR = simulated_trace(LENGTH, THROTTLED, seed=1)
    hidden, residual, _ = given_inputs()
    stream = make_stream()
    healthy = run(stream, hidden, residual, {})[1]
    stream.telemetry = TraceTelemetry(trace_NR)
    found = run(stream, hidden, residual, {})[1]
    _, states, signals = reference_dynamic_state(stream, hidden, residual, trace_NR.double().expand(3, -1, -1))
    torch.testing.assert_close(found.history["s"], states["s"], **TOLERANCE)
    torch.testing.assert_close(found.signals["substrate"], signals["substrate"], **TOLERANCE)
    assert (found.signals["substrate"][:, 4] < 0.01).all()  # degraded …
    assert (found.signals["substrate"][:, -1] > 0.3).all()  # … and recovering
    assert (found.history["s"][:, 4].norm(dim=-1) < 0.1 * healthy.history["s"][:, 4].norm(dim=-1)).all()


def test_a_trace_follows_the_tokens_of_a_row_through_padding_and_pieces() -> None:
    stream, (hidden, residual, _) = make_stream(), given_inputs()
    stream.telemetry = TraceTelemetry(simulated_trace(LENGTH, THROTTLED, seed=1))
    whole = run(stream, hidden, residual, {})[1]
    state, pieces = {}, []
    for here in (slice(0, 4), slice(4, 5), slice(5, LENGTH)):
        result = run(stream, hidden[:, here], residual[:, here], state)[1]
        state = result.state
        pieces.append(result.signals["substrate"])
    torch.testing.assert_close(torch.cat(pieces, 1), whole.signals["substrate"])
    attended_BT = torch.ones(3, LENGTH, dtype=torch.bool)
    attended_BT[0, :3] = False
    padded = run(stream, hidden, residual, {}, attended_BT=attended_BT)[1]
    torch.testing.assert_close(padded.signals["substrate"][0, 3:], whole.signals["substrate"][0, : LENGTH - 3])
    assert padded.state["position"].tolist() == [LENGTH - 3, LENGTH, LENGTH]


@pytest.mark.parametrize(
    ("kind", "feature"),
    [("throttling", "temperature"), ("memory_pressure", "memory"), ("latency_spikes", "latency")],
)
def test_a_simulated_disturbance_shows_and_goes(kind: str, feature: str) -> None:
    trace_NR = simulated_trace(60, [Disturbance(kind=kind, start=20, length=12)], seed=3)
    assert torch.equal(trace_NR, simulated_trace(60, [Disturbance(kind=kind, start=20, length=12)], seed=3))
    assert not torch.equal(trace_NR, simulated_trace(60, [Disturbance(kind=kind, start=20, length=12)], seed=4))
    column_N = trace_NR[:, FEATURES.index(feature)]
    assert column_N[:20].max() < 0.02 and column_N[20:32].max() > 0.99 and column_N[56:].max() < 0.02


def test_a_trace_is_saved_and_loaded(tmp_path: Path) -> None:
    trace = TraceTelemetry(simulated_trace(10, THROTTLED, seed=1), tokens_per_sample=3)
    trace.save(tmp_path / "trace.json")
    found = TraceTelemetry.load(tmp_path / "trace.json")
    assert torch.equal(found.trace_NR, trace.trace_NR) and found.tokens_per_sample == 3
    positions_BT = torch.tensor([[0, 2, 3, 40]])
    assert torch.equal(found.read(positions_BT)[0], trace.trace_NR[[0, 0, 1, 9]])


def test_calibration_tells_healthy_from_degraded_and_refuses_what_is_alike() -> None:
    healthy_NR = simulated_trace(80, [], seed=1, jitter=0.1)
    degraded_NR = simulated_trace(40, [Disturbance(kind="memory_pressure", start=-20, length=80, level=0.5)], seed=2)
    stream, (hidden, residual, _) = make_stream(), given_inputs()
    stream.calibrate(healthy_NR, degraded_NR)
    found = {}
    for name, trace_NR in (("healthy", healthy_NR), ("degraded", degraded_NR)):
        stream.telemetry = TraceTelemetry(trace_NR)
        found[name] = run(stream, hidden, residual, {})[1].signals["substrate"]
    assert found["healthy"].min() > 0.95 and found["degraded"].max() < 0.1
    with pytest.raises(KeelError, match="look alike"):
        stream.calibrate(healthy_NR, healthy_NR)


def test_live_telemetry_samples_off_the_path_of_decoding() -> None:
    with LiveTelemetry(hz=10) as live:
        before = time.thread_time()
        for _ in range(1000):
            live.read(None)
        assert (time.thread_time() - before) / 1000 < 1e-4  # it hands out the newest sample and asks nobody
        deadline = time.monotonic() + 20
        while len(live._samples) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        trace_NR = live.trace()
        assert copy.deepcopy(live) is live
    assert trace_NR.shape[1] == len(FEATURES) and ((trace_NR >= 0) & (trace_NR <= 1)).all()
    count = len(live._samples)
    time.sleep(0.3)
    assert len(live._samples) == count  # closed
    assert TraceTelemetry(trace_NR).read(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, len(FEATURES))


def test_a_device_that_does_not_answer_counts_as_at_ease(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("not supported")

    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=19, total=20),
        nvmlDeviceGetUtilizationRates=broken,
        nvmlDeviceGetTemperature=lambda device, kind: 80,
        nvmlDeviceGetClockInfo=lambda device, kind: 500,
        nvmlDeviceGetMaxClockInfo=lambda device, kind: 2000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert _open_gpu()() == (0.95, 0.0, 80.0, 0.5)
    with LiveTelemetry(hz=10) as live:
        features = dict(zip(FEATURES, live.read(None).flatten().tolist(), strict=True))
    assert features["memory"] >= 0.74 and features["temperature"] >= 0.49 and features["clock"] >= 0.49
    nvml.nvmlInit = broken
    assert _open_gpu() is None


def test_the_temperature_is_asked_for_at_every_tenth_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(telemetry, "_processor_temperature", lambda: float(asked.append(1) or 0))
    with LiveTelemetry(hz=0.01, keep=5) as live:
        before = len(asked)
        for _ in range(30):
            live._samples.append(live._sample(0.0, 1.0))
        assert len(asked) - before == 3, "also once all that are kept are there"


def test_wrong_telemetry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="at most 10"):
        LiveTelemetry(hz=100)
    with pytest.raises(KeelError, match="6 features"):
        ConstantTelemetry([0.0, 1.0])
    with pytest.raises(KeelError, match="did you mean 'throttling'"):
        simulated_trace(5, [Disturbance(kind="throtling", start=0, length=1)], seed=0)  # type: ignore[arg-type]
    (tmp_path / "no.json").write_text("{}", encoding="utf-8")
    with pytest.raises(KeelError, match="no trace"):
        TraceTelemetry.load(tmp_path / "no.json")
