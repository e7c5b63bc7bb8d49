"""Build hook: a wheel carries the recipes as ``keel/recipes``; an editable install reads them from the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RecipesHook(BuildHookInterface[Any]):
    """Add ``recipes/`` to standard wheels only, so that an editable install never leaves a stale copy behind."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Map the folder into the package; hatchling calls it once a build, ``version`` is "standard" or "editable"."""
        if self.target_name == "wheel" and version == "standard":
            build_data["force_include"]["recipes"] = "keel/recipes"
