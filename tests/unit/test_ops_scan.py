"""The linear recurrence against its naive twin."""

from __future__ import annotations

import math

import pytest
import torch

from keel.errors import ShapeError
from keel.ops import scan
from keel.ops.scan import linear_scan, reference_linear_scan

SHAPES = [(1, 1, 3), (2, 7, 3), (1, 100, 2), (2, 3, 64, 5), (1, 101, 4), (40, 4), (2, 2, 1, 3)]


@pytest.fixture(params=[1, scan.WIDE_ENOUGH], ids=["sequential", "chunked"], autouse=True)
def chunking(request, monkeypatch):
    """Force each of the two paths; the shapes are small enough that the second always cuts."""
    monkeypatch.setattr(scan, "WIDE_ENOUGH", request.param)


def make(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    decay = torch.rand(shape, generator=generator, dtype=torch.float64)
    # a third of the decays forgets everything, a third keeps everything
    kind = torch.rand(shape, generator=generator)
    decay = torch.where(kind < 1 / 3, 0.0, torch.where(kind > 2 / 3, 1.0, decay))
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    state = torch.randn((*shape[:-2], shape[-1]), generator=generator, dtype=torch.float64)
    return [tensor.to(dtype).requires_grad_() for tensor in (decay, inputs, state)]


def everything(function, decay, inputs, state):
    states, final = function(decay, inputs, state)
    weigh = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view(states.shape)
    loss = (weigh * states).sum() + final.square().sum()
    wanted = [decay, inputs] + ([] if state is None else [state])
    return states.detach(), final.detach(), *torch.autograd.grad(loss, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_state", [False, True], ids=["zeros", "state"])
def test_equals_reference(shape, with_state):
    decay, inputs, state = make(shape)
    arguments = decay, inputs, state if with_state else None
    given = everything(linear_scan, *arguments)
    expected = everything(reference_linear_scan, *arguments)
    for value, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("index", range(3))
def test_comparison_notices_a_small_change(index):
    arguments = make((2, 30, 3))
    before = everything(linear_scan, *arguments)
    with torch.no_grad():
        arguments[index].view(-1)[:] += 1e-6
    after = everything(linear_scan, *arguments)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(after[0], before[0], rtol=1e-11, atol=1e-12)


def test_chunking_is_as_forced(request):
    chunks = scan._num_chunks(100, torch.zeros(1, 2))
    assert chunks == (math.isqrt(100) if "chunked" in request.node.name else 1)


@pytest.mark.parametrize("length", [1, 11])
def test_gradcheck(length):
    assert torch.autograd.gradcheck(linear_scan, tuple(make((2, length, 2))))


@pytest.mark.parametrize("cut", [1, 20, 99])
def test_pieces_equal_the_whole(cut):
    decay, inputs, state = make((2, 100, 3))
    states, final = linear_scan(decay, inputs, state)
    first, middle = linear_scan(decay[:, :cut], inputs[:, :cut], state)
    second, last = linear_scan(decay[:, cut:], inputs[:, cut:], middle)
    torch.testing.assert_close(torch.cat([first, second], dim=-2), states, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(last, final, rtol=1e-12, atol=1e-13)


def test_any_strides():
    decay, inputs, state = make((2, 50, 3))
    expected = everything(linear_scan, decay, inputs, state)

    def strided(decay, inputs, state):
        return linear_scan(decay.transpose(0, 1).contiguous().transpose(0, 1), inputs.mT.contiguous().mT, state)

    for value, wanted in zip(everything(strided, decay, inputs, state), expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("shape", [(2, 200, 4), (2, 1, 4)], ids=str)
def test_bfloat16_carries_a_float32_state(shape):
    decay, inputs, state = make(shape, torch.bfloat16)
    given = everything(linear_scan, decay, inputs, state)
    assert given[0].dtype == torch.bfloat16 and given[1].dtype == torch.float32
    exact = [tensor.detach().double().requires_grad_() for tensor in (decay, inputs, state)]
    for value, wanted in zip(given, everything(reference_linear_scan, *exact), strict=True):
        assert value.isfinite().all()
        # bfloat16 keeps 8 bits: the result and the incoming gradient are each rounded once
        torch.testing.assert_close(value.double(), wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


def test_long_and_slow_decay_stays_stable():
    inputs = torch.ones(1, 8_192, 2)
    decay = torch.full_like(inputs, 1 - 2**-9)
    _, final = linear_scan(decay, inputs)
    torch.testing.assert_close(final, torch.full_like(final, 512.0), rtol=1e-4, atol=0)
    nothing, _ = linear_scan(torch.zeros_like(decay), inputs)
    assert torch.equal(nothing, inputs)


@pytest.mark.parametrize("shape", [(2, 30, 3), (2, 1, 3)], ids=str)
def test_compiled_equals_eager(shape):
    arguments = make(shape, torch.float32)

    def function(decay, inputs, state):
        states, final = linear_scan(decay, 2 * inputs, state)
        return states + 1, final

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    for value, wanted in zip(everything(compiled, *arguments), everything(function, *arguments), strict=True):
        torch.testing.assert_close(value, wanted)


def test_operators_keep_the_rules_of_custom_operators():
    decay, inputs, state = (tensor.detach() for tensor in make((2, 30, 3)))
    torch.library.opcheck(torch.ops.keel.linear_scan.default, (decay, inputs, state))
    states = torch.ops.keel.linear_scan(decay, inputs, state)
    torch.library.opcheck(torch.ops.keel.linear_scan_backward.default, (inputs, decay, states, state))


@pytest.mark.parametrize(
    ("index", "shape", "name"), [(0, (2, 6, 3), "decay_BTH"), (1, (2, 0, 3), "input_BTH"), (2, (3,), "state_BH")]
)
def test_a_shape_that_does_not_fit_is_named(index, shape, name):
    arguments = make((2, 5, 3))
    arguments[index] = torch.zeros(shape)
    with pytest.raises(ShapeError, match=name):
        linear_scan(*arguments)
