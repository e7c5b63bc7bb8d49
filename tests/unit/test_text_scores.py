"""Blocks of text and last words: scores equal those of the whole logits, and what stands before and behind is as said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import keel
from keel.data import CorpusConfig, Document, Segment, load_corpus, read_documents, train_bpe
from keel.errors import KeelError
from keel.evaluation.blocks import block_scores
from keel.evaluation.items import ItemMetric
from keel.evaluation.last_word import _row, last_word, read_passages

VOCABULARY = 300


@pytest.fixture(scope="module")
def model() -> Iterator[keel.KeelForCausalLM]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    yield keel.attach(LlamaForCausalLM(config), keel.StructuralStream(init="paper"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("text")
    for index in range(6):
        words = " ".join(f"{word}{index}" for word in ("stone", "river", "light", "cold", "warm", "tree") * 20)
        (folder / f"{index}.txt").write_text(words)
    return train_bpe(load_corpus(CorpusConfig(source=str(folder))), VOCABULARY)


PASSAGES = [
    Document("1", "the river was cold and the stone was warm"),
    Document("2", "light fell on the tree, and light fell on the stone\n"),
    Document("3", "word"),
    Document("4", "a cold river and a warm light and a cold"),
]


def _by_name(metrics: list[ItemMetric]) -> dict[str, ItemMetric]:
    return {metric.name: metric for metric in metrics}


def test_blocks_are_scored_as_the_whole_logits_say(model: keel.KeelForCausalLM) -> None:
    nothing = np.zeros(700, dtype=np.int64)
    ids = [torch.randint(0, VOCABULARY, (701,), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    blocks = [Segment(ids=block, document_T=nothing, bytes=nothing, start=0) for block in ids]
    model.train()
    seen: list[int] = []
    found = _by_name(block_scores(model, blocks, "pg19", progress=seen.append))
    assert model.training and seen == [1, 2]
    model.eval()
    nats, hits = 0.0, 0
    for block in ids:
        with torch.no_grad():
            logits = model(block[None, :-1]).logits[0].double()
        nats -= float(logits.log_softmax(-1).gather(-1, block[1:, None]).sum())
        hits += int((logits.argmax(-1) == block[1:]).sum())
    assert found["pg19.ppl"].value == pytest.approx(math.exp(nats / 1400), rel=1e-5)
    assert found["pg19.accuracy"].value == pytest.approx(hits / 1400)
    assert hits > 0
    with pytest.raises(KeelError, match="pg19: no blocks to score"):
        block_scores(model, [], "pg19")


def test_passages_end_in_their_last_word(tokenizer: PreTrainedTokenizerBase) -> None:
    passages = read_passages(PASSAGES, tokenizer)
    assert [tokenizer.decode(passage.ids[-passage.num_targets :]) for passage in passages] == [
        " warm",
        " stone",
        " cold",
    ]
    assert all(
        passage.ids == tokenizer(document.text.rstrip())["input_ids"]
        for passage, document in zip(passages, [PASSAGES[0], PASSAGES[1], PASSAGES[3]], strict=True)
    )
    single = read_passages(PASSAGES, tokenizer, single_token=True)
    assert [len(passage.ids) for passage in single] == [len(one.ids) for one in passages if one.num_targets == 1]
    assert [one.ids for one in read_passages(PASSAGES, tokenizer, most=2)] == [one.ids for one in passages[:2]]
    with pytest.raises(KeelError, match="no passage is left"):
        read_passages([Document("3", "word")], tokenizer)


def test_last_words_are_scored_after_their_context(
    model: keel.KeelForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    passages, separator = read_passages(PASSAGES, tokenizer), 0
    found = _by_name(
        last_word(model, passages, [6, 20], "lambada", separator=separator, num_passages=3, token_budget=45)
    )
    everything = []
    for passage in passages:  # the passages before, cyclically
        everything += [*passage.ids, separator]
    for context in (6, 20):
        nats, hits, start = [], [], 0
        for passage in passages:
            stop = start + len(passage.ids)
            row = (everything + everything[:stop])[-(context + passage.num_targets) :]
            assert row == _row(passages, len(nats), context, separator)
            with torch.no_grad():
                logits = model.eval()(torch.tensor([row])).logits[0].double().log_softmax(-1)
            scores = logits[context - 1 : -1]
            targets = torch.tensor(row[context:])
            nats.append(-float(scores.gather(-1, targets[:, None]).sum()))
            hits.append(bool((scores.argmax(-1) == targets).all()))
            start = stop + 1
        assert found[f"lambada.ppl@{context}"].value == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)
        assert found[f"lambada.accuracy@{context}"].value == pytest.approx(np.mean(hits))


def test_contexts_longer_than_all_passages_are_refused(
    model: keel.KeelForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(KeelError, match="shorter than a context of 5,000 tokens"):
        last_word(model, read_passages(PASSAGES, tokenizer), [5000], "lambada", separator=0, num_passages=1)


def test_documents_to_evaluate_on_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "passages.jsonl").write_text('{"text": "b"}\n{"text": "a"}\n{"text": "b"}\n{"text": " "}\n')
    found = read_documents(CorpusConfig(source=str(tmp_path / "passages.jsonl")))
    assert [document.text for document in found] == ["b", "a"]
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text(split)
    (tmp_path / "passages.jsonl").unlink()
    assert [document.text for document in read_documents(CorpusConfig(source=str(tmp_path)))] == ["test"]
    (tmp_path / "empty.txt").write_text(" ")
    with pytest.raises(KeelError, match="is empty"):
        read_documents(CorpusConfig(source=str(tmp_path / "empty.txt")))
