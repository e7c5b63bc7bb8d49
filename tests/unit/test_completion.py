"""Batched, cached completion equals one string at a time without a cache; what is judged is what was completed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

import keel
from keel.data.languages import Dyck, JsonObjects
from keel.data.tasks import TaskData
from keel.errors import KeelError
from keel.evaluation.completion import complete, completion
from keel.evaluation.corruption import CORRUPTIONS, OF_WHOLE_ROWS, corrupted
from keel.positions import Positions
from keel.streams.base import Stream

DATA = TaskData(Dyck(max_length=16), train_samples=4, valid_samples=4)
STREAMS: dict[str, Callable[[], dict[str, Stream]]] = {
    "bare": dict,
    "bias": lambda: {"structural": keel.StructuralStream(init="paper")},
    "fusion": lambda: {"structural": keel.StructuralStream(init="paper", inject="fusion")},
    "learned": lambda: {"learned_positions": keel.LearnedPositionsStream(max_positions=20, std=1.0)},
}


def _model(name: str, data: TaskData = DATA, seed: int = 0) -> keel.KeelForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(data.tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    return keel.attach(
        LlamaForCausalLM(config), STREAMS[name](), positions=Positions(scheme="nope") if name == "learned" else None
    )


@pytest.mark.parametrize("name", STREAMS)
def test_completions_equal_greedy_steps_without_a_cache(name: str) -> None:
    model = _model(name).train()
    end, size = DATA.tokenizer.eos_token_id, 12
    prompts = [
        [DATA.tokenizer.bos_token_id, *DATA.encode(DATA.language.sample("test", index).prompt)] for index in range(9)
    ]
    seen: list[int] = []
    found = complete(model, prompts, DATA.tokenizer, max_new_tokens=size, batch_size=4, progress=seen.append)
    assert model.training and seen == [4, 8, 9]
    model.eval()
    for prompt, continuation in zip(prompts, found, strict=True):
        ids: list[int] = []
        while len(ids) < size:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([prompt + ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] == end:
                ids.pop()
                break
        assert continuation == ids
    assert len({tuple(one) for one in found}) > 1
    assert complete(model, prompts, DATA.tokenizer, max_new_tokens=size, use_cache=False) == found


@pytest.mark.parametrize("name", STREAMS)
def test_rows_that_are_finished_are_let_go_and_the_others_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    select = DynamicCache.batch_select_indices
    monkeypatch.setattr(
        DynamicCache, "batch_select_indices", lambda cache, rows: (kept.append(len(rows)), select(cache, rows))[1]
    )
    lengths = set()
    for seed in range(24):  # of random models: some end a row at once, some late, some never
        model = _model(name, seed=seed)
        with torch.no_grad():
            model.get_output_embeddings().weight[DATA.tokenizer.eos_token_id] *= 2.0
        prompts = [[DATA.tokenizer.bos_token_id, *range(3, 3 + n)] for n in (1, 2, 3, 4, 5, 5, 4, 3)]
        expected = complete(model, prompts, DATA.tokenizer, max_new_tokens=12, use_cache=False)
        assert complete(model, prompts, DATA.tokenizer, max_new_tokens=12) == expected
        lengths |= {len(one) for one in expected}
        if kept and len(lengths) > 2:
            break
    assert 0 < min(kept) < 8 and len(lengths) > 2


@pytest.mark.parametrize("inject", ["bias", "fusion"])
@pytest.mark.parametrize("kind", sorted(set(CORRUPTIONS) - set(OF_WHOLE_ROWS)))
def test_what_is_corrupted_token_by_token_is_completed_from_the_cache_alike(inject: str, kind: str) -> None:
    alike = set()
    for seed in range(4):
        model = _model(inject, seed=seed)
        for parameter in model.streams.parameters():
            torch.nn.init.normal_(parameter, std=1.0)
        prompts = [[DATA.tokenizer.bos_token_id, *range(3, 3 + n)] for n in (1, 5, 3, 4)]
        intact = complete(model, prompts, DATA.tokenizer, max_new_tokens=10)
        with corrupted(model, kind):
            expected = complete(model, prompts, DATA.tokenizer, max_new_tokens=10, use_cache=False)
            found = complete(model, prompts, DATA.tokenizer, max_new_tokens=10, keep_finished=kind == "other")
        assert found == expected
        alike.add(expected == intact)
    assert False in alike, "the corruption changes nothing: this test could not fail"


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(KeelError, match="a prompt has no token"):
        complete(_model("bare"), [[1], []], DATA.tokenizer, max_new_tokens=2)


def test_every_set_is_completed_and_judged() -> None:
    model, seen = _model("bias"), []
    metrics = completion(
        model, DATA, 3, corruptions=["zeroed"], corrupted_samples=2, progress=lambda *what: seen.append(what)
    )
    names = [metric.name for metric in metrics]
    assert names[:4] == ["dyck.structural_accuracy", "dyck.exact_match", "dyck.valid_not_exact", "dyck.syntax_error"]
    conditions = {name.partition("@")[2] for name in names}
    assert conditions == {"", "L64", "L80", "L100", "d3", "d4", "d5", "d6", "d7", "d8", "intact", "zeroed"}
    by_name = {metric.name: metric for metric in metrics}
    assert by_name["dyck.syntax_error"].value == 1 - by_name["dyck.structural_accuracy"].value
    assert not by_name["dyck.syntax_error"].higher_is_better and by_name["dyck.exact_match"].higher_is_better
    assert len(by_name["dyck.exact_match"].numerators) == 3 and len(by_name["dyck.exact_match@zeroed"].numerators) == 2
    assert ("dyck strings", 3, 3) in seen and ("dyck strings zeroed", 2, 2) in seen


def test_a_perfect_model_is_judged_perfect(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TaskData(JsonObjects(max_length=60), train_samples=1, valid_samples=1)
    answers = {
        tuple([data.tokenizer.bos_token_id, *data.encode(sample.prompt)]): data.encode(sample.target)
        for kind in (data.language, *data.language.harder().values())
        for sample in (kind.sample("test", index) for index in range(2))
    }
    monkeypatch.setattr(
        "keel.evaluation.completion.complete",
        lambda model, prompts, *given, **named: [answers[tuple(one)] for one in prompts],
    )
    values = {metric.name: metric.value for metric in completion(_model("bare", data), data, 2)}
    assert values["json.validity@L512"] == values["json.field_f1@unseen"] == values["json.exact_match"] == 1.0
    assert values["json.syntax_error@d6"] == 0.0
