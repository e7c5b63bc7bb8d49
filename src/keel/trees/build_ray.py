"""The parsing part of ``keel.trees.build`` on Ray Data: many machines, none of whose scheduling is ours.

The machine that asks looks up what is known and writes the cache; the others parse. What the source reads (``keel:FILE``) must lie
at the same path on all of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from keel.errors import KeelError
from keel.trees.brackets import optional

if TYPE_CHECKING:
    from keel.trees.build import BuildCounts, Builder, BuildPlan, Text

_BATCH = 64  # texts that a worker gets at a time
_ROUND = 16_384  # texts that are with Ray at a time, however long the corpus is

Made = tuple["BuildCounts", list[tuple[bytes, bytes]]]


class RayWorker:
    """Parses batches in an actor of Ray's."""

    def __init__(self, plan: BuildPlan) -> None:
        from keel.trees.build import Builder

        torch.set_num_threads(1)  # actors are as many as there are processors for them
        self.builder = Builder(plan, with_cache=False)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return for each of the texts its key and value, or why it has none."""
        pairs = zip(map(str, batch["text"]), map(str, batch["behind"]), strict=True)
        plain = self.builder.reader is None
        columns = zip(*self.builder.made([text if plain else (text, behind) for text, behind in pairs]), strict=True)
        return {
            name: np.array(column, dtype=object) for name, column in zip(("key", "value", "why"), columns, strict=True)
        }


def made_by_ray(builder: Builder, texts: Iterator[list[Text]], workers: int) -> Generator[Made, None, None]:
    """Yield counts and rows, batch by batch, as ``keel.trees.build`` writes them.

    Args:
        texts: batches.
        workers: actors; where no cluster is running, one is started on this machine with as many processors.
    Raises: KeelError without the package ray.
    """
    ray = optional("ray", "ray", "ray")
    data = optional("ray.data", "ray[data]", "ray")
    if workers < 1:
        raise KeelError(f"building trees takes at least one worker, got {workers}")
    started = not ray.is_initialized()
    if started:
        _connect(ray, workers)
    data.DataContext.get_current().enable_progress_bars = False
    try:
        for known, unknown in _rounds(builder, texts):
            if known.known:
                yield known, []
            if unknown:
                yield from _parsed(data, builder.plan, unknown, workers)
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, workers: int) -> None:
    """Join the cluster that is running (RAY_ADDRESS, or ``ray start`` on this machine); where there is none, start one."""
    try:
        ray.init(address="auto", log_to_driver=False)  # how many processors it has is not ours to say
    except ConnectionError:
        ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)


def _rounds(builder: Builder, texts: Iterator[list[Text]]) -> Iterator[tuple[BuildCounts, list[Text]]]:
    """Yield how many texts were known and those that were not, up to a round of these."""
    from keel.trees.build import BuildCounts

    waiting: list[Text] = []
    known = 0
    for batch in texts:
        missing = [text for text in batch if not builder.knows(text)]
        known += len(batch) - len(missing)
        waiting += missing
        if len(waiting) >= _ROUND:
            yield BuildCounts(known=known), waiting
            waiting, known = [], 0
    yield BuildCounts(known=known), waiting


def _parsed(data: Any, plan: BuildPlan, texts: list[Text], workers: int) -> Iterator[Made]:
    from keel.trees.build import BuildCounts

    blocks = min(len(texts), max(workers, -(-len(texts) // _BATCH)))
    pairs = [(text, "") if isinstance(text, str) else text for text in texts]
    items = [{"text": text, "behind": behind} for text, behind in pairs]
    dataset = data.from_items(items, override_num_blocks=blocks).map_batches(
        RayWorker, fn_constructor_args=(plan,), batch_size=_BATCH, compute=data.ActorPoolStrategy(size=workers)
    )
    for batch in dataset.iter_batches(batch_size=_BATCH, batch_format="numpy"):
        rows = [(bytes(k), bytes(v)) for k, v in zip(batch["key"], batch["value"], strict=True) if v]
        reasons = [str(why) for why in batch["why"] if why]
        counts = BuildCounts(parsed=len(rows), without=len(reasons), reason=reasons[0] if reasons else "")
        yield counts, rows
