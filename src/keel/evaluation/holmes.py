"""Holmes and Flash-Holmes: the published probing datasets, each read by a linear probe from an encoder's last block (DSTG §5.4, Table 5).

The format is that of the benchmark's own loader (Waldis et al. 2024, Holmes-Benchmark/holmes-evaluation). A dataset is a folder with
``config-none.yaml`` (``probe_name``, ``probe_task_type``, ``num_labels``) and ``samples.csv``, in older copies ``folds.csv``, whose rows
have ``inputs`` and ``context`` (Python literals), ``label``, and ``set-0``: train, dev or test. What is probed goes by the task type:

| ``probe_task_type`` | inputs | vector |
|---|---|---|
| SENTENCE, SENTENCE_PAIR_BI | texts | the mean of each text's tokens, one behind the other |
| SENTENCE_PAIR_CROSS | two texts | the mean of both, read as one text with [SEP] between |
| SENTENCE_TOKENS, SENTENCE_PAIR_TOKENS_BI | (word, text, begin, end) | the mean of each word's tokens, one behind the other |
| SENTENCE_PAIR_TOKENS_CROSS | the same | the same, in both texts read as one |
| SENTENCE_SPANS | (word, text, begin, end, group) | the mean of each group's words, one group behind the other |

Where the benchmark trains a linear layer by Adam with dropout, here logistic or ridge regression is solved, its penalty chosen on dev.
Scores are the benchmark's: F1 of class 1 for two classes, macro F1 for more, Pearson's r for a number.
"""

from __future__ import annotations

import ast
import csv
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from sklearn.metrics import f1_score
from transformers import PreTrainedTokenizerBase

from keel.data.conllu import data_path, read_text
from keel.errors import KeelError, suggest
from keel.evaluation.downstream import correlation
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.linguistic import RIDGE, STRENGTHS, logistic, ridge, standardised
from keel.evaluation.states import layer_vectors

KINDS = (
    "SENTENCE", "SENTENCE_PAIR_BI", "SENTENCE_PAIR_CROSS", "SENTENCE_TOKENS", "SENTENCE_SPANS", "SENTENCE_PAIR_TOKENS_BI",
    "SENTENCE_PAIR_TOKENS_CROSS",
)  # fmt: skip
_SETS = ("train", "dev", "test")
_FILES = ("samples.csv", "folds.csv")

Read = tuple[str, tuple[int, int] | None, int]
"""A text, the characters that are averaged (None: all), and the part of the sample's vector that this is averaged into."""


@dataclass(frozen=True, kw_only=True)
class HolmesDataset:
    """One probing dataset.

    Attributes:
        name: of the probe.
        kind: one of ``KINDS``.
        numeric: whether a number is to be told; else a class from 0.
        inputs, contexts: of every sample, as the file has them.
        labels: of every sample.
        sets: "train", "dev" or "test" of every sample.
    """

    name: str
    kind: str
    numeric: bool
    inputs: tuple[Any, ...]
    contexts: tuple[tuple[str, ...], ...]
    labels: tuple[float, ...]
    sets: tuple[str, ...]

    def reads(self, separator: str) -> list[list[Read]]:
        """Return what is to be read for every sample."""
        return [_reads(self.kind, *sample, separator) for sample in zip(self.inputs, self.contexts, strict=True)]


def find_holmes(source: str) -> list[Path]:
    """Return the folders of all datasets below a folder, ``data:NAME`` or a path.  Raises: KeelError where there is none."""
    root = data_path(source)
    found = sorted({path.parent for path in root.glob("**/*none*.yaml")})
    if not found:
        raise KeelError(f"{root}: no Holmes dataset; expected folders with config-none.yaml and samples.csv")
    return found


def read_holmes(folder: Path) -> HolmesDataset:
    """Read one dataset.  Raises: KeelError, naming the file, for anything but the published format."""
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        raise KeelError(f"{folder}: no {' or '.join(_FILES)}")
    try:
        config = yaml.safe_load(read_text(next(iter(sorted(folder.glob("*none*.yaml"))))))
        kind = str(config["probe_task_type"])
        csv.field_size_limit(sys.maxsize)
        rows = list(csv.DictReader(io.StringIO(read_text(path))))
        labels = tuple(float(row["label"]) for row in rows)
        dataset = HolmesDataset(
            name=str(config.get("probe_name", folder.name)),
            kind=kind,
            numeric=_num_labels(config, labels) == 1,
            inputs=tuple(ast.literal_eval(row["inputs"]) for row in rows),
            contexts=tuple(tuple(ast.literal_eval(row["context"])) if row["context"] else () for row in rows),
            labels=labels,
            sets=tuple(row["set-0"] for row in rows),
        )
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError, csv.Error, yaml.YAMLError) as error:
        raise KeelError(f"{path}: not in the format of Holmes ({error!r})") from error
    if kind not in KINDS:
        raise KeelError(f"{folder}: unknown probe_task_type {kind!r}; {suggest(kind, KINDS)}")
    missing = [name for name in _SETS if name not in dataset.sets]
    if missing:
        raise KeelError(f"{path}: no sample of the set {missing[0]!r} in the column set-0")
    return dataset


