"""What is measured: a trained model of an arm, with the data that it learnt from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keel.data import TaskData, TokenCorpus
from keel.encoder import DstgForMaskedLM
from keel.model import KeelForCausalLM
from keel.positions import set_positions
from keel.training import Recipe
from keel.training.settings import Progress


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: a trained model of an arm, on a device, with the data it learnt from.

    ``folder`` is the unit's: what a picture is drawn from later is kept there. ``seed`` is the unit's too.
    """

    recipe: Recipe
    arm: str
    model: KeelForCausalLM | DstgForMaskedLM
    data: TokenCorpus | TaskData
    device: str
    progress: Progress
    folder: Path
    seed: int = 0

    def tell(self, what: str, done: int, of: int) -> None:
        """Say how far the measurement is."""
        self.progress({"event": "evaluate", "what": what, "done": done, "of": of})

    def set_positions(self, length: int) -> None:
        """Set the positions with which the arm reads ``length`` tokens."""
        positions = self.recipe.positions_at(self.arm, length)
        if positions is not None:
            set_positions(self.model.host, positions)
