"""Parse a corpus into a cache of chunks, on several processes; what is there already is not parsed again."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from keel.errors import KeelError
from keel.trees.align import MAX_CHUNKS, parsed_prefixes, prefix_chunks, sentence_chunks, token_spans
from keel.trees.build_ray import made_by_ray
from keel.trees.cache import Making, TreeCache, encode, tokenizer_fingerprint
from keel.trees.chunks import Chunks, Scope
from keel.trees.sources import TreeSource, open_source

Engine = Literal["local", "ray"]
_BATCH = 64  # texts a transaction; what a killed builder loses at most for each worker


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """What to build.

    Attributes:
        cache: the file.
        source: name of a ``TreeSource``.
        tokenizer: a fast tokenizer as ``tokenizer.backend_tokenizer.to_str()``; ids are made with its special tokens.
        scope, max_chunks: see ``keel.trees.align``.
        max_tokens: longer texts are cut off there; None for no limit.
    """

    cache: Path
    source: str
    tokenizer: str
    scope: Scope = "sentence"
    max_chunks: int = MAX_CHUNKS
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class BuildCounts:
    """How many texts were parsed, were there already, and have no tree; and what the source said of the first of those."""

    parsed: int = 0
    known: int = 0
    without: int = 0
    reason: str = ""

    def plus(self, other: BuildCounts) -> BuildCounts:
        """Return the sum."""
        return BuildCounts(
            parsed=self.parsed + other.parsed,
            known=self.known + other.known,
            without=self.without + other.without,
            reason=self.reason or other.reason,
        )


class Builder:
    """Makes chunks of texts by a plan, in one process."""

    def __init__(self, plan: BuildPlan, with_cache: bool = True) -> None:
        self.plan = plan
        self.tokenizer = Tokenizer.from_str(plan.tokenizer)
        self.source: TreeSource = open_source(plan.source)
        self.cache = TreeCache(plan.cache) if with_cache else None
        self.making = Making(
            tokenizer=tokenizer_fingerprint(plan.tokenizer),
            source=self.source.name,
            version=self.source.version,
            scope=plan.scope,
            max_chunks=plan.max_chunks,
        )

    def chunks(self, text: str) -> tuple[list[int], Callable[[], Chunks]]:
        """Return the token ids of a text, and what makes their chunks."""
        encoding = self.tokenizer.encode(text)
        ids, offsets = encoding.ids[: self.plan.max_tokens], encoding.offsets[: self.plan.max_tokens]

        def make() -> Chunks:
            spans = token_spans(text, offsets)
            if self.plan.scope == "sentence":
                return sentence_chunks(self.source.parse(text), spans, self.plan.max_chunks)
            return prefix_chunks(len(ids), parsed_prefixes(self.source, text, spans), self.plan.max_chunks)

        return ids, make

    def knows(self, text: str) -> bool:
        """Return whether the cache has the row of a text, and has it whole."""
        ids, _ = self.chunks(text)
        return self.cache is not None and self.cache.get_key(self.making.key(ids), self.plan.scope) is not None

    def add(self, texts: list[str]) -> tuple[BuildCounts, list[tuple[bytes, bytes]]]:
        """Make the rows of those texts that the cache lacks, or holds damaged."""
        counts, rows = BuildCounts(), []
        for text in texts:
            ids, make = self.chunks(text)
            key = self.making.key(ids)
            if self.cache is not None and self.cache.get_key(key, self.plan.scope) is not None:
                counts = counts.plus(BuildCounts(known=1))
                continue
            try:
                rows.append((key, encode(key, make())))
            except KeelError as error:
                counts = counts.plus(BuildCounts(without=1, reason=str(error)))
            else:
                counts = counts.plus(BuildCounts(parsed=1))
        return counts, rows


def build(
    texts: Iterable[str],
    plan: BuildPlan,
    workers: int = 1,
    progress: Callable[[BuildCounts], object] | None = None,
    engine: Engine = "local",
) -> BuildCounts:
    """Put the chunks of all texts into the cache; stopped and started again, it goes on where it was.

    The workers parse, this process writes. At most two batches a worker are on their way, however long the corpus is.

    Args:
        texts: one row of the model each, a sentence or a document.
        workers: processes that parse; 1 parses in this one.
        progress: called with the counts so far after every batch.
        engine: ``local`` for processes of this machine, ``ray`` for Ray Data, on the cluster that is there or one started here.
    Raises: KeelError for a source, tokenizer or cache that cannot be used; a text without a tree is counted.
    """
    if workers < 1:
        raise KeelError(f"building trees takes at least one worker, got {workers}")
    builder, total = Builder(plan), BuildCounts()
    made = _results(builder, texts, workers) if engine == "local" else made_by_ray(builder, _batched(texts), workers)
    for counts, rows in made:
        if rows and builder.cache is not None:
            builder.cache.put(builder.making, rows)
        total = total.plus(counts)
        if progress is not None:
            progress(total)
    return total


def _results(
    builder: Builder, texts: Iterable[str], workers: int
) -> Iterator[tuple[BuildCounts, list[tuple[bytes, bytes]]]]:
    batches = _batched(texts)
    if workers == 1:
        yield from map(builder.add, batches)
        return
    waiting: deque[Future[tuple[BuildCounts, list[tuple[bytes, bytes]]]]] = deque()
    # Spawned, not forked: tokenizers and torch hold threads that a fork would cut off.
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (builder.plan,)) as pool:
        for batch in batches:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch


_builder: Builder | None = None  # of a worker process


def _start_worker(plan: BuildPlan) -> None:
    global _builder
    _builder = Builder(plan)


def _work(texts: list[str]) -> tuple[BuildCounts, list[tuple[bytes, bytes]]]:
    assert _builder is not None
    return _builder.add(texts)
