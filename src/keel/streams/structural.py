"""The structural stream of S-Former: a recurrent path beside the host, injected as a gated bias or fused into queries and keys.

    g_t = cell(g_{t-1}, LN(x_t))                          Eq. 2, x_t the token embedding
    alpha_t = sigmoid(W [g_t, LN(h_t)] / tau)             Eqs. 3 and 6, right; tau is the gate temperature of App. B
    h_biased = norm(h_t + alpha_t g_t)                    Eq. 6, left: the block's own norm; the residual stream is untouched
    Q, K from alpha_t g_t + (1 - alpha_t) LN(h_t)         Eq. 4, V from LN(h_t): the block's own norm again
    loss = L_LM - lambda E[alpha (1 - alpha)]             Eq. 8

``reference_states``, ``reference_bias`` and ``reference_fusion`` are the specification: loops written from these formulas.

Shapes: B batch, T tokens, D hidden size (also the state's), G recurrences (1 when shared, else one a layer), S sites, C gate
channels (1 or D).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from keel.errors import KeelError, suggest
from keel.hosts import HostShape
from keel.ops.diagonal_gru import diagonal_gru
from keel.ops.gru import gru, gru_step, token_products
from keel.ops.padding import run_padded
from keel.ops.scan import linear_scan
from keel.streams.base import Flow, PassInputs, PassResult, State, Stream, StreamLoss

_NORM_SITES = {"attention": "attention_norm_input", "mlp": "mlp_norm_input"}
_CHOICES = {
    "inject": ("bias", "fusion"),
    "cell": ("gru", "diagonal", "scan"),
    "share": ("model", "layer"),
    "gate": ("scalar", "channel", "none"),
    "init": ("identity", "paper"),
}


@dataclass(frozen=True, kw_only=True)
class StructuralConfig:
    """Configuration of a structural stream.

    Attributes:
        inject: how the state enters the host; ``bias`` is Eq. 6, ``fusion`` Eqs. 3 and 4. The gate of a fusion reads what the
            projections would have read: LN(x) in a pre-norm host, the raw residual in a post-norm one (OLMo2).
        cell: ``gru`` is Eq. 2. Parallel over time (the paper's future work) are ``diagonal``, a GRU whose channels do not mix in the
            recurrence, and ``scan``, a gated linear recurrence.
        share: ``model`` has one recurrence that all layers read, ``layer`` one a layer (App. A.5).
        gate: ``scalar`` is one alpha a token and site, ``channel`` one a channel, ``none`` is alpha = 1 (the ablation of 4.4.2).
        layers: layers that are written to; None for all.
        norm_sites: which norms' inputs a bias is written to: ``attention``, ``mlp`` or both.
        init: ``identity`` adds a per-channel scale that starts at zero, so attaching changes nothing; ``paper`` has no scale.
        confidence_penalty: lambda of Eq. 8, >= 0; 0 leaves the term out.
        temperature: gate temperature (first, last, steps between them), linear in the training step; App. B has (4, 2, 4000).
        gate_warmup_steps: training steps over which alpha is scaled from 0 to 1; 0 for none.
    """

    inject: Literal["bias", "fusion"] = "bias"
    cell: Literal["gru", "diagonal", "scan"] = "gru"
    share: Literal["model", "layer"] = "model"
    gate: Literal["scalar", "channel", "none"] = "scalar"
    layers: tuple[int, ...] | None = None
    norm_sites: tuple[str, ...] = ("attention", "mlp")
    init: Literal["identity", "paper"] = "identity"
    confidence_penalty: float = 0.0
    temperature: tuple[float, float, int] = (1.0, 1.0, 0)
    gate_warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise KeelError(
                    f"structural stream: {name}={getattr(self, name)!r}; {suggest(str(getattr(self, name)), choices)}"
                )
        unknown = [site for site in self.norm_sites if site not in _NORM_SITES]
        if unknown or not self.norm_sites:
            raise KeelError(
                f"structural stream: norm_sites={self.norm_sites!r}; {suggest(str(unknown[:1]), _NORM_SITES)}"
            )
        if self.inject == "fusion" and tuple(self.norm_sites) != tuple(_NORM_SITES):
            raise KeelError(
                f"structural stream: norm_sites={self.norm_sites!r} with inject='fusion', which writes to queries and keys; leave "
                "norm_sites out"
            )
        if self.gate == "none" and self.confidence_penalty:
            raise KeelError(
                f"structural stream: confidence_penalty={self.confidence_penalty} with gate='none', which has no alpha to keep from "
                "saturating; leave it out"
            )
        if self.confidence_penalty < 0 or self.gate_warmup_steps < 0:
            raise KeelError("structural stream: confidence_penalty and gate_warmup_steps are >= 0")
        if len(self.temperature) != 3 or min(self.temperature[:2]) <= 0 or self.temperature[2] < 0:
            raise KeelError(
                f"structural stream: temperature={self.temperature!r}; give (first > 0, last > 0, steps >= 0)"
            )


class StructuralFlow(Flow):
    """Working memory of one pass: the states, the part of the gate that depends on them, and the gates as they are computed."""

    history_GBTD: Tensor | None = None
    gate_from_state_GBTS: Tensor | None = None
    gate_hidden_SCD: Tensor | None = None
    gate_scale: Tensor | None = None
    token_sites: dict[tuple[str, int], tuple[Tensor, Tensor, Tensor]] | None = None

    def __init__(self, inputs: PassInputs, states_GBTD: Tensor, final_GBD: Tensor, keeps_alphas: bool) -> None:
        self.inputs = inputs
        self.states_GBTD = states_GBTD
        self.final_GBD = final_GBD
        self.keeps_alphas = keeps_alphas
        self.alphas: dict[int, Tensor] = {}

    def sorted_alphas(self) -> list[Tensor]:
        """Return the gates so far in the order of the sites."""
        return [self.alphas[index] for index in sorted(self.alphas)]

    def replay(self) -> StructuralFlow:
        """See ``Flow.replay``."""
        again = copy.copy(self)
        again.alphas = {}
        return again


class StructuralStream(Stream):
    """S-Former's structural stream, injected as a bias (Eqs. 2, 6, 8) or fused into queries and keys (Eqs. 2, 3, 4, 8).

    ``StructuralStream(inject="bias", cell="gru")`` describes it; ``keel.attach`` builds it for a host.

    State while decoding: ``g`` [B, G, D]. Signals: ``gate`` [B, T, S], alpha by site in the order of ``write_sites``
    (the mean over channels where ``gate="channel"``). Losses: ``confidence`` (Eq. 8) when its weight is not zero.
    Reference twins: ``reference_states``, ``reference_bias``, ``reference_fusion``.
    """

    type_name = "structural"
    config_class = StructuralConfig
    config: StructuralConfig
    # What the host reads instead of the states [G, B, T, D], given them and the mask: see ``keel.evaluation.corruption``.
    corrupt: Callable[[Tensor, Tensor | None], Tensor] | None = None

    def build(self, shape: HostShape) -> None:
        """See ``Stream.build``. Raises: KeelError when a chosen layer does not exist."""
        layers = tuple(range(shape.num_layers)) if self.config.layers is None else self.config.layers
        absent = [layer for layer in layers if not 0 <= layer < shape.num_layers]
        if absent or not layers:
            raise KeelError(f"structural stream: layers={layers}, but the host has layers 0 to {shape.num_layers - 1}")
        fusion = self.config.inject == "fusion"
        names = ["attention_qk"] if fusion else [_NORM_SITES[site] for site in self.config.norm_sites]
        pairs = [(name, layer) for layer in layers for name in names]
        self.site_index = {pair: index for index, pair in enumerate(pairs)}
        shared = self.config.share == "model"
        self.group_of = {layer: 0 if shared else index for index, layer in enumerate(layers)}
        groups, sites, width = 1 if shared else len(layers), len(self.site_index), shape.hidden_size
        channels = width if self.config.gate == "channel" else 1
        rows = 2 if self.config.cell == "scan" else 3
        self.width = (width,)
        self.norm = nn.LayerNorm(width)
        self.weight_input = nn.Parameter(torch.empty(groups, rows * width, width))
        self.bias_input = nn.Parameter(torch.empty(groups, rows * width))
        if self.config.cell == "gru":
            self.weight_state = nn.Parameter(torch.empty(groups, rows * width, width))
            self.bias_state = nn.Parameter(torch.empty(groups, rows * width))
        if self.config.cell == "diagonal":
            self.weight_state = nn.Parameter(torch.empty(groups, rows * width))
            self.bias_state = nn.Parameter(torch.empty(groups, width))
        if self.config.gate != "none":
            self.gate_state = nn.Parameter(torch.empty(sites, channels, width))
            self.gate_hidden = nn.Parameter(torch.empty(sites, channels, width))
            self.gate_bias = nn.Parameter(torch.empty(sites, channels))
        if self.config.init == "identity":
            self.scale = nn.Parameter(torch.empty(sites, width))

    def init_weights(self) -> None:
        """See ``Stream.init_weights``: GRU and gate as PyTorch initialises theirs (a diagonal as a matrix of width 1), the scan's time
        scales from 1 to 256 tokens.
        """
        width = self.norm.weight.shape[0]
        init.ones_(self.norm.weight)
        init.zeros_(self.norm.bias)
        for name in ("weight_input", "bias_input", "weight_state", "bias_state"):
            if hasattr(self, name):
                init.uniform_(getattr(self, name), -(width**-0.5), width**-0.5)
        if self.config.cell == "diagonal":
            init.uniform_(self.weight_state, -1.0, 1.0)
        if self.config.cell == "scan":
            # sigmoid(bias) = 1 / time scale: from a channel that only sees the present to one that averages 256 tokens.
            time_scales = torch.logspace(0.5, 8, width, base=2.0)
            rates = -torch.log(time_scales - 1)
            init.copy_(self.bias_input, torch.cat([rates, torch.zeros(width)]).expand_as(self.bias_input))
        if self.config.gate != "none":
            for parameter in (self.gate_state, self.gate_hidden):
                init.uniform_(parameter, -((2 * width) ** -0.5), (2 * width) ** -0.5)
            init.zeros_(self.gate_bias)
        if self.config.init == "identity":
            init.zeros_(self.scale)
        init.zeros_(self.step)

    def write_sites(self) -> list[tuple[str, int]]:
        """See ``Stream.write_sites``."""
        return list(self.site_index)

    def temperature(self) -> Tensor | float:
        """Return the gate temperature at the current training step."""
        first, last, steps = self.config.temperature
        if steps == 0 or first == last:
            return last
        return first + (last - first) * (self.step / steps).clamp(max=1.0)

    def open(self, inputs: PassInputs, state: State) -> StructuralFlow:
        """Run the recurrence over the pass (Eq. 2) and the part of every gate that depends on it alone."""
        # At least float32 from here: the states after every token, which a rollback takes up, are as exact as the last one.
        weight_D, embeddings_BTD = self.norm.weight, inputs.embeddings_BTD
        normed_BTD = torch.layer_norm(_as(embeddings_BTD, weight_D.dtype), weight_D.shape, weight_D, self.norm.bias)
        if normed_BTD.dtype not in (torch.float32, torch.float64):
            normed_BTD = normed_BTD.float()
        previous = state.get("g")
        previous_GBD = None if previous is None else previous.transpose(0, 1)
        states_GBTD, final_GBD = run_padded(
            self._recurrence, normed_BTD, inputs.attended_BT, previous_GBD, inputs.document_starts_BT
        )
        seen_GBTD = states_GBTD if self.corrupt is None else self.corrupt(states_GBTD, inputs.attended_BT)
        # Gates that nobody asks for are not kept: they would hold memory, and stand in the heap between what the host frees.
        keeps_alphas = inputs.collect_signals or self.config.confidence_penalty > 0
        flow = StructuralFlow(inputs, _as(seen_GBTD, embeddings_BTD.dtype), final_GBD, keeps_alphas)
        flow.history_GBTD = states_GBTD if inputs.keep_history else None
        if self.config.gate_warmup_steps:
            flow.gate_scale = (self.step / self.config.gate_warmup_steps).clamp(max=1.0)
        if self.config.gate == "none":
            return flow
        flow.gate_hidden_SCD = self._tempered(self.gate_hidden)
        if self.config.inject == "bias" and self.config.gate == "scalar" and normed_BTD.shape[1] == 1:
            flow.token_sites = self._token_sites(flow)
        elif self.config.gate == "scalar":
            from_state_GBTS = F.linear(flow.states_GBTD, self.gate_state[:, 0], self.gate_bias[:, 0])
            flow.gate_from_state_GBTS = self._tempered(from_state_GBTS)
        return flow

    def _tempered(self, logits: Tensor) -> Tensor:
        temperature = self.temperature()
        return logits if isinstance(temperature, int | float) and temperature == 1 else logits / temperature

    def _token_sites(self, flow: StructuralFlow) -> dict[tuple[str, int], tuple[Tensor, Tensor, Tensor]]:
        """For a pass over one token, as in decoding: each site's gate weight [B, D, 1], the gate's part that depends on the
        state [B, 1, 1], and what is written where the gate is open [B, 1, D]. All sites at once: calls are what a token costs.
        """
        assert flow.gate_hidden_SCD is not None
        groups, batch = flow.states_GBTD.shape[:2]
        states_SBD, sites = flow.states_GBTD.squeeze(2), len(self.site_index)
        if groups > 1:
            states_SBD = states_SBD.repeat_interleave(sites // groups, 0)
        states_SBD = states_SBD.expand(sites, -1, -1)
        from_state_SB1 = self._tempered(torch.baddbmm(self.gate_bias.unsqueeze(1), states_SBD, self.gate_state.mT))
        if self.config.init == "identity":
            states_SBD = states_SBD * self.scale.unsqueeze(1)
        if flow.gate_scale is not None:
            states_SBD = states_SBD * flow.gate_scale
        weight_SBD1 = flow.gate_hidden_SCD.unsqueeze(-1).expand(-1, batch, -1, -1)
        parts = (weight_SBD1, from_state_SB1.unsqueeze(2), states_SBD.unsqueeze(2))
        return dict(zip(self.site_index, zip(*(part.unbind() for part in parts), strict=True), strict=True))

    def write(self, site: str, layer: int, hidden_BTD: Tensor, flow: Flow) -> Tensor:
        """Return ``h + alpha g`` (Eq. 6, before the block's own norm), or ``alpha g + (1 - alpha) h`` (Eq. 4)."""
        assert isinstance(flow, StructuralFlow)
        index = self.site_index[site, layer]
        if flow.token_sites is not None:
            weight_BD1, from_state_B11, bias_BTD = flow.token_sites[site, layer]
            normed_BTD = torch.layer_norm(hidden_BTD, self.width)
            alpha_BTC = torch.baddbmm(from_state_B11, normed_BTD, weight_BD1).sigmoid_()
            if flow.keeps_alphas:
                flow.alphas[index] = alpha_BTC
        else:
            alpha_BTC = self._alpha(index, layer, hidden_BTD, flow)
            if flow.keeps_alphas:
                flow.alphas[index] = alpha_BTC
            if flow.gate_scale is not None:
                alpha_BTC = alpha_BTC * flow.gate_scale
            bias_BTD = flow.states_GBTD[self.group_of[layer]]
            if self.config.inject == "fusion":
                bias_BTD = bias_BTD - hidden_BTD
            if self.config.init == "identity":
                bias_BTD = bias_BTD * self.scale[index]
        return _as(torch.addcmul(hidden_BTD, alpha_BTC, bias_BTD), hidden_BTD.dtype)

    def _alpha(self, index: int, layer: int, hidden_BTD: Tensor, flow: StructuralFlow) -> Tensor:
        """Return the gate of a site (Eq. 3; Eq. 6, right), [B, T, C]."""
        if self.config.gate == "none":
            return hidden_BTD.new_ones(*hidden_BTD.shape[:2], 1)
        assert flow.gate_hidden_SCD is not None
        group = self.group_of[layer]
        if flow.gate_from_state_GBTS is not None:
            from_state_BTC = flow.gate_from_state_GBTS[group, ..., index : index + 1]
        else:
            from_state_BTC = F.linear(flow.states_GBTD[group], self.gate_state[index], self.gate_bias[index])
            from_state_BTC = self._tempered(from_state_BTC)
        if self.config.inject == "bias":
            hidden_BTD = torch.layer_norm(hidden_BTD, hidden_BTD.shape[-1:])
        return torch.sigmoid(F.linear(hidden_BTD, flow.gate_hidden_SCD[index]) + from_state_BTC)

    def close(self, flow: Flow) -> PassResult:
        """Return state, history, the confidence penalty (Eq. 8) and the gates."""
        assert isinstance(flow, StructuralFlow)
        inputs, losses, signals = flow.inputs, {}, {}
        if inputs.collect_signals:
            signals["gate"] = torch.cat([alpha.mean(-1, keepdim=True) for alpha in flow.sorted_alphas()], -1)
        if self.config.confidence_penalty and flow.alphas:
            spreads = [(alpha * (1 - alpha)).float().mean(-1) for alpha in flow.sorted_alphas()]
            spread_BT = torch.stack(spreads).mean(0)
            if inputs.attended_BT is not None:
                spread_BT = spread_BT * inputs.attended_BT
            losses["confidence"] = StreamLoss(token_sum=-spread_BT.sum(), weight=self.config.confidence_penalty)
        return PassResult(
            state={"g": flow.final_GBD.transpose(0, 1)},
            history={} if flow.history_GBTD is None else {"g": flow.history_GBTD.permute(1, 2, 0, 3)},
            losses=losses,
            signals=signals,
        )

    def _recurrence(
        self, inputs_BTD: Tensor, state_GBD: Tensor | None, document_starts_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if inputs_BTD.shape[1] == 1 and state_GBD is not None and document_starts_BT is None:
            is_plain = inputs_BTD.dtype == state_GBD.dtype == self.weight_input.dtype
            if is_plain and not torch.is_autocast_enabled(inputs_BTD.device.type):
                final_GBD = self._token(inputs_BTD, state_GBD)
                return final_GBD.unsqueeze(2), final_GBD
        if self.config.cell == "gru":
            weights = self.weight_input, self.weight_state, self.bias_input, self.bias_state
            return gru(inputs_BTD, *weights, state_GBD, document_starts_BT)
        if self.config.cell == "diagonal":
            projected_GBTR = self._project(inputs_BTD)
            return diagonal_gru(projected_GBTR, self.weight_state, self.bias_state, state_GBD, document_starts_BT)
        rate_GBTD, candidate_GBTD = self._scan_inputs(inputs_BTD)
        decay_GBTD = 1 - rate_GBTD
        if document_starts_BT is not None:
            decay_GBTD = decay_GBTD.masked_fill(document_starts_BT[None, ..., None], 0.0)
        return linear_scan(decay_GBTD, rate_GBTD * candidate_GBTD, state_GBD)

    def _token(self, inputs_B1D: Tensor, state_GBD: Tensor) -> Tensor:
        """Return the state [G, B, D] after one token, as decoding reads it, in few calls."""
        if self.config.cell == "gru":
            weights = self.weight_input, self.weight_state, self.bias_input, self.bias_state
            return gru_step(inputs_B1D, *weights, state_GBD)
        products_GKDB = token_products(inputs_B1D, self.weight_input, self.bias_input, state_GBD.shape[-1])
        if self.config.cell == "diagonal":
            reset_GDB, update_GDB, candidate_GDB = products_GKDB.unbind(1)
            u_G3D1, state_GDB = self.weight_state.unflatten(1, (3, -1)).unsqueeze(-1), state_GBD.mT
            reset_GDB = torch.addcmul(reset_GDB, u_G3D1[:, 0], state_GDB).sigmoid_()
            update_GDB = torch.addcmul(update_GDB, u_G3D1[:, 1], state_GDB).sigmoid_()
            inner_GDB = torch.addcmul(self.bias_state.unsqueeze(-1), u_G3D1[:, 2], state_GDB)
            return torch.lerp(torch.addcmul(candidate_GDB, reset_GDB, inner_GDB).tanh_(), state_GDB, update_GDB).mT
        rate_GDB, candidate_GDB = products_GKDB.unbind(1)
        return torch.lerp(state_GBD.mT, torch.tanh(candidate_GDB), torch.sigmoid(rate_GDB)).mT

    def _project(self, inputs_BTD: Tensor) -> Tensor:
        """Return ``W x + b`` of every recurrence, [G, B, T, R]."""
        weight_RD = self.weight_input.flatten(0, 1)
        projected_BTR = F.linear(_as(inputs_BTD, weight_RD.dtype), weight_RD, self.bias_input.flatten())
        return _as(projected_BTR, inputs_BTD.dtype).unflatten(-1, (len(self.bias_input), -1)).movedim(-2, 0)

    def _scan_inputs(self, inputs_BTD: Tensor) -> tuple[Tensor, Tensor]:
        rate_GBTD, candidate_GBTD = self._project(inputs_BTD).chunk(2, -1)
        return torch.sigmoid(rate_GBTD), torch.tanh(candidate_GBTD)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)`` without the call where there is nothing to do: a token of decoding pays for every call."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def reference_states(
    stream: StructuralStream,
    embeddings_BTD: Tensor,
    attended_BT: Tensor | None = None,
    document_starts_BT: Tensor | None = None,
    state_BGD: Tensor | None = None,
) -> Tensor:
    """The recurrence of Eq. 2 token by token, frozen where there is padding: the oracle of ``StructuralStream.open``.

    Returns: [G, B, T, D].
    """
    batch, length, width = embeddings_BTD.shape
    groups = stream.weight_input.shape[0]
    rows = []
    for group in range(groups):
        g_BD = embeddings_BTD.new_zeros(batch, width) if state_BGD is None else state_BGD[:, group]
        outputs = []
        for t in range(length):
            before_BD = g_BD
            if document_starts_BT is not None:
                before_BD = torch.where(document_starts_BT[:, t, None], torch.zeros_like(g_BD), g_BD)
            after_BD = _reference_step(stream, group, stream.norm(embeddings_BTD[:, t]), before_BD)
            g_BD = after_BD if attended_BT is None else torch.where(attended_BT[:, t, None], after_BD, g_BD)
            outputs.append(g_BD)
        rows.append(torch.stack(outputs, 1))
    return torch.stack(rows)


def _reference_step(stream: StructuralStream, group: int, x_BD: Tensor, g_BD: Tensor) -> Tensor:
    projected = x_BD @ stream.weight_input[group].T + stream.bias_input[group]
    if stream.config.cell == "scan":
        rate, candidate = projected.chunk(2, -1)
        return (1 - torch.sigmoid(rate)) * g_BD + torch.sigmoid(rate) * torch.tanh(candidate)
    reset_x, update_x, new_x = projected.chunk(3, -1)
    if stream.config.cell == "diagonal":
        reset_g, update_g, new_g = (g_BD * diagonal for diagonal in stream.weight_state[group].chunk(3, -1))
        new_g = new_g + stream.bias_state[group]
    else:
        reset_g, update_g, new_g = (g_BD @ stream.weight_state[group].T + stream.bias_state[group]).chunk(3, -1)
    update = torch.sigmoid(update_x + update_g)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_g) * new_g)
    return (1 - update) * new + update * g_BD


