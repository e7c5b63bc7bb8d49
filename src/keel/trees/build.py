"""Parse a corpus into a cache of chunks, on several processes; what is there already is not parsed again."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch

from keel.errors import KeelError
from keel.trees.align import MAX_CHUNKS, parsed_prefixes, prefix_chunks, sentence_chunks, token_spans
from keel.trees.build_ray import made_by_ray
from keel.trees.cache import Making, TreeCache, encode, plain_tokenizer, tokenizer_fingerprint
from keel.trees.chunks import Chunks, Scope
from keel.trees.fields import FieldReader, parsed_parts
from keel.trees.sources import TreeSource, open_source
from keel.trees.together import ParsedTogether, beginnings

Engine = Literal["local", "ray"]
Text = str | tuple[str, str]  # a text, or a prompt and what follows it
Made = tuple[bytes, bytes, str]  # key and value of a row, or why there is no value
_BATCH = 64  # texts a transaction; what a killed builder loses at most for each worker


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """What to build.

    Attributes:
        cache: the file.
        source: name of a ``TreeSource``.
        tokenizer: a fast tokenizer as ``tokenizer.backend_tokenizer.to_str()``; ids are made with its special tokens.
        scope, max_chunks: see ``keel.trees.align``.
        max_tokens: longer texts are cut off there, before they are parsed; None for no limit.
        start: id that rows of prompts begin with, which are read field by field (``keel.trees.fields``); None for plain texts.
    Raises: KeelError for prompts that are to be cut off, a treebank's trees of beginnings, or no chunk at all.
    """

    cache: Path
    source: str
    tokenizer: str
    scope: Scope = "sentence"
    max_chunks: int = MAX_CHUNKS
    max_tokens: int | None = None
    start: int | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.max_tokens is not None:
            raise KeelError("prompts are not cut off, or their options would be; leave max_tokens out")
        if self.source.startswith("bracketed:") and (self.scope == "prefix" or self.max_tokens is not None):
            asked = "scope prefix" if self.scope == "prefix" else f"max_tokens={self.max_tokens}"
            raise KeelError(
                f"{self.source} with {asked}: a treebank has trees of whole sentences, and of no sentence's beginnings; take a source that "
                "parses, or leave that out"
            )
        if self.max_chunks < 1:
            raise KeelError(f"max_chunks={self.max_chunks}; keep at least 1 chunk of each height")


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
        self.tokenizer = plain_tokenizer(plan.tokenizer)
        self.source: TreeSource = open_source(plan.source)
        self.parsing = self.source  # what has parsed the batch at hand together
        self.cache = TreeCache(plan.cache) if with_cache else None
        self.reader: FieldReader | None = None
        if plan.start is not None:
            self.reader = FieldReader(
                plan.tokenizer, plan.start, source=self.source, scope=plan.scope, max_chunks=plan.max_chunks
            )
            self.making = self.reader.making
            return
        self.making = Making(
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            source=self.source.name,
            version=self.source.version,
            scope=plan.scope,
            max_chunks=plan.max_chunks,
        )

    def chunks(self, text: Text) -> tuple[Sequence[int], Callable[[], Chunks]]:
        """Return the token ids of a text, or a prompt and what follows it, and what makes their chunks."""
        if self.reader is not None:
            return self._of_prompt(self.reader, *((text, "") if isinstance(text, str) else text))
        assert isinstance(text, str)
        whole, ids, offsets = self._cut(text)

        def make() -> Chunks:
            spans = token_spans(whole, offsets)
            if self.plan.scope == "sentence":
                return sentence_chunks(self.parsing.parse(whole), spans, self.plan.max_chunks)
            source = ParsedTogether(self.source, beginnings(whole, spans))
            return prefix_chunks(len(ids), parsed_prefixes(source, whole, spans), self.plan.max_chunks)

        return ids, make

    def _cut(self, text: str) -> tuple[str, list[int], list[tuple[int, int]]]:
        """Return the text as far as it is kept, its ids and its offsets: the tree of these tokens knows nothing of what was cut off."""
        encoding, most = self.tokenizer.encode(text), self.plan.max_tokens
        ids, offsets = encoding.ids[:most], encoding.offsets[:most]
        whole = len(ids) == len(encoding.ids)
        return (text if whole else text[: max((end for _, end in offsets), default=0)]), ids, offsets

    def _of_prompt(
        self, reader: FieldReader, prompt: str, continuation: str
    ) -> tuple[Sequence[int], Callable[[], Chunks]]:
        def make() -> Chunks:
            reader.source = self.parsing
            chunks = reader.read(prompt, continuation).chunks
            assert chunks is not None
            return chunks

        return reader.read(prompt, continuation, with_trees=False).ids, make

    def knows(self, text: Text) -> bool:
        """Return whether the cache has the row of a text, and has it whole."""
        ids, _ = self.chunks(text)
        return self._has(self.making.key(ids))

    def _has(self, key: bytes) -> bool:
        return self.cache is not None and self.cache.get_key(key, self.plan.scope) is not None

    def made(self, texts: Sequence[Text]) -> list[Made]:
        """Make the row of every text; those of whole sentences are parsed in one call."""
        wanted = []
        if self.plan.scope == "sentence":  # under strict causality the beginnings of one text are parsed together
            for text in texts:
                whole = text if isinstance(text, str) else "".join(text)
                wanted += [self._cut(whole)[0]] if self.reader is None else parsed_parts(whole)
        self.parsing = ParsedTogether(self.source, wanted) if wanted else self.source
        return [self._made(text) for text in texts]

    def _made(self, text: Text) -> Made:
        ids, make = self.chunks(text)
        key = self.making.key(ids)
        try:
            return key, encode(key, make()), ""
        except KeelError as error:
            return key, b"", str(error)

    def add(self, texts: Sequence[Text]) -> tuple[BuildCounts, list[tuple[bytes, bytes]]]:
        """Make the rows of those texts that the cache lacks, or holds damaged."""
        missing = [text for text in texts if not self.knows(text)]
        made = self.made(missing)
        rows, reasons = [(key, value) for key, value, why in made if not why], [why for _, _, why in made if why]
        counts = BuildCounts(
            parsed=len(rows), known=len(texts) - len(missing), without=len(reasons), reason=(reasons or [""])[0]
        )
        return counts, rows


def build(
    texts: Iterable[Text],
    plan: BuildPlan,
    workers: int = 1,
    progress: Callable[[BuildCounts], object] | None = None,
    engine: Engine = "local",
) -> BuildCounts:
    """Put the chunks of all texts into the cache; stopped and started again, it goes on where it was.

    The workers parse, this process writes. At most two batches a worker are on their way, however long the corpus is.

    Args:
        texts: one row of the model each: a sentence or a document; with ``plan.start`` a prompt, alone or with what follows it.
        workers: processes that parse; 1 parses in this one.
        progress: called with the counts so far after every batch.
        engine: ``local`` for processes of this machine, ``ray`` for Ray Data, on the cluster that is there or one started here.
    Raises: KeelError for a source, tokenizer or cache that cannot be used; a text without a tree is counted.
    """
    if workers < 1:
        raise KeelError(f"building trees takes at least one worker, got {workers}")
    builder, total = Builder(plan), BuildCounts()
    made = _results(builder, texts, workers) if engine == "local" else made_by_ray(builder, _batched(texts), workers)
    with closing(made):
        for counts, rows in made:
            if rows and builder.cache is not None:
                builder.cache.put(builder.making, rows)
            total = total.plus(counts)
            if progress is not None:
                progress(total)
    return total


def _results(
    builder: Builder, texts: Iterable[Text], workers: int
) -> Generator[tuple[BuildCounts, list[tuple[bytes, bytes]]], None, None]:
    batches = _batched(texts)
    if workers == 1:
        yield from map(builder.add, batches)
        return
    waiting: deque[Future[tuple[BuildCounts, list[tuple[bytes, bytes]]]]] = deque()
    # Spawned, not forked: tokenizers and torch hold threads that a fork would cut off.
    context = get_context("spawn")
    ends, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (builder.plan, ends))
    try:
        for batch in batches:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        pool.shutdown()
    except BrokenProcessPool as error:
        raise KeelError(
            "a process that parses was killed; was there too little memory? start again with fewer workers, it goes on where it was"
        ) from error
    finally:
        held.close()  # what is still being parsed, on Ctrl-C or an error, is not waited for
        pool.shutdown(cancel_futures=True)
        ends.close()


def _batched(texts: Iterable[Text]) -> Iterator[list[Text]]:
    iterator = iter(texts)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch


_builder: Builder | None = None  # of a worker process


def _start_worker(plan: BuildPlan, ends: Connection) -> None:
    """Make ready to parse, on one thread: the workers are as many as there are cores to use."""
    global _builder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the business of the process that asked
    threading.Thread(target=_end_with, args=(ends,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    _builder = Builder(plan)


def _end_with(ends: Connection) -> None:
    """End this process once the one that asked has closed its end of the pipe, or is no more."""
    try:
        ends.recv()
    except (EOFError, OSError):
        os._exit(0)


def _work(texts: list[Text]) -> tuple[BuildCounts, list[tuple[bytes, bytes]]]:
    assert _builder is not None
    return _builder.add(texts)
