"""What the pictures of an encoder show: attention by component, positions across the blocks, the shape of a position table.

Shapes: T tokens, L blocks, P rows of a position table, C components.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import dct
from torch import Tensor
from transformers import AutoModel

from keel.encoder import DstgModel
from keel.errors import KeelError
from keel.probes.heads import parts_by_layer
from keel.probes.positions import block_states, inner_rows, position_targets, principal_components
from keel.probes.recording import quiet

_SHOWN = 3
_BINS = 16

Array = NDArray[np.float64]


def component_maps(model: Any, ids_T: Tensor, heads: Sequence[tuple[int, int]]) -> list[dict[str, Array]]:
    """Return what each component of the logits alone would attend to, for some heads and one text (DSTG Fig. 3).

    Args:
        model: a ``DstgModel`` with ``position`` "dstg" or "rp", or one with a head.
        ids_T: the text as the encoder reads it, [CLS] and [SEP] included.
        heads: (block, head), from 0.
    Returns: for each head {component: [T, T]}, rows of queries that sum to 1; "all" is the attention itself.
    """
    encoder: DstgModel = getattr(model, "encoder", model)
    found: dict[tuple[int, int], dict[str, Array]] = {}
    with quiet(encoder), torch.inference_mode():
        for layer, parts in enumerate(parts_by_layer(encoder, ids_T[None].to(encoder.device))):
            for block, head in heads:
                if block == layer:
                    logits = {name: part[0, head].double() for name, part in parts.items()}
                    logits["all"] = torch.stack(torch.broadcast_tensors(*logits.values())).sum(dim=0)
                    size = logits["all"].shape
                    found[block, head] = {
                        name: torch.softmax(part.expand(size), dim=-1).cpu().numpy() for name, part in logits.items()
                    }
    return [found[block, head] for block, head in heads]


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """Where the absolute-position states of a text's tokens lie, block by block (DSTG Fig. 4).

    Attributes:
        points: [1 + L, T, 2], two principal components of each block's states; first the position table's own rows. The first component
            grows with the place in the text.
        shares: [1 + L], of the variance in these two.
        segments: [T], number of the sentence of each token.
    """

    points: Array
    shares: Array
    segments: NDArray[np.int64]


def position_trajectories(
    model: Any, ids_T: Tensor, boundaries: Collection[int], *, ends: tuple[int, int]
) -> Trajectories:
    """Follow the absolute-position stream of an encoder through its blocks for one text.

    Args:
        model: a ``DstgModel`` with ``position`` "dstg", or one with a head.
        ids_T: ids of the text without [CLS] and [SEP], which are ``ends`` and not shown.
        boundaries: from ``boundary_ids``.
    Raises: KeelError for an encoder without such a stream.
    """
    encoder: DstgModel = getattr(model, "encoder", model)
    if not encoder.config.disentangled or encoder.embed_positions is None:
        raise KeelError(
            f"position={encoder.config.position!r} has no stream of absolute positions; give one with 'dstg'"
        )
    first = encoder.embed_positions.weight[1 : 1 + len(ids_T)].detach()
    states = [state[0, :, encoder.config.semantic_size :] for state in block_states(encoder, ids_T[None], ends)]
    points, shares = zip(*(_plane(state.double().cpu().numpy()) for state in (first, *states)), strict=True)
    segments = position_targets(ids_T.cpu(), boundaries)[:, 1].astype(np.int64)
    return Trajectories(points=np.stack(points), shares=np.array(shares), segments=segments)


def _plane(states_TD: Array) -> tuple[Array, float]:
    """Return the states in their first two principal components, and the share of variance there."""
    left_TC, strength_C, _ = np.linalg.svd(states_TD - states_TD.mean(axis=0), full_matrices=False)
    points_T2 = left_TC[:, :2] * strength_C[:2]
    rises = points_T2.T @ (np.arange(len(points_T2)) - (len(points_T2) - 1) / 2)
    return points_T2 * np.where(rises < 0, -1.0, 1.0), float(
        (strength_C[:2] ** 2).sum() / max(1e-30, (strength_C**2).sum())
    )


@dataclass(frozen=True, kw_only=True)
class TableShape:
    """The shape of a learned position table (DSTG App. B.1, Figs. 6 and 9).

    Attributes:
        cumulative: [C], share of the variance of the rows in the first 1, 2, … principal components.
        components: [3, P - 2], the first of them along the positions but the first and the last, of unit length.
        power: [3, 16], share of their power in the first bins of the DCT-II.
    """

    cumulative: Array
    components: Array
    power: Array


def table_shape(table_PD: Tensor) -> TableShape:
    """Describe a position table; the numbers of ``table_metrics`` are among these."""
    left_PC, power_C = principal_components(inner_rows(table_PD))
    components = left_PC[:, :_SHOWN].T
    components = components * np.where(components[:, :1] < 0, -1.0, 1.0)
    power = dct(components, type=2, norm="ortho", axis=1) ** 2
    total = power_C.cumsum()
    return TableShape(cumulative=total / total[-1], components=components, power=power[:, :_BINS])


def position_table_of(checkpoint: str) -> Tensor:
    """Return the learned position table of an encoder on the Hub or in a folder: our own, or one of the BERT family.

    Rows that are kept for padding (RoBERTa) are left out.  Raises: KeelError where there is none or it cannot be loaded.
    """
    try:
        model = AutoModel.from_pretrained(checkpoint, use_safetensors=True, trust_remote_code=False)
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise KeelError(
            f"encoder {checkpoint} cannot be loaded ({reason}); give a folder or a name on the Hub"
        ) from error
    table = getattr(model, "embed_positions", None) or getattr(
        getattr(model, "embeddings", None), "position_embeddings", None
    )
    if table is None:
        raise KeelError(f"encoder {checkpoint} ({type(model).__name__}) has no learned position table")
    kept = 0 if table.padding_idx is None else table.padding_idx + 1
    weight: Tensor = table.weight.detach()[kept:]
    return weight
