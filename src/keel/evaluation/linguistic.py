"""Linguistic probes: what a linear reader tells of a language's structure from the states of an encoder, layer by layer.

The paper (DSTG §5.4) does this on Flash-Holmes. Here the questions are made from annotated text (``linguistic_tasks``). Beside every
probe stand what needs no encoder (the commonest answer; the words themselves) and a control task (Hewitt and Liang 2019): the same
reader on labels drawn at random for each type of word, which only a reader that learns by heart can tell.

Shapes: N examples or words, D width.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from transformers import PreTrainedTokenizerBase

from keel.evaluation.items import ItemMetric
from keel.evaluation.linguistic_tasks import Example, Probe
from keel.evaluation.states import Vectors, layer_vectors

# An inverse penalty of logistic regression and a penalty of ridge regression; channels are standardised.
STRENGTHS = (0.003, 0.03, 0.3)
RIDGE = tuple(10.0**power for power in range(5))
_ITERATIONS = 200
_HELD_OUT = 0.2  # of the examples to fit, to choose the penalty on
_WORDS_A_SEED = 5000

Labels = NDArray[Any]


@dataclass(frozen=True)
class _Part:
    """Rows of one part of a probe: label, type of word and example of each."""

    labels_N: Labels
    types_N: list[str]
    example_N: NDArray[np.int64]

    @classmethod
    def of(cls, examples: Sequence[Example], numeric: bool) -> _Part:
        labels: list[Any] = []
        types: list[str] = []
        rows: list[int] = []
        for index, one in enumerate(examples):
            labels += one.labels
            # The type of a whole text, for its control label, is its first word.
            types += [word.lower() for word in (one.words if one.places else one.words[:1])]
            rows += [index] * len(one.labels)
        return cls(np.array(labels, dtype=np.float64 if numeric else object), types, np.array(rows))


def linguistic_scores(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    probes: Sequence[Probe],
    *,
    seeds: int = 3,
    max_length: int = 256,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[ItemMetric]:
    """Probe every block of an encoder.

    Args:
        model: a Hugging Face encoder, with or without a head.
        probes: from ``make_probes``.
        seeds: how often a reader is fitted, each time on four fifths of the training part (of words at most 5,000); the mean counts.
        max_length: most tokens of a text, [CLS] and [SEP] included.
        progress: called with what is done, how many of it, of how many.
    Returns: for every probe ``linguistic.<probe>``, read from the last block; ``@layer<k>``, from each; ``@control``, the control task at
        the last; ``@majority`` and ``@words``, without an encoder. Shares of right answers, or R² of a number; items are test texts.
    """
    metrics: list[ItemMetric] = []
    for number, probe in enumerate(probes):
        if progress is not None:
            progress(f"linguistic probe {probe.name}", number, len(probes))
        examples = [*probe.train, *probe.test]
        layers = layer_vectors(
            model, tokenizer, [one.text for one in examples], [one.places for one in examples], max_length=max_length
        )
        metrics += probe_metrics(probe, layers, seeds=seeds)
    return metrics


def probe_metrics(probe: Probe, layers: Sequence[Vectors], *, seeds: int) -> list[ItemMetric]:
    """Fit and score the readers of one probe on the states of its training and then its test examples, [N, D] for each block."""
    train, test = _Part.of(probe.train, probe.numeric), _Part.of(probe.test, probe.numeric)
    count = len(train.labels_N)
    samples = [_sample(count, seed) for seed in range(seeds)]

    def read(states_ND: Any, fit_N: Labels, true_N: Labels) -> Labels:
        guesses, penalty = [], None
        for sample in samples:
            reader, penalty = _fit(states_ND[:count][sample], fit_N[sample], probe.numeric, penalty)
            guesses.append(reader.predict(states_ND[count:]))
        return np.stack([_score(guess_N, true_N, fit_N, probe.numeric) for guess_N in guesses]).mean(axis=0)

    found: dict[str, Labels] = {}
    for layer, states_ND in enumerate(layers):
        scaled_ND = standardised(states_ND, count)
        found[f"@layer{layer}"] = read(scaled_ND, train.labels_N, test.labels_N)
        if layer == len(layers) - 1:
            found = {"": found[f"@layer{layer}"], **found}
            found["@control"] = read(scaled_ND, *_control(probe.name, train, test))
    majority = _middle(train.labels_N, probe.numeric)
    constant_N = np.array([majority] * len(test.labels_N), dtype=train.labels_N.dtype)
    found["@majority"] = _score(constant_N, test.labels_N, train.labels_N, probe.numeric)
    if probe.train[0].places:
        known = _by_type(train, probe.numeric)
        guess_N = np.array([known.get(kind, majority) for kind in test.types_N], dtype=train.labels_N.dtype)
        found["@words"] = _score(guess_N, test.labels_N, train.labels_N, probe.numeric)
    else:
        found["@words"] = read(_bags(probe), train.labels_N, test.labels_N)
    spread_N = _spread(test.labels_N, train.labels_N, probe.numeric)
    control_fit_N, control_true_N = _control(probe.name, train, test)
    control_N = _spread(control_true_N, control_fit_N, probe.numeric)
    return [
        _metric(f"linguistic.{probe.name}{where}", each_N, control_N if where == "@control" else spread_N, test, probe)
        for where, each_N in found.items()
    ]


def _metric(name: str, scores_N: Labels, spread_N: Labels, test: _Part, probe: Probe) -> ItemMetric:
    texts = len(probe.test)
    return ItemMetric(
        name=name,
        unit="R²" if probe.numeric else "share",
        higher_is_better=None if name.endswith(("@control", "@majority", "@words")) else True,
        numerators=tuple(np.bincount(test.example_N, scores_N, texts).tolist()),
        denominators=tuple(np.bincount(test.example_N, spread_N, texts).tolist()),
    )


def _score(guess_N: Labels, true_N: Labels, fit_N: Labels, numeric: bool) -> Labels:
    """Return hits; of a number what the guess explains of the squared distance to the mean of the labels to fit."""
    if not numeric:
        return np.asarray(guess_N == true_N, dtype=np.float64)
    return (true_N - fit_N.mean()) ** 2 - (true_N - guess_N) ** 2


def _spread(true_N: Labels, fit_N: Labels, numeric: bool) -> Labels:
    return (true_N - fit_N.mean()) ** 2 if numeric else np.ones(len(true_N))


def _middle(labels_N: Labels, numeric: bool) -> Any:
    return float(labels_N.mean()) if numeric else Counter(labels_N.tolist()).most_common(1)[0][0]


def _by_type(part: _Part, numeric: bool) -> dict[str, Any]:
    """Return for each word of the training part the mean of its labels, or the commonest one."""
    seen: dict[str, list[Any]] = defaultdict(list)
    for kind, label in zip(part.types_N, part.labels_N, strict=True):
        seen[kind].append(label)
    return {kind: _middle(np.array(labels), numeric) for kind, labels in seen.items()}


def _bags(probe: Probe) -> csr_matrix:
    """Return how often each word of the training part stands in each text."""
    vocabulary = {
        word: index for index, word in enumerate(sorted({w.lower() for one in probe.train for w in one.words}))
    }
    rows, columns = [], []
    for row, one in enumerate((*probe.train, *probe.test)):
        known = [vocabulary[word.lower()] for word in one.words if word.lower() in vocabulary]
        rows += [row] * len(known)
        columns += known
    shape = (len(probe.train) + len(probe.test), len(vocabulary))
    return csr_matrix((np.ones(len(rows)), (rows, columns)), shape=shape)


def _control(name: str, train: _Part, test: _Part) -> tuple[Labels, Labels]:
    """Return labels of a control task: each type of word has one of the training labels, drawn by the type alone."""

    def label(kind: str) -> Any:
        number = int.from_bytes(hashlib.sha256(f"{name} {kind}".encode()).digest()[:8], "little")
        return train.labels_N[number % len(train.labels_N)]

    fit_N, true_N = (np.array([label(kind) for kind in part.types_N], train.labels_N.dtype) for part in (train, test))
    return fit_N, true_N


def _sample(count: int, seed: int) -> NDArray[np.int64]:
    order = np.random.default_rng(seed).permutation(count)
    return order[: min(_WORDS_A_SEED, max(2, round(0.8 * count)))]


def standardised(states_ND: Vectors, count: int) -> Vectors:
    """Return states whose channels have mean 0 and standard deviation 1 over the first ``count`` rows."""
    middle_D, scale_D = states_ND[:count].mean(axis=0), states_ND[:count].std(axis=0)
    return (states_ND - middle_D) / np.where(scale_D > 1e-6, scale_D, 1.0)


def _fit(states_ND: Any, labels_N: Labels, numeric: bool, penalty: float | None) -> tuple[Any, float]:
    """Return a fitted reader and its penalty, which is chosen on held-out examples where it is None."""
    make = ridge if numeric else logistic
    if penalty is None:
        held = max(1, round(_HELD_OUT * len(labels_N)))

        def found(candidate: float) -> float:
            guess_N = make(states_ND[held:], labels_N[held:], candidate).predict(states_ND[:held])
            return float(_score(guess_N, labels_N[:held], labels_N[held:], numeric).sum())

        penalty = max(RIDGE if numeric else STRENGTHS, key=found)
    return make(states_ND, labels_N, penalty), penalty


def ridge(states_ND: Any, labels_N: Labels, penalty: float) -> Any:
    """Return a fitted ridge regression; ``penalty`` is one of ``RIDGE`` or like them."""
    return Ridge(alpha=penalty).fit(states_ND, labels_N)


class _Constant:
    """Reads the one label that there is."""

    def __init__(self, label: Any) -> None:
        self.label = label

    def predict(self, states_ND: Any) -> Labels:
        """Return the label for every row."""
        return np.array([self.label] * states_ND.shape[0], dtype=object)


def logistic(states_ND: Any, labels_N: Labels, strength: float) -> Any:
    """Return a fitted logistic regression; ``strength`` is one of ``STRENGTHS`` or like them."""
    if len(set(labels_N.tolist())) == 1:
        return _Constant(labels_N[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a probe that is stopped early is one with more penalty
        return LogisticRegression(C=strength, max_iter=_ITERATIONS).fit(states_ND, labels_N.astype(str))
