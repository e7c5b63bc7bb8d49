"""The GRU operator against its naive twin and against torch.nn.GRU."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.utils.checkpoint

from keel.errors import ShapeError
from keel.ops.gru import BLOCK_STEPS, gru, reference_gru

CASES = [
    # groups, batch, length, width, size
    (1, 2, 5, 3, 4),
    (3, 2, 5, 3, 4),
    (1, 1, 2 * BLOCK_STEPS + 3, 2, 3),
    (2, 3, BLOCK_STEPS, 2, 3),
    (1, 2, 1, 3, 4),
    (3, 2, 1, 3, 4),
]


def make(groups, batch, length, width, size, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (0.6 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    weights = (
        draw(groups, 3 * size, width),
        draw(groups, 3 * size, size),
        draw(groups, 3 * size),
        draw(groups, 3 * size),
    )
    starts = torch.rand(batch, length, generator=generator) < 0.3
    starts[0, 0] = True
    return draw(batch, length, width), weights, draw(groups, batch, size), starts


def everything(function, inputs, weights, state, starts):
    """Return states, final state and every gradient of a loss that weighs each state differently."""
    states, final = function(inputs, *weights, state, starts)
    weigh = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view(states.shape)
    loss = (weigh * states).sum() + final.square().sum()
    wanted = [inputs, *weights] + ([] if state is None else [state])
    return states.detach(), final.detach(), *torch.autograd.grad(loss, wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("with_state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("with_starts", [False, True], ids=["one", "documents"])
def test_equals_reference(case, with_state, with_starts):
    inputs, weights, state, starts = make(*case)
    arguments = inputs, weights, state if with_state else None, starts if with_starts else None
    for given, expected in zip(everything(gru, *arguments), everything(reference_gru, *arguments), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("index", range(6))
def test_comparison_notices_a_small_change(index):
    inputs, weights, state, _ = make(2, 2, 5, 3, 4)
    before = everything(gru, inputs, weights, state, None)
    tensors = [inputs, *weights, state]
    with torch.no_grad():
        tensors[index].view(-1)[0] += 1e-4
    after = everything(gru, inputs, weights, state, None)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(after[0], before[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("with_starts", [False, True])
def test_gradcheck(length, with_starts):
    inputs, weights, state, starts = make(2, 2, length, 2, 3)

    def function(inputs, state, *weights):
        return gru(inputs, *weights, state, starts if with_starts else None)

    assert torch.autograd.gradcheck(function, (inputs, state, *weights))


def test_equals_torch_gru():
    inputs, weights, state, _ = make(1, 3, 40, 5, 6)
    peer = torch.nn.GRU(5, 6, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for parameter, weight in zip(peer.parameters(), weights, strict=True):
            parameter.copy_(weight[0])
    states, final = gru(inputs, *weights, state)
    expected_states, expected_final = peer(inputs, state)
    torch.testing.assert_close(states[0], expected_states)
    torch.testing.assert_close(final, expected_final)


@pytest.mark.parametrize("groups", [1, 3])
def test_without_gradients_equals_with(groups):
    inputs, weights, state, starts = make(groups, 2, 2 * BLOCK_STEPS + 5, 3, 4)
    expected = gru(inputs, *weights, state, starts)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for given, value in zip(gru(inputs, *weights, state, starts), expected, strict=True):
                assert torch.equal(given, value)


@pytest.mark.parametrize("cut", [1, 7, 39])
def test_pieces_equal_the_whole(cut):
    inputs, weights, state, starts = make(2, 2, 40, 3, 4)
    states, final = gru(inputs, *weights, state, starts)
    first, middle = gru(inputs[:, :cut], *weights, state, starts[:, :cut])
    second, last = gru(inputs[:, cut:], *weights, middle, starts[:, cut:])
    torch.testing.assert_close(torch.cat([first, second], dim=2), states, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(last, final, rtol=1e-12, atol=1e-13)


def test_backward_twice_gives_the_same():
    inputs, weights, state, starts = make(2, 2, 9, 3, 4)
    states, _ = gru(inputs, *weights, state, starts)
    loss = states.square().sum()
    first = torch.autograd.grad(loss, [inputs, *weights, state], retain_graph=True)
    second = torch.autograd.grad(loss, [inputs, *weights, state])
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_only_wanted_gradients():
    inputs, weights, state, _ = make(1, 2, 6, 3, 4)
    expected = torch.autograd.grad(gru(inputs, *weights, state)[0].sum(), weights)
    given = torch.autograd.grad(gru(inputs.detach(), *weights, state.detach())[0].sum(), weights)
    assert all(torch.equal(one, two) for one, two in zip(given, expected, strict=True))


@pytest.mark.parametrize("length", [1, 48])
def test_bfloat16_carries_a_float32_state(length):
    inputs, weights, state, starts = make(2, 2, length, 8, 8, dtype=torch.bfloat16)
    given = everything(gru, inputs, weights, state, starts)
    assert given[0].dtype == torch.bfloat16 and given[1].dtype == torch.float32
    exact = [tensor.detach().double().requires_grad_() for tensor in (inputs, *weights, state)]
    expected = everything(reference_gru, exact[0], exact[1:5], exact[5], starts)
    for value, wanted in zip(given, expected, strict=True):
        assert value.isfinite().all()
        # bfloat16 keeps 8 bits: the result and the incoming gradient are each rounded once
        torch.testing.assert_close(value.double(), wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


def test_autocast_changes_nothing():
    inputs, weights, state, starts = make(2, 2, 40, 3, 4, dtype=torch.float32)
    expected = gru(inputs, *weights, state, starts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = gru(inputs, *weights, state, starts)
    assert all(torch.equal(one, two) for one, two in zip(given, expected, strict=True))


@pytest.mark.parametrize("case", CASES[:3] + CASES[4:], ids=str)
def test_compiled_equals_eager(case):
    inputs, weights, state, starts = make(*case, dtype=torch.float32)

    def function(inputs, weights, state, starts):
        states, final = gru(2 * inputs, *weights, state, starts)
        return states + 1, final

    expected = everything(lambda i, *rest: function(i, rest[:4], *rest[4:]), inputs, weights, state, starts)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    given = everything(lambda i, *rest: compiled(i, rest[:4], *rest[4:]), inputs, weights, state, starts)
    for value, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(value, wanted)


def test_operator_keeps_the_rules_of_custom_operators():
    inputs, weights, state, starts = make(2, 2, 5, 3, 4)
    keep = starts.logical_not().T.double()
    arguments = (inputs.transpose(0, 1).contiguous(), *weights, state, keep, True)
    torch.library.opcheck(
        torch.ops.keel.gru_forward.default, [a.detach() if torch.is_tensor(a) else a for a in arguments]
    )
    states, gates = torch.ops.keel.gru_forward(*[a.detach() if torch.is_tensor(a) else a for a in arguments])
    torch.library.opcheck(
        torch.ops.keel.gru_backward.default, (torch.ones_like(states), gates, states, weights[1].detach(), keep)
    )


def test_checkpointed_equals_plain():
    inputs, weights, state, starts = make(2, 2, 9, 3, 4)

    def checkpointed(*arguments):
        return torch.utils.checkpoint.checkpoint(gru, *arguments, use_reentrant=False)

    given = everything(checkpointed, inputs, weights, state, starts)
    expected = everything(gru, inputs, weights, state, starts)
    assert all(torch.equal(one, two) for one, two in zip(given, expected, strict=True))


def test_modules_can_be_loaded_again():
    inputs, weights, state, starts = make(2, 2, 9, 3, 4)
    expected = everything(gru, inputs, weights, state, starts)
    again = importlib.reload(importlib.import_module("keel.ops.gru"))
    given = everything(again.gru, inputs, weights, state, starts)
    assert all(torch.equal(one, two) for one, two in zip(given, expected, strict=True))


@pytest.mark.parametrize(
    ("index", "shape", "name"),
    [
        (0, (2, 0, 3), "inputs_BTD"),
        (1, (2, 12, 4), "weight_ih_G3HD"),
        (2, (12, 4), "weight_hh_G3HH"),
        (3, (2, 11), "bias_ih_G3H"),
        (4, (1, 12), "bias_hh_G3H"),
        (5, (2, 3, 4), "state_GBH"),
        (6, (2, 6), "document_starts_BT"),
    ],
)
def test_a_shape_that_does_not_fit_is_named(index, shape, name):
    inputs, weights, state, starts = make(2, 2, 5, 3, 4)
    arguments = [inputs, *weights, state, starts]
    arguments[index] = torch.zeros(shape)
    with pytest.raises(ShapeError, match=name):
        gru(*arguments)
