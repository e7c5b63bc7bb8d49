"""Ranks and spectra: how many directions a set of vectors, or an attention matrix, really uses.

**Which eigenvalues of attention.** App. B.1 of S-Former takes "eigenvalues of the attention matrix" and does not say how it
treats that such a matrix is not symmetric. A causal one is triangular: its eigenvalues are its diagonal, the weight that each
token gives itself, and say nothing of where the rest of the mass goes. Two readings are measured:

- singular values (the default): sigma_i of A, the square roots of the eigenvalues of A A^T, real and >= 0 for any matrix. Effective
  dimension and entropy use lambda = sigma; the participation ratio, which the paper reports beside them without a formula, uses
  lambda = sigma^2. That makes them two numbers, as in the paper (x1.43 and x1.77), where one lambda for both would make them one.
- ``diagonal``: lambda_i = A_ii, the printed formula to the letter.

A third spectrum is that of the covariance of a layer's outputs, since the paper concludes about the "representation space".

Shapes: T tokens, D width, N vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Effective dimension and participation ratio (1 to the number of values), spectral entropy (nats); NaN for all zeros."""

    effective_dimension: float
    participation_ratio: float
    spectral_entropy: float


def spectrum_of(values: Tensor) -> Spectrum:
    """Return the quantities of non-negative values lambda, [T]: (sum lambda)^2 / sum lambda^2, the same of lambda^2, and H.

    S-Former App. B.1; H = -sum p log p in nats with p = lambda / sum lambda and 0 log 0 = 0, the limit of the paper's epsilon.
    Reference twin: ``reference_spectrum``.
    """
    values = values.double().clamp(min=0)
    squares = values.square()
    share = values / values.sum()
    return Spectrum(
        effective_dimension=float(values.sum().square() / squares.sum()),
        participation_ratio=float(squares.sum().square() / squares.square().sum()),
        spectral_entropy=float(torch.special.entr(share).sum()),
    )


def attention_spectra(attention_TT: Tensor) -> tuple[Spectrum, Spectrum]:
    """Return the spectrum of the singular values of an attention matrix, and of its diagonal."""
    return spectrum_of(torch.linalg.svdvals(attention_TT.float())), spectrum_of(attention_TT.diagonal())


class Moments:
    """Sums of vectors and of their outer products, float64: all that a rank or a covariance needs, in D x D values."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_D: Tensor | None = None
        self.outer_DD: Tensor | None = None

    def add(self, vectors: Tensor) -> None:
        """Add vectors [..., D]."""
        vectors_ND = vectors.flatten(0, -2).double()
        sum_D, outer_DD = vectors_ND.sum(0), vectors_ND.mT @ vectors_ND
        self.sum_D = sum_D if self.sum_D is None else self.sum_D + sum_D
        self.outer_DD = outer_DD if self.outer_DD is None else self.outer_DD + outer_DD
        self.count += len(vectors_ND)

    def eigenvalues(self, *, centred: bool) -> Tensor:
        """Return the eigenvalues of the summed outer products, descending, [D]; about the mean where ``centred``."""
        assert self.outer_DD is not None and self.sum_D is not None
        matrix_DD = self.outer_DD
        if centred:
            matrix_DD = matrix_DD - torch.outer(self.sum_D, self.sum_D) / self.count
        return torch.linalg.eigvalsh(matrix_DD).flip(0).clamp(min=0)

    def effective_rank(self, *, centred: bool, share: float = 0.95) -> int:
        """Return the smallest k whose first k directions hold ``share`` of the summed squares; 0 where all vectors are zero.

        S-Former App. B.1. Uncentred is the SVD of the vectors as they are; ``centred`` is variance in the strict sense.
        Reference twin: ``reference_effective_rank``.
        """
        return _smallest(self.eigenvalues(centred=centred).tolist(), share)

    def spectrum(self) -> Spectrum:
        """Return the spectrum of the covariance, lambda its eigenvalues."""
        return spectrum_of(self.eigenvalues(centred=True))


def _smallest(energies: list[float], share: float) -> int:
    # A hair below the share, so that k equal directions are k and not k + 1 by rounding.
    total, running = math.fsum(energies), 0.0
    if total <= 0:
        return 0
    for index, energy in enumerate(energies):
        running += energy
        if running >= (share - 1e-9) * total:
            return index + 1
    return len(energies)


def reference_effective_rank(vectors_ND: Tensor, *, centred: bool, share: float = 0.95) -> int:
    """The rank from the SVD of all vectors stacked: the oracle of ``Moments.effective_rank``."""
    vectors_ND = vectors_ND.double()
    if centred:
        vectors_ND = vectors_ND - vectors_ND.mean(0)
    return _smallest(torch.linalg.svdvals(vectors_ND).square().tolist(), share)


def reference_spectrum(attention_TT: Tensor) -> Spectrum:
    """From the eigenvalues of A A^T, number by number: the oracle of ``attention_spectra`` (its first part)."""
    product = attention_TT.double() @ attention_TT.double().mT
    sigma = [math.sqrt(max(0.0, value)) for value in torch.linalg.eigvalsh(product).tolist()]
    entropy = 0.0
    for value in sigma:
        p = value / sum(sigma)
        entropy -= p * math.log(p) if p > 0 else 0.0
    return Spectrum(
        effective_dimension=sum(sigma) ** 2 / sum(value**2 for value in sigma),
        participation_ratio=sum(value**2 for value in sigma) ** 2 / sum(value**4 for value in sigma),
        spectral_entropy=entropy,
    )
