"""Tasks of GLUE from the Hub, or from local files in the shapes in which they are passed around.

What of the development split is in training goes.

Below one folder: ``SST-2/{train,dev}.tsv``, ``MRPC/msr_paraphrase_train.txt`` and ``MRPC/glue_dev.jsonl``, ``RTE/rte*_{dev,test}.xml``
and ``RTE/glue_dev.jsonl``, ``STS-B/stsb-en-{train,dev}.csv``; each also as ``.gz``.
"""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from keel.data.conllu import data_path, read_text
from keel.data.rows import read_rows
from keel.errors import KeelError, suggest


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """One example: a text, or two, and the label: 0 or 1, or for a task of numbers its number."""

    first: str
    second: str | None = None
    label: float


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """Examples of one task; ``numeric`` where a number is to be told (scored by correlation), else a class (by accuracy)."""

    name: str
    numeric: bool
    train: tuple[TextPair, ...]
    dev: tuple[TextPair, ...]
    dropped: int
    """Training examples that are left out because they are in ``dev`` too."""


def load_glue(name: str, source: str) -> GlueTask:
    """Read one of ``GLUE_TASKS``.

    Args:
        source: the folder of the tasks, ``data:NAME`` or a path; or ``hub:DATASET``, which has a configuration a task with the splits
            ``train`` and ``validation`` (``hub:nyu-mll/glue``).
    Raises: KeelError for an unknown task, a missing file or dataset, or one in another shape.
    """
    if name not in GLUE_TASKS:
        raise KeelError(f"no GLUE task {name!r}; {suggest(name, GLUE_TASKS)}")
    folder, read = GLUE_TASKS[name]
    try:
        train, dev = _hub(source, name) if source.startswith("hub:") else read(data_path(source) / folder)
    except (KeyError, ValueError, IndexError, xml.etree.ElementTree.ParseError) as error:
        raise KeelError(
            f"GLUE task {name!r} in {source}: a file has another shape than expected ({error!r})"
        ) from error
    if not train or not dev:
        raise KeelError(f"GLUE task {name!r} in {source}: {len(train)} examples to train, {len(dev)} to develop on")
    known = {_key(one) for one in dev}
    kept = tuple(one for one in train if _key(one) not in known)
    return GlueTask(name=name, numeric=name == "stsb", train=kept, dev=tuple(dev), dropped=len(train) - len(kept))


def _key(pair: TextPair) -> tuple[str, str]:
    """Letters and digits alone: copies of a corpus differ in spaces, quotes and case."""
    first, second = (re.sub(r"[\W_]+", "", text or "").lower() for text in (pair.first, pair.second))
    return first, second


Examples = tuple[list[TextPair], list[TextPair]]


def _hub(source: str, name: str) -> Examples:
    def read(split: str) -> list[TextPair]:
        rows = read_rows(f"{source}:{name}:{split}")
        return [
            TextPair(
                first=row.get("sentence", row.get("sentence1")), second=row.get("sentence2"), label=float(row["label"])
            )
            for row in rows
        ]

    return read("train"), read("validation")


def _sst2(folder: Path) -> Examples:
    def read(name: str) -> list[TextPair]:
        rows = _read(folder, name).splitlines()[1:]
        pairs = (row.split("\t") for row in rows if row.strip())
        return [TextPair(first=text, label=int(label)) for label, text in pairs]

    return read("train.tsv"), read("dev.tsv")


def _mrpc(folder: Path) -> Examples:
    rows = csv.reader(io.StringIO(_read(folder, "msr_paraphrase_train.txt", "utf-8-sig")), delimiter="\t")
    next(rows)
    return [TextPair(first=row[3], second=row[4], label=int(row[0])) for row in rows if row], _jsonl(folder)


def _rte(folder: Path) -> Examples:
    files = sorted({path.name.removesuffix(".gz") for path in folder.glob("rte*.xml*")})
    if not files:
        raise KeelError(f"{folder}: no rte*.xml")
    return [pair for name in files for pair in _entailment(_read(folder, name))], _jsonl(folder)


def _entailment(text: str) -> Iterator[TextPair]:
    for pair in xml.etree.ElementTree.fromstring(text.encode()).iter("pair"):
        follows = (pair.get("entailment") or pair.get("value") or "").upper() in ("YES", "TRUE")
        parts = (" ".join((pair.findtext(part) or "").split()) for part in ("t", "h"))
        yield TextPair(first=next(parts), second=next(parts), label=0 if follows else 1)  # GLUE's numbers


def _stsb(folder: Path) -> Examples:
    def read(name: str) -> list[TextPair]:
        rows = csv.reader(io.StringIO(_read(folder, name)))
        return [TextPair(first=row[0], second=row[1], label=float(row[2])) for row in rows if row]

    return read("stsb-en-train.csv"), read("stsb-en-dev.csv")


def _jsonl(folder: Path) -> list[TextPair]:
    rows = [json.loads(line) for line in _read(folder, "glue_dev.jsonl").split("\n") if line.strip()]
    return [TextPair(first=row["sentence1"], second=row["sentence2"], label=int(row["label"])) for row in rows]


def _read(folder: Path, name: str, encoding: str = "utf-8") -> str:
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise KeelError(f"{folder}: no {name} (nor {name}.gz); put it there")
    return read_text(path, encoding)


GLUE_TASKS: dict[str, tuple[str, Callable[[Path], Examples]]] = {
    "sst2": ("SST-2", _sst2),
    "mrpc": ("MRPC", _mrpc),
    "rte": ("RTE", _rte),
    "stsb": ("STS-B", _stsb),
}
"""Every task: its folder, and how its training and development examples are read."""
