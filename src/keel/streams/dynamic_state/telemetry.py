"""Where the substrate's telemetry v_t comes from (§7.3): constant, a recorded or simulated trace, or this machine, live.

Every feature is a degree of distress: 0 when healthy, 1 when exhausted. The default is constant and healthy, so that results repeat;
traces repeat too, since they follow a row's tokens and not the clock. Live telemetry does not repeat and is used on request alone.

Shapes: B batch, T tokens, N samples of a trace, R features.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from keel.errors import KeelError, suggest
from keel.files import write_atomically

FEATURES = ("memory", "throughput", "latency", "temperature", "clock", "load")
"""memory used beyond 80 %; tokens a second lost against the best seen; lateness of a wake-up, 1 at 50 ms; degrees above 60 of 100 °C;
clock below its highest; processor (or GPU) used beyond 80 %."""
MOST_HZ = 10.0


class Telemetry:
    """A source of telemetry. ``follows_tokens``: what it says depends on how many tokens a row has seen."""

    follows_tokens = False

    def read(self, positions_BT: Tensor | None) -> Tensor:
        """Return the features now [R], or, where the source follows tokens, at these token counts, [B, T, R]."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop whatever the source has running."""


class ConstantTelemetry(Telemetry):
    """The same features at every token; healthy unless told otherwise."""

    def __init__(self, features: Sequence[float] = (0.0,) * len(FEATURES)) -> None:
        # On the processor, whatever device a model around it is being made on: "meta" holds no numbers.
        self.features_R = _features(torch.tensor(features, dtype=torch.float32, device="cpu"), "features")

    def read(self, positions_BT: Tensor | None) -> Tensor:
        """See ``Telemetry.read``."""
        return self.features_R


