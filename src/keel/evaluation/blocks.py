"""Perplexity and accuracy over fixed blocks of text, without overlap: how S-Former reports PG-19 (App. B, Table 3).

Shapes: T tokens of a block, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from keel.data import Segment
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric
from keel.evaluation.scoring import LanguageModel, evaluating, score_tokens


def block_scores(
    model: LanguageModel,
    blocks: Sequence[Segment],
    family: str,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[ItemMetric]:
    """Score every block from its own beginning on.

    Args:
        blocks: from ``keel.data.evaluation_segments``; each is one item of the intervals.
        family: of the metrics' names.
        progress: called with the number of finished blocks.
    Returns: ``<family>.ppl``, per token, and ``<family>.accuracy``, the share of next tokens that were the likeliest.
    Raises: KeelError for no blocks.
    """
    if not blocks:
        raise KeelError(f"{family}: no blocks to score; give more text or shorter blocks")
    nats, hits, counts = [], [], []
    with evaluating(model):
        for index, block in enumerate(blocks):
            ids_1T = block.ids[:-1].unsqueeze(0).to(device)
            hidden_TD = model.final_hidden(input_ids=ids_1T).last_hidden_state[0]
            score = score_tokens(model, hidden_TD, block.ids[1:].to(device))
            nats.append(float(score.nll_R.sum()))
            hits.append(float(score.hit_R.sum()))
            counts.append(float(len(score.hit_R)))
            if progress is not None:
                progress(index + 1)
    return [
        ItemMetric(
            name=f"{family}.ppl",
            unit="perplexity per token",
            higher_is_better=False,
            numerators=tuple(nats),
            denominators=tuple(counts),
            exponential=True,
        ),
        ItemMetric(
            name=f"{family}.accuracy",
            unit="share of tokens",
            higher_is_better=True,
            numerators=tuple(hits),
            denominators=tuple(counts),
        ),
    ]
