"""Prompts field by field: which part of a text is parsed on its own, and which tokens a tree stream may write to.

GTCA sections 3.1 and 4.1: the fields of a multiple-choice prompt (question, each option, the answer's label) are parsed one by one and
their chunks joined in the order of the prompt; question and answer are updated, options are read-only. What answers is updated and not
parsed: its tree would tell its first words how it goes on. A field is a line, or what follows its label. The
labels are those of App. B; a text without any has plain fields, all parsed and updated. A line is judged by what stands before its
end, never by a later one, so that under strict causality nothing of the future is read.

Shapes: T tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Encoding

from keel.errors import KeelError
from keel.trees.align import MAX_CHUNKS, Nodes, TokenSpans, parsed_prefixes, prefix_chunks, sentence_chunks, token_spans
from keel.trees.cache import FIELDS_OF, Making, TreeCache, encode, plain_tokenizer, tokenizer_fingerprint
from keel.trees.chunks import ARRAYS, Chunks, Scope, collate, joined
from keel.trees.sources import TreeSource
from keel.trees.together import ParsedTogether, beginnings

_LABELS = {
    "Instruction:": "instruction",
    "Question:": "question",
    "Context:": "question",
    "Sentence:": "question",
    "Options:": "heading",
    "Answer:": "answer",
}
_OPTION = re.compile(r"[A-Z]\. ")
_HALF_OPTION = re.compile(r"[A-Z]\.?")
_MOST_KNOWN = 20_000  # fields that a reader keeps in memory
_PARSED = {"plain", "question", "option"}
_UPDATED = {"plain", "question", "answer"}


class Field(NamedTuple):
    """Characters ``[start, end)`` of a text, the line that they are of, and what is done with them."""

    start: int
    end: int
    line: int
    parsed: bool
    updated: bool


def read_fields(text: str) -> list[Field]:
    """Return the fields of a text from left to right; blank stretches are in none. A blank line ends what a label began."""
    fields, kind, at = [], "plain", 0
    for line in text.splitlines(keepends=True):
        label, name = next(((label, name) for label, name in _LABELS.items() if line.startswith(label)), ("", ""))
        if not label and kind in ("heading", "option") and _OPTION.match(line):
            label, name = line[:2], "option"
        if not line.strip() or (not label and kind == "answer"):
            kind = "plain"
        kind = name or kind
        if label:  # that of an answer is a field like others ("the answer prefix"), those of the rest are not parsed
            fields.append(Field(at, at + len(label), at, kind == "answer", kind == "answer"))
        begin = at + len(label)
        if text[begin : at + len(line)].strip():
            fields.append(Field(begin, at + len(line), at, kind in _PARSED, kind in _UPDATED))
        at += len(line)
    return fields


def parsed_parts(text: str) -> list[str]:
    """Return the characters of those fields that are parsed."""
    return [text[field.start : field.end] for field in read_fields(text) if field.parsed]


def could_be_label(line: str) -> bool:
    """Return whether a line that begins like this may yet turn out to begin with a label."""
    return _HALF_OPTION.fullmatch(line) is not None or any(
        label.startswith(line) and label != line for label in _LABELS
    )


class _Tokens(NamedTuple):
    """A prompt and what follows it, cut into tokens and fields; ``bounds`` are the tokens ``[first, behind)`` of each field."""

    text: str
    ids: list[int]
    num_prompt: int
    spans: TokenSpans
    fields: list[Field]
    bounds: list[tuple[int, int]]


class _ParsedField(NamedTuple):
    """A field that is parsed: its text, tokens, their characters in it; its first token in the row, and the first that may see it."""

    text: str
    ids: list[int]
    spans: TokenSpans
    first: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt and its continuation as a model reads them.

    Attributes:
        ids: the start token, the prompt, the continuation.
        num_prompt: tokens of the start and the prompt.
        chunks: of the whole row; None where no trees are wanted. In scope ``sentence`` those of the prompt may depend on the
            continuation, where a prompt ends in the midst of a field that is parsed: see ``continues``.
        updated: whether a tree stream may write to each token; None where it may to all.
    """

    ids: tuple[int, ...]
    num_prompt: int
    chunks: Chunks | None
    updated: tuple[bool, ...] | None


