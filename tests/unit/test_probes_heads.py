"""What heads listen to: Eq. 4 key by key, components that are known, groups that are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.encoder import DstgConfig, DstgForMaskedLM, DstgModel
from keel.errors import KeelError
from keel.probes import heads as module
from keel.probes.heads import HeadInfluence, head_influence, influence, reference_influence


def small_model(position: str = "dstg") -> DstgModel:
    config = DstgConfig(
        vocab_size=20,
        semantic_size=8,
        position_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        position=position,
        special_token_ids=[18, 19],
    )
    model = DstgModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def sequences(count: int = 5, tokens: int = 9) -> Tensor:
    ids = torch.randint(2, 18, (count, tokens))
    ids[:, 0], ids[:, -1] = 18, 19
    return ids


def test_the_divergence_is_that_of_the_definition() -> None:
    parts = [scale * torch.randn(batch, 3, 5, 5).double() for batch, scale in ((2, 1), (2, 2), (1, 1))]
    torch.testing.assert_close(influence(parts), reference_influence(parts), rtol=0, atol=1e-12)
    two_keys = [torch.tensor([[[[1.0, 0.0]] * 2]]), torch.tensor([[[[0.0, 2.0]] * 2]])]
    share = 1 / (1 + np.e)
    without = np.exp(2) / (1 + np.exp(2))
    expected = share * np.log(share / (1 - without)) + (1 - share) * np.log((1 - share) / without)
    assert influence(two_keys)[0, 0, 0].item() == pytest.approx(expected)


def test_a_component_that_is_not_there_has_no_influence() -> None:
    for silent, name in (("ap", "ap"), ("rp", "rp"), ("semantic", "semantic")):
        model = small_model()
        with torch.no_grad():
            for layer in model.layers:
                if silent == "rp":
                    layer.attention.relative_bias.bucket.zero_()
                    layer.attention.relative_bias.special.zero_()
                if silent == "ap":
                    layer.attention.position_qkv.weight[:16].zero_()
                if silent == "semantic":
                    layer.attention.semantic_qkv.weight[:16].zero_()
        found = head_influence(model, sequences())
        index = found.components.index(name)
        others = [position for position in range(3) if position != index]
        assert found.divergence[..., index].max() < 1e-12 < 1e-4 < found.divergence[..., others].min()
        assert found.shares.sum(axis=-1) == pytest.approx(1)
        assert (found.groups() != index).all() and found.counts()[f"heads.{name}"] == 0


def test_documents_in_batches_or_one_by_one_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = DstgForMaskedLM(small_model().config), sequences()
    model.encoder.load_state_dict(small_model().state_dict())
    together = head_influence(model, ids)
    monkeypatch.setattr(module, "_MOST_MAP", 1)
    alone = [head_influence(model, ids[index : index + 1]).divergence for index in range(len(ids))]
    np.testing.assert_allclose(together.divergence, np.mean(alone, axis=0), rtol=1e-5)
    np.testing.assert_allclose(together.divergence, head_influence(model, ids).divergence, rtol=1e-5)
    assert together.divergence.shape == (2, 2, 3) and together.documents == 5


def test_one_layers_maps_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = influence

    def watched(parts: list[Tensor]) -> Tensor:
        seen.append(max(part.numel() for part in parts))
        return original(parts)

    monkeypatch.setattr(module, "influence", watched)
    monkeypatch.setattr(module, "_MOST_MAP", 2 * 2 * 9 * 9)
    head_influence(small_model(), sequences())
    assert len(seen) == 3 * 2 and max(seen) == 2 * 2 * 9 * 9


def test_heads_fall_into_the_groups_that_they_are_made_of() -> None:
    generator = np.random.default_rng(0)
    semantic, ap = generator.dirichlet([40, 2, 8], size=9), generator.dirichlet([4, 60, 2], size=27)
    shares = np.concatenate((semantic, ap))
    found = HeadInfluence(components=("semantic", "ap", "rp"), divergence=3 * shares.reshape(6, 6, 3), documents=1)
    np.testing.assert_allclose(found.shares.reshape(-1, 3), shares)
    assert found.counts() == {"heads.semantic": 9, "heads.ap": 27, "heads.rp": 0}
    assert found.fractions() == {
        "heads.semantic_fraction": 0.25,
        "heads.ap_fraction": 0.75,
        "heads.rp_fraction": 0.0,
    }
    assert (found.groups().ravel()[:9] == 0).all()
    scaled = HeadInfluence(
        components=found.components, divergence=found.divergence * np.arange(1, 7)[:, None, None], documents=1
    )
    assert (scaled.groups() == found.groups()).all(), "how strong a head is does not matter"


def test_a_head_that_nothing_moves_belongs_nowhere_in_particular() -> None:
    found = HeadInfluence(components=("semantic", "rp"), divergence=np.zeros((1, 2, 2)), documents=1)
    assert (found.shares == 0.5).all()
    assert sum(found.counts().values()) == 2


def test_baselines_with_one_component_are_refused() -> None:
    assert head_influence(small_model("rp"), sequences()).components == ("semantic", "rp")
    for position in ("rope", "ap"):
        with pytest.raises(KeelError, match=f"position='{position}' has one component only"):
            head_influence(small_model(position), sequences())
