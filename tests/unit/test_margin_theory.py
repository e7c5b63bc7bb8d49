"""The theory of support tokens, held numerically: the scalar margin, consistency over lengths, and where depth has a determinant.

Shapes: T tokens, D width, G grid points of a latent embedding, V vocabulary.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from keel.ops.logdet import attention_logdet, reference_logdet, visible_past

# -- Proposition 1: one dimension -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", [-1.5, 0.0, 0.8])
def test_in_one_dimension_the_determinant_is_the_margin(coupling: float) -> None:
    """Eq. 9: ``m_t = 1 - w Var_t``, which a negative coupling keeps above 1 and a positive one lets reach 0."""
    values = torch.tensor([0.3, -1.2, 2.0, 0.4, -0.5], dtype=torch.float64)
    found = attention_logdet((coupling * values)[None, :, None], values[None, :, None], visible_past(5, 5, False))
    for t in range(1, 5):
        past = values[:t]
        weights = torch.softmax(coupling * values[t] * past, 0)
        variance = (weights * (past - weights @ past) ** 2).sum()
        margin = (1 - coupling * variance).item()
        assert (found.sign_BT * found.logabs_BT.exp())[0, t].item() == pytest.approx(margin, rel=1e-9)
        assert margin >= 1 or coupling > 0


# -- Theorem 2 and Proposition 2: consistency over lengths ------------------------------------------------------------------

GRID = torch.linspace(-1.5, 1.5, 5, dtype=torch.float64)
VOCABULARY = 3


def prior(latents: list[float], coupling: float = 0.5) -> float:
    """p(x_1 … x_T) of the strictly causal scalar prior on a grid: each conditional is normalised over the grid's points."""
    probability = 1.0
    for t, value in enumerate(latents):
        past = torch.tensor(latents[:t], dtype=torch.float64)
        densities = torch.stack([_density(point, past, coupling) for point in GRID])
        probability *= float(_density(torch.tensor(value, dtype=torch.float64), past, coupling) / densities.sum())
    return probability


def _density(point: Tensor, past: Tensor, coupling: float) -> Tensor:
    if not len(past):
        return torch.exp(-(point**2) / 2)
    weights = torch.softmax(coupling * point * past, 0)
    mean = weights @ past
    return torch.exp(-((point - mean) ** 2) / 2) * (1 - coupling * (weights @ (past - mean) ** 2)).abs()


def likelihood(tokens: tuple[int, ...], latents: list[float], causal: bool) -> float:
    """p(y | x): each token from attention over the latents up to it, or over all of them."""
    x = torch.tensor(latents, dtype=torch.float64)
    probability = 1.0
    for t, token in enumerate(tokens):
        seen = x[: t + 1] if causal else x
        summary = torch.softmax(x[t] * seen, 0) @ seen
        logits = torch.stack([summary, summary**2, torch.ones_like(summary)])
        probability *= float(torch.softmax(logits, 0)[token])
    return probability


def token_law(tokens: tuple[int, ...], causal: bool) -> float:
    """p(y_1 … y_T), the latents summed out exactly (Eq. 31 on the grid)."""
    points = [float(point) for point in GRID]
    paths = itertools.product(points, repeat=len(tokens))
    return sum(prior(list(path)) * likelihood(tokens, list(path), causal) for path in paths)


@pytest.mark.parametrize("causal", [True, False])
def test_only_a_causal_model_is_one_law_for_all_lengths(causal: bool) -> None:
    """Theorem 2: summing out the last token of length 3 gives the law of length 2; Proposition 2: not without causality."""
    gaps = []
    for prefix in [(0, 1), (2, 2)]:
        longer = sum(token_law((*prefix, last), causal) for last in range(VOCABULARY))
        gaps.append(abs(longer - token_law(prefix, causal)))
    if causal:
        assert max(gaps) < 1e-12
    else:
        assert max(gaps) > 1e-3


def test_the_law_sums_to_one() -> None:
    total = sum(token_law(tokens, True) for tokens in itertools.product(range(VOCABULARY), repeat=2))
    assert total == pytest.approx(1, abs=1e-12)


# -- Section 6: depth -------------------------------------------------------------------------------------------------------

LENGTH, WIDTH = 5, 3


def attend(queries: Tensor, values: Tensor, coupling: Tensor) -> Tensor:
    """Strictly causal attention of ``queries`` over ``values``, token by token; zero for the first."""
    rows = [torch.zeros_like(values[0])]
    for t in range(1, len(values)):
        rows.append(torch.softmax(values[:t] @ (coupling.T @ queries[t]), 0) @ values[:t])
    return torch.stack(rows)


def residuals(latents_2TD: Tensor, coupling: Tensor, implicit: bool) -> Tensor:
    """Both stages' ``z``: embeddings from their own attention, then a layer whose attention reads the embeddings or, implicit, itself."""
    embeddings, layer = latents_2TD
    mixed = attend(layer, layer, coupling) if implicit else embeddings + attend(embeddings, embeddings, coupling)
    return torch.stack([embeddings - attend(embeddings, embeddings, coupling), layer - torch.tanh(mixed)])


def test_only_the_stage_that_reads_itself_has_a_determinant() -> None:
    """Proposition 3, Corollary 6.1 and the remark after Lemma D.2."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    coupling = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) * 0.5
    embedding_stage = reference_logdet(latents[:1], coupling).logabs_BT.sum().item()
    assert abs(embedding_stage) > 0.1
    totals = {}
    for implicit in (False, True):
        jacobian = torch.autograd.functional.jacobian(lambda x: residuals(x, coupling, implicit), latents)  # noqa: B023
        blocks = torch.stack([jacobian[1, t, :, 1, t] for t in range(LENGTH)])
        identity = torch.eye(WIDTH, dtype=torch.float64)
        assert torch.equal(blocks, identity.expand_as(blocks)) is not implicit
        totals[implicit] = torch.linalg.slogdet(jacobian.reshape(2 * LENGTH * WIDTH, -1)).logabsdet.item()
    assert totals[False] == pytest.approx(embedding_stage, abs=1e-9)
    assert not math.isclose(totals[True], embedding_stage, abs_tol=1e-2)
