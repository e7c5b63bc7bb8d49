"""A made-up language as data to learn: its tokenizer, and its strings as samples whose loss is on the target alone.

Shapes: T tokens of one sample.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from keel.data.languages.base import Sample
from keel.data.languages.markov import Markov

PAD, START, END = "<pad>", "<sos>", "<eos>"
# Raised when a language gives other strings, or they become other tokens: runs of different versions do not mix.
_FORMAT = 1


class TaskData:
    """What an arm learns from a language: strings to complete, or for ``Markov`` a matrix to attend by.

    Attributes:
        language: its configuration, which is also its generator.
        tokenizer: a token for every entry of the language's alphabet, and ``<pad>``, ``<sos>``, ``<eos>``.
        fingerprint: changes with anything that changes a sample.
    """

    def __init__(self, language: Any, *, train_samples: int, valid_samples: int) -> None:
        self.language = language
        self.train_samples, self.valid_samples = train_samples, valid_samples
        self.tokenizer = language_tokenizer(language.alphabet)
        about = f"{_FORMAT} {language!r} {train_samples} {valid_samples}"
        self.fingerprint = hashlib.sha256(about.encode()).hexdigest()

    @property
    def trains_attention(self) -> bool:
        """Whether samples have an ``attention_target`` in place of tokens to predict."""
        return isinstance(self.language, Markov)

    def train(self) -> Completions | AttentionRows:
        """Return the samples of one pass over the training data."""
        return AttentionRows(self) if self.trains_attention else Completions(self, "train", self.train_samples)

    def valid(self) -> Completions | AttentionRows:
        """Return the samples of the validation curve."""
        return AttentionRows(self) if self.trains_attention else Completions(self, "valid", self.valid_samples)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a string of the language."""
        ids: list[int] = self.tokenizer.convert_tokens_to_ids(self.language.tokens(text))
        return ids


class Completions(Dataset[dict[str, Tensor]]):
    """Samples of a split as ids: ``<sos> prompt target <eos>``; made when they are read."""

    def __init__(self, data: TaskData, split: str, size: int) -> None:
        self.data, self.split, self.size = data, split, size

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids``, ``labels`` (-100 but on target and ``<eos>``) and ``attention_mask``, int64 [T].

        Raises: IndexError outside ``0 .. len - 1``.
        """
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of {self.size}")
        sample: Sample = self.data.language.sample(self.split, index)
        tokenizer = self.data.tokenizer
        prompt = [tokenizer.bos_token_id, *self.data.encode(sample.prompt)]
        ids = torch.tensor([*prompt, *self.data.encode(sample.target), tokenizer.eos_token_id])
        labels = ids.clone()
        labels[: len(prompt)] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


class AttentionRows(Dataset[dict[str, Tensor]]):
    """Every query of a ``Markov`` task (S-Former, App. A.1): the states in order, then the query."""

    def __init__(self, data: TaskData) -> None:
        offset = data.tokenizer.convert_tokens_to_ids(data.language.alphabet[0])
        self.ids_VT = data.language.sequences() + offset
        self.targets_VV = data.language.transitions()

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self.ids_VT)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` [V + 1], ``labels`` (one label, which counts the row) and ``attention_target`` [V]."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        ids = self.ids_VT[index]
        labels = torch.full_like(ids, -100)
        labels[-1] = ids[-1]
        return {"input_ids": ids, "labels": labels, "attention_target": self.targets_VV[index]}


def language_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the string that ids spell; special tokens, which a model may put anywhere, spell nothing."""
    special = set(tokenizer.all_special_ids)
    tokens: list[str] = tokenizer.convert_ids_to_tokens([index for index in ids if index not in special])
    return "".join(tokens)


def language_tokenizer(alphabet: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for every entry of ``alphabet``; of several that fit, the longest is taken."""
    vocabulary = {token: index for index, token in enumerate([PAD, START, END, *alphabet])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    longest_first = sorted(alphabet, key=len, reverse=True)
    pattern = "|".join("".join(f"\\x{{{ord(character):x}}}" for character in token) for token in longest_first)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=START, eos_token=END, clean_up_tokenization_spaces=False
    )
