"""Decoding that knows of uncertainty, through ``generate``: an average over sampled embeddings, and abstaining (support tokens, section 9).

The latent-noise view has a posterior over the embeddings of a text. Its predictive distribution is an average over embeddings,

    p(y_next | y) ~ sum_k w_k p(y_next | x_k),   x_k = x + sigma e_k,   w_k ~ prior(x_k)

with noise around the token embeddings as the proposal and the margin prior as the weight. Each sample is a row of the batch and has
its own cache, so that a token is embedded, with its noise, once.

Shapes: B batch, K samples, N = B K rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import Cache

from keel.cache import new_cache, signals_of
from keel.errors import KeelError
from keel.model import KeelForCausalLM
from keel.streams import MarginPrior


class AverageOverSamples(LogitsProcessor):
    """Replaces the scores of K neighbouring rows by the logarithm of their weighted mean distribution.

    Every row of a group gets the same scores; with ``warpers`` (None: the likeliest) the token is drawn here from the warped mean,
    once a group, and the rows agree on it.
    """

    def __init__(
        self,
        samples: int,
        cache: Cache | None,
        prior: str | None,
        generator: torch.Generator | None,
        warpers: LogitsProcessorList | None,
    ) -> None:
        self.samples, self.cache, self.prior = samples, cache, prior
        self.generator, self.warpers = generator, warpers

    def log_weights(self, rows: int, like: Tensor) -> Tensor:
        """Return log w [B, K, 1]: minus the prior's R of the tokens so far, normalised within each group; equal without a prior."""
        if self.prior is None or self.cache is None:
            return torch.full((rows // self.samples, self.samples, 1), 1 / self.samples).log().to(like)
        signals = signals_of(self.cache)
        penalty_NS = signals[f"{self.prior}.barrier"].double()
        if f"{self.prior}.residual" in signals:
            penalty_NS = penalty_NS + signals[f"{self.prior}.residual"]
        return torch.log_softmax(-penalty_NS.sum(1).view(-1, self.samples, 1), 1).to(like)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the averaged scores [N, V]."""
        logs_BKV = torch.log_softmax(scores.float(), -1).unflatten(0, (-1, self.samples))
        mean_BV = torch.logsumexp(logs_BKV + self.log_weights(len(scores), logs_BKV), 1)
        if self.warpers is not None:
            warped_BV = self.warpers(input_ids[:: self.samples], mean_BV)
            chosen_B1 = torch.multinomial(torch.softmax(warped_BV, -1), 1, generator=self.generator)
            mean_BV = torch.full_like(mean_BV, float("-inf")).scatter(1, chosen_B1, 0.0)
        return mean_BV.repeat_interleave(self.samples, 0)


def posterior_predictive(
    model: KeelForCausalLM,
    input_ids: Tensor,
    *,
    samples: int,
    noise: float,
    seed: int = 0,
    do_sample: bool = False,
    **options: Any,
) -> Tensor:
    """Generate from the mean over sampled embeddings, weighted by the model's margin prior where it has one.

    Args:
        input_ids: prompt [B, T], on the model's device.
        samples: K, embeddings drawn for each row; time and memory are those of K rows.
        noise: sigma, the standard deviation around a token's embedding in each dimension, >= 0.
        seed: of the noise and, with ``do_sample``, of the tokens.
        options: of ``generate``; an ``attention_mask`` is [B, T]. ``temperature``, ``top_k``, ``top_p`` and ``min_p`` hold for the
            mean distribution, and where they are not given those of the model's generation config do. No beams, and token ids alone.
    Returns: token ids [B, T + new], as ``generate`` does. With one sample and no noise they are ``generate``'s.
    Raises: KeelError for fewer than one sample, a negative noise, beams, several sequences a prompt, or a dictionary asked for.
    """
    refused = {name: options[name] for name in ("num_beams", "num_return_sequences") if options.get(name, 1) != 1}
    refused |= {name: True for name in ("return_dict_in_generate",) if options.pop(name, False)}
    if samples < 1 or noise < 0 or refused:
        given = "".join(f", {name}={value}" for name, value in refused.items())
        raise KeelError(
            f"posterior_predictive: samples={samples}, noise={noise}{given}; give at least one sample, noise >= 0, and neither beams, "
            "nor several sequences a prompt, nor return_dict_in_generate"
        )
    generator = torch.Generator(device=input_ids.device).manual_seed(seed)
    found = model.wires.first(MarginPrior)
    prior = None if found is None else found[0]
    cache = new_cache(model.host.config)
    warpers = _warpers(model.generation_config, options) if do_sample else None
    average = AverageOverSamples(samples, cache, prior, generator, warpers)
    if options.get("attention_mask") is not None:
        options["attention_mask"] = options["attention_mask"].repeat_interleave(samples, 0)

    def disturb(module: torch.nn.Module, inputs: tuple[Any, ...], embeddings: Tensor) -> Tensor:
        drawn = torch.randn(embeddings.shape, generator=generator, device=embeddings.device)
        return embeddings + noise * drawn.to(embeddings.dtype)

    hook = model.get_input_embeddings().register_forward_hook(disturb)
    try:
        found = model.generate(
            input_ids.repeat_interleave(samples, 0),
            past_key_values=cache,
            collect_signals=prior is not None,
            do_sample=False,
            logits_processor=LogitsProcessorList([*options.pop("logits_processor", []), average]),
            return_dict_in_generate=False,
            **options,
        )
    finally:
        hook.remove()
    assert isinstance(found, Tensor)
    return found[::samples]


def _warpers(defaults: GenerationConfig, options: dict[str, Any]) -> LogitsProcessorList:
    """Take the settings of sampling out of ``options`` and return what ``generate`` would make of them, in its order."""
    names = ("temperature", "top_k", "top_p", "min_p")
    wanted = {name: options.pop(name) if name in options else getattr(defaults, name, None) for name in names}
    found = LogitsProcessorList()
    if wanted["temperature"] not in (None, 1.0):
        found.append(TemperatureLogitsWarper(wanted["temperature"]))
    if wanted["top_k"]:
        found.append(TopKLogitsWarper(wanted["top_k"]))
    if wanted["top_p"] is not None and wanted["top_p"] < 1:
        found.append(TopPLogitsWarper(wanted["top_p"]))
    if wanted["min_p"] is not None:
        found.append(MinPLogitsWarper(wanted["min_p"]))
    return found


class Abstain(LogitsProcessor):
    """Makes ``generate`` choose ``token_id`` (an end of text, or a token that stands for "I do not know") where the model is unsure.

    Args:
        token_id: what is chosen instead.
        max_entropy: abstain where the next-token distribution has more, in nats; None for never.
        min_margin: abstain where the determinant of the last token read (Eq. 9) is below; None for never. It needs ``cache``, the
            ``past_key_values`` that is given to ``generate`` too, with ``collect_signals=True`` and without beams.
        prior: name of the margin prior among the model's streams.
    Raises: KeelError for no threshold, or a margin without a cache.
    """

    def __init__(
        self,
        token_id: int,
        *,
        max_entropy: float | None = None,
        min_margin: float | None = None,
        cache: Cache | None = None,
        prior: str = "margin",
    ) -> None:
        if max_entropy is None and min_margin is None:
            raise KeelError("Abstain: no threshold; give max_entropy, min_margin or both")
        if min_margin is not None and cache is None:
            raise KeelError("Abstain: min_margin needs the cache that generate is given as past_key_values")
        self.token_id, self.max_entropy, self.min_margin = token_id, max_entropy, min_margin
        self.cache, self.prior = cache, prior

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores, those of unsure rows with all mass on the token."""
        unsure_B = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        if self.max_entropy is not None:
            unsure_B |= torch.special.entr(torch.softmax(scores.float(), -1)).sum(-1) > self.max_entropy
        if self.min_margin is not None and self.cache is not None:
            unsure_B |= signals_of(self.cache)[f"{self.prior}.margin"][:, -1] < self.min_margin
        alone = torch.full_like(scores, float("-inf"))
        alone[:, self.token_id] = 0.0
        return torch.where(unsure_B.unsqueeze(1), alone, scores)
