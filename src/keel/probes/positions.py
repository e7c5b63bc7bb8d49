"""Where positions are kept: linear probes of the hidden states by layer, and the shape of a learned position table (DSTG §4, §5).

A ridge regression reads from the state of one token where that token stands: its place in the document, the number of its segment,
and how far it is through its segment. The states are never kept: to be fitted, a probe needs the sums of their products alone, [1 + D + K]
squared, and those of a stream are a part of those of the whole state.

Shapes: N documents, T tokens, D channels of the state, K targets, P rows of a position table.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import dct
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keel.encoder import DstgModel
from keel.errors import KeelError, ShapeError
from keel.probes.recording import quiet

TARGETS = ("token", "segment", "progress")
ALPHAS = tuple(10.0**power for power in range(-2, 7))
_BATCH = 4
_RANDOM_TABLES = 20

Array = NDArray[np.float64]


def boundary_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a segment: terminal punctuation, a new line, the end of a text (§5.2)."""
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}
    for index in range(len(tokenizer)):
        text = tokenizer.decode([index])
        if "\n" in text or text.rstrip().endswith((".", "!", "?")):
            ends.add(index)
    return frozenset(ends)


def position_targets(ids_T: Tensor, boundaries: Collection[int]) -> Array:
    """Return what the probes are to read for every token, [T, 3] float64, in the order of ``TARGETS`` (§5.1 to 5.3).

    Token: place / (T - 1), 0 to 1. Segment: number of boundaries before it, from 0; a boundary belongs to the segment that it ends.
    Progress: (place - start) / (end - start) within the segment, 0 to 1, where a cut-off segment ends with the document; the token of
    a segment of one token is its end, 1.
    """
    length = len(ids_T)
    ends_T = np.isin(ids_T.numpy(), list(boundaries))
    segment_T: NDArray[np.int64] = np.cumsum(ends_T) - ends_T
    place_T = np.arange(length)
    start_T = np.searchsorted(segment_T, segment_T, side="left")
    last_T = np.searchsorted(segment_T, segment_T, side="right") - 1
    span_T = last_T - start_T
    progress_T = np.where(span_T > 0, (place_T - start_T) / np.maximum(span_T, 1), 1.0)
    return np.stack([place_T / max(1, length - 1), segment_T.astype(np.float64), progress_T], axis=1)


class Moments:
    """Sums of products of constant, states and targets over tokens; all that a ridge regression and its R² need."""

    def __init__(self, width: int, num_targets: int) -> None:
        self.width = width
        self.sums = np.zeros((1 + width + num_targets,) * 2)

    def add(self, sums: Array) -> None:
        """Add what ``products`` returned for some tokens."""
        self.sums += sums

    def __add__(self, other: Moments) -> Moments:
        both = Moments(self.width, len(self.sums) - 1 - self.width)
        both.sums = self.sums + other.sums
        return both

    def centred(self, channels: slice) -> tuple[Array, Array, Array, Array]:
        """Return means of the channels, their covariance sums, covariance sums with the targets, and means of the targets."""
        count, x, y = self.sums[0, 0], slice(1, 1 + self.width), slice(1 + self.width, None)
        mean_D, mean_K = self.sums[0, x][channels] / count, self.sums[0, y] / count
        inner = self.sums[x, x][channels, channels] - count * np.outer(mean_D, mean_D)
        across = self.sums[x, y][channels] - count * np.outer(mean_D, mean_K)
        return mean_D, inner, across, mean_K


def products(states_TD: Array, targets_TK: Array) -> Array:
    """Return the sums of products over some tokens, [1 + D + K] squared."""
    whole = np.concatenate((np.ones((len(states_TD), 1)), states_TD, targets_TK), axis=1)
    return whole.T @ whole


def ridge_r2(fit: Moments, tune: Moments, test: Moments, channels: slice = slice(None)) -> Array:
    """Return R² on ``test`` of ``ridge`` for each target, [K], at most 1; NaN where a target does not vary.

    Reference twin: ``reference_ridge_r2``.
    """
    return _r2(ridge(fit, tune, channels), test, channels)


