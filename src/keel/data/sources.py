"""Where documents come from: files and folders, datasets of the Hub, the standard library of the running Python."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from keel.errors import KeelError, suggest

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
SPLITS = ("train", "valid", "test")

# `train`, `test.txt`, `valid-00000-of-00003.jsonl.gz`, but not `test_model.py`: a folder of code has no splits.
_SPLIT_NAME = re.compile(r"(train|valid|validation|test)([-_.]?\d+(-of-\d+)?)?(\.(txt|md|jsonl|parquet))?(\.gz)?")
_HUB_SPLITS = {"train": "train", "validation": "valid", "valid": "valid", "dev": "valid", "test": "test"}
# The one level-1 heading of a WikiText article: ` = Title = `, where sections have ` = = Title = = `.
# What a broken line may measure, and how many lines with one after them it takes to tell.
_WIDTHS = (40, 120)
_FEWEST_PAIRS = 10
_WIKITEXT_ARTICLE = re.compile(r" = (?!=)[^\n]*(?<!=) = \n?")
# Tests and other people's packages are not the library; `encodings` holds 120 generated tables that are nearly equal,
# so that a table in the test split would have a twin in the training split; `_sysconfigdata*` differs by machine.
_STDLIB_EXCLUDED = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "idle_test",
        "__pycache__",
        "encodings",
    }
)


class Document(NamedTuple):
    """One text with the name by which messages and results refer to it."""

    name: str
    text: str


Splits = dict[str, list[Document]]


class Reader(NamedTuple):
    """How bytes become documents: the field of a jsonl or parquet row, and the encoding of text."""

    text_field: str
    encoding: str

    def read_path(self, path: Path) -> Splits:
        """Read a file or a folder; a folder with splits of its own (see ``find_splits``) keeps them.

        Raises: KeelError where the path is missing, of an unknown kind, unreadable, binary, or in another encoding.
        """
        if path.is_file():
            return {"train": self.read_file(path, path.name)}
        if not path.is_dir():
            raise KeelError(f"corpus {path} does not exist; give a file, a folder, data:NAME, hub:DATASET or stdlib")
        entries = find_splits(path)
        if not entries:
            return {"train": self._read_tree(path, path)}
        return {
            split: [document for entry in paths for document in self._read_tree(entry, path)]
            for split, paths in entries.items()
        }

    def _read_tree(self, path: Path, root: Path) -> list[Document]:
        files = [path] if path.is_file() else _walk(path)
        usable = [file for file in files if _kind(file) in SUFFIXES]
        if not usable:
            found = sorted({_kind(file) or "no suffix" for file in files})
            raise KeelError(
                f"folder {path} has no file that can be read (found: {', '.join(found) or 'nothing'}); "
                f"expected {', '.join(SUFFIXES)}, each also as .gz"
            )
        return [document for file in usable for document in self.read_file(file, file.relative_to(root).as_posix())]

    def read_file(self, path: Path, name: str) -> list[Document]:
        """Read one file: a document, or for jsonl and parquet a document a row, named ``name:row`` from 1.

        Raises: KeelError naming the file, and the byte offset or row at fault.
        """
        kind = _kind(path)
        if kind not in SUFFIXES:
            raise KeelError(
                f"file {path}: unknown suffix {kind!r}; expected {', '.join(SUFFIXES)}, each also with .gz after it"
            )
        data = _read_bytes(path)
        if not data:
            return [Document(name, "")]
        if kind == ".parquet":
            return self._parquet(data, path, name)
        text = self._decode(data, path)
        return self._jsonl(text, path, name) if kind == ".jsonl" else [Document(name, text)]

    def _decode(self, data: bytes, path: Path) -> str:
        try:
            text = data.decode(self.encoding)
        except UnicodeDecodeError as error:
            if b"\0" in data:
                raise _binary(path, data.index(b"\0")) from error
            raise KeelError(
                f"file {path} is not {self.encoding}: byte 0x{data[error.start]:02x} at byte offset {error.start}; "
                "convert the file or set `encoding` (old books are often latin-1)"
            ) from error
        if "\0" in text:
            raise _binary(path, len(text[: text.index("\0")].encode(self.encoding)))
        return text

    def _jsonl(self, text: str, path: Path, name: str) -> list[Document]:
        documents = []
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise KeelError(
                        f"file {path}, line {number}: not JSON ({error}); write one object a line"
                    ) from error
                documents.append(Document(f"{name}:{number}", self._field(row, f"file {path}, line {number}")))
        return documents

    def _parquet(self, data: bytes, path: Path, name: str) -> list[Document]:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
            check_field(self.text_field, file.schema_arrow.names, f"file {path}")
            values = file.read(columns=[self.text_field]).column(0).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise KeelError(f"file {path} is not readable parquet ({_first_line(error)}); write it again") from error
        return rows_to_documents(values, name)

    def _field(self, row: Any, where: str) -> str:
        if not isinstance(row, dict):
            raise KeelError(
                f"{where}: expected a JSON object with the field {self.text_field!r}, found {type(row).__name__}"
            )
        check_field(self.text_field, row, where)
        return _as_text(row[self.text_field], f"{where}, field {self.text_field!r}")


def find_splits(folder: Path) -> dict[str, list[Path]]:
    """Return the entries of ``folder`` that are named as splits, or nothing where it has no splits of its own.

    Splits are subfolders ``train``, ``valid``, ``test`` or data files such as ``train-00000-of-00003.jsonl.gz``; a
    folder has them when there is a ``train`` and at least one other. What lies beside them is then not read.
    """
    entries: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _SPLIT_NAME.fullmatch(path.name)
        if match and (path.is_dir() or _kind(path) in SUFFIXES):
            entries.setdefault(match[1].removesuffix("ation"), []).append(path)
    return entries if "train" in entries and len(entries) > 1 else {}


def read_hub(name: str, text_field: str, most_bytes: int | None = None) -> Splits:
    """Read ``dataset`` or ``dataset:config`` from the Hugging Face Hub, a document a row.

    WikiText has a line a row: its rows are joined to whole articles.

    Args:
        most_bytes: UTF-8 bytes of training text after which no more of it is fetched: its first rows, and a corpus of terabytes costs what
            is read of it. The other splits are read whole. None for everything, which is downloaded first.
    Raises: KeelError where the dataset cannot be had, has no split of a known name, or lacks ``text_field``.
    """
    import datasets

    path, _, config = name.partition(":")
    splits: Splits = {}
    with _hub_errors(name):
        found = datasets.load_dataset(path, config or None, streaming=most_bytes is not None)
        for split, rows in found.items():
            kind = _HUB_SPLITS.get(str(split))
            if kind:
                wanted = most_bytes if kind == "train" else None
                values = _up_to(_values(rows, text_field, f"hub:{name}"), wanted)
                documents = rows_to_documents(values, str(split))
                splits[kind] = join_wikitext(documents) if path.endswith("wikitext") else documents
    if not splits:
        raise KeelError(
            f"hub:{name} has no split {', '.join(SPLITS)} (found: {', '.join(map(str, found))}); choose another configuration"
        )
    return splits


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Tell in one line what fails while a dataset is loaded or, streamed, while its rows come in."""
    try:
        yield
    except KeelError:
        raise
    except Exception as error:  # the library raises what its many backends do
        raise KeelError(
            f"hub:{name} cannot be loaded ({_first_line(error)}); check the name and the connection"
        ) from error


