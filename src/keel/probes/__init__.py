"""Looks inside a model: what a stream writes, attention spans, gates against depth, syntax by layer; positions and heads of an encoder.

A probe measures, says its numbers as plain JSON values and draws them; it trains nothing and leaves the model as it was.
"""

from __future__ import annotations

from keel.probes.attention_span import AttentionSpans, attention_spans, run_span
from keel.probes.gates import GateDepth, gate_depth, run_gates
from keel.probes.geometry import Geometry, measure_geometry, run_geometry
from keel.probes.heads import HeadInfluence, head_influence
from keel.probes.positions import PositionProbe, boundary_ids, probe_positions, table_metrics
from keel.probes.syntax import SyntaxProbe, probe_syntax

__all__ = [
    "AttentionSpans",
    "GateDepth",
    "Geometry",
    "HeadInfluence",
    "PositionProbe",
    "SyntaxProbe",
    "attention_spans",
    "boundary_ids",
    "gate_depth",
    "head_influence",
    "measure_geometry",
    "probe_positions",
    "probe_syntax",
    "run_gates",
    "run_geometry",
    "run_span",
    "table_metrics",
]
