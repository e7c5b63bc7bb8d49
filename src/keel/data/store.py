"""The cache on disk: arrays and small files written whole or not at all, and checked by sha256 when they are read."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from keel.errors import KeelError
from keel.files import Content, write_atomically

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]


def write_cached(path: Path, content: Content) -> str:
    """Write a file of the cache whole or not at all; returns its sha256. Raises: KeelError naming KEEL_CACHE."""
    try:
        return write_atomically(path, content)
    except KeelError as error:
        raise KeelError(f"{error}; make room or name another folder in KEEL_CACHE") from error


def save_arrays(folder: Path, key: str, arrays: Mapping[str, Array]) -> None:
    """Write every array to ``folder/key.<name>.npy`` and, last, ``folder/key.json`` with their checksums."""
    checksums = {name: write_cached(_array_path(folder, key, name), _saver(array)) for name, array in arrays.items()}
    manifest = json.dumps({"sha256": checksums}, indent=1).encode()
    write_cached(folder / f"{key}.json", manifest)


def load_arrays(folder: Path, key: str, names: tuple[str, ...]) -> dict[str, Array] | None:
    """Return the arrays of ``key``, memory-mapped read-only, or None where one is missing or fails its checksum."""
    manifest = folder / f"{key}.json"
    if not manifest.is_file():
        return None
    try:
        checksums = json.loads(manifest.read_bytes())["sha256"]
        return {name: _load_checked(_array_path(folder, key, name), checksums[name]) for name in names}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cache entry %s is damaged (%s); building it again", manifest, error)
        return None


def _array_path(folder: Path, key: str, name: str) -> Path:
    return folder / f"{key}.{name}.npy"


def _saver(array: Array) -> Callable[[BinaryIO], object]:
    return lambda file: np.save(file, array, allow_pickle=False)


def _load_checked(path: Path, checksum: str) -> Array:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != checksum:
        raise ValueError(f"{path.name} has sha256 {found[:12]}…, expected {checksum[:12]}…")
    array: Array = np.load(path, allow_pickle=False, mmap_mode="r")
    return array
