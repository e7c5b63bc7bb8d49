"""Contradictions in free text by a model of natural language inference, whichever a user names (the judge that DTA §11.3 leaves open).

Any checkpoint of ``AutoModelForSequenceClassification`` with a class called contradiction will do: a folder, or a name on the Hub.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from keel.errors import KeelError

LONGEST = 256  # tokens of a pair: sentences of generated text may have no end
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


class InferenceJudge:
    """Whether a sentence contradicts one of those before it, to a model of natural language inference.

    Args:
        model: gives logits of classes for a pair of premise and hypothesis.
        tokenizer: the model's.
        name: what messages call it.
    Raises: KeelError where none of the model's classes, or more than one, is called contradiction.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, name: str = "the model") -> None:
        labels = {int(index): str(label) for index, label in model.config.id2label.items()}
        found = [index for index, label in labels.items() if "contradict" in label.lower()]
        if len(found) != 1:
            raise KeelError(
                f"judge of contradictions {name!r}: its classes are {', '.join(labels.values())}; give a model of natural language "
                "inference, one of whose classes is called contradiction"
            )
        self.model, self.tokenizer, self.contradiction = model.eval(), tokenizer, found[0]

    @classmethod
    def load(cls, checkpoint: str, device: torch.device | str = "cpu") -> InferenceJudge:
        """Read a checkpoint, safetensors only and never code that came with it.

        Args:
            checkpoint: a folder, or a name on the Hub.
        Raises: KeelError for one that cannot be read, lacks weights, or classifies something else.
        """
        try:
            model, info = AutoModelForSequenceClassification.from_pretrained(
                checkpoint, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
        except Exception as error:  # the libraries below raise OSError, ValueError, KeyError and their own kinds
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise KeelError(
                f"judge of contradictions {checkpoint!r} cannot be loaded: {reason}; give a folder or a name on the Hub, with "
                "safetensors and a tokenizer"
            ) from error
        if info["missing_keys"]:
            raise KeelError(
                f"judge of contradictions {checkpoint!r}: {sorted(info['missing_keys'])[0]!r} is missing among its weights; give a "
                "model that was trained to classify pairs"
            )
        return cls(model.to(device), tokenizer, checkpoint)

    def __call__(self, premises: Sequence[str], hypothesis: str) -> bool:
        """Say whether one of the premises is contradicted: whether that class is the likeliest for it."""
        if not premises:
            return False
        pairs = self.tokenizer(
            list(premises),
            [hypothesis] * len(premises),
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=LONGEST,
        ).to(self.model.device)
        with torch.no_grad():
            verdict_N = self.model(**pairs).logits.argmax(-1)
        return bool((verdict_N == self.contradiction).any())


def sentences(text: str) -> list[str]:
    """Return the sentences of a text: what ends in a stop, a question or exclamation mark before a space, or at a line's end."""
    return [part.strip() for part in _END_OF_SENTENCE.split(text) if part.strip()]
