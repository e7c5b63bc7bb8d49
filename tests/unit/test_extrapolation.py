"""The block protocol against full logits, the same tokens at every length, and the bound on memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from keel.data.windows import Segment
from keel.errors import KeelError
from keel.evaluation.extrapolation import ExtrapolationResult, LengthSums, extrapolation, token_scores
from keel.positions import Positions, set_positions

VOCABULARY = 211


class Model(nn.Module):
    """A tiny Llama behind the two functions that the evaluation calls; counts the shapes of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.host = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attention_dropout=0.5, **sizes))
        for parameter in self.host.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.shapes: list[tuple[int, ...]] = []
        self.head_rows: list[int] = []

    def final_hidden(self, input_ids: Tensor) -> Any:
        self.shapes.append(tuple(input_ids.shape))
        return self.host.model(input_ids=input_ids)

    def logits_from_hidden(self, hidden_BTD: Tensor) -> Tensor:
        self.head_rows.append(hidden_BTD.shape[0] * hidden_BTD.shape[1])
        return self.host.lm_head(hidden_BTD)


def segment(targets: int, seed: int, documents: tuple[int, ...] = (0,)) -> Segment:
    """Random tokens that pass through the given documents, 0 to 4 bytes each."""
    random = np.random.default_rng(seed)
    document = np.sort(random.choice(documents, targets)) if len(documents) > 1 else np.full(targets, documents[0])
    return Segment(
        ids=torch.from_numpy(random.integers(0, VOCABULARY, targets + 1)),
        document_T=document,
        bytes=random.integers(0, 5, targets),
        start=0,
    )


SEGMENTS = [segment(50, 1, (3, 4, 9)), segment(37, 2, (9, 12))]


def naive(model: Model, length: int) -> dict[int, list[float]]:
    """The token losses in nats by document: a full forward of one block at a time, in float64, with all logits."""
    losses: dict[int, list[float]] = {}
    for part in SEGMENTS:
        ids, targets = part.ids[:-1], part.ids[1:]
        for start in range(0, len(ids), length):
            with torch.no_grad():
                logits = model.host.eval()(ids[None, start : start + length]).logits[0].double()
            for offset, row in enumerate(logits.log_softmax(-1)):
                where = start + offset
                losses.setdefault(int(part.document_T[where]), []).append(-float(row[targets[where]]))
    return losses


@pytest.mark.parametrize("token_budget", [1, 16, 10_000])
@pytest.mark.parametrize("head_tokens", [1, 7, 10_000])
def test_sums_equal_the_naive_full_logits(token_budget: int, head_tokens: int) -> None:
    model = Model()
    lengths = [1, 8, 13, 50, 64]
    result = extrapolation(model, SEGMENTS, lengths, token_budget=token_budget, head_tokens=head_tokens)
    assert result.documents == (3, 4, 9, 12)
    assert max(model.head_rows) <= head_tokens
    assert all(rows * size <= token_budget or rows == 1 for rows, size in model.shapes)
    for length in lengths:
        expected = naive(model, length)
        assert result.sums[length].nll == pytest.approx([math.fsum(expected[d]) for d in result.documents], rel=1e-5)
        assert result.sums[length].tokens == tuple(len(expected[d]) for d in result.documents)
    spread = [result.ppl(length) for length in lengths]
    assert max(spread) / min(spread) > 1.01  # the context matters, so a wrong block would show


def test_the_same_tokens_and_bytes_are_scored_at_every_length() -> None:
    result = extrapolation(Model(), SEGMENTS, [1, 2, 7, 32, 50, 1000])
    assert {sums.tokens for sums in result.sums.values()} == {result.sums[1].tokens}
    assert {sums.bytes for sums in result.sums.values()} == {result.sums[1].bytes}
    assert sum(result.sums[7].tokens) == 87
    assert sum(result.sums[7].bytes) == sum(int(part.bytes.sum()) for part in SEGMENTS)


def test_metrics_follow_from_the_sums() -> None:
    result = extrapolation(Model(), SEGMENTS, [50, 4])
    every = [loss for losses in naive(Model(), 4).values() for loss in losses]
    covered = sum(int(part.bytes.sum()) for part in SEGMENTS)
    assert result.lengths == [4, 50]
    assert result.ppl(4) == pytest.approx(math.exp(np.mean(every)), rel=1e-5)
    assert result.bpb(4) == pytest.approx(math.fsum(every) / math.log(2) / covered, rel=1e-5)
    assert result.growth(50) == pytest.approx(result.ppl(50) / result.ppl(4))
    assert result.growth(4, base=50) == pytest.approx(result.ppl(4) / result.ppl(50))
    with pytest.raises(KeelError, match=r"length 5 was not evaluated; evaluated: \[4, 50\]"):
        result.ppl(5)


def test_hook_runs_before_each_length_and_changes_what_is_scored() -> None:
    model, called = Model(), []

    def window_of_one(length: int) -> None:
        called.append(length)
        set_positions(model, Positions(scheme="window", window=1) if length == 50 else Positions())

    plain = extrapolation(model, SEGMENTS, [8, 50])
    changed = extrapolation(model, SEGMENTS, [8, 50], before_length=window_of_one)
    assert called == [8, 50]
    assert changed.sums[8].nll == plain.sums[8].nll
    assert changed.sums[50].nll != plain.sums[50].nll
    assert changed.ppl(50) == pytest.approx(extrapolation(model, SEGMENTS, [1]).ppl(1), rel=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_mode_is_evaluation_inside_and_restored_after(training: bool) -> None:
    model = Model().train(training)
    first = extrapolation(model, SEGMENTS, [16])
    assert model.training is training and model.host.model.training is training
    assert first.sums[16].nll == extrapolation(model, SEGMENTS, [16]).sums[16].nll  # dropout would differ
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="stop"):
        extrapolation(model, SEGMENTS, [16], before_length=_stop)
    assert model.training is training


