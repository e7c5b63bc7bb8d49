"""The streams' cache layer alone: what it keeps, gives back and refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache, StaticCache

from keel.cache import StreamCacheLayer, new_cache, stream_layer
from keel.errors import KeelError
from keel.streams.base import PassResult

BATCH, WIDTH = 3, 2
CONFIG = LlamaConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)


def _states(first: int, count: int) -> Tensor:
    """States after tokens ``first`` … ``first + count - 1``, [B, T, D]: their values tell batch row, token and channel."""
    row, token, channel = torch.meshgrid(
        torch.arange(BATCH), torch.arange(first, first + count), torch.arange(WIDTH), indexing="ij"
    )
    return (100.0 * row + token + 0.1 * channel).float()


def _feed(layer: StreamCacheLayer, count: int) -> None:
    history = _states(layer.seen, count)
    kept = {"g": history} if layer.record_past else {}
    results = {"a": PassResult(state={"g": history[:, -1]}, history=kept), "stateless": PassResult()}
    layer.store(results, count)


def _now(layer: StreamCacheLayer) -> Tensor:
    return layer.states["a"]["g"]


def _after(tokens: int) -> Tensor:
    return _states(tokens - 1, 1)[:, 0]


def _recording(before: int, sizes: list[int]) -> StreamCacheLayer:
    layer = StreamCacheLayer()
    _feed(layer, before)
    layer.activate_past_recording()
    for size in sizes:
        _feed(layer, size)
    return layer


@pytest.mark.parametrize("removed", range(7))
@pytest.mark.parametrize("sizes", [[6], [1, 5], [3, 2, 1]])
def test_crop_restores_the_state_of_that_many_tokens_ago(sizes: list[int], removed: int) -> None:
    layer = _recording(4, sizes)
    layer.crop(-removed)
    assert torch.equal(_now(layer), _after(10 - removed))
    assert layer.get_seq_length() == 10 - removed
    assert not layer.history and not layer.base
    _feed(layer, 2)
    assert torch.equal(_now(layer), _after(12 - removed))
    layer.crop(-1)
    assert torch.equal(_now(layer), _after(11 - removed))


def test_crop_back_to_the_beginning_leaves_no_state() -> None:
    layer = StreamCacheLayer()
    layer.activate_past_recording()
    _feed(layer, 3)
    layer.crop(-3)
    assert layer.states["a"] == {} and layer.seen == 0


def test_rows_are_put_behind_each_other_and_cut_and_memory_stays() -> None:
    layer = StreamCacheLayer()
    layer.activate_past_recording()
    for size in (4, 1, 3):
        memory = {"m": _after(1)} if size == 4 else {}
        layer.store({"a": PassResult(rows={"r": _states(layer.seen, size)}, memory=memory)}, size)
    layer.crop(-2)
    assert torch.equal(layer.previous("a")["r"], _states(0, 6)) and torch.equal(layer.previous("a")["m"], _after(1))
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    layer.batch_repeat_interleave(2)
    assert layer.previous("a")["r"][:, 5, 0].tolist() == [205.0, 205.0, 205.0, 205.0, 5.0, 5.0]
    assert layer.previous("a")["m"].shape[0] == 6 and layer.previous("b") == {}
    layer.reset()
    assert layer.previous("a") == {}


def test_crop_of_nothing_trims_the_history() -> None:
    layer = _recording(4, [6])
    assert layer.history["a"]["g"].shape == (BATCH, 6, WIDTH)
    layer.crop(0)
    assert not layer.history and torch.equal(_now(layer), _after(10))
    with pytest.raises(KeelError, match="cannot roll back 1 tokens of stream 'a': 0 are recorded"):
        layer.crop(-1)


@pytest.mark.parametrize(
    ("layer", "count", "message"),
    [
        (_recording(4, [6]), 1, "0 or minus the number"),
        (_recording(4, [6]), -7, "cannot roll back 7 tokens of stream 'a': 6 are recorded"),
        (_recording(4, [6]), -11, "only 10 were seen"),
        (_recording(4, []), -1, "0 are recorded"),
    ],
)
def test_a_crop_that_could_not_be_exact_is_refused(layer: StreamCacheLayer, count: int, message: str) -> None:
    before, seen = _now(layer).clone(), layer.seen
    with pytest.raises(KeelError, match=message):
        layer.crop(count)
    assert torch.equal(_now(layer), before) and layer.seen == seen


def test_a_crop_without_recording_is_refused() -> None:
    layer = StreamCacheLayer()
    _feed(layer, 5)
    with pytest.raises(KeelError, match="activate_past_recording"):
        layer.crop(-1)
    layer.crop(0)
    assert torch.equal(_now(layer), _after(5))


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
)
def test_rows_move_with_their_history(change: object, rows: list[int]) -> None:
    layer = _recording(4, [3])
    change(layer)  # type: ignore[operator]
    assert torch.equal(_now(layer), _after(7)[rows])
    assert torch.equal(layer.history["a"]["g"], _states(4, 3)[rows])
    assert torch.equal(layer.base["a"]["g"], _after(4)[rows])
    layer.crop(-3)
    assert torch.equal(_now(layer), _after(4)[rows])


def test_reset_forgets_everything() -> None:
    layer = _recording(4, [3])
    layer.reset()
    assert layer.states == layer.history == layer.base == {} and layer.get_seq_length() == 0
    _feed(layer, 2)
    assert torch.equal(_now(layer), _after(2))


def test_sizes_and_refused_writes() -> None:
    layer = _recording(4, [3])
    assert layer.get_mask_sizes(2) == (9, 0) and layer.get_max_length() == -1
    layer.offload()
    layer.prefetch()
    assert torch.equal(_now(layer), _after(7))
    with pytest.raises(KeelError, match="wrote past its own layers"):
        layer.update(torch.zeros(1), torch.zeros(1))
    with pytest.raises(KeelError, match="wrote past its own layers"):
        layer.lazy_initialization(torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("make", [DynamicCache, lambda: DynamicCache(config=CONFIG)])
def test_the_layer_stands_behind_the_hosts_and_is_found_again(make: object) -> None:
    cache = make()  # type: ignore[operator]
    layer = stream_layer(cache, CONFIG)
    assert len(cache.layers) == CONFIG.num_hidden_layers + 1 and cache.layers[-1] is layer
    assert stream_layer(cache, CONFIG) is layer
    assert isinstance(new_cache(CONFIG).layers[-1], StreamCacheLayer)


def test_the_whole_cache_acts_on_the_layer() -> None:
    cache = new_cache(CONFIG)
    layer = stream_layer(cache, CONFIG)
    _feed(layer, 2)
    for index in range(CONFIG.num_hidden_layers):
        cache.update(torch.zeros(BATCH, 2, 2, 4), torch.zeros(BATCH, 2, 2, 4), index)
    assert stream_layer(cache, CONFIG) is layer
    cache.activate_past_recording()
    _feed(layer, 1)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    assert torch.equal(_now(layer), _after(3)[[1, 1, 0]])
    cache.crop(-1)
    assert torch.equal(_now(layer), _after(2)[[1, 1, 0]])


def test_caches_that_would_lose_the_state_are_refused() -> None:
    with pytest.raises(KeelError, match="static cache"):
        stream_layer(StaticCache(config=CONFIG, max_cache_len=8), CONFIG)
    with pytest.raises(KeelError, match="must be a transformers Cache, got tuple"):
        stream_layer(((),), CONFIG)  # type: ignore[arg-type]
    filled = DynamicCache(config=CONFIG)
    filled.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    with pytest.raises(KeelError, match="it holds 3 tokens, of which they saw 0"):
        stream_layer(filled, CONFIG)
    assert not any(isinstance(layer, StreamCacheLayer) for layer in filled.layers)
