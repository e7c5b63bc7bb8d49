"""Operators on tensors alone: each has a fast path and a slow, obvious ``reference_*`` twin that specifies it."""

from keel.ops.attention import attention
from keel.ops.cross_entropy import cross_entropy_sum, reference_cross_entropy_sum
from keel.ops.gru import gru, reference_gru
from keel.ops.padding import pack_left, reference_run_padded, run_padded, unpack
from keel.ops.scan import linear_scan, reference_linear_scan

__all__ = [
    "attention",
    "cross_entropy_sum",
    "gru",
    "linear_scan",
    "pack_left",
    "reference_cross_entropy_sum",
    "reference_gru",
    "reference_linear_scan",
    "reference_run_padded",
    "run_padded",
    "unpack",
]
