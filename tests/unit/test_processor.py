"""What makes training on a processor quick: cross-entropy whose gradient is made on the way forward, attention by products, in a host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from keel.ops import attention, cross_entropy_sum, reference_cross_entropy_sum
from keel.ops.attention import better_by_products
from keel.training.processor import causal_loss, native_precision

BFLOAT16 = 2.0**-7  # of a value in bfloat16


def grads(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, tensors))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, BFLOAT16)]
)
def test_cross_entropy_and_its_gradient_are_pytorchs(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(1500, 700)).to(dtype).requires_grad_()  # two whole parts and a rest
    labels = torch.randint(700, (1500,))
    labels[::7] = -100
    labels[-1] = 699
    found, expected = (
        cross_entropy_sum(logits, labels, divisor=1499),
        reference_cross_entropy_sum(logits, labels) / 1499,
    )
    assert found.dtype == expected.dtype == (dtype if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    [mine], [theirs] = grads(found, logits), grads(expected, logits)
    assert mine.dtype == dtype and mine[::7].eq(0).all() and theirs.abs().max() > 0
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
    along = float((mine.double() * theirs.double()).sum() / theirs.double().square().sum())
    assert along == pytest.approx(1.0, abs=min(tolerance, 1e-3)), "no scale of its own"
    assert not cross_entropy_sum(logits.detach(), labels).requires_grad


def test_cross_entropy_of_great_logits_and_of_no_target_is_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [3e38, 3e38, -3e38]], requires_grad=True)
    loss = cross_entropy_sum(logits, torch.tensor([1, 0]))
    assert loss == 2e4 + torch.tensor(2.0).log() and grads(loss, logits)[0].isfinite().all()
    nothing = cross_entropy_sum(logits, torch.tensor([-100, -100]))
    assert nothing == 0 and grads(nothing, logits)[0].eq(0).all()


def test_gradcheck_of_cross_entropy() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 6, -100, 3, 3])
    assert torch.autograd.gradcheck(lambda given: cross_entropy_sum(given, labels), (logits,))


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, BFLOAT16), (torch.float32, 1e-6)])
@pytest.mark.parametrize("kind", ["causal", "mask", "all"])
def test_attention_by_products_is_attention(kind: str, dtype: torch.dtype, digits: float) -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 3, 20, width).to(dtype).requires_grad_() for width in (8, 8, 6))
    seen = torch.rand(2, 1, 20, 20) < 0.5
    seen |= torch.eye(20, dtype=torch.bool)
    options: dict[str, Any] = {"causal": {"is_causal": True}, "mask": {"mask": seen}, "all": {}}[kind]
    assert better_by_products(query, key, value)
    found = attention(query, key, value, scale=0.3, **options)
    wide = [part.detach().double().requires_grad_() for part in (query, key, value)]
    masks = {"attn_mask": options["mask"]} if kind == "mask" else options
    expected = F.scaled_dot_product_attention(*wide, scale=0.3, **masks)
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=3 * digits)
    weigh = torch.randn_like(expected)
    mine, theirs = grads((found * weigh).sum(), query, key, value), grads((expected * weigh).sum(), *wide)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.0, atol=4 * digits * float(b.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_query_that_sees_nothing_gets_nothing(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 1, 4, 8).to(dtype).requires_grad_() for _ in range(3))
    mask = torch.tensor([True, False, True, False])[:, None] & torch.ones(4, 4, dtype=torch.bool)
    found = attention(query, key, value, mask=mask)
    assert found[0, 0, 1].eq(0).all() and found[0, 0, 3].eq(0).all() and found[0, 0, 0].ne(0).any()
    assert all(part.isfinite().all() for part in grads(found.sum(), query, key, value))


def test_the_fused_kernel_is_taken_where_it_is_better() -> None:
    def better(query: Tensor, wanted: bool = True) -> bool:
        return better_by_products(query, query, query.detach().requires_grad_(wanted))

    query = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16)
    assert better(query) and better(query.float()) and not better(query, wanted=False)
    few, many = (torch.zeros(1, 1, keys, 8, requires_grad=True) for keys in (128, 129))
    assert better_by_products(many, few, few) and not better_by_products(few, many, many)
    assert not better(query.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert better(query.float())
    with torch.no_grad():
        assert not better(query)
    assert better(torch.zeros(1, 1, 2**12, 8, dtype=torch.bfloat16))
    assert not better(torch.zeros(1, 1, 2**13, 8, dtype=torch.bfloat16))


def test_the_causal_loss_is_transformers() -> None:
    torch.manual_seed(3)
    logits, labels = torch.randn(2, 9, 30), torch.randint(30, (2, 9))
    labels[0, :4] = -100
    for options in ({}, {"num_items_in_batch": 7}, {"shift_labels": labels.roll(-1, 1)}):
        torch.testing.assert_close(
            causal_loss(logits, labels, 30, **options), ForCausalLMLoss(logits, labels, 30, **options)
        )


@pytest.mark.parametrize(
    ("able", "expected"), [({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"avx512_f": True}, "fp32")]
)
def test_bfloat16_is_taken_where_the_processor_multiplies_it(
    able: dict[str, bool], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert native_precision(torch.device("cpu")) == expected
