"""What makes a recipe wrong beyond single fields: unknown names in open sections, fields that contradict."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from transformers import AutoConfig

from keel.data.corpora import CorpusConfig
from keel.data.disruptions import DisruptionConfig
from keel.data.languages import LANGUAGES
from keel.errors import KeelError, build_config, naming, suggest
from keel.hosts import FAMILIES
from keel.positions import Positions
from keel.streams import STREAMS
from keel.training.sections import Phase, Recipe, Task
from keel.training.signal_losses import LOSSES
from keel.training.simulation import Simulation
from keel.training.tree_checks import check_trees

ENCODER = "dstg"
_ARM_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


def parse_recipe(given: Mapping[str, Any]) -> Recipe:
    """Check a merged recipe (no ``scales`` left) and return it.  Raises: KeelError, naming the first wrong field."""
    try:
        recipe = Recipe.model_validate(_with_inherited_phases(given))
    except ValidationError as error:
        raise KeelError(_one_line(error)) from error
    _check(recipe)
    return recipe


def parse_simulation(given: Mapping[str, Any]) -> Simulation:
    """Check a merged recipe that trains nothing.  Raises: KeelError, naming the first wrong field."""
    try:
        simulation = Simulation.model_validate(given)
    except ValidationError as error:
        raise KeelError(_one_line(error)) from error
    for field, values in (("seeds", simulation.seeds), ("scalar_prior.spreads", simulation.scalar_prior.spreads)):
        if len(set(values)) != len(values):
            raise KeelError(f"{field}: each once, got {values}")
    return simulation


def _with_inherited_phases(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill what an arm's phase leaves out from the recipe's phase of the same name."""
    base = {
        phase["name"]: phase for phase in given.get("phases") or () if isinstance(phase, Mapping) and "name" in phase
    }
    arms = {}
    for name, arm in (given.get("arms") or {}).items():
        if isinstance(arm, Mapping) and isinstance(arm.get("phases"), list):
            phases = [{**base.get(p.get("name"), {}), **p} if isinstance(p, Mapping) else p for p in arm["phases"]]
            arm = {**arm, "phases": phases}
        arms[name] = arm
    return {**given, "arms": arms} if arms else given


def _one_line(error: ValidationError) -> str:
    """The first error of a recipe: the path of the field, what was expected, what was given."""
    first = error.errors()[0]
    location = ".".join(str(part) for part in first["loc"])
    if first["type"] == "unknown_field":
        field = first["ctx"]["field"]
        return f"{location}{'.' if location else ''}{field}: unknown field; {first['ctx']['hint']}"
    where = f"{location}: " if location else ""
    if first["type"] == "missing":
        return f"{where}missing; give it a value"
    message = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    shown = "" if isinstance(given, dict | list | BaseModel) else f", got {given!r}"
    return f"{where}{message[0].lower()}{message[1:]}{shown}"


def _check(recipe: Recipe) -> None:
    """Refuse what single fields cannot see: unknown names inside open sections, fields that contradict each other."""
    _check_masking(recipe)
    _check_data(recipe)
    _check_host(recipe)
    _check_targets(recipe)
    if len(set(recipe.seeds)) != len(recipe.seeds):
        raise KeelError(f"seeds: each seed once, got {recipe.seeds}")
    _check_phases(recipe.phases, "phases")
    for name in recipe.arms:
        _check_arm(recipe, name)
    _check_encoder(recipe)
    check_trees(recipe)


def _check_targets(recipe: Recipe) -> None:
    for target in () if recipe.reference is None else recipe.reference.targets:
        for arm in (target.arm, target.baseline):
            if arm is not None and arm not in recipe.arms:
                raise KeelError(
                    f"reference.targets: {target.says!r} is asked of no arm {arm!r}; {suggest(arm, recipe.arms)}"
                )