def ridge(fit: Moments, tune: Moments, channels: slice = slice(None)) -> tuple[Array, Array]:
    """Return weights [D, K] and intercepts [K] of a ridge regression for each target.

    Channels are divided by their standard deviation over ``fit``. The penalty is the one of ``ALPHAS`` with the best R² on ``tune``, for
    each target; then the regression is made anew on both.
    """
    scores_AK = np.array([_r2(_solve(fit, channels, alpha), tune, channels) for alpha in ALPHAS])
    best_K = np.argmax(np.nan_to_num(scores_AK, nan=-math.inf), axis=0).tolist()
    both = fit + tune
    solved = {alpha: _solve(both, channels, ALPHAS[alpha]) for alpha in set(best_K)}
    weight_DK = np.stack([solved[alpha][0][:, target] for target, alpha in enumerate(best_K)], axis=1)
    return weight_DK, np.array([solved[alpha][1][target] for target, alpha in enumerate(best_K)])


def _solve(moments: Moments, channels: slice, alpha: float) -> tuple[Array, Array]:
    """Return weights [D, K] and intercepts [K]."""
    mean_D, inner, across, mean_K = moments.centred(channels)
    scale_D = np.sqrt(np.maximum(np.diag(inner), 0) / moments.sums[0, 0])
    scale_D[scale_D <= 1e-9 * max(1.0, float(scale_D.max(initial=0)))] = 1.0  # a channel that does not vary
    scaled = inner / np.outer(scale_D, scale_D) + alpha * np.eye(len(scale_D))
    weight_DK = np.linalg.solve(scaled, across / scale_D[:, None]) / scale_D[:, None]
    return weight_DK, mean_K - mean_D @ weight_DK


def _r2(solved: tuple[Array, Array], moments: Moments, channels: slice) -> Array:
    weight_DK, intercept_K = solved
    num_targets = weight_DK.shape[1]
    # The residual is a linear map of (1, x, y), and its square a quadratic form of their products.
    residual = np.zeros((len(moments.sums), num_targets))
    residual[0] = -intercept_K
    residual[1 : 1 + moments.width][channels] = -weight_DK
    residual[1 + moments.width :] = np.eye(num_targets)
    left_K = np.einsum("ik,ij,jk->k", residual, moments.sums, residual, optimize=True)
    y, count = slice(1 + moments.width, None), moments.sums[0, 0]
    total_K = np.diag(moments.sums[y, y]) - moments.sums[0, y] ** 2 / count
    varies_K = total_K > 1e-9 * np.maximum(1.0, np.diag(moments.sums[y, y]))
    found: Array = np.where(varies_K, 1 - left_K / np.where(varies_K, total_K, 1.0), np.nan)
    return found


def reference_ridge_r2(fit: tuple[Array, Array], tune: tuple[Array, Array], test: tuple[Array, Array]) -> Array:
    """Return what ``ridge_r2`` does, from states [tokens, D] and targets [tokens, K] themselves, by least squares on stacked rows."""

    def solve(states: Array, targets: Array, alpha: float) -> tuple[Array, Array]:
        mean, scale = states.mean(axis=0), states.std(axis=0)
        rows = np.concatenate(((states - mean) / scale, math.sqrt(alpha) * np.eye(states.shape[1])))
        wanted = np.concatenate((targets - targets.mean(axis=0), np.zeros((states.shape[1], targets.shape[1]))))
        weight = np.linalg.lstsq(rows, wanted)[0] / scale[:, None]
        return weight, targets.mean(axis=0) - mean @ weight

    def r2(weight: Array, intercept: Array, states: Array, targets: Array) -> Array:
        left = ((targets - states @ weight - intercept) ** 2).sum(axis=0)
        found: Array = 1 - left / ((targets - targets.mean(axis=0)) ** 2).sum(axis=0)
        return found

    both = (np.concatenate((fit[0], tune[0])), np.concatenate((fit[1], tune[1])))
    scores = np.array([r2(*solve(*fit, alpha), *tune) for alpha in ALPHAS])
    found = [r2(*solve(*both, ALPHAS[best]), *test)[target] for target, best in enumerate(np.argmax(scores, axis=0))]
    return np.array(found)