def _stop(length: int) -> None:
    raise RuntimeError("stop")


@contextmanager
def largest_tensor() -> Iterator[SimpleNamespace]:
    """Records the number of elements of the largest tensor that any operation returns."""
    seen = SimpleNamespace(elements=0)

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, Tensor):
                    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                    seen.elements = max(seen.elements, elements)
            return result

    with Probe():
        yield seen


def test_logits_of_a_whole_block_never_exist() -> None:
    model, tokens, head_tokens = Model().eval(), 1024, 64
    parts = [segment(tokens, 5)]
    weights = max(parameter.numel() for parameter in model.parameters())
    with largest_tensor() as seen:
        result = extrapolation(model, parts, [tokens], head_tokens=head_tokens)
    assert seen.elements <= max(head_tokens * VOCABULARY, tokens * 24, weights)  # 24: the feed-forward's width
    with largest_tensor() as naively, torch.no_grad():
        logits = model.host(parts[0].ids[None, :-1]).logits[0]
        loss = nn.functional.cross_entropy(logits, parts[0].ids[1:])
    assert naively.elements >= tokens * VOCABULARY > 3 * seen.elements
    assert math.log(result.ppl(tokens)) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize(("value", "text"), [(math.nan, "nan"), (math.inf, "inf")])
def test_nan_and_infinity_are_reported(value: float, text: str) -> None:
    model = Model()
    bad = int(SEGMENTS[1].ids[-1])  # a target of document 12

    def head(hidden_BTD: Tensor) -> Tensor:
        logits = model.host.lm_head(hidden_BTD)
        logits[..., bad] = -value
        return logits

    model.logits_from_hidden = head  # type: ignore[method-assign]
    result = extrapolation(model, SEGMENTS, [8])
    times = sum(int((part.ids[1:] == bad).sum()) for part in SEGMENTS)
    expected = times if value == math.inf else 87  # one NaN logit spoils the whole softmax
    assert result.sums[8].nonfinite == expected
    assert not math.isfinite(result.ppl(8)) and not math.isfinite(result.bpb(8))
    saved = json.dumps(result.to_json(), allow_nan=False)
    assert f'"{text}"' in saved
    back = ExtrapolationResult.from_json(json.loads(saved))
    assert str(back) == str(result)
    assert extrapolation(Model(), SEGMENTS, [8]).sums[8].nonfinite == 0


def test_perplexity_beyond_floats_is_infinite_and_growth_is_not() -> None:
    def sums(nll: float) -> LengthSums:
        return LengthSums(nll=(nll,), tokens=(1,), bytes=(0,), nonfinite=0, seconds=0.1)

    result = ExtrapolationResult(documents=(0,), sums={8: sums(1000.0), 16: sums(1001.0)})
    assert result.ppl(8) == math.inf
    assert result.growth(16) == pytest.approx(math.e)
    assert math.isnan(result.bpb(8))


def test_json_round_trip_and_damage() -> None:
    result = extrapolation(Model(), SEGMENTS, [4, 50])
    saved = json.loads(json.dumps(result.to_json()))
    assert ExtrapolationResult.from_json(saved) == result
    del saved["sums"]["4"]["tokens"]
    with pytest.raises(KeelError, match="not a saved result"):
        ExtrapolationResult.from_json(saved)


def test_seeds_stack_for_the_bootstrap() -> None:
    model, other = Model(), Model()
    nn.init.normal_(other.host.lm_head.weight)
    results = [extrapolation(each, SEGMENTS, [4, 50]) for each in (model, other)]
    scores = token_scores(results)
    assert sorted(scores) == [4, 50]
    assert scores[4].nll_SD.shape == (2, 4)
    assert scores[4].nll_SD[1].tolist() == list(results[1].sums[4].nll)
    assert scores[50].tokens_D.tolist() == list(results[0].sums[50].tokens)
    assert scores[50].bytes_D.tolist() == list(results[0].sums[50].bytes)
    with pytest.raises(KeelError, match="different tokens"):
        token_scores([results[0], extrapolation(model, SEGMENTS[:1], [4, 50])])
    with pytest.raises(KeelError, match="at least one seed"):
        token_scores([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": []}, "at least one segment"),
        ({"lengths": []}, "distinct"),
        ({"lengths": [4, 4]}, "distinct"),
        ({"lengths": [0, 4]}, "at least 1"),
        ({"head_tokens": 0}, "budgets"),
        ({"token_budget": 0}, "budgets"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"segments": SEGMENTS, "lengths": [4], **options}
    with pytest.raises(KeelError, match=message):
        extrapolation(Model(), **arguments)


def test_progress_bar_is_drawn_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    extrapolation(Model(), SEGMENTS, [16])
    assert capsys.readouterr().out == ""
    extrapolation(Model(), SEGMENTS, [16], progress=True)
    assert "length 16" in capsys.readouterr().out
