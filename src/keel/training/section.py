"""What every section of a recipe is: a pydantic model that knows its fields, and the kinds of numbers in it."""

from __future__ import annotations

from collections.abc import Mapping
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
