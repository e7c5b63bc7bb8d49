"""Gated recurrent units whose recurrent matrices are diagonal: every channel keeps its own state, and time can be solved in parallel.

    r = sigmoid(p_r + u_r h)    z = sigmoid(p_z + u_z h)    n = tanh(p_n + r (u_n h + c))    h' = (1 - z) n + z h

with ``p = W x + b`` computed before. It is ``keel.ops.gru`` with diagonal U. As each channel is a scalar recurrence, its whole
trajectory is the root of T equations that Newton's method solves by linear scans (DEER, Lim et al. 2024; ParaRNN, Danieli et al.
2025): where every sequential step is a kernel launch, a few scans replace T of them. A processor takes the steps in turn, which is
less work. The backward pass is one linear scan in both.

Shape suffixes: G groups, B batch, T time, H state width, 3H the gates (reset, update, new).
"""

from __future__ import annotations

import torch
from torch import Tensor

from keel.errors import ShapeError
from keel.ops.scan import scan_forward

NEWTON_STEPS = 32  # most iterations before the steps are taken in turn; 4 to 8 are usual


def reference_diagonal_gru(
    projected_GBT3H: Tensor,
    weight_G3H: Tensor,
    bias_GH: Tensor,
    state_GBH: Tensor,
    document_starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence one step at a time, as the formula is written; the specification of ``diagonal_gru``."""
    states = []
    u_r, u_z, u_n = (part.unsqueeze(1) for part in weight_G3H.chunk(3, -1))
    for step in range(projected_GBT3H.shape[2]):
        if document_starts_BT is not None:
            state_GBH = torch.where(document_starts_BT[:, step, None], torch.zeros_like(state_GBH), state_GBH)
        p_r, p_z, p_n = projected_GBT3H[:, :, step].chunk(3, -1)
        reset, update = torch.sigmoid(p_r + u_r * state_GBH), torch.sigmoid(p_z + u_z * state_GBH)
        new = torch.tanh(p_n + reset * (u_n * state_GBH + bias_GH.unsqueeze(1)))
        state_GBH = (1 - update) * new + update * state_GBH
        states.append(state_GBH)
    return torch.stack(states, 2), state_GBH


def diagonal_gru(
    projected_GBT3H: Tensor,
    weight_G3H: Tensor,
    bias_GH: Tensor,
    state_GBH: Tensor | None = None,
    document_starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run G independent diagonal GRUs, in at least float32.

    Args:
        projected_GBT3H: what enters the gates from the input, with its bias; T at least 1.
        weight_G3H: the diagonals u.
        bias_GH: c, the recurrent bias of the candidate.
        state_GBH: the state before the first token, in [-1, 1]; zeros when None.
        document_starts_BT: bool, True where the state is set to zero before the token is read.
    Returns: the states after every token [G, B, T, H] in the dtype of ``projected_GBT3H``, and the last one [G, B, H] in that of the
        computation. Differentiable once in all but the document starts.
    Raises: ShapeError, naming the argument that does not fit.
    Reference twin: ``reference_diagonal_gru``.
    """
    _check_shapes(projected_GBT3H, weight_G3H, bias_GH, state_GBH, document_starts_BT)
    groups, batch, _, width = projected_GBT3H.shape
    dtype = torch.promote_types(torch.promote_types(projected_GBT3H.dtype, weight_G3H.dtype), torch.float32)
    if state_GBH is None:
        state_GBH = projected_GBT3H.new_zeros(groups, batch, width // 3, dtype=dtype)
    keep_BT = None if document_starts_BT is None else document_starts_BT.logical_not().to(dtype)
    tensors = (projected_GBT3H.to(dtype), weight_G3H.to(dtype), bias_GH.to(dtype), state_GBH.to(dtype))
    states_GBTH = diagonal_gru_forward(*tensors, keep_BT)
    return states_GBTH.to(projected_GBT3H.dtype), states_GBTH[:, :, -1]


def _check_shapes(projected: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, starts: Tensor | None) -> None:
    if projected.dim() != 4 or projected.shape[2] < 1 or projected.shape[3] % 3:
        raise ShapeError(
            f"diagonal_gru: projected_GBT3H is {list(projected.shape)}; expected [G, B, T, 3H] with T at least 1"
        )
    groups, batch, length, width = projected.shape
    expected = [
        ("weight_G3H", weight, (groups, width)),
        ("bias_GH", bias, (groups, width // 3)),
        ("state_GBH", state, (groups, batch, width // 3)),
        ("document_starts_BT", starts, (batch, length)),
    ]
    for name, tensor, shape in expected:
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(f"diagonal_gru: {name} is {list(tensor.shape)}; expected {list(shape)}")


@torch.library.custom_op("keel::diagonal_gru_forward", mutates_args=())
def diagonal_gru_forward(
    projected_GBT3H: Tensor, weight_G3H: Tensor, bias_GH: Tensor, state_GBH: Tensor, keep_BT: Tensor | None
) -> Tensor:
    """Return the states [G, B, T, H]."""
    if state_GBH.device.type != "cpu":
        states_GBTH = newton_states(projected_GBT3H, weight_G3H, bias_GH, state_GBH, keep_BT)
        if states_GBTH is not None:
            return states_GBTH
    return sequential_states(projected_GBT3H, weight_G3H, bias_GH, state_GBH, keep_BT)


@diagonal_gru_forward.register_fake
def _(
    projected_GBT3H: Tensor, weight_G3H: Tensor, bias_GH: Tensor, state_GBH: Tensor, keep_BT: Tensor | None
) -> Tensor:
    return projected_GBT3H.new_empty(*projected_GBT3H.shape[:3], projected_GBT3H.shape[3] // 3)


def sequential_states(
    projected_GBT3H: Tensor, weight_G3H: Tensor, bias_GH: Tensor, state_GBH: Tensor, keep_BT: Tensor | None
) -> Tensor:
    """One step after the other: seven in-place calls each."""
    groups, batch, length, width = projected_GBT3H.shape
    size = width // 3
    # Time first and gates apart, so that every step works on whole pieces of memory.
    entering_TNGBH = projected_GBT3H.unflatten(-1, (3, size)).permute(2, 3, 0, 1, 4).contiguous()
    states_TGBH = state_GBH.new_empty(length, groups, batch, size)
    u_2GBH = weight_G3H.view(groups, 3, size).movedim(1, 0)[:2].unsqueeze(2)
    u_n, c = weight_G3H[:, 2 * size :].unsqueeze(1), bias_GH.unsqueeze(1)
    for step in range(length):
        if keep_BT is not None:
            state_GBH = state_GBH * keep_BT[:, step, None]
        gates, candidate = entering_TNGBH[step, :2], entering_TNGBH[step, 2]
        reset, update = gates.addcmul_(u_2GBH, state_GBH).sigmoid_().unbind(0)
        new = candidate.addcmul_(reset, torch.addcmul(c, u_n, state_GBH)).tanh_()
        state_GBH = torch.lerp(new, state_GBH, update, out=states_TGBH[step])
    return states_TGBH.permute(1, 2, 0, 3).contiguous()


def newton_states(
    projected_GBT3H: Tensor, weight_G3H: Tensor, bias_GH: Tensor, state_GBH: Tensor, keep_BT: Tensor | None
) -> Tensor | None:
    """All steps at once: linear scans until the trajectory solves the recurrence to rounding; None where it did not in time.

    The derivative of a step is held in [-1, 1] and the trajectory in the range that it cannot leave, which changes neither its root
    nor that t tokens are exact after t iterations: far from the root nothing overflows.
    """
    largest = torch.maximum(state_GBH.abs().amax(), torch.ones_like(state_GBH[0, 0, 0]))
    states_GBTH = state_GBH.new_zeros(*projected_GBT3H.shape[:3], state_GBH.shape[-1])
    tolerance = 8 * torch.finfo(states_GBTH.dtype).eps
    for _ in range(NEWTON_STEPS):
        before_GBTH = _before(states_GBTH, state_GBH, keep_BT)
        reset, update, inner, new = _gates(projected_GBT3H, weight_G3H, bias_GH, before_GBTH)
        after_GBTH = torch.lerp(new, before_GBTH, update)
        if bool((after_GBTH - states_GBTH).abs().amax() <= tolerance * largest):
            return after_GBTH
        slope_GBTH = _slope(reset, update, inner, new, before_GBTH, weight_G3H).clamp(-1, 1)
        decay_GBTH = slope_GBTH if keep_BT is None else slope_GBTH * keep_BT.unsqueeze(-1)
        solved_GBTH = scan_forward(decay_GBTH, after_GBTH - slope_GBTH * before_GBTH, state_GBH)
        states_GBTH = torch.minimum(torch.maximum(solved_GBTH, -largest), largest)
    return None


def _before(states_GBTH: Tensor, state_GBH: Tensor, keep_BT: Tensor | None) -> Tensor:
    """Return the state that each step reads."""
    before_GBTH = torch.cat([state_GBH.unsqueeze(2), states_GBTH[:, :, :-1]], 2)
    return before_GBTH if keep_BT is None else before_GBTH * keep_BT.unsqueeze(-1)


def _gates(
    projected_GBT3H: Tensor, weight_G3H: Tensor, bias_GH: Tensor, before_GBTH: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return reset, update, ``u_n h + c`` and the candidate of every step."""
    u_r, u_z, u_n = (part[:, None, None] for part in weight_G3H.chunk(3, -1))
    p_r, p_z, p_n = projected_GBT3H.chunk(3, -1)
    reset = torch.addcmul(p_r, u_r, before_GBTH).sigmoid_()
    update = torch.addcmul(p_z, u_z, before_GBTH).sigmoid_()
    inner = torch.addcmul(bias_GH[:, None, None], u_n, before_GBTH)
    return reset, update, inner, torch.addcmul(p_n, reset, inner).tanh_()


def _slope(reset: Tensor, update: Tensor, inner: Tensor, new: Tensor, before: Tensor, weight_G3H: Tensor) -> Tensor:
    """Return ``dh' / dh`` of every step."""
    u_r, u_z, u_n = (part[:, None, None] for part in weight_G3H.chunk(3, -1))
    through_new = (1 - update) * (1 - new * new) * reset * (u_n + inner * (1 - reset) * u_r)
    return update * (1 + (before - new) * (1 - update) * u_z) + through_new


@torch.library.custom_op("keel::diagonal_gru_backward", mutates_args=())
def diagonal_gru_backward(
    grad_states_GBTH: Tensor,
    projected_GBT3H: Tensor,
    weight_G3H: Tensor,
    bias_GH: Tensor,
    state_GBH: Tensor,
    keep_BT: Tensor | None,
    states_GBTH: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of projections, diagonals, bias and first state: one scan from the last step to the first."""
    before_GBTH = _before(states_GBTH, state_GBH, keep_BT)
    reset, update, inner, new = _gates(projected_GBT3H, weight_G3H, bias_GH, before_GBTH)
    slope_GBTH = _slope(reset, update, inner, new, before_GBTH, weight_G3H)
    if keep_BT is not None:
        slope_GBTH = slope_GBTH * keep_BT.unsqueeze(-1)
    # What reaches a state: its own gradient, and what reaches the next one times the slope between them.
    follows_GBTH = torch.cat([slope_GBTH[:, :, 1:], torch.zeros_like(slope_GBTH[:, :, :1])], 2)
    reaches_GBTH = scan_forward(follows_GBTH.flip(2), grad_states_GBTH.flip(2), torch.zeros_like(state_GBH)).flip(2)
    grad_new = reaches_GBTH * (1 - update) * (1 - new * new)
    grad_reset = grad_new * inner * reset * (1 - reset)
    grad_update = reaches_GBTH * (before_GBTH - new) * update * (1 - update)
    grad_inner = grad_new * reset
    grad_projected = torch.cat([grad_reset, grad_update, grad_new], -1)
    grad_weight = torch.cat([(grad * before_GBTH).sum((1, 2)) for grad in (grad_reset, grad_update, grad_inner)], -1)
    grad_state = (reaches_GBTH[:, :, 0] * slope_GBTH[:, :, 0]).contiguous()
    return grad_projected, grad_weight, grad_inner.sum((1, 2)), grad_state


@diagonal_gru_backward.register_fake
def _(
    grad_states_GBTH: Tensor,
    projected_GBT3H: Tensor,
    weight_G3H: Tensor,
    bias_GH: Tensor,
    state_GBH: Tensor,
    keep_BT: Tensor | None,
    states_GBTH: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    empty = grad_states_GBTH.new_empty
    return empty(projected_GBT3H.shape), empty(weight_G3H.shape), empty(bias_GH.shape), empty(state_GBH.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, output)


def _backward(ctx, grad_states_GBTH):  # type: ignore[no-untyped-def]
    return *diagonal_gru_backward(grad_states_GBTH.contiguous(), *ctx.saved_tensors), None


diagonal_gru_forward.register_autograd(_backward, setup_context=_setup_context)
