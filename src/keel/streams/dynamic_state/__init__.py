"""The dynamic state path of DTA: ``stream`` is the place to begin, ``reference`` the paper's own words."""

from __future__ import annotations

from keel.streams.dynamic_state.config import DynamicStateConfig
from keel.streams.dynamic_state.governor import FAILURES, Mode, SafeguardConfig, reference_governor
from keel.streams.dynamic_state.reference import reference_dynamic_state
from keel.streams.dynamic_state.stream import DynamicStateStream
from keel.streams.dynamic_state.telemetry import (
    ConstantTelemetry,
    Disturbance,
    LiveTelemetry,
    Telemetry,
    TraceTelemetry,
    open_telemetry,
    simulated_trace,
    troubled_trace,
)

__all__ = [
    "FAILURES",
    "ConstantTelemetry",
    "Disturbance",
    "DynamicStateConfig",
    "DynamicStateStream",
    "LiveTelemetry",
    "Mode",
    "SafeguardConfig",
    "Telemetry",
    "TraceTelemetry",
    "open_telemetry",
    "reference_dynamic_state",
    "reference_governor",
    "simulated_trace",
    "troubled_trace",
]
