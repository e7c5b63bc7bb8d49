"""Do the signals of a dynamic state path tell disrupted tokens from clean ones? (DTA §9B.5: "numerically interpretable")

The area under the ROC curve: the chance that a disrupted token scores above a clean one, ties counting half. Scores are N and 1 - I,
and two that need no path: the surprisal of the token that is read, and the norm of the residual stream behind it (§4.3).

It is given window by window: over its disrupted tokens, the share of all clean tokens below each. So it can be resampled over
windows; the interval is that of the disrupted tokens, the clean ones being held fixed.

Shapes: B windows of a batch, T tokens, D hidden size, W windows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from keel.data.disruptions import KINDS, with_hidden_noise
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric
from keel.evaluation.scoring import evaluating
from keel.evaluation.statistics import Array
from keel.hosts import rewritten_layer_input, site_modules
from keel.model import KeelForCausalLM
from keel.streams import DynamicStateStream

BATCH_TOKENS = 4096
SCORES = {
    "noise": "signal.auroc_noise",
    "incoherence": "signal.auroc_coherence",
    "surprisal": "baseline.auroc_surprisal",
    "residual": "baseline.auroc_residual",
}


def auroc_terms(score: Sequence[Array], positive: Sequence[Any], negative: Sequence[Any]) -> tuple[Array, Array]:
    """Return what each window adds to numerator and denominator of the AUROC, [W] each; the value is the ratio of their sums.

    Args:
        score: of the tokens of each window; larger for a token that shall be found.
        positive, negative: bool like ``score``: the tokens to find, and those to tell them from; others count nothing.
    Raises: KeelError where all windows together lack one of the two.
    """
    ends = np.cumsum([len(row) for row in score])[:-1]
    values, found, calm = np.concatenate(score), np.concatenate(positive), np.concatenate(negative)
    if not found.any() or not calm.any():
        raise KeelError(
            f"AUROC: {int(found.sum())} disrupted and {int(calm.sum())} clean tokens; give text with both, more or longer windows"
        )
    used = found | calm
    below = np.zeros(len(values))
    # A rank among all less the rank among the disrupted is the number of clean tokens below, ties as halves.
    ranks = np.zeros(len(values))
    ranks[used] = rankdata(values[used])
    below[found] = (ranks[found] - rankdata(values[found])) / calm.sum()
    sums = [part.sum() for part in np.split(below, ends)], [part.sum() for part in np.split(found, ends)]
    return np.array(sums[0], dtype=np.float64), np.array(sums[1], dtype=np.float64)


def token_scores(model: KeelForCausalLM, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return every score of ``SCORES`` that the model has for the tokens of a batch of ``DisruptedWindows``, [B, T - 1] each.

    The first token of a window has no surprisal and is left out.
    """
    found = model.wires.first(DynamicStateStream)
    norms: list[Tensor] = []
    noisy = functools.partial(with_hidden_noise, batch["level"], batch["kind"], batch["noise_seed"])

    def keep_norm(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        norms.append(torch.linalg.vector_norm(args[0].float(), dim=-1))

    final_norm = site_modules(model.host, model.family, "final_norm_input", -1)[0].module
    handle = final_norm.register_forward_pre_hook(keep_norm)
    try:
        with rewritten_layer_input(model.host, model.family, model.host.config.num_hidden_layers // 2, noisy):
            output = model(input_ids=batch["input_ids"], use_cache=False, collect_signals=True)
    finally:
        handle.remove()
    log_probabilities = output.logits[:, :-1].float().log_softmax(-1)
    surprisal_BT = -log_probabilities.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    scores = {"surprisal": surprisal_BT, "residual": norms[0][:, 1:]}
    if found is not None:
        signals = output.signals or {}
        scores["noise"] = signals[f"{found[0]}.noise"][:, 1:]
        scores["incoherence"] = 1 - signals[f"{found[0]}.coherence"][:, 1:]
    return scores


def signal_quality(
    model: KeelForCausalLM,
    windows: Sequence[Mapping[str, Tensor]],
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[ItemMetric]:
    """Measure how well the scores tell disrupted tokens of all kinds from clean ones.

    Args:
        windows: of ``keel.data.disruptions.DisruptedWindows``, all of one length; each is one item.
        progress: called with the number of finished windows.
    Returns: one of ``SCORES`` each, over all kinds, and ``NAME@kind`` for the tokens of one kind against all clean ones.
    Raises: KeelError for windows without disrupted or without clean tokens.
    """
    scores: dict[str, list[Array]] = {}
    kinds: list[Array] = []
    rows = max(1, BATCH_TOKENS // len(windows[0]["input_ids"])) if windows else 1
    with evaluating(model):
        for start in range(0, len(windows), rows):
            chosen = windows[start : start + rows]
            batch = {name: torch.stack([window[name] for window in chosen]).to(device) for name in chosen[0]}
            for name, each in token_scores(model, batch).items():
                scores.setdefault(name, []).extend(each.double().cpu().numpy())
            kinds.extend(batch["kind"][:, 1:].cpu().numpy())
            if progress is not None:
                progress(start + len(chosen))
    if not windows:
        raise KeelError("signals: no windows to score; give more text or shorter windows")
    present = sorted({int(kind) for row in kinds for kind in row if kind})
    metrics = []
    for score, name in SCORES.items():
        if score in scores:
            metrics.append(_metric(name, scores[score], [row > 0 for row in kinds], kinds))
            metrics += [
                _metric(f"{name}@{KINDS[kind]}", scores[score], [row == kind for row in kinds], kinds)
                for kind in present
            ]
    return metrics


def _metric(name: str, score: list[Array], positive: list[Any], kinds: list[Array]) -> ItemMetric:
    tops, bottoms = auroc_terms(score, positive, [row == 0 for row in kinds])
    # A baseline is no merit of the arm that it is measured on.
    higher = True if name.startswith("signal.") else None
    return ItemMetric(
        name=name, unit="AUROC", higher_is_better=higher, numerators=tuple(tops), denominators=tuple(bottoms)
    )
