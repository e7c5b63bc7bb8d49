"""The failure-mode table of a dynamic state path under safeguards: each of the eight faults of DTA §12 is injected and watched.

The host reads a text; from one token to another the fault is made in one row of a batch: in what the path reads (signals that break are
made so, whatever the path has learnt), in its state, or in its telemetry. Measured of each fault:

    fault.<mode>.detected_after      tokens from its beginning until its detector speaks; NaN where it never does
    fault.<mode>.bounded             1 where the state stays within the bound of §9E.2, else 0
    fault.<mode>.recovered_after     tokens from its end until the detector is silent and the row active for good, wherever they are so
                                     in the same text without the fault (false alarms are no aftermath); NaN where that never is
    fault.<mode>.others_untouched    1 where the logits of the batch's other row are those of a run without the fault, bit for bit, else 0

and over all faults their shares: ``fault.detected``, ``fault.bounded``, ``fault.recovered`` and ``fault.others_untouched``.

Shapes: B rows, T tokens, K state size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.scoring import evaluating
from keel.model import KeelForCausalLM
from keel.streams import DynamicStateStream
from keel.streams.dynamic_state import FAILURES, TraceTelemetry
from keel.streams.dynamic_state.dynamics import TokenParts
from keel.streams.dynamic_state.safeguards import NUDGE
from keel.streams.dynamic_state.telemetry import FEATURES

CALM_TOKENS = 100  # before every fault, in which the state settles
FAULT_TOKENS = 60
STANDSTILL_TOKENS = 320  # s closes in on its fixed point by the retention at a token: this many until nothing moves
AFTER_TOKENS = 100
EXPLOSION = 1e4  # times the length of the state
_SATURATED = 60.0  # a logit at which a gate is shut or open to the last bit
Tamper = Callable[[TokenParts, slice, DynamicStateStream], None]


class Watched(NamedTuple):
    """What was seen of one fault in one row, in tokens."""

    detected_after: float
    bounded: float
    recovered_after: float
    others_untouched: float


_SHARES: dict[str, Callable[[Watched], float]] = {
    "detected": lambda each: float(not math.isnan(each.detected_after)),
    "bounded": lambda each: each.bounded,
    "recovered": lambda each: float(not math.isnan(each.recovered_after)),
    "others_untouched": lambda each: each.others_untouched,
}


def tokens_needed() -> int:
    """Return how long a text has to be."""
    return CALM_TOKENS + STANDSTILL_TOKENS + AFTER_TOKENS


def fault_table(
    model: KeelForCausalLM,
    rows_NT: Tensor,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int], None] | None = None,
) -> list[ItemMetric]:
    """Inject every fault into every row.

    Args:
        model: with a dynamic state path that has safeguards.
        rows_NT: text, at least ``tokens_needed`` tokens a row.
        progress: called with a fault's name and the number of faults done.
    Raises: KeelError for a model without safeguards, or too short a text.
    """
    found = model.wires.first(DynamicStateStream)
    if found is None or found[1].config.safeguards is None:
        raise KeelError("faults: the model has no dynamic state path with safeguards; give it one")
    if rows_NT.shape[1] < tokens_needed():
        raise KeelError(f"faults: a text of {rows_NT.shape[1]} tokens; give at least {tokens_needed()} a row")
    metrics, shares = [], torch.zeros(len(_SHARES), len(rows_NT))
    for index, mode in enumerate(FAILURES):
        if progress is not None:
            progress(mode.replace("_", " "), index)
        watched = [watch(model, row_T.unsqueeze(0).to(device), mode) for row_T in rows_NT]
        for name, unit, higher in (
            ("detected_after", "tokens", False), ("bounded", "share", True), ("recovered_after", "tokens", False),
            ("others_untouched", "share", True),
        ):  # fmt: skip
            values = [float(getattr(each, name)) for each in watched]
            metrics.append(mean(f"fault.{mode}.{name}", values, unit=unit, higher_is_better=higher))
        shares += torch.tensor([[share(each) for each in watched] for share in _SHARES.values()])
    return metrics + [
        mean(f"fault.{name}", (row_N / len(FAILURES)).tolist(), unit="share of faults", higher_is_better=True)
        for name, row_N in zip(_SHARES, shares, strict=True)
    ]


def watch(model: KeelForCausalLM, ids_1T: Tensor, mode: str) -> Watched:
    """Inject one fault into one row, with a second one of the same text beside it, and say what happened."""
    found = model.wires.first(DynamicStateStream)
    assert found is not None
    name, stream = found
    length = STANDSTILL_TOKENS if mode == "fixed_point_collapse" else FAULT_TOKENS
    fault = slice(CALM_TOKENS, CALM_TOKENS + length)
    ids_2T = ids_1T[:, : fault.stop + AFTER_TOKENS].repeat(2, 1)
    cut = fault.start if mode == "feedback_explosion" else None
    with evaluating(model):
        calm_2TV, _ = _read(model, name, ids_2T, cut, factor=1.0)
        with _injected(stream, mode, fault, ids_2T.shape[1]):
            logits_2TV, signals = _read(model, name, ids_2T, cut, factor=EXPLOSION)
    detected_T = signals["failures"][0, :, FAILURES.index(mode)] > 0
    # The second row is the same text without the fault.
    working_2T = (signals["failures"][..., FAILURES.index(mode)] == 0) & (signals["governor"] == 0)
    as_without_T = working_2T[0] | ~working_2T[1]
    # An explosion is over as soon as it has happened: what was in memory is then the path's own matter.
    end = fault.start if mode == "feedback_explosion" else fault.stop
    bound = 1 / stream.config.noise_floor + NUDGE
    lengths_T = signals["state"][0].norm(dim=-1)
    # The token at which a state a thousand times too long is found is halved and not yet bounded: §12.7 takes it out after that.
    lengths_T = lengths_T[fault.start + stream.config.limits.cooldown :] if end == fault.start else lengths_T
    return Watched(
        _first(detected_T[fault.start : fault.stop]),
        float(bool(lengths_T.isfinite().all() and (lengths_T <= bound).all())),
        _for_good(as_without_T[end:]),
        float(torch.equal(logits_2TV[1], calm_2TV[1])),
    )


def _first(true_T: Tensor) -> float:
    places = true_T.nonzero()
    return float(places[0]) if len(places) else math.nan


def _for_good(true_T: Tensor) -> float:
    """Tokens until ``true_T`` is True and stays so; NaN where it ends False."""
    broken = (~true_T).nonzero()
    if not len(broken):
        return 0.0
    last = int(broken[-1]) + 1
    return float(last) if last < len(true_T) else math.nan


def _read(
    model: KeelForCausalLM, name: str, ids_BT: Tensor, cut: int | None, factor: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Read rows, return logits and signals; where ``cut``, in two passes, and the first row's state in between times ``factor``."""
    parts = [ids_BT] if cut is None else [ids_BT[:, :cut], ids_BT[:, cut:]]
    cache: Any = None
    found = []
    for index, part in enumerate(parts):
        if index:
            cache.layers[-1].previous(name)["s"][0].mul_(factor)
        output = model(input_ids=part, past_key_values=cache, use_cache=cut is not None, collect_signals=True)
        cache = output.past_key_values
        found.append(output)
    signals = {key.partition(".")[2]: torch.cat([each.signals[key] for each in found], 1) for key in found[0].signals}
    return torch.cat([each.logits for each in found], 1), signals


@contextmanager
def _injected(stream: DynamicStateStream, mode: str, fault: slice, length: int) -> Iterator[None]:
    """Make the fault while the body runs."""
    if mode == "feedback_explosion":
        yield
        return
    whole, before = stream._token_parts, stream.telemetry
    trace_TR = torch.zeros(length, len(FEATURES))
    trace_TR[fault, FEATURES.index("memory")] = 1.0

    def tampered(*given: Any) -> TokenParts:
        parts = TokenParts(*(part.clone() for part in whole(*given)))
        first = TokenParts(*(part[:1] for part in parts))  # views of the row that is tampered with
        if mode == "substrate_collapse":
            stream.telemetry = TraceTelemetry(trace_TR)
            try:
                first.substrate_B1.copy_(whole(*given).substrate_B1[:1])
            finally:
                stream.telemetry = before
        else:
            _TAMPERS[mode](first, fault, stream)
        return parts

    setattr(stream, "_token_parts", tampered)  # noqa: B010 - to mypy a method is no variable
    try:
        yield
    finally:
        del stream._token_parts


def _fragment(parts: TokenParts, fault: slice, stream: DynamicStateStream) -> None:
    """The temporal core forgets all and jumps from one end to the other at every token: T = 0."""
    _gates(parts, fault, keep=-_SATURATED)[..., 1::2, :] *= -1


def _gates(parts: TokenParts, fault: slice, keep: float) -> Tensor:
    """Set the update gate, and return the part of the gates that the new value of the TPC is made of, saturated."""
    size = parts.query_BK.shape[-1]
    parts.gates_B3K[:, fault, size : 2 * size] = keep
    new = parts.gates_B3K[:, fault, 2 * size :]
    new.fill_(_SATURATED)
    return new


def _incoherent(parts: TokenParts, fault: slice, stream: DynamicStateStream) -> None:
    parts.coherence_B1[:, fault] = -_SATURATED


def _noisy(parts: TokenParts, fault: slice, stream: DynamicStateStream) -> None:
    parts.noise_B1[:, fault] = 10 * stream.config.limits.noise_most


def _misaligned(parts: TokenParts, fault: slice, stream: DynamicStateStream) -> None:
    """The TPC holds one direction, the query of C the opposite one."""
    _gates(parts, fault, keep=-_SATURATED)
    parts.query_BK[:, fault] = -(parts.query_BK.shape[-1] ** -0.5)


def _split(parts: TokenParts, fault: slice, stream: DynamicStateStream) -> None:
    """The TPC jumps from one end to the other and the query is always at the opposite one: T and C are zero together."""
    _fragment(parts, fault, stream)
    size = parts.query_BK.shape[-1]
    parts.query_BK[:, fault] = -parts.gates_B3K[:, fault, 2 * size :].sign() * size**-0.5


def _standstill(parts: TokenParts, fault: slice, stream: DynamicStateStream) -> None:
    """Every token is the first one of the fault again."""
    for part in parts:
        part[:, fault] = part[:, fault.start : fault.start + 1]


_TAMPERS: dict[str, Tamper] = {
    "temporal_fragmentation": _fragment,
    "coherence_collapse": _incoherent,
    "noise_rampancy": _noisy,
    "alignment_break": _misaligned,
    "fixed_point_collapse": _standstill,
    "identity_split": _split,
}
