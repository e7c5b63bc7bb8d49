"""Errors that a user sees: one line that says what was given, what was expected and what to do."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


class KeelError(ValueError):
    """Something that the caller gave cannot be used; the message is one line and complete."""


class ShapeError(KeelError):
    """A tensor argument does not have the shape that the function documents."""


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return a clause that names the valid choice nearest to ``name``, then all choices."""
    choices = sorted(valid)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}valid: {', '.join(choices)}"


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put the path of a section in front of what its component says about its values."""
    try:
        yield
    except KeelError as error:
        raise KeelError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error
    except TypeError as error:
        raise KeelError(f"{where}: a value of the wrong type ({error})") from error


def build_config(cls: type[Config], given: Mapping[str, Any], where: str) -> Config:
    """Build the dataclass ``cls`` from a mapping; an unknown field raises and names the nearest valid one, a value must have its type.

    Args:
        cls: a dataclass.
        given: field values; lists become tuples, so that the result stays hashable.
        where: what the user calls this place, for the message.
    Raises: KeelError for an unknown or missing field, or a value of another type; numbers are finite.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for name in given:
        if name not in fields:
            raise KeelError(f"{where}: unknown field {name!r}; {suggest(name, fields)}")
    values = {name: _as_tuple(value) for name, value in given.items()}
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise KeelError(f"{where}: missing field {missing[0]!r}; give it a value")
    try:
        config = cls(**values)  # what the class says of its values is said best there
    except TypeError:
        _check_types(cls, values, where)
        raise
    _check_types(cls, values, where)
    return config


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _check_types(cls: type, values: Mapping[str, Any], where: str) -> None:
    hints = get_type_hints(cls)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise KeelError(f"{where}: {name}={value!r}; expected {_in_words(hints[name])}")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type: any word for a choice of words, a whole number too for one with a fraction."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return any(type(value) is type(part) for part in parts)
    if kind in (tuple, list) and isinstance(value, tuple):  # a list is made a tuple of
        if kind is list or parts[1:] == (...,):
            return all(_fits(entry, parts[0]) for entry in value)
        return len(value) == len(parts) and all(_fits(entry, part) for entry, part in zip(value, parts, strict=True))
    if hint in (int, float):
        number = isinstance(value, int | hint) and not isinstance(value, bool)
        return number and math.isfinite(value)
    known = kind or hint
    return isinstance(value, known) if isinstance(known, type) else True


def _in_words(hint: Any) -> str:
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_in_words, parts)))
    if kind in (tuple, list):
        inner = [_in_words(part) for part in parts if part is not ...]
        return f"a list, each {inner[0]}" if kind is list or ... in parts else f"({', '.join(inner)})"
    if kind is Literal:
        return "a word"
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text", NoneType: "null"}
    return words.get(hint, "a mapping")
