"""Errors that a user sees: one line that says what was given, what was expected and what to do."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

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


def build_config(cls: type[Config], given: Mapping[str, Any], where: str) -> Config:
    """Build the dataclass ``cls`` from a mapping; an unknown field raises and names the nearest valid one.

    Args:
        cls: a dataclass.
        given: field values; lists become tuples, so that the result stays hashable.
        where: what the user calls this place, for the message.
    Raises: KeelError for an unknown or missing field.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for name in given:
        if name not in fields:
            raise KeelError(f"{where}: unknown field {name!r}; {suggest(name, fields)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise KeelError(f"{where}: missing field {missing[0]!r}; give it a value")
    return cls(**values)
