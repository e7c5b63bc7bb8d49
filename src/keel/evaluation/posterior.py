"""What the average over sampled embeddings predicts (support tokens, section 9): ``keel.decoding.posterior_predictive``, teacher-forced.

    p(y_t+1 | y) ~ sum_k w_k p(y_t+1 | x_k),   x_k = x + sigma e_k,   log w_k = -R of the tokens up to t (Eq. 24)

Without a prior all samples weigh the same: an ensemble over noise, the control for what the prior's weights add.

Shapes: K samples, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from keel.data import Segment
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.last_word import Passage
from keel.evaluation.robustness import EmbeddedModel, perturb
from keel.evaluation.scoring import HEAD_TOKENS, evaluating
from keel.evaluation.selective import Predictions, as_word, summary
from keel.evaluation.support import prior_terms
from keel.streams import MarginPrior


def posterior_scores(
    model: EmbeddedModel,
    prior: MarginPrior | None,
    windows: Sequence[Segment],
    *,
    samples: int,
    noise: float,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[ItemMetric]:
    """Score next tokens over windows, each of which is one item.

    Args:
        prior: the model's margin prior; None weighs all samples alike.
        samples: K >= 1.
        noise: sigma in units of the root mean square of a window's embeddings, >= 0.
        progress: called with the number of finished windows.
    Returns: ``posterior.ppl``, ``posterior.ece``, ``posterior.aurc``, ``posterior.aurc@entropy`` and
        ``posterior.sample_share``, the largest weight of a sample at the last token: 1 / K where all weigh alike, 1 where one decides.
    Raises: KeelError for no windows, fewer than one sample or negative noise.
    """
    if not windows or samples < 1 or noise < 0:
        raise KeelError(
            f"posterior: {len(windows)} windows, samples={samples}, noise={noise}; expected windows, samples >= 1, noise >= 0"
        )
    items, nats, shares = [], [], []
    with evaluating(model):
        for index, window in enumerate(windows):
            drawn_KTD = _draw(model, window.ids[:-1].to(device), samples, noise, index)
            log_weight_KT = _log_weights(prior, drawn_KTD)
            predicted, nll_T = _average(model, drawn_KTD, log_weight_KT, window.ids[1:].to(device))
            items.append(predicted)
            nats.append(float(nll_T.sum()))
            shares.append(float(log_weight_KT[:, -1].exp().max()))
            if progress is not None:
                progress(index + 1)
    tokens = tuple(float(len(item.wrong_T)) for item in items)
    perplexity = ItemMetric(
        name="posterior.ppl", unit="perplexity per token", higher_is_better=False, exponential=True,
        numerators=tuple(nats), denominators=tokens,
    )  # fmt: skip
    share = ItemMetric(
        name="posterior.sample_share", unit="share", higher_is_better=None,
        numerators=tuple(shares), denominators=(1.0,) * len(shares),
    )  # fmt: skip
    return [perplexity, *summary(items, "posterior.").metrics, share]


def posterior_words(
    model: EmbeddedModel,
    prior: MarginPrior | None,
    passages: Sequence[Passage],
    family: str,
    *,
    samples: int,
    noise: float,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[ItemMetric]:
    """Measure how the average predicts the last word of passages, each of which is one item with one prediction.

    What counts as right and how sure a word is are as in ``keel.evaluation.selective.selective_words``; the rest is as for
    ``posterior_scores``.

    Args:
        family: what the metrics' names begin with.
    Returns: ``<family>.posterior.accuracy``, ``.ece``, ``.aurc`` and ``.aurc@entropy``.
    Raises: KeelError for no passages, fewer than one sample or negative noise.
    """
    if not passages or samples < 1 or noise < 0:
        raise KeelError(
            f"{family}: {len(passages)} passages, samples={samples}, noise={noise}; expected passages, samples >= 1, noise >= 0"
        )
    items = []
    with evaluating(model):
        for index, passage in enumerate(passages):
            drawn_KTD = _draw(model, torch.tensor(passage.ids[:-1], device=device), samples, noise, index)
            targets_T = torch.tensor(passage.ids[1:], device=device)
            tokens, _ = _average(model, drawn_KTD, _log_weights(prior, drawn_KTD), targets_T)
            items.append(as_word(tokens, passage.num_targets))
            if progress is not None:
                progress(index + 1)
    hits = [1.0 - float(item.wrong_T[0]) for item in items]
    accuracy = mean(f"{family}.posterior.accuracy", hits, unit="share", higher_is_better=True)
    return [accuracy, *summary(items, f"{family}.posterior.").metrics]


def _draw(model: EmbeddedModel, ids_T: Tensor, samples: int, noise: float, index: int) -> Tensor:
    """Return K perturbed embeddings of a text [K, T, D]; the text's number decides the noise, whatever else is measured."""
    clean_1TD = model.get_input_embeddings()(ids_T.unsqueeze(0))
    sigma = noise * float(clean_1TD.double().square().mean().sqrt())
    seeds = [index * samples + sample for sample in range(samples)]
    return perturb(clean_1TD.expand(samples, -1, -1), "noise", sigma, seeds)


def _log_weights(prior: MarginPrior | None, drawn_KTD: Tensor) -> Tensor:
    """Return the log-weight of each sample for the prediction behind each token [K, T]; they sum to one over samples."""
    if prior is None:
        return torch.zeros(drawn_KTD.shape[:2], dtype=torch.float64, device=drawn_KTD.device).log_softmax(0)
    penalties = [prior_terms(prior, row_TD[None]).penalty()[0] for row_TD in drawn_KTD]
    return (-torch.stack(penalties).double()).cumsum(1).log_softmax(0)


def _average(
    model: EmbeddedModel, drawn_KTD: Tensor, log_weight_KT: Tensor, targets_T: Tensor
) -> tuple[Predictions, Tensor]:
    """Return the predictions of the weighted mean distribution, and the nats of the true tokens under it [T]."""
    hidden_KTD = model.final_hidden(inputs_embeds=drawn_KTD).last_hidden_state  # type: ignore[call-arg]
    surest, entropies, hits, nats = [], [], [], []
    size = max(1, HEAD_TOKENS // len(drawn_KTD))
    for start in range(0, len(targets_T), size):
        part = slice(start, start + size)
        logits_KTV = model.logits_from_hidden(hidden_KTD[:, part]).double()
        mean_TV = torch.logsumexp(logits_KTV.log_softmax(-1) + log_weight_KT[:, part, None], 0)
        best = mean_TV.max(-1)
        surest.append(best.values.exp())
        entropies.append(torch.special.entr(mean_TV.exp()).sum(-1))
        hits.append((best.indices == targets_T[part]).double())
        nats.append(-mean_TV.gather(-1, targets_T[part, None])[:, 0])
    surest_T, entropy_T, hit_T = (torch.cat(parts).cpu().numpy() for parts in (surest, entropies, hits))
    surest_T = np.minimum(surest_T, 1.0)  # a rounding above one would have no bin
    return Predictions(surest_T, 1 - hit_T, {"max_probability": surest_T, "entropy": -entropy_T}), torch.cat(nats)
