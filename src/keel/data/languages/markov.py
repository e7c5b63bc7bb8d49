"""Markov attention matching: can a row of attention become a row of a transition matrix?

S-Former, Appendix A.1 and Algorithm 1. A sparse block graph gives the row-stochastic matrix P*. The input for the query i
is [0 … V-1, i]; the attention of its last position is trained towards P*_i with the KL divergence, and the mean ℓ1
distance between all such rows and P* is the result.

Shapes: V states, K keys of an attention row (V, or V + 1 with the query's own position as the last).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keel.data.languages.base import generator
from keel.errors import KeelError, ShapeError


@dataclass(frozen=True, kw_only=True)
class Markov:
    """A sparse block graph and its transition matrix.

    The paper says no more than "sparse block-graph": here every state points at ``neighbours`` others of its block, and
    ``bridges`` states of each block point at one state of the next block as well (around the end). Weights are
    uniform in [0.1, 1], then each row is divided by its sum.

    Attributes:
        seed: chooses edges and weights.
        num_blocks: >= 2.
        block_size: states of a block, >= 2; V = num_blocks · block_size.
        neighbours: 1 to block_size - 1.
        bridges: 0 to block_size.
    """

    seed: int = 0
    num_blocks: int = 4
    block_size: int = 8
    neighbours: int = 3
    bridges: int = 1

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_blocks", 2, None),
            ("block_size", 2, None),
            ("neighbours", 1, self.block_size - 1),
            ("bridges", 0, self.block_size),
        ):
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                up_to = "" if most is None else f" to {most}"
                raise KeelError(f"markov: {name}={value}; give {least}{up_to or ' or more'}")

    @property
    def family(self) -> str:
        """What its metrics are called."""
        return "markov"

    @property
    def alphabet(self) -> list[str]:
        """The tokens of the language, one a state."""
        return [f"s{state:03d}" for state in range(self.num_states)]

    @property
    def num_states(self) -> int:
        """V."""
        return self.num_blocks * self.block_size

    def transitions(self) -> Tensor:
        """Return P*, float32 [V, V]; rows sum to 1."""
        source = generator("markov", self)
        weights_VV = torch.zeros(self.num_states, self.num_states, dtype=torch.float64)
        for block in range(self.num_blocks):
            first, following = block * self.block_size, (block + 1) % self.num_blocks * self.block_size
            own = range(first, first + self.block_size)
            edges = [
                (state, other)
                for state in own
                for other in source.sample([other for other in own if other != state], self.neighbours)
            ]
            edges += [
                (state, following + source.randrange(self.block_size)) for state in source.sample(own, self.bridges)
            ]
            for edge in edges:
                weights_VV[edge] = 0.1 + 0.9 * source.random()
        return (weights_VV / weights_VV.sum(1, keepdim=True)).float()

    def sequences(self) -> Tensor:
        """Return the input of every query, int64 [V, V + 1]: row i is [0 … V-1, i]."""
        states_V = torch.arange(self.num_states)
        return torch.cat([states_V.expand(self.num_states, -1), states_V[:, None]], 1)


def kl_to_attention(attention_row: Tensor, target_row: Tensor, epsilon: float = 1e-9) -> Tensor:
    """Return KL(P*_i ‖ p̂_i) in nats, mean over rows; a scalar.

    Attention that the query pays to its own position, the last of V + 1 keys, is lost to the states, and so costs.

    Args:
        attention_row: [..., K], rows sum to 1 over K = V or V + 1 keys.
        target_row: [..., V], rows sum to 1; a zero adds nothing.
        epsilon: added to the attention, so that a zero gives a finite loss.
    Raises: ShapeError.
    """
    attention_V = _over_states(attention_row, target_row)
    return (torch.xlogy(target_row, target_row) - target_row * (attention_V + epsilon).log()).sum(-1).mean()


def mean_l1(estimate: Tensor, target: Tensor) -> Tensor:
    """Return the mean over rows of Σ_j |P̂_ij − P*_ij|, from 0 to 2; a scalar.

    Args:
        estimate: [V, K], the attention of the last position by query, K = V or V + 1.
        target: [V, V], P*.
    Raises: ShapeError.
    """
    return (_over_states(estimate, target) - target).abs().sum(-1).mean()


def _over_states(attention: Tensor, target: Tensor) -> Tensor:
    """Return the attention to the V states alone."""
    num_states = target.shape[-1]
    if attention.shape[:-1] != target.shape[:-1] or attention.shape[-1] - num_states not in (0, 1):
        raise ShapeError(
            f"attention {list(attention.shape)} does not fit the target {list(target.shape)}; give as many rows, and V or V + 1 keys"
        )
    return attention[..., :num_states]
