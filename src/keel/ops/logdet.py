"""Log-determinants of the residual map of causal attention over embeddings: the barrier of support tokens.

    a_ts = softmax_s(x_t' M x_s), s < t        mu_t = sum_s a_ts x_s        z_t = x_t - mu_t(x)
    dz_t / dx_t = I - Sigma_t M'               log|det| = log|det(I - M Sigma_t)|           (support tokens, Theorem 1)

``Sigma_t`` is the a-weighted covariance of what token t attends to. Everything follows from queries ``q = U' x`` and keys
``k = V' x`` with ``M = U V'``: by Sylvester's identity ``det(I_d - M Sigma_t) = det(I_r - C_t)`` with the r x r matrix
``C_t = Cov_t(k, q)``, exactly, whatever the rank r. Full rank is ``q = M' x``, ``k = x``.

``attention_logdet`` is exact; ``reference_logdet`` its specification (the whole Jacobian by autograd). ``keel.ops.logdet_estimate``
has a stochastic estimate for sizes at which this one is too slow.

Shape suffixes: B batch, T tokens that are asked for, S tokens there are (the last T of them are asked for), D width, R rank,
N = R or R + 1 the size of a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from keel.errors import ShapeError

WORKSPACE = (
    1 << 19
)  # numbers in the largest temporary of a chunk of tokens: few enough to stay near the processor's cache
KEPT_BLOCKS = 1 << 26  # numbers in all blocks up to which they are kept for the backward pass and not computed again
SMALLEST_PIVOT = {torch.float32: 1e-6, torch.float64: 1e-12}


class LogDeterminants(NamedTuple):
    """Per token: ``logabs`` log|det| of its block, and ``sign`` of the determinant, -1 where the boundary was crossed; [B, T]."""

    logabs_BT: Tensor
    sign_BT: Tensor

    def barrier(self) -> Tensor:
        """Return the barrier [B, T]: ``-log|det|``, and beyond the boundary its reflection ``2 log(1/e) + log|det|``.

        The density has its support where the determinant is positive. ``-log|det|`` alone falls again beyond the boundary and would
        reward a token for going further; the reflection is finite, above what the boundary itself costs (e is the smallest pivot)
        and falls towards it. Two eigenvalues that crossed leave the sign as it was, and are not seen.
        """
        smallest = SMALLEST_PIVOT[self.logabs_BT.dtype]
        return torch.where(self.sign_BT < 0, self.logabs_BT - 2 * math.log(smallest), -self.logabs_BT)


def reference_logdet(embeddings_BTD: Tensor, coupling_DD: Tensor, include_self: bool = False) -> LogDeterminants:
    """The whole Jacobian of ``x -> z`` by autograd and the determinants of its diagonal blocks, in float64.

    The specification of ``attention_logdet`` for rows without padding. The first token has no past: its block is I.
    """
    embeddings, coupling = embeddings_BTD.double(), coupling_DD.double()
    rows = []
    for row_TD in embeddings:
        jacobian = torch.autograd.functional.jacobian(lambda x: _residual(x, coupling, include_self), row_TD)
        blocks = torch.stack([jacobian[t, :, t] for t in range(len(row_TD))])
        blocks[0] = torch.eye(row_TD.shape[1], dtype=torch.float64)
        rows.append(torch.linalg.slogdet(blocks))
    return LogDeterminants(torch.stack([row.logabsdet for row in rows]), torch.stack([row.sign for row in rows]))


def _residual(x_TD: Tensor, coupling_DD: Tensor, include_self: bool) -> Tensor:
    """``z = x - mu(x)``, token by token."""
    residuals = [torch.zeros_like(x_TD[0]) if include_self else x_TD[0]]
    for t in range(1, len(x_TD)):
        past_SD = x_TD[: t + 1] if include_self else x_TD[:t]
        weights_S = torch.softmax(past_SD @ (coupling_DD.T @ x_TD[t]), 0)
        residuals.append(x_TD[t] - weights_S @ past_SD)
    return torch.stack(residuals)


def visible_past(
    num_asked: int,
    num_tokens: int,
    include_self: bool,
    attended_BS: Tensor | None = None,
    documents_BS: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return which of S tokens each of the last T may attend to, [1 or B, T, S] bool.

    Args:
        attended_BS: False where there is padding, which sees and is seen by nobody.
        documents_BS: number of the packed document of every token; tokens see their own document alone.
    """
    columns_S = torch.arange(num_tokens, device=device)
    rows_T = columns_S[num_tokens - num_asked :]
    visible = (columns_S <= rows_T[:, None] if include_self else columns_S < rows_T[:, None]).unsqueeze(0)
    if documents_BS is not None:
        visible = visible & (documents_BS[:, None, :] == documents_BS[:, num_tokens - num_asked :, None])
    if attended_BS is not None:
        visible = visible & attended_BS[:, None, :] & attended_BS[:, num_tokens - num_asked :, None]
    return visible


