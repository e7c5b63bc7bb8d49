"""Streams saved alone: ``streams.safetensors`` and ``streams.json`` in a folder, written so that a half-written one is never read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from keel.errors import KeelError
from keel.files import write_together

SCHEMA = "keel.streams/1"
_META, _WEIGHTS = "streams.json", "streams.safetensors"
_KEPT = ("streams", "positions", "host_name", "host_fingerprint")


def save_streams(folder: Path, weights: dict[str, Tensor], config: Any) -> None:
    """Write weights, then the description with their checksum: without the description the folder counts as unwritten."""
    content = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
    meta = {
        "schema": SCHEMA,
        "sha256": hashlib.sha256(content).hexdigest(),
        **{name: getattr(config, name) for name in _KEPT},
    }
    write_together({folder / _WEIGHTS: content, folder / _META: json.dumps(meta, indent=1).encode()})


def is_streams_folder(folder: Path) -> bool:
    """Return whether the folder holds streams that were saved alone."""
    return (folder / _META).is_file()


def load_streams(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the weights. Raises: KeelError for a folder that is not whole, damaged or of another version."""
    if not is_streams_folder(folder) or not (folder / _WEIGHTS).is_file():
        raise KeelError(
            f"{folder} holds no streams (expected {_META} and {_WEIGHTS}); make it with model.save_streams(folder)"
        )
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise KeelError(f"{folder / _META} is damaged ({error}); save the streams again") from error
    schema = meta.get("schema") if isinstance(meta, dict) else None
    if schema != SCHEMA:
        raise KeelError(f"{folder / _META} has schema {schema!r}, this version reads {SCHEMA!r}")
    missing = [name for name in ("sha256", *_KEPT) if name not in meta]
    if missing:
        raise KeelError(f"{folder / _META} is damaged: field {missing[0]!r} is missing; save the streams again")
    content = (folder / _WEIGHTS).read_bytes()
    if hashlib.sha256(content).hexdigest() != meta["sha256"]:
        raise KeelError(f"{folder / _WEIGHTS} is truncated or damaged (its checksum does not match); copy it anew")
    try:
        return meta, load_tensors(content)
    except SafetensorError as error:
        raise KeelError(f"{folder / _WEIGHTS} is damaged ({error}); copy it anew") from error
