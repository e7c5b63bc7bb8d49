"""Means over spans of rows: the differences of prefix sums, so that a span costs the same however long it is.

Shape suffixes: B rows, S tokens of a row, D width, N spans.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16


def reference_span_means(rows_BSD: Tensor, row_N: Tensor, first_N: Tensor, last_N: Tensor) -> Tensor:
    """Take one mean after the other, as the formula is written; the specification of ``span_means``."""
    spans = zip(row_N.tolist(), first_N.tolist(), last_N.tolist(), strict=True)
    return torch.stack(
        [rows_BSD[row, first : last + 1].sum(0) / max(1, last + 1 - first) for row, first, last in spans]
    )


def span_means(rows_BSD: Tensor, row_N: Tensor, first_N: Tensor, last_N: Tensor) -> Tensor:
    """Return the mean of ``rows_BSD[row, first : last + 1]`` for each span, [N, D], in at least float32.

    Tokens beyond the end of a row count as zeros; the mean of a span that ends right before it begins is zero. Differentiable once, in
    the rows.
    Reference twin: ``reference_span_means``.
    """
    rows_BSD = rows_BSD.to(torch.promote_types(rows_BSD.dtype, torch.float32))
    edges_2N = torch.stack([first_N, last_N + 1])
    begins_N = row_N * (rows_BSD.shape[1] + 1)
    length_N1 = (edges_2N[1] - edges_2N[0]).clamp(min=1).unsqueeze(1).to(rows_BSD.dtype)
    means_ND: Tensor = span_sums(rows_BSD, edges_2N.clamp(max=rows_BSD.shape[1]) + begins_N) / length_N1
    return means_ND


def prefix_sums(rows_BSD: Tensor) -> Tensor:
    """Return the sums of all tokens before each, and of all, [B, S + 1, D].

    A processor's ``cumsum`` over a dimension that is not the last goes number by number. Blocks of ``BLOCK`` tokens go together.
    """
    batch, length, width = rows_BSD.shape
    blocks = -(-(length + 1) // BLOCK)
    sums = F.pad(rows_BSD, (0, 0, 1, blocks * BLOCK - length - 1)).view(batch, blocks, BLOCK, width)
    for token in range(1, BLOCK):
        sums[:, :, token] += sums[:, :, token - 1]
    sums[:, 1:] += sums[:, :-1, -1:].cumsum(1)
    return sums.flatten(1, 2)[:, : length + 1].contiguous()


@torch.library.custom_op("keel::span_sums", mutates_args=())
def span_sums(rows_BSD: Tensor, edges_2N: Tensor) -> Tensor:
    """Return the sums over spans [N, D], whose ends are places in the flat prefix sums [B · (S + 1)]."""
    sums = prefix_sums(rows_BSD).flatten(0, 1)
    return sums.index_select(0, edges_2N[1]).sub_(sums.index_select(0, edges_2N[0]))


@span_sums.register_fake
def _(rows_BSD: Tensor, edges_2N: Tensor) -> Tensor:
    return rows_BSD.new_empty(edges_2N.shape[1], rows_BSD.shape[2])


@torch.library.custom_op("keel::span_sums_backward", mutates_args=())
def span_sums_backward(grad_ND: Tensor, edges_2N: Tensor, batch: int, length: int) -> Tensor:
    """Return the gradients of the rows [B, S, D]: what spans begin at a token or before it, less what ended before it."""
    changes = grad_ND.new_zeros(batch * (length + 1), grad_ND.shape[1])
    changes.index_add_(0, edges_2N[0], grad_ND).index_add_(0, edges_2N[1], -grad_ND)
    return prefix_sums(changes.view(batch, length + 1, -1))[:, 1:-1].contiguous()


@span_sums_backward.register_fake
def _(grad_ND: Tensor, edges_2N: Tensor, batch: int, length: int) -> Tensor:
    return grad_ND.new_empty(batch, length, grad_ND.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.sizes = inputs[0].shape[:2]
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
    return span_sums_backward(grad_ND.contiguous(), ctx.saved_tensors[0], *ctx.sizes), None


span_sums.register_autograd(_backward, setup_context=_setup_context)