@dataclass(frozen=True, kw_only=True)
class PositionProbe:
    """R² of every probe, source by source, so that the sources can be drawn anew for an interval.

    Attributes:
        r2: (target, layer, stream) -> what the probe explains of the squares of each source's documents and what there is to explain,
            [sources] each. Over all their ratio is the mean over the divisions of R² on the documents to test. Both are 0 for a source that
            is never tested on. Stream "" is the whole state, "ap" and "sem" its parts.
        blocks: of the encoder.
        documents: how many were used to fit, to choose the penalty, and to test.
    """

    r2: Mapping[tuple[str, int, str], tuple[Array, Array]]
    blocks: int
    documents: tuple[int, int, int]

    def metrics(self) -> dict[str, tuple[Array, Array]]:
        """Return the values by metric name: ``probe.token_r2@layer3``, ``probe.token_r2.ap@layer3``.

        ``probe.token_r2`` without a layer is of the last block but one. Where the head reads the semantic stream alone, that is the
        last whose position stream anything is trained on (Tables 2 to 4 end there). ``probe.token_r2@last`` is
        of the last block. Both names stay the same whatever the number of blocks.
        """
        found: dict[str, tuple[Array, Array]] = {}
        for (target, layer, stream), values in self.r2.items():
            name = f"probe.{target}_r2{'.' + stream if stream else ''}"
            if layer == max(0, self.blocks - 2):
                found[name] = values
            if layer == self.blocks - 1:
                found[f"{name}@last"] = values
            found[f"{name}@layer{layer}"] = values
        return found


def probe_positions(
    model: Any,
    documents_NT: Tensor,
    boundaries: Collection[int],
    *,
    sources: Sequence[int] | None = None,
    ends: tuple[int, int] | None = None,
    seeds: int = 5,
) -> PositionProbe:
    """Probe an encoder's state after every block for the positions of tokens (§5, Tables 2 to 4).

    The documents are read twice: to fit the probes, and to hold them against each document.

    Args:
        model: a ``DstgModel`` or one with a head.
        documents_NT: ids of text, [N, T], N >= 10.
        boundaries: from ``boundary_ids``.
        sources: number of the text that each document is of, [N]; those of one are never divided. None for one each.
        ends: ids of [CLS] and [SEP], which are put around every document and not probed.
        seeds: how often the documents are divided anew: 64 % to fit, 16 % to choose the penalty, 20 % to test.
    Raises: KeelError for fewer than 10 documents, or of too few texts; ShapeError.
    """
    if documents_NT.dim() != 2:
        raise ShapeError(f"documents_NT: expected [documents, tokens], got {list(documents_NT.shape)}")
    if len(documents_NT) < 10:
        raise KeelError(f"{len(documents_NT)} documents are too few to fit, tune and test a probe; give at least 10")
    encoder: DstgModel = getattr(model, "encoder", model)
    config = encoder.config
    source_N = numbered(sources, len(documents_NT))
    parts_SN = [divide_documents(source_N, seed) for seed in range(seeds)]
    targets_NTK = np.stack([position_targets(ids_T.cpu(), boundaries) for ids_T in documents_NT])
    moments = [
        [[Moments(config.hidden_size, len(TARGETS)) for _ in range(2)] for _ in range(seeds)]
        for _ in range(config.num_hidden_layers)
    ]
    for row, states in _document_states(encoder, documents_NT, ends):
        for layer, states_TD in enumerate(states):
            sums = products(states_TD, targets_NTK[row])
            for seed, parts_N in enumerate(parts_SN):
                if parts_N[row] < 2:
                    moments[layer][seed][parts_N[row]].add(sums)
    streams = {"": slice(None)}
    if config.disentangled:
        streams |= {"sem": slice(0, config.semantic_size), "ap": slice(config.semantic_size, None)}
    read = {
        (layer, stream): [ridge(fit, tune, channels) for fit, tune in by_seed]
        for layer, by_seed in enumerate(moments)
        for stream, channels in streams.items()
    }
    spreads_SNK = [_spread(targets_NTK, parts_N == 2) for parts_N in parts_SN]
    missed = {key: np.zeros((seeds, len(documents_NT), len(TARGETS))) for key in read}
    for row, states in _document_states(encoder, documents_NT, ends):
        for (layer, stream), solved in read.items():
            given_TD = states[layer][:, streams[stream]]
            for seed, (weight_DK, intercept_K) in enumerate(solved):
                if parts_SN[seed][row] == 2:
                    missed_TK = targets_NTK[row] - given_TD @ weight_DK - intercept_K
                    missed[layer, stream][seed, row] = (missed_TK**2).sum(axis=0)
    r2 = {}
    for (layer, stream), missed_SNK in missed.items():
        both = _over_divisions(np.stack(spreads_SNK), missed_SNK)
        for index, target in enumerate(TARGETS):
            explained, spread = (_by_source(each_NK[:, index], source_N) for each_NK in both)
            r2[target, layer, stream] = (explained, spread)
    counts = np.bincount(parts_SN[0], minlength=3)
    documents = (int(counts[0]), int(counts[1]), int(counts[2]))
    return PositionProbe(r2=r2, blocks=config.num_hidden_layers, documents=documents)