def _check_data(recipe: Recipe) -> None:
    corpora = {"data.corpus": recipe.data.corpus, **recipe.passages()}
    for where, fields in corpora.items():
        if fields is not None:
            _refuse_unknown(CorpusConfig, fields, where)
            with naming(where):
                build_config(CorpusConfig, fields, where)
    on_text = ("extrapolation", "last_word", "blocks", "geometry", "span", "robustness", "support", "selective")
    needs = dict.fromkeys(
        (*on_text, "selective_words", "posterior", "posterior_words", "signals", "dta", "faults"), "text"
    )
    of_encoders = ("masked", "position_probe", "heads", "inter_model", "linguistic", "glue", "squad", "holmes", "mteb")
    needs |= dict.fromkeys(of_encoders, "masked text")
    needs |= {"completion": "strings to complete", "attention_match": "the task markov"}
    task = recipe.data.task
    text = "text" if recipe.data.masking is None else "masked text"
    has = text if task is None else "the task markov" if task.language == "markov" else "strings to complete"
    for name, needed in needs.items():
        if getattr(recipe.evaluation, name) is not None and needed != has:
            raise KeelError(f"evaluation.{name}: is measured on {needed}, and data has {has}; remove one of the two")
    if recipe.evaluation.gates is not None and task is not None and task.language != "dyck":
        raise KeelError(
            f"evaluation.gates: on a task gates are held against bracket depth, and {task.language!r} has none; use dyck or text"
        )
    if recipe.evaluation.signals is not None:
        given = recipe.evaluation.signals.disruptions
        _refuse_unknown(DisruptionConfig, given, "evaluation.signals.disruptions")
        with naming("evaluation.signals.disruptions"):
            build_config(DisruptionConfig, given, "evaluation.signals.disruptions")
    if recipe.data.task is not None:
        _check_task(recipe.data.task)


def _check_task(task: Task) -> None:
    if task.language not in LANGUAGES:
        raise KeelError(f"data.task.language: unknown {task.language!r}; {suggest(task.language, LANGUAGES)}")
    _refuse_unknown(LANGUAGES[task.language], task.options, "data.task.options")
    with naming("data.task.options"):
        build_config(LANGUAGES[task.language], task.options, "data.task.options")


def _check_host(recipe: Recipe) -> None:
    host = recipe.host
    if ("family" in host) == ("checkpoint" in host):
        raise KeelError("host: give exactly one of family (a host from scratch) and checkpoint (name or path)")
    if "checkpoint" in host:
        extra = sorted(set(host) - {"checkpoint"})
        if extra:
            raise KeelError(
                f"host.{extra[0]}: a checkpoint brings its own sizes; remove this field, or give family instead"
            )
        if recipe.match_parameters:
            raise KeelError(
                "match_parameters: the width of a checkpoint cannot change; set it to false, or give host.family"
            )
        return
    family = host["family"]
    known_families = {*FAMILIES, ENCODER}
    if family not in known_families:
        raise KeelError(f"host.family: unknown {family!r}; {suggest(str(family), known_families)}")
    if "vocab_size" in host:
        raise KeelError("host.vocab_size: the tokenizer says how many entries there are; remove this field")
    _check_host_fields(family, host, "host")


def _check_host_fields(family: str, fields: Mapping[str, Any], where: str) -> None:
    known = {name for name in dir(AutoConfig.for_model(family)) if not name.startswith("_")}
    for field in fields:
        if field != "family" and field not in known:
            settings = {name for name in AutoConfig.for_model(family).to_dict() if not name.startswith("_")}
            raise KeelError(f"{where}.{field}: unknown field of {family}; {suggest(field, settings)}")


def _check_masking(recipe: Recipe) -> None:
    """Refuse an encoder without masked text, and masked text for anything else."""
    family = recipe.host.get("family", "of a checkpoint")
    if (family == ENCODER) != (recipe.data.masking is not None):
        advice = "is an encoder, which learns from masked text; add data.masking"
        raise KeelError(
            f"data.masking: the host {family!r} " + (advice if family == ENCODER else "is no encoder; remove it")
        )


def _check_encoder(recipe: Recipe) -> None:
    """Refuse what belongs to a language model where the host is an encoder, and the other way round."""
    if recipe.data.masking is None:
        for name in recipe.trained_arms():
            for phase in recipe.phases_of(name):
                if phase.bias_learning_rate is not None:
                    raise KeelError(f"arms.{name}, phase {phase.name!r}: bias_learning_rate is for encoders; remove it")
        return
    if recipe.evaluation.gates is not None:
        raise KeelError("evaluation.gates: an encoder has none; remove it")
    for name, arm in recipe.arms.items():
        given = [field for field in ("streams", "positions", "weights_of") if getattr(arm, field)]
        if given:
            raise KeelError(f"arms.{name}.{given[0]}: an encoder has none; say what differs in arms.{name}.host")
        with naming(f"arms.{name}.host"):
            config = recipe.host_config(name)
        assert config is not None
        for phase in recipe.phases_of(name):
            if phase.trainable != "all" or phase.label_smoothing or phase.stream_learning_rate is not None:
                raise KeelError(
                    f"arms.{name}, phase {phase.name!r}: trainable, label_smoothing and stream_learning_rate are not for encoders; "
                    "remove them"
                )
        if config.position in ("dstg", "ap"):
            _check_lengths(recipe, name, config.max_position_embeddings)
    _check_inter_model(recipe)


