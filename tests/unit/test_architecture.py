"""The floors hold: a room of ``src/keel`` imports only from rooms below it, and nothing dangerous is used anywhere.

The files are parsed, not imported, so an import inside a function or under ``if TYPE_CHECKING`` counts like any other.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "keel"

# A room is a module or a package directly inside keel. It may import from every room on a lower floor …
FLOORS = {
    "errors": 0,
    "files": 0,
    "ops": 0,
    "streams": 1,
    "hosts": 1,
    "positions": 1,
    "cache": 1,
    "storage": 1,
    "data": 1,
    "drawing": 1,
    "trees": 1,
    "model": 2,
    "encoder": 2,
    "training": 3,
    "evaluation": 3,
    "probes": 3,
    "pretrained": 3,
    "decoding": 3,
    "export": 3,
    "report": 4,
    "experiment": 4,
    "trial": 4,
    "doctor": 4,
    "probing": 4,
    "parsing": 4,
    "publishing": 4,
    "watching": 4,
    "cli": 5,
    "__main__": 6,
    "__init__": 6,  # re-exports the public names; nobody inside imports from it
}
# … and from these rooms on its own floor. The pairs form no circle: `test_neighbours_form_no_circle`.
NEIGHBOURS = {("ops", "errors"), ("files", "errors"), ("streams", "hosts"), ("streams", "trees"), ("cache", "streams")}
NEIGHBOURS |= {("ops", "files")}  # compiled code is kept in the cache
NEIGHBOURS |= {("experiment", "parsing")}  # a run trains the parsers of its trees
NEIGHBOURS |= {("publishing", "report")}  # a page is the report's, what is kept beside it is not
# Some rooms read less than the floor allows: of all that lies below them, these modules only.
ONLY = {"report": {"keel.drawing", "keel.errors", "keel.evaluation.results", "keel.files"}}
# Packages outside the standard library that a room may use; a room not named here may use every declared dependency.
OUTSIDE = {"errors": set(), "files": set(), "ops": {"torch"}}


class Import(NamedTuple):
    """One imported module, absolute: ``from keel.data import tokens`` gives "keel.data" and the name "tokens"."""

    line: int
    module: str
    name: str | None


def imports_of(text: str, package: str) -> Iterator[Import]:
    """Every import of a file that lies in ``package`` (dotted), wherever in it, with relative ones resolved."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            base = above[: len(above) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (Import(node.lineno, module, alias.name) for alias in node.names)


def package_of(path: Path, source: Path) -> str:
    """Dotted package that a file's relative imports start from."""
    return ".".join(["keel", *path.relative_to(source).parent.parts])


def room_of(path: Path, source: Path) -> str:
    """Room that a file belongs to: the first part of its path inside keel."""
    return path.relative_to(source).parts[0].removesuffix(".py")


def target_of(found: Import, rooms: set[str]) -> str | None:
    """Room that an import reaches, None for another package. ``from keel import hosts`` reaches the room hosts."""
    parts = found.module.split(".")
    if parts[0] != "keel":
        return None
    if len(parts) > 1:
        return parts[1]
    return found.name if found.name in rooms else "__init__"


def may_import(room: str, target: str, found: Import) -> bool:
    """Whether the table lets ``room`` import what was found, which lies in the room ``target``."""
    if room == target:
        return True
    if room in ONLY:
        return bool({found.module, f"{found.module}.{found.name}"} & ONLY[room])
    return FLOORS[target] < FLOORS[room] or (room, target) in NEIGHBOURS


def broken_floors(source: Path) -> list[str]:
    """One line for every import under ``source`` that the table forbids."""
    broken = []
    for path in sorted(source.rglob("*.py")):
        room = room_of(path, source)
        where = path.relative_to(source)
        if room not in FLOORS:
            broken.append(f"{where}: the room {room!r} is on no floor; put it into FLOORS")
            continue
        for found in imports_of(path.read_text(encoding="utf-8"), package_of(path, source)):
            target = target_of(found, set(FLOORS))
            if target is None:
                continue
            if target not in FLOORS:
                broken.append(f"{where}:{found.line}: {found.module} is in no known room")
            elif not may_import(room, target, found):
                broken.append(f"{where}:{found.line}: {room} may not import {found.module} ({found.name or 'whole'})")
    return broken


