"""Keel: side streams beside a Transformer, and measured evidence of whether they help."""

from __future__ import annotations

from keel.encoder import (
    DstgConfig,
    DstgForMaskedLM,
    DstgForQuestionAnswering,
    DstgForSequenceClassification,
    DstgForTokenClassification,
    DstgModel,
)
from keel.errors import KeelError
from keel.model import KeelConfig, KeelForCausalLM, attach, load
from keel.positions import Positions
from keel.streams import LearnedPositionsStream, StructuralStream

__version__ = "0.1.0"
__all__ = [
    "DstgConfig",
    "DstgForMaskedLM",
    "DstgForQuestionAnswering",
    "DstgForSequenceClassification",
    "DstgForTokenClassification",
    "DstgModel",
    "KeelConfig",
    "KeelError",
    "KeelForCausalLM",
    "LearnedPositionsStream",
    "Positions",
    "StructuralStream",
    "attach",
    "load",
]
