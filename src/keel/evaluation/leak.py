"""What a model knows of the future: the largest change of earlier logits when later tokens change.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.options import num_layers
from keel.evaluation.scoring import evaluating
from keel.model import KeelForCausalLM
from keel.trees.fields import FieldReader, row_inputs

MakeTrees = Callable[[Tensor], Mapping[str, Tensor]]


@torch.no_grad()
def max_logit_change(
    model: KeelForCausalLM, ids_BT: Tensor, changed_BT: Tensor, make_trees: MakeTrees | None = None
) -> dict[str, float]:
    """Return ``leak.max_logit_change`` over the tokens before the first that differs, in logits.

    GTCA section 3.3 says that it "never accesses future information"; its trees have read the whole sentence all the same. A causal
    model gives 0, up to the rounding of its dtype.

    Args:
        ids_BT, changed_BT: the same beginnings with different ends, without padding; each row's first difference is its own.
        make_trees: trees of a batch of ids, made anew for the changed one; None where the model needs none or looks them up.
    Raises: KeelError for other shapes, or rows that differ nowhere or everywhere.
    """
    if ids_BT.shape != changed_BT.shape:
        raise KeelError(
            f"leak: ids of shape {list(ids_BT.shape)} and {list(changed_BT.shape)}; give two of the same shape"
        )
    differs_BT = ids_BT != changed_BT
    before_BT = ~differs_BT.cummax(1).values
    if not (differs_BT.any(1) & before_BT.any(1)).all():
        raise KeelError("leak: every row needs tokens in common with the changed one, and then one that is different")
    first, second = (
        model(ids, **({} if make_trees is None else {"trees": make_trees(ids)})).logits.float()
        for ids in (ids_BT, changed_BT)
    )
    return {"leak.max_logit_change": float((first - second)[before_BT].abs().max())}


@torch.no_grad()
def text_leak(
    model: KeelForCausalLM,
    reader: FieldReader,
    pairs: Sequence[tuple[str, str]],
    device: torch.device | str = "cpu",
) -> list[ItemMetric]:
    """Change the end of texts, and see what the logits before it do.

    Args:
        pairs: two texts that begin alike, or of which one is the beginning of the other; an equal pair counts as a change of 0.
    Returns: ``leak.max_logit_change`` over all pairs and ``leak.mean_logit_change``, the mean of each pair's largest, in logits.
    """
    changes = []
    with evaluating(model):
        for pair in pairs:
            rows = [reader.read(text) for text in pair]
            logits = [
                model(torch.tensor([row.ids], device=device), **row_inputs([row], num_layers(model), device=device))
                .logits[0]
                .float()
                for row in rows
            ]
            same = next(
                (i for i, (a, b) in enumerate(zip(*(row.ids for row in rows), strict=False)) if a != b),
                min(len(row.ids) for row in rows),  # one goes on where the other ends
            )
            changes.append(float((logits[0][:same] - logits[1][:same]).abs().max()))
    names = {"leak.max_logit_change": [max(changes)], "leak.mean_logit_change": changes}
    return [mean(name, values, unit="logits", higher_is_better=None) for name, values in names.items()]