def _check_inter_model(recipe: Recipe) -> None:
    """Refuse a target that has no streams of its own, or another number of blocks than the arms that are to tell them."""
    inter = recipe.evaluation.inter_model
    if inter is None:
        return
    where = "evaluation.inter_model.target"
    if inter.target not in recipe.arms:
        raise KeelError(f"{where}: no arm {inter.target!r}; {suggest(inter.target, recipe.arms)}")
    configs = {name: recipe.host_config(name) for name in recipe.arms}
    if not getattr(configs[inter.target], "disentangled", False):
        raise KeelError(f"{where}: arm {inter.target!r} has one stream; name one with position: dstg")
    if len({config.num_hidden_layers for config in configs.values() if config is not None}) > 1:
        raise KeelError(f"{where}: the arms have different numbers of blocks; give them the same")


def _check_lengths(recipe: Recipe, arm: str, most: int) -> None:
    """Refuse what an encoder with a table of ``most`` positions is to read but cannot."""
    read = {f"arms.{arm}, phase {phase.name!r}: window": phase.window for phase in recipe.phases_of(arm)}
    wanted = recipe.evaluation
    if wanted.masked is not None:
        read["evaluation.masked.length:"] = wanted.masked.length
    for name in ("linguistic", "glue", "squad", "holmes", "mteb"):
        if (section := getattr(wanted, name)) is not None:
            read[f"evaluation.{name}.length:"] = section.length
    for name in ("position_probe", "heads", "inter_model"):
        if (probe := getattr(wanted, name)) is not None:
            read[f"evaluation.{name}.length, with [CLS] and [SEP]:"] = probe.length + 2
    for where, length in read.items():
        if length > most:
            raise KeelError(
                f"{where} {length} is longer than host.max_position_embeddings {most}; shorten one or lengthen the other"
            )


def _check_dynamics(recipe: Recipe, phase: Phase, where: str) -> None:
    """Refuse what a phase's ``dynamics`` name and there is not."""
    wanted = phase.dynamics
    if wanted is None:
        return
    at = f"{where}, phase {phase.name!r}: dynamics"
    if recipe.data.task is not None or recipe.data.masking is not None:
        raise KeelError(f"{at}: disruptions are of text to continue; remove it, or data.task and data.masking")
    if phase.label_smoothing:
        raise KeelError(f"{at}: label_smoothing is for plain text; remove one of the two")
    for name in wanted.losses:
        if name not in LOSSES:
            raise KeelError(f"{at}.losses: unknown {name!r}; {suggest(name, LOSSES)}")
    _refuse_unknown(DisruptionConfig, wanted.disruptions, f"{at}.disruptions")
    with naming(f"{at}.disruptions"):
        build_config(DisruptionConfig, wanted.disruptions, f"{at}.disruptions")
    if not wanted.base and not any(wanted.losses.values()):
        raise KeelError(f"{at}: base is 0 and there are no losses; nothing would be learnt")


def _check_phases(phases: Iterable[Phase], where: str) -> None:
    names = [phase.name for phase in phases]
    for name in names:
        if not _ARM_NAME.fullmatch(name) or names.count(name) > 1:
            raise KeelError(f"{where}: phase name {name!r}: each once, of a-z, 0-9 and _")


def _check_arm(recipe: Recipe, name: str) -> None:
    arm, where = recipe.arms[name], f"arms.{name}"
    if not _ARM_NAME.fullmatch(name):
        raise KeelError(f"{where}: an arm's name is also its folder: use a-z, 0-9 and _")
    if arm.host and "checkpoint" in recipe.host:
        raise KeelError(f"{where}.host: a checkpoint brings its own sizes; remove it, or give host.family instead")
    if {"family", "vocab_size"} & set(arm.host):
        raise KeelError(f"{where}.host: family and vocabulary are the same for all arms; remove them here")
    if arm.host:
        _check_host_fields(str(recipe.host["family"]), arm.host, f"{where}.host")
    if arm.weights_of is None:
        for stream, fields in arm.stream_configs().items():
            _check_stream(f"{where}.streams.{stream}", fields)
    if arm.positions is not None:
        _check_positions(recipe, name)
    if arm.match_parameters_of is not None:
        _check_matched(recipe, name, arm.match_parameters_of)
    if arm.weights_of is not None:
        _check_borrowed(recipe, name)
        return
    if arm.embedding_scale is not None:
        raise KeelError(f"{where}.embedding_scale: only for an arm with weights_of; a trained arm learns its own")
    if arm.host_alone:
        raise KeelError(
            f"{where}.host_alone: only for an arm with weights_of; one without streams is a host alone already"
        )
    if arm.weights_after is not None:
        raise KeelError(f"{where}.weights_after: only for an arm with weights_of; name the arm whose weights these are")
    _check_phases(recipe.phases_of(name), f"{where}.phases")
    for phase in recipe.phases_of(name):
        _check_dynamics(recipe, phase, where)
        if phase.trainable in ("streams", "adapters_and_streams") and not arm.streams:
            raise KeelError(
                f"{where}: phase {phase.name!r} trains streams only, but this arm has none; give it streams or phases"
            )


