"""The dynamic state recurrence over a whole sequence, as one opaque operator with a hand-written backward.

The state feeds the temporal core, so time stays sequential. All that depends on the host alone comes in computed; a step is then
one product for the gates, one for the direction, one for the inner products, and a handful of calls on [B, 1] numbers, all into
buffers whose views are made beforehand. Going back, every derivative that does not depend on the incoming gradient is prepared
for all steps at once: a step multiplies by them, and every weight gradient is one product at the end.

What is left in the two loops is mostly the time that it takes to call them from Python. On a processor with a C compiler they are those of
``recurrence.c``, which are six times as quick; elsewhere those in this file.

Written for the first readings of ``DynamicStateConfig`` (trajectory, directional); the others run ``dynamics.step`` in a loop.
Reference twin: ``reference_dynamic_state``; a shorter one: ``dynamics.step`` in a loop.

Shapes: T tokens (time comes first here), B batch, K state size. A row [B, 4K] holds (M TPC, TPC, s, query of the next token); a
gate buffer [B, 4K] (new from the TPC, reset, update, new from the input).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_ssize_t
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keel.ops.compiled import compiled, pointers
from keel.streams.dynamic_state.dynamics import EPSILON, StepWeights, TokenParts

_SOURCE = Path(__file__).with_name("recurrence.c")


def dynamic_state_recurrence(
    parts: TokenParts, weights: StepWeights, retention: float, before_B2K: Tensor, starts_BT: Tensor | None
) -> Tensor:
    """Return [TPC, s] after every token, [B, T, 2K], differentiable once in every tensor but ``starts_BT``.

    Args:
        parts: what depends on the host alone, [B, T, ...], in float32 or float64.
        weights: with a direction.
        retention: alpha, in [0, 1).
        before_B2K: [TPC, s] before the first token.
        starts_BT: bool, True where both are set to zero before the token is read.
    """
    assert weights.direction_KK is not None
    # s' = a s + g p with a = (alpha S / 2) (2 T) and g = ((1 - alpha) S / 2 N) I C (2 T) / ‖p‖, p = M TPC
    half_BT1 = 0.5 * parts.substrate_B1
    factors_BT2 = torch.cat([(1 - retention) * half_BT1 / parts.noise_B1, retention * half_BT1], -1)
    keep_TB = None if starts_BT is None else starts_BT.logical_not().T.to(before_B2K.dtype)
    tensors = [
        *(
            part.transpose(0, 1).contiguous()
            for part in (parts.gates_B3K, parts.query_BK, parts.coherence_B1, factors_BT2)
        ),
        *(weights.state_3KK, weights.tpc_3KK, weights.tpc_bias_3K, weights.coherence_K, weights.direction_KK),
        before_B2K.contiguous(),
    ]
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    states_TB2K, *_ = dynamic_state_forward(*tensors, keep_TB, save)
    return states_TB2K.transpose(0, 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let one thread do the steps: their products are too small to share, and a second one would only spin beside it."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _resets(keep_TB: Tensor | None) -> set[int]:
    """Return the tokens before which some row is set to zero."""
    return set() if keep_TB is None else set((keep_TB == 0).any(1).nonzero().flatten().tolist())


def _compiled_for(tensor: Tensor) -> CDLL | None:
    """Return the compiled loops, None where the ones in Python are to be taken."""
    return compiled(_SOURCE, tensor.dtype) if tensor.device.type == "cpu" else None


def _gate_weight(state_3KK: Tensor, tpc_3KK: Tensor) -> Tensor:
    """Return the weight [2K, 4K] that takes [TPC, s] to a gate buffer."""
    size = tpc_3KK.shape[1]
    weight = tpc_3KK.new_zeros(2 * size, 4 * size)
    weight[:size, :size] = tpc_3KK[2 * size :].T
    weight[:size, size : 3 * size] = tpc_3KK[: 2 * size].T
    weight[size:, size:] = state_3KK.T
    return weight


@torch.library.custom_op("keel::dynamic_state_forward", mutates_args=())
def dynamic_state_forward(
    gates_TB3K: Tensor,
    query_TBK: Tensor,
    coherence_TB1: Tensor,
    factors_TB2: Tensor,
    state_3KK: Tensor,
    tpc_3KK: Tensor,
    tpc_bias_3K: Tensor,
    coherence_K: Tensor,
    direction_KK: Tensor,
    before_B2K: Tensor,
    keep_TB: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence. Returns the states [T, B, 2K] and, empty unless ``save``, rows and gates for the way back."""
    length, batch, size = query_TBK.shape
    rows = query_TBK.new_zeros(length + 1, batch, 4 * size)
    rows[0, :, size : 3 * size] = before_B2K
    rows[:-1, :, 3 * size :] = query_TBK
    gates = query_TBK.new_empty(length, batch, 4 * size)
    gates[..., :size] = tpc_bias_3K[2 * size :]
    torch.add(gates_TB3K[..., : 2 * size], tpc_bias_3K[: 2 * size], out=gates[..., size : 3 * size])
    gates[..., 3 * size :] = gates_TB3K[..., 2 * size :]
    states = query_TBK.new_empty(length, batch, 2 * size)
    weights = (_gate_weight(state_3KK, tpc_3KK), direction_KK.T.contiguous(), coherence_K.contiguous())
    keep_TB = None if keep_TB is None else keep_TB.contiguous()
    given = (rows, gates, coherence_TB1.contiguous(), factors_TB2.contiguous(), *weights, keep_TB, states)
    library = _compiled_for(rows)
    if library is not None:
        library.forward(*map(c_ssize_t, (length, batch, size)), *pointers(*given))
    else:
        with _one_thread():
            _forward_steps(*given)
    if not save:
        rows, gates = query_TBK.new_empty(0), query_TBK.new_empty(0)
    return states, rows, gates


