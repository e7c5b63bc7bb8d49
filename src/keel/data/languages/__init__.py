"""Made-up languages: every string is a function of seed, split and index, and nothing is kept in memory."""

from __future__ import annotations

from typing import Any

from keel.data.languages.base import Sample
from keel.data.languages.dyck import Dyck
from keel.data.languages.facts import Facts
from keel.data.languages.json_objects import JsonObjects
from keel.data.languages.markov import Markov

LANGUAGES: dict[str, Any] = {"dyck": Dyck, "facts": Facts, "json": JsonObjects, "markov": Markov}

__all__ = ["LANGUAGES", "Dyck", "Facts", "JsonObjects", "Markov", "Sample"]
