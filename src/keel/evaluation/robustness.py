"""How much a perturbation of the embeddings costs: support tokens, section 7.3, App. E.1, and the control that it leaves out.

    noise: x_t + sigma e_t, e_t normal in D dimensions        drift: x_t + sigma a_t u, u one random direction a window, a_t normal

A sigma is absolute (the paper) or in units of the embeddings' root mean square: an arm that merely enlarges its embeddings looks
robust to the first and not to the second. All arms get the same random numbers.

Shapes: B windows of a batch, T tokens, D width, N windows, K subsamples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from keel.data import Segment
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric
from keel.evaluation.results import Metric
from keel.evaluation.scoring import HEAD_TOKENS, LanguageModel, evaluating, score_tokens
from keel.evaluation.statistics import Array

BATCH_TOKENS = 4096  # tokens whose states exist at a time
SUBSAMPLES, SUBSAMPLE_WINDOWS = 100, 16  # section 7.3
_SUMMARISED = re.compile(
    r"ppl|contextual_embedding_error|(?:noise|drift)\.ratio(?:_snr)?@.+|support\.(?:top5_share|effective_size)(?:@.+)?"
)


class EmbeddedModel(LanguageModel, Protocol):
    """A language model that also reads embeddings and shows its table."""

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the module that embeds tokens."""


class Perturbation(NamedTuple):
    """One condition: its kind, sigma, and whether sigma counts in root mean squares of the embeddings."""

    kind: Literal["noise", "drift"]
    sigma: float
    relative: bool

    @property
    def metric(self) -> str:
        """``noise.ratio@0.5``, ``drift.ratio_snr@2``."""
        return f"{self.kind}.ratio{'_snr' if self.relative else ''}@{self.sigma:g}"


def perturb(embeddings_BTD: Tensor, kind: str, sigma: float, seeds: Sequence[int]) -> Tensor:
    """Return perturbed embeddings; row b draws its numbers from ``seeds[b]`` alone, whatever sigma and batch."""
    perturbed = []
    for row_TD, seed in zip(embeddings_BTD, seeds, strict=True):
        generator = torch.Generator().manual_seed(seed)
        length, width = row_TD.shape
        if kind == "noise":
            random_TD = torch.randn(length, width, generator=generator)
        else:
            direction_D = F.normalize(torch.randn(width, generator=generator), dim=0)
            random_TD = torch.randn(length, 1, generator=generator) * direction_D
        perturbed.append(row_TD + sigma * random_TD.to(row_TD))
    return torch.stack(perturbed)


def robustness(
    model: EmbeddedModel,
    windows: Sequence[Segment],
    conditions: Sequence[Perturbation],
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int], None] | None = None,
) -> list[ItemMetric]:
    """Score windows clean and under every condition.

    Args:
        windows: from ``keel.data.evaluation_segments``, all of one length; each is one item.
        progress: called with a condition's name and the number of conditions done.
    Returns: ``ppl`` of the clean text, ``embedding_rms``, ``contextual_embedding_error`` (section 7.5), and for each condition the
        ratio of perturbed to clean perplexity, named by ``Perturbation.metric``.
    Raises: KeelError for no windows.
    """
    if not windows:
        raise KeelError("robustness: no windows to score; give more text or shorter windows")
    ids_NT = torch.stack([window.ids for window in windows])
    with evaluating(model):
        scores = _Scores(model, ids_NT, torch.device(device))
        clean_N = scores.nats(None, 0.0)
        rms = scores.embedding_rms()
        metrics = [
            scores.metric("ppl", clean_N, "perplexity per token", exponential=True),
            _once("embedding_rms", rms, "root mean square", len(windows)),
            scores.contextual_embedding_error(),
        ]
        for index, condition in enumerate(conditions):
            if progress is not None:
                progress(condition.metric, index)
            perturbed_N = scores.nats(condition.kind, condition.sigma * (rms if condition.relative else 1.0))
            metrics.append(scores.metric(condition.metric, perturbed_N - clean_N, "ratio", exponential=True))
    return metrics


