"""Training: recipes, the trainer of a phase, and the phases of an arm."""

from keel.training.losses import smoothing_sum
from keel.training.phases import TrainingReport, read_training_report, train
from keel.training.recipe import (
    Arm,
    Phase,
    Recipe,
    Simulation,
    find_recipe,
    list_recipes,
    load_any,
    load_recipe,
    parse_recipe,
    recipe_scales,
)
from keel.training.settings import PhaseRecord, PhaseSettings
from keel.training.trainer import PhaseTrainer

__all__ = [
    "Arm",
    "Phase",
    "PhaseRecord",
    "PhaseSettings",
    "PhaseTrainer",
    "Recipe",
    "Simulation",
    "TrainingReport",
    "find_recipe",
    "list_recipes",
    "load_any",
    "load_recipe",
    "parse_recipe",
    "read_training_report",
    "recipe_scales",
    "smoothing_sum",
    "train",
]
