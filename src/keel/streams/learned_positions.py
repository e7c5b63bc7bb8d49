"""Learned absolute positions, as a stream: the baseline of the papers' tables, to be put on a host without positions (NoPE).

    x_t <- x_t + P[t]        Vaswani et al. 2017, section 3.5; Radford et al. 2018

It is a stream so that an arm with learned positions differs from the others in its positions alone.

Shapes: B batch, T tokens, D hidden size, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from keel.errors import KeelError
from keel.hosts import HostShape
from keel.streams.base import Flow, PassInputs, PassResult, State, Stream


@dataclass(frozen=True, kw_only=True)
class LearnedPositionsConfig:
    """Configuration of learned positions.

    Attributes:
        max_positions: rows of the table, >= 1. A token beyond reads the last row.
        std: standard deviation of the initial table, >= 0; 0 leaves a host unchanged at attach.
    """

    max_positions: int
    std: float = 0.02

    def __post_init__(self) -> None:
        if self.max_positions < 1 or self.std < 0:
            raise KeelError(
                f"learned positions: max_positions={self.max_positions}, std={self.std}; give at least 1 and at least 0"
            )


class LearnedPositionsFlow(Flow):
    """The rows of the pass [B, T, D] and the positions after it [B]."""

    def __init__(self, rows_BTD: Tensor, seen_BT: Tensor, keep_history: bool) -> None:
        self.rows_BTD, self.seen_BT, self.keep_history = rows_BTD, seen_BT, keep_history


class LearnedPositionsStream(Stream):
    """Adds a learned vector for each absolute position to the embeddings; padding has no position.

    State while decoding: ``seen`` [B], tokens so far (int64). Reports count an arm with it as a baseline.
    """

    type_name = "learned_positions"
    config_class = LearnedPositionsConfig
    config: LearnedPositionsConfig
    is_baseline: ClassVar[bool] = True

    def build(self, shape: HostShape) -> None:
        """See ``Stream.build``."""
        self.table = nn.Parameter(torch.empty(self.config.max_positions, shape.hidden_size))

    def init_weights(self) -> None:
        """See ``Stream.init_weights``."""
        init.normal_(self.table, std=self.config.std)
        init.zeros_(self.step)

    def write_sites(self) -> list[tuple[str, int]]:
        """See ``Stream.write_sites``."""
        return [("embeddings", -1)]

    def open(self, inputs: PassInputs, state: State) -> LearnedPositionsFlow:
        """Count attended tokens since the beginning of the row, or of its document, and take their rows."""
        batch, length = inputs.embeddings_BTD.shape[:2]
        device = inputs.embeddings_BTD.device
        attended_BT = inputs.attended_BT
        if attended_BT is None:
            attended_BT = torch.ones(batch, length, dtype=torch.bool, device=device)
        before_B = state.get("seen", torch.zeros(batch, dtype=torch.long, device=device))
        seen_BT = before_B[:, None] + attended_BT.long().cumsum(1)
        if inputs.document_starts_BT is not None:
            # What was seen before the newest document that began is not its own.
            starts_BT = inputs.document_starts_BT & attended_BT
            seen_BT = seen_BT - torch.where(starts_BT, seen_BT - 1, 0).cummax(1).values
        rows_BTD = F.embedding((seen_BT - 1).clamp(0, self.config.max_positions - 1), self.table)
        return LearnedPositionsFlow(rows_BTD, seen_BT, inputs.keep_history)

    def write(self, site: str, layer: int, hidden_BTD: Tensor, flow: Flow) -> Tensor:
        """Return ``x_t + P[t]``."""
        assert isinstance(flow, LearnedPositionsFlow)
        return hidden_BTD + flow.rows_BTD.to(hidden_BTD.dtype)

    def close(self, flow: Flow) -> PassResult:
        """Return the tokens seen."""
        assert isinstance(flow, LearnedPositionsFlow)
        history = {"seen": flow.seen_BT} if flow.keep_history else {}
        return PassResult(state={"seen": flow.seen_BT[:, -1]}, history=history)


def reference_positions(attended_BT: Tensor, document_starts_BT: Tensor | None = None) -> Tensor:
    """Positions token by token, 0 at a beginning and at padding before it: the oracle of ``LearnedPositionsStream.open``."""
    positions_BT = torch.zeros(attended_BT.shape, dtype=torch.long)
    for row, attended_T in enumerate(attended_BT.tolist()):
        seen = 0
        for t, attended in enumerate(attended_T):
            if attended and document_starts_BT is not None and bool(document_starts_BT[row, t]):
                seen = 0
            seen += attended
            positions_BT[row, t] = max(seen - 1, 0)
    return positions_BT
