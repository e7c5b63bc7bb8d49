"""Gated recurrent units over whole sequences: one for all layers, or G independent ones that read the same input.

Shape suffixes: G groups (independent GRUs), B batch, T time, D input width, H state width, 3H the gates (reset, update,
new) in the order of ``torch.nn.GRU``, K = 4H the gates in our own order (new from the state, reset, update, new).

The fast path is one opaque operator, ``keel::gru_forward``, with a hand-written backward. The input projection is one
matrix product over a block of steps, written straight into the gate buffer; a step is then five in-place calls (product
with the state, sigmoid, addcmul, tanh, lerp), a backward step three, and the weight gradients are one product each.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from keel.errors import ShapeError

BLOCK_STEPS = 64  # steps whose gates are prepared at a time: few enough to stay in the processor's cache


def reference_gru(
    inputs_BTD: Tensor,
    weight_ih_G3HD: Tensor,
    weight_hh_G3HH: Tensor,
    bias_ih_G3H: Tensor,
    bias_hh_G3H: Tensor,
    state_GBH: Tensor | None = None,
    document_starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the GRUs one group and one step at a time, as the formula is written; the specification of ``gru``."""
    num_groups, _, size = weight_hh_G3HH.shape
    batch, length, _ = inputs_BTD.shape
    groups, finals = [], []
    for group in range(num_groups):
        state_BH = inputs_BTD.new_zeros(batch, size) if state_GBH is None else state_GBH[group]
        states = []
        for step in range(length):
            if document_starts_BT is not None:
                state_BH = torch.where(document_starts_BT[:, step, None], torch.zeros_like(state_BH), state_BH)
            from_input = inputs_BTD[:, step] @ weight_ih_G3HD[group].T + bias_ih_G3H[group]
            from_state = state_BH @ weight_hh_G3HH[group].T + bias_hh_G3H[group]
            reset_x, update_x, new_x = from_input.chunk(3, dim=-1)
            reset_h, update_h, new_h = from_state.chunk(3, dim=-1)
            reset = torch.sigmoid(reset_x + reset_h)
            update = torch.sigmoid(update_x + update_h)
            new = torch.tanh(new_x + reset * new_h)
            state_BH = (1 - update) * new + update * state_BH
            states.append(state_BH)
        groups.append(torch.stack(states, dim=1))
        finals.append(state_BH)
    return torch.stack(groups), torch.stack(finals)


