"""Summed cross-entropy whose gradient is made on the way forward, a part of the rows at a time: for processors.

PyTorch keeps both logits and their logarithms in float32, and where memory is handed out in small pages making those anew costs
more than the arithmetic. Here rows that fit into the cache are raised to their exponentials once, and what is kept is the
gradient, in the logits' own precision: a sixth quicker with large pages, up to several times without. On a GPU PyTorch's is
taken. ``benchmarks/processor.py`` has the numbers.

Shapes: N rows, R some of them, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
_ENTRIES = 2**19  # of a part: 2 MiB of float32


def cross_entropy_sum(logits_NV: Tensor, labels_N: Tensor, divisor: Tensor | float = 1.0) -> Tensor:
    """Return the sum over rows of -log softmax(logits)[label] by ``divisor``, a scalar in float32 (float64 for float64 logits).

    Differentiable once, in the logits.

    Args:
        labels_N: int64 in [0, V), or -100 for a row that counts nothing.
        divisor: such as the number of rows that count. Dividing afterwards would round each gradient of bfloat16 twice.
    Reference twin: ``reference_cross_entropy_sum``.
    """
    if logits_NV.device.type != "cpu" or torch.compiler.is_compiling():
        return reference_cross_entropy_sum(logits_NV, labels_N) / divisor
    total: Tensor = _CrossEntropySum.apply(logits_NV, labels_N, divisor)
    return total


def reference_cross_entropy_sum(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """PyTorch's, in float32; the specification of ``cross_entropy_sum``."""
    return F.cross_entropy(_at_least_float(logits_NV), labels_N, ignore_index=IGNORED, reduction="sum")


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, divisor: Tensor | float) -> Tensor:
        gradient_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.promote_types(logits_NV.dtype, torch.float32))
        size = max(1, _ENTRIES // logits_NV.shape[-1])
        for start in range(0, len(logits_NV), size):
            rows = slice(start, start + size)
            counts_R1 = labels_N[rows, None] != IGNORED
            labels_R1 = labels_N[rows, None].where(counts_R1, 0)
            logits_RV = _at_least_float(logits_NV[rows])
            shifted_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
            chosen_R1 = shifted_RV.gather(-1, labels_R1)
            sums_R1 = shifted_RV.exp_().sum(-1, keepdim=True)
            total += (sums_R1.log() - chosen_R1).where(counts_R1, 0.0).sum()
            if gradient_NV is not None:
                share_R1 = counts_R1.to(shifted_RV.dtype) / divisor
                gradient_NV[rows] = shifted_RV.mul_(share_R1 / sums_R1).scatter_add_(-1, labels_R1, -share_R1)
        ctx.save_for_backward(gradient_NV)
        return total / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV * gradient.to(gradient_NV.dtype), None, None


def _at_least_float(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