def _values(rows: Any, field: str, where: str) -> Iterator[Any]:
    """Yield one column of a dataset, which need not know its columns before it is read."""
    if rows.column_names is not None:
        check_field(field, rows.column_names, where)
        rows = rows.select_columns([field])
    for number, row in enumerate(rows):
        if not number:
            check_field(field, row, where)
        yield row[field]


def _up_to(values: Iterable[Any], most_bytes: int | None) -> Iterator[Any]:
    """Yield values until their texts have ``most_bytes``; the one that reaches it is the last."""
    left = math.inf if most_bytes is None else most_bytes
    for value in values:
        yield value
        left -= len(value.encode()) if isinstance(value, str) else 0
        if left <= 0:
            return


def join_wikitext(lines: Iterable[Document]) -> list[Document]:
    """Join WikiText's rows, a line each, to one document an article; lines before the first heading are their own."""
    articles: list[tuple[str, list[str]]] = []
    for line in lines:
        if _WIKITEXT_ARTICLE.fullmatch(line.text) or not articles:
            articles.append((line.name, []))
        articles[-1][1].append(line.text)
    return [Document(name, "".join(text)) for name, text in articles]


def line_width(text: str) -> int | None:
    """Return at how many characters the lines of a text were broken, or None where they were not: where a line is a paragraph.

    The width is what four of five lines keep to: the others are the few that reach further, and rows of tables. Lines that were broken
    there end, in two of five cases or more, for want of room for the next word; lines that end with their paragraph, verse or
    statement do so in one of five.
    """
    lines = [line.rstrip() for line in text.split("\n")]
    lengths = sorted(len(line) for line in lines if line)
    pairs = [
        (len(line), len(after.split(maxsplit=1)[0])) for line, after in itertools.pairwise(lines) if line and after
    ]
    if len(pairs) < _FEWEST_PAIRS:
        return None
    width = lengths[int(0.8 * len(lengths))]
    full = sum(_is_full(length, word, width) for length, word in pairs)
    return width if _WIDTHS[0] <= width <= _WIDTHS[1] and full >= 0.4 * len(pairs) else None


