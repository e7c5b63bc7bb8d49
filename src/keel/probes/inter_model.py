"""What of one encoder's streams another encoder knows: its states read linearly from the other's (DSTG App. B.2, Fig. 8).

Shapes: N documents, T tokens, D channels of the encoder that is read, K channels of the one that is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from keel.encoder import DstgModel
from keel.errors import KeelError
from keel.probes.positions import Moments, block_states, divide_documents, numbered, products, ridge_r2

_BATCH = 4


def probe_between(
    model: Any,
    target: Any,
    documents_NT: Tensor,
    *,
    sources: Sequence[int] | None = None,
    ends: tuple[int, int] | None = None,
    seeds: int = 5,
) -> dict[str, tuple[float, ...]]:
    """Regress the streams of a disentangled encoder on the states of another one, block by block.

    Args:
        model: the encoder that is read, a ``DstgModel`` or one with a head.
        target: the one whose absolute-position and semantic channels are to be told; ``position`` "dstg", as many blocks.
        documents_NT: ids of text, [N, T], N >= 10, of the vocabulary of both.
        sources: as for ``probe_positions``.
        ends: ids of [CLS] and [SEP], which are put around every document and not probed.
        seeds: how often the documents are divided anew, as for ``probe_positions``.
    Returns: ``inter.ap_r2@layer<k>`` and ``inter.semantic_r2@layer<k>``: R² on test documents, mean over the channels told, a value a seed.
    Raises: KeelError for encoders that do not fit, or too few documents.
    """
    reader, told = (getattr(each, "encoder", each) for each in (model, target))
    _check(reader, told, documents_NT)
    width, channels = reader.config.hidden_size, told.config.hidden_size
    source_N = numbered(sources, len(documents_NT))
    parts_SN = [divide_documents(source_N, seed) for seed in range(seeds)]
    blocks = reader.config.num_hidden_layers
    moments = [[[Moments(width, channels) for _ in range(3)] for _ in range(seeds)] for _ in range(blocks)]
    for start in range(0, len(documents_NT), _BATCH):
        batch = documents_NT[start : start + _BATCH]
        pairs = zip(block_states(reader, batch, ends), block_states(told, batch, ends), strict=True)
        for layer, (given_BTD, wanted_BTK) in enumerate(pairs):
            rows = zip(given_BTD.double().cpu().numpy(), wanted_BTK.double().cpu().numpy(), strict=True)
            for row, (given_TD, wanted_TK) in enumerate(rows):
                sums = products(given_TD, wanted_TK)
                for seed in range(seeds):
                    moments[layer][seed][parts_SN[seed][start + row]].add(sums)
    streams = {"ap": slice(told.config.semantic_size, None), "semantic": slice(0, told.config.semantic_size)}
    found: dict[str, tuple[float, ...]] = {}
    for layer, by_seed in enumerate(moments):
        r2_SK = np.array([ridge_r2(fit, tune, test) for fit, tune, test in by_seed])
        for stream, chosen in streams.items():
            found[f"inter.{stream}_r2@layer{layer}"] = tuple(np.nanmean(r2_SK[:, chosen], axis=1).tolist())
    return found


def _check(reader: DstgModel, told: DstgModel, documents_NT: Tensor) -> None:
    if not told.config.disentangled:
        raise KeelError(f"the encoder to tell has position={told.config.position!r}, one stream; give one with 'dstg'")
    if reader.config.num_hidden_layers != told.config.num_hidden_layers:
        raise KeelError(
            f"{reader.config.num_hidden_layers} blocks cannot be held against {told.config.num_hidden_layers}; give as many"
        )
    if len(documents_NT) < 10:
        raise KeelError(f"{len(documents_NT)} documents are too few to fit, tune and test a probe; give at least 10")