def declared_dependencies() -> set[str]:
    """Import names of the packages that pyproject.toml lists as dependencies."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = {re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0].lower() for line in lines}
    return {{"pyyaml": "yaml", "scikit-learn": "sklearn"}.get(name, name) for name in names} | {
        "pydantic_core",
        "markupsafe",
    }  # parts of pydantic and jinja2


def foreign_imports(source: Path) -> list[str]:
    """One line for every import of a package that a room may not use, or that pyproject.toml does not declare."""
    declared = declared_dependencies()
    wrong = []
    for path in sorted(source.rglob("*.py")):
        allowed = OUTSIDE.get(room_of(path, source), declared)
        for found in imports_of(path.read_text(encoding="utf-8"), package_of(path, source)):
            package = found.module.split(".")[0]
            if package != "keel" and package not in sys.stdlib_module_names and package not in allowed:
                wrong.append(f"{path.relative_to(source)}:{found.line}: {package} is not allowed here")
    return wrong


DANGEROUS_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
DANGEROUS_CALLS = {"torch.load", "eval", "exec"}
DANGEROUS_SETTINGS = {"trust_remote_code", "allow_pickle"}


def dangers_in(text: str) -> list[str]:
    """One line for each way in which a file could run code that came with data."""
    imports = list(imports_of(text, "keel"))
    found = [f"{i.line}: imports {i.module}" for i in imports if i.module.split(".")[0] in DANGEROUS_MODULES]
    found += [f"{i.line}: imports torch.load" for i in imports if (i.module, i.name) == ("torch", "load")]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in DANGEROUS_CALLS:
            found.append(f"{node.lineno}: calls {ast.unparse(node.func)}")
        if isinstance(node, ast.keyword | ast.Dict):
            found += [f"{node.lineno}: {name} is not False" for name, value in settings(node) if not is_false(value)]
    return found


def settings(node: ast.keyword | ast.Dict) -> Iterator[tuple[str, ast.expr]]:
    """The dangerous settings among ``name=value`` or ``{"name": value}``."""
    pairs = [(node.arg, node.value)] if isinstance(node, ast.keyword) else zip(node.keys, node.values, strict=True)
    for key, value in pairs:
        name = key.value if isinstance(key, ast.Constant) else key
        if name in DANGEROUS_SETTINGS:
            yield name, value


def is_false(node: ast.expr) -> bool:
    """Whether an expression is the literal False."""
    return isinstance(node, ast.Constant) and node.value is False


def test_every_import_goes_down() -> None:
    broken = broken_floors(SOURCE)
    assert not broken, "\n".join(broken)


def test_only_declared_packages_are_imported() -> None:
    wrong = foreign_imports(SOURCE)
    assert not wrong, "\n".join(wrong)


def test_nothing_runs_code_that_came_with_data() -> None:
    found = {str(path): dangers_in(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_every_room_in_the_table_exists() -> None:
    """A floor for a room that is gone would hide nothing but confuse the next reader."""
    present = {room_of(path, SOURCE) for path in SOURCE.rglob("*.py")}
    assert set(FLOORS) - present == set()


def test_neighbours_form_no_circle() -> None:
    assert all(FLOORS[a] == FLOORS[b] for a, b in NEIGHBOURS)
    reached = set(NEIGHBOURS)
    for _ in FLOORS:
        reached |= {(a, d) for a, b in reached for c, d in NEIGHBOURS if b == c}
    assert not any(a == b for a, b in reached)


FORBIDDEN_IMPORTS = {
    "up, absolute": ("streams/bad.py", "import keel.model"),
    "up, from": ("streams/bad.py", "from keel.model import KeelConfig"),
    "up, relative": ("streams/bad.py", "from ..model import KeelConfig"),
    "up, relative package": ("streams/bad.py", "from .. import model"),
    "up, from the root": ("ops/bad.py", "from keel import model"),
    "up, deep": ("data/deep/bad.py", "from ...training.trainer import run"),
    "inside a function": ("model.py", "def f():\n    from keel.training import trainer"),
    "for types only": ("ops/bad.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import keel.hosts"),
    "the public package": ("model.py", "from keel import attach"),
    "the public package, whole": ("training/bad.py", "import keel"),
    "training → evaluation": ("training/bad.py", "from keel.evaluation.results import Results"),
    "evaluation → training": ("evaluation/bad.py", "from ..training import trainer"),
    "a neighbour": ("hosts.py", "from keel.streams.base import Stream"),
    "the report reads measurements": ("report/bad.py", "from keel.evaluation.extrapolation import extrapolation"),
    "the report reads data": ("report/bad.py", "from ..data import tokens"),
    "the report trains": ("report/bad.py", "from keel.training import trainer"),
    "an unknown room": ("attic/bad.py", "import os"),
    "into an unknown room": ("cli.py", "import keel.attic"),
}


@pytest.mark.parametrize(("file", "text"), FORBIDDEN_IMPORTS.values(), ids=FORBIDDEN_IMPORTS)
def test_a_forbidden_import_is_found(tmp_path: Path, file: str, text: str) -> None:
    assert len(broken_floors(write(tmp_path, file, text))) == 1


ALLOWED_IMPORTS = {
    "down": ("model.py", "from keel.streams.base import Stream\nimport keel.errors\nfrom .hosts import fingerprint"),
    "inside a room": ("data/good.py", "from keel.data.tokens import TokenStream\nfrom .windows import SlidingWindows"),
    "a named neighbour": ("streams/good.py", "from keel.hosts import HostShape"),
    "results for the report": (
        "report/good.py",
        "from keel.evaluation.results import Results\nfrom keel.evaluation import results",
    ),
    "the public package": ("__init__.py", "from keel.model import attach"),
    "a package named alike": ("ops/good.py", "import keelson.model"),
}


@pytest.mark.parametrize(("file", "text"), ALLOWED_IMPORTS.values(), ids=ALLOWED_IMPORTS)
def test_an_allowed_import_is_not_found(tmp_path: Path, file: str, text: str) -> None:
    assert broken_floors(write(tmp_path, file, text)) == []


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("ops/bad.py", "import transformers", 1),
        ("errors.py", "import torch", 1),
        ("data/bad.py", "import undeclared_package", 1),
        ("data/good.py", "import torch, yaml, json\nfrom . import tokens", 0),
    ],
)
def test_foreign_imports_are_found(tmp_path: Path, file: str, text: str, wrong: int) -> None:
    assert len(foreign_imports(write(tmp_path, file, text))) == wrong


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=given)",
        "options = {'trust_remote_code': True}",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
    ],
)
def test_a_danger_is_found(text: str) -> None:
    assert len(dangers_in(text)) == 1


def test_harmless_calls_are_not_dangers() -> None:
    assert dangers_in("np.load(path, allow_pickle=False)\nmodel.eval()\nsafetensors.torch.load_file(path)") == []


def write(folder: Path, file: str, text: str) -> Path:
    """Write one made-up source file and return its source folder."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return folder
