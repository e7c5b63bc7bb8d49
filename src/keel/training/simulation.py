"""A recipe that trains nothing: a law is drawn from and looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import yaml
from pydantic import Field

from keel.training.section import Count, NonNegative, Positive, Section
from keel.training.sections import DEFAULT_SCALE, PaperReference

Seed = Annotated[int, Field(ge=0, lt=2**32)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Coupling(Section):
    """One regime of the scalar prior: its name for people and w, of either sign."""

    label: str
    value: Finite


class ScalarPrior(Section):
    """Random sequences under the scalar embedding prior (``keel.evaluation.scalar_prior``).

    Attributes:
        couplings: the regimes, the arms of this recipe.
        sequences: how many are drawn with each seed; all couplings see the same.
        length: tokens of each.
        spreads: standard deviations of the embeddings; the first is the one that is drawn and measured in full.
        past: embeddings that the conditional density is conditioned on.
    """

    couplings: Annotated[dict[str, Coupling], Field(min_length=1)]
    sequences: Count = 4000
    length: Annotated[int, Field(ge=2)] = 5
    spreads: Annotated[list[Positive], Field(min_length=1)]
    past: Annotated[list[Finite], Field(min_length=1)]


class Simulation(Section):
    """One scale of a recipe that trains nothing."""

    name: str
    title: str
    serves: str
    expected_minutes: dict[str, NonNegative]
    scale: str = DEFAULT_SCALE
    reference: PaperReference | None = None
    scalar_prior: ScalarPrior
    seeds: Annotated[list[Seed], Field(min_length=1)]

    def to_yaml(self) -> str:
        """Return the recipe as a YAML file that reads back to the same recipe."""
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True, width=120)


def is_simulation(given: Mapping[str, Any]) -> bool:
    """Whether the fields are those of a recipe that trains nothing."""
    return "scalar_prior" in given
