"""A recipe: arms × seeds × phases over one corpus, read from YAML and checked before anything runs.

A recipe file holds the base values and, under ``scales``, what each scale changes (``tiny`` for tests, ``small`` for
this machine, ``paper`` for the paper's sizes). ``load_recipe`` merges one scale and the caller's overrides into it
and returns a ``Recipe``, in which every field is known, every name refers to something and nothing contradicts
anything else.

Merging: mappings merge key by key, lists of named entries (``phases``) merge by name, all else is replaced; ``null``
removes a key.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from transformers import AutoConfig, PreTrainedConfig

from keel.data.corpora import CorpusConfig
from keel.errors import KeelError, build_config, suggest
from keel.hosts import FAMILIES
from keel.positions import Positions
from keel.streams import STREAMS

DEFAULT_SCALE = "small"
_ARM_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """One mapping of a recipe; a field that it does not know is an error that names the nearest one that it does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            for name in given:
                if name not in cls.model_fields:
                    raise PydanticCustomError(
                        "unknown_field", "{field}", {"field": str(name), "hint": suggest(str(name), cls.model_fields)}
                    )
        return given


class Tokenizer(Section):
    """``bpe``: train a byte-level BPE of this many entries; ``pretrained``: take that of this name or folder."""

    bpe: Annotated[int, Field(ge=258)] | None = None
    pretrained: str | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Tokenizer:
        if (self.bpe is None) == (self.pretrained is None):
            raise ValueError("give exactly one of bpe (number of entries) and pretrained (name or path)")
        return self


class Data(Section):
    """The text and how it becomes tokens; ``corpus`` has the fields of ``keel.data.corpora.CorpusConfig``."""

    corpus: dict[str, Any]
    tokenizer: Tokenizer

    def corpus_config(self) -> CorpusConfig:
        """Return the corpus section as the data room's configuration."""
        return build_config(CorpusConfig, self.corpus, "data.corpus")


class Arm(Section):
    """One competitor.

    ``streams`` maps a name to a stream's fields (``type`` defaults to the name). ``positions`` has the fields of
    ``keel.positions.Positions``. An arm with ``weights_of`` is not trained: it is that arm, evaluated with other
    positions.
    """

    label: str | None = None
    streams: dict[str, dict[str, Any]] = {}
    positions: dict[str, Any] | None = None
    weights_of: str | None = None
    phases: list[Phase] | None = None

    def stream_configs(self) -> dict[str, dict[str, Any]]:
        """Return the streams with their type spelled out, as ``KeelConfig`` stores them."""
        return {name: {"type": name, **fields} for name, fields in self.streams.items()}


class Phase(Section):
    """One stretch of training with its own trainer.

    Attributes:
        steps: optimizer steps.
        batch_size: windows a step, over all processes and accumulated micro-batches.
        accumulation: micro-batches that a step's batch is cut into.
        window, stride: length of a training window and distance between starts, tokens; stride defaults to the window.
        learning_rate: peak; linear warm-up over ``warmup_steps``, then a cosine to zero at ``steps``.
        weight_decay: of AdamW, on matrices only (no biases, norms).
        clip: largest gradient norm; null for none.
        label_smoothing: share of the target spread evenly over the vocabulary, 0 <= x < 1.
        trainable: what learns: ``all``, ``streams`` or ``host``.
        precision: ``fp32``, or ``bf16`` for autocast.
        validate_every: steps between points of the validation curve; the last step always has one.
        checkpoint_every: steps between checkpoints.
    """

    name: str
    steps: Count
    batch_size: Count = 16
    accumulation: Count = 1
    window: Annotated[int, Field(ge=2)] = 256
    stride: Count | None = None
    learning_rate: Positive
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: NonNegative = 0.1
    clip: Positive | None = 1.0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    trainable: Literal["all", "streams", "host"] = "all"
    precision: Literal["fp32", "bf16"] = "fp32"
    validate_every: Count = 100
    checkpoint_every: Count = 100

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        if self.batch_size % self.accumulation:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of accumulation {self.accumulation}")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leave nothing of steps {self.steps}")
        if self.stride is not None and self.stride > self.window:
            raise ValueError(f"stride {self.stride} would skip text: it is longer than window {self.window}")
        return self

    @property
    def window_stride(self) -> int:
        """Tokens between the starts of two windows."""
        return self.window if self.stride is None else self.stride