def _check_matched(recipe: Recipe, name: str, model: str) -> None:
    where, trained = f"arms.{name}.match_parameters_of", [other for other in recipe.trained_arms() if other != name]
    if model not in trained:
        raise KeelError(f"{where}: no other trained arm {model!r}; {suggest(model, trained)}")
    if recipe.match_parameters or "checkpoint" in recipe.host or name not in recipe.trained_arms():
        raise KeelError(
            f"{where}: only for a trained arm with a host from scratch, in a recipe without match_parameters; remove it"
        )


def _check_stream(where: str, fields: Mapping[str, Any]) -> None:
    kind = fields["type"]
    if kind not in STREAMS:
        raise KeelError(f"{where}.type: unknown stream {kind!r}; {suggest(str(kind), STREAMS)}")
    given = {name: value for name, value in fields.items() if name != "type"}
    _refuse_unknown(STREAMS[kind].config_class, given, where)
    with naming(where):
        build_config(STREAMS[kind].config_class, given, where)


def _check_positions(recipe: Recipe, name: str) -> None:
    arm = recipe.arms[name]
    given = arm.positions or {}
    if given.get("scheme") == "yarn" and given.get("factor") is None and arm.weights_of is None:
        raise KeelError(
            f"arms.{name}.positions.factor: missing; without weights_of, yarn needs the factor to train with"
        )
    where = f"arms.{name}.positions"
    _refuse_unknown(Positions, given, where)
    if arm.weights_of in (None, *recipe.arms):
        with naming(where):
            recipe.positions_at(name, recipe.train_window(name))


def _check_borrowed(recipe: Recipe, name: str) -> None:
    arm = recipe.arms[name]
    lender = arm.weights_of
    where = f"arms.{name}.weights_of"
    if lender not in recipe.arms:
        raise KeelError(
            f"{where}: no arm {lender!r}; {suggest(str(lender), [other for other in recipe.arms if other != name])}"
        )
    if recipe.arms[lender].weights_of is not None:
        raise KeelError(
            f"{where}: {lender!r} has no weights of its own; name {recipe.arms[lender].weights_of!r}, which is trained"
        )
    if arm.phases is not None:
        raise KeelError(f"arms.{name}.phases: an arm with weights_of is not trained; remove one of the two")
    for stream, fields in recipe.streams_of(name).items():
        _check_stream(f"arms.{name}.streams.{stream}", fields)
    known = [phase.name for phase in recipe.phases_of(lender)]
    if arm.weights_after is not None and arm.weights_after not in known[:-1]:
        raise KeelError(
            f"arms.{name}.weights_after: {lender!r} has no phase {arm.weights_after!r} before its last; "
            f"{suggest(arm.weights_after, known[:-1])}"
        )
    if arm.host_alone and (arm.streams or not recipe.arms[lender].streams):
        raise KeelError(
            f"arms.{name}.host_alone: takes the streams of {lender!r} away, which has {len(recipe.arms[lender].streams)}, and adds none; "
            "remove it, or this arm's streams"
        )
    if not (arm.positions or arm.embedding_scale or arm.weights_after or arm.streams or arm.host_alone):
        raise KeelError(
            f"arms.{name}: with weights_of and nothing else it is {lender!r} again; add positions, embedding_scale, weights_after, "
            "host_alone or streams"
        )


def _refuse_unknown(config_class: type, given: Mapping[str, Any], where: str) -> None:
    known = [field.name for field in dataclasses.fields(config_class)]
    for field in given:
        if field not in known:
            raise KeelError(f"{where}.{field}: unknown field; {suggest(field, known)}")