def reference_bias(stream: StructuralStream, site: str, layer: int, hidden_BTD: Tensor, states_GBTD: Tensor) -> Tensor:
    """Eq. 6 written out: the oracle of ``StructuralStream.write`` with ``inject="bias"``."""
    mean = hidden_BTD.mean(-1, keepdim=True)
    variance = hidden_BTD.var(-1, keepdim=True, unbiased=False)
    alpha_BTC = _reference_gate(stream, site, layer, (hidden_BTD - mean) / torch.sqrt(variance + 1e-5), states_GBTD)
    scale_D = stream.scale[stream.site_index[site, layer]] if stream.config.init == "identity" else 1.0
    return hidden_BTD + alpha_BTC * states_GBTD[stream.group_of[layer]] * scale_D


def reference_fusion(stream: StructuralStream, layer: int, normed_BTD: Tensor, states_GBTD: Tensor) -> Tensor:
    """Eqs. 3 and 4 written out: the oracle of ``StructuralStream.write`` with ``inject="fusion"``."""
    site = "attention_qk"
    g_BTD = states_GBTD[stream.group_of[layer]]
    alpha_BTC = _reference_gate(stream, site, layer, normed_BTD, states_GBTD)
    if stream.config.init == "identity":
        alpha_BTC = alpha_BTC * stream.scale[stream.site_index[site, layer]]
    return alpha_BTC * g_BTD + (1 - alpha_BTC) * normed_BTD


def _reference_gate(stream: StructuralStream, site: str, layer: int, normed_BTD: Tensor, states_GBTD: Tensor) -> Tensor:
    """sigmoid(W [g, LN(h)] / tau), with the concatenation, [B, T, C]."""
    index = stream.site_index[site, layer]
    alpha_BTC = torch.ones_like(normed_BTD[..., :1])
    if stream.config.gate != "none":
        weight_CE = torch.cat([stream.gate_state[index], stream.gate_hidden[index]], -1)
        both_BTE = torch.cat([states_GBTD[stream.group_of[layer]], normed_BTD], -1)
        alpha_BTC = torch.sigmoid((both_BTE @ weight_CE.T + stream.gate_bias[index]) / stream.temperature())
    if stream.config.gate_warmup_steps:
        alpha_BTC = alpha_BTC * min(1.0, stream.step.item() / stream.config.gate_warmup_steps)
    return alpha_BTC
