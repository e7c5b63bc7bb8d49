"""Experiments: a recipe run whole, arms × seeds, into results.json."""

from keel.experiment.collect import collect
from keel.experiment.runner import run_experiment
from keel.experiment.simulation import run_simulation
from keel.experiment.unit import Unit

__all__ = ["Unit", "collect", "run_experiment", "run_simulation"]
