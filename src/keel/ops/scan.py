"""Linear recurrences ``h_t = a_t h_(t-1) + b_t`` over whole sequences.

Shape suffixes: B batch (or any leading dimensions), T time, H state width.

The fast path cuts time into chunks that run side by side: a first pass finds what each chunk adds and keeps, a walk over
the chunks finds the state at which each begins, a second pass computes the states. It only multiplies and adds, as the
recurrence does, so decays near or at zero are safe. One opaque operator, ``keel::linear_scan``, with its own backward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keel.errors import ShapeError

WIDE_ENOUGH = 16384  # values a processor should handle in one call: fewer, and the overhead of the call dominates


def reference_linear_scan(
    decay_BTH: Tensor, input_BTH: Tensor, state_BH: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence one step at a time; the specification of ``linear_scan``."""
    state_BH = torch.zeros_like(input_BTH[..., 0, :]) if state_BH is None else state_BH
    states = []
    for step in range(input_BTH.shape[-2]):
        state_BH = decay_BTH[..., step, :] * state_BH + input_BTH[..., step, :]
        states.append(state_BH)
    return torch.stack(states, dim=-2), state_BH


def linear_scan(decay_BTH: Tensor, input_BTH: Tensor, state_BH: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run ``h_t = decay_t * h_(t-1) + input_t``, element by element, in at least float32.

    Args:
        decay_BTH: what is kept of the state, in [-1, 1]; any number of leading dimensions, T at least 1. Zero forgets
            all, so that a document can begin there.
        input_BTH: what is added, same shape.
        state_BH: the state before the first step; zeros when None.
    Returns: the states after every step [..., T, H] in the dtype of ``input_BTH``, and the state after the last one
        [..., H] in the dtype of the computation. Differentiable once in all three.
    Raises: ShapeError, naming the argument that does not fit.
    Reference twin: ``reference_linear_scan``.
    """
    if input_BTH.dim() < 2 or input_BTH.shape[-2] < 1:
        raise ShapeError(f"linear_scan: input_BTH is {list(input_BTH.shape)}; expected [..., T, H] with T at least 1")
    if decay_BTH.shape != input_BTH.shape:
        raise ShapeError(f"linear_scan: decay_BTH is {list(decay_BTH.shape)}; expected {list(input_BTH.shape)}")
    shape = (*input_BTH.shape[:-2], input_BTH.shape[-1])
    if state_BH is not None and state_BH.shape != shape:
        raise ShapeError(f"linear_scan: state_BH is {list(state_BH.shape)}; expected {list(shape)}")
    dtype = torch.promote_types(torch.promote_types(decay_BTH.dtype, input_BTH.dtype), torch.float32)
    state = input_BTH.new_zeros(shape, dtype=dtype) if state_BH is None else state_BH.to(dtype)
    if input_BTH.shape[-2] == 1:
        final_BH = torch.addcmul(input_BTH[..., 0, :].to(dtype), decay_BTH[..., 0, :].to(dtype), state)
        return final_BH.unsqueeze(-2).to(input_BTH.dtype), final_BH
    states_BTH = scan_forward(decay_BTH.to(dtype), input_BTH.to(dtype), state)
    return states_BTH.to(input_BTH.dtype), states_BTH[..., -1, :]


@torch.library.custom_op("keel::linear_scan", mutates_args=())
def scan_forward(decay_BTH: Tensor, input_BTH: Tensor, state_BH: Tensor) -> Tensor:
    """Return the states [..., T, H]."""
    states_BTH = torch.empty_like(input_BTH, memory_format=torch.contiguous_format)
    _scan(decay_BTH, input_BTH, state_BH, states_BTH)
    return states_BTH


@scan_forward.register_fake
def _(decay_BTH: Tensor, input_BTH: Tensor, state_BH: Tensor) -> Tensor:
    return torch.empty_like(input_BTH, memory_format=torch.contiguous_format)


@torch.library.custom_op("keel::linear_scan_backward", mutates_args=())
def scan_backward(
    grad_states_BTH: Tensor, decay_BTH: Tensor, states_BTH: Tensor, state_BH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of decay, input and state: the same recurrence, run from the last step to the first."""
    grad_input = torch.empty_like(states_BTH)
    last = grad_states_BTH[..., -1, :]
    grad_input[..., -1, :] = last
    _scan(decay_BTH[..., 1:, :], grad_states_BTH[..., :-1, :], last, grad_input[..., :-1, :], reverse=True)
    grad_decay = torch.empty_like(states_BTH)
    torch.mul(grad_input[..., 1:, :], states_BTH[..., :-1, :], out=grad_decay[..., 1:, :])
    torch.mul(grad_input[..., 0, :], state_BH, out=grad_decay[..., 0, :])
    return grad_decay, grad_input, grad_input[..., 0, :] * decay_BTH[..., 0, :]


@scan_backward.register_fake
def _(
    grad_states_BTH: Tensor, decay_BTH: Tensor, states_BTH: Tensor, state_BH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(states_BTH), torch.empty_like(states_BTH), torch.empty_like(state_BH)


def _scan(decay: Tensor, inputs: Tensor, state: Tensor, out: Tensor, reverse: bool = False) -> None:
    """Fill ``out`` [..., T, H]; with ``reverse`` from the last step to the first, ``state`` being what follows it."""
    length = inputs.shape[-2]
    chunks = _num_chunks(length, state)
    steps = length // chunks
    if chunks > 1:
        grid = slice(length - chunks * steps, length) if reverse else slice(0, chunks * steps)
        pieces = [tensor[..., grid, :].unflatten(-2, (chunks, steps)) for tensor in (decay, inputs, out)]
        begins = _chunk_states(pieces[0], pieces[1], state, reverse)
        _scan_steps(pieces[0], pieces[1], pieces[2], begins, reverse)
        state = out[..., grid, :][..., 0 if reverse else -1, :]
        rest = slice(0, grid.start) if reverse else slice(grid.stop, length)
        decay, inputs, out = decay[..., rest, :], inputs[..., rest, :], out[..., rest, :]
    _scan_steps(decay, inputs, out, state, reverse)


def _num_chunks(length: int, state: Tensor) -> int:
    """Return how many chunks run side by side: enough to fill a call, 1 where the batch alone does."""
    if state.device.type == "cpu":
        chunks = WIDE_ENOUGH // max(1, state.numel())
        return (
            min(chunks, math.isqrt(length)) if chunks > 3 else 1
        )  # the two passes cost three calls a step instead of one
    return math.isqrt(3 * length) if length > 8 else 1  # 3 launches a step of a chunk, and 1 a chunk


def _chunk_states(decay: Tensor, inputs: Tensor, state: Tensor, reverse: bool) -> Tensor:
    """Return the state [..., N, H] at which each of the chunks [..., N, S, H] begins."""
    added = torch.zeros_like(inputs[..., 0, :], memory_format=torch.contiguous_format)
    kept = torch.ones_like(added)
    for decay_step, input_step in _in_order(reverse, -2, decay, inputs):
        torch.addcmul(input_step, decay_step, added, out=added)
        kept.mul_(decay_step)
    begins = torch.empty_like(added)
    for kept_chunk, added_chunk, begin in _in_order(reverse, -2, kept, added, begins):
        begin.copy_(state)
        state = torch.addcmul(added_chunk, kept_chunk, state)
    return begins


def _scan_steps(decay: Tensor, inputs: Tensor, out: Tensor, state: Tensor, reverse: bool) -> None:
    for decay_step, input_step, out_step in _in_order(reverse, -2, decay, inputs, out):
        state = torch.addcmul(input_step, decay_step, state, out=out_step)


def _in_order(reverse: bool, dim: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    slices = list(zip(*(tensor.unbind(dim) for tensor in tensors), strict=True))
    return slices[::-1] if reverse else slices


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    decay_BTH, _, state_BH = inputs
    ctx.save_for_backward(decay_BTH, output, state_BH)


def _backward(ctx, grad_states_BTH: Tensor):  # type: ignore[no-untyped-def]
    return scan_backward(grad_states_BTH, *ctx.saved_tensors)


scan_forward.register_autograd(_backward, setup_context=_setup_context)
