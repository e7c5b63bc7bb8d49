"""Messages are one line, name the nearest valid choice, and no field is dropped in silence."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from keel.errors import KeelError, ShapeError, build_config, suggest


@dataclass(frozen=True, kw_only=True)
class Config:
    """A made-up configuration: one required field, two with defaults, one that is computed."""

    cell: str
    layers: tuple[int, ...] | None = None
    sites: list[str] = field(default_factory=list)
    share: float = 0.5
    points: float | tuple[tuple[int, float], ...] = 0.0
    way: Literal["here", "there"] = "here"
    computed: int = field(default=3, init=False)


@pytest.mark.parametrize(
    ("name", "nearest"), [("grue", "gru"), ("scna", "scan"), ("GRU", None), ("", None), ("zzzz", None)]
)
def test_suggest_names_the_nearest_then_all(name: str, nearest: str | None) -> None:
    clause = suggest(name, ["scan", "gru"])
    assert clause.endswith("valid: gru, scan")
    assert clause.startswith(f"did you mean {nearest!r}? " if nearest else "valid:")


def test_build_config_passes_values_and_keeps_defaults() -> None:
    config = build_config(Config, {"cell": "gru", "layers": [0, 2]}, "stream")
    assert config == Config(cell="gru", layers=(0, 2))
    assert config.layers == (0, 2) and dataclasses.asdict(config)["sites"] == []


def test_an_unknown_field_names_place_field_and_nearest() -> None:
    with pytest.raises(KeelError) as error:
        build_config(Config, {"cell": "gru", "layres": [0]}, "arms.structural")
    assert str(error.value).startswith("arms.structural: unknown field 'layres'; did you mean 'layers'? valid: cell, ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"layers": ["a"]}, "stream: layers=('a',); expected a list, each a whole number or null"),
        ({"layers": [True]}, "stream: layers=(True,); expected a list, each a whole number or null"),
        ({"share": "abc"}, "stream: share='abc'; expected a finite number"),
        ({"share": True}, "stream: share=True; expected a finite number"),
        ({"share": math.nan}, "stream: share=nan; expected a finite number"),
        ({"share": math.inf}, "stream: share=inf; expected a finite number"),
        ({"cell": 3}, "stream: cell=3; expected a text"),
        ({"way": 3}, "stream: way=3; expected a word"),
        (
            {"points": [[0.5, 1]]},
            "stream: points=((0.5, 1),); expected a finite number or a list, each (a whole number, a finite number)",
        ),
    ],
)
def test_a_value_of_another_type_is_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(KeelError) as error:
        build_config(Config, {"cell": "gru", **given}, "stream")
    assert str(error.value) == says


def test_a_value_that_has_its_type_is_taken() -> None:
    given = {"cell": "gru", "share": 1, "layers": [3], "sites": ["x"], "points": [[1, 0.5]], "way": "elsewhere"}
    config = build_config(Config, given, "stream")  # which words are known a class says itself
    assert (config.share, config.layers, config.points, config.way) == (1, (3,), ((1, 0.5),), "elsewhere")


def test_a_field_that_is_computed_cannot_be_given() -> None:
    with pytest.raises(KeelError, match="unknown field 'computed'"):
        build_config(Config, {"cell": "gru", "computed": 4}, "stream")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(KeelError, match=r"^stream: missing field 'cell'"):
        build_config(Config, {}, "stream")


def test_every_error_is_a_keel_error_and_a_value_error() -> None:
    """A caller may catch either; the command line turns KeelError into one line and exit code 2."""
    assert issubclass(ShapeError, KeelError) and issubclass(KeelError, ValueError)
