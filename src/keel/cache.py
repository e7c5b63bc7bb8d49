"""The streams' layer in the Hugging Face cache, so that generation carries, reorders and rolls back their state.

It is appended behind the host's own layers. A recurrent state has no length to cut, so while the past is recorded (assisted and
prompt-lookup decoding) the state after every recent token is kept, and ``crop(-n)`` restores exactly the one n tokens ago.

What a stream keeps of every token, and signals that were asked for, grow with the text as keys and values do, and are cut.

Shapes: B batch, T recent tokens, S tokens seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticLayer

from keel.errors import KeelError
from keel.streams.base import PassResult, State


class StreamCacheLayer(CacheLayerMixin):
    """State of every stream between passes.

    Attributes:
        states: for each stream its state, every tensor [B, ...]; empty before the first token.
        rows: for each stream what it keeps for each token, [B, S, ...].
        memory: for each stream what it keeps beside, [B, ...].
        history: for each stream the states after each recent token, [B, T, ...]; kept only while ``record_past``.
        base: the states before the first token of ``history``.
        signals: for each stream the signals of every token, [B, S] or [B, S, L]; only of passes that were asked for them.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, State] = {}
        self.rows: dict[str, State] = {}
        self.memory: dict[str, State] = {}
        self.base: dict[str, State] = {}
        self.history: dict[str, State] = {}
        self._signals: dict[str, State] = {}
        self._new_signals: list[dict[str, State]] = []
        self.record_past = False
        self.seen = 0

    def store(self, results: dict[str, PassResult], num_tokens: int) -> None:
        """Take over what the streams left behind after a pass over ``num_tokens`` tokens."""
        if self.record_past:
            for name, result in results.items():
                if self.history.get(name):
                    recent = self.history[name]
                    self.history[name] = {key: torch.cat([recent[key], new], 1) for key, new in result.history.items()}
                else:
                    self.base[name] = self.states.get(name, {})
                    self.history[name] = dict(result.history)
        self.states = {name: dict(result.state) for name, result in results.items()}
        for name, result in results.items():
            _append(self.rows, name, result.rows)
            if result.memory:
                self.memory[name] = dict(result.memory)
        new_signals = {name: dict(result.signals) for name, result in results.items() if result.signals}
        if new_signals:
            self._new_signals.append(new_signals)
        self.seen += num_tokens
        self.is_initialized = True

    @property
    def signals(self) -> dict[str, State]:
        """Put together what passes left: at a look, since joining every signal at every token costs as much as the stream."""
        for name in {name for signals in self._new_signals for name in signals}:
            chunks = [self._signals.get(name, {}), *(signals.get(name, {}) for signals in self._new_signals)]
            keys = dict.fromkeys(key for chunk in chunks for key in chunk)
            self._signals[name] = {key: torch.cat([chunk[key] for chunk in chunks if key in chunk], 1) for key in keys}
        self._new_signals = []
        return self._signals

    def previous(self, name: str) -> State:
        """Return what a stream left behind, as its next pass is opened with."""
        state = self.states.get(name, {})
        if name not in self.rows and name not in self.memory:  # as for most streams, at every token of decoding
            return state
        return {**state, **self.rows.get(name, {}), **self.memory.get(name, {})}

    def activate_past_recording(self) -> None:
        """Keep the state after every token from now on, until ``crop``."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Go back ``-tokens_to_remove`` tokens exactly, and forget the history before that point.

        Raises: KeelError for a positive count, or when the past was not recorded that far.
        """
        if tokens_to_remove > 0:
            raise KeelError(f"crop takes 0 or minus the number of tokens to remove, got {tokens_to_remove}")
        removed = -tokens_to_remove
        if removed and not self.record_past:
            raise KeelError(
                "cannot roll back: the states of past tokens were not recorded; call activate_past_recording() first"
            )
        if removed > self.seen:
            raise KeelError(f"cannot roll back {removed} tokens: only {self.seen} were seen")
        for name, state in self.states.items():
            if not removed or not state:  # a stream may have no state at all
                continue
            history = self.history.get(name, {})
            length = next(iter(history.values())).shape[1] if history else 0
            if removed > length:
                raise KeelError(f"cannot roll back {removed} tokens of stream {name!r}: {length} are recorded")
            kept = length - removed
            self.states[name] = (
                {key: states[:, kept - 1] for key, states in history.items()} if kept else self.base[name]
            )
        self.history, self.base = {}, {}
        self.seen -= removed
        if removed:
            for group in (self.rows, self.signals):
                for name, kept_tokens in group.items():
                    group[name] = {key: tensor[:, :-removed] for key, tensor in kept_tokens.items()}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch for beam search."""
        self._map(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows of the batch."""
        self._map(lambda state: state[indices.to(state.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        self._map(lambda state: state.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        """Forget everything."""
        self.states, self.rows, self.memory = {}, {}, {}
        self._signals, self._new_signals = {}, []
        self.base, self.history, self.seen = {}, {}, 0

    def offload(self) -> None:
        """Keep the state where it is: it is small and read first in every pass."""

    def prefetch(self) -> None:
        """See ``offload``."""

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset that a mask over these tokens would have."""
        return self.seen + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse: no attention layer writes here."""
        raise KeelError("the streams' cache layer holds no keys or values; the host wrote past its own layers")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Refuse: no attention layer writes here."""
        raise KeelError("the streams' cache layer holds no keys or values; the host wrote past its own layers")

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for group in (self.states, self.rows, self.memory, self.signals, self.base, self.history):
            for name, state in group.items():
                group[name] = {key: change(value) for key, value in state.items()}


def _append(group: dict[str, State], name: str, new: State) -> None:
    if new:
        known = group.get(name, {})
        group[name] = {
            key: torch.cat([known[key], tensor], 1) if key in known else tensor for key, tensor in new.items()
        }


def signals_of(cache: Cache) -> dict[str, Tensor]:
    """Return the signals of all tokens in the cache, by name, [B, S] or [B, S, L], after ``generate`` or passes with
    ``collect_signals=True``: ``signals_of(model.generate(..., collect_signals=True, return_dict_in_generate=True).past_key_values)``.
    The last token that was generated has been read by nobody and has none.

    Raises: KeelError where none were collected.
    """
    layer = cache.layers[-1] if cache.layers else None
    if not isinstance(layer, StreamCacheLayer) or not layer.signals:
        raise KeelError("this cache holds no signals; give collect_signals=True to every pass, or to generate")
    return {f"{name}.{key}": tensor for name, signals in layer.signals.items() for key, tensor in signals.items()}


def new_cache(host_config: PreTrainedConfig) -> DynamicCache:
    """Return an empty cache for the host and its streams."""
    cache = DynamicCache(config=host_config)
    stream_layer(cache, host_config)
    return cache


def stream_layer(cache: Cache, host_config: PreTrainedConfig) -> StreamCacheLayer:
    """Return the streams' layer of ``cache``, appending it behind the host's layers where it is not there yet.

    Raises: KeelError for a cache in which the state could not be exact: a static one, or one already filled without the streams.
    """
    if not isinstance(cache, Cache):
        raise KeelError(
            f"past_key_values must be a transformers Cache, got {type(cache).__name__}; pass DynamicCache(config=...)"
        )
    last = cache.layers[-1] if cache.layers else None
    # By its type: the class is abstract in transformers, which makes isinstance many calls, and every token of decoding asks.
    own = last if type(last) is StreamCacheLayer else None
    seen = 0 if own is None else own.seen
    if own is None and any(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise KeelError("a static cache would silently lose the streams' state; use cache_implementation='dynamic'")
    if cache.get_seq_length() != seen:
        raise KeelError(
            f"this cache was filled without the streams, their state is missing: it holds {cache.get_seq_length()} tokens, of which "
            f"they saw {seen}; start from an empty cache"
        )
    if own is not None:
        return own
    while len(cache.layers) < host_config.num_hidden_layers:
        cache.layers.append((cache.layer_class_to_replicate or DynamicLayer)())
    layer = StreamCacheLayer()
    cache.layers.append(layer)
    return layer
