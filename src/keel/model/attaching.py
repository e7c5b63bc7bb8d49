"""Put streams beside a host, or beside the one that they were saved without."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from keel.errors import KeelError, build_config
from keel.hosts import fingerprint, host_family
from keel.model.causal import KeelForCausalLM
from keel.model.config import KeelConfig
from keel.positions import Positions
from keel.storage import is_streams_folder, load_streams
from keel.streams import stream_from_config
from keel.streams.base import SiteHook, Stream


def attach(
    host: PreTrainedModel, streams: Stream | Mapping[str, Stream], *, positions: Positions | None = None
) -> KeelForCausalLM:
    """Put side streams beside a host.

    With a stream's default ``init="identity"`` the first forward is bitwise the host's. The host is used in place, not copied,
    and keeps its ``requires_grad``; see ``KeelForCausalLM.trainable``.

    Args:
        host: a causal language model of a supported family, unquantised, not wrapped.
        streams: one stream (named by its type) or name -> stream.
        positions: replace the host's position scheme (a baseline of its own), None to leave it.
    Raises: KeelError naming what is not supported and why.
    """
    if isinstance(host, KeelForCausalLM) or _carries_hooks(host):
        raise KeelError("this host already has streams; detach() first, or give all streams in one attach")
    host_family(host)
    named = {streams.type_name: streams} if isinstance(streams, Stream) else dict(streams)
    taken = [name for name in named if not name.isidentifier() or hasattr(nn.ModuleDict(), name)]
    if taken:
        raise KeelError(
            f"a stream cannot be named {taken[0]!r}: give a Python identifier that is no attribute of ModuleDict"
        )
    config = KeelConfig(
        text_config=host.config,
        streams={name: stream.to_config() for name, stream in named.items()},
        positions=None if positions is None else dict(vars(positions)),
        host_name=host.name_or_path or "",
        host_fingerprint=fingerprint(host),
        # A configuration sets its parts' attention; without this the host would forget which one it was loaded with.
        attn_implementation=host.config._attn_implementation,
    )
    reference = next(host.parameters())
    model = KeelForCausalLM(config, host=host, streams=named)
    model.streams.to(device=reference.device, dtype=reference.dtype)
    model.train(host.training)
    return model


def load(folder: str | os.PathLike[str], backbone: PreTrainedModel | None = None) -> KeelForCausalLM:
    """Load a whole checkpoint, or, given the ``backbone`` they were trained beside, streams that were saved alone.

    Raises: KeelError when the folder holds something else, is damaged, of another version, or was made for another host.
    """
    path = Path(folder)
    if backbone is None:
        if is_streams_folder(path):
            raise KeelError(
                f"{path} holds streams alone; give the host they belong to: keel.load(folder, backbone=host)"
            )
        return KeelForCausalLM.from_pretrained(path)
    saved, weights = load_streams(path)
    host_family(backbone)
    found = fingerprint(backbone)
    if found != saved["host_fingerprint"]:
        raise KeelError(
            f"{path}: made for host {saved['host_name'] or 'without a name'} with fingerprint {saved['host_fingerprint']}, but the "
            f"backbone {backbone.name_or_path or 'given'} has {found}; load the same checkpoint as the backbone"
        )
    streams = {name: stream_from_config(fields, f"{path}: streams.{name}") for name, fields in saved["streams"].items()}
    positions = (
        None if saved["positions"] is None else build_config(Positions, saved["positions"], f"{path}: positions")
    )
    model = attach(backbone, streams, positions=positions)
    own = model.streams.state_dict()
    wrong = sorted(own.keys() ^ weights.keys()) or sorted(key for key in own if own[key].shape != weights[key].shape)
    if wrong:
        model.detach()
        raise KeelError(f"{path}: the saved weights do not fit the streams' configuration: {', '.join(wrong[:3])}")
    model.streams.load_state_dict(weights)
    return model


def _carries_hooks(host: nn.Module) -> bool:
    return any(
        isinstance(hook, SiteHook)
        for module in host.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )
