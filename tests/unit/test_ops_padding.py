"""Recurrences over padded rows against the column-by-column rule."""

from __future__ import annotations

import pytest
import torch

from keel.errors import ShapeError
from keel.ops.gru import gru, reference_gru
from keel.ops.padding import pack_left, reference_run_padded, run_padded, unpack

PATTERNS = {
    "left": ["00111111", "00000111"],
    "right": ["11111000", "11110000"],
    "interior": ["10110101", "01100110"],
    "none": ["11111111", "11111111"],
    "all": ["00000000", "11011011"],
}


def mask_of(pattern):
    return torch.tensor([[letter == "1" for letter in row] for row in PATTERNS[pattern]])


def make(groups=2, batch=2, length=8, width=3, size=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return (0.6 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    weights = (
        draw(groups, 3 * size, width),
        draw(groups, 3 * size, size),
        draw(groups, 3 * size),
        draw(groups, 3 * size),
    )
    return draw(batch, length, width), weights, draw(groups, batch, size)


def everything(run, cell, inputs, weights, mask, state, starts):
    def recurrence(inputs_BTD, state_GBH, starts_BT):
        return cell(inputs_BTD, *weights, state_GBH, starts_BT)

    states, final = run(recurrence, inputs, mask, state, starts)
    weigh = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view(states.shape)
    loss = (weigh * states).sum() + final.square().sum()
    return states.detach(), final.detach(), *torch.autograd.grad(loss, [inputs, *weights, state])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("with_starts", [False, True], ids=["one", "documents"])
def test_equals_reference(pattern, groups, with_starts):
    inputs, weights, state = make(groups)
    starts = torch.tensor([[1, 0, 0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 1, 1]]).bool() if with_starts else None
    arguments = inputs, weights, mask_of(pattern), state, starts
    given = everything(run_padded, gru, *arguments)
    expected = everything(reference_run_padded, reference_gru, *arguments)
    for value, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pattern", ["left", "interior", "all"])
def test_what_stands_at_padding_has_no_effect(pattern):
    inputs, weights, state = make()
    mask = mask_of(pattern)
    other = torch.where(mask[:, :, None], inputs, 7 * inputs + 3)
    given = everything(run_padded, gru, inputs, weights, mask, state, None)
    changed = everything(run_padded, gru, other, weights, mask, state, None)
    assert torch.equal(given[0], changed[0]) and torch.equal(given[1], changed[1])
    touched = torch.where(mask[:, :, None], inputs + 1e-4, inputs)
    assert not torch.equal(everything(run_padded, gru, touched, weights, mask, state, None)[0], given[0])


def test_no_state_is_zeros():
    inputs, weights, state = make()
    mask = mask_of("interior")
    for piece in (slice(None), slice(0, 1)):
        given = run_padded(lambda *a: gru(a[0], *weights, *a[1:]), inputs[:, piece], mask[:, piece], None)
        zeros = torch.zeros_like(state)
        expected = run_padded(lambda *a: gru(a[0], *weights, *a[1:]), inputs[:, piece], mask[:, piece], zeros)
        assert torch.equal(given[0], expected[0]) and torch.equal(given[1], expected[1])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_pieces_equal_the_whole(pattern, dtype):
    inputs, weights, state = make(dtype=dtype)
    mask = mask_of(pattern)
    states, final = run_padded(lambda *a: gru(a[0], *weights, *a[1:]), inputs, mask, state)
    pieces, carried = [], state
    for begin, end in ((0, 3), (3, 4), (4, 8)):
        piece, carried = run_padded(
            lambda *a: gru(a[0], *weights, *a[1:]), inputs[:, begin:end], mask[:, begin:end], carried
        )
        pieces.append(piece)
    exact = dtype == torch.float64
    # the carried state is float32 at least: bfloat16 pieces differ from the whole by the rounding of float32 sums
    torch.testing.assert_close(
        carried, final.to(carried.dtype), rtol=1e-12 if exact else 1e-5, atol=1e-12 if exact else 1e-5
    )
    torch.testing.assert_close(
        torch.cat(pieces, dim=2), states, rtol=1e-12 if exact else 1e-2, atol=1e-12 if exact else 1e-3
    )


def test_pack_and_unpack_are_inverse_on_attended_tokens():
    values = torch.arange(16).view(2, 8)
    mask = mask_of("interior")
    packed = pack_left(values, mask)
    assert packed[0].tolist() == [0, 2, 3, 5, 7, 1, 4, 6]
    back = unpack(packed.unsqueeze(-1), mask, torch.full((2, 1), -1)).squeeze(-1)
    assert torch.equal(back[mask], values[mask])
    assert back[1].tolist() == [-1, 9, 10, 10, 10, 13, 14, 14]


def test_integer_masks_and_none():
    inputs, weights, state = make()
    run = lambda mask: run_padded(lambda *a: gru(a[0], *weights, *a[1:]), inputs, mask, state)  # noqa: E731
    assert torch.equal(run(mask_of("interior").long())[0], run(mask_of("interior"))[0])
    torch.testing.assert_close(run(None)[0], run(mask_of("none"))[0])


def test_a_mask_that_does_not_fit_is_named():
    inputs, weights, state = make()
    with pytest.raises(ShapeError, match="mask_BT"):
        run_padded(lambda *a: gru(a[0], *weights, *a[1:]), inputs, torch.ones(2, 9), state)


def test_compiled_equals_eager():
    inputs, weights, state = make(dtype=torch.float32)
    mask = mask_of("interior")

    def run(recurrence, *arguments):
        function = torch.compile(
            lambda *a: run_padded(recurrence, *a), fullgraph=True, backend="aot_eager", dynamic=False
        )
        return function(*arguments)

    given = everything(run, gru, inputs, weights, mask, state, None)
    expected = everything(run_padded, gru, inputs, weights, mask, state, None)
    for value, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(value, wanted)
