"""Trees of a run: parsers trained for it, and the reader that each arm's prompts go through.

OUT/trees/<name>.safetensors    a parser of the recipe's ``trees.parsers``
OUT/trees/<name>.json           what it scored on the held-out trees; written last, so that its presence means done
KEEL_CACHE/parsers/             parsers and scores by what made them, for other runs that want the same
OUT/trees/<scope>.sqlite        chunks of every field that was read, shared by all arms and seeds
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from keel import parsing
from keel.data.corpora import data_root
from keel.data.questions import read_questions
from keel.data.store import write_cached
from keel.errors import KeelError
from keel.files import resolve_cache_dir, write_atomically
from keel.parsing import score_parser
from keel.training import Recipe
from keel.training.questions import QuestionData, training_questions
from keel.training.tree_sections import Parser, Trees
from keel.trees import brackets, charts, evalb, parser, parser_training
from keel.trees.brackets import read_brackets
from keel.trees.cache import TreeCache
from keel.trees.corrupted import CorruptedSource
from keel.trees.fields import FieldReader, reader_of
from keel.trees.parser import save_parser
from keel.trees.parser_training import TrainingConfig, train_parser
from keel.trees.sources import TreeSource, open_source


def prepare_trees(recipe: Recipe, out: Path) -> None:
    """Train the parsers that arms of the recipe read trees of, where they are not there yet.

    Raises: KeelError for a treebank that cannot be read, or has no more trees than are held out.
    """
    trees = recipe.trees
    if trees is None:
        return
    used = {arm.trees.source for arm in recipe.arms.values() if arm.trees is not None}
    for name, wanted in trees.parsers.items():
        if name in used and not _scores(out, name).is_file():
            with Console(stderr=True).status(f"Training the parser {name!r}"):
                _train(trees, wanted, out, name)


def _train(trees: Trees, wanted: Parser, out: Path, name: str) -> None:
    assert trees.treebank is not None
    given = trees.treebank
    path = data_root() / given.removeprefix("data:") if given.startswith("data:") else Path(given).expanduser()
    made = _made_once(path, trees.held_out, wanted)
    weights, scores = made if made is not None else _make(path, trees, wanted)
    write_atomically(_weights(out, name), weights)
    write_atomically(_scores(out, name), json.dumps(scores).encode())


def _make(path: Path, trees: Trees, wanted: Parser) -> tuple[bytes, dict[str, float]]:
    """Train and score a parser, and keep it for other runs that want the same."""
    bank = read_brackets(path)
    if len(bank) <= trees.held_out:
        raise KeelError(
            f"trees.treebank {trees.treebank}: {len(bank)} trees, {trees.held_out} are held out; hold out fewer"
        )
    trained = train_parser(bank[: -trees.held_out][: wanted.sentences], training=TrainingConfig(epochs=wanted.epochs))
    scores = score_parser(trained, bank[-trees.held_out :])
    kept = _kept(path, trees.held_out, wanted)
    digest = save_parser(trained, kept)
    write_cached(kept.with_suffix(".json"), json.dumps({"sha256": digest, "scores": scores}).encode())
    return kept.read_bytes(), scores


def _made_once(path: Path, held_out: int, wanted: Parser) -> tuple[bytes, dict[str, float]] | None:
    """Return weights and scores of a parser that an earlier run made alike, None where there is none or it is damaged."""
    kept = _kept(path, held_out, wanted)
    try:
        about, weights = json.loads(kept.with_suffix(".json").read_bytes()), kept.read_bytes()
        return (weights, about["scores"]) if hashlib.sha256(weights).hexdigest() == about["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _kept(path: Path, held_out: int, wanted: Parser) -> Path:
    """Return where the parser is kept that this treebank, these settings and this code make."""
    try:
        treebank = path.read_bytes()
    except OSError as error:
        raise KeelError(f"trees.treebank {path} cannot be read ({error.strerror}); give a file of brackets") from error
    code = [
        Path(str(module.__file__)).read_bytes()
        for module in (brackets, charts, evalb, parser, parser_training, parsing)
    ]
    said = json.dumps([wanted.model_dump(), held_out, torch.__version__]).encode()
    digests = b"".join(hashlib.sha256(part).digest() for part in (treebank, said, *code))
    return resolve_cache_dir(None) / "parsers" / f"{hashlib.sha256(digests).hexdigest()[:32]}.safetensors"


def _weights(out: Path, name: str) -> Path:
    return out / "trees" / f"{name}.safetensors"


def _scores(out: Path, name: str) -> Path:
    return out / "trees" / f"{name}.json"


def parser_scores(recipe: Recipe, arm: str, out: Path) -> dict[str, float]:
    """Return what the parser scored whose trees an arm reads as they are; nothing where there is none."""
    trees = recipe.arms[recipe.arms[arm].weights_of or arm].trees
    if (
        trees is None
        or trees.source is None
        or trees.corruption is not None
        or not _scores(out, trees.source).is_file()
    ):
        return {}
    found: dict[str, float] = json.loads(_scores(out, trees.source).read_text(encoding="utf-8"))
    return found


def reader_for(recipe: Recipe, arm: str, tokenizer: PreTrainedTokenizerBase, out: Path) -> FieldReader:
    """Return what turns texts into the rows of an arm, with the trees that its stream reads.

    Raises: KeelError for a source that cannot be opened.
    """
    given = recipe.arms[recipe.arms[arm].weights_of or arm]
    trees = given.trees
    if trees is None or trees.source is None:
        return reader_of(tokenizer, masked=trees is None or trees.update_mask)
    fields = next(fields for fields in recipe.streams_of(arm).values() if fields["type"] == "tree")
    scope = fields.get("tree_scope", "sentence")
    source: TreeSource = open_source(_source_name(recipe, trees.source, out))
    if trees.corruption is not None:
        source = CorruptedSource(source, trees.corruption)
    cache = TreeCache(out / "trees" / f"{scope}.sqlite")
    return reader_of(tokenizer, source=source, scope=scope, cache=cache, masked=trees.update_mask)


def _source_name(recipe: Recipe, name: str, out: Path) -> str:
    assert recipe.trees is not None
    return f"keel:{_weights(out, name)}" if name in recipe.trees.parsers else recipe.trees.sources[name]


def question_data(
    recipe: Recipe, arm: str, model: Any, tokenizer: PreTrainedTokenizerBase, out: Path
) -> QuestionData | None:
    """Return the questions that phases of an arm learn from, None where none does."""
    wanted = recipe.data.questions
    if wanted is None or all(phase.learns != "questions" for phase in recipe.phases_of(arm)):
        return None
    mmlu = recipe.evaluation.mmlu
    train, valid = training_questions(wanted, [] if mmlu is None else read_questions("mmlu", mmlu.source))
    layers = model.host.config.get_text_config().num_hidden_layers
    return QuestionData(train=train, valid=valid, reader=reader_for(recipe, arm, tokenizer, out), num_layers=layers)
