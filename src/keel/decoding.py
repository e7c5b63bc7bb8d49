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
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache

from keel.cache import new_cache, signals_of
from keel.errors import KeelError
from keel.model import KeelForCausalLM
from keel.streams import MarginPrior


class AverageOverSamples(LogitsProcessor):
    """Replaces the scores of K neighbouring rows by the logarithm of their weighted mean distribution.

    Every row of a group gets the same scores; with ``do_sample`` the token is drawn here, once a group, and the rows agree on it.
    """

    def __init__(
        self, samples: int, cache: Cache | None, prior: str | None, generator: torch.Generator | None, do_sample: bool
    ) -> None:
        self.samples, self.cache, self.prior = samples, cache, prior
        self.generator, self.do_sample = generator, do_sample

    def log_weights(self, rows: int, like: Tensor) -> Tensor:
        """Return log w [B, K, 1]: ``sum_t log|det_t|`` under the prior, normalised within each group; equal without a prior."""
        if self.prior is None or self.cache is None:
            return torch.full((rows // self.samples, self.samples, 1), 1 / self.samples).log().to(like)
        barrier_NS = signals_of(self.cache)[f"{self.prior}.barrier"]
        return torch.log_softmax(-barrier_NS.double().sum(1).view(-1, self.samples, 1), 1).to(like)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the averaged scores [N, V]."""
        logs_BKV = torch.log_softmax(scores.float(), -1).unflatten(0, (-1, self.samples))
        mean_BV = torch.logsumexp(logs_BKV + self.log_weights(len(scores), logs_BKV), 1)
        if self.do_sample:
            chosen_B1 = torch.multinomial(mean_BV.exp(), 1, generator=self.generator)
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
        options: of ``generate``; an ``attention_mask`` is [B, T]. No beams.
    Returns: token ids [B, T + new], as ``generate`` does. With one sample and no noise they are ``generate``'s.
    Raises: KeelError for fewer than one sample, a negative noise, or beams.
    """
    if samples < 1 or noise < 0 or options.get("num_beams", 1) != 1:
        raise KeelError(
            f"posterior_predictive: samples={samples}, noise={noise}, num_beams={options.get('num_beams', 1)}; give at least one "
            "sample, noise >= 0 and no beams"
        )
    generator = torch.Generator(device=input_ids.device).manual_seed(seed)
    found = model.wires.first(MarginPrior)
    prior = None if found is None else found[0]
    cache = new_cache(model.host.config)
    average = AverageOverSamples(samples, cache, prior, generator, do_sample)
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
