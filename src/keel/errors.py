"""Errors that a user sees: one line that says what was given, what was expected and what to do."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

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
    hints = get_type_hints(cls)
    for name, value in values.items():
        _check_type(value, hints[name], f"{where}: {name}")
    return cls(**values)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _check_type(value: Any, hint: Any, where: str) -> None:
    try:
        TypeAdapter(hint, config=_STRICT).validate_python(value)
    except ValidationError as error:
        # Which of several words is meant the class says itself, better; and a tuple is given where a list would do.
        wrong = [one for one in error.errors() if one["type"] not in ("literal_error", "list_type")]
        if wrong:
            expected = wrong[0]["msg"].removeprefix("Input should be ")
            raise KeelError(f"{where}={value!r}; expected {expected}") from error


_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
