"""A stochastic estimate of the log-determinants of ``keel.ops.logdet``, for widths at which the exact ones are too slow.

With the softmax's Jacobian ``J_t = diag(a_t) - a_t a_t'`` and the logits ``L = Q K'`` among the tokens seen,

    det(I_D - M Sigma_t) = det(I_S - J_t L) = det(I_S - S_t),   S_t = P_t sqrt(a_t) L sqrt(a_t) P_t,   P_t = I - sqrt(a_t) sqrt(a_t)'

so that nothing depends on the width D: a product with all S_t together is one matrix product of tokens by tokens. Then

    log det(I - S) = -tr S - tr S^2 / 2 + E_v[v' (log(I - S) + S + S^2 / 2) v]      v random signs

The first two traces are exact. So is the whole of the block of S_t that belongs to the 64 tokens with the largest weights, where
attention that is at all selective has nearly all its mass: with f the function in the brackets,

    tr f(S) = tr f(S_64) + E_v[v' f(S) v - v' f(S_64) v]

and only the difference is left to Hutchinson's probes v. The logarithm in it is Arnoldi's quadrature: ``v' log(I - S) v =
|v|^2 e_1' log(I - H) e_1`` with the small Hessenberg matrix H of a few products with S.

The estimate is unbiased but for the quadrature, which is exact once it has as many steps as the token sees tokens, and whose error
otherwise falls geometrically with them; its standard error falls with the root of the number of probes and is returned.
The gradient is the estimate of the gradient with the same probes, not the gradient of the estimate.

Shape suffixes: B batch, T tokens asked for, S tokens there are, R rank (width at full rank), K steps, N tokens whose block is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.ops.logdet import attention_weights, check_shapes, log_abs_det

EXACT_TOKENS = 64  # tokens of the largest weights, whose block is computed exactly

BREAKDOWN = 1e-5  # of the probe's length: what is left of a direction below it is rounding


class LogDeterminantEstimate(NamedTuple):
    """Per token the estimate of log|det|, differentiable once, and its standard error over the probes; [B, T]."""

    logabs_BT: Tensor
    standard_error_BT: Tensor


def estimate_logdet(
    queries_BSR: Tensor,
    keys_BSR: Tensor,
    visible_BTS: Tensor,
    *,
    probes: int,
    steps: int,
    generator: torch.Generator | None = None,
) -> LogDeterminantEstimate:
    """Estimate what ``attention_logdet`` computes, for strict attention.

    Time is probes x steps x T S^2, whatever the rank; memory steps x T S.

    Args:
        queries_BSR, keys_BSR, visible_BTS: as in ``attention_logdet``.
        probes: random vectors, at least 2 (a standard error needs them).
        steps: products with S_t a probe, at least 2; 10 where the spectral radius is at most 0.9.
        generator: of the random signs.
    Raises: ShapeError, KeelError for too few probes or steps.
    Oracle: ``attention_logdet``.
    """
    check_shapes(queries_BSR, keys_BSR, visible_BTS)
    if probes < 2 or steps < 2:
        raise KeelError(f"estimate_logdet: probes={probes}, steps={steps}; give at least 2 of each")
    dtype = torch.promote_types(queries_BSR.dtype, torch.float32)
    queries_BSR, keys_BSR = queries_BSR.to(dtype), keys_BSR.to(dtype)
    num_asked = visible_BTS.shape[1]
    weights_BTS = attention_weights(queries_BSR[:, -num_asked:], keys_BSR, visible_BTS)
    logits_BSS = queries_BSR @ keys_BSR.mT
    heaviest_BTN = weights_BTS.topk(min(EXACT_TOKENS, weights_BTS.shape[-1]), -1).indices
    block_BTNN = _block(weights_BTS, logits_BSS, heaviest_BTN)
    exact_BT = _tail(block_BTNN) - _first_trace(weights_BTS, logits_BSS) - _second_trace(weights_BTS, logits_BSS) / 2

    def whole(vector_BTS: Tensor) -> Tensor:
        return _product(vector_BTS, weights_BTS, logits_BSS)

    def heaviest(vector_BTN: Tensor) -> Tensor:
        return (block_BTNN @ vector_BTN.unsqueeze(-1)).squeeze(-1)

    device = None if generator is None else generator.device
    values, gradients = [], []
    for _ in range(probes):
        signs = torch.randint(0, 2, weights_BTS.shape, generator=generator, device=device)
        probe_BTS = (2 * signs - 1).to(weights_BTS) * visible_BTS
        probe_BTN = probe_BTS.gather(-1, heaviest_BTN)
        value_BT, solved_BTS = _quadrature(probe_BTS, whole, steps)
        known_BT, known_solved_BTN = _quadrature(probe_BTN, heaviest, steps)
        values.append(value_BT - known_BT)
        if exact_BT.requires_grad:
            gradient_BT = (probe_BTN * heaviest(known_solved_BTN)).sum(-1) - (probe_BTS * whole(solved_BTS)).sum(-1)
            gradients.append(gradient_BT)
    values_PBT = torch.stack(values)
    logabs_BT = exact_BT + values_PBT.mean(0)
    if gradients:
        surrogate_BT = torch.stack(gradients).mean(0)
        logabs_BT = logabs_BT + surrogate_BT - surrogate_BT.detach()
    return LogDeterminantEstimate(logabs_BT, values_PBT.std(0) / probes**0.5)


def _first_trace(weights_BTS: Tensor, logits_BSS: Tensor) -> Tensor:
    """tr S_t = tr J_t L."""
    diagonal_BT = (weights_BTS @ logits_BSS.diagonal(dim1=1, dim2=2).unsqueeze(-1)).squeeze(-1)
    return diagonal_BT - ((weights_BTS @ logits_BSS) * weights_BTS).sum(-1)


def _second_trace(weights_BTS: Tensor, logits_BSS: Tensor) -> Tensor:
    """tr S_t^2 = tr J_t L J_t L, multiplied out."""
    left_BTS, right_BTS = weights_BTS @ logits_BSS, weights_BTS @ logits_BSS.mT
    squares_BT = ((weights_BTS @ (logits_BSS * logits_BSS.mT)) * weights_BTS).sum(-1)
    return squares_BT - 2 * (left_BTS * weights_BTS * right_BTS).sum(-1) + (left_BTS * weights_BTS).sum(-1).square()


def _block(weights_BTS: Tensor, logits_BSS: Tensor, chosen_BTN: Tensor) -> Tensor:
    """Return the rows and columns of every S_t of the chosen tokens: ``sqrt(a_i a_j) (L_ij - (a'L)_j - (La)_i + a'La)``."""
    left_BTS, right_BTS = weights_BTS @ logits_BSS, weights_BTS @ logits_BSS.mT
    mean_BT = (left_BTS * weights_BTS).sum(-1)
    rows = torch.arange(len(logits_BSS), device=logits_BSS.device).view(-1, 1, 1, 1)
    centred = logits_BSS[rows, chosen_BTN.unsqueeze(-1), chosen_BTN.unsqueeze(-2)]
    centred = centred - left_BTS.gather(-1, chosen_BTN).unsqueeze(-2) - right_BTS.gather(-1, chosen_BTN).unsqueeze(-1)
    roots_BTN = _root(weights_BTS.gather(-1, chosen_BTN))
    return (centred + mean_BT[..., None, None]) * roots_BTN.unsqueeze(-1) * roots_BTN.unsqueeze(-2)


def _tail(block_BTNN: Tensor) -> Tensor:
    """Return ``log|det(I - S)| + tr S + tr S^2 / 2`` of small blocks [B, T]."""
    identity_NN = torch.eye(block_BTNN.shape[-1], dtype=block_BTNN.dtype, device=block_BTNN.device)
    logabs_BT, _ = log_abs_det(identity_NN - block_BTNN)
    return logabs_BT + block_BTNN.diagonal(dim1=-2, dim2=-1).sum(-1) + (block_BTNN * block_BTNN.mT).sum((-2, -1)) / 2


def _root(weights: Tensor) -> Tensor:
    """The square root, with no gradient where a weight is zero."""
    return torch.where(weights > 0, weights.clamp(min=torch.finfo(weights.dtype).tiny).sqrt(), 0.0)


def _product(vector_BTS: Tensor, weights_BTS: Tensor, logits_BSS: Tensor) -> Tensor:
    """``S_t v_t`` for all t."""
    root_BTS = _root(weights_BTS)
    projected_BTS = vector_BTS - root_BTS * (root_BTS * vector_BTS).sum(-1, keepdim=True)
    product_BTS = root_BTS * ((root_BTS * projected_BTS) @ logits_BSS.mT)
    return product_BTS - root_BTS * (root_BTS * product_BTS).sum(-1, keepdim=True)


@torch.no_grad()
def _quadrature(probe_BTS: Tensor, multiply: Callable[[Tensor], Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Return ``v' (log(I - S) + S + S^2 / 2) v`` [B, T], and ``((I - S)^-1 - I - S) v``, which its gradient takes."""
    length_BT = probe_BTS.norm(dim=-1)
    basis = [probe_BTS / length_BT.clamp(min=1).unsqueeze(-1)]
    hessenberg_BTKK = probe_BTS.new_zeros(*length_BT.shape, steps, steps)
    first_product_BTS = torch.zeros_like(probe_BTS)
    for step in range(steps):
        new_BTS = multiply(basis[step])
        if step == 0:
            first_product_BTS = new_BTS
        for index, known_BTS in enumerate(basis):
            along_BT = (known_BTS * new_BTS).sum(-1)
            hessenberg_BTKK[:, :, index, step] = along_BT
            new_BTS = new_BTS - along_BT.unsqueeze(-1) * known_BTS
        left_BT = new_BTS.norm(dim=-1)
        # A token that sees few others has few directions: what is left is rounding, and the quadrature is exact already.
        left_BT = torch.where(left_BT > BREAKDOWN, left_BT, 0.0)
        if step + 1 < steps:
            hessenberg_BTKK[:, :, step + 1, step] = left_BT
            scale_BT = torch.where(left_BT > 0, 1 / left_BT.clamp(min=BREAKDOWN), 0.0)
            basis.append(new_BTS * scale_BT.unsqueeze(-1))
    first_BT, second_BT = _moments(hessenberg_BTKK)
    logarithm_BT = _logarithm(hessenberg_BTKK)
    value_BT = length_BT.square() * (logarithm_BT + first_BT + second_BT / 2)
    identity_KK = torch.eye(steps, dtype=probe_BTS.dtype, device=probe_BTS.device)
    coordinates_BTK, _ = torch.linalg.solve_ex(
        identity_KK - hessenberg_BTKK, identity_KK[:, 0].expand_as(hessenberg_BTKK[..., 0]).unsqueeze(-1)
    )
    solved_BTS = torch.einsum("kbts,btk->bts", torch.stack(basis), coordinates_BTK.squeeze(-1))
    solved_BTS = (solved_BTS - basis[0] - first_product_BTS) * length_BT.unsqueeze(-1)
    return value_BT, solved_BTS


def _moments(hessenberg_BTKK: Tensor) -> tuple[Tensor, Tensor]:
    """``e_1' H e_1`` and ``e_1' H^2 e_1``."""
    second_BT = (hessenberg_BTKK[..., 0, :] * hessenberg_BTKK[..., :, 0]).sum(-1)
    return hessenberg_BTKK[..., 0, 0], second_BT


def _logarithm(hessenberg_BTKK: Tensor) -> Tensor:
    """``e_1' log|I - H| e_1`` through eigenvalues; the real part, so that a crossed boundary gives log|det| as well."""
    eigenvalues, vectors = torch.linalg.eig(hessenberg_BTKK)
    first = torch.zeros_like(vectors[..., :1])
    first[..., 0, 0] = 1
    coordinates = torch.linalg.solve_ex(vectors, first)[0].squeeze(-1)
    smallest = torch.finfo(hessenberg_BTKK.dtype).eps
    logarithms = (1 - eigenvalues).abs().clamp(min=smallest).log() + 1j * (1 - eigenvalues).angle()
    return (vectors[..., 0, :] * logarithms * coordinates).sum(-1).real
