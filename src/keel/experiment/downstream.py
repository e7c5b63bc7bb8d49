"""What a pretrained encoder is good for, as measurements of an experiment."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from keel.data.glue import load_glue
from keel.data.squad import divide_by_article, load_squad
from keel.encoder import DstgForMaskedLM, DstgForQuestionAnswering, DstgForSequenceClassification
from keel.errors import KeelError
from keel.evaluation.downstream import PairTask, SpanTask, best_of_windows, squad_metrics
from keel.evaluation.embedding import MeanPoolingEncoder, mteb_scores
from keel.evaluation.finetuning import FineTuned, FineTuning, fine_tune
from keel.evaluation.holmes import find_holmes, holmes_scores
from keel.evaluation.items import ItemMetric
from keel.evaluation.linguistic import linguistic_scores
from keel.evaluation.linguistic_tasks import make_probes
from keel.experiment.subject import Subject
from keel.files import write_atomically
from keel.training.evaluation_sections import FineTuned as Section

FOLDER = "fine_tuning"
_HELD_OUT, _MOST_HELD_OUT = 0.1, 500
One = TypeVar("One")


def measure_linguistic(subject: Subject) -> list[ItemMetric]:
    """What a linear reader tells of a language's structure from each block (beside DSTG §5.4)."""
    wanted = subject.recipe.evaluation.linguistic
    assert wanted is not None
    probes = make_probes(
        wanted.probes,
        wanted.dependencies,
        wanted.treebank,
        train=wanted.train,
        test=wanted.test,
        # A word is seldom more than two tokens, and the probes of sentences do not mind the rest.
        max_words=wanted.length // 2,
    )
    return linguistic_scores(
        subject.model,
        subject.data.tokenizer,
        probes,
        seeds=wanted.seeds,
        max_length=wanted.length,
        progress=subject.tell,
    )


def measure_holmes(subject: Subject) -> list[ItemMetric]:
    """The published datasets of Holmes (DSTG §5.4, Tables 5 and 6): ``holmes.<probe>``."""
    wanted = subject.recipe.evaluation.holmes
    assert wanted is not None
    return holmes_scores(
        subject.model,
        subject.data.tokenizer,
        find_holmes(wanted.source),
        max_length=wanted.length,
        progress=subject.tell,
    )


def measure_mteb(subject: Subject) -> list[ItemMetric]:
    """Tasks of MTEB (DSTG §3.4, App. C.2): ``mteb.<task>``."""
    wanted = subject.recipe.evaluation.mteb
    assert wanted is not None
    name = f"keel/{subject.recipe.name.replace('/', '-')}-{subject.arm}"
    encoder = MeanPoolingEncoder(subject.model, subject.data.tokenizer, name=name, max_length=wanted.length)
    metrics = []
    for number, task in enumerate(wanted.tasks):
        subject.tell(f"MTEB: {task}", number, len(wanted.tasks))
        metrics += mteb_scores(encoder, [task])
    return metrics


def measure_glue(subject: Subject) -> list[ItemMetric]:
    """Fine-tune from the unit's weights on every task and score its development split (DSTG §3.4, App. C.1): ``glue.<task>``."""
    wanted = subject.recipe.evaluation.glue
    assert wanted is not None
    metrics = []
    for name in wanted.tasks:
        metrics += _once(subject, f"glue.{name}", wanted, functools.partial(_glue, subject, name))
    return metrics


def _glue(subject: Subject, name: str) -> tuple[list[ItemMetric], FineTuned[Any]]:
    wanted = subject.recipe.evaluation.glue
    assert wanted is not None
    data = load_glue(name, wanted.source)
    order = _shuffled(data.train)
    held = min(_MOST_HELD_OUT, max(1, round(_HELD_OUT * len(order[: wanted.train_samples]))))
    train, held_out = order[held:][: wanted.train_samples], order[:held]
    test = _shuffled(data.dev)[: wanted.test_samples]
    task = PairTask(subject.data.tokenizer, train, numeric=data.numeric, length=wanted.length)
    found = fine_tune(
        lambda: with_head(subject, DstgForSequenceClassification, 1 if data.numeric else 2),
        task,
        train,
        held_out,
        test,
        _settings(subject, wanted),
        progress=lambda done, of: subject.tell(f"fine-tuning on {name}", done, of),
    )
    return [task.metric(f"glue.{name}", found.answers, test)], found


def measure_squad(subject: Subject) -> list[ItemMetric]:
    """Fine-tune from the unit's weights on questions and score those about other articles (DSTG §3.4, App. C.4)."""
    wanted = subject.recipe.evaluation.squad
    assert wanted is not None
    return _once(subject, "squad", wanted, lambda: _squad(subject))


def _squad(subject: Subject) -> tuple[list[ItemMetric], FineTuned[Any]]:
    wanted = subject.recipe.evaluation.squad
    assert wanted is not None
    train, held_out, test = (_shuffled(part) for part in divide_by_article(load_squad(wanted.source)))
    task = SpanTask(subject.data.tokenizer, length=wanted.length)
    spans = task.windows(test[: wanted.test_samples])
    found = fine_tune(
        lambda: with_head(subject, DstgForQuestionAnswering, 2),
        task,
        task.windows(train[: wanted.train_samples]),
        task.windows(held_out[:_MOST_HELD_OUT]),
        spans,
        _settings(subject, wanted),
        progress=lambda done, of: subject.tell("fine-tuning on SQuAD", done, of),
    )
    return squad_metrics(*best_of_windows(found.answers, spans)), found


def with_head(subject: Subject, kind: type[Any], num_labels: int) -> Any:
    """Return a model with a new head on a copy of the unit's encoder."""
    assert isinstance(subject.model, DstgForMaskedLM)
    config = copy.deepcopy(subject.model.config)
    config.num_labels = num_labels
    model = kind(config)
    model.encoder.load_state_dict(subject.model.encoder.state_dict())
    return model.to(subject.device)


def _settings(subject: Subject, wanted: Section) -> FineTuning:
    return FineTuning(
        learning_rates=tuple(wanted.learning_rates),
        batch_sizes=tuple(wanted.batch_sizes),
        weight_decays=tuple(wanted.weight_decays),
        epochs=wanted.epochs,
        evaluate_every=wanted.evaluate_every,
        patience=wanted.patience,
        seed=subject.seed,
        precision=wanted.precision,
    )


def _shuffled(examples: Sequence[One]) -> list[One]:
    """The same order for all arms and seeds, so that they learn from and are scored on the same examples."""
    return [examples[index] for index in np.random.default_rng(0).permutation(len(examples)).tolist()]


def _once(
    subject: Subject, name: str, wanted: Section, run: Callable[[], tuple[list[ItemMetric], FineTuned[Any]]]
) -> list[ItemMetric]:
    """Run a task, or read what an earlier session found with the same settings: hours lie between two evaluations."""
    path = subject.folder / FOLDER / f"{name}.json"
    settings = {key: value for key, value in wanted.model_dump(mode="json").items() if key != "tasks"}
    if path.is_file():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["settings"] == settings:
                return [ItemMetric.from_json(key, values) for key, values in kept["metrics"].items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KeelError(f"{path}: not a finished task ({error!r}); remove it to fine-tune again") from error
    metrics, found = run()
    content = {
        "settings": settings,
        "chosen": found.chosen,
        "held_out": found.held_out,
        "steps": found.steps,
        "tried": found.tried,
        "metrics": {metric.name: metric.to_json() for metric in metrics},
    }
    write_atomically(path, json.dumps(content).encode())
    return metrics
