"""A token of one row as decoding reads it equals the step of many rows: states, signals, what is written, failures too.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.streams.base import PassInputs, PassResult
from keel.streams.dynamic_state import ConstantTelemetry, DynamicStateStream, Mode
from keel.streams.dynamic_state import stream as stream_module

sys.path.insert(0, str(Path(__file__).parents[1] / "dynamic_state_support"))

from dynamic_state_cases import SIZE, WIDTH, make_stream

LENGTH = 80
LIMITS = {
    "coherence_least": 0.2, "alignment_least": 0.05, "patience": 2, "cooldown": 3, "noise_most": 2.0, "change_most": 0.8,
    "change_least": 0.002, "continuity_least": 0.4, "instability_most": 1.2,
}  # fmt: skip


def passes(stream: DynamicStateStream, hidden_1TD: Tensor, residual_1TD: Tensor, cuts: list[int]) -> Any:
    """Run a text in passes of these lengths: what is written, history and signals of all tokens, and the last result."""
    state: dict[str, Tensor] = {}
    written, results = [], []
    for hidden, residual in zip(hidden_1TD.split(cuts, 1), residual_1TD.split(cuts, 1), strict=True):
        flow = stream.open(PassInputs(embeddings_BTD=hidden, keep_history=True, collect_signals=True), state)
        stream.write("final_norm_input", -1, residual, flow)
        written.append(stream.write("final_hidden", -1, hidden, flow))
        results.append(stream.close(flow))
        state = results[-1].state
    return torch.cat(written, 1), joined(results, "history"), joined(results, "signals"), results[-1]


def joined(results: list[PassResult], what: str) -> dict[str, Tensor]:
    names = getattr(results[0], what)
    return {name: torch.cat([getattr(result, what)[name] for result in results], 1) for name in names}


def text(faults: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, residual = (torch.randn(1, LENGTH, WIDTH, generator=generator).double() for _ in range(2))
    hidden[:, 20:34] = hidden[:, 20:21]  # nothing moves
    residual[:, 20:34] = residual[:, 20:21]
    residual[:, 40:43] *= 40.0  # loud
    if faults:
        hidden[:, 50], residual[:, 56], hidden[:, 62] = torch.nan, torch.nan, torch.inf
    return hidden, residual


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sigmoid": {"substrate": "sigmoid", "init": "paper"},
    "guarded": {"safeguards": LIMITS, "retention": 0.2, "noise_floor": 0.05},
    "guarded without a gate": {"safeguards": LIMITS, "init": "paper", "retention": 0.5},
    "noise of the hidden state": {"noise": "hidden"},
    "turbulence": {"noise": "hidden", "turbulence": 3},
    "guarded turbulence": {
        "turbulence": 2,
        "safeguards": {**LIMITS, "noise_most": 4.0},
        "retention": 0.2,
        "noise_floor": 0.05,
    },
}


@pytest.mark.parametrize("cuts", [[1] * LENGTH, [7, *[1] * (LENGTH - 7)], [LENGTH]], ids=["tokens", "prompt", "whole"])
@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_equals_rows_together(case: str, cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = "safeguards" in CASES[case]
    stream = make_stream(**CASES[case]).eval()
    stream.telemetry = ConstantTelemetry((0.1, 0.0, 0.2, 0.0, 0.05, 0.0))
    given = text(faults=guarded)
    with torch.no_grad():
        calls: list[int] = []
        whole = stream_module.read_row
        monkeypatch.setattr(stream_module, "read_row", lambda *of: calls.append(1) or whole(*of))
        written, history, signals, last = passes(stream, *given, cuts)
        assert len(calls) == (LENGTH if guarded else sum(cut == 1 for cut in cuts)), "it is what is tested here"
        monkeypatch.setattr(DynamicStateStream, "_is_one_row", lambda *of: False)
        expected = passes(stream, *given, cuts)
    close = dict(rtol=1e-9, atol=1e-9, equal_nan=True)
    assert torch.allclose(written, expected[0], **close)
    for found, wanted in ((history, expected[1]), (signals, expected[2]), (last.state, expected[3].state)):
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert tensor.shape == wanted[name].shape and torch.allclose(tensor, wanted[name], **close), name
    if guarded:
        modes = signals["governor"][0]
        assert set(modes.tolist()) == {Mode.ACTIVE, Mode.SAFE, Mode.COOL_DOWN}
        assert torch.equal(written[0, modes > 0].nan_to_num(), given[0][0, modes > 0].nan_to_num())
        assert (signals["failures"].sum(1) > 0).sum() >= 7, "the remedies were at work"
        assert written[0, -1].isfinite().all(), "what was no number has left no trace"


def test_weights_put_together_follow_the_parameters() -> None:
    stream = make_stream().eval()
    hidden, residual = text(faults=False)
    state = {name: torch.full((1, SIZE), 0.3).double() for name in ("tpc", "s")}

    def token() -> Tensor:
        flow = stream.open(PassInputs(embeddings_BTD=hidden[:, :1]), state)
        stream.write("final_norm_input", -1, residual[:, :1], flow)
        return stream.write("final_hidden", -1, hidden[:, :1], flow).detach()

    with torch.no_grad():
        before = token()
        for parameter in stream.parameters():
            parameter.mul_(0.5)  # as a step of an optimizer does, in the middle of a text
        changed = token()
    with torch.enable_grad():
        expected = token()  # the step for many rows
    assert torch.allclose(changed, expected, rtol=1e-9) and not torch.allclose(before, changed)
