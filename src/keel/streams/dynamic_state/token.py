"""One token of one row on a processor: the step of decoding, in as few calls as it can be.

At this size a call costs more than what it computes. So weights that read the same vector are one matrix, and what is a single number
(signals, detectors, governor) is worked out in Python from a table of inner products. Written for the first readings of
``DynamicStateConfig``; everything else runs ``dynamics.step`` or ``safeguards.guarded_step``, which are the reference twins.

Shapes: a row leads every tensor with 1; D hidden size, K state size, R features of telemetry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from keel.streams.dynamic_state.config import DynamicStateConfig
from keel.streams.dynamic_state.dynamics import EPSILON
from keel.streams.dynamic_state.governor import (
    DECAY,
    FAILURES,
    MEASURES,
    SEVERITY,
    SIZES,
    SLOWING,
    Mode,
    SafeguardConfig,
)
from keel.streams.dynamic_state.safeguards import (
    BASELINE_RATE,
    CONSERVATIVE,
    NUDGE,
    PULL,
    RELEASE,
    SHRINKING,
    SMOOTHING,
    waves,
)
from keel.streams.dynamic_state.turbulence import rates

_COUNTS = len(MEASURES)
_DETECTED = _COUNTS + SIZES[1]
_REST = _DETECTED + SIZES[2]
_SIGNAL_SIZES = [*(1 for _ in MEASURES), *SIZES[1:]]


class RowWeights(NamedTuple):
    """The stream's weights as one row of decoding reads them.

    Attributes:
        gates: of a GRU cell that reads [h, r, s]: weight and bias of its input, weight and bias of the TPC.
        query_DQ, query_bias_Q: from h to the query of C and to the logit of I, then to that of N where N reads h.
        direction_KK: from the new TPC to M TPC.
        coherence_1K: what the TPC adds to the logit of I.
        write_KD: from s to the final hidden state, gate included.
        noise, substrate: weights and, last, bias of the logits of N and S; no noise where N reads h.
        turbulence: what reads it, see ``RowTurbulence``; None without.
    """

    gates: tuple[Tensor, Tensor, Tensor, Tensor]
    query_DQ: Tensor
    query_bias_Q: Tensor
    direction_KK: Tensor
    coherence_1K: Tensor
    write_KD: Tensor
    noise: tuple[float, float] | None
    substrate: tuple[float, ...]
    turbulence: RowTurbulence | None


class RowTurbulence(NamedTuple):
    """The weights of ``turbulence``, transposed, with A and P side by side, and the rates of its moving averages."""

    expects_DX: Tensor
    seen_DE: Tensor
    weight_YF: Tensor
    bias_F: Tensor
    layer_ZG: Tensor
    layer_bias_G: Tensor
    read_Z2: Tensor
    rate_M: Tensor


class Measured(NamedTuple):
    """The signals of a token, as ``dynamics.Signals`` has them."""

    coherence: float
    alignment: float
    noise: float
    continuity: float
    substrate: float
    update: float


class RowResult(NamedTuple):
    """What reading a token gives.

    Attributes:
        written_1D: final hidden state; None where it is the host's.
        states: by name, [1, ...].
        measured: the signals.
        query_1K: P h, whose direction is a signal; ``query_length`` is its length.
    """

    written_1D: Tensor | None
    states: dict[str, Tensor]
    measured: Measured
    query_1K: Tensor
    query_length: float


def row_weights(of: Mapping[str, Tensor], rows: Mapping[str, slice], sign: float) -> RowWeights:
    """Put the stream's parameters together.

    Args:
        of: parameters and buffers by the names that ``DynamicStateStream`` has for them; a gate is optional.
        rows: which rows of ``hidden_weight`` are gates, alignment, coherence and, where N reads h, noise, in this order.
        sign: of the instability in the logit of S: -1, and 1 where S is read as sigmoid.
    """
    query = slice(rows["alignment"].start, max(part.stop for part in rows.values()))
    read_3KX = torch.cat([of["hidden_weight"][rows["gates"]], of["residual_weight"], of["state_weight"]], 1)
    write_DK = of["integration"] * of["gate"].unsqueeze(-1) if "gate" in of else of["integration"]
    substrate_R1 = sign * torch.cat([of["substrate_weight"], of["substrate_bias"]])
    return RowWeights(
        gates=(read_3KX, of["tpc_weight"], of["hidden_bias"][rows["gates"]], of["tpc_bias"]),
        query_DQ=of["hidden_weight"][query].T.contiguous(),
        query_bias_Q=of["hidden_bias"][query],
        direction_KK=of["direction"].T.contiguous(),
        coherence_1K=of["coherence_tpc"].unsqueeze(0),
        write_KD=write_DK.T.contiguous(),
        noise=None if "noise" in rows else (float(of["noise_weight"]), float(of["noise_bias"])),
        substrate=tuple(substrate_R1.tolist()),
        turbulence=_turbulence_weights(of) if "turbulence_read" in of else None,
    )


def _turbulence_weights(of: Mapping[str, Tensor]) -> RowTurbulence:
    given = {name.removeprefix("turbulence_"): tensor for name, tensor in of.items() if name.startswith("turbulence_")}
    return RowTurbulence(
        expects_DX=torch.cat([given["expected"], given["before"]]).T.contiguous(),
        seen_DE=given["seen"].T.contiguous(),
        weight_YF=given["weight"].T.contiguous(),
        bias_F=given["bias"],
        layer_ZG=given["layer"].T.contiguous(),
        layer_bias_G=given["layer_bias"],
        read_Z2=given["read"].T.contiguous(),
        rate_M=rates(given["bias"]),
    )


def read_row(
    config: DynamicStateConfig,
    weights: RowWeights,
    hidden_1D: Tensor,
    residual_1D: Tensor,
    embedding_1D: Tensor,
    telemetry: Sequence[float],
    before: Mapping[str, Tensor],
) -> RowResult:
    """Read one token, under safeguards where ``before`` has a governor.

    Args:
        telemetry: its features.
        before: the states after the token before, [1, ...], by name.
    Reference twins: ``dynamics.step``, ``safeguards.guarded_step``.
    """
    size, tpc_1K, state_1K = config.state_size, before["tpc"], before["s"]
    new_tpc_1K = torch.gru_cell(torch.cat([hidden_1D, residual_1D, state_1K], 1), tpc_1K, *weights.gates)
    query_1Q = torch.addmm(weights.query_bias_Q, hidden_1D, weights.query_DQ)
    query_1K, raws = query_1Q[:, :size], query_1Q[0, size:].tolist()
    direction_1K = torch.mm(new_tpc_1K, weights.direction_KK)
    vectors_5K = torch.cat([new_tpc_1K, query_1K, tpc_1K, direction_1K, weights.coherence_1K])
    table = torch.inner(vectors_5K, vectors_5K).tolist()
    of_tpc, length = table[0], [math.sqrt(table[index][index]) + EPSILON for index in range(4)]
    residual_length = float(torch.linalg.vector_norm(residual_1D))
    more: tuple[float, float] = (0.0, 0.0)
    turbulent: dict[str, Tensor] = {}
    if weights.turbulence is not None:
        more, turbulent = _turbulence(weights.turbulence, hidden_1D, residual_length, embedding_1D, before)
    i = _sigmoid(raws[0] + more[0] + of_tpc[4])
    c = _clamp(of_tpc[1] / (length[0] * length[1]), 0.0, 1.0)
    raw = raws[1] if weights.noise is None else residual_length * weights.noise[0] + weights.noise[1]
    n = _softplus(raw + more[1]) + config.noise_floor
    t = 0.5 + 0.5 * of_tpc[2] / (length[0] * length[2])
    s = _sigmoid(sum(map(mul, weights.substrate, telemetry)) + weights.substrate[-1])
    measured = Measured(i, c, n, t, s, i * c / n)
    if "governor" in before:
        written, states = _guarded(config, weights, hidden_1D, before, measured, new_tpc_1K, direction_1K, length[3])
        return RowResult(written, {**states, **turbulent}, measured, query_1K, length[1])
    kept = s * t
    taken = (1 - config.retention) * measured.update * kept / length[3]
    new_1K = torch.add(state_1K * (config.retention * kept), direction_1K, alpha=taken)
    written_1D = torch.addmm(hidden_1D, new_1K, weights.write_KD)
    return RowResult(written_1D, {"tpc": new_tpc_1K, "s": new_1K, **turbulent}, measured, query_1K, length[1])


def _turbulence(
    weights: RowTurbulence,
    hidden_1D: Tensor,
    residual_length: float,
    embedding_1D: Tensor,
    before: Mapping[str, Tensor],
) -> tuple[tuple[float, float], dict[str, Tensor]]:
    """Return what turbulence adds to the logits of I and N, and its state.  Reference twin: ``turbulence.reference_turbulence``."""
    width, rank = weights.seen_DE.shape
    length = float(torch.linalg.vector_norm(embedding_1D))
    sizes = [math.sqrt(x * x / width + EPSILON) for x in (residual_length, length)]
    expected_1E, before_1F = before["expectation"][:, :rank], before["expectation"][:, rank:]
    match_1E = expected_1E * torch.mm(embedding_1D, weights.seen_DE) / sizes[1]
    logs_12 = hidden_1D.new_tensor([[math.log(x) for x in sizes]])
    inputs_1Y = torch.cat([hidden_1D, logs_12, match_1E], 1)
    features_1F = torch.addmm(weights.bias_F + before_1F, inputs_1Y, weights.weight_YF).tanh_()
    newest_1M = features_1F.nan_to_num(0.0).repeat(1, weights.rate_M.shape[0] // features_1F.shape[1])
    turbulence_1M = torch.lerp(newest_1M, before["turbulence"], weights.rate_M)
    y_1Z = torch.cat([features_1F, turbulence_1M], 1)
    layer_1G = torch.addmm(weights.layer_bias_G, y_1Z, weights.layer_ZG).tanh_()
    of_i, of_n = torch.mm(torch.cat([y_1Z, layer_1G], 1), weights.read_Z2).tolist()[0]
    return (of_i, of_n), {"expectation": torch.mm(hidden_1D, weights.expects_DX), "turbulence": turbulence_1M}


def _guarded(
    config: DynamicStateConfig,
    weights: RowWeights,
    hidden_1D: Tensor,
    before: Mapping[str, Tensor],
    measured: Measured,
    new_tpc_1K: Tensor,
    direction_1K: Tensor,
    length: float,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Go on as ``safeguards.guarded_step`` does; return what is written and the states."""
    limits, state_1K, baseline_1K = config.limits, before["s"], before["baseline"]
    memory = before["governor"].tolist()[0]
    detected, (discontinuity, instability, timer, age, _, _) = memory[_DETECTED:_REST], memory[_REST:]
    smoothed = discontinuity + SMOOTHING * ((1 - measured.continuity) - discontinuity)
    t, update = _used(config, measured, smoothed)
    kept = measured.substrate * t
    share = 2.0 ** sum(map(mul, detected, SLOWING)) * (1 - config.retention)
    new_1K = torch.add(state_1K * ((1 - share) * kept), direction_1K, alpha=share * kept * update / length)
    if detected[6]:
        frequency_K, phase_K = waves(config.state_size, new_1K.dtype, new_1K.device)
        strength = share * kept * NUDGE * config.state_size**-0.5
        new_1K.add_(torch.sin(frequency_K * age + phase_K), alpha=strength)
    change = float(torch.dist(new_1K, state_1K))
    within = _within(limits, measured, change)
    counts = [0.0 if fine else count + 1 for fine, count in zip(within, memory[_COUNTS:_DETECTED], strict=True)]
    found = [float(count >= patience) for count, patience in zip(counts, limits.patiences(), strict=True)]
    instability = DECAY * instability + sum(map(mul, found, SEVERITY))
    timer = limits.cooldown + 1.0 if instability > limits.instability_most else max(timer - 1, 0.0)
    written_1D: Tensor | None = None
    if timer > 0:
        mode = Mode.COOL_DOWN if timer <= limits.cooldown else Mode.SAFE
        states = {"tpc": before["tpc"], "s": state_1K if within[5] else baseline_1K, "baseline": baseline_1K}
        smoothed, reliance = discontinuity, 0.0
    else:
        mode, reliance = Mode.ACTIVE, 1.0 if within[2] else CONSERVATIVE
        new_1K = new_1K if within[5] else SHRINKING * new_1K
        new_1K = torch.lerp(new_1K, baseline_1K, PULL) if detected[7] else new_1K
        new_tpc_1K = new_tpc_1K * (1 - RELEASE) if detected[4] else new_tpc_1K
        baseline_1K = torch.lerp(baseline_1K, new_1K, BASELINE_RATE) if all(within) else baseline_1K
        states = {"tpc": new_tpc_1K, "s": new_1K, "baseline": baseline_1K}
        written_1D = torch.addmm(hidden_1D, new_1K, weights.write_KD, alpha=reliance)
    numbers = [*measured, change, *counts, *found, smoothed, instability, timer, age + 1, float(mode), reliance]
    states["governor"] = torch.tensor([numbers], dtype=new_1K.dtype)
    return written_1D, states


