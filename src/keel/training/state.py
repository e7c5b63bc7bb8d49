"""What an exact resume needs besides the data order: weights, optimizer, random generators; as safetensors and JSON.

Tensors are named by parameter, so that the same files serve one process, DDP and FSDP2:
``torch.distributed.checkpoint`` gathers a sharded model to whole tensors on the first process and shards them again
on load.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from keel.errors import KeelError

_WEIGHTS, _OPTIMIZER, _SETTINGS = "weights.safetensors", "optimizer.safetensors", "optimizer.json"


def save_training_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, writes: bool) -> None:
    """Write weights and optimizer; every process takes part in the gathering, the one with ``writes`` writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = _tensors(get_model_state_dict(model, options=options))
    given: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=options))
    if not writes:
        return
    save_file(_without_aliases(weights), folder / _WEIGHTS)
    moments = {f"{name}|{key}": value for name, state in given["state"].items() for key, value in state.items()}
    save_file({key: value.contiguous() for key, value in moments.items()}, folder / _OPTIMIZER)
    (folder / _SETTINGS).write_text(json.dumps(given["param_groups"]), encoding="utf-8")


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint into ``model``.  Raises: KeelError when they are another model's."""
    options = StateDictOptions(full_state_dict=True)
    wanted = _tensors(get_model_state_dict(model, options=options))
    given = load_file(folder / _WEIGHTS)
    aliases = _aliases(wanted)
    complete = {name: given[aliases.get(name, name)] for name in wanted if aliases.get(name, name) in given}
    missing, extra = sorted(set(wanted) - set(complete)), sorted(set(given) - set(wanted))
    wrong = [name for name in complete if complete[name].shape != wanted[name].shape]
    if missing or extra or wrong:
        raise KeelError(
            f"{folder}: the weights are another model's ({len(missing)} missing, {len(extra)} unexpected, {len(wrong)} "
            f"of another shape, first {[*missing, *extra, *wrong][0]!r}); resume with the recipe that wrote them"
        )
    set_model_state_dict(model, dict(complete), options=options)


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's state of a checkpoint."""
    state: dict[str, Any] = {}
    for name, moment in load_file(folder / _OPTIMIZER).items():
        parameter, _, key = name.rpartition("|")
        state.setdefault(parameter, {})[key] = moment
    groups = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    for group in groups:
        group["betas"] = tuple(group["betas"])
    given: Any = {"state": state, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, given, options=StateDictOptions(full_state_dict=True))


def save_random_state(folder: Path, rank: int) -> None:
    """Write the state of every random generator of this process."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    save_file(tensors, folder / f"random-{rank}.safetensors")
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss]}
    (folder / f"random-{rank}.json").write_text(json.dumps(states), encoding="utf-8")


def load_random_state(folder: Path, rank: int) -> None:
    """Restore the random generators of this process."""
    tensors = load_file(folder / f"random-{rank}.safetensors")
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available() and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
    states = json.loads((folder / f"random-{rank}.json").read_text(encoding="utf-8"))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _aliases(weights: dict[str, Tensor]) -> dict[str, str]:
    """Names whose tensor is that of an earlier name (tied embeddings), with that name."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    return {
        name: owner
        for name, tensor in sorted(weights.items())
        if tensor.numel() and (owner := first.setdefault((_pointer(tensor), tuple(tensor.shape)), name)) != name
    }


def _pointer(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size())


def _without_aliases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    aliases = _aliases(weights)
    return {name: tensor.contiguous() for name, tensor in weights.items() if name not in aliases}
