"""What a model knows of the future: the largest change of earlier logits when later tokens change.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.model import KeelForCausalLM

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
