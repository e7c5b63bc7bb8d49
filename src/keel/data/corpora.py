"""Corpora: documents of real text, without duplicates, in training, validation and test splits that share nothing."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from keel.data.sources import SPLITS, Document, Reader, Splits, read_hub, read_stdlib, unwrap_lines
from keel.errors import KeelError, suggest


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text to read and how to split it.

    Attributes:
        source: ``stdlib`` (the running Python's library), a path of a file or folder (txt, md, py, jsonl, parquet, each
            also .gz), ``data:NAME`` (a folder below the data root, see ``data_root``) or ``hub:DATASET[:CONFIG]``.
        sources: several of these instead, at least two; each keeps its own splits, or is split on its own.
        text_field: field of a jsonl or parquet row, or of a Hub dataset, that holds the text.
        encoding: encoding of text files.
        valid_fraction: share of the documents for validation where the source has no such split, in (0, 1).
        test_fraction: the same for testing.
        seed: chooses which documents these are.
        max_bytes: most UTF-8 bytes of training text; validation and test text stay whole, so that results compare.
        unwrap: join the lines of documents that were broken at a width (``unwrap_lines``), so that a line is a paragraph.
    """

    source: str = ""
    sources: tuple[str, ...] = ()
    text_field: str = "text"
    encoding: str = "utf-8"
    valid_fraction: float = 0.05
    test_fraction: float = 0.05
    seed: int = 0
    max_bytes: int | None = None
    unwrap: bool = False

    def __post_init__(self) -> None:
        """Check ranges. Raises: KeelError."""
        if self.sources and (self.source or len(set(self.sources)) < max(2, len(self.sources))):
            raise KeelError(
                f"corpus sources {list(self.sources)} with source {self.source!r}; give source alone, or at least two different sources"
            )
        if not self.source and not all(self.sources or ("",)):
            raise KeelError("corpus source is empty; give stdlib, a path, data:NAME or hub:DATASET")
        if not (self.valid_fraction > 0 and self.test_fraction > 0 and self.valid_fraction + self.test_fraction < 1):
            raise KeelError(
                f"valid_fraction {self.valid_fraction} and test_fraction {self.test_fraction} must each be above 0 "
                "and together below 1"
            )
        if self.max_bytes is not None and self.max_bytes < 1:
            raise KeelError(f"max_bytes is {self.max_bytes}, expected at least 1; leave it out to read everything")
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise KeelError(f"unknown encoding {self.encoding!r}; expected a codec such as utf-8 or latin-1") from error

    @property
    def label(self) -> str:
        """What the source, or all of them, are called in reports and messages."""
        return self.source or " + ".join(self.sources)

    def each(self) -> list[CorpusConfig]:
        """Return a configuration a source."""
        return [dataclasses.replace(self, source=one, sources=()) for one in self.sources] or [self]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents in three splits; no text occurs twice, within a split or across splits.

    Attributes:
        name: what the corpus is called in reports.
        train, valid, test: documents in the order of their source; none is empty.
        fingerprint: sha256 over the texts of all splits in order. Every field of the config that changes a text, a
            split or an order changes it; the folder in which the files lie does not.
    """

    name: str
    train: list[Document]
    valid: list[Document]
    test: list[Document]
    fingerprint: str

    def splits(self) -> dict[str, list[Document]]:
        """Return the three splits by name, in the order train, valid, test."""
        return {"train": self.train, "valid": self.valid, "test": self.test}


def load_corpus(config: CorpusConfig) -> Corpus:
    """Read, deduplicate and split the text that ``config`` names.

    Documents of white space alone are dropped. Of documents with exactly the same text one stays, in the test split
    before the validation split before the training split. A source without a validation or test split gives some of
    its training documents, chosen by a hash of their content and the seed; with too few documents for that, each is cut
    at line ends into a first part for training, then validation, then test.

    Raises: KeelError, one line, where the text is missing, unreadable, empty or too short to be split.
    """
    parts = config.each()
    names, found = zip(*map(_read, parts), strict=True)
    for part, splits in zip(parts, found, strict=True):
        if "train" not in splits:
            raise KeelError(
                f"corpus {part.source} has no train split (found: {', '.join(splits)}); choose another source"
            )
    kept = _deduplicate(found)
    for part, splits in zip(parts, kept, strict=True):
        if not any(splits.values()):
            raise KeelError(f"corpus {part.source} is empty: no document with text; give a corpus that has some")
    completed = [_complete(splits, part) for splits, part in zip(kept, parts, strict=True)]
    splits = {split: [document for part in completed for document in part[split]] for split in SPLITS}
    if config.max_bytes is not None:
        splits["train"] = _limit(splits["train"], config.max_bytes, config.seed)
    for split in SPLITS:
        if not splits[split]:
            raise KeelError(
                f"corpus {config.label}: no text left for the {split} split, once empty documents and copies of "
                "documents in other splits are removed; give more text"
            )
    return Corpus(" + ".join(names), splits["train"], splits["valid"], splits["test"], _fingerprint(splits))


def read_documents(config: CorpusConfig) -> list[Document]:
    """Read the documents of a source that is evaluated on and not trained on, in order and without splits or repetitions.

    A source with splits of its own gives its test split. Raises: KeelError where there is no text.
    """
    read = [found for _, found in map(_read, config.each())]
    given = [{"test": found.get("test") or [one for part in found.values() for one in part]} for found in read]
    documents = [document for kept in _deduplicate(given) for document in kept["test"]]
    if not documents:
        raise KeelError(f"corpus {config.label} is empty: no document with text; give a corpus that has some")
    return documents


def data_root() -> Path:
    """Return the folder that ``data:NAME`` refers to: KEEL_DATA, else ``../shared/data`` beside the project.

    Raises: KeelError where there is none.
    """
    named = os.environ.get("KEEL_DATA")
    project = Path(__file__).resolve().parents[3]
    places = [Path(named).expanduser()] if named else [place.parent / "shared/data" for place in (Path.cwd(), project)]
    for place in places:
        if place.is_dir():
            return place
    raise KeelError(
        f"no data root (looked at {', '.join(map(str, dict.fromkeys(places)))}); set the environment variable "
        "KEEL_DATA to the folder that holds the corpora"
    )


def split_fingerprint(documents: Iterable[Document]) -> str:
    """Return a sha256 over the texts in order; names do not count."""
    total = hashlib.sha256()
    for document in documents:
        total.update(_digest(document))
    return total.hexdigest()


def _read(config: CorpusConfig) -> tuple[str, Splits]:
    name, found = _read_source(config)
    if config.unwrap:
        found = {
            split: [Document(one.name, unwrap_lines(one.text)) for one in documents]
            for split, documents in found.items()
        }
    return name, found


def _read_source(config: CorpusConfig) -> tuple[str, Splits]:
    reader = Reader(config.text_field, config.encoding)
    kind, _, rest = config.source.partition(":")
    if config.source == "stdlib":
        return "stdlib", {"train": read_stdlib()}
    if kind == "hub":
        return rest, read_hub(rest, config.text_field, _bytes_to_fetch(config))
    if kind == "data":
        root = data_root()
        if not rest or not (root / rest).exists():
            names = [path.name for path in root.iterdir() if path.is_dir()]
            raise KeelError(f"data root {root} has no corpus {rest!r}; {suggest(rest, names)}")
        return rest, reader.read_path(root / rest)
    path = Path(config.source).expanduser()
    return path.resolve().name, reader.read_path(path)


def _bytes_to_fetch(config: CorpusConfig) -> int | None:
    """Return how much text to read so that ``max_bytes`` are left to train on when other splits have been taken from it."""
    if config.max_bytes is None:
        return None
    return math.ceil(config.max_bytes / (1 - config.valid_fraction - config.test_fraction))


def _digest(document: Document) -> bytes:
    try:
        return hashlib.sha256(document.text.encode()).digest()
    except UnicodeEncodeError as error:
        raise KeelError(
            f"document {document.name} has half a surrogate pair at character {error.start}; repair the text"
        ) from error


def _deduplicate(found: Sequence[Splits]) -> list[Splits]:
    """Drop blank documents and texts that occur twice, in any source; the test split keeps its copy first, then valid, then train."""
    seen: set[bytes] = set()
    kept: list[Splits] = [{split: [] for split in reversed(SPLITS) if split in part} for part in found]
    for split in reversed(SPLITS):
        for part, left in zip(found, kept, strict=True):
            for document in part.get(split, ()):
                digest = _digest(document)
                if digest not in seen and document.text.strip():
                    seen.add(digest)
                    left[split].append(document)
    return kept


def _complete(kept: Splits, config: CorpusConfig) -> Splits:
    """Take the splits that the source lacks from its training documents."""
    fractions = {"valid": config.valid_fraction, "test": config.test_fraction}
    missing = {split: fraction for split, fraction in fractions.items() if split not in kept}
    if not missing:
        return kept
    train = kept["train"]
    taken = (
        _by_document(train, missing, config.seed) if len(train) > len(missing) else _by_cutting(train, missing, config)
    )
    return {**kept, **taken}


def _by_document(train: list[Document], missing: dict[str, float], seed: int) -> Splits:
    order = _hash_order(train, seed)
    splits: Splits = {}
    for split, fraction in missing.items():
        count = min(max(1, round(fraction * len(train))), len(order) - 1)
        chosen, order = set(order[:count]), order[count:]
        splits[split] = [document for index, document in enumerate(train) if index in chosen]
    rest = set(order)
    splits["train"] = [document for index, document in enumerate(train) if index in rest]
    return splits


def _by_cutting(train: list[Document], missing: dict[str, float], config: CorpusConfig) -> Splits:
    splits: Splits = {split: [] for split in ("train", *missing)}
    for document in train:
        end = len(document.text)
        bounds = [0]
        remaining = 1.0 - sum(missing.values())
        for fraction in (*missing.values(), 0.0):
            bounds.append(end if fraction == 0.0 else _line_end(document.text, int(remaining * end)))
            remaining += fraction
        for split, start, stop in zip(splits, bounds, bounds[1:], strict=False):
            splits[split].append(Document(f"{document.name}#{split}", document.text[start:stop]))
    texts = [document.text.strip() for part in splits.values() for document in part]
    if not all(texts) or len(set(texts)) < len(texts):
        raise KeelError(
            f"corpus {config.source} is too short: {sum(len(document.text) for document in train)} characters in "
            f"{len(train)} document(s) cannot be cut at line ends into {len(splits)} different parts; give more text"
        )
    return splits


def _line_end(text: str, position: int) -> int:
    """Return the index after the first line end at or after ``position``, or the length of the text."""
    found = text.find("\n", position)
    return len(text) if found < 0 else found + 1


def _limit(train: list[Document], max_bytes: int, seed: int) -> list[Document]:
    """Keep documents, in hash order, up to ``max_bytes``; the last is cut between characters. The order stays."""
    kept: dict[int, Document] = {}
    left = max_bytes
    for index in _hash_order(train, seed):
        data = train[index].text.encode()
        kept[index] = Document(train[index].name, data[:left].decode(errors="ignore"))
        left -= len(data)
        if left <= 0:
            break
    return [kept[index] for index in sorted(kept) if kept[index].text.strip()]


def _hash_order(documents: list[Document], seed: int) -> list[int]:
    """Return indices sorted by a hash of seed and content, which does not depend on names or on their order."""
    keys = [hashlib.sha256(f"{seed}:".encode() + _digest(document)).digest() for document in documents]
    return sorted(range(len(documents)), key=keys.__getitem__)


def _fingerprint(splits: Splits) -> str:
    return hashlib.sha256(
        "\n".join(f"{split} {split_fingerprint(splits[split])}" for split in SPLITS).encode()
    ).hexdigest()
