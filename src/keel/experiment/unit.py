"""One unit of an experiment: an arm with a seed, trained if it has weights of its own, then evaluated.

OUT/recipe.yaml                     the resolved recipe
OUT/plan.json                       a ``Plan``: what all units must agree on
OUT/<arm>/seed<k>/training.json     ``keel.training.TrainingReport``
OUT/<arm>/seed<k>/model/            finished weights with their tokenizer; another's weights where an arm has streams of its own beside them
OUT/<arm>/seed<k>/host/             of an arm with ``save_host``: its host as an ordinary checkpoint
OUT/<arm>/seed<k>/evaluation.json   what was measured, and with which settings; it is written last
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keel.data import TaskData, TokenCorpus
from keel.encoder import DstgForMaskedLM
from keel.errors import KeelError
from keel.evaluation.robustness import rescale_embeddings
from keel.experiment.measure import is_measured, measure, read_evaluation
from keel.experiment.subject import Subject
from keel.experiment.trees import question_data
from keel.model import KeelForCausalLM, attach
from keel.streams import stream_from_config
from keel.training import Recipe, load_recipe, read_training_report, train
from keel.training.build import build_model, load_data
from keel.training.phases import write_json, write_model
from keel.training.settings import Progress
from keel.training.shadow import load_with_shadow


@dataclass(frozen=True)
class Unit:
    """An arm and a seed."""

    arm: str
    seed: int

    def folder(self, out: Path) -> Path:
        """Return where this unit keeps its files."""
        return out / self.arm / f"seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was settled before the first unit.

    Attributes:
        tokens: fingerprint of corpus and tokenizer; a resume refuses another.
        vocabulary: entries of the tokenizer.
        widths: feed-forward size of every trained arm's host; None leaves the recipe's.
        precision: what ``auto`` stands for, settled on the machine that the experiment was begun on.
        started: when the experiment was begun, ISO 8601 with time zone.
        wall_s: seconds that it has run, over all sessions.
        commits: what the code was in each session, in order: see ``keel.experiment.collect.git_commit``.
    """

    tokens: str
    vocabulary: int
    widths: dict[str, int | None]
    precision: str
    started: str
    wall_s: float = 0.0
    commits: list[str] = dataclasses.field(default_factory=list)

    def write(self, out: Path) -> None:
        """Write ``OUT/plan.json``."""
        write_json(out / "plan.json", dataclasses.asdict(self))


def read_plan(out: Path) -> Plan | None:
    """Return the plan of an output folder, None where there is none.  Raises: KeelError when it is damaged."""
    path = out / "plan.json"
    if not path.is_file():
        return None
    try:
        return Plan(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise KeelError(f"{path}: not a plan ({error}); use another output folder") from error


def run_unit(
    recipe: Recipe,
    plan: Plan,
    unit: Unit,
    out: Path,
    data: TokenCorpus | TaskData,
    *,
    device: str | None,
    progress: Progress,
) -> None:
    """Train and evaluate one unit, from where an earlier session left it.

    Under torchrun all processes train; the first evaluates.

    Raises: KeelError for data other than planned, and whatever training and evaluation raise.
    """
    if data.fingerprint != plan.tokens:
        raise KeelError(
            f"{out}: the corpus or the tokenizer has changed since this run was begun; use another output folder"
        )
    folder = unit.folder(out)
    arm = recipe.arms[unit.arm]
    if arm.weights_of is None and read_training_report(folder) is None:
        lent = None if arm.host_of is None else Unit(arm.host_of, unit.seed).folder(out) / "model"
        model = build_model(recipe, unit.arm, unit.seed, data.tokenizer, plan.widths[unit.arm], lent)
        train(
            model,
            data,
            recipe.phases_of(unit.arm),
            arm=unit.arm,
            seed=unit.seed,
            folder=folder,
            device=device,
            resume=True,
            progress=progress,
            keep={other.weights_after or "" for other in recipe.arms.values() if other.weights_of == unit.arm},
            questions=question_data(recipe, unit.arm, model, data.tokenizer, out),
            save_host=arm.save_host,
        )
        del model
    if not is_measured(recipe, folder) and _is_first_process():
        evaluate_unit(recipe, unit, out, data, device=device, progress=progress)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def evaluate_unit(
    recipe: Recipe, unit: Unit, out: Path, data: TokenCorpus | TaskData, *, device: str | None, progress: Progress
) -> None:
    """Measure a unit whose weights are there and write ``evaluation.json``; what is the same for all seeds is measured once."""
    known = _measured_with_another_seed(recipe, unit, out)
    if known is not None:
        write_json(unit.folder(out) / "evaluation.json", {**known, "seed": unit.seed})
        return
    lender = Unit(recipe.arms[unit.arm].weights_of or unit.arm, unit.seed)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = KeelForCausalLM if recipe.data.masking is None else DstgForMaskedLM
    after = recipe.arms[unit.arm].weights_after
    model = load_with_shadow(kind, lender.folder(out) / ("model" if after is None else f"after_{after}"))
    if recipe.arms[unit.arm].host_alone:
        model = attach(model.detach(), {})
    if lender != unit and recipe.arms[unit.arm].streams:
        model = _with_own_streams(model, recipe, unit)
        write_model(model, data.tokenizer, unit.folder(out) / "model")
    model = model.to(place)
    scale = recipe.arms[unit.arm].embedding_scale
    if scale is not None:
        rescale_embeddings(model, scale)
    subject = Subject(
        recipe=recipe,
        arm=unit.arm,
        model=model,
        data=data,
        device=place,
        progress=progress,
        folder=unit.folder(out),
        seed=unit.seed,
    )
    content = {
        "arm": unit.arm,
        "seed": unit.seed,
        **measure(subject, read_evaluation(recipe, unit.folder(out))).to_json(),
    }
    write_json(unit.folder(out) / "evaluation.json", content)


def _measured_with_another_seed(recipe: Recipe, unit: Unit, out: Path) -> dict[str, Any] | None:
    others = [Unit(unit.arm, seed).folder(out) for seed in recipe.seeds if seed != unit.seed]
    if not recipe.is_same_for_all_seeds(unit.arm):
        return None
    measured = next((folder for folder in others if is_measured(recipe, folder)), None)
    return None if measured is None else dict(json.loads((measured / "evaluation.json").read_text(encoding="utf-8")))


def _with_own_streams(model: KeelForCausalLM, recipe: Recipe, unit: Unit) -> KeelForCausalLM:
    """Put the arm's own streams in place of the lender's: with its weights where it has such a stream, else untrained."""
    torch.manual_seed(unit.seed)
    made = attach(
        model.detach(), {name: stream_from_config(fields) for name, fields in recipe.streams_of(unit.arm).items()}
    )
    for name, stream in model.wires.streams.items():
        made.wires.streams[name].load_state_dict(stream.state_dict())
    return made


def _is_first_process() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def load_unit_inputs(out: Path) -> tuple[Recipe, Plan, TokenCorpus | TaskData]:
    """Read back what a planned output folder says: recipe, plan and data."""
    recipe, plan = load_recipe(out / "recipe.yaml"), read_plan(out)
    if plan is None:
        raise KeelError(f"{out}: no plan.json; start the run anew")
    return recipe, plan, load_data(recipe)
