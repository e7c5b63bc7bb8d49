"""The `keel.results/1` file: what one recipe measured, in a form that reports, papers and people can read.

Every field is explained in `docs/results-schema.md`. A number that is not finite is written as the string "NaN",
"Infinity" or "-Infinity", so that the file stays strict JSON; `null` means that nothing was measured.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)

from keel.errors import KeelError, suggest
from keel.files import write_atomically

SCHEMA: Final = "keel.results/1"
_CONSTANTS = ("NaN", "Infinity", "-Infinity")


def _number(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value not in _CONSTANTS):
        raise ValueError(f"expected a number or one of {', '.join(_CONSTANTS)}")
    return value


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError("expected [low, high] with low <= high")
    return interval


Number = Annotated[float, BeforeValidator(_number)]
Interval = Annotated[tuple[Number, Number], AfterValidator(_ordered)]
Count = Annotated[StrictInt, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Probability = Annotated[Number, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, ser_json_inf_nan="strings")


class Metric(_Model):
    """One measured quantity of one arm: a value per seed, their mean, and a 95 % interval over documents and seeds."""

    values: list[Number | None]
    mean: Number | None
    ci95: Interval | None
    unit: str
    higher_is_better: StrictBool | None


class Curve(_Model):
    """A quantity along training: at each x, one value per seed. Its key in `Arm.curves` is the label of the y axis."""

    x_label: str
    x: list[Number]
    values: list[list[Number | None]]

    @model_validator(mode="after")
    def _one_row_per_x(self) -> Curve:
        if len(self.values) != len(self.x):
            raise ValueError(f"expected one row of values per x: {len(self.x)} x, {len(self.values)} rows")
        return self

    def joined(self) -> Curve:
        """Return the same with the n-th measurement of every seed in one row, at the mean of their x.

        Seeds are measured at the same steps; where texts are read whole, questions say, these are not the same numbers of tokens, and
        at least two seeds have an x of their own. Where all share theirs, a value that is not there was not finite, and stays.
        """
        alone = [row for row in self.values if sum(value is not None for value in row) == 1]
        if sum(any(value is not None for value in column) for column in zip(*alone, strict=True)) < 2:
            return self
        seeds = [
            [(x, value) for x, value in zip(self.x, column, strict=True) if value is not None]
            for column in zip(*self.values, strict=True)
        ]
        rows = list(itertools.zip_longest(*seeds))
        places = [[one[0] for one in row if one is not None] for row in rows]
        return Curve(
            x_label=self.x_label,
            x=[math.fsum(some) / len(some) for some in places],
            values=[[None if one is None else one[1] for one in row] for row in rows],
        )


class Arm(_Model):
    """One competitor: what it cost and what was measured on it.

    ``streams`` are those whose worth is asked about: a baseline has none (a bare host, a stream that others are compared with, a control).
    """

    label: Name
    streams: list[Name] = []
    weights_of: Name | None = None
    stage: StrictBool = False
    params_total: Count
    params_trainable: Count
    train_tokens_per_s: Positive | None
    peak_memory_bytes: Count | None
    metrics: dict[Name, Metric]
    curves: dict[Name, Curve] = {}

    @model_validator(mode="after")
    def _trainable_within_total(self) -> Arm:
        if self.params_trainable > self.params_total:
            raise ValueError(f"params_trainable {self.params_trainable} exceeds params_total {self.params_total}")
        return self


class Comparison(_Model):
    """The paired difference arm − baseline of one metric, on the same documents and seeds."""

    metric: Name
    arm: Name
    baseline: Name
    difference: Number | None
    ci95: Interval | None
    p: Probability | None


class Target(_Model):
    """What is asked of one metric of an arm, by itself or against a baseline.

    With a baseline it is the difference arm − baseline that is asked for, or with ``ratio`` arm / baseline; ``least`` or ``most``
    bounds it. ``why`` says, for a target that is missed, what the measurements tell about the reason.
    """

    says: Name
    metric: Name
    arm: Name
    baseline: Name | None = None
    ratio: bool = False
    least: Number | None = None
    most: Number | None = None
    why: str = ""

    @model_validator(mode="after")
    def _one_bound(self) -> Target:
        if (self.least is None) == (self.most is None):
            raise ValueError("give one of least and most")
        if self.ratio and self.baseline is None:
            raise ValueError("a ratio needs a baseline")
        return self


class Reference(_Model):
    """What the paper printed: by arm, then by metric. Arms and metrics that were not run may appear."""

    paper: Name
    table: Name
    note: str = ""
    values: dict[Name, dict[Name, Number]]
    targets: list[Target] = []


def _inside(file: str) -> str:
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or path.suffix not in (".png", ".svg"):
        raise ValueError("expected the path of a .png or .svg file below the folder of the results file")
    return file


class Picture(_Model):
    """A figure that a probe drew itself, such as a heat map; it lies beside the results file."""

    file: Annotated[str, AfterValidator(_inside)]
    title: Name
    caption: str = ""


class Provenance(_Model):
    """Where the numbers come from."""

    git: str | None
    versions: dict[Name, str]
    device: str
    seeds: Annotated[list[StrictInt], Field(min_length=1)]
    setting: str = ""
    documents: Count | None = None
    started: AwareDatetime
    wall_s: Annotated[Number, Field(ge=0)]


class Results(_Model):
    """A whole results file; see `docs/results-schema.md`."""

    schema_id: Literal["keel.results/1"] = Field(default=SCHEMA, alias="schema")
    recipe: Name
    scale: Name
    title: str
    provenance: Provenance
    arms: Annotated[dict[Name, Arm], Field(min_length=1)]
    comparisons: list[Comparison] = []
    reference: Reference | None = None
    figures: list[Picture] = []

    @model_validator(mode="after")
    def _consistent(self) -> Results:
        for name, arm in self.arms.items():
            self._check_seeds(name, arm)
            if arm.weights_of is not None and arm.weights_of not in self.arms:
                raise ValueError(f"arms.{name}.weights_of names no arm: {suggest(arm.weights_of, self.arms)}")
        for index, comparison in enumerate(self.comparisons):
            for role in ("arm", "baseline"):
                self._check_measured(f"comparisons.{index}.{role}", getattr(comparison, role), comparison.metric)
        return self

    def _check_seeds(self, name: str, arm: Arm) -> None:
        expected = len(self.provenance.seeds)
        rows: list[tuple[str, int]] = [(f"metrics.{key}", len(metric.values)) for key, metric in arm.metrics.items()]
        rows += [(f"curves.{key}", len(row)) for key, curve in arm.curves.items() for row in curve.values]
        for where, given in rows:
            if given != expected:
                raise ValueError(f"arms.{name}.{where}: expected {expected} values, one per seed, got {given}")

    def _check_measured(self, where: str, name: str, metric: str) -> None:
        if name not in self.arms:
            raise ValueError(f"{where}: no arm {name!r}; {suggest(name, self.arms)}")
        if metric not in self.arms[name].metrics:
            raise ValueError(
                f"{where}: arm {name!r} has no metric {metric!r}; {suggest(metric, self.arms[name].metrics)}"
            )


MODELS: dict[tuple[str, ...], type[_Model]] = {
    (): Results,
    ("provenance",): Provenance,
    ("arms",): Arm,
    ("arms", "metrics"): Metric,
    ("arms", "curves"): Curve,
    ("comparisons",): Comparison,
    ("reference",): Reference,
    ("reference", "targets"): Target,
    ("figures",): Picture,
}
"""Each model by where it stands in the file, the names of arms, metrics and curves left out."""


def read_results(path: Path) -> Results:
    """Read and check a results file.

    Raises: KeelError in one line: the file, the first wrong field, what was expected.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise KeelError(f"{path}: cannot be read ({error.strerror}); give the path of a results.json") from error
    except ValueError as error:  # JSON that does not parse, or bytes that are not UTF-8
        raise KeelError(f"{path}: not JSON ({error}); it may be truncated: write it again with `keel run`") from error
    if not isinstance(data, dict):
        raise KeelError(f"{path}: expected a JSON object of schema {SCHEMA!r}, got a {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise KeelError(
            f"{path}: field schema: expected {SCHEMA!r}, got {data.get('schema')!r}; is this a results.json?"
        )
    try:
        return Results.model_validate(data)
    except ValidationError as error:
        raise KeelError(f"{path}: {_one_line(error)}") from error


def write_results(results: Results, path: Path) -> Path:
    """Write a results file whole or not at all, and return its path.  Raises: KeelError when the disk refuses."""
    text = results.model_dump_json(by_alias=True, indent=1)
    write_atomically(Path(path), (text + "\n").encode())
    return Path(path)


def _one_line(error: ValidationError) -> str:
    """Say the first error of a file in one line: the field, what was expected, what was given."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    where = f"field {'.'.join(location)}: " if location else ""
    if first["type"] == "extra_forbidden":
        return f"{where}unknown; {suggest(location[-1], _known_fields(location[:-1]))}"
    if first["type"] == "missing":
        return f"{where}missing; give it a value"
    message = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    shown = "" if isinstance(given, dict | list | BaseModel) else f", got {given!r}"
    return f"{where}{message[0].lower()}{message[1:]}{shown}"


def _known_fields(parent: list[str]) -> Iterable[str]:
    fields = MODELS[tuple(parent[0::2])].model_fields
    return [field.alias or name for name, field in fields.items()]