Arm.model_rebuild()


class Extrapolation(Section):
    """Perplexity and bits per byte of the same tokens at several lengths; growth is measured from the first.

    Attributes:
        lengths: context lengths in tokens, ascending.
        segments: stretches of text that are evaluated; each is as long as the longest length, in tokens.
        split: ``valid`` or ``test``.
        token_budget: most tokens in one forward pass of the shorter lengths.
    """

    lengths: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    segments: Count = 2
    split: Literal["valid", "test"] = "test"
    token_budget: Count = 16384

    @model_validator(mode="after")
    def _ascending(self) -> Extrapolation:
        if sorted(set(self.lengths)) != self.lengths:
            raise ValueError(f"lengths must ascend without repeats, got {self.lengths}")
        return self


class Evaluation(Section):
    """What is measured on the trained arms."""

    extrapolation: Extrapolation


class PaperReference(Section):
    """What the paper printed: ``values`` by arm, then by metric."""

    paper: str
    table: str
    note: str = ""
    values: dict[str, dict[str, float]]


class Recipe(Section):
    """One scale of a recipe, complete and free of contradictions."""

    name: str
    title: str
    serves: str = ""
    scale: str = DEFAULT_SCALE
    expected_minutes: dict[str, NonNegative] = {}
    reference: PaperReference | None = None
    data: Data
    host: dict[str, Any]
    match_parameters: bool = False
    arms: Annotated[dict[str, Arm], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)] = [0]
    phases: Annotated[list[Phase], Field(min_length=1)]
    evaluation: Evaluation

    def trained_arms(self) -> list[str]:
        """Return the names of the arms that have weights of their own."""
        return [name for name, arm in self.arms.items() if arm.weights_of is None]

    def phases_of(self, arm: str) -> list[Phase]:
        """Return the phases that ``arm`` trains with."""
        return self.arms[arm].phases or self.phases

    def streams_of(self, arm: str) -> dict[str, dict[str, Any]]:
        """Return the streams of ``arm``, or of the arm whose weights it uses."""
        return self.arms[self.arms[arm].weights_of or arm].stream_configs()

    def label_of(self, arm: str) -> str:
        """Return what people call ``arm``."""
        return self.arms[arm].label or arm

    def train_window(self, arm: str) -> int:
        """Return the length of the windows that the weights of ``arm`` were last trained on."""
        return self.phases_of(self.arms[arm].weights_of or arm)[-1].window

    def positions_at(self, arm: str, length: int) -> Positions | None:
        """Return the positions of ``arm`` when it reads ``length`` tokens; None leaves the host's own.

        For yarn, ``original_length`` is by default the training window and ``factor`` the ratio of ``length`` to it,
        at least 1.
        """
        given = self.arms[arm].positions
        if given is None:
            return None
        if given.get("scheme") == "yarn":
            original = given.get("original_length", self.train_window(arm))
            given = {"original_length": original, "factor": max(1.0, length / original), **given}
        return build_config(Positions, given, f"arms.{arm}.positions")

    def host_config(self) -> PreTrainedConfig | None:
        """Return the configuration of a host that is made from scratch; None where it comes from a checkpoint."""
        if "checkpoint" in self.host:
            return None
        fields = {name: value for name, value in self.host.items() if name != "family"}
        return AutoConfig.for_model(self.host["family"], **fields)

    def to_yaml(self) -> str:
        """Return the recipe as a YAML file that ``load_recipe`` reads back to the same recipe."""
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True, width=120)


