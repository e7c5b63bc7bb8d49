"""What ``keel trees`` does: train a parser and say how good and how fast it is; parse a corpus into a cache."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keel.data import load_tokenizer
from keel.errors import KeelError
from keel.trees.brackets import read_brackets
from keel.trees.build import BuildCounts, BuildPlan, Engine, Text, build
from keel.trees.chunks import Scope
from keel.trees.evalb import Constituent, score
from keel.trees.fields import start_of
from keel.trees.parser import SpanParser, save_parser
from keel.trees.parser_training import TrainingConfig, to_example, train_parser


def train(
    file: Path,
    out: Path,
    *,
    held_out: int = 300,
    training: TrainingConfig | None = None,
    progress: Callable[[int, float], object] | None = None,
) -> dict[str, float]:
    """Train a parser on a bracket file but its last trees, write it, and score it on those by evalb's rules.

    Returns: see ``score_parser``. Raises: KeelError for a file without more trees than are held out, or an ``out`` that is there.
    """
    if out.exists():
        raise KeelError(f"{out} is there already; name another file with --out")
    trees = read_brackets(file)
    if not 0 < held_out < len(trees):
        raise KeelError(
            f"{file} has {len(trees)} trees and {held_out} are held out; hold out at least 1, and fewer than all"
        )
    _check_writable(out)
    parser = train_parser(trees[:-held_out], training=training, progress=progress)
    save_parser(parser, out)
    return score_parser(parser, trees[-held_out:])


def _check_writable(out: Path) -> None:
    """Find out before minutes of training whether its outcome can be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise KeelError(f"nothing can be written to {out.parent} ({error}); name another file with --out") from error


def score_parser(parser: SpanParser, trees: Sequence[Any]) -> dict[str, float]:
    """Parse the words of cleaned nltk trees.

    Returns: ``parser.f1``, ``parser.precision``, ``parser.recall``, ``parser.exact`` and ``parser.tag_accuracy`` in percent, and
        ``parser.sentences_per_second`` on this machine as it is.
    """
    examples = [to_example(tree) for tree in trees]
    begin = time.perf_counter()
    found = parser.parse([example.words for example in examples])
    seconds = time.perf_counter() - begin
    gold: list[list[Constituent]] = [
        [(*span, name) for span, label in example.labels.items() for name in label.split("+")] for example in examples
    ]
    scored = score([constituents for constituents, _ in found], gold, [example.tags for example in examples])
    tags = [
        mine == theirs
        for (_, row), e in zip(found, examples, strict=True)
        for mine, theirs in zip(row, e.tags, strict=True)
    ]
    return {
        "parser.f1": scored.f1,
        "parser.precision": scored.precision,
        "parser.recall": scored.recall,
        "parser.exact": 100 * scored.exact / scored.sentences,
        "parser.tag_accuracy": 100 * sum(tags) / len(tags),
        "parser.sentences_per_second": len(examples) / seconds,
    }


def build_cache(
    corpus: Path,
    cache: Path,
    *,
    source: str,
    tokenizer: str,
    scope: Scope = "sentence",
    max_tokens: int | None = None,
    prompts: bool = False,
    workers: int = 1,
    engine: Engine = "local",
    progress: Callable[[BuildCounts], object] | None = None,
) -> BuildCounts:
    """Parse every line of a text file into a cache; see ``keel.trees.build``.

    Args: prompts: the lines are JSON objects {"prompt": ..., "options": [...]}, read field by field: a row each of the prompt alone and
        of the prompt with each of its options, if there are any, behind it. They begin as rows of our evaluations do.
    Raises: KeelError for a corpus, tokenizer, source or cache that cannot be used, and at the end where no text has a tree.
    """
    if not corpus.is_file():
        raise KeelError(f"{corpus} is no file; give a text file (UTF-8, .gz or plain) with one row of the model a line")
    loaded = load_tokenizer(tokenizer)
    backend = loaded.backend_tokenizer.to_str()
    start = start_of(loaded) if prompts else None
    plan = BuildPlan(cache=cache, source=source, tokenizer=backend, scope=scope, max_tokens=max_tokens, start=start)
    texts: Iterable[Text] = _prompts(corpus) if prompts else _lines(corpus)
    counts = build(texts, plan, workers, progress, engine)
    if counts == BuildCounts():
        raise KeelError(f"{corpus} has no line with text; give one row of the model a line")
    if not counts.parsed + counts.known:
        raise KeelError(f"none of the {counts.without:,} texts of {corpus} has a tree; of the first: {counts.reason}")
    return counts


def _prompts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every prompt with nothing, and with each of its options, behind it."""
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
            prompt, options = row["prompt"], row.get("options", [])
            fits = (
                isinstance(prompt, str) and isinstance(options, list) and all(isinstance(one, str) for one in options)
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            fits = False
        if not fits:
            raise KeelError(
                f"{path}, row {number}: not a prompt; expected a JSON object a line, "
                '{"prompt": "Question: …\\nAnswer:", "options": [" yes", " no"]}'
            )
        yield prompt, ""
        yield from ((prompt, option) for option in options)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines that are not blank, one at a time however long the file is."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    yield line.strip()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise KeelError(f"{path} cannot be read as UTF-8 text ({error}); write it as UTF-8 first") from error
