"""Tokenizers: a byte-level BPE trained on a corpus, or any pretrained fast tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import tokenizers
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from keel.data.corpora import Corpus, split_fingerprint
from keel.data.store import write_cached
from keel.errors import KeelError
from keel.files import resolve_cache_dir

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SMALLEST_VOCABULARY = 256 + 2
_LONG_BYTES = 5_000_000


def train_bpe(corpus: Corpus, vocab_size: int, cache_dir: str | Path | None = None) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the training split alone; it encodes any text and gives it back exactly.

    Args:
        corpus: its ``train`` documents are read, in order; the result depends on nothing else.
        vocab_size: tokens, the 256 bytes, ``<|endoftext|>`` (end of a document) and ``<|pad|>`` among them; a
            short text with too few repeated pairs gives fewer.
        cache_dir: where a tokenizer of the same text and size is looked up and kept; see ``resolve_cache_dir``.
    Returns: a tokenizer with ``eos_token`` and ``pad_token``.
    Raises: KeelError for a ``vocab_size`` below 258, or a cache that cannot be written.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise KeelError(
            f"vocab_size is {vocab_size}, expected at least {SMALLEST_VOCABULARY} (256 bytes and 2 special tokens)"
        )
    identity = f"bpe 1 {tokenizers.__version__} {vocab_size} {split_fingerprint(corpus.train)}"
    path = resolve_cache_dir(cache_dir) / "tokenizers" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    backend = _load(path)
    if backend is None:
        backend = _train(corpus, vocab_size)
        entry = _entry(backend.to_str())
        write_cached(path, entry)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_OF_TEXT, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def load_tokenizer(
    name_or_path: str | Path,
    prepare: Callable[[PreTrainedTokenizerBase], PreTrainedTokenizerBase] | None = None,
) -> PreTrainedTokenizerBase:
    """Load a pretrained tokenizer from a folder or the Hub; ``prepare`` may add to it what it lacks.

    Raises: KeelError where it cannot be found, has no fast version (offsets are needed), or no end-of-text token.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(name_or_path), use_fast=True, trust_remote_code=False
        )
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise KeelError(f"tokenizer {name_or_path} cannot be loaded ({reason}); check name or folder") from error
    if prepare is not None:
        tokenizer = prepare(tokenizer)
    check_tokenizer(tokenizer)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a KeelError unless ``tokenizer`` is a fast one with an end-of-text token."""
    if not tokenizer.is_fast:
        raise KeelError(f"tokenizer {tokenizer.name_or_path} is a slow one; use its fast version (tokenizer.json)")
    if tokenizer.eos_token_id is None:
        raise KeelError(f"tokenizer {tokenizer.name_or_path} has no eos_token to end documents with; set one")


def _train(corpus: Corpus, vocab_size: int) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts: Iterator[str] = (document.text for document in corpus.train)
    if sum(len(document.text) for document in corpus.train) < _LONG_BYTES:
        backend.train_from_iterator(texts, trainer)
    else:
        with Console(stderr=True).status(f"Training a tokenizer of {vocab_size:,} tokens"):
            backend.train_from_iterator(texts, trainer)
    return backend


def _entry(text: str) -> bytes:
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokenizer": text}).encode()


def _load(path: Path) -> Tokenizer | None:
    """Return the cached tokenizer, or None where it is missing or fails its checksum."""
    try:
        entry = json.loads(path.read_bytes())
        text = entry["tokenizer"]
        if hashlib.sha256(text.encode()).hexdigest() == entry["sha256"]:
            return Tokenizer.from_str(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None
