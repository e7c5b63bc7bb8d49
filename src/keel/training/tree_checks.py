"""What makes a recipe with trees, adapters or borrowed hosts wrong: names that refer to nothing, fields that contradict."""

from __future__ import annotations

from keel.errors import KeelError, suggest
from keel.training.sections import Recipe

_ON_QUESTIONS = ("blimp", "cola", "hellaswag", "winogrande", "mmlu", "cloze", "leak", "syntax")


def check_trees(recipe: Recipe) -> None:
    """Raise a KeelError that names the first such field."""
    for name in recipe.arms:
        _check_host_of(recipe, name)
        _check_save_host(recipe, name)
        _check_adapters(recipe, name)
        _check_arm_trees(recipe, name)
        _check_phases(recipe, name)
    for section in _ON_QUESTIONS:
        asked = getattr(recipe.evaluation, section) is not None
        if asked and (recipe.data.task is not None or recipe.data.masking is not None):
            raise KeelError(
                f"evaluation.{section}: is asked of a language model of text, and data has none; remove one of the two"
            )


def _check_host_of(recipe: Recipe, name: str) -> None:
    arm, where = recipe.arms[name], f"arms.{name}.host_of"
    if arm.host_of is None:
        return
    lenders = [other for other in recipe.trained_arms() if recipe.arms[other].host_of is None and other != name]
    if arm.host_of not in lenders:
        raise KeelError(f"{where}: no arm {arm.host_of!r} trains a host of its own; {suggest(arm.host_of, lenders)}")
    lender = recipe.arms[arm.host_of]
    if arm.weights_of is not None or arm.host or arm.positions or lender.streams or lender.positions or lender.shadow:
        raise KeelError(
            f"{where}: goes with neither weights_of, host nor positions, and {arm.host_of!r} must be a bare host; remove the other"
        )
    if recipe.match_parameters:
        raise KeelError(f"{where}: a trained host keeps its width; set match_parameters to false")


def _check_save_host(recipe: Recipe, name: str) -> None:
    arm = recipe.arms[name]
    if not arm.save_host:
        return
    beside = [field for field in ("streams", "positions", "shadow", "weights_of") if getattr(arm, field)]
    if beside or recipe.data.masking is not None:
        raise KeelError(
            f"arms.{name}.save_host: only of a bare language model, whose host is all that it is; remove it"
            + (f", or {beside[0]}" if beside else "")
        )


def _check_adapters(recipe: Recipe, name: str) -> None:
    arm = recipe.arms[name]
    field = "shadow" if arm.adapters is None else "adapters"
    given = arm.adapters is not None or arm.shadow is not None
    if arm.weights_of is not None:
        if given:
            raise KeelError(f"arms.{name}.{field}: an arm with weights_of is not trained; remove one of the two")
        return
    if arm.shadow is not None and (arm.adapters is not None or arm.streams):
        raise KeelError(f"arms.{name}.shadow: stands for adapters and streams; remove it or them")
    used = any("adapters" in phase.trainable for phase in recipe.phases_of(name))
    if used and not given:
        raise KeelError(f"arms.{name}: a phase trains adapters, but the arm has none; give adapters: {{}}")
    if given and not used:
        raise KeelError(f"arms.{name}.{field}: no phase trains them; remove them, or say trainable: adapters")


def _check_arm_trees(recipe: Recipe, name: str) -> None:
    arm = recipe.arms[name]
    needing = [s for s, fields in arm.stream_configs().items() if fields["type"] == "tree" and not fields.get("lookup")]
    source = None if arm.trees is None else arm.trees.source
    if needing and source is None:
        raise KeelError(f"arms.{name}.trees: missing; stream {needing[0]!r} reads trees, name their source")
    if source is None:
        if arm.trees is not None and arm.trees.corruption is not None:
            raise KeelError(f"arms.{name}.trees.corruption: there is no source whose trees to corrupt; name it")
        return
    known = [] if recipe.trees is None else recipe.trees.names()
    if source not in known:
        raise KeelError(f"arms.{name}.trees.source: unknown {source!r}; {suggest(source, known)}")
    if not needing:
        raise KeelError(f"arms.{name}.trees.source: no stream of this arm reads trees of a source; remove it")


def _check_phases(recipe: Recipe, name: str) -> None:
    if recipe.arms[name].weights_of is not None:
        return
    for phase in recipe.phases_of(name):
        if phase.learns == "questions" and recipe.data.questions is None:
            raise KeelError(f"arms.{name}, phase {phase.name!r} learns questions; give data.questions")
        if phase.ramp and not recipe.arms[name].streams:
            raise KeelError(
                f"arms.{name}, phase {phase.name!r}: ramp is of a tree stream, and there is none; remove it"
            )
