"""Rows of benchmark files, as mappings: JSON lines and CoLA's tables under the data root, or a split of a dataset of the Hub."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keel.data.corpora import data_root
from keel.errors import KeelError, suggest

Rows = list[Mapping[str, Any]]
_KINDS = (".jsonl", ".tsv")


def read_rows(source: str) -> Rows:
    """Return the rows of a source in its order.

    Args:
        source: ``data:PATH`` below the data root, or a path: a file, or a folder whose files are read by name; ``.jsonl`` (an
            object a line) or ``.tsv`` (CoLA's: source, label, mark, sentence), also with ``.gz``. Or ``hub:DATASET:CONFIG:SPLIT``.
    Raises: KeelError for what is missing or cannot be read, or holds no row.
    """
    kind, _, rest = source.partition(":")
    if kind == "hub":
        rows = _from_hub(rest)
    else:
        path = _local(source)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        rows = [row for file in files if path == file or _kind(file) in _KINDS for row in _from_file(file)]
    if not rows:
        raise KeelError(f"{source} has no row; give a file or folder of {' or '.join(_KINDS)} files")
    return rows


def _local(source: str) -> Path:
    if source.startswith("data:"):
        root, rest = data_root(), source.removeprefix("data:")
        path = root / rest
        if not rest or not path.exists():
            names = [one.name for one in root.iterdir() if one.is_dir()]
            raise KeelError(f"data root {root} has no {rest!r}; {suggest(rest, names)}")
        return path
    path = Path(source).expanduser()
    if not path.exists():
        raise KeelError(f"{source} does not exist; give data:PATH, hub:DATASET:CONFIG:SPLIT, or a path")
    return path


def _kind(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _from_file(path: Path) -> Iterator[Mapping[str, Any]]:
    if _kind(path) not in _KINDS:
        raise KeelError(f"{path} is of an unknown kind; expected {' or '.join(_KINDS)}, plain or with .gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(line, _kind(path), f"{path}, line {number}")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise KeelError(f"{path} cannot be read as UTF-8 text ({error})") from error


def _row(line: str, kind: str, where: str) -> Mapping[str, Any]:
    if kind == ".tsv":
        cells = line.rstrip("\n").split("\t")
        if len(cells) != 4 or cells[1] not in ("0", "1"):
            raise KeelError(f"{where}: expected the four columns of CoLA (source, 0 or 1, mark, sentence)")
        return {"sentence": cells[3], "label": int(cells[1])}
    try:
        row = json.loads(line)
    except ValueError as error:
        raise KeelError(f"{where}: not JSON ({error}); write one object a line") from error
    if not isinstance(row, dict):
        raise KeelError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def _from_hub(name: str) -> Rows:
    import datasets

    dataset, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    if not split:
        raise KeelError(f"hub:{name}: expected hub:DATASET:CONFIG:SPLIT, the configuration may be empty")
    try:
        return list(datasets.load_dataset(dataset, config or None, split=split))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise KeelError(f"hub:{name} cannot be loaded ({reason}); check the name and the connection") from error
