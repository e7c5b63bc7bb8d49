"""The judge of contradictions in free text: any classifier of sentence pairs that has such a class, here a tiny one made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from keel.errors import KeelError
from keel.evaluation.dta_suite import contradictions_of_text
from keel.evaluation.inference import InferenceJudge, sentences
from keel.evaluation.rollout import Rollout

WORDS = ["[PAD]", "[UNK]", "[SEP]", "it", "rains", "snows", "not", "late", "is", "dry"]
LABELS = ("entailment", "neutral", "CONTRADICTION")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=[("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", sep_token="[SEP]")


def classifier(labels: tuple[str, ...] = LABELS) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        initializer_range=1.0, max_position_embeddings=64, id2label=dict(enumerate(labels)),
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


def test_a_verdict_is_the_likeliest_class_of_each_pair_whatever_stands_beside_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = classifier()
    judge = InferenceJudge(model, tokenizer)
    texts = ["it rains", "it is not late", "dry", "it snows not it snows", "rains late is it", "not not not"]
    found = {}
    for premise in texts:
        for hypothesis in texts:
            pair = tokenizer(premise, hypothesis, return_tensors="pt")
            with torch.no_grad():
                found[premise, hypothesis] = int(model(**pair).logits.argmax()) == LABELS.index("CONTRADICTION")
            assert judge([premise], hypothesis) == found[premise, hypothesis]
    assert 0 < sum(found.values()) < len(found), "or the test says nothing"
    for hypothesis in texts:  # padded beside the longest, and one is enough
        assert judge(texts, hypothesis) == any(found[premise, hypothesis] for premise in texts)
        calm = [premise for premise in texts if not found[premise, hypothesis]]
        assert not judge(calm, hypothesis)


def test_a_checkpoint_is_read_from_safetensors_alone(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = classifier()
    for folder in (tmp_path / "whole", tmp_path / "pickled", tmp_path / "headless"):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    model.bert.save_pretrained(tmp_path / "headless")
    loaded = InferenceJudge.load(str(tmp_path / "whole"))
    assert torch.equal(loaded.model.classifier.weight, model.classifier.weight)
    for name, words in (
        ("pickled", "cannot be loaded"),
        ("headless", "classifier.* is missing"),
        ("no", "cannot be loaded"),
    ):
        with pytest.raises(KeelError, match=words):
            InferenceJudge.load(str(tmp_path / name))


def test_a_model_without_such_a_class_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(KeelError, match="its classes are good, bad; give a model of natural language inference"):
        InferenceJudge(classifier(("good", "bad")), tokenizer)


def test_free_text_is_judged_sentence_by_sentence(tokenizer: PreTrainedTokenizerFast) -> None:
    assert sentences("It rains. Does it?  It\ndoes!\n\n = Snow = \n") == [
        "It rains.",
        "Does it?",
        "It",
        "does!",
        "= Snow =",
    ]

    class Lines:
        """Decodes a token to a line."""

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "\n".join(WORDS[token] for token in ids)

    asked = []

    def contradicts(premises: Any, hypothesis: str) -> bool:
        asked.append(hypothesis)
        return hypothesis == "not" and "it" in premises

    ids_BT = torch.tensor([[6, 3, 6, 6, 4], [3, 6, 3, 4, 5]])  # the first token is the prompt
    run = Rollout(ids_BT=ids_BT, signals={"noise": np.zeros((2, 5))}, stages=((0, 1), (1, 5)))
    metric = contradictions_of_text(run, Lines(), contradicts)  # type: ignore[arg-type]
    assert metric.name == "dta.cpi_text" and metric.numerators == (2.0, 0.0) and metric.denominators == (4.0, 4.0)
    assert len(asked) == 8, "the prompt is judged no more than read"
