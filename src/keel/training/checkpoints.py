"""Checkpoints that are whole or absent: written under a temporary name, with checksums, and renamed at the end.

A folder ``checkpoint-<step>`` without a manifest that agrees with every file in it is never read. Tensors are
safetensors, all else JSON; nothing here is pickled or unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from keel.errors import KeelError

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = ".writing-"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint after ``step`` steps lives."""
    return folder / f"checkpoint-{step}"


def open_checkpoint(folder: Path, step: int) -> Path:
    """Make an empty temporary folder for a checkpoint and return it; leftovers of interrupted writes are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover)
    temporary = folder / f"{_TEMPORARY}{step}"
    temporary.mkdir()
    return temporary


def close_checkpoint(temporary: Path, step: int, about: Mapping[str, Any], keep: int) -> Path:
    """Write the manifest, flush all to the disk, give the folder its name and remove all but the newest ``keep``."""
    files = {path.name: _digest(path) for path in sorted(temporary.iterdir())}
    (temporary / MANIFEST).write_text(json.dumps({"step": step, **about, "files": files}, indent=1), encoding="utf-8")
    flush_folder(temporary)
    final = checkpoint_path(temporary.parent, step)
    if final.exists():  # one that did not verify: a valid one would have been resumed from
        shutil.rmtree(final)
    os.rename(temporary, final)
    _flush(final.parent)
    for _, old in _by_step(final.parent)[:-keep]:
        shutil.rmtree(old)
    return final


def newest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint that verifies, with its manifest; None where there is none."""
    for _, path in reversed(_by_step(folder)):
        manifest = _verified(path)
        if manifest is not None:
            return path, manifest
    return None


@contextmanager
def removed_on_failure(temporary: Path) -> Iterator[None]:
    """Remove a folder that the body could not fill: on a full disk nothing but its own leftovers may be taking the space."""
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def one_line_on_full_disk(doing: str, advice: str) -> Iterator[None]:
    """Turn an operating-system failure inside the body into a KeelError of one line."""
    try:
        yield
    except OSError as error:
        raise KeelError(f"{doing}: {error.strerror or error}; {advice}") from error
    except SafetensorError as error:
        reason = "no space left on device" if os.strerror(errno.ENOSPC).lower() in str(error).lower() else str(error)
        raise KeelError(f"{doing}: {reason}; {advice}") from error


def _by_step(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in named if match)


def _verified(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        whole = all((path / name).is_file() and _digest(path / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole and files else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_folder(folder: Path) -> None:
    """Wait until the files of a flat folder, and the folder itself, are on the disk."""
    for path in folder.iterdir():
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
