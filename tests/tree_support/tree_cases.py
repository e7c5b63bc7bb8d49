"""What the tests of prompts, questions and probes share: a tokenizer, a source of made-up trees, a small model with a tree stream."""

from __future__ import annotations

import random
import re
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import keel
from keel.model import KeelForCausalLM
from keel.streams.tree import TreeStream
from keel.trees import Span, Tree

TEXTS = [
    "Instruction: Choose the correct option. Question: Which of the cats that saw the dog were asleep? Options: A. cats B. dogs Answer:",
    "Sentence: The old man by the river thinks that nobody has answered. Context: Read the context.",
]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE that has met the labels of prompts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=["<end>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


class MadeUpSource:
    """Trees drawn at random from the words of each sentence; as with a real parser, a longer sentence has another tree."""

    name, version = "made up", "1"

    def __init__(self) -> None:
        self.parsed = 0

    def parse(self, text: str) -> list[Tree]:
        self.parsed += 1
        trees = []
        for sentence in re.finditer(r"[^.!?\n]+[.!?]?", text):
            words = [
                (sentence.start() + m.start(), sentence.start() + m.end())
                for m in re.finditer(r"\w+|[^\w\s]", sentence.group())
            ]
            if words:
                trees.append(Tree(tuple(_drawn(words, 0, random.Random(sentence.group())))))
        return trees


def _drawn(words: list[tuple[int, int]], depth: int, chance: random.Random) -> list[Span]:
    spans = [Span(words[0][0], words[-1][1], depth, "X")]
    if len(words) > 1:
        cut = chance.randrange(1, len(words))
        spans += _drawn(words[:cut], depth + 1, chance) + _drawn(words[cut:], depth + 1, chance)
    return spans


def model(vocabulary: int, **fields: Any) -> KeelForCausalLM:
    """Return a small Llama with a tree stream that has an effect; without ``fields``, the bare host."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, pad_token_id=1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    host = AutoModelForCausalLM.from_config(config).double()
    streams = {"tree": TreeStream(init="paper", coefficient=1.0, **fields)} if fields else {}
    return keel.attach(host, streams).eval()


def staged_recipe() -> dict[str, Any]:
    """Fields of a recipe with one arm, ``host``, which trains what others begin with; they add arms and phases."""
    return {
        "name": "stages",
        "title": "Stages",
        "data": {
            "corpus": {"source": "stdlib"},
            "tokenizer": {"bpe": 300},
            "questions": {"cloze": {"source": "stdlib"}},
        },
        "host": {
            "family": "llama",
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
        },
        "arms": {"host": {"phases": [{"name": "pretraining", "steps": 1, "learning_rate": 1e-3}]}},
        "evaluation": {"cloze": {"source": "stdlib"}},
    }
