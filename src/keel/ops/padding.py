"""Recurrences over padded rows: the state is frozen where there is padding, wherever the padding stands.

Shape suffixes: G groups, B batch, T time, D input width, H state width.

Attended tokens are moved to the left of their row, in order, so that the recurrence reads them all before any padding;
its states are then put back to their columns. No shape depends on the data, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keel.errors import ShapeError

Recurrence = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
"""(inputs_BTD, state_GBH or None, document_starts_BT or None) -> (states_GBTH, final_GBH)"""


def pack_left(inputs_BTx: Tensor, mask_BT: Tensor) -> Tensor:
    """Move the tokens where ``mask_BT`` (bool) is True to the left of their row; both kinds keep their order."""
    order_BT = torch.argsort(mask_BT.logical_not().to(torch.uint8), dim=1, stable=True)
    return take_columns(inputs_BTx, order_BT)


def unpack(packed_BTx: Tensor, mask_BT: Tensor, initial_Bx: Tensor) -> Tensor:
    """Put states of packed tokens back: at each column that of the last attended token up to it, else the initial one.

    Args:
        packed_BTx: one row for each token, in the order of ``pack_left``.
        mask_BT: bool, as given to ``pack_left``.
        initial_Bx: what stands at the columns before the first attended token.
    """
    count_BT = mask_BT.long().cumsum(1)
    return take_columns(torch.cat([initial_Bx.unsqueeze(1), packed_BTx], dim=1), count_BT)


def take_columns(tensor_BTx: Tensor, columns_BN: Tensor) -> Tensor:
    """Return ``tensor_BTx[b, columns_BN[b, n]]`` as rows of one flat table, whose gradient is a sum over rows."""
    batch, length = tensor_BTx.shape[:2]
    offsets_B1 = torch.arange(batch, device=tensor_BTx.device).unsqueeze(1) * length
    taken_Nx = tensor_BTx.flatten(0, 1).index_select(0, (columns_BN + offsets_B1).flatten())
    return taken_Nx.unflatten(0, columns_BN.shape)


def reference_run_padded(
    recurrence: Recurrence,
    inputs_BTD: Tensor,
    mask_BT: Tensor,
    state_GBH: Tensor,
    document_starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence by column, with ``h = where(mask, h_new, h)``; the specification of ``run_padded``."""
    states = []
    for column in range(inputs_BTD.shape[1]):
        here = slice(column, column + 1)
        starts_B1 = None if document_starts_BT is None else document_starts_BT[:, here]
        _, new_GBH = recurrence(inputs_BTD[:, here], state_GBH, starts_B1)
        state_GBH = torch.where(mask_BT[:, here], new_GBH, state_GBH)
        states.append(state_GBH)
    return torch.stack(states, dim=2), state_GBH


def run_padded(
    recurrence: Recurrence,
    inputs_BTD: Tensor,
    mask_BT: Tensor | None,
    state_GBH: Tensor | None,
    document_starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence whose state stays as it is at padded tokens.

    Args:
        recurrence: see ``Recurrence``; causal. It is given inputs of at least float32.
        mask_BT: bool (or 0 and 1), True at attended tokens, in any pattern; None when all are.
        state_GBH: the state before the first token; None for zeros.
        document_starts_BT: bool, handed to the recurrence with its tokens; without effect at a padded token.
    Returns: the state at every column [G, B, T, H] in the dtype of ``inputs_BTD`` (at a padded column that of the last
        attended token before it, or the initial one), and the state after the last attended token [G, B, H], unrounded.
    Raises: ShapeError when the mask does not fit the inputs.
    Reference twin: ``reference_run_padded``.
    """
    if mask_BT is None:
        return recurrence(inputs_BTD, state_GBH, document_starts_BT)
    if mask_BT.shape != inputs_BTD.shape[:2]:
        raise ShapeError(f"run_padded: mask_BT is {list(mask_BT.shape)}; expected {list(inputs_BTD.shape[:2])}")
    mask_BT = mask_BT.bool()
    inputs = inputs_BTD.to(torch.promote_types(inputs_BTD.dtype, torch.float32))
    if inputs.shape[1] == 1:
        _, new_GBH = recurrence(inputs, state_GBH, document_starts_BT)
        final_GBH = torch.where(mask_BT, new_GBH, torch.zeros_like(new_GBH) if state_GBH is None else state_GBH)
        return final_GBH.unsqueeze(2).to(inputs_BTD.dtype), final_GBH
    starts_BT = None if document_starts_BT is None else pack_left(document_starts_BT, mask_BT)
    packed_GBTH, _ = recurrence(pack_left(inputs, mask_BT), state_GBH, starts_BT)
    if state_GBH is None:
        state_GBH = torch.zeros_like(packed_GBTH[:, :, 0])
    initial_BGH = state_GBH.to(packed_GBTH.dtype).transpose(0, 1)
    states_BTGH = unpack(packed_GBTH.permute(1, 2, 0, 3), mask_BT, initial_BGH)
    states_GBTH = states_BTGH.permute(2, 0, 1, 3)
    return states_GBTH.to(inputs_BTD.dtype), states_GBTH[:, :, -1]


def rows_of_length(lengths: Sequence[int], cost: int) -> list[list[int]]:
    """Put rows of about the same length together, so that padded tokens and passes cost the least in all.

    Args: cost: of a pass of its own, in padded tokens.
    Returns: the indices of all rows, in groups from short to long, ascending in each.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    # best[k]: what the k shortest rows cost, and where the last of their groups begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for end, row in enumerate(order, 1):
        best.append(min((best[begin][0] + (end - begin) * lengths[row] + cost, begin) for begin in range(end)))
    groups, end = [], len(order)
    while end:
        begin = best[end][1]
        groups.append(sorted(order[begin:end]))
        end = begin
    return groups[::-1]