def _document_states(
    encoder: DstgModel, documents_NT: Tensor, ends: tuple[int, int] | None
) -> Iterator[tuple[int, list[Array]]]:
    """Yield every document's number and its states after each block, [T, D] each."""
    for start in range(0, len(documents_NT), _BATCH):
        batch = [
            state.double().cpu().numpy() for state in block_states(encoder, documents_NT[start : start + _BATCH], ends)
        ]
        for row in range(len(batch[0])):
            yield start + row, [states_BTD[row] for states_BTD in batch]


def _spread(targets_NTK: Array, tested_N: NDArray[np.bool_]) -> Array:
    """Return each tested document's squares around the mean of all that are, [N, K]; 0 for the others and for a constant target."""
    mean_K = targets_NTK[tested_N].mean(axis=(0, 1))
    spread_NK: Array = ((targets_NTK - mean_K) ** 2).sum(axis=1) * tested_N[:, None]
    varies_K = spread_NK.sum(axis=0) > 1e-9 * np.maximum(1.0, (targets_NTK[tested_N] ** 2).sum(axis=(0, 1)))
    return spread_NK * varies_K


def _over_divisions(spread_SNK: Array, missed_SNK: Array) -> tuple[Array, Array]:
    """Return what is explained and what there is to explain, [N, K] each, with the same weight for every division."""
    total_S1K = spread_SNK.sum(axis=1, keepdims=True)
    weight_S1K = np.where(total_S1K > 0, 1 / np.where(total_S1K > 0, total_S1K, 1.0), 0.0)
    return ((spread_SNK - missed_SNK) * weight_S1K).sum(axis=0), (spread_SNK * weight_S1K).sum(axis=0)


def _by_source(values_N: Array, source_N: NDArray[np.int64]) -> Array:
    """Return the sums over the documents of each source."""
    return np.bincount(source_N, weights=values_N).astype(np.float64)


def numbered(sources: Sequence[int] | None, count: int) -> NDArray[np.int64]:
    """Return the sources of ``count`` documents as numbers from 0 without gaps; None for one each."""
    found: NDArray[np.int64] = np.arange(count) if sources is None else np.unique(sources, return_inverse=True)[1]
    return found