def row_signals(row: RowResult) -> dict[str, Tensor]:
    """Return the signals of a token as ``DynamicStateStream`` names them, [1, 1, ...]."""
    states = row.states
    whole = {"tpc": states["tpc"].unsqueeze(1), "state": states["s"].unsqueeze(1)}
    whole["query"] = (row.query_1K / row.query_length).unsqueeze(1)
    if "governor" not in states:
        measured_16 = torch.tensor([row.measured], dtype=states["s"].dtype)
        return {**dict(zip(MEASURES, measured_16.split(1, 1), strict=False)), **whole}
    pieces = states["governor"].split(_SIGNAL_SIZES, 1)
    measured = dict(zip(MEASURES, pieces, strict=False))
    return {**measured, **whole, "governor": pieces[-2], "failures": pieces[_COUNTS + 1].unsqueeze(1)}


def _used(config: DynamicStateConfig, measured: Measured, smoothed: float) -> tuple[float, float]:
    """Return T and x after floors, clamps and smoothing, as ``safeguards._floored`` does. NaN goes through."""
    limits = config.limits
    i, c = max(measured.coherence, limits.coherence_least), max(measured.alignment, limits.alignment_least)
    n = min(measured.noise, max(limits.noise_most, config.noise_floor))
    return measured.continuity if measured.continuity >= limits.continuity_least else 1 - smoothed, i * c / n


def _within(limits: SafeguardConfig, measured: Measured, change: float) -> tuple[bool, ...]:
    """Return for each of ``FAILURES`` whether it is within bounds, as ``governor.detect`` does: nothing is after what is no number."""
    i, c, n, t, s, x = measured
    if not math.isfinite(i + c + n + t + s + x + change):
        return (False,) * len(FAILURES)
    return (
        s >= limits.substrate_least, t >= limits.continuity_least, i >= limits.coherence_least, n <= limits.noise_most,
        c >= limits.alignment_least, change <= limits.change_most, change >= limits.change_least,
        t + c >= limits.continuity_least + limits.alignment_least,
    )  # fmt: skip


def _clamp(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)  # in this order NaN goes through


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-_clamp(logit, -700.0, 700.0)))


def _softplus(logit: float) -> float:
    return max(logit, 0.0) + math.log1p(math.exp(-abs(logit)))
