"""Every arm of every recipe can be built at every scale, computes, and has the parameters of its peers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from keel.errors import KeelError
from keel.positions import set_positions
from keel.training.build import build_model, matched_widths
from keel.training.phases import count_parameters
from keel.training.recipe import load_recipe, parse_recipe, recipes_folder
from keel.training.simulation import is_simulation

RECIPES = sorted(recipes_folder().rglob("*.yaml"))
GIVEN = {path: given for path in RECIPES if not is_simulation(given := yaml.safe_load(path.read_text()))}
EVERY_SCALE = [(path, scale) for path, given in GIVEN.items() for scale in given["scales"]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A small one: what a recipe names may lie on the Hub."""
    entries = {chr(index): index for index in range(97, 123)}
    words = {token: index for index, token in enumerate([*entries, "<end>", "<pad>"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


@pytest.mark.parametrize(("path", "scale"), EVERY_SCALE, ids=lambda value: getattr(value, "stem", value))
def test_every_arm_computes_with_matched_parameters(
    path: Path, scale: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    recipe = load_recipe(path, scale)
    if "checkpoint" in recipe.host:  # on the Hub: a small one of the same family is loaded in its place
        recipe = recipe.model_copy(update={"host": {"checkpoint": str(save_small(tmp_path / "host", tokenizer))}})
    widths = matched_widths(recipe, tokenizer)
    trained = {arm: build_model(recipe, arm, 0, tokenizer, widths[arm]) for arm in recipe.trained_arms()}
    counts = {arm: count_parameters(model)[0] for arm, model in trained.items()}
    if recipe.match_parameters:
        config = recipe.host_config()
        assert config is not None
        # Of a feed-forward channel at most three rows a layer and, in some families, a bias.
        channel = config.num_hidden_layers * (3 * config.hidden_size + 1)
        assert max(counts.values()) - min(counts.values()) <= channel, counts
        assert len(set(widths.values())) > 1
    ids = torch.randint(len(tokenizer), (1, 48))
    logits = {}
    with torch.no_grad():
        for arm in recipe.arms:
            model = trained[recipe.arms[arm].weights_of or arm].eval()
            positions = recipe.positions_at(arm, 48 * recipe.train_window(arm))
            if recipe.arms[arm].weights_of is not None and positions is not None:
                set_positions(model.host, positions)
            logits[arm] = model(ids).logits
            assert torch.isfinite(logits[arm]).all()
    assert recipe.label_of(arm)


def save_small(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Qwen2 of two layers, as `from_pretrained` reads it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_seed_decides_the_weights(tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = load_recipe("demo", "tiny")
    first, again, other = (build_model(recipe, "structural", seed, tokenizer).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    rope = build_model(recipe, "rope", 0, tokenizer).state_dict()
    shared = [name for name in rope if name in first]
    assert shared and all(torch.equal(rope[name], first[name]) for name in shared), "arms start from the same host"


def test_a_checkpoint_as_host(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = load_recipe("demo", "tiny")
    host = build_model(recipe, "rope", 0, tokenizer).detach()
    host.save_pretrained(tmp_path / "host")
    given = {
        **recipe.model_dump(exclude_none=True),
        "host": {"checkpoint": str(tmp_path / "host")},
        "match_parameters": False,
    }
    from_checkpoint = parse_recipe(given)
    assert from_checkpoint.host_config() is None
    assert set(matched_widths(from_checkpoint, tokenizer).values()) == {None}
    model = build_model(from_checkpoint, "structural", 5, tokenizer)
    loaded = model.host.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in host.state_dict().items())
    with pytest.raises(KeelError, match="cannot be loaded") as caught:
        build_model(parse_recipe({**given, "host": {"checkpoint": str(tmp_path / "nothing")}}), "rope", 0, tokenizer)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_some_weights_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = load_recipe("demo", "tiny")
    build_model(recipe, "rope", 0, tokenizer).detach().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    given = {**recipe.model_dump(exclude_none=True), "host": {"checkpoint": str(tmp_path)}, "match_parameters": False}
    with pytest.raises(KeelError, match=r"1 weights are missing, 'model\.norm\.weight' the first"):
        build_model(parse_recipe(given), "rope", 0, tokenizer)


def test_a_tokenizer_larger_than_the_checkpoint_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = load_recipe("demo", "tiny")
    build_model(recipe, "rope", 0, tokenizer).detach().save_pretrained(tmp_path)
    given = {**recipe.model_dump(exclude_none=True), "host": {"checkpoint": str(tmp_path)}, "match_parameters": False}
    tokenizer.add_tokens(["one", "more"])
    with pytest.raises(KeelError, match="has 28 embeddings, the tokenizer 30 entries"):
        build_model(parse_recipe(given), "rope", 0, tokenizer)
