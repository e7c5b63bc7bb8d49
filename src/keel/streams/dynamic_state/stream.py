"""The dynamic state path of the Dynamic Transformer Architecture (DTA): a regulated recurrent state beside the host.

    TPC_t = GRU([h_t, s_t, r_t], TPC_{t-1})                    §2.2   temporal persistence core
    I_t = sigmoid(W1 [h_t, TPC_t])                             §3.3   coherence
    N_t = softplus(w ‖r_t‖) + n_min                            §4.3   noise
    C_t = clamp(cos(P h_t, TPC_t), 0, 1)                       §5.3   alignment
    T_t = (1 + cos(TPC_t, TPC_{t-1})) / 2                      §2.5   continuity
    S_t = exp(-softplus(w · v_t))                              §7.4   substrate stability, v_t telemetry (``telemetry``)
    s_{t+1} = S_t T_t (alpha s_t + (1 - alpha) I_t C_t / N_t u_t)   §6.5   recursive integration, u_t the unit direction of M TPC_t
    final_t = h_t + gate W3 s_{t+1}                            §8.3   integration path

h is the hidden state behind the host's final norm, r the residual stream before it. ``reference_dynamic_state`` is the specification.

Shapes: B batch, T tokens, D hidden size, K state size, R features of telemetry, P rows that read the hidden state.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from keel.hosts import HostShape
from keel.ops.padding import pack_left, unpack
from keel.streams.base import Flow, PassInputs, PassResult, State, Stream
from keel.streams.dynamic_state.config import DynamicStateConfig
from keel.streams.dynamic_state.dynamics import (
    StepWeights,
    TokenParts,
    direction,
    noise,
    norm,
    signals_of,
    step,
    substrate_stability,
)
from keel.streams.dynamic_state.governor import MEASURES, MEMORY_SIZE, SIZES, Memory, SafeguardConfig
from keel.streams.dynamic_state.recurrence import dynamic_state_recurrence
from keel.streams.dynamic_state.safeguards import Guarded, guarded_step
from keel.streams.dynamic_state.telemetry import FEATURES, ConstantTelemetry, Telemetry, calibrated_projection
from keel.streams.dynamic_state.token import RowResult, RowWeights, read_row, row_signals, row_weights
from keel.streams.dynamic_state.turbulence import LAYER, RANK, TurbulenceWeights, state_sizes, turbulence

_VERSION = operator.attrgetter("_version")  # counts what changed a tensor in place
FIRST_READINGS = ("hidden_state_residual", "trajectory", "directional")
"""Of ``tpc_input``, ``continuity`` and ``update``; one row of them is read by ``token.read_row``."""


class DynamicStateFlow(Flow):
    """Working memory of one pass: the residual stream, and all that was computed at the final hidden state."""

    residual_BTD: Tensor | None = None
    parts: TokenParts
    guarded: bool = False
    before: State
    states: State
    turbulent: State
    seen_BT: Tensor | None = None
    position_BT: Tensor | None = None
    rows: list[RowResult]

    def __init__(self, inputs: PassInputs, state: State) -> None:
        self.inputs = inputs
        self.state = state
        self.turbulent = {}
        self.rows = []


class DynamicStateStream(Stream):
    """The dynamic state path of DTA (§2 to §8), beside the host's final norm.

    ``telemetry`` is where the substrate's features come from: constant and healthy unless another source is put there.
    ``truncation``: columns after which gradients of a long rollout are cut in the recurrence (§9D); None for none.

    State while decoding: ``tpc`` and ``s``, [B, K], and ``position`` [B] where telemetry follows tokens; with ``turbulence``
    also ``expectation`` and ``turbulence``, see there. Signals: ``coherence`` (I),
    ``alignment`` (C), ``noise`` (N), ``continuity`` (T), ``substrate`` (S) and ``update`` (x = I C / N), each [B, T]; ``tpc``,
    ``state`` and ``query`` (P h of unit length), [B, T, K]. Under ``safeguards`` also: state ``baseline`` [B, K] and ``governor``
    [B, Q]; signals ``change`` and ``governor`` (a ``Mode``), [B, T], and ``failures`` [B, T, 8], 1 where a failure mode is
    detected; the others as measured.
    Reference twin: ``reference_dynamic_state``.

    The author of DTA states research-only terms; NOTICE repeats them.
    """

    type_name = "dynamic_state"
    config_class = DynamicStateConfig
    config: DynamicStateConfig
    substrate_weight: Tensor
    substrate_bias: Tensor

    def __init__(self, config: Any = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        self.telemetry: Telemetry = ConstantTelemetry()
        self.truncation: int | None = None
        of = self.config
        self._reads_rows = (of.tpc_input, of.continuity, of.update) == FIRST_READINGS
        # Put together from the parameters, behind those and their versions.
        self._row_weights: tuple[list[Tensor], list[int], RowWeights] | None = None

    def build(self, shape: HostShape) -> None:
        """See ``Stream.build``. One product of the hidden state gives the gates, the query of C, and the logits of I (and N)."""
        size, width = self.config.state_size, shape.hidden_size
        parts = {"gates": 3 * size, "alignment": size, "coherence": 1}
        if self.config.noise == "hidden":
            parts["noise"] = 1
        ends = [0, *itertools.accumulate(parts.values())]
        self.hidden_rows = {part: slice(ends[index], ends[index + 1]) for index, part in enumerate(parts)}
        self.hidden_weight = nn.Parameter(torch.empty(ends[-1], width))
        self.hidden_bias = nn.Parameter(torch.empty(ends[-1]))
        if self.config.tpc_input == "hidden_state_residual":
            self.residual_weight = nn.Parameter(torch.empty(3 * size, width))
        self.state_weight = nn.Parameter(torch.empty(3 * size, size))
        self.tpc_weight = nn.Parameter(torch.empty(3 * size, size))
        self.tpc_bias = nn.Parameter(torch.empty(3 * size))
        self.coherence_tpc = nn.Parameter(torch.empty(size))
        if self.config.noise == "residual_norm":
            self.noise_weight = nn.Parameter(torch.empty(1))
            self.noise_bias = nn.Parameter(torch.empty(1))
        if self.config.turbulence:
            features = self.config.turbulence
            integrated = features + state_sizes(features)["turbulence"]
            self.turbulence_expected = nn.Parameter(torch.empty(RANK, width))
            self.turbulence_seen = nn.Parameter(torch.empty(RANK, width))
            self.turbulence_before = nn.Parameter(torch.empty(features, width))
            self.turbulence_weight = nn.Parameter(torch.empty(features, width + 2 + RANK))
            self.turbulence_bias = nn.Parameter(torch.empty(features))
            self.turbulence_layer = nn.Parameter(torch.empty(LAYER, integrated))
            self.turbulence_layer_bias = nn.Parameter(torch.empty(LAYER))
            self.turbulence_read = nn.Parameter(torch.empty(2, integrated + LAYER))
        if self.config.update == "directional":
            self.direction = nn.Parameter(torch.empty(size, size))
        self.integration = nn.Parameter(torch.empty(width, size))
        if self.config.init == "identity":
            self.gate = nn.Parameter(torch.empty(width))
        # Calibrated and not trained (§7.4): under healthy telemetry, all zeros, they would get no gradient.
        self.register_buffer("substrate_weight", torch.empty(len(FEATURES)))
        self.register_buffer("substrate_bias", torch.empty(1))

    def init_weights(self) -> None:
        """See ``Stream.init_weights``: matrices uniform by the width of what they read; S is 0.998 when healthy."""
        size, width = self.integration.shape[1], self.integration.shape[0]
        gates_read = size + width * (1 + hasattr(self, "residual_weight"))
        integrated = self.config.turbulence + state_sizes(self.config.turbulence)["turbulence"]
        bounds = {
            "hidden_weight": width, "residual_weight": gates_read, "state_weight": gates_read, "tpc_weight": size,
            "coherence_tpc": size, "direction": size, "integration": size,
            "turbulence_expected": width, "turbulence_before": width, "turbulence_weight": width,
            "turbulence_layer": integrated, "turbulence_read": integrated,
        }  # fmt: skip
        for name, reads in bounds.items():
            if hasattr(self, name):
                init.uniform_(getattr(self, name), -(reads**-0.5), reads**-0.5)
        for name in ("hidden_bias", "tpc_bias", "noise_bias", "turbulence_bias", "turbulence_layer_bias", "gate"):
            if hasattr(self, name):
                init.zeros_(getattr(self, name))
        if self.config.turbulence:  # what is seen is held against what was expected along the same directions
            init.copy_(self.turbulence_seen, self.turbulence_expected)
        if hasattr(self, "noise_weight"):
            init.constant_(self.noise_weight, width**-0.5)  # N then reads the root mean square of the residual stream
        # One exhausted resource gives S = 0.002, a half exhausted one 0.5.
        sign = -1.0 if self.config.substrate == "sigmoid" else 1.0
        init.constant_(self.substrate_weight, 12.0 * sign)
        init.constant_(self.substrate_bias, -6.0 * sign)
        init.zeros_(self.step)

    def write_sites(self) -> list[tuple[str, int]]:
        """See ``Stream.write_sites``: at the first of the two the residual stream is read, and nothing written."""
        return [("final_norm_input", -1), ("final_hidden", -1)]

    def open(self, inputs: PassInputs, state: State) -> DynamicStateFlow:
        """See ``Stream.open``: all that this stream reads comes at the end of the host's pass."""
        return DynamicStateFlow(inputs, state)

    def write(self, site: str, layer: int, hidden_BTD: Tensor, flow: Flow) -> Tensor:
        """Keep the residual stream; then run the path and return ``h + gate W3 s`` (§8.3)."""
        assert isinstance(flow, DynamicStateFlow)
        if site == "final_norm_input":
            flow.residual_BTD = hidden_BTD
            return hidden_BTD
        if self._is_one_row(hidden_BTD, flow):
            return self._read_row(hidden_BTD, flow)
        device = hidden_BTD.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._run(hidden_BTD, flow)
        return self._run(hidden_BTD, flow)

    def _is_one_row(self, hidden_BTD: Tensor, flow: DynamicStateFlow) -> bool:
        """Say whether ``token.read_row`` can read this: one row on a processor, without gradients; tokens of a prompt if guarded."""
        inputs = flow.inputs
        return (
            hidden_BTD.shape[0] == 1
            and not torch.is_grad_enabled()
            and self._reads_rows
            and (hidden_BTD.shape[1] == 1 or (self.config.safeguards is not None and not self.training))
            and inputs.attended_BT is None
            and inputs.document_starts_BT is None
            and hidden_BTD.is_cpu
            and hidden_BTD.dtype == self.integration.dtype
            and hidden_BTD.dtype in (torch.float32, torch.float64)
            and not self.telemetry.follows_tokens
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cpu")
        )

    def _read_row(self, hidden_1TD: Tensor, flow: DynamicStateFlow) -> Tensor:
        assert flow.residual_BTD is not None
        weights = self._weights_of_a_row(anew=hidden_1TD.shape[1] > 1 or not flow.state)
        telemetry, before = self.telemetry.read(None).tolist(), self._row_before(hidden_1TD, flow)
        embeddings_1TD = _as(flow.inputs.embeddings_BTD, hidden_1TD.dtype)
        if hidden_1TD.shape[1] == 1:
            given = hidden_1TD[0], flow.residual_BTD[0], embeddings_1TD[0]
            row = read_row(self.config, weights, *given, telemetry, before)
            flow.rows.append(row)
            return hidden_1TD if row.written_1D is None else row.written_1D.unsqueeze(0)
        written = []
        columns = (part[0].split(1) for part in (hidden_1TD, flow.residual_BTD, embeddings_1TD))
        for given in zip(*columns, strict=True):
            row = read_row(self.config, weights, *given, telemetry, before)
            flow.rows.append(row)
            written.append(given[0] if row.written_1D is None else row.written_1D)
            before = row.states
        return torch.cat(written).unsqueeze(0)

    def _row_before(self, hidden_1TD: Tensor, flow: DynamicStateFlow) -> State:
        """Return the states before a row's tokens; of a governor only where it is at work."""
        guarded = self.config.safeguards is not None and not self.training
        if "tpc" in flow.state and guarded == ("governor" in flow.state):
            return flow.state
        sizes = self._state_sizes(guarded) | (state_sizes(self.config.turbulence) if self.config.turbulence else {})
        return {
            name: flow.state[name] if name in flow.state else hidden_1TD.new_zeros(1, width)
            for name, width in sizes.items()
        }

    def _weights_of_a_row(self, anew: bool) -> RowWeights:
        """Return the weights put together: at the beginning of every text, and where a parameter was changed since."""
        known = self._row_weights
        if anew or known is None or known[1] != [*map(_VERSION, known[0])]:
            of: dict[str, Any] = {**self._parameters, **self._buffers}
            sign = 1.0 if self.config.substrate == "sigmoid" else -1.0
            with torch.inference_mode(False), torch.no_grad():
                tensors = list(of.values())
                weights = row_weights(of, self.hidden_rows, sign)
                known = self._row_weights = tensors, [*map(_VERSION, tensors)], weights
        return known[2]

    def _state_sizes(self, guarded: bool) -> dict[str, int]:
        size = self.config.state_size
        more = {"baseline": size, "governor": MEMORY_SIZE} if guarded else {}
        return {"tpc": size, "s": size, **more}

    def _run(self, hidden_BTD: Tensor, flow: DynamicStateFlow) -> Tensor:
        assert flow.residual_BTD is not None
        # At least float32 from here: the states after every token, which a rollback takes up, are as exact as the last one.
        dtype = torch.promote_types(hidden_BTD.dtype, torch.float32)
        flow.parts = self._token_parts(flow, _as(hidden_BTD, dtype), _as(flow.residual_BTD, dtype))
        self._recur(flow)
        write_KD = _as(self.integration, dtype).T
        if self.config.init == "identity":
            write_KD = write_KD * self.gate
        if not flow.guarded and dtype == hidden_BTD.dtype:
            rows_ND, states_NK = hidden_BTD.flatten(0, 1), flow.states["s"].flatten(0, 1)
            return torch.addmm(rows_ND, states_NK, write_KD).view_as(hidden_BTD)
        delta_BTD = flow.states["s"] @ write_KD
        if not flow.guarded:
            return hidden_BTD + _as(delta_BTD, hidden_BTD.dtype)
        reliance_BT1 = flow.states["governor"][..., -1:]
        written_BTD = hidden_BTD + _as(delta_BTD * reliance_BT1, hidden_BTD.dtype)
        return torch.where(reliance_BT1 > 0, written_BTD, hidden_BTD)

    def _token_parts(self, flow: DynamicStateFlow, hidden_BTD: Tensor, residual_BTD: Tensor) -> TokenParts:
        dtype = hidden_BTD.dtype
        products_BTP = F.linear(hidden_BTD, _as(self.hidden_weight, dtype), _as(self.hidden_bias, dtype))
        # Split and not sliced: the gradients of slices are as many tensors of the whole width.
        pieces = products_BTP.split([rows.stop - rows.start for rows in self.hidden_rows.values()], -1)
        of = dict(zip(self.hidden_rows, pieces, strict=True))
        gates_BT3K, query_BTK = of["gates"], of["alignment"]
        if self.config.tpc_input == "hidden_state_residual":
            residual_ND, weight_D3K = residual_BTD.flatten(0, 1), _as(self.residual_weight, dtype).T
            gates_BT3K = torch.addmm(gates_BT3K.flatten(0, 1), residual_ND, weight_D3K).view_as(gates_BT3K)
        if self.config.noise == "hidden":
            raw_BT1 = of["noise"]
        else:
            length_BT1 = torch.linalg.vector_norm(residual_BTD, dim=-1, keepdim=True)
            raw_BT1 = length_BT1 * self.noise_weight + self.noise_bias
        coherence_BT1 = of["coherence"]
        if self.config.turbulence:
            more_BT2 = self._turbulence(flow, hidden_BTD, residual_BTD)
            coherence_BT1, raw_BT1 = coherence_BT1 + more_BT2[..., :1], raw_BT1 + more_BT2[..., 1:]
        return TokenParts(
            gates_BT3K,
            query_BTK / norm(query_BTK),
            coherence_BT1,
            noise(raw_BT1, self.config.noise_floor),
            self._substrate(flow, hidden_BTD),
        )

    def turbulence_weights(self, dtype: torch.dtype) -> TurbulenceWeights:
        """Return what ``turbulence`` works with; ``config.turbulence`` is not 0."""
        names = ("expected", "seen", "before", "weight", "bias", "layer", "layer_bias", "read")
        return TurbulenceWeights(*(_as(getattr(self, f"turbulence_{name}"), dtype) for name in names))

    def _turbulence(self, flow: DynamicStateFlow, hidden_BTD: Tensor, residual_BTD: Tensor) -> Tensor:
        """Return what is added to the logits of I and N, [B, T, 2]; keep the state after every token in the flow."""
        sizes = state_sizes(self.config.turbulence)
        before = [
            flow.state[name] if name in flow.state else hidden_BTD.new_zeros(len(hidden_BTD), size)
            for name, size in sizes.items()
        ]
        inputs = flow.inputs
        found = turbulence(
            self.turbulence_weights(hidden_BTD.dtype),
            hidden_BTD,
            residual_BTD,
            _as(inputs.embeddings_BTD, hidden_BTD.dtype),
            before[0],
            before[1],
            inputs.attended_BT,
            inputs.document_starts_BT,
        )
        flow.turbulent = dict(zip(sizes, found[1:], strict=True))
        return found.logits_BT2

    def _substrate(self, flow: DynamicStateFlow, like_BTD: Tensor) -> Tensor:
        if self.telemetry.follows_tokens:
            flow.position_BT = self._positions(flow, like_BTD)
        features = _as(self.telemetry.read(flow.position_BT).to(like_BTD.device), self.substrate_weight.dtype)
        substrate = substrate_stability(self.config.substrate, self.substrate_weight, self.substrate_bias, features)
        return _as(substrate, like_BTD.dtype).expand(*like_BTD.shape[:2], 1)

    def _positions(self, flow: DynamicStateFlow, like_BTD: Tensor) -> Tensor:
        """Return how many attended tokens stand before each column, [B, T]: what a trace of telemetry follows."""
        batch, length = like_BTD.shape[:2]
        attended_BT = flow.inputs.attended_BT
        if attended_BT is None:
            attended_BT = torch.ones(batch, length, dtype=torch.bool, device=like_BTD.device)
        seen_B = flow.state.get("position")
        counted_BT = attended_BT.long().cumsum(1)
        flow.seen_BT = counted_BT if seen_B is None else counted_BT + seen_B.unsqueeze(1)
        return (flow.seen_BT - 1).clamp(min=0)

    def calibrate(self, healthy_NR: Tensor, degraded_NR: Tensor) -> None:
        """Set W_s from recorded telemetry of a healthy and of a degraded machine (§7.4); see ``calibrated_projection``."""
        weight_R, bias = calibrated_projection(healthy_NR, degraded_NR)
        sign = -1.0 if self.config.substrate == "sigmoid" else 1.0
        self.substrate_weight.copy_(sign * weight_R)
        self.substrate_bias.copy_(sign * bias)

    def guard(self, limits: SafeguardConfig | None = None) -> None:
        """Turn safeguards on, with these thresholds or the default ones. They have no weights: any trained path can be guarded."""
        self.config = dataclasses.replace(self.config, safeguards=SafeguardConfig() if limits is None else limits)

    def directions(self, tpc_BTK: Tensor) -> Tensor:
        """Return u, the direction in the state that a TPC stands for, of unit length (all ones where x is broadcast)."""
        return direction(self._step_weights(tpc_BTK.dtype), tpc_BTK)

    def _step_weights(self, dtype: torch.dtype) -> StepWeights:
        of = self._parameters  # a token of decoding pays for every look through the module
        names = ("state_weight", "tpc_weight", "tpc_bias", "coherence_tpc", "direction")
        return StepWeights(*(None if of.get(name) is None else _as(of[name], dtype) for name in names))  # type: ignore[arg-type]

    def _recur(self, flow: DynamicStateFlow) -> None:
        """Fill in the states after every column, frozen where there is padding."""
        parts, attended_BT, starts_BT = flow.parts, flow.inputs.attended_BT, flow.inputs.document_starts_BT
        weights = self._step_weights(parts.query_BK.dtype)
        flow.guarded = self.config.safeguards is not None and not self.training
        sizes = self._state_sizes(flow.guarded)
        flow.before = {
            name: flow.state[name] if name in flow.state else parts.query_BK.new_zeros(len(parts.query_BK), width)
            for name, width in sizes.items()
        }
        before_BX = torch.cat([*flow.before.values()], -1)
        if attended_BT is None:
            states_BTX = self._sequence(parts, weights, before_BX, starts_BT)
        elif attended_BT.shape[1] == 1:
            states_BTX = self._sequence(parts, weights, before_BX, starts_BT)
            states_BTX = torch.where(attended_BT.unsqueeze(-1), states_BTX, before_BX.unsqueeze(1))
        else:
            packed_BTx = pack_left(torch.cat(parts, -1), attended_BT)
            packed = TokenParts(*packed_BTx.split([part.shape[-1] for part in parts], -1))
            starts_BT = None if starts_BT is None else pack_left(starts_BT, attended_BT)
            states_BTX = unpack(self._sequence(packed, weights, before_BX, starts_BT), attended_BT, before_BX)
        flow.states = dict(zip(sizes, states_BTX.split([*sizes.values()], -1), strict=True))

    def _sequence(self, parts: TokenParts, weights: StepWeights, before_BX: Tensor, starts_BT: Tensor | None) -> Tensor:
        """Return [TPC, s], and under safeguards [baseline, governor], after every token, [B, T, X]."""
        if self.truncation is not None and self.training and parts.query_BK.shape[1] > self.truncation:
            return self._truncated(parts, weights, before_BX, starts_BT, self.truncation)
        first_readings = self.config.continuity == "trajectory" and self.config.update == "directional"
        plain = before_BX.shape[-1] == 2 * self.config.state_size
        if first_readings and plain and parts.query_BK.shape[1] > 1:
            return dynamic_state_recurrence(parts, weights, self.config.retention, before_BX, starts_BT)
        return self._loop(parts, weights, before_BX, starts_BT)

    def _truncated(
        self, parts: TokenParts, weights: StepWeights, before_BX: Tensor, starts_BT: Tensor | None, columns: int
    ) -> Tensor:
        found = []
        for start in range(0, parts.query_BK.shape[1], columns):
            here = slice(start, start + columns)
            stretch = TokenParts(*(part[:, here] for part in parts))
            starts = None if starts_BT is None else starts_BT[:, here]
            run = self._sequence(stretch, weights, before_BX, starts)
            found.append(run)
            before_BX = run[:, -1].detach()
        return torch.cat(found, 1)

    def _loop(self, parts: TokenParts, weights: StepWeights, before_BX: Tensor, starts_BT: Tensor | None) -> Tensor:
        rows = []
        for t in range(parts.query_BK.shape[1]):
            if starts_BT is not None:
                before_BX = before_BX.masked_fill(starts_BT[:, t, None], 0.0)
            token = TokenParts(*(part[:, t] for part in parts))
            before_BX = self._advance(token, weights, before_BX)
            rows.append(before_BX)
        return torch.stack(rows, 1) if len(rows) > 1 else before_BX.unsqueeze(1)

    def _advance(self, token: TokenParts, weights: StepWeights, before_BX: Tensor) -> Tensor:
        size = self.config.state_size
        if before_BX.shape[-1] == 2 * size:
            return torch.cat(step(self.config, token, weights, *before_BX.chunk(2, -1))[:2], -1)
        before = Guarded(*before_BX.split([size, size, size, MEMORY_SIZE], -1))
        return torch.cat(guarded_step(self.config, token, weights, before), -1)

    def close(self, flow: Flow) -> PassResult:
        """Return states, their history and the signals."""
        assert isinstance(flow, DynamicStateFlow)
        if flow.rows:
            return self._close_rows(flow.rows, flow.inputs)
        states = {**flow.states, **flow.turbulent}
        if flow.seen_BT is not None:
            states["position"] = flow.seen_BT
        return PassResult(
            state={name: value[:, -1] for name, value in states.items()},
            history=states if flow.inputs.keep_history else {},
            signals=self._signals(flow) if flow.inputs.collect_signals else {},
        )

    def _close_rows(self, rows: list[RowResult], inputs: PassInputs) -> PassResult:
        history: State = {}
        if inputs.keep_history:
            history = _joined([{name: part.unsqueeze(1) for name, part in row.states.items()} for row in rows])
        signals = _joined([row_signals(row) for row in rows]) if inputs.collect_signals else {}
        return PassResult(state=rows[-1].states, history=history, signals=signals)

    def _signals(self, flow: DynamicStateFlow) -> dict[str, Tensor]:
        whole = {"tpc": flow.states["tpc"], "state": flow.states["s"], "query": flow.parts.query_BK}
        if flow.guarded:
            memory = Memory(*flow.states["governor"].split(SIZES, -1))
            measured = dict(zip(MEASURES, memory.measures.unbind(-1), strict=True))
            return {**measured, **whole, "governor": memory.mode.squeeze(-1), "failures": memory.detected}
        before_BTK = torch.cat([flow.before["tpc"].unsqueeze(1), flow.states["tpc"][:, :-1]], 1)
        if flow.inputs.document_starts_BT is not None:
            before_BTK = before_BTK.masked_fill(flow.inputs.document_starts_BT.unsqueeze(-1), 0.0)
        weights = self._step_weights(before_BTK.dtype)
        signals: Any = signals_of(self.config, flow.parts, weights, flow.states["tpc"], before_BTK)
        return {**{name: signal.squeeze(-1) for name, signal in signals._asdict().items()}, **whole}


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)`` without the call where there is nothing to do: a token of decoding pays for every call."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
