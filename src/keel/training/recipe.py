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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from keel.errors import KeelError, suggest
from keel.training.checks import parse_recipe, parse_simulation
from keel.training.sections import DEFAULT_SCALE, Arm, Phase, Recipe
from keel.training.simulation import Simulation, is_simulation

__all__ = [
    "Arm",
    "Phase",
    "Recipe",
    "Simulation",
    "find_recipe",
    "list_recipes",
    "load_any",
    "load_recipe",
    "merge",
    "parse_recipe",
    "recipe_scales",
    "recipes_folder",
]


def load_recipe(name_or_path: str | Path, scale: str | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe that trains something: ``load_any``, which says what the arguments are and what is raised."""
    loaded = load_any(name_or_path, scale, overrides)
    if isinstance(loaded, Simulation):
        raise KeelError(f"{name_or_path}: trains nothing; give a recipe with arms, phases and an evaluation")
    return loaded


def load_any(name_or_path: str | Path, scale: str | None = None, overrides: Sequence[str] = ()) -> Recipe | Simulation:
    """Read a recipe, of either kind.

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
        return parse_simulation(resolved) if is_simulation(resolved) else parse_recipe(resolved)
    except KeelError as error:
        raise KeelError(f"{path}: {error}") from error


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