class _Scores:
    """Windows of one length and the model that reads them."""

    def __init__(self, model: EmbeddedModel, ids_NT: Tensor, device: torch.device) -> None:
        self.model, self.ids_NT, self.device = model, ids_NT, device
        self.batch = max(1, BATCH_TOKENS // ids_NT.shape[1])
        self.embed = model.get_input_embeddings()

    def batches(self) -> list[Tensor]:
        """Return numbers of windows that are read together."""
        return list(torch.arange(len(self.ids_NT)).split(self.batch))

    def hidden(self, rows: Tensor, kind: str | None, sigma: float) -> Tensor:
        """Return the final states [B, T - 1, D] of windows, perturbed or not."""
        embeddings_BTD = self.embed(self.ids_NT[rows, :-1].to(self.device))
        if kind is not None:
            embeddings_BTD = perturb(embeddings_BTD, kind, sigma, rows.tolist())
        hidden_BTD: Tensor = self.model.final_hidden(inputs_embeds=embeddings_BTD).last_hidden_state  # type: ignore[call-arg]
        return hidden_BTD

    def nats(self, kind: str | None, sigma: float) -> Array:
        """Return the sum of -log p over each window's tokens [N]."""
        sums = []
        for rows in self.batches():
            hidden_BTD, targets_BT = self.hidden(rows, kind, sigma), self.ids_NT[rows, 1:].to(self.device)
            nll_R = score_tokens(self.model, hidden_BTD.flatten(0, 1), targets_BT.flatten()).nll_R
            sums.append(nll_R.view(targets_BT.shape).sum(1))
        return torch.cat(sums).numpy()

    def metric(self, name: str, sums_N: Array, unit: str, *, exponential: bool) -> ItemMetric:
        """Return a metric per token."""
        tokens = float(self.ids_NT.shape[1] - 1)
        return ItemMetric(
            name=name, unit=unit, higher_is_better=False, exponential=exponential,
            numerators=tuple(map(float, sums_N)), denominators=(tokens,) * len(sums_N),
        )  # fmt: skip

    def embedding_rms(self) -> float:
        """Return the root mean square of the embeddings of the windows' tokens, a number of each dimension."""
        squares = [self.embed(self.ids_NT[rows].to(self.device)).double().square().mean() for rows in self.batches()]
        weights = torch.tensor([len(rows) for rows in self.batches()], dtype=torch.float64)
        return float(((torch.stack(squares).cpu() * weights).sum() / weights.sum()).sqrt())

    def contextual_embedding_error(self) -> ItemMetric:
        """Return ``sum |e_y - E_p e|^2 / sum |e_y|^2``: how much of a token's embedding the model's prediction leaves open."""
        weight = self.embed.weight
        assert isinstance(weight, Tensor)
        ids_V = torch.arange(weight.shape[0], device=self.device)
        table_VD = self.embed(ids_V).float()
        errors, squares = [], []
        for rows in self.batches():
            hidden_RD = self.hidden(rows, None, 0.0).flatten(0, 1)
            true_RD = table_VD[self.ids_NT[rows, 1:].flatten().to(self.device)]
            parts = [
                torch.softmax(self.model.logits_from_hidden(part[None])[0].float(), -1) @ table_VD
                for part in hidden_RD.split(HEAD_TOKENS)
            ]
            shape = (len(rows), -1)
            errors.append((torch.cat(parts) - true_RD).square().sum(-1).view(shape).sum(1))
            squares.append(true_RD.square().sum(-1).view(shape).sum(1))
        return ItemMetric(
            name="contextual_embedding_error", unit="share of squared length", higher_is_better=False,
            numerators=tuple(torch.cat(errors).tolist()), denominators=tuple(torch.cat(squares).tolist()),
        )  # fmt: skip


def _once(name: str, value: float, unit: str, items: int) -> ItemMetric:
    """A description of the model, the same for every window."""
    return ItemMetric(
        name=name, unit=unit, higher_is_better=None, numerators=(value,) * items, denominators=(1.0,) * items
    )


class Subsampled(NamedTuple):
    """Median and 95 % interval over subsamples of windows, and all of their values."""

    median: float
    low: float
    high: float
    values_K: Array


def subsampled(
    metric: ItemMetric, *, subsamples: int = SUBSAMPLES, windows: int = SUBSAMPLE_WINDOWS, seed: int = 0
) -> Subsampled:
    """Summarise a metric as the paper does: over 100 random subsamples of 16 windows each (section 7.3).

    The same seed draws the same windows for every arm. The interval tells how subsamples scatter, not how well the ratio of the whole
    text is known: for that see the bootstrap of the results.
    """
    count = len(metric.numerators)
    rng = np.random.default_rng(seed)
    chosen_KW = np.stack([rng.choice(count, size=min(windows, count), replace=False) for _ in range(subsamples)])
    ratios_K = np.array(metric.numerators)[chosen_KW].sum(1) / np.array(metric.denominators)[chosen_KW].sum(1)
    values_K = np.exp(ratios_K) if metric.exponential else ratios_K
    low, median, high = np.quantile(values_K, [0.025, 0.5, 0.975])
    return Subsampled(float(median), float(low), float(high), values_K)


def subsample_medians(evaluations: Mapping[int, Mapping[str, ItemMetric]], seeds: Sequence[int]) -> dict[str, Metric]:
    """Return the paper's summary of what it summarises so, as ``<quantity>.median@<condition>``.

    A value is the median over a seed's subsamples, and the interval holds 95 % of the subsamples of all seeds: it says how they
    scatter, as in the paper's tables, and is no confidence interval of the mean.

    Args:
        evaluations: metrics by name, by seed; a metric that some seed lacks is left out.
        seeds: those of the results file, in order; one that was not measured has None.
    """
    found = {}
    for name in next(iter(evaluations.values()), {}):
        if _SUMMARISED.fullmatch(name) and all(name in metrics for metrics in evaluations.values()):
            parts = {seed: subsampled(metrics[name]) for seed, metrics in evaluations.items()}
            values = [parts[seed].median if seed in parts else None for seed in seeds]
            low, high = np.quantile(np.concatenate([part.values_K for part in parts.values()]), [0.025, 0.975])
            quantity, _, condition = name.partition("@")
            found[f"{quantity}.median{'@' if condition else ''}{condition}"] = Metric(
                values=values,
                mean=float(np.mean([value for value in values if value is not None])),
                ci95=(float(low), float(high)),
                unit=f"{next(iter(evaluations.values()))[name].unit}, median of subsamples",
                higher_is_better=None,
            )
    return found


def rescale_embeddings(model: Any, factor: float) -> None:
    """Multiply a model's embeddings by ``factor`` without changing what it computes, in place.

    Everything that is added to the residual stream is multiplied too, and normalisation takes the factor out again; a head that shares
    the embeddings has its final norm divided by it. So nothing is learnt, and whatever robustness to absolute noise is gained comes
    from the size of the embeddings alone: the control for an arm that trains larger ones.

    Args:
        model: ``KeelForCausalLM`` with a Llama-like host: residual written by ``o_proj`` and ``down_proj``, RMSNorm before every part.
    Raises: KeelError for another host.
    """
    host = model.host
    if host.config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        raise KeelError(
            f"rescale_embeddings: host {host.config.model_type!r}; expected a pre-norm host with RMSNorm: llama, mistral, qwen2 or qwen3"
        )
    with torch.no_grad():
        host.get_input_embeddings().weight.mul_(factor)
        for name, module in host.named_modules():
            if name.endswith(("o_proj", "down_proj")):
                for parameter in module.parameters():
                    parameter.mul_(factor)
            if name.endswith("layernorm") or name == "model.norm":
                module.variance_epsilon *= factor**2  # so that the norms stay exactly what they were
        if host.config.tie_word_embeddings:
            host.base_model.norm.weight.div_(factor)
