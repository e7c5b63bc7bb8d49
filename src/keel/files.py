"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from keel.errors import KeelError

Content = bytes | Callable[[BinaryIO], object]


def resolve_cache_dir(cache_dir: str | Path | None) -> Path:
    """Return ``cache_dir``, or the folder named by the environment variable KEEL_CACHE, or ``~/.cache/keel``."""
    return Path(cache_dir or os.environ.get("KEEL_CACHE") or "~/.cache/keel").expanduser()


def write_atomically(path: Path, content: Content) -> str:
    """Write a file so that at any moment either the old or the new content is there.

    Args:
        path: the file; missing folders are made.
        content: its bytes, or a function that writes them to an open file.
    Returns: sha256 of the bytes, in hexadecimal.
    Raises: KeelError when the disk is full or the folder cannot be written.
    """
    return write_together({path: content})[0]


def write_together(files: Mapping[Path, Content]) -> list[str]:
    """Write several files, none of them in its place before all are wholly on the disk; then in the order given.

    Returns: the sha256 of each. Raises: KeelError when the disk is full or a folder cannot be written.
    """
    # Names of their own, so that two processes that write the same file do not write into each other's.
    partials = {path: path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial") for path in files}
    try:
        digests = [_write(partials[path], content) for path, content in files.items()]
        for path, partial in partials.items():
            os.replace(partial, path)
    except BaseException as error:
        for partial in partials.values():
            with contextlib.suppress(OSError):
                partial.unlink()
        if isinstance(error, OSError):
            names = ", ".join(map(str, files))
            raise KeelError(
                f"cannot write {names}: {error.strerror or error}; what was there before is intact"
            ) from error
        raise
    return digests


def _write(path: Path, content: Content) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w+b") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            content(file)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()
