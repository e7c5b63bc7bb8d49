"""Text for masked language modelling: windows between [CLS] and [SEP] in which a share of the tokens is to be guessed.

Shapes: T tokens of a window, its [CLS] and [SEP] included; N windows.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from keel.data.tokenizers import END_OF_TEXT, PAD
from keel.data.tokens import TokenCorpus, TokenStream
from keel.data.windows import SlidingWindows
from keel.errors import KeelError

IGNORED = -100
_TOKENS = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "eos_token": END_OF_TEXT,
    "pad_token": PAD,
}


def with_mask_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Add to a tokenizer, in place, whichever of [CLS], [SEP], [MASK], end of text and padding it lacks, and return it.

    The end of a text has a token of its own beside [SEP], so that [CLS] and [SEP] stand at the ends of a window alone.
    """
    tokenizer.add_special_tokens({name: text for name, text in _TOKENS.items() if getattr(tokenizer, name) is None})
    return tokenizer


@dataclass(frozen=True, eq=False)
class MaskedCorpus(TokenCorpus):
    """A tokenised corpus of which a ``rate`` of the tokens is masked, 0 < rate < 1; its tokenizer has [CLS], [SEP] and [MASK]."""

    rate: float

    @classmethod
    def of(cls, corpus: TokenCorpus, rate: float) -> MaskedCorpus:
        """Return ``corpus`` with a rate.  Raises: KeelError for a tokenizer without the tokens that masking needs."""
        for name in ("cls_token", "sep_token", "mask_token"):
            if getattr(corpus.tokenizer, name) is None:
                raise KeelError(f"masking needs a tokenizer with a {name}; prepare it with with_mask_tokens")
        fields = {field.name: getattr(corpus, field.name) for field in dataclasses.fields(TokenCorpus)}
        return cls(**fields, rate=rate)

    def windows(self, stream: TokenStream, length: int, stride: int, seed: int) -> MaskedWindows:
        """Return the windows of one of the splits; see ``MaskedWindows``."""
        return MaskedWindows(stream, length, stride, self.tokenizer, rate=self.rate, seed=seed)


class MaskedWindows(Dataset[dict[str, Tensor]]):
    """Windows ``[CLS] text [SEP]`` in which a fixed number of tokens is replaced by [MASK]; made when they are read.

    Which ones is a function of seed and index alone. An index may go beyond the number of windows: ``index = pass · N + window``
    is that window with the masks of that pass, so that every pass masks anew and a resumed run the same.
    """

    varies_by_pass = True

    def __init__(
        self,
        stream: TokenStream,
        length: int,
        stride: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        rate: float,
        seed: int,
    ) -> None:
        """Take windows of ``length`` tokens, ``stride`` apart.  Raises: KeelError for sizes that do not fit the text."""
        if length < 4:
            raise KeelError(
                f"a masked window of {length} tokens has less than two between [CLS] and [SEP]; give at least 4"
            )
        self.text = SlidingWindows(stream, length - 2, min(stride, length - 2))
        self.rate, self.seed, self.mask_id = rate, seed, int(tokenizer.mask_token_id)
        self.ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id])
        self.special = np.unique(np.array(tokenizer.all_special_ids, dtype=np.int64))

    def __len__(self) -> int:
        """Return the number of windows of one pass."""
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels`` (the token where one is masked, else -100), int64 [T].

        Raises: IndexError below 0.
        """
        if index < 0:
            raise IndexError(f"masked window {index}")
        text = self.text[index % len(self.text)]["input_ids"]
        chosen = self._chosen(text.numpy(), index)
        ids = torch.cat((self.ends[:1], text, self.ends[1:]))
        labels = torch.full_like(ids, IGNORED)
        labels[1 + chosen] = text[chosen]
        ids[1 + chosen] = self.mask_id
        return {"input_ids": ids, "labels": labels}

    def _chosen(self, text: np.ndarray, index: int) -> Tensor:  # type: ignore[type-arg]
        """Return the places in the text that are masked; at least one where any may be."""
        places = np.flatnonzero(~np.isin(text, self.special))
        count = min(len(places), max(1, round(self.rate * len(places))))
        entropy = hashlib.sha256(f"mask {self.seed} {index}".encode()).digest()[:8]
        generator = np.random.default_rng(int.from_bytes(entropy, "little"))
        return torch.from_numpy(np.sort(generator.choice(places, size=count, replace=False)))
