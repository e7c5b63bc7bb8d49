"""Long generation with the signals of every token kept, and text read into it in between: what the suite of DTA §11 is measured on.

Shapes: B rows, T tokens, V vocabulary, K state size.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.errors import KeelError
from keel.evaluation.scoring import evaluating
from keel.evaluation.statistics import Array

TOP = 40  # a token is drawn from so many of the likeliest: free sampling wanders off in a small model, greedy decoding loops


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What was read and written.

    Attributes:
        ids_BT: all tokens, read and generated.
        signals: of every token by name, without the stream's name in front, [B, T] or [B, T, K] float64; empty for a bare host.
        stages: [start, end) of every stage.
    """

    ids_BT: Tensor
    signals: Mapping[str, Array]
    stages: tuple[tuple[int, int], ...]

    def stage(self, index: int, name: str) -> Array:
        """Return a signal over one stage, [B, t, ...]."""
        start, end = self.stages[index]
        return self.signals[name][:, start:end]


def roll_out(model: Any, stages: Sequence[Tensor | int], *, seed: int) -> Rollout:
    """Read and generate in turn; the tokens of a row depend on the seed, the model and the other rows' number alone.

    Args:
        model: a ``KeelForCausalLM``.
        stages: tokens to read [B, t], or how many to generate; the first is to read.
        seed: of the sampling.
    Raises: KeelError where the first stage is not tokens.
    """
    if not stages or isinstance(stages[0], int):
        raise KeelError("roll_out: nothing to begin with; give the tokens of a prompt first")
    device, source = stages[0].device, torch.Generator().manual_seed(seed)
    never = [token for token in (model.config.text_config.eos_token_id, model.config.text_config.pad_token_id) if token]
    parts: list[Tensor] = []
    found: dict[str, list[Tensor]] = {}
    ends = [0]
    cache, logits_BV = None, torch.empty(0)
    with evaluating(model):
        for stage in stages:
            # Generated tokens are read one by one, what is given as a whole.
            steps = [stage] if isinstance(stage, Tensor) else [None] * stage
            for given in steps:
                ids_Bt = _drawn(logits_BV, never, source).to(device) if given is None else given
                output = model(
                    input_ids=ids_Bt, past_key_values=cache, use_cache=True, collect_signals=True, logits_to_keep=1
                )
                cache, logits_BV = output.past_key_values, output.logits[:, -1]
                parts.append(ids_Bt)
                for name, signal in (output.signals or {}).items():
                    found.setdefault(name.partition(".")[2], []).append(signal)
            ends.append(sum(part.shape[1] for part in parts))
    signals = {name: torch.cat(each, 1).double().cpu().numpy() for name, each in found.items()}
    return Rollout(ids_BT=torch.cat(parts, 1).cpu(), signals=signals, stages=tuple(itertools.pairwise(ends)))


def read_signals(model: Any, ids_BT: Tensor) -> dict[str, Array]:
    """Read whole rows at once and return their signals, as ``Rollout.signals``."""
    with evaluating(model):
        output = model(input_ids=ids_BT, use_cache=False, collect_signals=True, logits_to_keep=1)
    return {
        name.partition(".")[2]: signal.double().cpu().numpy().astype(np.float64)
        for name, signal in (output.signals or {}).items()
    }


def _drawn(logits_BV: Tensor, never: Sequence[int], source: torch.Generator) -> Tensor:
    """Draw the next token of every row, [B, 1]; ``never`` the end of the text, after which there would be nothing to measure."""
    logits_BV = logits_BV.float().cpu().clone()
    logits_BV[:, list(never)] = float("-inf")
    best = logits_BV.topk(min(TOP, logits_BV.shape[1]))
    chosen_B1 = torch.multinomial(best.values.softmax(-1), 1, generator=source)
    return best.indices.gather(1, chosen_B1)
