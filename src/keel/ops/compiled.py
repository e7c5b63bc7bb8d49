"""C code of this package, compiled on the machine that runs it, where that has a C compiler.

A loop over tokens whose products are small takes as long to be called from Python as to be worked through. What is written in C stands
beside the loop in Python that it equals, which is taken wherever there is no compiler. The compiled code is kept in the user's cache, in a
folder where nobody else may write, under a name made from the source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from keel.files import resolve_cache_dir

# No flag that changes what NaN, infinity or a rounded sum is.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_TYPES = {torch.float32: "float", torch.float64: "double"}


@functools.cache
def compiled(source: Path, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return a C file's functions for float32 or float64, compiled with ``REAL`` as that type; None where that cannot be had."""
    compiler = find_compiler()
    if compiler is None or dtype not in _TYPES or os.name != "posix":
        return None
    try:
        return ctypes.CDLL(str(_library(compiler, source, _TYPES[dtype])))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: there is no home for the cache
        return None


def find_compiler() -> str | None:
    """Return the path of the machine's C compiler, the one that ``CC`` names first."""
    return shutil.which(os.environ.get("CC") or "cc")


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    """Return where the numbers of contiguous tensors lie; NULL for None."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]


def _library(compiler: str, source: Path, real: str) -> Path:
    folder = _folder()
    asked = (source.read_bytes(), real.encode(), " ".join(_FLAGS).encode(), _version(compiler), _processor())
    name = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in asked)).hexdigest()[:24]
    library = folder / f"{source.stem}.{name}.so"
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            words = [compiler, *_FLAGS, f"-DREAL={real}", "-o", str(made), str(source), "-lm"]
            subprocess.run(words, check=True, capture_output=True, timeout=120)
            os.replace(made, library)  # whole or not at all, whichever process is the first
    return library


def _folder() -> Path:
    """Return the cache folder, the user's own and closed to others, since what lies there is run.  Raises: OSError."""
    folder = resolve_cache_dir(None) / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder}: others may write there")
    return folder


def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=30).stdout


def _processor() -> bytes:
    """Return what the processor can do: a home may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))
