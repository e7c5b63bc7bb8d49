"""Chunks kept on disk, found by token ids: one SQLite file in WAL mode, many readers and one writer at a time.

A row's key is a hash of the tokenizer's fingerprint, the source and its version, the scope, the most chunks a height, and the token
ids; its value is compressed and ends with a checksum over key and value. A row that fails its checksum counts as missing, so that the
next build makes it anew: there is a tree of these very tokens, or none.

A transaction is a batch of rows: a builder that is killed loses its last batch and nothing else; two builders at once write the
same rows twice.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from keel.errors import KeelError
from keel.trees.align import MAX_CHUNKS
from keel.trees.chunks import ALWAYS, ARRAYS, Chunks, Scope
from keel.trees.corrupted import CORRUPTIONS
from keel.trees.lookup import LOOKUPS, Lookup

logger = logging.getLogger(__name__)

FIELDS_OF = "fields of "  # before the source's name, where prompts were read field by field
_FORMAT = 1
_KEY_BYTES, _CHECK_BYTES = 16, 8
_WAIT_SECONDS = 60.0
_MAGIC = b"SQLite format 3\0"
_TABLES = """
CREATE TABLE IF NOT EXISTS makings (digest BLOB PRIMARY KEY, described TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, kw_only=True)
class Making:
    """How chunks were made; those of one making are never found by another.

    Attributes:
        tokenizer: ``tokenizer_fingerprint`` of what made the ids.
        source, version: of the ``TreeSource``.
        scope, max_chunks: see ``keel.trees.align``.
    """

    tokenizer: str
    source: str
    version: str
    scope: Scope
    max_chunks: int

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes that tell it from others."""
        described = json.dumps([_FORMAT, *asdict(self).values()])
        return hashlib.blake2b(described.encode(), digest_size=16).digest()

    def key(self, ids: Sequence[int]) -> bytes:
        """Return the key of the row that holds the chunks of these token ids."""
        return _hash(self.digest, np.asarray(ids, dtype="<i4").tobytes(), size=_KEY_BYTES)


def plain_tokenizer(backend: str) -> Tokenizer:
    """Return a fast tokenizer, given as ``tokenizer.backend_tokenizer.to_str()``, that neither pads nor cuts off.

    Both are settings that an earlier call of transformers' tokenizer leaves switched on.
    """
    tokenizer: Tokenizer = Tokenizer.from_str(backend)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return a short hash of what ``plain_tokenizer`` gives."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16]


class TreeCache:
    """One file of chunks. It may be used in several threads and processes, and after a fork: each has a connection of its own.

    Args:
        path: the file; made, with its folder, unless ``read_only``.
        read_only: never write; the file must exist.
    Raises: KeelError for a file that is missing, damaged as a whole, or no cache of trees.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        self.path, self.read_only = Path(path), read_only
        self._local = threading.local()
        if read_only and not self.path.is_file():
            raise KeelError(f"there is no cache of trees at {self.path}; build it with keel trees build")
        with self._reporting():
            if self.path.exists() and not _may_be_a_cache(self.path):
                raise KeelError(f"{self.path} is there and is no cache of trees; name another file")
            if not read_only:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._connection().executescript(_TABLES)
            self._connection().execute("SELECT value FROM chunks LIMIT 1").fetchone()

    def get(self, making: Making, ids: Sequence[int]) -> Chunks | None:
        """Return the chunks of these token ids, or None where they are missing or damaged."""
        return self.get_key(making.key(ids), making.scope)

    def get_key(self, key: bytes, scope: Scope) -> Chunks | None:
        """See ``get``."""
        with self._reporting():
            row = self._connection().execute("SELECT value FROM chunks WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        chunks = decode(key, row[0], scope)
        if chunks is None:
            logger.warning("a row of %s fails its checksum; the next build makes it anew", self.path)
        return chunks

    def put(self, making: Making, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Write rows of (key, value as ``encode`` makes it) in one transaction; a row that is there is replaced."""
        with self._reporting():
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.execute(
                    "INSERT OR IGNORE INTO makings VALUES (?, ?)", (making.digest, json.dumps(asdict(making)))
                )
                connection.executemany("INSERT OR REPLACE INTO chunks VALUES (?, ?)", rows)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # a full disk has ended it
                    connection.execute("ROLLBACK")
                raise

    def makings(self) -> list[Making]:
        """Return how the rows were made, in no order."""
        with self._reporting():
            rows = self._connection().execute("SELECT described FROM makings").fetchall()
        return [Making(**json.loads(row[0])) for row in rows]

    def __len__(self) -> int:
        """Return the number of rows, damaged ones among them."""
        with self._reporting():
            count: int = self._connection().execute("SELECT COUNT(*) FROM chunks").fetchone()[0]
        return count

    def close(self) -> None:
        """Close this thread's connection."""
        _, connection = getattr(self._local, "connection", (0, None))
        if connection is not None:
            connection.close()
        self._local = threading.local()

    def _connection(self) -> sqlite3.Connection:
        process, connection = getattr(self._local, "connection", (0, None))
        if connection is None or process != os.getpid():
            mode = "ro" if self.read_only else "rwc"
            # A reader of a WAL writes beside the file. Where it may not, nobody writes who could change what is read.
            if self.read_only and not os.access(self.path.parent, os.W_OK) and not _beside(self.path, "-wal").exists():
                mode = "ro&immutable=1"
            where = f"{self.path.absolute().as_uri()}?mode={mode}"
            connection = sqlite3.connect(where, uri=True, timeout=_WAIT_SECONDS, isolation_level=None)
            if not self.read_only:
                _write_ahead(connection)
                connection.execute("PRAGMA synchronous = NORMAL")
            self._local.connection = os.getpid(), connection
        return connection

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            # SQLite's own class for a full disk, a lock or a missing right; what is left is a damaged file.
            to_do = (
                "see to that and start again"
                if isinstance(error, OSError | sqlite3.OperationalError)
                else "it is damaged: delete it and build it again"
            )
            raise KeelError(f"the cache of trees {self.path} cannot be used ({error}); {to_do}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "read_only": self.read_only}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeCache:
        return TreeCache(self.path, self.read_only)


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Set a file to WAL mode, once. SQLite does not wait for the lock that this takes: two that open a new file at once would fail."""
    until = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            locked = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not locked or time.monotonic() > until:
                raise
            time.sleep(0.02)


def _may_be_a_cache(path: Path) -> bool:
    """Return whether a path is a file of SQLite's, or an empty one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) in (b"", _MAGIC)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def encode(key: bytes, chunks: Chunks) -> bytes:
    """Return the value of a row: compressed arrays of two or four bytes a number, and the checksum."""
    table = np.stack([getattr(chunks, name) for name in ARRAYS])
    table = np.where(table == ALWAYS, -2, table)
    width = "<i2" if table.size == 0 or table.max() < 2**15 else "<i4"
    packed = width[-1].encode() + zlib.compress(table.astype(width).tobytes(), 1)
    return packed + _hash(key, packed, size=_CHECK_BYTES)


def decode(key: bytes, value: bytes, scope: Scope) -> Chunks | None:
    """Return the chunks of a row's value, or None where the checksum does not fit this key and value."""
    packed, check = value[:-_CHECK_BYTES], value[-_CHECK_BYTES:]
    if len(value) <= _CHECK_BYTES or _hash(key, packed, size=_CHECK_BYTES) != check:
        return None
    flat = np.frombuffer(zlib.decompress(packed[1:]), dtype=f"<i{packed[:1].decode()}").astype(np.int32)
    table = np.where(flat == -2, np.int32(ALWAYS), flat).reshape(len(ARRAYS), -1)
    return Chunks(**dict(zip(ARRAYS, table, strict=True)), scope=scope)


def _hash(*parts: bytes, size: int) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=size).digest()


class CacheLookup:
    """The lookup ``cache:FILE``: what one making of the wanted scope has kept there."""

    def __init__(self, cache: TreeCache, making: Making) -> None:
        self.cache, self.making = cache, making

    def __call__(self, ids: Sequence[int]) -> Chunks | None:
        """See ``keel.trees.lookup.Lookup``."""
        return self.cache.get(self.making, ids)

    def missing(self, ids: Sequence[int]) -> str:
        """Say that there is no row of these tokens, and which command makes it."""
        making = self.making
        source, of_prompts = making.source.removeprefix(FIELDS_OF), making.source.startswith(FIELDS_OF)
        shown = ", ".join(map(str, list(ids)[:6])) + (", …" if len(ids) > 6 else "")
        scope = "" if making.scope == "sentence" else f" --scope {making.scope}"
        what = "PROMPTS.jsonl --prompts" if of_prompts else "TEXT"
        how = (
            f"build it: keel trees build {what} --source {source} --tokenizer TOKENIZER{scope} --out {self.cache.path}"
            if making.max_chunks == MAX_CHUNKS and source.partition(":")[0] not in CORRUPTIONS
            else f"build it in Python, as the others were: source {source}, scope {making.scope}, max_chunks {making.max_chunks}"
        )
        return f"the cache of trees {self.cache.path} has none for {len(ids)} tokens ({shown}); {how}"


def _open_cache(path: str, scope: Scope) -> Lookup:
    cache = TreeCache(path, read_only=True)
    fitting = [making for making in cache.makings() if making.scope == scope]
    if len(fitting) != 1:
        raise KeelError(
            f"lookup cache:{path}: {len(fitting)} ways of making trees of scope {scope!r} are in this file; expected one, so that it is "
            "certain which is meant: build each into a file of its own"
        )
    return CacheLookup(cache, fitting[0])


LOOKUPS["cache"] = _open_cache
