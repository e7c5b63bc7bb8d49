"""The Markov task: the graph's shape, the sequences, divergence and distance against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from keel.data.languages.markov import Markov, kl_to_attention, mean_l1
from keel.errors import KeelError, ShapeError


@pytest.mark.parametrize(
    "fields", [{}, {"num_blocks": 3, "block_size": 5, "neighbours": 4, "bridges": 2}, {"bridges": 0, "num_blocks": 2}]
)
def test_the_matrix_is_stochastic_and_sparse_in_blocks(fields: dict[str, int]) -> None:
    task = Markov(**fields)  # type: ignore[arg-type]
    matrix = task.transitions()
    assert matrix.shape == (task.num_states, task.num_states) and matrix.dtype == torch.float32
    torch.testing.assert_close(matrix.sum(1), torch.ones(task.num_states))
    assert (matrix >= 0).all() and (matrix.diagonal() == 0).all()
    for block in range(task.num_blocks):
        rows = slice(block * task.block_size, (block + 1) * task.block_size)
        assert ((matrix[rows, rows] > 0).sum(1) == task.neighbours).all()
        for other in range(task.num_blocks):
            if other != block:
                columns = slice(other * task.block_size, (other + 1) * task.block_size)
                bridges = task.bridges if other == (block + 1) % task.num_blocks else 0
                assert int((matrix[rows, columns] > 0).sum()) == bridges


def test_the_matrix_depends_on_the_seed_alone() -> None:
    assert torch.equal(Markov().transitions(), Markov().transitions())
    assert not torch.equal(Markov().transitions(), Markov(seed=1).transitions())


def test_every_sequence_shows_all_states_and_asks_for_one() -> None:
    task = Markov(num_blocks=2, block_size=3, neighbours=2)
    assert task.sequences().tolist() == [[0, 1, 2, 3, 4, 5, query] for query in range(6)]


def test_divergence_and_distance_equal_plain_loops() -> None:
    target = Markov().transitions()
    attention = torch.rand(32, 33).softmax(1)
    divergences, distances = [], []
    for row, wanted in zip(attention.tolist(), target.tolist(), strict=True):
        divergences.append(sum(p * math.log(p / row[j]) for j, p in enumerate(wanted) if p > 0))
        distances.append(sum(abs(p - row[j]) for j, p in enumerate(wanted)))
    assert kl_to_attention(attention, target).item() == pytest.approx(sum(divergences) / 32, rel=1e-5)
    assert kl_to_attention(attention[3], target[3]).item() == pytest.approx(divergences[3], rel=1e-5)
    assert mean_l1(attention, target).item() == pytest.approx(sum(distances) / 32, rel=1e-5)


def test_a_perfect_match_is_zero_and_a_missing_state_is_finite() -> None:
    target = Markov().transitions()
    assert kl_to_attention(target, target).item() == pytest.approx(0, abs=1e-6)
    assert mean_l1(target, target).item() == 0
    elsewhere = torch.nn.functional.one_hot(torch.arange(32), 32).float()  # no state points at itself
    assert mean_l1(elsewhere, target).item() == pytest.approx(2)
    logits = torch.randn(32, 33, requires_grad=True)
    loss = kl_to_attention(elsewhere, target) + kl_to_attention(logits.softmax(1), target)
    loss.backward()
    assert loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all() and logits.grad.any()


def test_attention_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[32, 34\] does not fit the target \[32, 32\]"):
        mean_l1(torch.rand(32, 34), Markov().transitions())
    with pytest.raises(ShapeError):
        kl_to_attention(torch.rand(32), Markov().transitions())


@pytest.mark.parametrize("fields", [{"num_blocks": 1}, {"neighbours": 8}, {"bridges": 9}, {"block_size": 1}])
def test_a_wrong_size_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(KeelError, match=f"markov: {next(iter(fields))}="):
        Markov(**fields)
