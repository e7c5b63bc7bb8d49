"""What this machine has and what it can run: one check a line, nothing changed on disk."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from keel.data.corpora import data_root
from keel.errors import KeelError
from keel.files import resolve_cache_dir
from keel.ops.compiled import find_compiler
from keel.training.build import run_that_makes
from keel.training.processor import native_precision
from keel.training.recipe import Recipe, Simulation, list_recipes, load_any, recipe_scales
from keel.training.section import named_in

State = Literal["ok", "absent", "broken"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding: ``absent`` is a choice less, ``broken`` stops Keel from working."""

    name: str
    state: State
    found: str


@dataclass(frozen=True, kw_only=True)
class Runnable:
    """A scale of a recipe: expected minutes on 2 cores (None: not known), and what it lacks here ("" for nothing)."""

    recipe: str
    serves: str
    scale: str
    minutes: float | None
    lacks: str


def examine() -> list[Check]:
    """Look at this machine."""
    return [
        _python(),
        *(_version(package) for package in ("torch", "transformers")),
        _processor(),
        _memory(),
        *_accelerators(),
        _bfloat16(),
        _compiler(),
        _cache(),
        _data(),
        _browser(),
    ]


def runnable() -> list[Runnable]:
    """Every recipe that comes with Keel at every scale, and whether its corpus can be had here."""
    found = []
    for name in list_recipes():
        for scale in recipe_scales(name):
            recipe = load_any(name, scale)
            lacks = ", ".join(dict.fromkeys(filter(None, (_lacks(source) for source in _sources(recipe)))))
            found.append(
                Runnable(
                    recipe=name,
                    serves=recipe.serves,
                    scale=scale,
                    minutes=recipe.expected_minutes.get(scale),
                    lacks=lacks,
                )
            )
    return found


def _sources(recipe: Recipe | Simulation) -> list[str]:
    """What texts, questions and trees a recipe reads, and the checkpoint that it begins with."""
    if isinstance(recipe, Simulation):
        return []
    given = [recipe.data.corpus, *recipe.passages().values()]
    texts = [str(one) for fields in given if fields is not None for one in fields.get("sources") or [fields["source"]]]
    checkpoint = recipe.host.get("checkpoint")
    sections = (recipe.data.questions, recipe.trees, recipe.evaluation)
    asked = [source for section in sections for _, source in named_in(section)]
    return [*texts, *asked, *([] if checkpoint is None else [f"checkpoint:{checkpoint}"])]


def duration(minutes: float | None) -> str:
    """Minutes in words: ``20 s``, ``6 min``, ``33 h``."""
    if minutes is None:
        return "?"
    if minutes < 1:
        return f"{60 * minutes:.0f} s"
    return f"{minutes:.0f} min" if minutes < 180 else f"{minutes / 60:.0f} h"


def _lacks(source: str) -> str:
    kind, _, name = source.partition(":")
    if kind == "hub":
        return f"the Hub's {name.partition(':')[0]}"
    if kind == "data":
        try:
            return "" if (data_root() / name).exists() else f"{name} under the data root"
        except KeelError:
            return f"a data root with {name}"
    if kind == "checkpoint":
        command = run_that_makes(name)
        return "" if Path(name).exists() else f"the host of {command}" if command else f"the Hub's {name}"
    return "" if source == "stdlib" or Path(source).exists() else source


def _python() -> Check:
    enough = sys.version_info >= (3, 11)
    return Check(
        name="Python", state="ok" if enough else "broken", found=f"{platform.python_version()} ({platform.platform()})"
    )


def _version(package: str) -> Check:
    return Check(name=package, state="ok", found=importlib.metadata.version(package))


def _processor() -> Check:
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return Check(name="processor", state="ok", found=f"{cores} cores, torch uses {torch.get_num_threads()} threads")


def _memory() -> Check:
    memory = psutil.virtual_memory()
    return Check(
        name="memory", state="ok", found=f"{memory.total / 2**30:.0f} GiB, {memory.available / 2**30:.0f} GiB free"
    )


def _accelerators() -> list[Check]:
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [
            Check(name=f"GPU {index}", state="ok", found=f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
            for index, gpu in enumerate(properties)
        ]
    if torch.backends.mps.is_available():
        return [Check(name="GPU", state="ok", found="Apple (mps)")]
    return [Check(name="GPU", state="absent", found="none; everything runs on the processor")]


def _bfloat16() -> Check:
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = "GPU" if place.type == "cuda" else "processor"
    if native_precision(place) == "bf16":
        return Check(name="bfloat16", state="ok", found=f"native on the {here}")
    found = f"emulated on the {here}, slower than float32: recipes of precision auto take that"
    return Check(name="bfloat16", state="absent", found=found)


def _compiler() -> Check:
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        return Check(name="torch.compile", state="absent", found="no triton package for the GPU")
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    found = compiler or "no C++ compiler (apt install g++); models run uncompiled"
    return Check(name="torch.compile", state="ok" if compiler else "absent", found=found)


def _c_compiler() -> Check:
    path = find_compiler()
    found = path or "none (apt install gcc); the dynamic state path's loop over tokens runs in Python"
    return Check(name="C compiler", state="ok" if path else "absent", found=found)


def _cache() -> Check:
    folder = resolve_cache_dir(None)
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = shutil.disk_usage(nearest).free / 2**30
            return Check(name="cache", state="ok", found=f"{folder}, {free:.0f} GiB free")
    except OSError as error:
        return Check(
            name="cache", state="broken", found=f"{folder}: {error.strerror}; name another folder in KEEL_CACHE"
        )


def _data() -> Check:
    try:
        return Check(name="data root", state="ok", found=str(data_root()))
    except KeelError:
        return Check(
            name="data root", state="absent", found="none; recipes with data:NAME need KEEL_DATA to name a folder"
        )


def _browser() -> Check:
    path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    return Check(
        name="chromium", state="ok" if path else "absent", found=path or "none; only the test of the report needs it"
    )