def gru(
    inputs_BTD: Tensor,
    weight_ih_G3HD: Tensor,
    weight_hh_G3HH: Tensor,
    bias_ih_G3H: Tensor,
    bias_hh_G3H: Tensor,
    state_GBH: Tensor | None = None,
    document_starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run G independent GRUs over the same sequence.

    Cho et al. 2014 in the convention of ``torch.nn.GRU``: ``r, z = sigmoid(W x + b + U h + c)``,
    ``n = tanh(W x + b + r (U h + c))``, ``h' = (1 - z) n + z h``. Computed in at least float32 whatever the dtype of
    the inputs, also under autocast.

    Args:
        inputs_BTD: what every group reads; T at least 1.
        weight_ih_G3HD, weight_hh_G3HH, bias_ih_G3H, bias_hh_G3H: as in ``torch.nn.GRU``, each with a group dimension.
        state_GBH: the state before the first token; zeros when None.
        document_starts_BT: bool, True where the state is set to zero before the token is read.
    Returns: the states after every token [G, B, T, H] in the dtype of ``inputs_BTD`` (a view: in memory, time comes
        before batch), and the state after the last one [G, B, H] in the dtype of the computation, so that a sequence read in
        pieces gives what it gives whole. Differentiable once in every tensor but the document starts.
    Raises: ShapeError, naming the argument that does not fit.
    Reference twin: ``reference_gru``.
    """
    _check_shapes(inputs_BTD, weight_ih_G3HD, weight_hh_G3HH, bias_ih_G3H, bias_hh_G3H, state_GBH, document_starts_BT)
    dtype = torch.promote_types(torch.promote_types(inputs_BTD.dtype, weight_hh_G3HH.dtype), torch.float32)
    if state_GBH is None:
        num_groups, _, size = weight_hh_G3HH.shape
        state_GBH = inputs_BTD.new_zeros(num_groups, inputs_BTD.shape[0], size, dtype=dtype)
    tensors = (inputs_BTD, weight_ih_G3HD, weight_hh_G3HH, bias_ih_G3H, bias_hh_G3H, state_GBH)
    keep_TB = None if document_starts_BT is None else document_starts_BT.logical_not().T.to(dtype)
    device = inputs_BTD.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        inputs, weight_ih, weight_hh, bias_ih, bias_hh, state = (tensor.to(dtype) for tensor in tensors)
        if inputs_BTD.shape[1] == 1:
            state = state if keep_TB is None else state * keep_TB[0, :, None]
            states_GBTH = gru_step(inputs, weight_ih, weight_hh, bias_ih, bias_hh, state).unsqueeze(2)
        elif _cudnn_fits(inputs_BTD, weight_hh_G3HH, document_starts_BT):
            states_GBTH = _cudnn_gru(inputs, weight_ih, weight_hh, bias_ih, bias_hh, state)
        else:
            states_GBTH = _sequence(inputs, weight_ih, weight_hh, bias_ih, bias_hh, state, keep_TB)
    return states_GBTH.to(inputs_BTD.dtype), states_GBTH[:, :, -1]


def _check_shapes(
    inputs: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor,
    bias_hh: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
) -> None:
    if inputs.dim() != 3 or inputs.shape[1] < 1:
        raise ShapeError(f"gru: inputs_BTD is {list(inputs.shape)}; expected [B, T, D] with T at least 1")
    if weight_hh.dim() != 3:
        raise ShapeError(f"gru: weight_hh_G3HH is {list(weight_hh.shape)}; expected [G, 3H, H]")
    batch, length, width = inputs.shape
    groups, _, size = weight_hh.shape
    expected = [
        ("weight_ih_G3HD", weight_ih, (groups, 3 * size, width)),
        ("weight_hh_G3HH", weight_hh, (groups, 3 * size, size)),
        ("bias_ih_G3H", bias_ih, (groups, 3 * size)),
        ("bias_hh_G3H", bias_hh, (groups, 3 * size)),
        ("state_GBH", state, (groups, batch, size)),
        ("document_starts_BT", starts, (batch, length)),
    ]
    for name, tensor, shape in expected:
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(f"gru: {name} is {list(tensor.shape)}; expected {list(shape)} to fit the other arguments")


def gru_step(
    inputs_B1D: Tensor,
    weight_ih_G3HD: Tensor,
    weight_hh_G3HH: Tensor,
    bias_ih_G3H: Tensor,
    bias_hh_G3H: Tensor,
    state_GBH: Tensor,
) -> Tensor:
    """Read one token, as decoding does, in few plain differentiable calls: ``gru`` without its checks and conversions.

    Args: as ``gru`` takes them, all of one dtype, which the caller saw to.
    Returns: the new state [G, B, H], in memory with H before B.
    Reference twin: ``reference_gru`` over one token.
    """
    groups, batch, size = state_GBH.shape
    if groups == 1 and state_GBH.is_cuda and not torch.compiler.is_compiling():
        weights = weight_ih_G3HD[0], weight_hh_G3HH[0], bias_ih_G3H[0], bias_hh_G3H[0]
        return torch.gru_cell(inputs_B1D[:, 0], state_GBH[0], *weights).unsqueeze(0)
    # Laid out anew where B is 1 (no copy): the strides of a dimension of one value decide which product the library takes.
    state_GBH = state_GBH.reshape(-1).view(groups, batch, size)
    state_GHB = state_GBH.mT
    from_input_G3HB = token_products(inputs_B1D, weight_ih_G3HD, bias_ih_G3H, size)
    by_gate_NHB = state_GHB.expand(3, -1, -1) if groups == 1 else state_GBH.repeat_interleave(3, 0).mT
    from_state_NHB = torch.baddbmm(bias_hh_G3H.view(-1, size, 1), weight_hh_G3HH.view(-1, size, size), by_gate_NHB)
    from_state_G3HB = from_state_NHB.view(groups, 3, size, batch)
    reset, update, _ = (from_input_G3HB + from_state_G3HB).sigmoid_().unbind(1)
    new = torch.addcmul(from_input_G3HB[:, 2], reset, from_state_G3HB[:, 2]).tanh_()
    return torch.lerp(new, state_GHB, update).mT


def token_products(inputs_B1D: Tensor, weight_GRD: Tensor, bias_GR: Tensor, size: int) -> Tensor:
    """Return ``W x + b`` of one token for groups of gates, R = K size rows each: [G, K, size, B].

    As a batch of K square products: on a processor these stream weights that are in no cache, as when a whole model ran since
    the last token, more than twice as fast as one product of a tall matrix with a vector (55 against 125 microseconds a GRU of
    width 256 on an AMD EPYC with MKL, its two products together).
    """
    groups, rows, width = weight_GRD.shape
    inputs_NDB = inputs_B1D.permute(1, 2, 0).expand(groups * rows // size, -1, -1)
    products_NHB = torch.baddbmm(bias_GR.view(-1, size, 1), weight_GRD.view(-1, size, width), inputs_NDB)
    return products_NHB.view(groups, -1, size, inputs_B1D.shape[0])


def _cudnn_fits(inputs: Tensor, weight_hh: Tensor, starts: Tensor | None) -> bool:
    return inputs.is_cuda and weight_hh.shape[0] == 1 and starts is None and not torch.compiler.is_compiling()


def _cudnn_gru(
    inputs_BTD: Tensor,
    weight_ih_G3HD: Tensor,
    weight_hh_G3HH: Tensor,
    bias_ih_G3H: Tensor,
    bias_hh_G3H: Tensor,
    state_GBH: Tensor,
) -> Tensor:
    """Let cuDNN run the one GRU. Returns its states [1, B, T, H]."""
    weights = [weight_ih_G3HD[0], weight_hh_G3HH[0], bias_ih_G3H[0], bias_hh_G3H[0]]
    # biases, one layer, no dropout, whether to keep what backward needs, one direction, batch first
    keep = torch.is_grad_enabled()
    states_BTH, _ = torch._VF.gru(inputs_BTD, state_GBH.contiguous(), weights, True, 1, 0.0, keep, False, True)  # type: ignore[attr-defined]
    return states_BTH.unsqueeze(0)


def _sequence(
    inputs_BTD: Tensor,
    weight_ih_G3HD: Tensor,
    weight_hh_G3HH: Tensor,
    bias_ih_G3H: Tensor,
    bias_hh_G3H: Tensor,
    state_GBH: Tensor,
    keep_TB: Tensor | None,
) -> Tensor:
    """Run the operator, time first. Returns the states [G, B, T, H]."""
    inputs_TBD = inputs_BTD.transpose(0, 1).contiguous()
    tensors = (inputs_TBD, weight_ih_G3HD, weight_hh_G3HH, bias_ih_G3H, bias_hh_G3H, state_GBH)
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    states_GTBH, _ = gru_forward(*tensors, keep_TB, save)
    return states_GTBH.transpose(1, 2)


@torch.library.custom_op("keel::gru_forward", mutates_args=())
def gru_forward(
    inputs_TBD: Tensor,
    weight_ih_G3HD: Tensor,
    weight_hh_G3HH: Tensor,
    bias_ih_G3H: Tensor,
    bias_hh_G3H: Tensor,
    state_GBH: Tensor,
    keep_TB: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence. Returns the states [G, T, B, H] and the gates [G, T, B, K], empty unless ``save``."""
    length, batch, width = inputs_TBD.shape
    groups, _, size = weight_hh_G3HH.shape
    states_GTBH = state_GBH.new_empty(groups, length, batch, size)
    gates_GTBK = state_GBH.new_empty(groups, length if save else 0, batch, 4 * size)
    scratch_GSBK = state_GBH.new_empty(groups, 0 if save else min(length, BLOCK_STEPS), batch, 4 * size)
    recurrent_GHJ = _state_gates_first(weight_hh_G3HH).mT.contiguous()
    bias_GJ = bias_ih_G3H.clone()
    bias_GJ[:, : 2 * size] += bias_hh_G3H[:, : 2 * size]
    for begin in range(0, length, BLOCK_STEPS):
        block = slice(begin, min(begin + BLOCK_STEPS, length))
        block_GSBK = gates_GTBK[:, block] if save else scratch_GSBK[:, : block.stop - begin]
        inputs_ND = inputs_TBD[block].reshape(-1, width)
        for group in range(groups):
            block_NK = block_GSBK[group].view(-1, 4 * size)
            block_NK[:, :size] = bias_hh_G3H[group, 2 * size :]
            torch.addmm(bias_GJ[group], inputs_ND, weight_ih_G3HD[group].T, out=block_NK[:, size:])
        before_GBH = state_GBH if begin == 0 else states_GTBH[:, begin - 1]
        keep_SB = None if keep_TB is None else keep_TB[block]
        for part in _parts(groups, state_GBH):
            _forward_steps(block_GSBK[part], states_GTBH[part, block], before_GBH[part], recurrent_GHJ[part], keep_SB)
    return states_GTBH, gates_GTBK


@gru_forward.register_fake
def _(
    inputs_TBD: Tensor,
    weight_ih_G3HD: Tensor,
    weight_hh_G3HH: Tensor,
    bias_ih_G3H: Tensor,
    bias_hh_G3H: Tensor,
    state_GBH: Tensor,
    keep_TB: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    length, batch, _ = inputs_TBD.shape
    groups, _, size = weight_hh_G3HH.shape
    states = state_GBH.new_empty(groups, length, batch, size)
    return states, state_GBH.new_empty(groups, length if save else 0, batch, 4 * size)


def _state_gates_first(tensor_G3Hx: Tensor) -> Tensor:
    """Reorder (reset, update, new) to the order of the buffer, (new, reset, update)."""
    return tensor_G3Hx.roll(tensor_G3Hx.shape[1] // 3, dims=1)


def _parts(groups: int, like: Tensor) -> list[int | slice]:
    """Return how to index groups: one at a time on a processor, whose cache holds one weight; all at once elsewhere."""
    return list(range(groups)) if groups == 1 or like.device.type == "cpu" else [slice(None)]


def _forward_steps(gates: Tensor, states: Tensor, state: Tensor, recurrent: Tensor, keep_SB: Tensor | None) -> None:
    """Fill ``states`` [(G,) S, B, H]; turn the projections in ``gates`` [(G,) S, B, K] into gate values, in place."""
    size = state.shape[-1]
    accumulate = torch.Tensor.addmm_ if state.dim() == 2 else torch.Tensor.baddbmm_
    products = gates[..., : 3 * size].unbind(-3)
    sigmoids = gates[..., size : 3 * size].unbind(-3)
    from_states, resets, updates, news = (part.unbind(-3) for part in gates.split(size, dim=-1))
    for step, out in enumerate(states.unbind(-3)):
        if keep_SB is not None:
            state = state * keep_SB[step, :, None]
        accumulate(products[step], state, recurrent)
        sigmoids[step].sigmoid_()
        news[step].addcmul_(resets[step], from_states[step]).tanh_()
        state = torch.lerp(news[step], state, updates[step], out=out)


@torch.library.custom_op("keel::gru_backward", mutates_args=())
def gru_backward(
    grad_states_GTBH: Tensor,
    gates_GTBK: Tensor,
    previous_GTBH: Tensor,
    weight_hh_G3HH: Tensor,
    keep_TB: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the gradients' recurrence. Returns those before the activations [G, T, B, K] and of the state [G, B, H]."""
    length, size = grad_states_GTBH.shape[1], grad_states_GTBH.shape[3]
    grads_GTBK = torch.empty_like(gates_GTBK)
    recurrent_GJH = _state_gates_first(weight_hh_G3HH).contiguous()
    grad_state_GBH = grad_states_GTBH[:, -1].clone()
    none_before = torch.zeros_like(grad_state_GBH)
    for begin in reversed(range(0, length, BLOCK_STEPS)):
        block = slice(begin, min(begin + BLOCK_STEPS, length))
        _local_gradients(gates_GTBK[:, block], previous_GTBH[:, block], grads_GTBK[:, block])
        for part in _parts(len(grad_state_GBH), grad_state_GBH):
            upstream = list(grad_states_GTBH[part, max(begin - 1, 0) : block.stop - 1].unbind(-3))
            if begin == 0:
                upstream.insert(0, none_before[part])
            update = gates_GTBK[part, block, :, 2 * size : 3 * size]
            keep_SB = None if keep_TB is None else keep_TB[block]
            grad_state_GBH[part] = _backward_steps(
                grads_GTBK[part, block], update, upstream, grad_state_GBH[part], recurrent_GJH[part], keep_SB
            )
    return grads_GTBK, grad_state_GBH


@gru_backward.register_fake
def _(
    grad_states_GTBH: Tensor,
    gates_GTBK: Tensor,
    previous_GTBH: Tensor,
    weight_hh_G3HH: Tensor,
    keep_TB: Tensor | None,
) -> tuple[Tensor, Tensor]:
    groups, _, batch, size = grad_states_GTBH.shape
    return torch.empty_like(gates_GTBK), gates_GTBK.new_empty(groups, batch, size)


def _local_gradients(gates: Tensor, previous: Tensor, out: Tensor) -> None:
    """Write d(h') / d(what enters each activation) to ``out``: the recurrence then only multiplies them by dL/dh'."""
    size = previous.shape[-1]
    from_state, reset, update, new = gates.split(size, dim=-1)
    out_from_state, out_reset, out_update, out_new = out.split(size, dim=-1)
    torch.sub(update.new_ones(()), update, out=out_new)
    torch.ops.aten.tanh_backward(out_new, new, grad_input=out_new)
    torch.mul(out_new, reset, out=out_from_state)
    torch.mul(out_new, from_state, out=out_reset)
    torch.ops.aten.sigmoid_backward(out_reset, reset, grad_input=out_reset)
    torch.sub(previous, new, out=out_update)
    torch.ops.aten.sigmoid_backward(out_update, update, grad_input=out_update)


def _backward_steps(
    grads: Tensor,
    update: Tensor,
    upstream: list[Tensor],
    grad_state: Tensor,
    recurrent: Tensor,
    keep_SB: Tensor | None,
) -> Tensor:
    """Multiply ``grads`` [(G,) S, B, K] by the gradient of the state, last step first; return that before the first.

    Args:
        upstream: for each step, the gradient that the state before it receives from outside the recurrence.
        grad_state: the whole gradient of the state after the last step.
    """
    size = grad_state.shape[-1]
    accumulate = torch.Tensor.addmm_ if grad_state.dim() == 2 else torch.Tensor.baddbmm_
    steps = grads.unflatten(-1, (4, size)).unbind(-4)
    products = grads[..., : 3 * size].unbind(-3)
    updates = update.unbind(-3)
    for step in reversed(range(len(upstream))):
        steps[step].mul_(grad_state.unsqueeze(-2))
        if keep_SB is None:
            grad_state = torch.addcmul(upstream[step], grad_state, updates[step])
            accumulate(grad_state, products[step], recurrent)
        else:
            through = accumulate(grad_state * updates[step], products[step], recurrent)
            grad_state = torch.addcmul(upstream[step], through, keep_SB[step, :, None])
    return grad_state


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    inputs_TBD, weight_ih, weight_hh, _, _, state, keep_TB, _ = inputs
    states, gates = output
    ctx.mark_non_differentiable(gates)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs_TBD, weight_ih, weight_hh, state, keep_TB, states, gates)


def _backward(ctx, grad_states_GTBH: Tensor | None, _: None):  # type: ignore[no-untyped-def]
    if grad_states_GTBH is None:
        return (None,) * 8
    inputs_TBD, weight_ih_G3HD, weight_hh_G3HH, state_GBH, keep_TB, states_GTBH, gates_GTBK = ctx.saved_tensors
    size = state_GBH.shape[-1]
    previous_GTBH = torch.cat([state_GBH.unsqueeze(1), states_GTBH[:, :-1]], dim=1)
    if keep_TB is not None:
        previous_GTBH = previous_GTBH * keep_TB.unsqueeze(-1)
    grads_GTBK, grad_state_GBH = gru_backward(grad_states_GTBH, gates_GTBK, previous_GTBH, weight_hh_G3HH, keep_TB)
    grads_GNK = grads_GTBK.flatten(1, 2)
    from_input, from_state = grads_GNK[..., size:], grads_GNK[..., : 3 * size]
    needs_inputs, needs_ih, needs_hh, needs_bias_ih, needs_bias_hh, *_ = ctx.needs_input_grad
    grad_inputs = grad_ih = grad_hh = grad_bias_ih = grad_bias_hh = None
    if needs_inputs:
        grad_inputs = from_input[0] @ weight_ih_G3HD[0]
        for grad, weight in zip(from_input[1:], weight_ih_G3HD[1:], strict=True):
            grad_inputs = torch.addmm(grad_inputs, grad, weight)
        grad_inputs = grad_inputs.view_as(inputs_TBD)
    if needs_ih:
        grad_ih = torch.stack([grad.T @ inputs_TBD.flatten(0, 1) for grad in from_input])
    if needs_hh:
        previous_GNH = previous_GTBH.flatten(1, 2)
        grad_hh = torch.stack([grad.T @ previous for grad, previous in zip(from_state, previous_GNH, strict=True)])
        grad_hh = grad_hh.roll(-size, dims=1)
    if needs_bias_ih:
        grad_bias_ih = from_input.sum(1)
    if needs_bias_hh:
        grad_bias_hh = from_state.sum(1).roll(-size, dims=1)
    return grad_inputs, grad_ih, grad_hh, grad_bias_ih, grad_bias_hh, grad_state_GBH, None, None


gru_forward.register_autograd(_backward, setup_context=_setup_context)