def _is_full(length: int, word: int, width: int) -> bool:
    """Whether a line of ``length`` had no room for a word: a line far longer than the width is none of running text."""
    return length <= 1.25 * width and length + 1 + word >= width


def unwrap_lines(text: str) -> str:
    """Join the lines that were broken at a width (``line_width``), with one space and without the second's indent.

    A line is joined to the one before where its first word would have filled that one to the width: it was broken there for want of
    room. One that would have fitted (a heading, a row of a table, the end of a paragraph) was ended on purpose and stays. A text
    whose lines were not broken is returned as it is.
    """
    width = line_width(text)
    if width is None:
        return text
    joined: list[str] = []
    before = 0  # length of the printed line before this one
    for line in text.split("\n"):
        first = line.split(maxsplit=1)[:1]
        if before and first and _is_full(before, len(first[0]), width):
            joined[-1] += " " + line.lstrip()
        else:
            joined.append(line)
        before = len(line.rstrip())
    return "\n".join(joined)


def read_stdlib() -> list[Document]:
    """Read the ``*.py`` files of the running Python's standard library, sorted by path.

    Left out: site-packages, tests, idlelib, the generated tables of ``encodings`` and ``_sysconfigdata*``.
    Raises: KeelError on an installation without library sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    reader = Reader("text", "utf-8")
    files = [file for file in _walk(root, _STDLIB_EXCLUDED) if file.suffix == ".py"]
    documents = [
        document
        for file in files
        if not file.name.startswith("_sysconfigdata")
        for document in reader.read_file(file, file.relative_to(root).as_posix())
    ]
    if not documents:
        raise KeelError(f"this Python has no library sources under {root}; give a file or folder as the corpus")
    return documents


def rows_to_documents(values: Iterable[Any], name: str) -> list[Document]:
    """Return a document a row, named ``name:row`` from 1; a missing value (None) becomes an empty text."""
    return [
        Document(f"{name}:{row}", "" if value is None else _as_text(value, f"{name}, row {row}"))
        for row, value in enumerate(values, start=1)
    ]


def check_field(field: str, fields: Iterable[str], where: str) -> None:
    """Raise a KeelError that names the nearest field where ``field`` is not one of ``fields``."""
    names = [str(name) for name in fields]
    if field not in names:
        raise KeelError(f"{where}: no field {field!r}; set `text_field`: {suggest(field, names)}")


def _as_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise KeelError(f"{where}: expected text, found {type(value).__name__}; set `text_field` to a field of text")
    return value


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def _walk(folder: Path, excluded: frozenset[str] = frozenset()) -> list[Path]:
    """Return all files below ``folder``, sorted, but hidden ones and those in ``__pycache__`` or ``excluded``."""
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and name != "__pycache__" and name not in excluded
        ]
        files += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda file: file.parts)


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix.lower() == ".gz" else data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise KeelError(f"file {path} is not a whole gzip file ({error}); copy or compress it again") from error
    except OSError as error:
        raise KeelError(f"file {path} cannot be read: {error.strerror}; check its permissions") from error


def _binary(path: Path, offset: int) -> KeelError:
    return KeelError(
        f"file {path} is binary: a NUL byte at byte offset {offset}; expected text, remove it from the corpus"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
