"""How much does a model lean on its stream? Evaluate it while what the host reads of the stream's state is corrupted.

S-Former, App. A.2 and A.3: permutation or noise at evaluation. A stream that nobody reads can be corrupted without harm.

Shapes: G recurrences, B batch, T tokens, D state width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from keel.errors import KeelError, suggest
from keel.model import KeelForCausalLM
from keel.streams import StructuralStream

CORRUPTIONS = ("permuted", "noise", "zeroed", "other")
OF_WHOLE_ROWS = ("permuted", "noise")  # the others corrupt a token by itself, also where it comes alone behind a cache


@contextmanager
def corrupted(model: KeelForCausalLM, kind: str, seed: int = 0) -> Iterator[None]:
    """Corrupt the states of every structural stream of ``model`` while the body runs.

    With a kind of ``OF_WHOLE_ROWS`` only a pass over whole sequences is corrupted as said: run without a cache, in which a pass may be
    one token long.

    Args:
        kind: ``permuted``: the states of a row in a random order of its attended tokens; ``noise``: normal noise with each
            channel's mean and deviation over the attended tokens; ``zeroed``; ``other``: those of the next row of the batch.
        seed: of permutation and noise.
    Raises: KeelError for an unknown kind, a model without such a stream, or ``other`` with a batch of one.
    """
    if kind not in CORRUPTIONS:
        raise KeelError(f"corruption {kind!r}; {suggest(kind, CORRUPTIONS)}")
    streams = [stream for stream in model.wires.streams.values() if isinstance(stream, StructuralStream)]
    if not streams:
        raise KeelError("corruption: the model has no structural stream whose state could be corrupted")
    corrupt = _corruption(kind, torch.Generator().manual_seed(seed))
    for stream in streams:
        stream.corrupt = corrupt
    try:
        yield
    finally:
        for stream in streams:
            stream.corrupt = None


def _corruption(kind: str, random: torch.Generator) -> Callable[[Tensor, Tensor | None], Tensor]:
    def corrupt(states_GBTD: Tensor, attended_BT: Tensor | None) -> Tensor:
        if kind == "zeroed":
            return torch.zeros_like(states_GBTD)
        if kind == "other":
            if states_GBTD.shape[1] < 2:
                raise KeelError("corruption 'other' takes the states of another row: evaluate at least 2 in a batch")
            return states_GBTD.roll(1, dims=1)
        if attended_BT is None:
            attended_BT = torch.ones(states_GBTD.shape[1:3], dtype=torch.bool, device=states_GBTD.device)
        return (_permuted if kind == "permuted" else _noise)(states_GBTD, attended_BT, random)

    return corrupt


def _permuted(states_GBTD: Tensor, attended_BT: Tensor, random: torch.Generator) -> Tensor:
    order_BT = torch.arange(attended_BT.shape[1]).repeat(len(attended_BT), 1)
    for order_T, attended_T in zip(order_BT, attended_BT.cpu(), strict=True):
        columns = attended_T.nonzero()[:, 0]
        order_T[columns] = columns[torch.randperm(len(columns), generator=random)]
    rows_B1 = torch.arange(len(order_BT), device=states_GBTD.device)[:, None]
    return states_GBTD[:, rows_B1, order_BT.to(states_GBTD.device)]


def _noise(states_GBTD: Tensor, attended_BT: Tensor, random: torch.Generator) -> Tensor:
    attended_GND = states_GBTD[:, attended_BT]
    noise_GBTD = torch.randn(states_GBTD.shape, generator=random).to(states_GBTD)
    mean_G11D, std_G11D = (
        moment[:, None, None] for moment in (attended_GND.mean(1), attended_GND.std(1, correction=0))
    )
    return mean_G11D + std_G11D * noise_GBTD