def _forward_steps(
    rows: Tensor,
    gates: Tensor,
    coherence_TB1: Tensor,
    factors_TB2: Tensor,
    gate_weight: Tensor,
    direction: Tensor,
    coherence_K: Tensor,
    keep_TB: Tensor | None,
    states: Tensor,
) -> None:
    """Fill ``rows``, ``gates`` (with gate values) and ``states``.

    What is one number a row has one buffer for all steps: the way back makes these numbers again, for all steps at once.
    """
    batch, size, reset = rows.shape[1], rows.shape[2] // 4, _resets(keep_TB)
    pairs = rows[..., size : 3 * size].unbind(0)
    ps, tpcs, ss, _ = (part.unbind(0) for part in rows.split(size, -1))
    columns = rows.view(-1, batch, 4, size).unbind(0)
    both = rows[..., : 2 * size].view(-1, batch, 2, size).unbind(0)
    sigmoids = gates[..., size : 3 * size].unbind(0)
    from_tpc, resets, updates, news = (part.unbind(0) for part in gates.split(size, -1))
    factors, offsets = factors_TB2.unbind(0), coherence_TB1.unbind(0)
    # Inner products of a TPC with the row before it; of those with the TPC before and with the query, the cosines in place.
    inner = rows.new_empty(batch, 4, 1)
    inner_pair, with_before, with_query = inner[:, 1::2], inner[:, 1], inner[:, 3]
    length, length_before = rows.new_empty(batch, 2), rows.new_empty(batch, 2)  # of p and TPC
    views = [(x, x[:, :1], x[:, 1:], x[:, 1:].unsqueeze(-1)) for x in (length_before, length)]
    i, continuity, c, scaled = (rows.new_empty(batch, width) for width in (1, 1, 1, 2))
    taken, retained = scaled.split(1, -1)
    from_p = rows.new_empty(batch, size)
    coherence_K1 = coherence_K.unsqueeze(-1)
    one = rows.new_ones(())
    torch.linalg.vector_norm(both[0], dim=-1, out=length_before).add_(EPSILON)
    for t, gate in enumerate(gates.unbind(0)):
        (before, _, tpc_before, _), (now, p_now, _, now_column) = views if t % 2 == 0 else reversed(views)
        if t in reset:
            assert keep_TB is not None
            if t:
                states[t - 1] = pairs[t]
            pairs[t].mul_(keep_TB[t, :, None])
            torch.linalg.vector_norm(both[t], dim=-1, out=before).add_(EPSILON)
        gate.addmm_(pairs[t], gate_weight)
        sigmoids[t].sigmoid_()
        news[t].addcmul_(resets[t], from_tpc[t]).tanh_()
        tpc = tpcs[t + 1]
        torch.lerp(news[t], tpcs[t], updates[t], out=tpc)
        torch.mm(tpc, direction, out=ps[t + 1])
        torch.linalg.vector_norm(both[t + 1], dim=-1, out=now).add_(EPSILON)
        torch.bmm(columns[t], tpc.unsqueeze(-1), out=inner)
        inner_pair.div_(now_column)
        torch.addcdiv(one, with_before, tpc_before, out=continuity)
        torch.mul(factors[t], continuity, out=scaled)
        torch.addmm(offsets[t], tpc, coherence_K1, out=i).sigmoid_()
        torch.clamp(with_query, 0.0, 1.0, out=c)
        taken.mul_(i).mul_(c).div_(p_now)
        torch.mul(ps[t + 1], taken, out=from_p)
        torch.addcmul(from_p, ss[t], retained, out=ss[t + 1])
    untouched = [t for t in range(len(gates)) if t + 1 not in reset]
    if reset:
        states[untouched] = rows[1:, :, size : 3 * size][untouched]
    else:
        states.copy_(rows[1:, :, size : 3 * size])


