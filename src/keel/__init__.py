"""Keel: side streams beside a Transformer, and measured evidence of whether they help."""

from __future__ import annotations

from keel.cache import signals_of
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
from keel.streams import DynamicStateStream, LearnedPositionsStream, MarginPrior, StructuralStream, TreeStream

__version__ = "0.1.0"
__all__ = [
    "DstgConfig",
    "DstgForMaskedLM",
    "DstgForQuestionAnswering",
    "DstgForSequenceClassification",
    "DstgForTokenClassification",
    "DstgModel",
    "DynamicStateStream",
    "KeelConfig",
    "KeelError",
    "KeelForCausalLM",
    "LearnedPositionsStream",
    "MarginPrior",
    "Positions",
    "StructuralStream",
    "TreeStream",
    "attach",
    "load",
    "signals_of",
]
