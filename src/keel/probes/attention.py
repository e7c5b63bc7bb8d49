"""What a host attends to, seen while it runs as usual: rows of its attention matrices, a block of queries at a time.

The host's own attention function is called unchanged, so outputs stay bitwise the same. Beside it, from the queries and keys
that it was given (positions already applied), ``SeenAttention`` can compute any block of rows of the attention matrix. No
[T, T] tensor exists unless the observer asks for all rows at once.

Shapes: B batch, T tokens (queries and keys), H query heads, G key-value heads, R = H / G query heads a group, K head size, Q
queries of a block, S keys of a block.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from keel.errors import KeelError
from keel.positions import Positions, alibi_slopes, get_positions

_READABLE = ("sdpa", "eager")


@dataclass(frozen=True, kw_only=True)
class SeenAttention:
    """One layer's attention in one forward pass without a cache.

    Attributes:
        layer: index of the layer.
        query_BHTK, key_BGTK: after rotation or whatever else the host does to them.
        mask: None (causal), [B or 1, 1, T, T] bool (True: seen) or float (added), or [B, T] bool (False: padding) under the
            position schemes ``alibi`` and ``window``.
        scaling: of the scores.
        softcap: Gemma 2's cap on the scores, None for none.
        window: tokens that a query sees, itself included, where the mask does not say it; None for all.
        alibi: whether the scores fall with distance by ALiBi's slopes.
    """

    layer: int
    query_BHTK: Tensor
    key_BGTK: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None = None
    window: int | None = None
    alibi: bool = False

    @property
    def length(self) -> int:
        """T."""
        return self.query_BHTK.shape[2]

    @property
    def groups(self) -> int:
        """G."""
        return self.key_BGTK.shape[1]

    def sequence(self, index: int) -> SeenAttention:
        """Return the attention of one sequence of the batch."""
        own = slice(index, index + 1)
        mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[own]
        return dataclasses.replace(self, query_BHTK=self.query_BHTK[own], key_BGTK=self.key_BGTK[own], mask=mask)

    def rows(self, start: int, stop: int, group: int) -> Tensor:
        """Return the attention of queries ``start`` to ``stop`` of one group of heads to keys 0 to ``stop``.

        Returns: [B, R, Q, S] float32 with S = ``stop``; every row sums to 1 (later keys are never seen: all hosts are causal).
        """
        each = self.query_BHTK.shape[1] // self.groups
        heads = slice(group * each, (group + 1) * each)
        query_BRQK = self.query_BHTK[:, heads, start:stop].float()
        scores_BRQS = query_BRQK @ self.key_BGTK[:, group, None, :stop].float().mT * self.scaling
        if self.softcap is not None:
            scores_BRQS = torch.tanh(scores_BRQS / self.softcap) * self.softcap
        if self.alibi:
            slopes_R11 = alibi_slopes(self.query_BHTK.shape[1]).to(scores_BRQS.device)[heads, None, None]
            scores_BRQS = scores_BRQS - slopes_R11 * distances(start, stop, scores_BRQS.device)
        return self._masked(scores_BRQS, start, stop).softmax(-1)

    def _masked(self, scores_BRQS: Tensor, start: int, stop: int) -> Tensor:
        if self.mask is not None and self.mask.dim() == 4:
            block = self.mask[:, :, start:stop, :stop]
            return scores_BRQS.masked_fill(~block, float("-inf")) if block.dtype == torch.bool else scores_BRQS + block
        distance_QS = distances(start, stop, scores_BRQS.device)
        hidden = (distance_QS < 0) | (distance_QS >= (self.window or self.length))
        if self.mask is not None:
            hidden = hidden | (~self.mask[:, None, None, :stop] & (distance_QS != 0))
        return scores_BRQS.masked_fill(hidden, float("-inf"))


def distances(start: int, stop: int, device: torch.device) -> Tensor:
    """Return how many tokens back key s lies from query t, t - s, for queries ``start`` to ``stop`` and keys 0 to ``stop``: [Q, S]."""
    return torch.arange(start, stop, device=device)[:, None] - torch.arange(stop, device=device)


Observer = Callable[[SeenAttention], None]
_observer: ContextVar[Observer | None] = ContextVar("keel_attention_observer", default=None)


@contextmanager
def observing_attention(host: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Call ``observer`` with every layer's attention while the body runs; the host computes what it always does.

    Works through transformers' ``AttentionInterface``; the host's attention implementation is put back afterwards.

    Raises: KeelError when the host's attention is neither ``sdpa`` nor ``eager`` nor one of Keel's position schemes.
    """
    configs = {
        id(m.config): m.config for m in host.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    for key, config in configs.items():
        config._attn_implementation = _register(before[key] or "eager", get_positions(host))
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _register(implementation: str, positions: Positions) -> str:
    """Make an observed twin of an attention implementation known to transformers, and return its name."""
    if implementation not in _READABLE and positions.scheme not in ("alibi", "window"):
        raise KeelError(
            f"probe: cannot read attention of implementation {implementation!r}; call "
            "host.set_attn_implementation('sdpa') (or 'eager') first"
        )
    own = positions if implementation not in _READABLE else Positions()
    name = f"keel_observed_{implementation}"
    AttentionInterface.register(name, partial(_attention, implementation=implementation, positions=own))
    AttentionMaskInterface.register(name, AttentionMaskInterface()[implementation])
    return name


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    implementation: str,
    positions: Positions,
    scaling: float | None = None,
    **kwargs: Any,
) -> Any:
    """Show the observer what is attended to, then attend with the host's own function."""
    observer = _observer.get()
    if observer is not None:
        observer(_seen(module, query, key, attention_mask, scaling, positions, kwargs))
    if implementation == "eager":  # every model file of transformers has its own under this name
        original = sys.modules[type(module).__module__].eager_attention_forward
    else:
        original = AttentionInterface()[implementation]
    return original(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _seen(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None, positions: Positions, rest: Any
) -> SeenAttention:
    unread = [name for name in ("s_aux", "position_bias") if rest.get(name) is not None]
    if unread or query.shape[2] != key.shape[2]:
        what = f"attention with {unread[0]}" if unread else f"{query.shape[2]} queries and {key.shape[2]} keys"
        raise KeelError(
            f"probe: cannot read {what}; run whole sequences without a cache on a host without attention sinks"
        )
    windows = [positions.window, rest.get("sliding_window") if positions.scheme != "rope" else None]
    return SeenAttention(
        layer=module.layer_idx,
        query_BHTK=query,
        key_BGTK=key,
        mask=mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=rest.get("softcap"),
        window=min((window for window in windows if window), default=None),
        alibi=positions.scheme == "alibi",
    )
