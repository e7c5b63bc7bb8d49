"""Recipes: each that comes with Keel parses at every scale; what is misspelt or contradictory is refused by name."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.errors import KeelError
from keel.positions import Positions
from keel.training.checks import parse_simulation
from keel.training.recipe import (
    Recipe,
    find_recipe,
    list_recipes,
    load_any,
    load_recipe,
    merge,
    parse_recipe,
    recipe_scales,
    recipes_folder,
)

RECIPES = sorted(recipes_folder().rglob("*.yaml"))
EVERY_SCALE = [(path, scale) for path in RECIPES for scale in yaml.safe_load(path.read_text())["scales"]]

BASE: dict[str, Any] = {
    "name": "made_up",
    "title": "A recipe of this test",
    "data": {"corpus": {"source": "stdlib"}, "tokenizer": {"bpe": 300}},
    "host": {
        "family": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    "arms": {
        "rope": {},
        "structural": {"streams": {"structural": {"cell": "gru"}}},
        "window": {"weights_of": "rope", "positions": {"scheme": "window", "window": 32}},
        "yarn": {"weights_of": "rope", "positions": {"scheme": "yarn"}},
    },
    "phases": [{"name": "train", "steps": 10, "learning_rate": "1e-3", "window": 64}],
    "evaluation": {"extrapolation": {"lengths": [64, 128]}},
}


def changed(**changes: Any) -> dict[str, Any]:
    """The base recipe with ``a__b=value`` changes."""
    given = copy.deepcopy(BASE)
    for path, value in changes.items():
        *parents, last = path.split("__")
        target: Any = given
        for key in parents:
            target = target[int(key)] if isinstance(target, list) else target[key]
        target[int(last) if isinstance(target, list) else last] = value
    return given


@pytest.mark.parametrize(("path", "scale"), EVERY_SCALE, ids=lambda value: getattr(value, "stem", value))
def test_every_recipe_parses_at_every_scale(path: Path, scale: str) -> None:
    recipe = load_any(path, scale)
    assert recipe.scale == scale
    assert recipe.name == path.relative_to(recipes_folder()).with_suffix("").as_posix()
    assert recipe.expected_minutes.get(scale), "every scale says how long it takes"
    assert recipe.serves
    again = (parse_recipe if isinstance(recipe, Recipe) else parse_simulation)(yaml.safe_load(recipe.to_yaml()))
    assert again == recipe


def test_recipes_are_found_by_name_and_by_path() -> None:
    assert {"demo", "s_former/wikitext103_extrapolation"} <= set(list_recipes())
    assert len(RECIPES) == len(list_recipes())
    for name in list_recipes():
        assert find_recipe(name) == find_recipe(f"{name}.yaml") == find_recipe(str(find_recipe(name)))
    assert recipe_scales("demo") == ["tiny", "small"]
    with pytest.raises(KeelError, match="did you mean 'demo'"):
        find_recipe("demmo")


def test_the_paper_scale_has_the_paper_sizes() -> None:
    # S-Former, App. A.4 and A.5.
    recipe = load_recipe("s_former/wikitext103_extrapolation", "paper")
    config, phase = recipe.host_config(), recipe.phases[0]
    assert config is not None
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (256, 4, 8)
    assert config.intermediate_size == 1024
    assert config.attention_dropout == config.hidden_dropout == 0.1
    assert config.rope_parameters["rope_theta"] == 50_000 and not config.use_parallel_residual
    assert (phase.window, phase.window_stride, phase.batch_size, phase.warmup_steps) == (256, 64, 64, 2000)
    assert (phase.learning_rate, phase.label_smoothing, phase.clip) == (1e-4, 0.03, 1.0)


def test_the_reference_holds_tables_2_and_4() -> None:
    recipe = load_recipe("s_former/wikitext103_extrapolation", "paper")
    assert recipe.reference is not None
    printed = recipe.reference.values
    assert recipe.evaluation.extrapolation is not None
    lengths = [f"ppl@{length}" for length in recipe.evaluation.extrapolation.lengths]
    values = {arm: {name: x for name, x in row.items() if name.startswith("ppl@")} for arm, row in printed.items()}
    assert all(list(values[arm]) == lengths for arm in ("rope", "fusion", "structural"))
    # The growths that the paper's text speaks of.
    assert math.isclose(values["rope"]["ppl@40960"] / values["rope"]["ppl@256"], 9.787, abs_tol=1e-3)
    assert math.isclose(values["structural"]["ppl@40960"] / values["structural"]["ppl@256"], 2.312, abs_tol=1e-3)
    # Column sums, so that no digit was mistyped.
    sums = [round(sum(values[arm].values()), 2) for arm in ("rope", "fusion", "structural")]
    assert sums == [3398.28, 1479.71, 791.49]
    ablations = load_recipe("s_former/ablations", "small").reference
    assert ablations is not None
    geometry = {name: x for name, x in ablations.values["per_layer"].items() if name.startswith("geometry.")}
    by_metric = {metric: [geometry[f"geometry.{metric}@layer{layer}"] for layer in range(4)] for metric in _TABLE_4}
    assert {metric: round(sum(values), 3) for metric, values in by_metric.items()} == _TABLE_4
    assert len(geometry) == 12


_TABLE_4 = {"relative_strength": 1.732, "orthogonality": 3.751, "temporal_consistency": 2.054}  # column sums


def asked(**fields: Any) -> dict[str, Any]:
    """A reference with one target."""
    target = {"says": "It is so", "metric": "ppl@64", "arm": "rope", **fields}
    return {"paper": "P", "table": "T", "values": {}, "targets": [target]}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "target of no arm": (
        changed(reference=asked(least=1.0, baseline="ropes")),
        "reference.targets: 'It is so' is asked of no arm 'ropes'; did you mean 'rope'?",
    ),
    "target without a bound": (changed(reference=asked()), "target 'It is so': give one of least and most"),
    "ratio to nothing": (changed(reference=asked(most=1.0, ratio=True)), "target 'It is so': a ratio needs a baseline"),
    "field": (changed(sedes=[0]), "sedes: unknown field; did you mean 'seeds'?"),
    "nested field": (changed(phases__0__stpes=3), "phases.0.stpes: unknown field; did you mean 'steps'?"),
    "arm field": (changed(arms__rope__lable="x"), "arms.rope.lable: unknown field; did you mean 'label'?"),
    "stream field": (
        changed(arms__structural__streams__structural={"cel": "gru"}),
        "arms.structural.streams.structural.cel: unknown field; did you mean 'cell'?",
    ),
    "stream value": (
        changed(arms__structural__streams__structural={"cell": "gruu"}),
        "arms.structural.streams.structural: structural stream: cell='gruu'; did you mean 'gru'?",
    ),
    "stream type": (
        changed(arms__structural__streams={"structurel": {}}),
        "arms.structural.streams.structurel.type: unknown stream 'structurel'; did you mean 'structural'?",
    ),
    "positions field": (
        changed(arms__window__positions={"scheme": "window", "windw": 3}),
        "arms.window.positions.windw: unknown field; did you mean 'window'?",
    ),
    "positions value": (
        changed(arms__window__positions={"scheme": "windows", "window": 3}),
        "arms.window.positions: positions: unknown scheme 'windows'; did you mean 'window'?",
    ),
    "corpus field": (changed(data__corpus={"sorce": "x"}), "data.corpus.sorce: unknown field; did you mean 'source'?"),
    "corpus value": (
        changed(data__corpus={"source": "stdlib", "valid_fraction": 2.0}),
        "data.corpus: valid_fraction 2.0 and test_fraction 0.05 must each be above 0",
    ),
    "host field": (
        changed(host__hiden_size=3),
        "host.hiden_size: unknown field of llama; did you mean 'hidden_size'?",
    ),
    "host family": (changed(host__family="lama"), "host.family: unknown 'lama'; did you mean 'llama'?"),
    "host twice": (changed(host__checkpoint="x"), "host: give exactly one of family"),
    "missing": ({k: v for k, v in BASE.items() if k != "phases"}, "phases: missing; give it a value"),
    "type": (changed(phases__0__steps="many"), "phases.0.steps: input should be a valid integer"),
    "weights of nobody": (
        changed(arms__window__weights_of="rop"),
        "arms.window.weights_of: no arm 'rop'; did you mean 'rope'?",
    ),
    "weights of a borrower": (
        changed(arms__window__weights_of="yarn"),
        "arms.window.weights_of: 'yarn' has no weights of its own; name 'rope'",
    ),
    "phases of a borrower": (
        changed(arms__window__phases=[BASE["phases"][0]]),
        "arms.window.phases: an arm with weights_of is not trained",
    ),
    "streams of a borrower": (
        changed(arms__window__streams={"structural": {"gat": 1}}),
        "arms.window.streams.structural.gat: unknown field; did you mean 'gate'?",
    ),
    "a phase that the lender does not have": (
        changed(arms__window__weights_after="trian"),
        "arms.window.weights_after: 'rope' has no phase 'trian' before its last",
    ),
    "a phase of a trained arm": (
        changed(arms__rope__weights_after="train"),
        "arms.rope.weights_after: only for an arm with weights_of",
    ),
    "borrower without change": (
        changed(arms__window__positions=None),
        "arms.window: with weights_of and nothing else it is 'rope' again",
    ),
    "the host alone of a trained arm": (
        changed(arms__rope__host_alone=True),
        "arms.rope.host_alone: only for an arm with weights_of",
    ),
    "the host alone of a host": (
        changed(arms__window__host_alone=True),
        "arms.window.host_alone: takes the streams of 'rope' away, which has 0",
    ),
    "embeddings of a trained arm": (
        changed(arms__rope__embedding_scale=2.0),
        "arms.rope.embedding_scale: only for an arm with weights_of",
    ),
    "yarn to train": (
        changed(arms__rope__positions={"scheme": "yarn"}),
        "arms.rope.positions.factor: missing; without weights_of",
    ),
    "no streams to train": (
        changed(phases__0__trainable="streams"),
        "arms.rope: phase 'train' trains streams only, but this arm has none",
    ),
    "two tokenizers": (
        changed(data__tokenizer={"bpe": 300, "pretrained": "x"}),
        "data.tokenizer: give exactly one of bpe",
    ),
    "stride": (changed(phases__0__stride=65), "phases.0: stride 65 would skip text: it is longer than window 64"),
    "warm-up": (changed(phases__0__warmup_steps=10), "phases.0: warmup_steps 10 leave nothing of steps 10"),
    "accumulation": (changed(phases__0__accumulation=3), "phases.0: batch_size 16 is no multiple of accumulation 3"),
    "smoothing": (
        changed(phases__0__label_smoothing=1.0),
        "phases.0.label_smoothing: input should be less than 1, got 1.0",
    ),
    "lengths": (changed(evaluation__extrapolation__lengths=[128, 64]), "evaluation.extrapolation: lengths must ascend"),
    "seeds": (changed(seeds=[1, 1]), "seeds: each seed once"),
    "arm name": (changed(arms={"../up": {}}), "arms.../up: an arm's name is also its folder"),
    "phase twice": (changed(phases=[BASE["phases"][0]] * 2), "phases: phase name 'train': each once"),
    "checkpoint sizes": (
        changed(host={"checkpoint": "x", "hidden_size": 3}),
        "host.hidden_size: a checkpoint brings its own sizes",
    ),
    "checkpoint width": (
        changed(host={"checkpoint": "x"}, match_parameters=True),
        "match_parameters: the width of a checkpoint",
    ),
    "vocabulary": (changed(host__vocab_size=100), "host.vocab_size: the tokenizer says how many entries there are"),
}


def test_the_base_of_these_cases_is_right() -> None:
    recipe = parse_recipe(BASE)
    assert recipe.trained_arms() == ["rope", "structural"]
    assert recipe.phases[0].learning_rate == 1e-3, "YAML reads 1e-3 as text"


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_wrong_recipes_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError) as caught:
        parse_recipe(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_positions_follow_the_evaluated_length_for_yarn_alone() -> None:
    recipe = parse_recipe(BASE)
    assert recipe.positions_at("rope", 640) is None
    assert recipe.positions_at("window", 640) == Positions(scheme="window", window=32)
    assert recipe.positions_at("yarn", 640) == Positions(scheme="yarn", factor=10.0, original_length=64)
    assert recipe.positions_at("yarn", 32) == Positions(scheme="yarn", factor=1.0, original_length=64)


def test_merging_goes_into_mappings_and_named_lists_and_null_removes() -> None:
    base = {"a": {"x": 1, "y": 2}, "phases": [{"name": "p", "steps": 1, "window": 4}], "lengths": [1, 2], "gone": 1}
    change = {"a": {"y": 3}, "phases": [{"name": "p", "steps": 5}, {"name": "q"}], "lengths": [7], "gone": None}
    before = copy.deepcopy(base)
    assert merge(base, change) == {
        "a": {"x": 1, "y": 3},
        "phases": [{"name": "p", "steps": 5, "window": 4}, {"name": "q"}],
        "lengths": [7],
    }
    assert base == before


def write(path: Path, given: Any) -> Path:
    path.write_text(given if isinstance(given, str) else yaml.safe_dump(given))
    return path


def test_overrides_come_last_and_reach_entries_of_lists(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", {**BASE, "scales": {"tiny": {"seeds": [5]}, "small": {}}})
    sets = ["phases.train.steps=3", "phases.0.window=32", "seeds=[1, 2]", "host.rms_norm_eps=1e-5", "arms.yarn=null"]
    recipe = load_recipe(path, "tiny", sets)
    assert (recipe.phases[0].steps, recipe.phases[0].window, recipe.seeds) == (3, 32, [1, 2])
    assert "yarn" not in recipe.arms
    assert load_recipe(path, "tiny").seeds == [5]
    assert load_recipe(path).scale == "small"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "expected a.b=value"),
        ("a..b=1", "expected a.b=value"),
        ("title.x=1", "title is a value, not a mapping"),
        ("phases.trian.steps=1", "no entry 'trian'; did you mean 'train'?"),
        ("seeds=[1", "the value is not YAML"),
        ("phases.train.step=1", "phases.0.step: unknown field; did you mean 'steps'?"),
    ],
)
def test_wrong_overrides_are_refused(tmp_path: Path, override: str, message: str) -> None:
    path = write(tmp_path / "r.yaml", BASE)
    with pytest.raises(KeelError) as caught:
        load_recipe(path, overrides=[override])
    assert message in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "not YAML"),
        ("- a", "expected a mapping of recipe fields, got list"),
        ("", "expected a mapping of recipe fields, got NoneType"),
        ({**BASE, "scales": {"tiny": {}, "small": {}}}, "no scale 'tinny'; did you mean 'tiny'?"),
        ({**BASE, "scales": [1]}, "scales: expected a mapping"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(KeelError) as caught:
        load_recipe(write(tmp_path / "r.yaml", content), "tinny")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(KeelError, match="not UTF-8"):
        load_recipe(path)


def test_a_resolved_recipe_reads_back_with_its_scale(tmp_path: Path) -> None:
    resolved: Recipe = load_recipe("demo", "tiny", ["seeds=[3]"])
    assert load_recipe(write(tmp_path / "r.yaml", resolved.to_yaml())) == resolved


def test_a_phase_of_an_arm_inherits_what_it_leaves_out() -> None:
    base = BASE["phases"][0]
    recipe = parse_recipe(changed(arms__rope__phases=[{"name": base["name"], "neftune_alpha": 5.0}]))
    (phase,) = recipe.phases_of("rope")
    assert phase == recipe.phases[0].model_copy(update={"neftune_alpha": 5.0})
    with pytest.raises(KeelError, match=r"arms.rope.phases.0.steps: missing"):
        parse_recipe(changed(arms__rope__phases=[{"name": "another", "learning_rate": 1e-3}]))
