"""Looks inside a model with streams: geometry of what a stream writes, attention spans, gates against depth.

A probe measures, says its numbers as plain JSON values and draws them; it trains nothing and leaves the model as it was.
"""

from __future__ import annotations

from keel.probes.attention_span import AttentionSpans, attention_spans, run_span
from keel.probes.gates import GateDepth, gate_depth, run_gates
from keel.probes.geometry import Geometry, measure_geometry, run_geometry

__all__ = [
    "AttentionSpans",
    "GateDepth",
    "Geometry",
    "attention_spans",
    "gate_depth",
    "measure_geometry",
    "run_gates",
    "run_geometry",
    "run_span",
]
