"""LoRA in a host's linear maps through peft, and back into its weights (GTCA section 3.4; Hu et al. 2021)."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from keel.errors import KeelError
from keel.model import KeelForCausalLM
from keel.training.tree_sections import Adapters

_MARK = "lora_"  # in the names of peft's parameters
_TRAINED = (_MARK, "shadow_")


def add_adapters(host: nn.Module, adapters: Adapters) -> None:
    """Put LoRA into every linear map of the host's layers, in place; the host still computes what it did.

    Raises: KeelError without peft, or for a host without linear maps.
    """
    peft = peft_package()
    kinds = (nn.Linear, importlib.import_module("transformers.pytorch_utils").Conv1D)
    inside = [name for name, module in host.named_modules() if isinstance(module, kinds) and ".layers." in f".{name}"]
    inside = inside or [name for name, module in host.named_modules() if isinstance(module, kinds) and ".h." in name]
    if not inside:
        raise KeelError(f"adapters: {type(host).__name__} has no linear maps in its layers; leave the adapters out")
    config = peft.LoraConfig(
        r=adapters.rank, lora_alpha=adapters.alpha, lora_dropout=adapters.dropout, target_modules=inside
    )
    peft.inject_adapter_in_model(config, host)


def has_adapters(model: nn.Module) -> bool:
    """Return whether there is LoRA anywhere in a model."""
    return any(_MARK in name for name, _ in model.named_parameters())


def merge_adapters(model: nn.Module) -> None:
    """Add every LoRA update to the weights that it is beside, in place, and take it away: the same function, up to rounding."""
    if not has_adapters(model):
        return
    layer_kind: Any = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    for name, module in list(model.named_modules()):
        if isinstance(module, layer_kind):
            module.merge(safe_merge=True)
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, module.get_base_layer())


def set_trainable(model: KeelForCausalLM, what: str) -> None:
    """Let what a phase names take gradients: ``all``, ``streams``, ``host``, ``adapters`` or ``adapters_and_streams``."""
    if "adapters" not in what:
        model.trainable(what)
        return
    model.requires_grad_(False)
    model.streams.requires_grad_(what == "adapters_and_streams")
    for name, parameter in model.host.named_parameters():
        parameter.requires_grad_(any(mark in name for mark in _TRAINED))


def peft_package() -> Any:
    """Return the package peft.  Raises: KeelError where it is not installed."""
    try:
        return importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise KeelError("adapters need the package peft; pip install 'keel[adapters]'") from error
