"""Token streams: a split as one array of token ids, with the documents and the UTF-8 bytes that each token covers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Encoding, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from keel.data.corpora import Corpus, split_fingerprint
from keel.data.sources import Document
from keel.data.store import load_arrays, save_arrays
from keel.data.tokenizers import check_tokenizer
from keel.errors import KeelError
from keel.files import resolve_cache_dir

Ints = np.ndarray[Any, np.dtype[np.int32]]
Longs = np.ndarray[Any, np.dtype[np.int64]]
Shorts = np.ndarray[Any, np.dtype[np.uint16]]

_ARRAYS = ("ids", "starts", "token_bytes")
_FORMAT = 1
_BATCH_CHARACTERS = 2_000_000
_LONG_CHARACTERS = 5_000_000
_MOST_BYTES = np.iinfo(np.uint16).max


@dataclass(frozen=True, eq=False)
class TokenStream:
    """All documents of a split, one after the other, each ended by the end-of-text token.

    N tokens, M documents. Arrays are read-only and may be memory-mapped.

    Attributes:
        ids: int32 [N], token ids.
        starts: int64 [M], index of each document's first token, ascending from 0.
        token_bytes: uint16 [N], UTF-8 bytes of text that a token covers; 0 for the end-of-text token. Over a document
            they sum to the length of its text in UTF-8, exactly.
        names: M names, in the order of ``starts``.
    """

    ids: Ints
    starts: Longs
    token_bytes: Shorts
    names: list[str]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    def documents_at(self, positions: Longs) -> Longs:
        """Return the index of the document that holds each position; an end-of-text token ends its own document."""
        found: Longs = np.searchsorted(self.starts, positions, side="right") - 1
        return found


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """A tokenised corpus.

    Attributes:
        train, valid, test: the splits.
        tokenizer: what made the ids.
        fingerprint: sha256 over the texts of all splits and the tokenizer.
    """

    train: TokenStream
    valid: TokenStream
    test: TokenStream
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str


def tokenize_corpus(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, cache_dir: str | Path | None = None
) -> TokenCorpus:
    """Encode every split; text is plain text, also where it spells a special token, and no token is added but the end.

    A split that was encoded before, by content and tokenizer, is read from the cache; a damaged entry is built again.

    Raises: KeelError for a slow tokenizer, one without an end-of-text token, or a cache that cannot be written.
    """
    check_tokenizer(tokenizer)
    encoder = _Encoder(tokenizer)
    folder = resolve_cache_dir(cache_dir) / "tokens"
    streams = {split: _cached(documents, encoder, folder, split) for split, documents in corpus.splits().items()}
    fingerprint = hashlib.sha256(f"{corpus.fingerprint} {encoder.fingerprint}".encode()).hexdigest()
    return TokenCorpus(**streams, tokenizer=tokenizer, fingerprint=fingerprint)


def _cached(documents: list[Document], encoder: _Encoder, folder: Path, split: str) -> TokenStream:
    identity = f"{_FORMAT} {encoder.fingerprint} {split_fingerprint(documents)}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    arrays = load_arrays(folder, key, _ARRAYS)
    if arrays is None:
        save_arrays(folder, key, _encode_all(documents, encoder, split))
        arrays = load_arrays(folder, key, _ARRAYS)
    if arrays is None:
        raise KeelError(
            f"cache entry {folder / key}.* does not read back as written; name another folder in KEEL_CACHE"
        )
    return TokenStream(**arrays, names=[document.name for document in documents])


def _encode_all(documents: list[Document], encoder: _Encoder, split: str) -> dict[str, np.ndarray[Any, Any]]:
    ids: list[Ints] = []
    token_bytes: list[Shorts] = []
    characters = sum(len(document.text) for document in documents)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    quiet = characters < _LONG_CHARACTERS
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task(f"Tokenising {split}, documents", total=len(documents))
        for batch in _batches(documents):
            for document_ids, document_bytes in encoder.encode(batch):
                ids.append(document_ids)
                token_bytes.append(document_bytes)
            progress.advance(task, len(batch))
    lengths = np.array([len(part) for part in ids], dtype=np.int64)
    return {
        "ids": np.concatenate(ids),
        "starts": np.cumsum(lengths) - lengths,
        "token_bytes": np.concatenate(token_bytes),
    }


def _batches(documents: list[Document]) -> Iterator[list[Document]]:
    """Group documents up to a number of characters, since encodings take about 100 bytes of memory a token."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Encoder:
    """A tokenizer's backend, set to read text as plain text, with the byte count of each token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # A copy, since padding, truncation and special tokens are settings of the caller's own object.
        self.backend: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.encode_special_tokens = True
        self.end = int(tokenizer.eos_token_id)
        self.bytes_of_token = _byte_table(self.backend)
        identity = f"{tokenizers.__version__} {self.end} {self.backend.to_str()}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()

    def encode(self, documents: list[Document]) -> Iterator[tuple[Ints, Shorts]]:
        """Yield ids and bytes of each document, the end-of-text token (0 bytes) included."""
        texts = [document.text for document in documents]
        table = self.bytes_of_token
        encode_batch = self.backend.encode_batch if table is None else self.backend.encode_batch_fast
        for document, encoding in zip(documents, encode_batch(texts, add_special_tokens=False), strict=True):
            ids = np.array([*encoding.ids, self.end], dtype=np.int32)
            covered = None if table is None else table[ids[:-1]]
            # A normaliser or an added prefix space changes the text below the table; offsets then tell.
            if covered is None or int(covered.sum()) != len(document.text.encode()):
                covered = self._bytes_by_offsets(document, encoding if table is None else None)
            if covered.max(initial=0) > _MOST_BYTES:
                raise KeelError(
                    f"document {document.name}: one token covers {covered.max()} bytes (limit {_MOST_BYTES}); the "
                    "tokenizer cannot read this text, use another"
                )
            yield ids, np.append(covered, 0).astype(np.uint16)

    def _bytes_by_offsets(self, document: Document, encoding: Encoding | None) -> Longs:
        encoding = encoding or self.backend.encode(document.text, add_special_tokens=False)
        if not encoding.ids:
            raise KeelError(
                f"document {document.name}: the tokenizer finds no token in it; remove it or use another one"
            )
        return bytes_by_offsets(document.text, [end for _, end in encoding.offsets])


def bytes_by_offsets(text: str, ends: list[int]) -> Longs:
    """Give each token the UTF-8 bytes between the end of what came before and its own end.

    Of several tokens on one character the first gets its bytes; what no token reaches goes to the last.

    Args:
        text: the document.
        ends: index of the character after each token; at least one token.
    Returns: int64, a count a token; they sum to the UTF-8 length of ``text``.
    """
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(widths)])
    reached = np.maximum.accumulate(np.asarray(ends, dtype=np.int64))
    reached[-1] = len(text)
    covered: Longs = np.diff(bytes_before[reached], prepend=0)
    return covered


def _byte_table(backend: Tokenizer) -> Longs | None:
    """Return the bytes of each token id for a byte-level tokenizer, whose tokens spell bytes; None for another."""
    decoder = json.loads(backend.to_str())["decoder"]
    if '"ByteLevel"' not in json.dumps(decoder):
        return None
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    for token, index in vocabulary.items():
        table[index] = len(token) if alphabet.issuperset(token) else len(token.encode())
    for index, added in backend.get_added_tokens_decoder().items():
        table[index] = len(added.content.encode())
    return table
