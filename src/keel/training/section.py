"""What every section of a recipe is: a pydantic model that knows its fields, the kinds of numbers in it, and what it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from keel.errors import suggest

Count = Annotated[int, Field(ge=1)]
Precision = Literal["auto", "fp32", "bf16"]
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


def named_in(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield what sections of a recipe read, with the field: what is named ``data:…`` or ``hub:…``, or written as a path."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, str) and value.startswith(("data:", "hub:", "/", "./", "../", "~")):
        yield where, value
    elif isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_in(part, f"{where}.{key}")
