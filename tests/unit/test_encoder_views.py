"""Pictures of encoders and probes between them: what they are drawn from, what they show, recipes that ask for them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from keel.encoder import DstgConfig, DstgForMaskedLM, DstgModel
from keel.errors import KeelError
from keel.experiment.encoder_pictures import draw_simplex, encoder_pictures
from keel.experiment.encoder_views import HEADS_FILE, TABLE_FILE, TRAJECTORIES_FILE
from keel.experiment.runner import _units
from keel.probes.encoder_views import _plane, component_maps, position_table_of, position_trajectories, table_shape
from keel.probes.inter_model import probe_between
from keel.probes.positions import table_metrics
from keel.training import load_recipe, parse_recipe
from keel.training.build import matched_widths

STOP = 17
SIZES = {
    "vocab_size": 20, "semantic_size": 8, "position_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 40, "special_token_ids": [18, 19], "initializer_range": 0.5,
}  # fmt: skip


class Known(DstgModel):
    """An encoder with made-up states: places on a circle, and in the first semantic channels what ``shows`` says of the token."""

    shows = "token"

    def forward(self, input_ids: Tensor, output_hidden_states: bool = False, **given: object) -> object:  # type: ignore[override]
        batch, tokens = input_ids.shape
        generator = torch.Generator().manual_seed(int(input_ids.sum()))
        angle = torch.arange(tokens) / tokens
        state = 0.001 * torch.randn(batch, tokens, self.config.hidden_size, generator=generator)
        if self.config.disentangled:
            state[..., 8] += torch.sin(angle)
            state[..., 9] += torch.cos(angle)
        if self.shows == "token":
            state[..., :8] += torch.nn.functional.one_hot(input_ids % 8, 8)
        else:
            state[..., 0] += torch.sin(angle)
            state[..., 1] += torch.cos(angle)
        return type("Output", (), {"hidden_states": (state, state, state)})


def documents(count: int = 40, tokens: int = 24) -> Tensor:
    return torch.randint(2, 18, (count, tokens), generator=torch.Generator().manual_seed(0))


def test_one_encoder_tells_of_another_what_it_knows_itself() -> None:
    told, tokens, places = (Known(DstgConfig(**SIZES, position=position)) for position in ("dstg", "rope", "ap"))
    places.shows = "place"
    found = {
        name: probe_between(model, told, documents(), ends=(18, 19), seeds=2)
        for name, model in {"tokens": tokens, "places": places, "itself": told}.items()
    }
    names = {f"inter.{stream}_r2@layer{layer}" for stream in ("ap", "semantic") for layer in (0, 1)}
    assert all(set(each) == names and {len(values) for values in each.values()} == {2} for each in found.values())
    low = {name: np.mean(each["inter.ap_r2@layer1"]) for name, each in found.items()}
    high = {name: np.mean(each["inter.semantic_r2@layer0"]) for name, each in found.items()}
    # Two of the four channels of places are told by what knows places, and the rest are noise.
    assert low["places"] > 0.4 and low["itself"] > 0.99 and low["tokens"] < 0.1
    assert high["tokens"] > 0.99 and high["itself"] > 0.99 and high["places"] < 0.1
    with pytest.raises(KeelError, match="position='rope', one stream"):
        probe_between(told, tokens, documents())
    with pytest.raises(KeelError, match="2 blocks cannot be held against 1"):
        probe_between(tokens, Known(DstgConfig(**{**SIZES, "num_hidden_layers": 1})), documents())
    with pytest.raises(KeelError, match="9 documents"):
        probe_between(tokens, told, documents(9))


@pytest.mark.parametrize(
    ("position", "names"), [("dstg", {"semantic", "ap", "rp", "all"}), ("rp", {"semantic", "rp", "all"})]
)
def test_maps_of_components_multiply_to_the_attention(position: str, names: set[str]) -> None:
    torch.manual_seed(0)
    model = DstgForMaskedLM(DstgConfig(**SIZES, position=position))
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.attention.relative_bias.bucket.normal_()
    ids = torch.tensor([18, 3, 4, 5, 6, 19])
    second, first = component_maps(model, ids, [(1, 1), (0, 0)])
    assert set(first) == names and all(part.shape == (6, 6) for part in first.values())
    for maps in (first, second):
        product = np.prod([maps[name] for name in names - {"all"}], axis=0)
        np.testing.assert_allclose(maps["all"], product / product.sum(axis=1, keepdims=True), atol=1e-6)
    other = component_maps(model, torch.tensor([18, 9, 9, 7, 2, 19]), [(0, 0)])[0]
    np.testing.assert_allclose(other["rp"], first["rp"])
    assert not np.allclose(other["semantic"], first["semantic"]) and not np.allclose(second["all"], first["all"])
    assert model.training


def test_positions_are_followed_through_the_blocks() -> None:
    model = Known(DstgConfig(**SIZES))
    ids = torch.tensor([3, 4, STOP, 5, STOP, 6, 7, 8])
    found = position_trajectories(model, ids, {STOP}, ends=(18, 19))
    assert found.points.shape == (3, 8, 2) and found.segments.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert found.shares[1] == found.shares[2] > 0.99 > found.shares[0] > 0, "a circle lies in two components"
    assert np.all(np.diff(found.points[1, :, 0]) > 0), "the first component grows with the place"
    line = np.outer(np.arange(6.0), [1.0, -2.0, 0.5])
    assert all(np.all(np.diff(_plane(each)[0][:, 0]) > 0) for each in (line, line[::-1]))
    with pytest.raises(KeelError, match="no stream of absolute positions"):
        position_trajectories(Known(DstgConfig(**SIZES, position="ap")), ids, {STOP}, ends=(18, 19))


def test_the_shape_of_a_table_agrees_with_its_metrics() -> None:
    random = torch.Generator().manual_seed(0)
    angle = torch.arange(40)[:, None] * torch.tensor([[0.05, 0.1]])
    table = torch.sin(angle) @ torch.randn(2, 6, generator=random) + 0.1 * torch.randn(40, 6, generator=random)
    shape, metrics = table_shape(table), table_metrics(table)
    assert shape.cumulative[1] == pytest.approx(metrics["ap.variance_2pc"]) and shape.cumulative[-1] == pytest.approx(1)
    assert shape.power[0, :4].sum() == pytest.approx(metrics["ap.dct_low4_pc1"])
    assert shape.power[1, :4].sum() == pytest.approx(metrics["ap.dct_low4_pc2"])
    assert shape.components.shape == (3, 38)


def test_tables_of_checkpoints_without_their_rows_for_padding(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 10,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    bert = BertModel(BertConfig(**sizes, max_position_embeddings=12))
    roberta = RobertaModel(RobertaConfig(**sizes, max_position_embeddings=14, pad_token_id=1))
    ours = DstgForMaskedLM(DstgConfig(**SIZES, position="ap"))
    for name, model in {"bert": bert, "roberta": roberta, "ours": ours}.items():
        model.save_pretrained(tmp_path / name)
    assert torch.equal(position_table_of(str(tmp_path / "bert")), bert.embeddings.position_embeddings.weight)
    assert torch.equal(position_table_of(str(tmp_path / "roberta")), roberta.embeddings.position_embeddings.weight[2:])
    assert torch.equal(position_table_of(str(tmp_path / "ours")), ours.encoder.embed_positions.weight)
    DstgForMaskedLM(DstgConfig(**SIZES, position="rope")).save_pretrained(tmp_path / "rope")
    with pytest.raises(KeelError, match="no learned position table"):
        position_table_of(str(tmp_path / "rope"))
    with pytest.raises(KeelError, match="cannot be loaded"):
        position_table_of(str(tmp_path / "nowhere"))


def heads_of(shares: list[list[list[float]]]) -> dict[str, Any]:
    maps = [{name: np.eye(4).tolist() for name in ("semantic", "ap", "rp", "all")}]
    groups = np.argmax(shares, axis=-1).tolist()
    return {"components": ["semantic", "ap", "rp"], "shares": shares, "groups": groups, "heads": [[0, 0]], "maps": maps}


def test_pictures_are_drawn_from_what_was_kept(tmp_path: Path) -> None:
    recipe = load_recipe("dstg/comparison", "tiny")
    folders = {arm: tmp_path / arm / "seed0" for arm in ("dstg", "ap", "rope")}
    assert encoder_pictures(recipe, folders, tmp_path, 0) == []
    shapes = {"": {key: each.tolist() for key, each in vars(table_shape(torch.randn(20, 6))).items()}}
    both = {**shapes, "bert": shapes[""]}
    path = {"points": np.random.default_rng(0).random((3, 9, 2)).tolist(), "shares": [0.9] * 3, "segments": [0] * 9}
    kept = {
        "dstg": {HEADS_FILE: heads_of([[[0.9, 0.1, 0.0]]]), TABLE_FILE: both, TRAJECTORIES_FILE: path},
        "ap": {TABLE_FILE: both},
        "rope": {},
    }
    for arm, files in kept.items():
        folders[arm].mkdir(parents=True)
        for name, content in files.items():
            (folders[arm] / name).write_text(json.dumps(content), encoding="utf-8")
    found = [picture.file for picture in encoder_pictures(recipe, folders, tmp_path, 0)]
    names = ["heads", "maps.dstg", "trajectories.dstg", "table_variance", "table_components"]
    assert found == [f"figures/encoder.{name}.png" for name in names]
    assert all((tmp_path / file).is_file() for file in found)


def test_a_head_stands_nearer_to_what_it_listens_to() -> None:
    def seen(shares: list[float]) -> np.ndarray:
        drawing = draw_simplex({"DSTG": heads_of([[shares] * 4])}, 0)
        return matplotlib.image.imread(io.BytesIO(drawing.png), format="png")[..., :3]

    corners = [seen([float(at == corner) for at in range(3)]) for corner in range(3)]

    def weight_of_the_right(image: np.ndarray) -> float:
        dark = np.abs(image - corners[2]).sum(axis=-1)
        return float((dark.sum(axis=0) * np.linspace(0, 1, dark.shape[1])).sum() / dark.sum())

    assert weight_of_the_right(corners[1]) > weight_of_the_right(corners[0]) + 0.05


def changed(name: str = "comparison", **changes: Any) -> dict[str, Any]:
    given = load_recipe(f"dstg/{name}", "tiny").model_dump(mode="json")
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = given
        for key in parents:
            target = target[key]
        target[last] = value
    return given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation__inter_model__target": "dsgt"}, "no arm 'dsgt'; did you mean 'dstg'"),
        ({"evaluation__inter_model__target": "rope"}, "arm 'rope' has one stream"),
        ({"arms__rope__host": {"position": "rope", "num_hidden_layers": 3}}, "different numbers of blocks"),
        (
            {"evaluation__inter_model__length": 63},
            r"evaluation\.inter_model\.length, with \[CLS\] and \[SEP\]: 65 is longer",
        ),
        (
            {"name": "controls", "arms__rope_matched__match_parameters_of": "dsgt"},
            "no other trained arm 'dsgt'; did you mean 'dstg'",
        ),
        ({"name": "controls", "arms__rope_matched__match_parameters_of": "rope_matched"}, "no other trained arm"),
        ({"name": "controls", "match_parameters": True}, "in a recipe without match_parameters"),
    ],
)
def test_recipes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        parse_recipe(changed(**changes))


def test_the_target_is_trained_before_the_arms_that_are_held_against_it() -> None:
    recipe = parse_recipe(changed(seeds=[0, 1]))
    order = [(unit.arm, unit.seed) for unit in _units(recipe, ["rope", "ap"])]
    assert order == [("dstg", 0), ("rope", 0), ("ap", 0), ("dstg", 1), ("rope", 1), ("ap", 1)]
    assert recipe.needed_by("dstg") == [] and recipe.needed_by("rope") == ["dstg"]


def test_an_arm_has_the_parameters_of_the_one_it_names() -> None:
    from keel.encoder import count_parameters

    class Tokenizer:
        bos_token_id = eos_token_id = pad_token_id = cls_token_id = sep_token_id = 0

        def __len__(self) -> int:
            return 500

    counts = {}
    for name in ("comparison", "controls"):
        recipe = load_recipe(f"dstg/{name}", "small")
        widths = matched_widths(recipe, Tokenizer())  # type: ignore[arg-type]
        assert [arm for arm, width in widths.items() if width] == [arm for arm in widths if arm.endswith("_matched")]
        for arm, width in widths.items():
            config = recipe.host_config(arm)
            config.vocab_size = 500
            config.intermediate_size = width or config.intermediate_size
            counts[arm] = count_parameters(config)
    channel = 4 * 3 * 192
    for arm in ("rope", "rp", "ap"):
        assert abs(counts[f"{arm}_matched"] - counts["dstg"]) <= channel < counts["dstg"] - counts[arm]
    assert counts["dstg_full"] > counts["dstg"]