def continues(row: Row, prompt: Row) -> bool:
    """Return whether the prompt's tokens have the same chunks and mask in a row as in the prompt's own row."""
    behind = prompt.num_prompt
    return (
        row.ids[:behind] == prompt.ids
        and (row.updated or (True,) * behind)[:behind] == (prompt.updated or (True,) * behind)
        and visible_before(row.chunks, behind) == visible_before(prompt.chunks, behind)
    )


def visible_before(chunks: Chunks | None, behind: int) -> list[tuple[int, ...]]:
    """Return what the tokens before ``behind`` see of chunks, in one order."""
    if chunks is None:
        return []
    columns = [getattr(chunks, name).copy() for name in ARRAYS]
    ends = [index for index, name in enumerate(ARRAYS) if name in ("last", "top_last")]
    for index in ends:
        columns[index] = np.minimum(columns[index], behind - 1)
    seen = columns[ARRAYS.index("first")] < behind
    return sorted(zip(*(column[seen].tolist() for column in columns), strict=True))


def row_inputs(
    rows: Sequence[Row], num_layers: int, longest: int = 0, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return ``trees`` and ``update_mask`` of a batch of rows for a model's forward, where there are any.

    Args:
        num_layers: of the host.
        longest: columns of the prompts where they are padded on the left; 0 for rows that begin in the first column.
    """
    inputs: dict[str, Any] = {}
    chunks = [row.chunks for row in rows if row.chunks is not None]
    if chunks:
        inputs["trees"] = {name: tensor.to(device) for name, tensor in collate(chunks, num_layers).items()}
    if any(row.updated is not None for row in rows):
        updated = [[True] * len(row.ids) if row.updated is None else list(row.updated) for row in rows]
        masks = [
            padded_left(mask[: row.num_prompt], longest, True) + mask[row.num_prompt :]
            for mask, row in zip(updated, rows, strict=True)
        ]
        width = max(map(len, masks))
        inputs["update_mask"] = torch.tensor([mask + [True] * (width - len(mask)) for mask in masks], device=device)
    return inputs


def padded_left(values: list[Any], width: int, filling: Any) -> list[Any]:
    """Return the values with enough of ``filling`` before them."""
    return [filling] * (width - len(values)) + values


class FieldReader:
    """Turns prompts and continuations into rows, for one tokenizer and one source of trees.

    Args:
        tokenizer: a fast tokenizer as ``tokenizer.backend_tokenizer.to_str()``.
        start: id that every row begins with, so that the first token is predicted too.
        source: of the trees; None for rows without.
        cache: where chunks are kept and found again, by the tokens of a field; None to parse anew.
        masked: whether options are read-only; the ablation of Table 4 updates every token.
    """

    def __init__(
        self,
        tokenizer: str,
        start: int,
        *,
        source: TreeSource | None = None,
        scope: Scope = "sentence",
        max_chunks: int = MAX_CHUNKS,
        cache: TreeCache | None = None,
        masked: bool = True,
    ) -> None:
        self.tokenizer, self.start = plain_tokenizer(tokenizer), start
        self.source, self.scope, self.max_chunks, self.cache, self.masked = source, scope, max_chunks, cache, masked
        self._known: dict[bytes, Chunks] = {}
        self._before: tuple[str, Encoding] = "", self.tokenizer.encode("", add_special_tokens=False)
        name, version = ("", "") if source is None else (f"{FIELDS_OF}{source.name}", source.version)
        self.making = Making(
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            source=name,
            version=version,
            scope=scope,
            max_chunks=max_chunks,
        )

    def read(self, prompt: str, continuation: str = "", *, with_trees: bool = True) -> Row:
        """Return the row of a prompt and what follows it; the tokens of the prompt are those that it has alone.

        Args: with_trees: parse it; False gives a row without chunks, as a reader without a source does.
        Raises: KeelError for a field that the source has no tree for.
        """
        return self._row(self._tokens(prompt, continuation), with_trees)

    def read_all(self, texts: Sequence[tuple[str, str]], *, with_trees: bool = True) -> list[Row]:
        """Read prompts, each with what follows it: as ``read`` does, but what is not known yet is parsed in one call.

        Raises: KeelError for a field that the source has no tree for.
        """
        read = [self._tokens(*text) for text in texts]
        if with_trees:
            self._know(read)
        return [self._row(tokens, with_trees) for tokens in read]

    def _row(self, tokens: _Tokens, with_trees: bool) -> Row:
        chunks = self._chunks(tokens) if self.source is not None and with_trees else None
        return Row(ids=tuple(tokens.ids), num_prompt=tokens.num_prompt, chunks=chunks, updated=self._updated(tokens))

    def _know(self, read: Sequence[_Tokens]) -> None:
        """Parse all fields of these texts that are not known, and keep their chunks; one without a tree is told when it is read."""
        if self.source is None:
            return
        missing: dict[bytes, tuple[str, TokenSpans]] = {}
        for field in (field for tokens in read for field in self._parsed_fields(tokens)):
            key = self._key(field)
            if key not in missing and self._found(key) is None:
                missing[key] = field.text, field.spans
        source = ParsedTogether(self.source, [part for field in missing.values() for part in self._to_parse(*field)])
        made = []
        for key, (text, spans) in missing.items():
            with contextlib.suppress(KeelError):
                made.append((key, self._made(text, spans, source)))
        self._keep(made)

    def _tokens(self, prompt: str, continuation: str) -> _Tokens:
        text = prompt + continuation
        if self._before[0] != prompt:  # its options follow one after the other
            self._before = prompt, self.tokenizer.encode(prompt, add_special_tokens=False)
        before = self._before[1]
        whole = self.tokenizer.encode(text, add_special_tokens=False) if continuation else before
        ids, offsets = whole.ids, whole.offsets
        if ids[: len(before.ids)] != before.ids:  # the two merge at the border: then each has tokens of its own
            after = self.tokenizer.encode(continuation, add_special_tokens=False)
            ids = before.ids + after.ids
            offsets = before.offsets + [(a + len(prompt), b + len(prompt)) for a, b in after.offsets]
        spans, fields = token_spans(text, [(0, 0), *offsets]), read_fields(text)
        return _Tokens(text, [self.start, *ids], 1 + len(before.ids), spans, fields, _token_bounds(fields, spans))

    def _updated(self, tokens: _Tokens) -> tuple[bool, ...] | None:
        updated = np.ones(len(tokens.ids), dtype=bool)
        for field, (first, behind) in zip(tokens.fields, tokens.bounds, strict=True):
            updated[first:behind] = field.updated
            if self.scope == "prefix":  # nobody knows yet whether this is a label, whose tokens are not updated
                updated[first : first + self._undecided(tokens, field, first, behind)] = False
        # Blank tokens are in no field: they go with what stands before them.
        filled = np.where(tokens.spans.end > tokens.spans.start, np.arange(len(updated)), 0)
        updated = updated[np.maximum.accumulate(filled)]
        return tuple(updated.tolist()) if self.masked and not updated.all() else None

    def _parsed_fields(self, tokens: _Tokens) -> list[_ParsedField]:
        found = []
        for field, (first, behind) in zip(tokens.fields, tokens.bounds, strict=True):
            if not field.parsed or first == behind:
                continue
            inside = tokens.text[field.start : field.end]
            start = np.maximum(tokens.spans.start[first:behind] - field.start, 0)
            end = np.clip(tokens.spans.end[first:behind] - field.start, start, len(inside))
            hidden = first + self._undecided(tokens, field, first, behind) if self.scope == "prefix" else 0
            found.append(_ParsedField(inside, tokens.ids[first:behind], TokenSpans(start, end), first, hidden))
        return found

    def _chunks(self, tokens: _Tokens) -> Chunks:
        parts = []
        for field in self._parsed_fields(tokens):
            chunks = self._of_field(field).shifted(field.first)
            if self.scope == "prefix":
                chunks = _seen_within(chunks, field.hidden, len(tokens.ids))
            parts.append(chunks)
        return joined(parts, self.scope)

    def _undecided(self, tokens: _Tokens, field: Field, first: int, behind: int) -> int:
        """Return how many tokens of a field are read before it is certain that its line does not begin with a label."""
        count = 0
        while first + count < behind and could_be_label(tokens.text[field.line : tokens.spans.end[first + count]]):
            count += 1
        return count

    def _key(self, field: _ParsedField) -> bytes:
        return self.making.key([*field.ids, *_digits(field.text)])

    def _of_field(self, field: _ParsedField) -> Chunks:
        key = self._key(field)
        found = self._found(key)
        if found is None:
            assert self.source is not None
            source = ParsedTogether(self.source, self._to_parse(field.text, field.spans))
            found = self._made(field.text, field.spans, source)
            self._keep([(key, found)])
        return found

    def _found(self, key: bytes) -> Chunks | None:
        found = self._known.get(key)
        if found is None and self.cache is not None:
            found = self.cache.get_key(key, self.scope)
            if found is not None:
                self._remember(key, found)
        return found

    def _keep(self, made: Sequence[tuple[bytes, Chunks]]) -> None:
        if made and self.cache is not None and not self.cache.read_only:
            self.cache.put(self.making, [(key, encode(key, chunks)) for key, chunks in made])
        for key, chunks in made:
            self._remember(key, chunks)

    def _remember(self, key: bytes, chunks: Chunks) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = chunks

    def _to_parse(self, text: str, spans: TokenSpans) -> list[str]:
        """Return what of a field is parsed: all of it, or under strict causality its beginnings."""
        return [text] if self.scope == "sentence" else beginnings(text, spans)

    def _made(self, text: str, spans: TokenSpans, source: TreeSource) -> Chunks:
        if self.scope == "sentence":
            return sentence_chunks(source.parse(text), spans, self.max_chunks)
        # One token more, which stands for whatever follows: to it the field is complete.
        last, nodes_at = len(spans.end) - 1, parsed_prefixes(source, text, spans)

        def until(t: int) -> list[Nodes]:
            return nodes_at(min(t, last))

        return prefix_chunks(last + 2, until, self.max_chunks)


def reader_of(tokenizer: object, **options: object) -> FieldReader:
    """Return the reader for a fast tokenizer of transformers; ``options`` are those of ``FieldReader``.

    Raises: KeelError for a tokenizer without a token to begin with, see ``start_of``.
    """
    make: Callable[..., FieldReader] = FieldReader
    return make(tokenizer.backend_tokenizer.to_str(), start_of(tokenizer), **options)  # type: ignore[attr-defined]


def start_of(tokenizer: object) -> int:
    """Return the id that rows begin with: a tokenizer's token for the beginning of a text, or the one that ends texts.

    Raises: KeelError for a tokenizer that has neither.
    """
    start = getattr(tokenizer, "bos_token_id", None)
    start = getattr(tokenizer, "eos_token_id", None) if start is None else start
    if start is None:
        raise KeelError("the tokenizer has neither a bos_token nor an eos_token to begin a row with; set one")
    return int(start)


def _token_bounds(fields: list[Field], spans: TokenSpans) -> list[tuple[int, int]]:
    """Return the tokens ``[first, behind)`` of each field: those that begin in it."""
    filled = np.flatnonzero(spans.end > spans.start)
    bounds = []
    for field in fields:
        a, b = np.searchsorted(spans.start[filled], [field.start, field.end])
        bounds.append((int(filled[a]), int(filled[b - 1]) + 1) if a < b else (0, 0))
    return bounds


def _seen_within(chunks: Chunks, first: int, behind: int) -> Chunks:
    """Return those chunks that some token before ``behind`` sees, seen by none before ``first``.

    What is seen later only is not known at the row's end: whether its last field goes on is not certain.
    """
    arrays = {name: getattr(chunks, name) for name in ARRAYS}
    arrays |= {name: np.maximum(arrays[name], first) for name in ("first", "top_first")}
    known = arrays["first"] < behind
    return Chunks(**{name: array[known] for name, array in arrays.items()}, scope=chunks.scope)


def _digits(text: str) -> tuple[int, int]:
    """Return two numbers that tell texts of the same tokens apart: spaces that no token keeps, say."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)
