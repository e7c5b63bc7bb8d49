"""Masked language modelling on held-out text: the loss and accuracy of the tokens that were masked.

Shapes: B windows of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keel.errors import KeelError
from keel.evaluation.items import ItemMetric
from keel.evaluation.scoring import evaluating

_BATCH = 8


def masked_scores(
    model: nn.Module,
    windows: Sequence[dict[str, Tensor]],
    family: str,
    *,
    seen_V: Tensor,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[ItemMetric]:
    """Score what an encoder guesses for masked tokens.

    Args:
        model: a masked language model that gives logits [B, T, V].
        windows: {"input_ids", "labels"} of equal length, labels -100 but where masked; each is one item of the intervals.
        family: of the metrics' names.
        seen_V: how often each token stands in the training text.
        progress: called with the number of finished windows.
    Returns: ``<family>.loss``, nats a masked token; ``<family>.accuracy``, the share that was the likeliest; ``<family>.loss_by_counts``,
    the loss of who guesses by how often tokens are: a model that is no better has not begun to look at what stands around a gap.
    Raises: KeelError for no windows.
    """
    if not windows:
        raise KeelError(f"{family}: no windows to score; give more text or shorter windows")
    nats: list[float] = []
    hits: list[float] = []
    counts: list[float] = []
    by_counts: list[float] = []
    rarity_V = -torch.log_softmax(seen_V.double().add(1).log(), dim=0)
    with evaluating(model):
        for start in range(0, len(windows), _BATCH):
            batch = windows[start : start + _BATCH]
            labels_BT = torch.stack([window["labels"] for window in batch]).to(device)
            ids_BT = torch.stack([window["input_ids"] for window in batch]).to(device)
            logits_BTV = model(input_ids=ids_BT).logits.float()
            losses_BT = F.cross_entropy(logits_BTV.mT, labels_BT, reduction="none", ignore_index=-100)
            nats += losses_BT.double().sum(dim=1).tolist()
            hits += (logits_BTV.argmax(dim=-1) == labels_BT).double().sum(dim=1).tolist()
            by_counts += [float(rarity_V[window["labels"][window["labels"].ne(-100)]].sum()) for window in batch]
            counts += labels_BT.ne(-100).double().sum(dim=1).tolist()
            if progress is not None:
                progress(len(nats))
    nats_each = "nats a masked token"
    rows: list[tuple[str, str, bool | None, list[float]]] = [
        ("loss", nats_each, False, nats),
        ("accuracy", "share of tokens", True, hits),
        ("loss_by_counts", nats_each, None, by_counts),
    ]
    return [
        ItemMetric(
            name=f"{family}.{name}",
            unit=unit,
            higher_is_better=better,
            numerators=tuple(values),
            denominators=tuple(counts),
        )
        for name, unit, better, values in rows
    ]
