"""Log-determinants of causal attention: the exact ones against the whole Jacobian, the boundary, the estimate against the exact.

Shapes: B batch, T tokens, D width, R rank.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from keel.errors import KeelError, ShapeError
from keel.ops import logdet as module
from keel.ops import logdet_estimate as estimate_module
from keel.ops.logdet import (
    attention_blocks,
    attention_logdet,
    degeneracy,
    log_abs_det,
    reference_logdet,
    visible_past,
)
from keel.ops.logdet_estimate import estimate_logdet

WIDTH, LENGTH = 6, 9


def inputs(rank: int, dtype: torch.dtype = torch.float64, spread: float = 0.45) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings [2, T, D] and the factors [D, R] of a coupling; with a spread of 0.7 some tokens are beyond the boundary."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    factors = [torch.randn(WIDTH, rank, generator=generator, dtype=torch.float64) * spread for _ in range(2)]
    return embeddings.to(dtype), factors[0].to(dtype), factors[1].to(dtype)


def exact(embeddings: Tensor, left: Tensor, right: Tensor, include_self: bool = False) -> module.LogDeterminants:
    visible = visible_past(LENGTH, LENGTH, include_self)
    return attention_logdet(embeddings @ left, embeddings @ right, visible, WIDTH if include_self else None)


@pytest.fixture(params=["one chunk", "a token a chunk", "blocks made again"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "one chunk":
        monkeypatch.setattr(module, "WORKSPACE", 1)
    if request.param == "blocks made again":
        monkeypatch.setattr(module, "KEPT_BLOCKS", 0)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("rank", [1, 3, WIDTH])
@pytest.mark.parametrize(("dtype", "spread", "tolerance"), [(torch.float64, 0.7, 1e-8), (torch.float32, 0.45, 1e-4)])
def test_is_the_jacobians(rank: int, include_self: bool, dtype: torch.dtype, spread: float, tolerance: float) -> None:
    embeddings, left, right = inputs(rank, spread=spread)
    expected = reference_logdet(embeddings, left @ right.T, include_self)
    found = exact(*inputs(rank, dtype, spread), include_self)
    assert (found.logabs_BT.double() - expected.logabs_BT).abs().max() < tolerance
    assert torch.equal(found.sign_BT.double(), expected.sign_BT)


def test_some_determinants_are_negative() -> None:
    for include_self in (False, True):
        assert (exact(*inputs(WIDTH, spread=0.7), include_self).sign_BT < 0).any(), "the test above tests no sign"


def test_full_rank_is_the_coupling_itself() -> None:
    embeddings, left, right = inputs(WIDTH)
    coupling = left @ right.T
    found = attention_logdet(embeddings @ coupling, embeddings, visible_past(LENGTH, LENGTH, False))
    torch.testing.assert_close(found.logabs_BT, reference_logdet(embeddings, coupling).logabs_BT, atol=1e-8, rtol=0)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("include_self", [False, True])
def test_gradients(include_self: bool) -> None:
    embeddings, left, right = inputs(3)
    queries, keys = (embeddings @ left).requires_grad_(), (embeddings @ right).requires_grad_()
    visible = visible_past(LENGTH - 2, LENGTH, include_self)
    width = WIDTH if include_self else None
    assert torch.autograd.gradcheck(lambda q, k: attention_logdet(q, k, visible, width).logabs_BT, (queries, keys))


def test_the_last_tokens_alone_are_those_of_the_whole() -> None:
    embeddings, left, right = inputs(3)
    whole = exact(embeddings, left, right).logabs_BT
    last = attention_logdet(embeddings @ left, embeddings @ right, visible_past(2, LENGTH, False)).logabs_BT
    torch.testing.assert_close(last, whole[:, -2:], atol=1e-12, rtol=0)


def test_padding_and_packed_documents() -> None:
    embeddings, left, right = inputs(3)
    queries, keys = embeddings @ left, embeddings @ right
    attended = torch.ones(2, LENGTH, dtype=torch.bool)
    attended[0, :3] = False
    documents = torch.tensor([[0] * LENGTH, [0] * 4 + [1] * (LENGTH - 4)])
    found = attention_logdet(queries, keys, visible_past(LENGTH, LENGTH, False, attended, documents)).logabs_BT
    alone = reference_logdet(embeddings[:1, 3:], left @ right.T).logabs_BT
    torch.testing.assert_close(found[:1, 3:], alone, atol=1e-8, rtol=0)
    assert (found[0, :3] == 0).all()
    for part in (slice(0, 4), slice(4, LENGTH)):
        alone = reference_logdet(embeddings[1:, part], left @ right.T).logabs_BT
        torch.testing.assert_close(found[1:, part], alone, atol=1e-8, rtol=0)


def test_a_far_mean_costs_no_digits() -> None:
    embeddings, left, right = inputs(3, torch.float32)
    far = embeddings + 30
    found = exact(far, left, right).logabs_BT.double()
    expected = reference_logdet(far, left @ right.T).logabs_BT
    assert (found - expected).abs().max() < 2e-3  # the logits themselves are some thousands, with 1e-4 of rounding


def test_the_boundary_is_finite_and_crossing_it_is_counted() -> None:
    """One past pair at distance 2: Var = 1, so with coupling w the margin is 1 - w Var: positive, zero, negative."""
    past = torch.tensor([[-1.0], [1.0], [0.0]], dtype=torch.float64).unsqueeze(0)
    visible = visible_past(3, 3, False)
    for coupling, sign in ((0.5, 1), (1.0, 1), (1.5, -1)):
        queries = (coupling * past).requires_grad_()
        found = attention_logdet(queries, past, visible)
        assert found.sign_BT[0, 2] == sign or coupling == 1.0
        expected = math.log(max(abs(1 - coupling), 1e-12))
        assert found.logabs_BT[0, 2].item() == pytest.approx(expected, abs=1e-3)
        (gradient,) = torch.autograd.grad(found.logabs_BT.sum(), queries)
        assert gradient.isfinite().all()


def test_beyond_the_boundary_the_barrier_falls_towards_it() -> None:
    """The same pair: the barrier rises up to coupling 1 and beyond it too, so that its gradient always leads back."""
    past = torch.tensor([[-1.0], [1.0], [0.0]], dtype=torch.float64).unsqueeze(0)
    visible, found, slopes = visible_past(3, 3, False), [], []
    for value in (0.2, 0.9, 1.1, 3.0):
        coupling = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        barrier = attention_logdet(coupling * past, past, visible).barrier()[0, 2]
        found.append(barrier.item())
        slopes.append(torch.autograd.grad(barrier, coupling)[0].item())
    assert found == pytest.approx(
        [-math.log(0.8), -math.log(0.1), 2 * 12 * math.log(10) + math.log(0.1), 2 * 12 * math.log(10) + math.log(2)]
    )
    assert found == sorted(found)
    assert slopes == pytest.approx([1 / 0.8, 10.0, 10.0, 0.5])


@pytest.mark.parametrize(("size", "dtype"), [(2.0, torch.float64), (4.0, torch.float64), (4.0, torch.float32)])
def test_a_token_that_is_nearest_to_itself_is_near_the_boundary(size: float, dtype: torch.dtype) -> None:
    """Large embeddings: the token's own weight rounds to 1 in float32, and its block is all but singular, not I."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(1, 4, 2, generator=generator, dtype=torch.float64) * size
    embeddings[0, 3] = torch.tensor([size, size])
    identity = torch.eye(2, dtype=torch.float64)
    expected = reference_logdet(embeddings, identity, include_self=True).logabs_BT[0, 3].item()
    given = embeddings.to(dtype).requires_grad_()
    found = attention_logdet(given, given, visible_past(4, 4, True), 2).logabs_BT[0, 3]
    assert expected < -3
    if expected > math.log(module.SMALLEST_PIVOT[dtype]):
        assert found.item() == pytest.approx(expected, rel=1e-6)
    else:  # a pivot counts as the smallest one: large and finite
        assert -100 < found.item() < -10
    assert found.isfinite()
    (gradient,) = torch.autograd.grad(found, given)
    assert gradient.isfinite().all()


