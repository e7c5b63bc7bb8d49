"""The diagonal GRU: both ways to solve it against the loop of its formula, values, final state and every gradient.

Shapes: G groups, B batch, T time, H state width.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from keel.errors import ShapeError
from keel.ops import diagonal_gru as module
from keel.ops.diagonal_gru import diagonal_gru, newton_states, reference_diagonal_gru, sequential_states

GROUPS, BATCH, LENGTH, SIZE = 2, 3, 17, 5


def inputs(spread: float = 1.0, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Projections, diagonals, bias and first state, all with gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).to(dtype)

    state = torch.tanh(normal(GROUPS, BATCH, SIZE))
    tensors = (normal(GROUPS, BATCH, length, 3 * SIZE), normal(GROUPS, 3 * SIZE), normal(GROUPS, SIZE), state)
    return tuple(tensor.requires_grad_() for tensor in tensors)


def starts(length: int = LENGTH) -> Tensor:
    """Documents begin in the middle of one row, at the first token of another."""
    marks = torch.zeros(BATCH, length, dtype=torch.bool)
    marks[1, 7] = marks[2, 0] = marks[2, 9] = True
    return marks


@pytest.fixture(params=["sequential", "newton"])
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "newton":

        def newton(*args: Tensor) -> Tensor:
            states = newton_states(*args)
            assert states is not None, "Newton's method did not converge"
            return states

        monkeypatch.setattr(module, "sequential_states", newton)
    return request.param


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_is_the_formula(spread: float, with_starts: bool) -> None:
    marks = starts() if with_starts else None
    results = []
    for run in (diagonal_gru, reference_diagonal_gru):
        tensors = inputs(spread)
        states, final = run(*tensors, marks)
        weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
        ((states * weights).sum() + 3 * final.sum()).backward()
        results.append([states, final, *(tensor.grad for tensor in tensors)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.usefixtures("solver")
def test_in_pieces_as_whole() -> None:
    projected, weight, bias, state = inputs()
    whole, final = diagonal_gru(projected, weight, bias, state)
    first, between = diagonal_gru(projected[:, :, :6], weight, bias, state)
    second, last = diagonal_gru(projected[:, :, 6:], weight, bias, between)
    torch.testing.assert_close(torch.cat([first, second], 2), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(last, final, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_newton_reaches_rounding_in_few_iterations(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [tensor.detach() for tensor in inputs(1.0, 400, dtype)]
    monkeypatch.setattr(module, "NEWTON_STEPS", 20)
    found = newton_states(*tensors, None)
    assert found is not None, "20 iterations did not do"
    torch.testing.assert_close(found, sequential_states(*tensors, None), atol=30 * torch.finfo(dtype).eps, rtol=0)


def test_newton_far_from_its_root_stays_finite_and_says_when_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [tensor.detach() for tensor in inputs(12.0, 300)]
    found = newton_states(*tensors, None)
    expected = sequential_states(*tensors, None)
    assert found is None or torch.allclose(found, expected, atol=1e-9)
    monkeypatch.setattr(module, "NEWTON_STEPS", 1)
    assert newton_states(*tensors, None) is None


def test_half_precision_is_computed_in_float32() -> None:
    projected, weight, bias, _ = inputs(dtype=torch.float32)
    states, final = diagonal_gru(projected.bfloat16(), weight, bias)
    assert states.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    expected, _ = reference_diagonal_gru(projected.bfloat16().float(), weight, bias, torch.zeros_like(final))
    torch.testing.assert_close(states.float(), expected, atol=5e-3, rtol=0)


@pytest.mark.parametrize(
    ("index", "change"),
    [(0, lambda t: t[..., :-1]), (1, lambda t: t[:, 1:]), (2, lambda t: t[:1]), (3, lambda t: t[:, :1])],
)
def test_shapes_that_do_not_fit(index: int, change: Callable[[Tensor], Tensor]) -> None:
    tensors = list(inputs())
    tensors[index] = change(tensors[index])
    with pytest.raises(ShapeError, match=r"diagonal_gru: (projected_GBT3H|weight_G3H|bias_GH|state_GBH)"):
        diagonal_gru(*tensors)


def test_the_operator_is_registered_whole() -> None:
    tensors = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs(length=4))
    torch.library.opcheck(module.diagonal_gru_forward, (*tensors, None))
