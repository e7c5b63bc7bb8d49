"""The same checkpoint under lm-evaluation-harness and under our own evaluation: the same numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tree_support"))

import tree_cases as cases  # found through the line above

from keel.data.questions import Question, prompt_of
from keel.errors import KeelError
from keel.evaluation.harness import harness_model
from keel.evaluation.minimal_pairs import MinimalPair, minimal_pairs
from keel.evaluation.multiple_choice import multiple_choice
from keel.evaluation.options import Request, option_scores
from keel.trees.fields import reader_of

pytest.importorskip("lm_eval")
WORDS = ("the cats", "a dog", "none", "the old man", "the river", "nobody")
QUESTIONS = [
    Question(text=f"Who answered {WORDS[n % 5]}?", options=WORDS[n % 3 : n % 3 + 3], answer=n % 3) for n in range(12)
]
PAIRS = [
    MinimalPair(good=f"{WORDS[n % 6]} were asleep.", bad=f"{WORDS[n % 6]} asleep were.", paradigm="order", field="x")
    for n in range(6)
]


def _task(folder: Path, name: str, rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test",
        "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}], "num_fewshot": 0, **fields,
    }  # fmt: skip


def test_numbers_are_those_of_our_own_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from lm_eval import evaluator
    from lm_eval.tasks import get_task_dict

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = cases.tokenizer()
    model = cases.model(len(tokenizer), tree_scope="sentence")
    reader = reader_of(tokenizer, source=cases.MadeUpSource())
    asked = [{"prompt": prompt_of(one), "options": one.options, "answer": one.answer} for one in QUESTIONS]
    tasks = [
        _task(tmp_path, "asked", asked, doc_to_text="prompt", doc_to_choice="options", doc_to_target="answer"),
        _task(
            tmp_path, "pairs", [vars(pair) for pair in PAIRS], doc_to_text="", target_delimiter="",
            doc_to_choice="{{[good, bad]}}", doc_to_target=0,
        ),
    ]  # fmt: skip
    lm = harness_model(model, reader)
    # Not simple_evaluate, which lists every installed package for its log.
    found = evaluator.evaluate(lm=lm, task_dict=get_task_dict(tasks), bootstrap_iters=0, log_samples=True)
    ours = multiple_choice(model, reader, QUESTIONS, "asked")[0].value
    assert 0 < ours < 1  # neither is right by doing nothing
    assert found["results"]["asked"]["acc,none"] == pytest.approx(ours)
    assert found["results"]["pairs"]["acc,none"] == pytest.approx(minimal_pairs(model, reader, PAIRS)[0].value)
    theirs = [[float(one[0][0]) for one in sample["resps"]] for sample in found["samples"]["asked"]]
    scores = option_scores(model, reader, [Request(prompt_of(one), one.continuations()) for one in QUESTIONS])
    assert theirs == [pytest.approx(row, abs=1e-9) for row in scores]


class _Asked:
    def __init__(self, *args: Any) -> None:
        self.args = args


def test_rolling_and_generation() -> None:
    tokenizer = cases.tokenizer()
    model = cases.model(len(tokenizer), tree_scope="sentence")
    reader = reader_of(tokenizer, source=cases.MadeUpSource())
    lm = harness_model(model, reader)
    text = "The old man has answered."
    assert lm.loglikelihood_rolling([_Asked(text)]) == pytest.approx(
        option_scores(model, reader, [Request("", [text])])[0]
    )
    prompt = "Question: Who answered?\nAnswer:"
    whole = lm.generate_until([_Asked(prompt, {"max_gen_toks": 8})])[0]
    assert whole
    assert lm.loglikelihood([_Asked(prompt, whole)])[0][1] or whole.count("\ufffd")
    stop = whole[len(whole) // 2]
    assert lm.generate_until([_Asked(prompt, {"max_gen_toks": 8, "until": [stop]})])[0] == whole[: whole.index(stop)]
    with pytest.raises(KeelError, match="longer than the 512"):
        lm.loglikelihood_rolling([_Asked("man " * 600)])