def test_singular_blocks() -> None:
    blocks = torch.zeros(2, 3, 3, requires_grad=True)
    logabs, _ = log_abs_det(blocks)
    assert torch.allclose(logabs, torch.full((2,), 3 * math.log(1e-6)))
    (gradient,) = torch.autograd.grad(logabs.sum(), blocks)
    assert gradient.isfinite().all()


def test_distance_to_degeneracy() -> None:
    embeddings, left, right = inputs(2)
    coupling = left @ right.T
    queries, keys, visible = embeddings @ left, embeddings @ right, visible_past(LENGTH, LENGTH, False)
    found = degeneracy(attention_blocks(queries, keys, visible), WIDTH)
    t = LENGTH - 1
    weights = torch.softmax(queries[0, t] @ keys[0, :t].T, 0)
    centred = embeddings[0, :t] - weights @ embeddings[0, :t]
    eigenvalues = torch.linalg.eigvals(coupling @ (centred.T * weights) @ centred)
    assert found.spectral_radius_BT[0, t].item() == pytest.approx(eigenvalues.abs().max().item())
    assert found.smallest_eigenvalue_BT[0, t].item() == pytest.approx((1 - eigenvalues).abs().min().item())
    assert found.smallest_eigenvalue_BT[0, 0] == 1


