"""What is measured of a dynamic state path: its signals, the suite of DTA §11, the failure modes of §12, and long generation."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor

from keel.data import Segment, TokenCorpus, evaluation_segments
from keel.data.disruptions import DisruptedWindows, DisruptionConfig
from keel.errors import build_config
from keel.evaluation.dta_suite import SuiteSizes, dta_suite
from keel.evaluation.faults import fault_table, tokens_needed
from keel.evaluation.inference import InferenceJudge
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.judges import TopicJudge, documents_of
from keel.evaluation.rollout import Rollout
from keel.evaluation.scoring import evaluating, score_tokens
from keel.evaluation.signals import signal_quality
from keel.experiment.pictures import SIGNALS_FILE
from keel.experiment.subject import Subject
from keel.files import write_atomically
from keel.streams import DynamicStateStream

TIME_LINES = ("coherence", "alignment", "noise", "continuity", "substrate", "governor")


def measure_signals(subject: Subject) -> list[ItemMetric]:
    """How well N, 1 - I and two baselines tell disrupted tokens from clean ones."""
    wanted = subject.recipe.evaluation.signals
    assert wanted is not None and isinstance(subject.data, TokenCorpus)
    config = build_config(DisruptionConfig, wanted.disruptions, "evaluation.signals.disruptions")
    stream = getattr(subject.data, wanted.split)
    windows = DisruptedWindows(stream, wanted.length, wanted.length, subject.data.tokenizer, config, seed=0)
    count = min(wanted.windows, len(windows))
    return signal_quality(
        subject.model,
        [windows[index * len(windows) // count] for index in range(count)],
        device=subject.device,
        progress=lambda done: subject.tell("signals of disrupted text", done, count),
    )


def measure_dta(subject: Subject) -> list[ItemMetric]:
    """The metrics of §11 on real generation, and what the text of a held-out document costs over as many tokens."""
    wanted = subject.recipe.evaluation.dta
    assert wanted is not None and isinstance(subject.data, TokenCorpus)
    data, named = subject.data, wanted.contradiction_judge
    judge = None if named is None else InferenceJudge.load(named, subject.device)
    subject.tell("topics", 0, 1)
    topics = _topic_judge(data, wanted.topics)
    segments = evaluation_segments(data.test, wanted.prompt + wanted.tokens, wanted.rows)
    prompts_RT = torch.stack([segment.ids[: wanted.prompt] for segment in segments])
    sizes = SuiteSizes(
        tokens=wanted.tokens, around=wanted.around, noise=wanted.noise, distances=tuple(wanted.distances),
        planted=wanted.planted,
    )  # fmt: skip
    metrics, interrupted = dta_suite(
        subject.model, prompts_RT, data.tokenizer, topics, sizes, contradicts=judge, device=subject.device,
        tell=subject.tell,
    )  # fmt: skip
    if interrupted.signals:
        content = json.dumps(_time_lines(interrupted))
        write_atomically(subject.folder / SIGNALS_FILE, content.encode())
    metrics.append(mean("dta.topic_accuracy", [topics.accuracy], unit="share", higher_is_better=None))
    return [*metrics, generation_nll(subject.model, segments, device=subject.device)]


@functools.lru_cache(maxsize=1)
def _topic_judge(data: TokenCorpus, count: int) -> TopicJudge:
    train, held_out = documents_of(data.train, data.tokenizer, 400), documents_of(data.valid, data.tokenizer, 50)
    return TopicJudge(train, held_out, topics=min(count, len(train)), passage=40)


def generation_nll(model: Any, segments: list[Segment], *, device: torch.device | str) -> ItemMetric:
    """Return ``generation.nll``: nats a token of held-out text as long as a free continuation, read from its beginning."""
    sums, counts = [], []
    with evaluating(model):
        for segment in segments:
            hidden_TD = model.final_hidden(input_ids=segment.ids[None, :-1].to(device)).last_hidden_state[0]
            found = score_tokens(model, hidden_TD, segment.ids[1:].to(device))
            sums.append(float(found.nll_R.sum()))
            counts.append(float(len(found.nll_R)))
    return ItemMetric(
        name="generation.nll", unit="nats a token", higher_is_better=False, numerators=tuple(sums), denominators=tuple(counts)
    )  # fmt: skip


def _time_lines(run: Rollout) -> dict[str, Any]:
    """The signals of the first row, a governor's where there is one, and where it was disrupted."""
    lines = {name: run.signals[name][0].tolist() for name in TIME_LINES if name in run.signals}
    return {"signals": lines, "stages": run.stages}


def measure_faults(subject: Subject) -> list[ItemMetric]:
    """The failure-mode table, for an arm with safeguards; nothing for another."""
    wanted = subject.recipe.evaluation.faults
    assert wanted is not None and isinstance(subject.data, TokenCorpus)
    found = subject.model.wires.first(DynamicStateStream)
    if found is None or found[1].config.safeguards is None:
        return []
    segments = evaluation_segments(subject.data.test, tokens_needed(), wanted.rows)
    rows_NT: Tensor = torch.stack([segment.ids[:-1] for segment in segments])
    return fault_table(
        subject.model,
        rows_NT,
        device=subject.device,
        progress=lambda mode, done: subject.tell(f"fault: {mode}", done, 8),
    )
