"""The options of the margin prior: couplings, schedules, the squared error, estimates, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from keel.errors import KeelError
from keel.hosts import HostShape
from keel.ops.logdet import reference_logdet
from keel.streams import MarginPrior
from keel.streams.base import PassInputs

WIDTH, LENGTH = 6, 7


def make_prior(**options: Any) -> MarginPrior:
    torch.manual_seed(0)
    prior = MarginPrior(**options)
    prior.build(HostShape(hidden_size=WIDTH, num_layers=1))
    prior.init_weights()
    return prior.double()


def make_embeddings() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def coupling_of(prior: MarginPrior) -> Tensor:
    """M, from the prior's weights and the name of its coupling."""
    left = prior.left.detach().T
    if prior.config.coupling == "free":
        return left if prior.config.rank is None else left @ prior.right.detach()
    return (1 if prior.config.coupling == "positive" else -1) * left @ left.T


def terms(prior: MarginPrior, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """The loss summed over tokens, with its weight."""
    result = prior.close(prior.open(PassInputs(embeddings_BTD=embeddings), {}))
    loss = result.losses["barrier"]
    assert result.counts["crossed"] == (reference_logdet(embeddings, coupling_of(prior)).sign_BT < 0).sum()
    return loss.token_sum, torch.as_tensor(loss.weight)


@pytest.mark.parametrize("coupling", ["free", "positive", "negative"])
@pytest.mark.parametrize("rank", [2, None])
def test_the_loss_is_the_log_determinant_of_its_coupling(coupling: str, rank: int | None) -> None:
    prior, embeddings = make_prior(coupling=coupling, rank=rank), make_embeddings()
    matrix = coupling_of(prior)
    expected = reference_logdet(embeddings, matrix).barrier().sum()
    torch.testing.assert_close(terms(prior, embeddings)[0], expected, rtol=1e-8, atol=1e-8)
    if coupling == "positive":
        assert (reference_logdet(embeddings, matrix).sign_BT < 0).any(), (
            "no token crossed: the count of them is not tested"
        )
    eigenvalues = torch.linalg.eigvalsh(matrix + matrix.T)
    assert coupling == "free" or (eigenvalues > 1e-9).any() == (coupling == "positive")


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_the_squared_error_is_that_of_the_residual(noise: float) -> None:
    prior, embeddings = make_prior(rank=3, noise=noise), make_embeddings()
    matrix = coupling_of(prior)
    expected = reference_logdet(embeddings, matrix).barrier().sum()
    for row in embeddings:
        for t, token in enumerate(row):
            attended = torch.softmax(row[:t] @ (matrix.T @ token), 0) @ row[:t] if t else torch.zeros_like(token)
            expected = expected + (token - attended).square().sum() / (2 * noise**2)
    torch.testing.assert_close(terms(prior, embeddings)[0], expected, rtol=1e-8, atol=1e-8)


def test_the_weight_follows_its_schedule() -> None:
    prior = make_prior(rank=2, weight=((0, 0.0), (100, 0.1), (200, 0.1), (300, 0.4)))
    found = {}
    for step in (0, 50, 100, 150, 250, 300, 900):
        prior.step.fill_(step)
        found[step] = round(float(terms(prior, make_embeddings())[1]), 6)
    assert found == {0: 0.0, 50: 0.05, 100: 0.1, 150: 0.1, 250: 0.25, 300: 0.4, 900: 0.4}


def test_an_estimated_loss_is_near_the_exact_one() -> None:
    embeddings = make_embeddings() * 0.5
    exact, _ = terms(make_prior(rank=3), embeddings)
    estimated, _ = terms(make_prior(rank=3, probes=4000), embeddings)
    assert exact.abs() > 0.05
    torch.testing.assert_close(estimated, exact, rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    "weight", [[[0]], "0.05", float("nan"), True, -0.1, [], [(5, 0.1), (5, 0.2)], [(0, 0.1), 3], None]
)
def test_a_weight_that_is_none_is_refused_in_one_line(weight: Any) -> None:
    with pytest.raises(KeelError, match=r"margin prior: weight=.*give a number >= 0 or points"):
        MarginPrior(weight=weight)


def test_distance_to_degeneracy_is_of_strict_attention() -> None:
    found = make_prior(rank=3, coupling="positive").degeneracy(make_embeddings())
    assert found.spectral_radius_BT.shape == (2, LENGTH) and (found.spectral_radius_BT[:, 0] == 0).all()
    with pytest.raises(KeelError, match="degeneracy is of strict attention"):
        make_prior(rank=3, include_self=True).degeneracy(make_embeddings())