def divide_documents(source_N: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return for each document whether it is fitted (0), tuned on (1) or tested on (2): all of a source alike.

    Args: source_N: numbers from 0 without gaps.
    Raises: KeelError where the documents are of so few sources that nothing is left for one of the three.
    """
    test, tune = max(1, round(0.2 * len(source_N))), max(1, round(0.16 * len(source_N)))
    sizes = np.bincount(source_N)
    order = np.random.default_rng(seed).permutation(len(sizes))
    begins = np.cumsum(sizes[order]) - sizes[order]  # documents of the sources before
    part_of = np.empty(len(sizes), dtype=np.int64)
    part_of[order] = np.where(begins < test, 2, np.where(begins < test + tune, 1, 0))
    if len(np.unique(part_of)) < 3:
        raise KeelError(
            f"{len(source_N)} documents of {len(sizes)} texts cannot be divided to fit, tune and test a probe; give more texts"
        )
    found: NDArray[np.int64] = part_of[source_N]
    return found


def block_states(encoder: DstgModel, ids_BT: Tensor, ends: tuple[int, int] | None) -> Sequence[Tensor]:
    """Return the state after every block, without the ends of the documents."""
    ids = ids_BT.to(encoder.device)
    if ends is not None:
        first, last = (torch.full_like(ids[:, :1], end) for end in ends)
        ids = torch.cat((first, ids, last), dim=1)
    with quiet(encoder), torch.inference_mode():
        states: tuple[Tensor, ...] = encoder(ids, output_hidden_states=True).hidden_states
    return [state[:, 1:-1] if ends is not None else state for state in states[1:]]


def table_metrics(table_PD: Tensor) -> dict[str, float]:
    """Describe a learned position table (§4 (1), App. B.1).

    The first and the last row are left out: they only ever belong to [CLS] and [SEP].

    Returns: ``ap.variance_2pc``, the share of the rows' variance in two principal components; ``ap.variance_2pc_random``, what tables of
    this size with normal numbers have (the less, the more channels: tables of different widths compare by what is above it alone);
    ``ap.variance_2pc_excess`` = (share - random) / (1 - random); ``ap.dct_low4_pc1`` and ``_pc2``, the share of a component's power over
    positions in the first four bins of its DCT-II (bin 0 is empty: components have mean zero). All at most 1; NaN for a table whose rows
    are equal.
    Raises: ShapeError for less than seven rows or two columns.
    """
    if table_PD.dim() != 2 or table_PD.shape[0] < 7 or table_PD.shape[1] < 2:
        raise ShapeError(f"table_PD: expected at least 7 positions and 2 channels, got {list(table_PD.shape)}")
    table = inner_rows(table_PD)
    left_PC, power_C = principal_components(table)
    total = float(power_C.sum())
    names = [
        f"ap.{name}"
        for name in ("variance_2pc", "variance_2pc_random", "variance_2pc_excess", "dct_low4_pc1", "dct_low4_pc2")
    ]
    if total <= 1e-20 * max(1.0, float((table**2).sum())):
        return dict.fromkeys(names, math.nan)
    share, chance = float(power_C[:2].sum()) / total, _random_share(*table.shape)
    low = []
    for index in range(2):
        bins_P = dct(left_PC[:, index], type=2, norm="ortho") ** 2
        low.append(float(bins_P[:4].sum() / bins_P.sum()))
    return dict(zip(names, (share, chance, (share - chance) / (1 - chance), *low), strict=True))


def inner_rows(table_PD: Tensor) -> Array:
    """Return a table without its first and last row."""
    rows: Array = table_PD.detach().double().cpu().numpy()[1:-1]
    return rows


def principal_components(table_PC: Array) -> tuple[Array, Array]:
    """Return the courses of the components over the rows, as columns of length 1, and the squares of their strengths."""
    left_PC, strength_C, _ = np.linalg.svd(table_PC - table_PC.mean(axis=0), full_matrices=False)
    return left_PC, strength_C**2


def _random_share(rows: int, channels: int) -> float:
    """Return the share of the variance that two components have in tables of normal numbers."""
    generator = np.random.default_rng(0)
    powers = [principal_components(generator.normal(size=(rows, channels)))[1] for _ in range(_RANDOM_TABLES)]
    return float(np.mean([power_C[:2].sum() / power_C.sum() for power_C in powers]))
