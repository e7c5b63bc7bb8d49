"""ShadowPEFT beside a host, through peft: the peer that is neither syntax nor a low-rank update of weights.

A small decoder of the host's own kind makes a state from the embeddings; at every layer the difference between the hidden states and
that state is added to the layer's input, and a gate moves the state on. It cannot be added to the host's weights, so it is kept in
files of its own beside them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from keel.errors import KeelError
from keel.training.adapters import peft_package
from keel.training.tree_sections import Shadow

MARK = "shadow_"  # in the names of peft's parameters
SETTINGS, WEIGHTS, HOST = "shadow.json", "shadow.safetensors", "host"
_CONTAINERS = ("shadow_backbone", "shadow_projection")
_NAME = "default"  # of the adapter: peft could hold several


def add_shadow(host: nn.Module, settings: Shadow) -> None:
    """Put a shadow beside a host, in place; the host still computes what it did.

    A pass with labels has a loss more, ``shadow``: ``auxiliary`` times the shadow's own cross-entropy, through the host's head.

    Raises: KeelError without peft, or for a host that peft's ShadowPEFT does not know.
    """
    config = peft_package().ShadowConfig(
        r=settings.rank,
        shadow_alpha=settings.strength,
        shadow_dropout=settings.dropout,
        shadow_num_hidden_layers=settings.layers,
        shadow_intermediate_size=settings.intermediate_size,
    )
    base: Any = host.base_model
    try:
        tuner = importlib.import_module("peft.tuners.shadow").ShadowModel(base, {_NAME: config}, _NAME)
    except (AttributeError, TypeError, ValueError) as error:
        raise KeelError(f"shadow: peft cannot put one beside {type(host).__name__} ({error}); leave it out") from error
    # The tuner runs by hooks, and its parameters are nobody's; the host's from here on, to be trained, moved and saved.
    for name in _CONTAINERS:
        setattr(base, name, getattr(tuner, name))
    base.keel_shadow = (settings,)
    _fix_last_update(base)
    states: list[Tensor] = []  # of the last pass alone

    def keep(module: nn.Module, args: Any, state_BTD: Tensor) -> None:
        states[:] = [state_BTD]

    tuner.shadow_projection[_NAME].register_forward_hook(keep)

    def add_own_loss(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        labels, state_BTD = kwargs.get("labels"), states[-1] if states else None
        states.clear()
        if labels is not None and state_BTD is not None and settings.auxiliary:
            about = {name: kwargs[name] for name in ("num_items_in_batch", "shift_labels") if name in kwargs}
            kept = kwargs.get("logits_to_keep")
            if isinstance(kept, Tensor):  # where there are labels, alone
                state_BTD = state_BTD[kept]
            logits = module.get_output_embeddings()(state_BTD)
            own = module.loss_function(logits, labels, logits.shape[-1], **about)
            output.losses = {"shadow": settings.auxiliary * own}  # named, so that no perplexity counts it
        return output

    host.register_forward_hook(add_own_loss, with_kwargs=True)


def _fix_last_update(base: nn.Module) -> None:
    """Make constants of what moves the state on after the last layer: nobody reads that state, so they would never learn."""
    last: Any = [module for module in base.modules() if _is_shadowed(module)][-1]
    for part in (last.shadow_update_transform, last.shadow_update_gate):
        for module in part.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


def _is_shadowed(module: nn.Module) -> bool:
    return hasattr(module, "shadow_inject")


def shadow_of(host: nn.Module) -> Shadow | None:
    """Return the settings of the shadow beside a host, None where there is none."""
    kept = getattr(host.base_model, "keel_shadow", None)
    return None if kept is None else kept[0]


@contextmanager
def shadow_aside(host: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Let the host be bare inside this context, to be saved so; gives the shadow's weights by name."""
    base: Any = host.base_model
    weights = {name: tensor for name, tensor in base.state_dict().items() if MARK in name}
    wrapped = {name: module for name, module in base.named_modules() if _is_shadowed(module)}
    containers = {name: getattr(base, name) for name in _CONTAINERS}
    for name, module in wrapped.items():
        base.set_submodule(name, module.base_layer)
    for name in containers:
        delattr(base, name)
    try:
        yield weights
    finally:
        for name, module in wrapped.items():
            base.set_submodule(name, module)
        for name, container in containers.items():
            setattr(base, name, container)


def save_with_shadow(model: Any, folder: Path) -> None:
    """Write a model whose host has a shadow: the bare model in ``host/``, the shadow beside it.

    The folder itself is no checkpoint, so that nobody takes the bare host for the model.
    """
    settings = shadow_of(model.host)
    assert settings is not None
    with shadow_aside(model.host) as weights:
        model.save_pretrained(folder / HOST)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)
    (folder / SETTINGS).write_text(json.dumps(settings.model_dump(), indent=1) + "\n", encoding="utf-8")


def load_with_shadow(kind: Any, folder: Path) -> Any:
    """Read what ``kind`` or ``save_with_shadow`` wrote there.  Raises: KeelError for files that do not fit each other."""
    if not (folder / SETTINGS).is_file():
        return kind.from_pretrained(folder)
    model = kind.from_pretrained(folder / HOST)
    add_shadow(model.host, Shadow(**json.loads((folder / SETTINGS).read_text(encoding="utf-8"))))
    weights = load_file(folder / WEIGHTS)
    base = model.host.base_model
    if set(weights) != {name for name in base.state_dict() if MARK in name}:
        raise KeelError(
            f"{folder / WEIGHTS}: not the weights of the shadow that {SETTINGS} describes; train this arm again"
        )
    base.load_state_dict(weights, strict=False)
    return model.eval()
