"""Hidden states of texts as fixed vectors: every layer's, averaged over the tokens of a word or of the whole text.

Shapes: N vectors, D width, L layers, B texts of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keel.errors import KeelError
from keel.evaluation.scoring import evaluating

Vectors = NDArray[np.float32]
Places = Sequence[tuple[int, int]]


def layer_vectors(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    places: Sequence[Places],
    *,
    max_length: int,
    batch_size: int = 32,
    last_only: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Vectors]:
    """Read texts with an encoder and average its states over places.

    Args:
        model: a Hugging Face encoder, with or without a head, that takes ``output_hidden_states``.
        tokenizer: a fast one with [CLS] and [SEP], which are put around every text and not averaged.
        places: for every text the characters of each place; an empty list for one vector of the whole text. A place that the text
            was cut before gives zeros.
        max_length: tokens read of a text, [CLS] and [SEP] included.
        last_only: keep the states after the last block alone.
        progress: called with the number of finished texts.
    Returns: an array [N, D] for every block, in order; N counts places over texts, or texts where they have none.
    """
    encoder = getattr(model, "base_model", model)
    rows = [encode_text(tokenizer, text, max_length) for text in texts]
    order = sorted(range(len(texts)), key=lambda index: len(rows[index][0]))  # texts of a length share a batch
    found: list[list[Tensor]] = [[] for _ in texts]
    with evaluating(model):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            states = _states(encoder, tokenizer, [rows[index][0] for index in chosen])
            states = states[-1:] if last_only else states
            for row, index in enumerate(chosen):
                averages_NT = _averages(rows[index][1], places[index])
                found[index] = [averages_NT @ state_BTD[row, : averages_NT.shape[1]] for state_BTD in states]
            if progress is not None:
                progress(start + len(chosen))
    return [torch.cat(layer).numpy() for layer in zip(*found, strict=True)]


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, max_length: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids of a text between [CLS] and [SEP], and the characters of each id; none for the two ends.

    Raises: KeelError for a tokenizer without these two tokens.
    """
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        raise KeelError("an encoder's tokenizer needs [CLS] and [SEP]; prepare it with with_mask_tokens")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False)
    ids, offsets = found["input_ids"][: max_length - 2], found["offset_mapping"][: max_length - 2]
    ends = (int(tokenizer.cls_token_id), int(tokenizer.sep_token_id))
    return [ends[0], *ids, ends[1]], [(-1, -1), *(tuple(place) for place in offsets), (-1, -1)]


def pad_rows(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return rows of ids as one batch [B, T], padded on the right, and its attention mask."""
    longest = max(map(len, rows))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids_BT = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    mask_BT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids_BT, mask_BT


def _states(encoder: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    ids_BT, mask_BT = (tensor.to(encoder.device) for tensor in pad_rows(tokenizer, rows))
    states = encoder(input_ids=ids_BT, attention_mask=mask_BT, output_hidden_states=True).hidden_states
    return [state.float().cpu() for state in states[1:]]


def _averages(offsets: Sequence[tuple[int, int]], places: Places) -> Tensor:
    """Return the matrix [places or 1, T] that averages tokens; a token belongs to every place that it shares a character with."""
    begins, ends = torch.tensor(offsets).unbind(1)
    if not places:
        inside = (begins >= 0)[None]
    else:
        first, after = torch.tensor(places).unbind(1)
        inside = (begins < after[:, None]) & (ends > first[:, None]) & (begins >= 0)
    return inside.float() / inside.sum(dim=1, keepdim=True).clamp(min=1)
