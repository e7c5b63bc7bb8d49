"""Operators on tensors alone: each has a fast path and a slow, obvious ``reference_*`` twin that specifies it."""

from keel.ops.gru import gru, reference_gru
from keel.ops.padding import pack_left, reference_run_padded, run_padded, unpack
from keel.ops.scan import linear_scan, reference_linear_scan

__all__ = [
    "gru",
    "linear_scan",
    "pack_left",
    "reference_gru",
    "reference_linear_scan",
    "reference_run_padded",
    "run_padded",
    "unpack",
]
