"""What would go wrong after hours of training is told before anything is trained, with the name of the field."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from keel.errors import KeelError
from keel.experiment.before import check_before
from keel.training import Recipe, load_recipe
from keel.training.section import named_in


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with everything that gtca/main names, empty."""
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    for recipe in (load_recipe("gtca/main", scale) for scale in ("tiny", "small")):
        for section in (recipe.evaluation, recipe.data.questions, recipe.trees):
            for _, name in named_in(section):
                path = tmp_path / name.removeprefix("data:")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
    return tmp_path


def test_a_recipe_whose_files_are_there_passes(data: Path) -> None:
    recipe = load_recipe("gtca/main", "tiny")
    assert isinstance(recipe, Recipe)
    check_before(recipe)
    (data / "blimp").unlink()
    with pytest.raises(KeelError, match=r"^evaluation\.(blimp|leak)\.source: data root .* has no 'blimp'"):
        check_before(recipe)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("evaluation.syntax.train=/nope.conllu", "evaluation.syntax.train: /nope.conllu does not exist"),
        (
            "trees.sources={more: 'kell:x'}",
            "trees.sources.more: no source of trees is called 'kell:x'; did you mean 'keel:",
        ),
        ("trees.sources={more: 'keel:/nope'}", "trees.sources.more: keel:/nope: there is no file /nope"),
        (
            "arms.gtca.streams.tree.layers=[9]",
            r"arms.gtca.streams.tree: tree stream: layers=\(9,\); give layers of the host, 0 to 1",
        ),
        (
            "arms.capacity.streams.tree.lookup=fixd:2",
            "arms.capacity.streams.tree: no lookup of trees is called 'fixd:2'",
        ),
        ("arms.capacity.streams.tree.lookup=fixed:1", "a number of tokens of at least 2"),
    ],
)
def test_what_is_not_there_is_named(change: str, message: str, data: Path) -> None:
    recipe = load_recipe("gtca/main", "tiny", [change])
    with pytest.raises(KeelError, match=message):
        check_before(recipe)


def test_an_arm_has_the_host_that_it_borrows_and_one_of_other_weights_is_looked_at_too(data: Path) -> None:
    six = "arms.backbone.host={num_hidden_layers: 6}"
    check_before(load_recipe("gtca/main", "tiny", [six, "arms.gtca.streams.tree.layers=[5]"]))
    with pytest.raises(KeelError, match="layers of the host, 0 to 5"):
        check_before(load_recipe("gtca/main", "tiny", [six, "arms.gtca.streams.tree.layers=[6]"]))
    other = "arms.elsewhere={weights_of: capacity, streams: {tree: {lookup: 'cache:/nowhere.sqlite'}}}"
    with pytest.raises(KeelError, match=r"^arms.elsewhere.streams.tree: there is no cache of trees at /nowhere.sqlite"):
        check_before(load_recipe("gtca/main", "tiny", [other]))


def test_layers_are_those_of_a_checkpoint(data: Path, tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=3, hidden_size=8, num_attention_heads=2).save_pretrained(tmp_path / "host")
    recipe = load_recipe(
        "gtca/main", "small", [f"host.checkpoint={tmp_path / 'host'}", "arms.gtca.streams.tree.layers=[2, 3]"]
    )
    with pytest.raises(KeelError, match="layers of the host, 0 to 2"):
        check_before(recipe)
