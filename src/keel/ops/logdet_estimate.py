"""A stochastic estimate of the log-determinants of ``keel.ops.logdet``, for widths at which the exact ones are too slow.

With the softmax's Jacobian ``J_t = diag(a_t) - a_t a_t'`` and the logits ``L = Q K'`` among the tokens seen,

    det(I_D - M Sigma_t) = det(I_S - J_t L) = det(I_S - S_t),   S_t = P_t sqrt(a_t) L sqrt(a_t) P_t,   P_t = I - sqrt(a_t) sqrt(a_t)'

so that nothing depends on the width D: a product with all S_t together is one matrix product of tokens by tokens. Then

    log det(I - S) = -tr S - tr S^2 / 2 + E_v[v' (log(I - S) + S + S^2 / 2) v]      v random signs

The first two traces are exact; the rest, small when S is, is estimated by Hutchinson's probes v, and the logarithm by Arnoldi's
quadrature: ``v' log(I - S) v = |v|^2 e_1' log(I - H) e_1`` with the small Hessenberg matrix H of a few products with S.

The estimate is unbiased but for the quadrature, which is exact once it has as many steps as the token sees tokens, and whose error
otherwise falls geometrically with them; its standard error falls with the root of the number of probes and is returned.
The gradient is the estimate of the gradient with the same probes, not the gradient of the estimate.

Shape suffixes: B batch, T tokens asked for, S tokens there are, R rank (width at full rank), K steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.ops.logdet import attention_weights, check_shapes

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
    exact_BT = -_first_trace(weights_BTS, logits_BSS) - _second_trace(weights_BTS, logits_BSS) / 2
    values, gradients = [], []
    for _ in range(probes):
        signs = torch.randint(
            0, 2, weights_BTS.shape, generator=generator, device=generator.device if generator else None
        )
        probe_BTS = (2 * signs - 1).to(weights_BTS) * visible_BTS
        value_BT, solved_BTS = _quadrature(probe_BTS, weights_BTS.detach(), logits_BSS.detach(), steps)
        values.append(value_BT)
        if exact_BT.requires_grad:
            gradients.append(-(probe_BTS * _product(solved_BTS, weights_BTS, logits_BSS)).sum(-1))
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


def _product(vector_BTS: Tensor, weights_BTS: Tensor, logits_BSS: Tensor) -> Tensor:
    """``S_t v_t`` for all t."""
    root_BTS = weights_BTS.clamp(min=torch.finfo(weights_BTS.dtype).tiny).sqrt()
    root_BTS = torch.where(weights_BTS > 0, root_BTS, 0.0)
    projected_BTS = vector_BTS - root_BTS * (root_BTS * vector_BTS).sum(-1, keepdim=True)
    product_BTS = root_BTS * ((root_BTS * projected_BTS) @ logits_BSS.mT)
    return product_BTS - root_BTS * (root_BTS * product_BTS).sum(-1, keepdim=True)


def _quadrature(probe_BTS: Tensor, weights_BTS: Tensor, logits_BSS: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return ``v' (log(I - S) + S + S^2 / 2) v`` [B, T], and ``((I - S)^-1 - I - S) v``, which its gradient takes."""
    length_BT = probe_BTS.norm(dim=-1)
    basis = [probe_BTS / length_BT.clamp(min=1).unsqueeze(-1)]
    hessenberg_BTKK = probe_BTS.new_zeros(*length_BT.shape, steps, steps)
    products = []
    for step in range(steps):
        new_BTS = _product(basis[step], weights_BTS, logits_BSS)
        if step < 2:
            products.append(new_BTS)
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
    solved_BTS = (solved_BTS - basis[0] - products[0]) * length_BT.unsqueeze(-1)
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
