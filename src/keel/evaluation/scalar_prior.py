"""The embedding prior in one dimension: support tokens, Proposition 1, Eqs. 9 to 12, Figs. 3.2 and 3.3.

With scalar embeddings and strictly causal attention ``a_ts`` proportional to ``exp(w x_t x_s)`` over ``s < t``, the residual
``z_t = x_t - sum_s a_ts x_s`` is standard normal and has ``dz_t / dx_t = 1 - w Var_t``: the margin of token t. A sequence whose margin
is not positive somewhere lies at or beyond the boundary where the map cannot be inverted.

Shapes: N sequences, T tokens, P tokens of a past, G points of a grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.statistics import Array


@dataclass(frozen=True, kw_only=True)
class ScalarPaths:
    """What the prior says of sequences.

    Attributes:
        variance_NT: attention-weighted variance of each token's past; the first token has none: 0.
        margin_NT: ``1 - w Var_t``, Eq. 9.
        log_density_N: Eq. 11; NaN where a margin is not positive.
    """

    variance_NT: Array
    margin_NT: Array
    log_density_N: Array

    @property
    def valid_N(self) -> Array:
        """Whether every margin of a sequence is positive."""
        valid_N: Array = np.asarray((self.margin_NT > 0).all(1))
        return valid_N


def scalar_paths(values_NT: Array, coupling: float) -> ScalarPaths:
    """Return variances, margins and log-densities of sequences of scalar embeddings.

    The reference twin of the variances is ``keel.ops.logdet.attention_logdet`` at width 1.

    Args:
        values_NT: the embeddings, T at least 2.
        coupling: w, of either sign.
    Raises: KeelError for another shape.
    """
    if values_NT.ndim != 2 or values_NT.shape[1] < 2:
        raise KeelError(f"scalar_paths: expected values [N, T] with T of 2 or more, got {list(values_NT.shape)}")
    length = values_NT.shape[1]
    logits_NTT = coupling * values_NT[:, :, None] * values_NT[:, None, :]
    past_TT = np.tril(np.ones((length, length), dtype=bool), -1)
    logits_NTT = np.where(past_TT, logits_NTT, -np.inf)[:, 1:]
    weights_NTT = np.exp(logits_NTT - logits_NTT.max(-1, keepdims=True))
    weights_NTT /= weights_NTT.sum(-1, keepdims=True)
    mean_NT = np.zeros_like(values_NT)
    variance_NT = np.zeros_like(values_NT)
    mean_NT[:, 1:] = np.einsum("nts,ns->nt", weights_NTT, values_NT)
    spread_NTT = values_NT[:, None, :] - mean_NT[:, 1:, None]
    variance_NT[:, 1:] = np.einsum("nts,nts->nt", weights_NTT, spread_NTT**2)
    margin_NT = 1 - coupling * variance_NT
    with np.errstate(divide="ignore", invalid="ignore"):
        log_det_N = np.where((margin_NT > 0).all(1), np.log(np.abs(margin_NT)).sum(1), np.nan)
    energy_N = 0.5 * ((values_NT - mean_NT) ** 2).sum(1) + 0.5 * length * math.log(2 * math.pi)
    return ScalarPaths(variance_NT=variance_NT, margin_NT=margin_NT, log_density_N=log_det_N - energy_N)


def conditional_density(grid_G: Array, past: list[float], coupling: float) -> tuple[Array, Array]:
    """Return ``p(x | past)`` and the factor ``1 - w Var`` at each x of a grid, for Fig. 3.2; a negative factor counts by its size."""
    weights_GP = np.exp(coupling * np.outer(grid_G, past))
    weights_GP /= weights_GP.sum(1, keepdims=True)
    mean_G = weights_GP @ np.array(past)
    factor_G = 1 - coupling * (weights_GP @ np.array(past) ** 2 - mean_G**2)
    return np.exp(-((grid_G - mean_G) ** 2) / 2) / math.sqrt(2 * math.pi) * np.abs(factor_G), factor_G


def scalar_metrics(
    coupling: float, *, sequences: int, length: int, spreads: list[float], past: list[float], seed: int
) -> list[ItemMetric]:
    """Measure random sequences under one coupling; every coupling and spread sees the same random numbers.

    Args:
        spreads: standard deviations of the embeddings; what is not named after one is measured at the first.
        past: what ``peak_density``, the highest point of the conditional density, is conditioned on.
    Returns: ``excluded.share``, also ``@<spread>``, ``margin.smallest`` (mean over sequences of the least margin), ``variance.mean``,
        ``log_det.mean`` and ``log_density.mean`` over the sequences that are valid, ``peak_density``.
    """
    normal_NT = np.random.default_rng(seed).standard_normal((sequences, length))
    metrics = []
    for spread in spreads:
        outside_N = 1.0 - scalar_paths(spread * normal_NT, coupling).valid_N
        metrics.append(mean(f"excluded.share@{spread:g}", outside_N.tolist(), unit="share", higher_is_better=None))
    paths = scalar_paths(spreads[0] * normal_NT, coupling)
    density_G, _ = conditional_density(density_grid(), past, coupling)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_det_N = np.log(np.abs(paths.margin_NT)).sum(1)
    return [
        *metrics,
        mean("excluded.share", (1.0 - paths.valid_N).tolist(), unit="share", higher_is_better=None),
        mean("margin.smallest", paths.margin_NT.min(1).tolist(), unit="least margin", higher_is_better=None),
        mean("variance.mean", paths.variance_NT[:, 1:].mean(1).tolist(), unit="variance", higher_is_better=None),
        _over_valid("log_det.mean", log_det_N, paths.valid_N, "nats"),
        _over_valid("log_density.mean", paths.log_density_N, paths.valid_N, "nats"),
        mean("peak_density", [float(density_G.max())] * sequences, unit="density", higher_is_better=None),
    ]


def density_grid() -> Array:
    """Return the points at which densities are drawn and their peak is sought."""
    return np.linspace(-5.0, 5.0, 2001)


def _over_valid(name: str, values_N: Array, valid_N: Array, unit: str) -> ItemMetric:
    return ItemMetric(
        name=name, unit=unit, higher_is_better=None,
        numerators=tuple(np.where(valid_N, values_N, 0.0).tolist()), denominators=tuple(valid_N.astype(float).tolist()),
    )  # fmt: skip