class TraceTelemetry(Telemetry):
    """A recorded or simulated trace that follows a row's tokens; its last sample holds after its end.

    Args:
        trace_NR: one sample of all ``FEATURES`` a step.
        tokens_per_sample: how many tokens one sample lasts.
    Raises: KeelError for an empty trace, or one of other features.
    """

    follows_tokens = True

    def __init__(self, trace_NR: Tensor, tokens_per_sample: int = 1) -> None:
        self.trace_NR = _features(trace_NR, "trace")
        if trace_NR.dim() != 2 or not len(trace_NR) or tokens_per_sample < 1:
            raise KeelError(
                f"trace: shape {list(trace_NR.shape)}, {tokens_per_sample} tokens a sample; give [samples, {len(FEATURES)}] with at "
                "least one sample, and at least one token"
            )
        self.tokens_per_sample = tokens_per_sample

    def read(self, positions_BT: Tensor | None) -> Tensor:
        """See ``Telemetry.read``."""
        assert positions_BT is not None
        self.trace_NR = self.trace_NR.to(positions_BT.device)
        samples_BT = positions_BT // self.tokens_per_sample
        return self.trace_NR[samples_BT.clamp(0, len(self.trace_NR) - 1)]

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        content = {
            "features": FEATURES,
            "tokens_per_sample": self.tokens_per_sample,
            "samples": self.trace_NR.tolist(),
        }
        write_atomically(Path(path), (json.dumps(content) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> TraceTelemetry:
        """Read what ``save`` wrote. Raises: KeelError for a file that is no trace, or one of other features."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            features, samples, tokens = content["features"], content["samples"], content["tokens_per_sample"]
            trace_NR = torch.tensor(samples, dtype=torch.float32)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KeelError(f"{path} is no trace of telemetry ({error}); write one with TraceTelemetry.save") from error
        if tuple(features) != FEATURES:
            raise KeelError(f"{path}: a trace of the features {features}; expected {list(FEATURES)}")
        return cls(trace_NR, tokens)


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """One stretch of distress in a simulated trace.

    Attributes:
        kind: ``throttling`` (temperature, clock, throughput), ``memory_pressure`` (memory, latency) or ``latency_spikes``
            (latency, at random samples of the stretch).
        start, length: in samples.
        level: distress at its height, in [0, 1].
        recovery: samples in which what is left falls to 1/e after the end.
    """

    kind: Literal["throttling", "memory_pressure", "latency_spikes"]
    start: int
    length: int
    level: float = 1.0
    recovery: float = 4.0


_SHARES: dict[str, dict[str, float]] = {
    "throttling": {"temperature": 1.0, "clock": 0.8, "throughput": 0.6},
    "memory_pressure": {"memory": 1.0, "latency": 0.4},
    "latency_spikes": {"latency": 1.0, "throughput": 0.3},
}


def simulated_trace(
    num_samples: int, disturbances: Sequence[Disturbance], *, seed: int, jitter: float = 0.01
) -> Tensor:
    """Return a trace [N, R] of a machine that is healthy but for ``disturbances``, from each of which it recovers.

    Throttling and memory pressure rise over the first quarter of their stretch; a spike hits one sample in three.
    Raises: KeelError for an unknown kind.
    """
    generator = torch.Generator().manual_seed(seed)
    trace_NR = torch.rand(num_samples, len(FEATURES), generator=generator) * jitter
    sample_N = torch.arange(num_samples)
    for each in disturbances:
        if each.kind not in _SHARES:
            raise KeelError(f"disturbance of kind {each.kind!r}; {suggest(each.kind, _SHARES)}")
        since_N = (sample_N - each.start).float()
        height_N = (since_N + 1).clamp(min=0) / max(1.0, each.length / 4)
        height_N = height_N.clamp(max=1.0) * torch.exp(-(since_N - each.length + 1).clamp(min=0) / each.recovery)
        if each.kind == "latency_spikes":
            hits_N = torch.rand(num_samples, generator=generator) < 1 / 3
            height_N = (hits_N & (since_N >= 0) & (since_N < each.length)).float()
        for name, share in _SHARES[each.kind].items():
            trace_NR[:, FEATURES.index(name)] += each.level * share * height_N
    return trace_NR.clamp(0.0, 1.0)


def troubled_trace(num_samples: int, *, seed: int) -> Tensor:
    """Return a trace [N, R] with one disturbance of every kind, each as long as its recovery: a seventh of the samples.

    Beside a path's untrained projection mild throttling halves S, memory pressure makes it collapse, and spikes do so now and then.
    """
    part = max(1, num_samples // 7)
    kinds: tuple[tuple[Literal["throttling", "memory_pressure", "latency_spikes"], float], ...] = (
        ("throttling", 0.2), ("memory_pressure", 0.6), ("latency_spikes", 0.5)
    )  # fmt: skip
    disturbances = [
        Disturbance(kind=kind, start=(1 + 2 * index) * part, length=part, level=level, recovery=part / 8)
        for index, (kind, level) in enumerate(kinds)
    ]
    return simulated_trace(num_samples, disturbances, seed=seed)


def open_telemetry(source: str, num_tokens: int, *, seed: int = 0) -> Telemetry:
    """Return the source of telemetry that people name: ``constant``, ``simulated`` (``troubled_trace``), ``live``, or a trace's file.

    Args:
        num_tokens: how many a simulated trace lasts.
        seed: of a simulated trace.
    Raises: KeelError for a file that is not there, or holds no trace.
    """
    if source == "constant":
        return ConstantTelemetry()
    if source == "simulated":
        return TraceTelemetry(troubled_trace(num_tokens, seed=seed))
    if source == "live":
        return LiveTelemetry()
    if not Path(source).is_file():
        raise KeelError(
            f"telemetry {source!r}: no such file; give constant, simulated, live, or the file of a recorded trace"
        )
    return TraceTelemetry.load(source)


class LiveTelemetry(Telemetry):
    """This machine, sampled by a thread of its own at most ten times a second: psutil, and NVIDIA's library where it is there.

    Decoding reads the newest sample and waits for nothing. Use it in a ``with`` block, or call ``close``.

    Args:
        hz: samples a second, above 0, at most 10.
        keep: how many samples ``trace`` returns.
    """

    def __init__(self, hz: float = 5.0, keep: int = 36_000) -> None:
        if not 0 < hz <= MOST_HZ:
            raise KeelError(f"live telemetry: hz={hz}; give a rate above 0 and at most {MOST_HZ:g}")
        self.period = 1.0 / hz
        self._passes = 0
        self._most_passes = 0.0
        self._samples: deque[Tensor] = deque(maxlen=keep)
        self._gpu = _open_gpu()
        self._temperature, self._asked = 0.0, 0
        psutil.cpu_percent()  # the first call has nothing to compare with
        self._latest_R = self._sample(lateness=0.0, elapsed=self.period)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keel-telemetry", daemon=True)
        self._thread.start()

    def read(self, positions_BT: Tensor | None) -> Tensor:
        """See ``Telemetry.read``."""
        self._passes += 1
        return self._latest_R

    def trace(self) -> Tensor:
        """Return the samples so far, [N, R]: a ``TraceTelemetry`` replays them."""
        return torch.stack([*self._samples])

    def close(self) -> None:
        """Stop sampling."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> LiveTelemetry:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveTelemetry:
        return self  # there is one machine

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closing.wait(self.period):
            now = time.monotonic()
            self._latest_R = self._sample(now - before - self.period, now - before)
            self._samples.append(self._latest_R)
            before = now

    def _sample(self, lateness: float, elapsed: float) -> Tensor:
        rate, self._passes = self._passes / elapsed, 0
        self._most_passes = max(0.999 * self._most_passes, rate)
        memory, load = psutil.virtual_memory().percent / 100, psutil.cpu_percent() / 100
        clock = _processor_clock_loss()
        if self._asked % 10 == 0:  # slow to ask, slow to change
            self._temperature = _processor_temperature()
        self._asked += 1
        temperature = self._temperature
        if self._gpu is not None:
            gpu_memory, gpu_load, gpu_temperature, gpu_clock = self._gpu()
            memory, load = max(memory, gpu_memory), max(load, gpu_load)
            temperature, clock = max(temperature, gpu_temperature), max(clock, gpu_clock)
        distress = (
            (memory - 0.8) / 0.2,
            1 - rate / self._most_passes if rate else 0.0,  # nothing was decoded: nothing is known
            lateness / 0.05,
            (temperature - 60) / 40,
            clock,
            (load - 0.8) / 0.2,
        )
        return torch.tensor(distress).clamp(0.0, 1.0)


def _processor_clock_loss() -> float:
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    # Idle clocks are low everywhere: only what is lost beyond half counts.
    return 0.0 if frequency is None or not frequency.max else 2 * (0.5 - frequency.current / frequency.max)


def _processor_temperature() -> float:
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    return max((reading.current for group in sensors.values() for reading in group), default=0.0)


def _open_gpu() -> Any:
    """Return what reads (memory, load, °C, clock loss) of the first NVIDIA device, or None where there is none."""
    try:
        nvml: Any = importlib.import_module("pynvml")  # the package nvidia-ml-py, which is optional
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # not installed, no driver, no device: the library has an error class of its own for each
        return None

    def memory() -> float:
        found = nvml.nvmlDeviceGetMemoryInfo(device)
        return float(found.used / found.total)

    def clock_loss() -> float:
        now, most = (
            ask(device, nvml.NVML_CLOCK_SM) for ask in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
        )
        return float(2 * (0.5 - now / most))

    asked: tuple[Callable[[], float], ...] = (
        memory,
        lambda: float(nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
        lambda: float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
        clock_loss,
    )
    return lambda: tuple(map(_or_nothing, asked))


def _or_nothing(ask: Callable[[], float]) -> float:
    """Return a reading, 0 (no distress) where the device does not have it or does not answer: the next one may."""
    try:
        return ask()
    except Exception:
        return 0.0


def calibrated_projection(
    healthy_NR: Tensor, degraded_NR: Tensor, *, healthy: float = 0.99, degraded: float = 0.05, ridge: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """Return W_s [R] and a bias [1] that give S = exp(-softplus(W_s v + b)) near ``healthy`` and ``degraded`` (§7.4).

    Ridge regression of log(1/S − 1) on recorded traces, one of a healthy and one of a degraded machine.
    Raises: KeelError where the traces do not tell the two apart.
    """
    traces = _features(healthy_NR, "healthy trace").double(), _features(degraded_NR, "degraded trace").double()
    read_NQ = torch.cat(traces)
    read_NQ = torch.cat([read_NQ, torch.ones_like(read_NQ[:, :1])], -1)
    wanted = [torch.full((len(t),), 1 / s - 1).log() for t, s in zip(traces, (healthy, degraded), strict=True)]
    # One trace may be longer than the other: both weigh the same.
    weight_N = torch.cat([torch.full((len(t),), 1 / len(t)) for t in traces]).double()
    weighted_QN = (read_NQ * weight_N.unsqueeze(-1)).T
    penalty = ridge * torch.eye(read_NQ.shape[1], dtype=torch.float64)
    penalty[-1, -1] = 0.0
    solution_Q = torch.linalg.solve(weighted_QN @ read_NQ + penalty, weighted_QN @ torch.cat(wanted).double())
    means = [float((t @ solution_Q[:-1]).mean()) for t in traces]
    if means[1] - means[0] < 1.0:
        raise KeelError(
            f"the healthy and the degraded trace look alike (instability {means[0]:.2f} and {means[1]:.2f}); record one under distress"
        )
    return solution_Q[:-1].float(), solution_Q[-1:].float()


def _features(tensor: Tensor, what: str) -> Tensor:
    if tensor.dim() < 1 or tensor.shape[-1] != len(FEATURES):
        raise KeelError(
            f"{what}: shape {list(tensor.shape)}; expected the {len(FEATURES)} features {', '.join(FEATURES)} last"
        )
    return tensor