def _num_labels(config: dict[str, Any], labels: Sequence[float]) -> int:
    given = config.get("num_labels", (config.get("hyperparameters") or {}).get("num_labels"))
    given = given[0] if isinstance(given, list) else given
    if given is not None:
        return int(given)
    return 2 if all(label.is_integer() for label in labels) else 1


def _reads(kind: str, inputs: Any, contexts: tuple[str, ...], separator: str) -> list[Read]:
    joint = f" {separator} "
    if kind == "SENTENCE_PAIR_CROSS":
        return [(joint.join(inputs), None, 0)]
    if kind in ("SENTENCE", "SENTENCE_PAIR_BI"):
        return [(text, None, part) for part, text in enumerate(inputs)]
    found: list[Read] = []
    for part, (_, index, begin, end, *group) in enumerate(inputs):
        if kind == "SENTENCE_PAIR_TOKENS_CROSS":
            ahead = sum(len(text) + len(joint) for text in contexts[:index])
            found.append((joint.join(contexts), (ahead + begin, ahead + end), part))
        else:
            found.append((contexts[index], (begin, end), group[0] if kind == "SENTENCE_SPANS" else part))
    return found


def holmes_scores(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    folders: Sequence[Path],
    *,
    max_length: int = 512,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[ItemMetric]:
    """Return ``holmes.<probe>`` for every dataset, read from the last block of an encoder.

    Args:
        model: a Hugging Face encoder, with or without a head.
        folders: from ``find_holmes``.
        max_length: most tokens of a text, [CLS] and [SEP] included.
        progress: called with what is done, how many of it, of how many.
    """
    metrics = []
    for number, folder in enumerate(folders):
        if progress is not None:
            progress(f"Holmes: {folder.name}", number, len(folders))
        dataset = read_holmes(folder)
        metrics.append(score_holmes(dataset, sample_vectors(model, tokenizer, dataset, max_length=max_length)))
    return metrics


def sample_vectors(
    model: Any, tokenizer: PreTrainedTokenizerBase, dataset: HolmesDataset, *, max_length: int
) -> NDArray[np.float32]:
    """Return the vector of every sample, [samples, parts x width]; a text that several samples share is read once."""
    samples = dataset.reads(tokenizer.sep_token or "")
    wanted: dict[str, dict[tuple[int, int] | None, int]] = {}
    for text, place, _ in (read for sample in samples for read in sample):
        wanted.setdefault(text, {}).setdefault(place, 0)
    texts = [(text, place) for text, places in wanted.items() for place in places]
    for row, (text, place) in enumerate(texts):
        wanted[text][place] = row
    given = [[] if place is None else [place] for _, place in texts]
    (vectors,) = layer_vectors(
        model, tokenizer, [text for text, _ in texts], given, max_length=max_length, last_only=True
    )
    found = []
    for sample in samples:
        parts = sorted({part for _, _, part in sample})
        rows = {part: [wanted[text][place] for text, place, of in sample if of == part] for part in parts}
        found.append(np.concatenate([vectors[rows[part]].mean(axis=0) for part in parts]))
    if len({len(vector) for vector in found}) > 1:
        raise KeelError(f"Holmes dataset {dataset.name!r}: its samples have different numbers of inputs")
    return np.stack(found)


def score_holmes(dataset: HolmesDataset, vectors: NDArray[np.float32]) -> ItemMetric:
    """Fit on train, choose the penalty on dev, score on test."""
    labels = np.array(
        dataset.labels if dataset.numeric else [str(int(label)) for label in dataset.labels], dtype=object
    )
    sets = np.array(dataset.sets)
    order = np.argsort(sets != "train", kind="stable")  # the rows to fit first, by which channels are standardised
    vectors, labels, sets = vectors[order], labels[order], sets[order]
    scaled = standardised(vectors, int((sets == "train").sum()))
    parts = {name: (scaled[sets == name], labels[sets == name]) for name in _SETS}
    make, candidates = (ridge, RIDGE) if dataset.numeric else (logistic, STRENGTHS)
    readers = [make(*parts["train"], candidate) for candidate in candidates]
    scores = [_score(dataset, reader.predict(parts["dev"][0]), parts["dev"][1]).value for reader in readers]
    return _score(dataset, readers[int(np.argmax(scores))].predict(parts["test"][0]), parts["test"][1])


def _score(dataset: HolmesDataset, guesses: Any, labels: Any) -> ItemMetric:
    name = f"holmes.{dataset.name}"
    if dataset.numeric:
        return correlation(name, list(guesses), list(labels))
    asked = {"average": "binary", "pos_label": "1"} if set(dataset.labels) <= {0.0, 1.0} else {"average": "macro"}
    value = f1_score(labels.astype(str), np.asarray(guesses).astype(str), zero_division=0.0, **asked)
    return mean(name, [float(value)], unit="F1", higher_is_better=True)
