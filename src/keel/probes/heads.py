"""What each attention head listens to: how far its attention moves when a component of the logits is taken away (DSTG Eq. 4, Fig. 2).

For every query the attention P over the keys is held against the attention Q without the semantic, the absolute-position or the
relative-position logits, by KL(P | Q) in nats, averaged over queries and documents. One layer's maps of a few documents are in memory at
a time.

Shapes: N documents, B documents of a batch, T tokens, H heads, C components, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from torch import Tensor

from keel.encoder import DstgModel
from keel.encoder.block import DstgBlock
from keel.errors import KeelError
from keel.probes.recording import check_ids, quiet

# Numbers in the maps of one component that are held at a time: 8 documents of 128 tokens and 8 heads.
_MOST_MAP = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HeadInfluence:
    """How much each component of the logits matters to each head.

    Attributes:
        components: their names, of "semantic", "ap", "rp".
        divergence: [L, H, C] nats >= 0, mean over queries and documents.
        documents: how many there were.
    """

    components: tuple[str, ...]
    divergence: NDArray[np.float64]
    documents: int

    @property
    def shares(self) -> NDArray[np.float64]:
        """Divergences of a head as shares of their sum, [L, H, C]; a head that nothing moves has equal shares."""
        total = self.divergence.sum(axis=-1, keepdims=True)
        even = 1 / len(self.components)
        return np.where(total > 0, self.divergence / np.where(total > 0, total, 1.0), even)

    def groups(self) -> NDArray[np.int64]:
        """Return for each head the component that its group is about, an index into ``components``, [L, H].

        The heads are divided by k-means on their shares, one group a component at most, begun from the head in which that component has
        its largest share; a group is about the component with the largest share at its middle.
        """
        flat = self.shares.reshape(-1, len(self.components))
        starts = np.unique(flat[np.argmax(flat, axis=0)], axis=0)
        middles, of_head = kmeans2(flat, starts, minit="matrix", iter=100, missing="warn")
        found: NDArray[np.int64] = np.argmax(middles, axis=1)[of_head].reshape(self.shares.shape[:2])
        return found

    def counts(self) -> dict[str, int]:
        """Return how many heads belong to each component: ``heads.semantic``, ``heads.ap``, ``heads.rp``."""
        groups = self.groups()
        return {f"heads.{name}": int((groups == index).sum()) for index, name in enumerate(self.components)}

    def fractions(self) -> dict[str, float]:
        """Return ``counts`` as shares of all heads, so that models with other numbers of heads compare: ``heads.semantic_fraction``."""
        heads = self.divergence.shape[0] * self.divergence.shape[1]
        return {f"{name}_fraction": count / heads for name, count in self.counts().items()}


def head_influence(model: Any, ids_NT: Tensor) -> HeadInfluence:
    """Measure what the heads of an encoder listen to.

    Args:
        model: a ``DstgModel`` with ``position`` "dstg" or "rp", or one with a head.
        ids_NT: token ids of documents, as the encoder is to read them ([CLS] and [SEP] included), without padding.
    Raises: KeelError for an encoder whose attention has one component only, or for other ids.
    """
    check_ids(ids_NT)
    encoder: DstgModel = getattr(model, "encoder", model)
    if not encoder.config.has_relative_bias:
        raise KeelError(
            f"the attention of position={encoder.config.position!r} has one component only; give an encoder with 'dstg' or 'rp'"
        )
    names = ("semantic", "ap", "rp") if encoder.config.disentangled else ("semantic", "rp")
    layers, heads, tokens = encoder.config.num_hidden_layers, encoder.config.num_attention_heads, ids_NT.shape[1]
    total = np.zeros((layers, heads, len(names)))
    batch = max(1, _MOST_MAP // (heads * tokens * tokens))
    with quiet(encoder), torch.inference_mode():
        for start in range(0, len(ids_NT), batch):
            ids_BT = ids_NT[start : start + batch].to(encoder.device)
            for layer, parts in enumerate(parts_by_layer(encoder, ids_BT)):
                total[layer] += influence([parts[name] for name in names]).sum(dim=0).double().cpu().numpy()
    return HeadInfluence(components=names, divergence=total / len(ids_NT), documents=len(ids_NT))


def influence(parts: Sequence[Tensor]) -> Tensor:
    """Return KL(P | Q) for P the attention by the sum of all parts and Q that by all but one, mean over queries, [B, H, C].

    Args:
        parts: logits of C >= 2 components, [B or 1, H, T, T] each.
    Reference twin: ``reference_influence``.
    """
    whole = torch.stack(torch.broadcast_tensors(*parts)).sum(dim=0).double()
    log_whole = torch.log_softmax(whole, dim=-1)
    chance = log_whole.exp()
    found = [
        (chance * (log_whole - torch.log_softmax(whole - part, dim=-1))).sum(dim=-1).mean(dim=-1).clamp(min=0)
        for part in parts
    ]
    return torch.stack(found, dim=-1)


def reference_influence(parts: Sequence[Tensor]) -> Tensor:
    """Return what ``influence`` does, query by query and key by key: Eq. 4 as it stands."""
    shape = torch.broadcast_shapes(*(part.shape for part in parts))
    given = [part.double().expand(shape) for part in parts]
    batch, heads, tokens, _ = shape
    found = torch.zeros(batch, heads, len(parts), dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for query in range(tokens):
                rows = [part[b, h, query] for part in given]
                true = torch.softmax(torch.stack(rows).sum(dim=0), dim=0)
                for left_out in range(len(parts)):
                    others = [row for index, row in enumerate(rows) if index != left_out]
                    without = torch.softmax(torch.stack(others).sum(dim=0), dim=0)
                    for key in range(tokens):
                        found[b, h, left_out] += true[key] * torch.log(true[key] / without[key]) / tokens
    return found


def parts_by_layer(encoder: DstgModel, ids_BT: Tensor) -> Any:
    """Yield each layer's logits by component, made from what the layer reads."""
    places = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
    around = encoder.surroundings(ids_BT, None, places)
    semantic, place = encoder.embed(ids_BT, places)
    for layer in encoder.layers:
        assert isinstance(layer, DstgBlock)
        normed, normed_place = layer.attention_norm(semantic, place)
        yield layer.attention.logits(normed, normed_place, around)
        semantic, place = layer(semantic, place, around)