def attention_logdet(
    queries_BSR: Tensor, keys_BSR: Tensor, visible_BTS: Tensor, width: int | None = None
) -> LogDeterminants:
    """Return log|det dz_t/dx_t| and its sign for the last T of S tokens, exactly, in at least float32.

    Computed in chunks of tokens, so that memory does not grow with T times R squared, and a chunk reads no token after its own:
    causality halves the work. Blocks too large to keep are computed again in the backward pass.

    A pivot of the factorisation below 1e-6 (1e-12 in float64) counts as that, in the value and in the gradient: at the boundary
    itself the barrier is large and finite. Beyond it ``log|det|`` is finite again, and ``sign`` says that it was crossed; what
    that costs is ``LogDeterminants.barrier``.

    Args:
        queries_BSR, keys_BSR: ``U' x`` and ``V' x`` of all tokens.
        visible_BTS: as from ``visible_past``. A token that sees nothing, or only itself, has the block I.
        width: D, where a token sees itself (App. A, with the path through its own key); None where it does not.
    Returns: LogDeterminants, differentiable once in queries and keys.
    Raises: ShapeError, naming the argument that does not fit.
    Reference twin: ``reference_logdet``.
    """
    check_shapes(queries_BSR, keys_BSR, visible_BTS)
    dtype = torch.promote_types(queries_BSR.dtype, torch.float32)
    queries_BSR, keys_BSR = queries_BSR.to(dtype), keys_BSR.to(dtype)
    batch, num_tokens, rank = keys_BSR.shape
    num_asked = visible_BTS.shape[1]
    keeps = batch * num_asked * rank**2 <= KEPT_BLOCKS
    parts, first = [], 0
    while first < num_asked:
        before = num_tokens - num_asked + first
        # As many tokens as the workspace holds; what is visible to the last of them bounds the columns.
        last = min(num_asked, first + max(1, WORKSPACE // (batch * rank * max(rank, before + 1))))
        end = num_tokens - num_asked + last
        inputs = (queries_BSR[:, :end], keys_BSR[:, :end], visible_BTS[:, first:last, :end], width)
        parts.append(_chunk(*inputs) if keeps else checkpoint(_chunk, *inputs, use_reentrant=False))
        first = last
    return LogDeterminants(torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 1))


def attention_blocks(queries_BSR: Tensor, keys_BSR: Tensor, visible_BTS: Tensor) -> Tensor:
    """Return ``C_t = Cov_t(k, q)`` [B, T, R, R], whose eigenvalues are those of ``M Sigma_t`` (but for zeros), strict attention."""
    check_shapes(queries_BSR, keys_BSR, visible_BTS)
    num_asked, num_tokens = visible_BTS.shape[1:]
    weights_BTS = attention_weights(queries_BSR[:, num_tokens - num_asked :], keys_BSR, visible_BTS)
    return attention_covariance(weights_BTS, keys_BSR, queries_BSR)


class Degeneracy(NamedTuple):
    """Distance of each token from the boundary, [B, T]: the largest |eigenvalue| of ``M Sigma_t``, below 1 for a sufficient
    condition (Lemma B.4); and the smallest |eigenvalue| of ``I - M Sigma_t``, 0 on the boundary.
    """

    spectral_radius_BT: Tensor
    smallest_eigenvalue_BT: Tensor


def degeneracy(blocks_BTRR: Tensor, width: int) -> Degeneracy:
    """Return the distance to degeneracy from ``attention_blocks`` in a space of ``width`` dimensions; not differentiable."""
    eigenvalues_BTR = torch.linalg.eigvals(blocks_BTRR.detach())
    smallest_BT = (1 - eigenvalues_BTR).abs().amin(-1)
    if width > blocks_BTRR.shape[-1]:  # the other eigenvalues of I - M Sigma are 1
        smallest_BT = smallest_BT.clamp(max=1.0)
    return Degeneracy(eigenvalues_BTR.abs().amax(-1), smallest_BT)


def check_shapes(queries_BSR: Tensor, keys_BSR: Tensor, visible_BTS: Tensor) -> None:
    """Raise ShapeError unless the arguments of ``attention_logdet`` fit together."""
    if keys_BSR.dim() != 3 or queries_BSR.shape != keys_BSR.shape:
        raise ShapeError(
            f"attention_logdet: queries {list(queries_BSR.shape)}, keys {list(keys_BSR.shape)}; expected the same [B, S, R]"
        )
    batch, num_tokens, _ = keys_BSR.shape
    shape = visible_BTS.shape
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[2] != num_tokens or not 1 <= shape[1] <= num_tokens:
        raise ShapeError(
            f"attention_logdet: visible_BTS is {list(shape)}; expected [1 or {batch}, 1 to {num_tokens}, {num_tokens}]"
        )


def attention_weights(queries_BTR: Tensor, keys_BSR: Tensor, visible_BTS: Tensor) -> Tensor:
    """Return the weights [B, T, S]; a row that sees nothing is zero."""
    logits_BTS = (queries_BTR @ keys_BSR.mT).masked_fill(~visible_BTS, float("-inf"))
    weights_BTS = torch.softmax(logits_BTS.masked_fill(~visible_BTS.any(-1, keepdim=True), 0.0), -1)
    return weights_BTS.masked_fill(~visible_BTS, 0.0)


def _chunk(queries_BSR: Tensor, keys_BSR: Tensor, visible_BTS: Tensor, width: int | None) -> tuple[Tensor, Tensor]:
    """Return log|det| and sign [B, T] of the last T tokens of a chunk."""
    asked_BTR = queries_BSR[:, -visible_BTS.shape[1] :]
    weights_BTS = attention_weights(asked_BTR, keys_BSR, visible_BTS)
    covariance_BTRR = attention_covariance(weights_BTS, keys_BSR, queries_BSR)
    if width is None:
        identity_RR = torch.eye(keys_BSR.shape[-1], dtype=keys_BSR.dtype, device=keys_BSR.device)
        return log_abs_det(identity_RR - covariance_BTRR)
    alone_BT = visible_BTS.sum(-1) <= 1
    return _inclusive(asked_BTR, queries_BSR, keys_BSR, weights_BTS, covariance_BTRR, alone_BT, width)


def _inclusive(
    asked_BTR: Tensor,
    queries_BSR: Tensor,
    keys_BSR: Tensor,
    weights_BTS: Tensor,
    covariance_BTRR: Tensor,
    alone_BT: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """The block of App. A, ``(1 - a_tt) I - Sigma_t M' - a_tt (x_t - mu_t) (M' x_t)'``, through r + 1 dimensions.

    The last term is the path through the token's own key, which Eq. 54 leaves out. It is of rank 1, so that

        det = c^(D - r - 1) det(c I - W),  c = 1 - a_tt,  W = [[Cov(q, k), a_tt (q_t - q_mean)], [q_t' Cov(k, k), a_tt q_t' (k_t - k_mean)]]
    """
    num_asked, rank = asked_BTR.shape[1:]
    before = weights_BTS.shape[2] - num_asked
    own_BT1 = weights_BTS.diagonal(before, 1, 2).unsqueeze(-1)
    # c as the sum of the other weights: 1 - a_tt has no digits left where a token is far nearer to itself than to its past.
    is_own_TS = torch.eye(weights_BTS.shape[2], dtype=torch.bool, device=weights_BTS.device)[before:]
    kept_BT1 = weights_BTS.masked_fill(is_own_TS, 0.0).sum(-1, keepdim=True).clamp(min=SMALLEST_PIVOT[own_BT1.dtype])
    query_means_BTR, key_means_BTR = weights_BTS @ queries_BSR, weights_BTS @ keys_BSR
    logits_BTS = asked_BTR @ keys_BSR.mT
    mean_logit_BT1 = (weights_BTS * logits_BTS).sum(-1, keepdim=True)
    right_BTR = own_BT1 * (asked_BTR - query_means_BTR)
    below_BTR = (weights_BTS * (logits_BTS - mean_logit_BT1)) @ keys_BSR
    corner_BT1 = own_BT1 * (asked_BTR * (keys_BSR[:, -num_asked:] - key_means_BTR)).sum(-1, keepdim=True)
    upper = torch.cat([covariance_BTRR.mT, right_BTR.unsqueeze(-1)], -1)
    lower = torch.cat([below_BTR, corner_BT1], -1).unsqueeze(-2)
    identity = torch.eye(rank + 1, dtype=asked_BTR.dtype, device=asked_BTR.device)
    block_BTNN = kept_BT1.unsqueeze(-1) * identity - torch.cat([upper, lower], -2)
    block_BTNN = torch.where(alone_BT[..., None, None], identity, block_BTNN)
    logabs_BT, sign_BT = log_abs_det(block_BTNN)
    others_BT = (width - rank - 1) * kept_BT1.squeeze(-1).log()
    return logabs_BT + others_BT.masked_fill(alone_BT, 0.0), sign_BT


class _AttentionCovariance(torch.autograd.Function):
    """``C_t = sum_s a_ts (k_s - k_mean) q_s'``: one matrix product forward, two backward, with the temporary made again there."""

    @staticmethod
    def forward(ctx, weights_BTS, keys_BSR, queries_BSR):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weights_BTS, keys_BSR, queries_BSR)
        weighted_BTRS = _centred(weights_BTS, keys_BSR).mul_(weights_BTS.unsqueeze(2))
        return (weighted_BTRS.flatten(1, 2) @ queries_BSR).unflatten(1, weighted_BTRS.shape[1:3])

    @staticmethod
    def backward(ctx, grad_BTRR):  # type: ignore[no-untyped-def]
        weights_BTS, keys_BSR, queries_BSR = ctx.saved_tensors
        grad_BXR = grad_BTRR.flatten(1, 2)
        centred_BTRS = _centred(weights_BTS, keys_BSR)
        # H[t, :, s] = G_t (q_s - q_mean_t)
        pulled_BTRS = (grad_BXR @ queries_BSR.mT).unflatten(1, grad_BTRR.shape[1:3])
        query_means_BTR = weights_BTS @ queries_BSR
        pulled_means_BTR = (grad_BTRR @ query_means_BTR.unsqueeze(-1)).squeeze(-1)
        pulled_BTRS.sub_(pulled_means_BTR.unsqueeze(-1))
        key_means_BTR = weights_BTS @ keys_BSR
        constant_BT1 = (key_means_BTR * pulled_means_BTR).sum(-1, keepdim=True)
        grad_weights_BTS = (centred_BTRS * pulled_BTRS).sum(2) - constant_BT1
        grad_keys_BSR = pulled_BTRS.mul_(weights_BTS.unsqueeze(2)).sum(1).mT
        weighted_BTRS = centred_BTRS.mul_(weights_BTS.unsqueeze(2))
        grad_queries_BSR = weighted_BTRS.flatten(1, 2).mT @ grad_BXR
        return grad_weights_BTS, grad_keys_BSR, grad_queries_BSR


def attention_covariance(weights_BTS: Tensor, keys_BSR: Tensor, queries_BSR: Tensor) -> Tensor:
    """Return ``sum_s a_ts (k_s - k_mean_t) (q_s - q_mean_t)'`` [B, T, R, R] for weights whose rows sum to one or are zero."""
    return _AttentionCovariance.apply(weights_BTS, keys_BSR, queries_BSR)


def _centred(weights_BTS: Tensor, keys_BSR: Tensor) -> Tensor:
    """``k_s - k_mean_t`` as [B, T, R, S]: centred before the product, so that a far mean costs no digits."""
    return keys_BSR.mT.unsqueeze(1) - (weights_BTS @ keys_BSR).unsqueeze(-1)


class _LogAbsDet(torch.autograd.Function):
    """log|det| by LU with pivots held off zero; the gradient is that of the same factorisation, so it is finite too."""

    @staticmethod
    def forward(ctx, block_NN):  # type: ignore[no-untyped-def]
        factors, pivots, _ = torch.linalg.lu_factor_ex(block_NN)
        smallest = SMALLEST_PIVOT[block_NN.dtype]
        diagonal = factors.diagonal(dim1=-2, dim2=-1)
        signs = torch.where(diagonal < 0, -1.0, 1.0).to(block_NN.dtype)
        diagonal.copy_(signs * diagonal.abs().clamp(min=smallest))
        positions = torch.arange(1, block_NN.shape[-1] + 1, device=block_NN.device, dtype=pivots.dtype)
        swaps = (pivots != positions).sum(-1) % 2
        sign = signs.prod(-1) * (1 - 2 * swaps)
        ctx.save_for_backward(factors, pivots)
        ctx.mark_non_differentiable(sign)
        return diagonal.abs().log().sum(-1), sign

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        factors, pivots = ctx.saved_tensors
        identity = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device).expand_as(factors)
        return grad[..., None, None] * torch.linalg.lu_solve(factors, pivots, identity, adjoint=True)


def log_abs_det(blocks_NN: Tensor) -> tuple[Tensor, Tensor]:
    """Return log|det| and sign of every [..., N, N] block; finite at singular ones (see ``attention_logdet``)."""
    return _LogAbsDet.apply(blocks_NN)