def load_recipe(name_or_path: str | Path, scale: str | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        name_or_path: a file, or the name of a recipe that comes with Keel (``demo``).
        scale: one of the file's ``scales``; by default ``small``, or what a resolved recipe was resolved to.
        overrides: ``a.b=value`` strings, applied last; values are YAML, entries of lists go by name or number.
    Raises: KeelError in one line: the file, the path of the first wrong field, what is valid.
    """
    path = find_recipe(name_or_path)
    given = _read_yaml(path)
    try:
        resolved = _at_scale(given, scale)
        for override in overrides:
            resolved = _with_override(resolved, override)
        return parse_recipe(resolved)
    except KeelError as error:
        raise KeelError(f"{path}: {error}") from error


def parse_recipe(given: Mapping[str, Any]) -> Recipe:
    """Check a merged recipe (no ``scales`` left) and return it.  Raises: KeelError, naming the first wrong field."""
    try:
        recipe = Recipe.model_validate(given)
    except ValidationError as error:
        raise KeelError(_one_line(error)) from error
    _check(recipe)
    return recipe


def recipes_folder() -> Path:
    """Return the folder of the recipes that come with Keel: the checkout's, or the package's own copy."""
    package = Path(__file__).parents[1]
    checkout = package.parents[1] / "recipes"
    return checkout if (checkout / "demo.yaml").is_file() else package / "recipes"


def list_recipes() -> list[str]:
    """Return the names of the recipes that come with Keel, each its path under the folder without ``.yaml``."""
    folder = recipes_folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def find_recipe(name_or_path: str | Path) -> Path:
    """Return the file of a recipe given by its path or by its name.  Raises: KeelError, naming the nearest recipe."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    named = recipes_folder() / f"{str(name_or_path).removesuffix('.yaml')}.yaml"
    if named.is_file():
        return named
    raise KeelError(
        f"no recipe {str(name_or_path)!r}: give a file or a name; {suggest(str(name_or_path), list_recipes())}"
    )


def recipe_scales(name_or_path: str | Path) -> list[str]:
    """Return the scales that a recipe file offers."""
    return list(_read_yaml(find_recipe(name_or_path)).get("scales") or {DEFAULT_SCALE: {}})


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` merged in; neither is altered. See the module's docstring for the rules."""
    merged = copy.deepcopy(dict(base))
    for key, change in changes.items():
        before = merged.get(key)
        if change is None:
            merged.pop(key, None)
        elif isinstance(before, Mapping) and isinstance(change, Mapping):
            merged[key] = merge(before, change)
        elif _all_named(before) and _all_named(change):
            merged[key] = _merge_named(before, change)
        else:
            merged[key] = copy.deepcopy(change)
    return merged


def _merge_named(base: list[dict[str, Any]], changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {entry["name"]: entry for entry in base}
    for entry in changes:
        by_name[entry["name"]] = merge(by_name.get(entry["name"], {}), entry)
    return list(by_name.values())


def _all_named(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, Mapping) and "name" in entry for entry in value)
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeelError(f"{path}: cannot be read ({error.strerror}); give the path of a recipe") from error
    except UnicodeDecodeError as error:
        raise KeelError(f"{path}: not UTF-8 text (byte {error.start}); a recipe is a YAML file") from error
    except yaml.YAMLError as error:
        raise KeelError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(given, dict):
        raise KeelError(f"{path}: expected a mapping of recipe fields, got {type(given).__name__}")
    return given


def _at_scale(given: dict[str, Any], scale: str | None) -> dict[str, Any]:
    base = {key: value for key, value in given.items() if key != "scales"}
    scales = given.get("scales")
    if scales is None:
        scales = {base.get("scale", DEFAULT_SCALE): {}}
    elif not isinstance(scales, Mapping):
        raise KeelError(f"scales: expected a mapping of scale to changes, got {scales!r}")
    default = next(iter(scales)) if DEFAULT_SCALE not in scales else DEFAULT_SCALE
    chosen = default if scale is None else scale
    if chosen not in scales:
        raise KeelError(f"no scale {chosen!r}; {suggest(chosen, map(str, scales))}")
    return {**merge(base, scales[chosen] or {}), "scale": chosen}


def _with_override(given: dict[str, Any], override: str) -> dict[str, Any]:
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise KeelError(f"override {override!r}: expected a.b=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise KeelError(f"override {override!r}: the value is not YAML ({' '.join(str(error).split())})") from error
    changed = copy.deepcopy(given)
    _assign(changed, keys, value, override)
    return changed


def _assign(target: Any, keys: list[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(target, list):
            index = _entry(target, key, override)
            if last:
                target[index] = value
            target = target[index]
        elif isinstance(target, dict):
            if last and value is None:
                target.pop(key, None)
            elif last:
                target[key] = value
            else:
                target = target.setdefault(key, {})
        else:
            raise KeelError(f"override {override!r}: {'.'.join(keys[:depth])} is a value, not a mapping")


def _entry(entries: list[Any], key: str, override: str) -> int:
    names = [
        str(entry["name"]) if isinstance(entry, Mapping) and "name" in entry else str(i)
        for i, entry in enumerate(entries)
    ]
    if key in names:
        return names.index(key)
    if key.isdigit() and int(key) < len(entries):
        return int(key)
    raise KeelError(f"override {override!r}: no entry {key!r}; {suggest(key, names)}")


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
    _refuse_unknown(CorpusConfig, recipe.data.corpus, "data.corpus")
    with _naming("data.corpus"):
        recipe.data.corpus_config()
    _check_host(recipe)
    if len(set(recipe.seeds)) != len(recipe.seeds):
        raise KeelError(f"seeds: each seed once, got {recipe.seeds}")
    _check_phases(recipe.phases, "phases")
    for name in recipe.arms:
        _check_arm(recipe, name)


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
    if family not in FAMILIES:
        raise KeelError(f"host.family: unknown {family!r}; {suggest(str(family), FAMILIES)}")
    if "vocab_size" in host:
        raise KeelError("host.vocab_size: the tokenizer says how many entries there are; remove this field")
    known = {name for name in dir(AutoConfig.for_model(family)) if not name.startswith("_")}
    for field in host:
        if field != "family" and field not in known:
            settings = {name for name in AutoConfig.for_model(family).to_dict() if not name.startswith("_")}
            raise KeelError(f"host.{field}: unknown field of {family}; {suggest(field, settings)}")


def _check_phases(phases: Iterable[Phase], where: str) -> None:
    names = [phase.name for phase in phases]
    for name in names:
        if not _ARM_NAME.fullmatch(name) or names.count(name) > 1:
            raise KeelError(f"{where}: phase name {name!r}: each once, of a-z, 0-9 and _")


def _check_arm(recipe: Recipe, name: str) -> None:
    arm, where = recipe.arms[name], f"arms.{name}"
    if not _ARM_NAME.fullmatch(name):
        raise KeelError(f"{where}: an arm's name is also its folder: use a-z, 0-9 and _")
    for stream, fields in arm.stream_configs().items():
        _check_stream(f"{where}.streams.{stream}", fields)
    if arm.positions is not None:
        _check_positions(recipe, name)
    if arm.weights_of is not None:
        _check_borrowed(recipe, name)
        return
    _check_phases(recipe.phases_of(name), f"{where}.phases")
    for phase in recipe.phases_of(name):
        if phase.trainable == "streams" and not arm.streams:
            raise KeelError(
                f"{where}: phase {phase.name!r} trains streams only, but this arm has none; give it streams or phases"
            )


def _check_stream(where: str, fields: Mapping[str, Any]) -> None:
    kind = fields["type"]
    if kind not in STREAMS:
        raise KeelError(f"{where}.type: unknown stream {kind!r}; {suggest(str(kind), STREAMS)}")
    given = {name: value for name, value in fields.items() if name != "type"}
    _refuse_unknown(STREAMS[kind].config_class, given, where)
    with _naming(where):
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
        with _naming(where):
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
    if arm.streams:
        raise KeelError(
            f"arms.{name}.streams: an arm with weights_of has the streams of {lender!r}; remove one of the two"
        )
    if arm.positions is None:
        raise KeelError(f"arms.{name}: with weights_of and no positions it is {lender!r} again; add positions")


def _refuse_unknown(config_class: type, given: Mapping[str, Any], where: str) -> None:
    known = [field.name for field in dataclasses.fields(config_class)]
    for field in given:
        if field not in known:
            raise KeelError(f"{where}.{field}: unknown field; {suggest(field, known)}")


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put the path of a section in front of what its component says about its values."""
    try:
        yield
    except KeelError as error:
        raise KeelError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error
    except TypeError as error:
        raise KeelError(f"{where}: a value of the wrong type ({error})") from error
