"""The order of the training windows and the learning rate, as plain functions of seed and step."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Sampler


def cosine_with_warmup(step: int, *, warmup_steps: int, steps: int) -> float:
    """Return the learning rate's factor at ``step`` (from 0): linear to 1, then a cosine down to 0 at ``steps``."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Which windows each optimizer step sees, on each process and in each micro-batch.

    Step k reads entries [first_entry + k·batch_size, first_entry + (k+1)·batch_size) of an endless sequence of shuffled passes
    over all windows.
    Their order depends on ``seed`` alone, so one process, several, and accumulation see the same windows in the same
    step.

    Attributes:
        num_windows: windows in the training text.
        steps: optimizer steps.
        batch_size: windows a step, a multiple of ``accumulation`` × ``num_processes``.
        accumulation, num_processes: how a step's windows are cut up: first by micro-batch, then by process.
        seed: of the shuffles.
        first_entry: where an earlier phase of the same windows stopped.
        count_passes: indices go on counting through the passes, ``pass · num_windows + window``, for samples that differ by pass.
    """

    num_windows: int
    steps: int
    batch_size: int
    accumulation: int = 1
    num_processes: int = 1
    seed: int = 0
    first_entry: int = 0
    count_passes: bool = False

    def micro_batch(self, step: int, part: int, rank: int) -> list[int]:
        """Return the windows of micro-batch ``part`` of ``step`` on process ``rank``."""
        size = self.batch_size // (self.accumulation * self.num_processes)
        start = self.first_entry + step * self.batch_size + (part * self.num_processes + rank) * size
        return [self.window(entry) for entry in range(start, start + size)]

    def window(self, entry: int) -> int:
        """Return the window at this place of the endless sequence."""
        passes, place = divmod(entry, self.num_windows)
        window = int(_order(self.num_windows, self.seed, passes)[place])
        return passes * self.num_windows + window if self.count_passes else window


@functools.lru_cache(maxsize=2)
def _order(num_windows: int, seed: int, passes: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + passes) % 2**63)
    return torch.randperm(num_windows, generator=generator)


class PlannedBatches(Sampler[list[int]]):
    """The micro-batches of one process in order: a batch sampler for a DataLoader."""

    def __init__(self, plan: BatchPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank

    def __len__(self) -> int:
        return self.plan.steps * self.plan.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.plan.steps):
            for part in range(self.plan.accumulation):
                yield self.plan.micro_batch(step, part, self.rank)