def test_shapes_that_do_not_fit() -> None:
    tensor = torch.zeros(2, 4, 3)
    with pytest.raises(ShapeError, match=r"queries \[2, 4, 2\]"):
        attention_logdet(tensor[..., :2], tensor, visible_past(4, 4, False))
    with pytest.raises(ShapeError, match="visible_BTS"):
        attention_logdet(tensor, tensor, visible_past(4, 5, False))


@pytest.fixture(autouse=True)
def few_exact_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "EXACT_TOKENS", 2)


def test_where_all_tokens_are_exact_nothing_is_left_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "EXACT_TOKENS", LENGTH)
    estimate, error, value = _estimated(probes=2, steps=LENGTH)
    torch.testing.assert_close(estimate, value, atol=1e-6, rtol=0)
    assert error.max() < 1e-6


def _estimated(probes: int, steps: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The estimate, its standard error and the exact value, [B, T]."""
    embeddings, left, right = inputs(WIDTH)
    queries, keys, visible = embeddings @ left * scale, embeddings @ right, visible_past(LENGTH, LENGTH, False)
    generator = torch.Generator().manual_seed(7)
    found = estimate_logdet(queries, keys, visible, probes=probes, steps=steps, generator=generator)
    return found.logabs_BT, found.standard_error_BT, attention_logdet(queries, keys, visible).logabs_BT


@pytest.mark.parametrize("scale", [0.1, 0.5, -2.0])
def test_the_estimate_is_unbiased_within_its_standard_error(scale: float) -> None:
    estimate, error, value = _estimated(probes=400, steps=LENGTH, scale=scale)
    # A token that attends to two others alone has no variance: its error is where Arnoldi stops.
    deviations = (estimate - value)[:, 3:] / (error[:, 3:] + 1e-5)
    assert deviations.abs().max() < 5
    assert 0.3 < deviations.std() < 2, "the standard error is not that of the estimate"
    assert error.max() > 0


def test_the_standard_error_falls_with_the_root_of_the_probes() -> None:
    few, many = (_estimated(probes, LENGTH, 0.3)[1][:, 3:].mean().item() for probes in (25, 400))
    assert few / many == pytest.approx(4, rel=0.35)


def test_too_few_steps_are_biased_and_more_are_not() -> None:
    biases = []
    for steps in (2, 4, LENGTH):
        estimate, _, value = _estimated(probes=400, steps=steps, scale=-2.0)
        biases.append((estimate - value).mean().abs().item())
    reference, _, value = _estimated(probes=400, steps=LENGTH + 3, scale=-2.0)
    noise = (reference - value).mean().abs().item()
    assert biases[0] > 2 * biases[2]
    assert biases[2] == pytest.approx(noise, abs=1e-6), "as many steps as tokens are exact"


def test_the_estimates_gradient() -> None:
    embeddings, left, right = inputs(WIDTH)
    queries, keys = (embeddings @ left * 0.2).requires_grad_(), (embeddings @ right).requires_grad_()
    visible = visible_past(LENGTH, LENGTH, False)
    expected = torch.autograd.grad(attention_logdet(queries, keys, visible).logabs_BT.sum(), (queries, keys))
    generator = torch.Generator().manual_seed(3)
    found = estimate_logdet(queries, keys, visible, probes=800, steps=LENGTH, generator=generator)
    for estimated, true in zip(torch.autograd.grad(found.logabs_BT.sum(), (queries, keys)), expected, strict=True):
        assert (estimated - true).norm() < 0.05 * true.norm()


def test_the_estimate_refuses_too_few_probes() -> None:
    tensor = torch.zeros(1, 3, 2)
    with pytest.raises(KeelError, match="probes=1"):
        estimate_logdet(tensor, tensor, visible_past(3, 3, False), probes=1, steps=4)
