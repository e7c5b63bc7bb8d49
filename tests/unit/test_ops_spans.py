"""Means over spans: prefix sums equal the loop over spans, in values and gradients, wherever blocks of them end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keel.ops.spans import BLOCK, prefix_sums, reference_span_means, span_means, span_sums


def spans(batch: int, length: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    row, first = torch.randint(batch, (count,)), torch.randint(length, (count,))
    last = (first + torch.randint(length, (count,))).clamp(max=length - 1)
    return row, first, last


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_span_means_are_those_of_the_loop(length: int) -> None:
    torch.manual_seed(length)
    rows, chosen = torch.randn(3, length, 4, dtype=torch.float64, requires_grad=True), spans(3, length, 20)
    weigh = torch.randn(20, 4, dtype=torch.float64)
    found, expected = span_means(rows, *chosen), reference_span_means(rows, *chosen)
    torch.testing.assert_close(found, expected)
    mine, theirs = (torch.autograd.grad((means * weigh).sum(), rows)[0] for means in (found, expected))
    torch.testing.assert_close(mine, theirs)
    assert theirs.abs().sum() > 0


def test_what_lies_beyond_a_row_and_no_tokens_count_as_zeros() -> None:
    rows = torch.ones(2, 4, 1, dtype=torch.float64, requires_grad=True)
    row, first, last = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 5, 0]), torch.tensor([3, 5, 6, -1])
    means = span_means(rows, row, first, last)
    assert means.flatten().tolist() == [1.0, 0.5, 0.0, 0.0]  # the last of no tokens at all
    torch.testing.assert_close(means, reference_span_means(rows, row, first, last))
    means.sum().backward()
    assert rows.grad is not None
    assert rows.grad[..., 0].tolist() == [[0.25, 0.25, 0.5, 0.5], [0.0] * 4]


def test_prefix_sums_have_all_tokens_before_each() -> None:
    rows = torch.arange(1, 2 * BLOCK + 2, dtype=torch.float64).view(1, -1, 1)
    assert prefix_sums(rows).flatten().tolist() == [t * (t + 1) / 2 for t in range(2 * BLOCK + 2)]


def test_bfloat16_rows_are_summed_in_float32() -> None:
    rows = torch.randn(1, 300, 2).bfloat16()
    whole = span_means(rows, torch.tensor([0]), torch.tensor([0]), torch.tensor([299]))
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, rows.float().mean(1))


def test_the_operator_keeps_its_promises_to_the_compiler() -> None:
    rows = torch.randn(2, 5, 3, requires_grad=True)
    found = torch.library.opcheck(span_sums, (rows, torch.tensor([[0, 7], [3, 11]])))
    assert found and set(found.values()) == {"SUCCESS"}
