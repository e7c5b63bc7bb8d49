"""FSDP2 over CPU processes, which accelerate leaves to DDP; on accelerators it shards by itself."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def wants_fsdp() -> bool:
    """Return whether this process was started for FSDP, as ``accelerate launch --use_fsdp`` says it, and is one of several."""
    return (
        os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and int(os.environ.get("WORLD_SIZE", "1")) > 1
    )


def shard_on_cpu(model: Any) -> None:
    """Shard a model with FSDP2 over the CPU processes that are there: each layer of the host, then the rest.

    A model that is sharded already, by an earlier phase, stays as it is.
    """
    if isinstance(model, FSDPModule):
        return
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in getattr(model.host.base_model, model.family.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
