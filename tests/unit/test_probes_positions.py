"""Probes of positions: targets by hand, ridge regression against stacked least squares, states and tables whose answers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from keel.encoder import DstgConfig, DstgForMaskedLM, DstgModel
from keel.errors import KeelError, ShapeError
from keel.probes.positions import (
    Moments,
    boundary_ids,
    divide_documents,
    position_targets,
    probe_positions,
    products,
    reference_ridge_r2,
    ridge_r2,
    table_metrics,
)

STOP = 1


def small_config(position: str = "dstg") -> DstgConfig:
    return DstgConfig(
        vocab_size=20,
        semantic_size=8,
        position_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=40,
        position=position,
        special_token_ids=[18, 19],
    )


def test_targets_of_a_text_that_is_counted_by_hand() -> None:
    found = position_targets(torch.tensor([5, 6, STOP, 7, STOP, STOP, 8, 9, 9]), {STOP, 3})
    assert found[:, 0].tolist() == [index / 8 for index in range(9)]
    assert found[:, 1].tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3]
    assert found[:, 2].tolist() == [0, 0.5, 1, 0, 1, 1, 0, 0.5, 1]


def test_boundaries_are_terminal_punctuation_and_new_lines() -> None:
    words = ["a", ".", "b.c", "end.", "x\n", "\n", "?", "!", ",", ";", "<end>"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<end>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    assert {words[index] for index in boundary_ids(tokenizer)} == {".", "end.", "x\n", "\n", "?", "!", "<end>"}


def cloud(seed: int, tokens: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """States of unequal scale and mean, and targets that need a small, a large and no penalty."""
    generator = np.random.default_rng(seed)
    states = generator.normal(size=(tokens, 12)) * np.logspace(-2, 2, 12) + 3
    line = states @ (np.array([1.0, -2, 0.5] + [0] * 9) / np.logspace(-2, 2, 12))
    noisy = line[:, None] + generator.normal(size=(tokens, 1)) * 2
    return states, np.concatenate((line[:, None], noisy, generator.normal(size=(tokens, 1))), axis=1)


def moments_of(states: np.ndarray, targets: np.ndarray) -> Moments:
    moments = Moments(states.shape[1], targets.shape[1])
    for part in range(0, len(states), 17):
        moments.add(products(states[part : part + 17], targets[part : part + 17]))
    return moments


@pytest.mark.parametrize("channels", [slice(None), slice(0, 5), slice(5, None)])
def test_ridge_from_sums_equals_stacked_least_squares(channels: slice) -> None:
    parts = [cloud(0, 40), cloud(1, 30), cloud(2, 50)]
    found = ridge_r2(*(moments_of(*part) for part in parts), channels)
    expected = reference_ridge_r2(*((states[:, channels], targets) for states, targets in parts))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
    if channels == slice(None):
        assert found[0] > 0.999 and 0 < found[1] < 0.7 and found[2] < 0.1


def test_a_target_that_does_not_vary_has_no_r2_and_a_dead_channel_does_no_harm() -> None:
    states, targets = cloud(3)
    states[:, 4], targets[:, 2] = 7.0, 1.0
    found = ridge_r2(*(moments_of(states, targets) for _ in range(3)))
    assert found[0] > 0.999 and math.isnan(found[2])


class Known(DstgModel):
    """An encoder whose states are made up: the place in the position channels, the end of a segment in the semantic ones."""

    def forward(self, input_ids: Tensor, output_hidden_states: bool = False, **given: object) -> object:  # type: ignore[override]
        batch, tokens = input_ids.shape
        generator = torch.Generator().manual_seed(int(input_ids.sum()))
        state = 0.01 * torch.randn(batch, tokens, 12, generator=generator)
        state[..., 8] += torch.arange(tokens) / tokens
        state[..., 0] += (input_ids == STOP).float()
        noise = torch.randn(batch, tokens, 12, generator=generator)
        return type("Output", (), {"hidden_states": (noise, state, noise)})


def documents(count: int = 40, tokens: int = 24) -> Tensor:
    ids = torch.randint(2, 18, (count, tokens))
    ids[torch.rand(count, tokens) < 0.2] = STOP
    return ids


def r2_of(values: tuple[np.ndarray, np.ndarray]) -> float:
    explained_N, spread_N = values
    return float(explained_N.sum() / spread_N.sum())


@pytest.mark.parametrize("ends", [None, (18, 19)])
def test_states_that_are_known_are_read_as_they_are(ends: tuple[int, int] | None) -> None:
    found = probe_positions(Known(small_config()), documents(), {STOP}, ends=ends, seeds=3)
    assert found.documents == (26, 6, 8) and sum(found.documents) == 40
    values = {name: r2_of(each) for name, each in found.metrics().items()}
    assert values["probe.token_r2@layer0"] > 0.99 and values["probe.token_r2.ap@layer0"] > 0.99
    assert values["probe.token_r2.sem@layer0"] < 0.1 and values["probe.token_r2@layer1"] < 0.05
    segment, without = (values[f"probe.segment_r2.{stream}@layer0"] for stream in ("ap", "sem"))
    assert segment > 0.3 > 0.1 > without, "the number of a segment grows with the place"
    assert values["probe.progress_r2.sem@layer0"] > 0.2 > 0.1 > values["probe.progress_r2.ap@layer0"]


def test_documents_add_up_to_the_mean_r2_of_the_divisions() -> None:
    """Beside states kept whole and divided by hand: what each document contributes gives the mean of three ordinary R²."""
    torch.manual_seed(0)
    model, ids, seeds = DstgModel(small_config()).eval(), documents(30, 16), 3
    found = probe_positions(model, ids, {STOP}, seeds=seeds)
    with torch.inference_mode():
        states = model(ids, output_hidden_states=True).hidden_states[2].double().numpy()[..., 8:]
    targets = np.stack([position_targets(ids_T, {STOP}) for ids_T in ids])
    expected = np.zeros((seeds, 3))
    for seed in range(seeds):
        parts = divide_documents(np.arange(30), seed)
        whole = [(states[parts == part].reshape(-1, 4), targets[parts == part].reshape(-1, 3)) for part in range(3)]
        expected[seed] = reference_ridge_r2(*whole)
    for index, target in enumerate(("token", "segment", "progress")):
        explained_N, spread_N = found.r2[target, 1, "ap"]
        np.testing.assert_allclose(explained_N.sum() / spread_N.sum(), expected[:, index].mean(), rtol=0, atol=1e-6)
    tested = np.array([divide_documents(np.arange(30), seed) == 2 for seed in range(seeds)]).any(axis=0)
    assert 0 < tested.sum() < 30 and np.array_equal(spread_N > 0, tested), "only documents that are tested on count"


def test_documents_of_one_text_are_not_divided() -> None:
    source_N = np.repeat(np.arange(20), 5)[np.random.default_rng(0).permutation(100)]
    for seed in range(4):
        parts = divide_documents(source_N, seed)
        assert all(len(set(parts[source_N == source])) == 1 for source in range(20))
        assert np.bincount(parts).tolist() == [60, 20, 20], "64, 16 and 20, and what of a text is beyond"
    with pytest.raises(KeelError, match="100 documents of 2 texts"):
        divide_documents(source_N % 2, 0)
    torch.manual_seed(0)
    model, ids = DstgModel(small_config()).eval(), documents(40, 16)
    numbers = [7 * (row // 4) for row in range(40)]  # of any kind
    found = probe_positions(model, ids, {STOP}, sources=numbers, seeds=2)
    explained, spread = found.r2["token", 1, "ap"]
    assert len(explained) == len(spread) == 10, "intervals are over texts"
    alone = probe_positions(model, ids, {STOP}, seeds=2).r2["token", 1, "ap"]
    assert explained.sum() / spread.sum() != pytest.approx(alone[0].sum() / alone[1].sum(), abs=1e-9)


def test_every_layer_target_and_stream_has_a_metric() -> None:
    ids = documents(12, 16)
    for position, streams in (("dstg", ("", ".sem", ".ap")), ("rope", ("",)), ("ap", ("",)), ("rp", ("",))):
        model = DstgForMaskedLM(small_config(position))
        values = probe_positions(model, ids, {STOP}, ends=(18, 19), seeds=2).metrics()
        assert set(values) == {
            f"probe.{target}_r2{stream}{where}"
            for target in ("token", "segment", "progress")
            for stream in streams
            for where in ("", "@last", "@layer0", "@layer1")
        }
        assert values["probe.token_r2"] is values["probe.token_r2@layer0"], "of two blocks the last but one"
        assert values["probe.token_r2@last"] is values["probe.token_r2@layer1"]
        assert model.training, "the probe leaves the mode as it was"
        again = probe_positions(model, ids, {STOP}, ends=(18, 19), seeds=2).metrics()
        assert all(np.array_equal(values[name], again[name]) for name in values)


def test_a_target_without_variance_is_not_a_number() -> None:
    ids = torch.randint(2, 18, (12, 16))  # no token ends a segment
    values = probe_positions(DstgModel(small_config("rope")), ids, {STOP}, seeds=2).metrics()
    assert values["probe.segment_r2@layer0"][1].sum() == 0 and values["probe.token_r2@layer0"][
        1
    ].sum() == pytest.approx(2)


def test_an_untrained_table_of_positions_is_read_from_the_first_layer() -> None:
    """Each place has a row of its own, so that as many channels as places tell it exactly."""
    torch.manual_seed(0)
    config = small_config("ap")
    model = DstgModel(config)
    with torch.no_grad():
        model.embed_positions.weight[:, 0] = torch.arange(40) / 4
    found = probe_positions(model, documents(60, 16), {STOP}, seeds=2).metrics()
    assert r2_of(found["probe.token_r2@layer0"]) > 0.9


def test_too_few_documents_are_refused() -> None:
    with pytest.raises(KeelError, match="9 documents are too few"):
        probe_positions(DstgModel(small_config()), documents(9), {STOP})
    with pytest.raises(ShapeError, match=r"expected \[documents, tokens\]"):
        probe_positions(DstgModel(small_config()), torch.ones(9, dtype=torch.long), {STOP})


def test_a_table_of_two_slow_waves() -> None:
    """Cosines of the DCT-II itself: bins 1 and 3 of 64 in two directions, with 3 to 1 of the variance; bin 20 in a third."""
    place = torch.arange(64) + 0.5
    wave = lambda bin_: torch.cos(math.pi * bin_ * place / 64)  # noqa: E731
    directions = torch.linalg.qr(torch.randn(10, 3)).Q
    table = 5 + math.sqrt(3) * wave(1)[:, None] * directions[:, 0] + wave(3)[:, None] * directions[:, 1]
    ends = 50 * torch.randn(2, 1, 10)  # the rows of [CLS] and [SEP] have no part in it
    found = table_metrics(torch.cat((ends[0], table, ends[1])))
    chance = found.pop("ap.variance_2pc_random")
    assert all(value == pytest.approx(1, abs=1e-6) for value in found.values()) and 0.2 < chance < 0.5
    with_fast = table + wave(20)[:, None] * directions[:, 2] * math.sqrt(2)
    found = table_metrics(torch.cat((ends[0], with_fast, ends[1])))
    assert found["ap.variance_2pc"] == pytest.approx(5 / 6, abs=1e-5)
    assert found["ap.dct_low4_pc1"] == pytest.approx(1, abs=1e-5) and found["ap.dct_low4_pc2"] < 1e-5


def test_a_table_of_noise_and_one_that_is_flat() -> None:
    found = table_metrics(torch.randn(256, 48))
    assert found["ap.variance_2pc"] == pytest.approx(found["ap.variance_2pc_random"], abs=0.01)
    assert found["ap.variance_2pc_excess"] == pytest.approx(0, abs=0.01)
    assert found["ap.variance_2pc"] < 0.15 and max(found["ap.dct_low4_pc1"], found["ap.dct_low4_pc2"]) < 0.15
    assert all(math.isnan(value) for value in table_metrics(torch.full((8, 3), 0.1)).values())
    with pytest.raises(ShapeError, match="at least 7 positions"):
        table_metrics(torch.zeros(6, 3))
