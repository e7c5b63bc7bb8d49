"""What a pretrained encoder is good for, as measurements of an experiment."""

from __future__ import annotations

from keel.evaluation.items import ItemMetric
from keel.evaluation.linguistic import linguistic_scores
from keel.evaluation.linguistic_tasks import make_probes
from keel.experiment.subject import Subject


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
