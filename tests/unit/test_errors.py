"""Messages are one line, name the nearest valid choice, and no field is dropped in silence."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from keel.errors import KeelError, ShapeError, build_config, suggest


@dataclass(frozen=True, kw_only=True)
class Config:
    """A made-up configuration: one required field, two with defaults, one that is computed."""

    cell: str
    layers: tuple[int, ...] | None = None
    sites: list[str] = field(default_factory=list)
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


def test_a_field_that_is_computed_cannot_be_given() -> None:
    with pytest.raises(KeelError, match="unknown field 'computed'"):
        build_config(Config, {"cell": "gru", "computed": 4}, "stream")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(KeelError, match=r"^stream: missing field 'cell'"):
        build_config(Config, {}, "stream")


def test_every_error_is_a_keel_error_and_a_value_error() -> None:
    """A caller may catch either; the command line turns KeelError into one line and exit code 2."""
    assert issubclass(ShapeError, KeelError) and issubclass(KeelError, ValueError)
