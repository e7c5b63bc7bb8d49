"""Learned positions against the count written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keel.errors import KeelError
from keel.hosts import HostShape
from keel.streams.base import PassInputs
from keel.streams.learned_positions import LearnedPositionsStream, reference_positions

ROWS, WIDTH = 5, 3


def _mask(*rows: str) -> Tensor:
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def _stream() -> LearnedPositionsStream:
    stream = LearnedPositionsStream(max_positions=ROWS)
    stream.build(HostShape(hidden_size=WIDTH, num_layers=1))
    with torch.no_grad():
        stream.table.copy_(torch.arange(ROWS)[:, None].expand(ROWS, WIDTH))
    return stream


def _written(stream: LearnedPositionsStream, inputs: PassInputs, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    flow = stream.open(inputs, state)
    added_BTD = stream.write("embeddings", -1, inputs.embeddings_BTD, flow) - inputs.embeddings_BTD
    return added_BTD[..., 0].round().long(), stream.close(flow).state["seen"]


@pytest.mark.parametrize("starts", [None, _mask("1001000", "0010001", "1000100")])
def test_every_token_gets_the_row_of_its_position(starts: Tensor | None) -> None:
    attended = _mask("1111111", "0011011", "1101100")
    inputs = PassInputs(embeddings_BTD=torch.zeros(3, 7, WIDTH), attended_BT=attended, document_starts_BT=starts)
    rows, seen = _written(_stream(), inputs, {})
    expected = reference_positions(attended, starts).clamp(max=ROWS - 1)
    assert torch.equal(rows, expected)
    assert len(expected.unique()) > 3
    assert starts is not None or seen.tolist() == [7, 4, 4]


def test_a_row_goes_on_where_it_stopped() -> None:
    stream, embeddings = _stream(), torch.zeros(1, 5, WIDTH)
    whole, _ = _written(stream, PassInputs(embeddings_BTD=embeddings), {})
    first, seen = _written(stream, PassInputs(embeddings_BTD=embeddings[:, :2]), {})
    rest, _ = _written(stream, PassInputs(embeddings_BTD=embeddings[:, 2:]), {"seen": seen})
    assert torch.equal(torch.cat([first, rest], 1), whole) and whole[0].tolist() == [0, 1, 2, 3, 4]


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(KeelError, match="max_positions=0"):
        LearnedPositionsStream(max_positions=0)
