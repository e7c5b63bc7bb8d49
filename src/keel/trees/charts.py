"""The best binary tree over every sentence of a batch, by CKY on tensors.

Shapes: B sentences, T words; a chart [B, T, T + 1] holds at (i, j) what belongs to the words i to j - 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from keel.errors import ShapeError


def best_splits(scores_BTT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the score of the best binary tree over every span, and where its root is split.

    Kitaev & Klein 2018, section 2: a tree's score is the sum of its spans' scores. All spans of one length in all sentences are done
    at once, so there are T steps.

    Args: scores_BTT: [B, T, T + 1], the score of a span (i, j), 0 <= i < j <= T; other places are not read.
    Returns: [B, T, T + 1] in the dtype of the scores, and int64 of the same shape, 0 for a word. Raises: ShapeError.
    Reference twin: ``reference_best_splits``.
    """
    batch, length, edges = scores_BTT.shape
    if edges != length + 1:
        raise ShapeError(f"best_splits: scores are {list(scores_BTT.shape)}; expected [batch, words, words + 1]")
    best = torch.zeros_like(scores_BTT)
    splits = torch.zeros(scores_BTT.shape, dtype=torch.long, device=scores_BTT.device)
    # by_left[b, i, w] and by_right[b, j, w]: the best tree over w words from i on, and over w words up to j.
    by_left = scores_BTT.new_zeros(batch, length + 1, length + 1)
    by_right = scores_BTT.new_zeros(batch, length + 1, length + 1)
    for width in range(1, length + 1):
        left = torch.arange(length - width + 1, device=scores_BTT.device)
        right = left + width
        value = scores_BTT[:, left, right]
        if width > 1:
            inside = by_left[:, : length - width + 1, 1:width] + by_right[:, width : length + 1, 1:width].flip(-1)
            most = inside.max(-1)
            value = value + most.values
            splits[:, left, right] = left + 1 + most.indices
        best[:, left, right] = value
        by_left[:, left, width] = value
        by_right[:, right, width] = value
    return best, splits


def reference_best_splits(scores_TT: Tensor) -> tuple[Tensor, Tensor]:
    """The same for one sentence, span after span: the oracle of ``best_splits``. Of equal splits the first is taken."""
    length = len(scores_TT)
    best, splits = torch.zeros_like(scores_TT), torch.zeros(scores_TT.shape, dtype=torch.long)
    for width in range(1, length + 1):
        for i in range(length - width + 1):
            j = i + width
            best[i, j] = scores_TT[i, j]
            if width > 1:
                inside = torch.stack([best[i, k] + best[k, j] for k in range(i + 1, j)])
                splits[i, j] = i + 1 + int(inside.argmax())
                best[i, j] += inside.max()
    return best, splits


def tree_spans(splits: np.ndarray, length: int) -> list[tuple[int, int]]:
    """Return the spans (i, j) of the binary tree over the first ``length`` words in preorder, from one row of the splits."""
    spans, waiting = [], [(0, length)]
    while waiting:
        i, j = waiting.pop()
        spans.append((i, j))
        if j - i > 1:
            split = int(splits[i, j])
            waiting += [(split, j), (i, split)]
    return spans