@dynamic_state_forward.register_fake
def _(
    gates_TB3K: Tensor,
    query_TBK: Tensor,
    coherence_TB1: Tensor,
    factors_TB2: Tensor,
    state_3KK: Tensor,
    tpc_3KK: Tensor,
    tpc_bias_3K: Tensor,
    coherence_K: Tensor,
    direction_KK: Tensor,
    before_B2K: Tensor,
    keep_TB: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    length, batch, size = query_TBK.shape
    states = query_TBK.new_empty(length, batch, 2 * size)
    if not save:
        return states, query_TBK.new_empty(0), query_TBK.new_empty(0)
    rows = query_TBK.new_empty(length + 1, batch, 4 * size)
    return states, rows, query_TBK.new_empty(length, batch, 4 * size)


def _backward_steps(
    grad_gates: Tensor,
    grads: Tensor,
    jacobian_TB22K: Tensor,
    outer_TB2K: Tensor,
    through_TB2K: Tensor,
    taken_TB1: Tensor,
    gate_weight_4K2K: Tensor,
    direction_KK: Tensor,
    keep_TB: Tensor | None,
    grad_numbers: Tensor,
    grad_before: Tensor,
) -> None:
    """Turn local gradients into those of the gates, add to ``grads`` what states receive from later ones, and fill the last two."""
    length, batch, double = grads.shape
    size = double // 2
    gate_views = grad_gates.view(length, batch, 4, size).unbind(0)
    gate_steps, steps = grad_gates.unbind(0), [grad_before, *grads.unbind(0)]
    from_tpcs = [grad_before[:, :size], *grads[..., :size].unbind(0)]
    from_states, columns = grads[..., size:].unbind(0), grads[..., size:].unsqueeze(-1).unbind(0)
    numbers, outers, jacobians = grad_numbers.unbind(0), outer_TB2K.unbind(0), jacobian_TB22K.unbind(0)
    number_rows = grad_numbers.transpose(2, 3).unbind(0)
    from_numbers = grads.new_empty(batch, 1, double)
    to_tpc, to_before = from_numbers.squeeze(1).split(size, -1)
    from_state = grads.new_empty(batch, size)
    tpc_rows = grads[..., :size].unsqueeze(-2).unbind(0)
    throughs, takens = through_TB2K.unbind(0), taken_TB1.unbind(0)
    reset = _resets(keep_TB)
    for t in reversed(range(length)):
        grad_tpc, before = from_tpcs[t + 1], steps[t]
        torch.bmm(outers[t], columns[t], out=numbers[t])
        torch.bmm(number_rows[t], jacobians[t], out=from_numbers)
        torch.mul(from_states[t], takens[t], out=from_state)
        grad_tpc.add_(to_tpc).addmm_(from_state, direction_KK)
        gate_views[t].mul_(tpc_rows[t])
        if t in reset:
            assert keep_TB is not None
            inside = torch.addcmul(gate_steps[t] @ gate_weight_4K2K, steps[t + 1], throughs[t])
            inside[:, :size] += to_before
            before.addcmul_(inside, keep_TB[t, :, None])
        else:
            before.addmm_(gate_steps[t], gate_weight_4K2K).addcmul_(steps[t + 1], throughs[t])
            from_tpcs[t].add_(to_before)


@torch.library.custom_op("keel::dynamic_state_backward", mutates_args=())
def dynamic_state_backward(
    grad_states_TB2K: Tensor,
    local_TB4K: Tensor,
    jacobian_TB22K: Tensor,
    outer_TB2K: Tensor,
    through_TB2K: Tensor,
    taken_TB1: Tensor,
    gate_weight_4K2K: Tensor,
    direction_KK: Tensor,
    keep_TB: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the gradients' recurrence, last token first.

    Args:
        grad_states_TB2K: what the states after each token receive from outside.
        local_TB4K: d TPC / d what enters each gate.
        jacobian_TB22K: d g and d a (see ``dynamic_state_recurrence``) / d [TPC, the TPC before].
        outer_TB2K: p and the s before, whose inner products with the gradient of s are those of g and a. [T, B, 2, K]
        through_TB2K: the update gate and a: what TPC and s hand on of their own gradient.
        taken_TB1: g.
    Returns: the gradients of the gates [T, B, 4K], of the states after each token [T, B, 2K], of g and a [T, B, 2, 1], and of the
        states before the first token [B, 2K].
    """
    length, batch, double = grad_states_TB2K.shape
    size = double // 2
    grad_gates = local_TB4K.clone(memory_format=torch.contiguous_format)
    grads = grad_states_TB2K.clone(memory_format=torch.contiguous_format)
    grad_numbers = grads.new_empty(length, batch, 2, 1)
    grad_before = grads.new_zeros(batch, double)
    jacobians, outers, throughs, takens, gate_weight, direction = (
        tensor.contiguous()
        for tensor in (jacobian_TB22K, outer_TB2K, through_TB2K, taken_TB1, gate_weight_4K2K, direction_KK)
    )
    keep_TB = None if keep_TB is None else keep_TB.contiguous()
    read = (jacobians, outers, throughs, takens, gate_weight, direction, keep_TB)
    library = _compiled_for(grads)
    if library is not None:
        scratch = torch.empty_like(grad_before)
        given = (grad_gates, grads, *read, grad_numbers, scratch, grad_before)
        library.backward(*map(c_ssize_t, (length, batch, size)), *pointers(*given))
    else:
        with _one_thread():
            _backward_steps(grad_gates, grads, *read, grad_numbers, grad_before)
    return grad_gates, grads, grad_numbers, grad_before


@dynamic_state_backward.register_fake
def _(
    grad_states_TB2K: Tensor,
    local_TB4K: Tensor,
    jacobian_TB22K: Tensor,
    outer_TB2K: Tensor,
    through_TB2K: Tensor,
    taken_TB1: Tensor,
    gate_weight_4K2K: Tensor,
    direction_KK: Tensor,
    keep_TB: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length, batch, double = grad_states_TB2K.shape
    numbers = grad_states_TB2K.new_empty(length, batch, 2, 1)
    before = grad_states_TB2K.new_empty(batch, double)
    gates = local_TB4K.new_empty(local_TB4K.shape)
    return gates, grad_states_TB2K.new_empty(length, batch, double), numbers, before


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, query, offset, factors, state_3KK, tpc_3KK, _, coherence_K, direction, _, keep, _ = inputs
    states, rows, gates = output
    ctx.mark_non_differentiable(rows, gates)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, offset, factors, state_3KK, tpc_3KK, coherence_K, direction, keep, states, rows, gates)


def _unit(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the derivative of the length of each vector (zero where it has none), and the length as the recurrence has it."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / length.masked_fill(length == 0, 1.0), length + EPSILON


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _backward(ctx: Any, grad_states: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_states is None:
        return (None,) * 12
    query, offset, factors, state_3KK, tpc_3KK, coherence_K, direction, keep, states, rows, gates = ctx.saved_tensors
    size = query.shape[-1]
    p, (tpc, _), (_, tpc_0, s_0, _) = rows[1:, :, :size], states.split(size, -1), rows[:-1].split(size, -1)
    (unit_p, length_p), (unit_tpc, length), (unit_0, length_0) = _unit(p), _unit(tpc), _unit(tpc_0)
    both = length * length_0
    i = torch.sigmoid(offset + tpc @ coherence_K.unsqueeze(-1))
    cosine = _inner(query, tpc) / length  # of C, before it is clamped
    continuity = 1 + _inner(tpc, tpc_0) / both  # 2 T
    take, keep_share = factors.split(1, -1)
    per_c = take * i * continuity / length_p  # g / C
    per_t = take * i * cosine.clamp(0.0, 1.0) / length_p  # g / 2 T
    taken, per_c = per_t * continuity, per_c * ((cosine >= 0) & (cosine <= 1))
    # d 2T / d TPC and / d the TPC before it
    t_after = tpc_0 / both - (continuity - 1) / length * unit_tpc
    t_before = tpc / both - (continuity - 1) / length_0 * unit_0
    g_after = taken * (1 - i) * coherence_K + per_c * (query - cosine * unit_tpc) / length + per_t * t_after
    g_after = g_after - taken / length_p * (unit_p @ direction)
    jacobian = torch.stack([g_after, per_t * t_before, keep_share * t_after, keep_share * t_before], -2)
    grad_gates, grads, grad_numbers, grad_before = dynamic_state_backward(
        grad_states.contiguous(),
        _local_gradients(gates, tpc_0),
        jacobian.unflatten(-2, (2, 2)).flatten(-2),
        torch.stack([p, s_0], -2),
        torch.cat([gates[..., 2 * size : 3 * size], (keep_share * continuity).expand_as(p)], -1),
        taken,
        _gate_weight(state_3KK, tpc_3KK).T.contiguous(),
        direction,
        keep,
    )
    grad_g, grad_a = grad_numbers.unbind(-2)
    grad_p = taken * (grads[..., size:] - grad_g / length_p * unit_p)
    grad_offset = grad_g * taken * (1 - i)
    from_input, from_tpc = grad_gates[..., size:], grad_gates[..., : 3 * size]
    recurrent = _weight_gradient(from_tpc, tpc_0).roll(-size, 0)
    return (
        from_input,
        grad_g * per_c / length * tpc,
        grad_offset,
        torch.cat([grad_g * per_t * continuity / take, grad_a * continuity], -1),
        _weight_gradient(from_input, s_0),
        recurrent,
        from_tpc.sum((0, 1)).roll(-size, 0),
        (grad_offset * tpc).sum((0, 1)),
        _weight_gradient(grad_p, tpc),
        grad_before,
        None,
        None,
    )


def _weight_gradient(grad: Tensor, read: Tensor) -> Tensor:
    return grad.flatten(0, 1).T @ read.flatten(0, 1)


def _local_gradients(gates: Tensor, tpc_0: Tensor) -> Tensor:
    """Return d TPC / d what enters each gate, in the order of the buffer."""
    from_tpc, reset, update, new = gates.chunk(4, -1)
    to_new = (1 - update) * (1 - new * new)
    to_update = (tpc_0 - new) * update * (1 - update)
    return torch.cat([to_new * reset, to_new * from_tpc * reset * (1 - reset), to_update, to_new], -1)


dynamic_state_forward.register_autograd(_backward, setup_context=_setup_context)
