"""The margin prior of support tokens: a log-determinant barrier on the embeddings. It reads them and writes nothing.

    a_ts = softmax_s(x_t' M x_s), s < t          z_t = x_t - sum_s a_ts x_s          M = U V', learned
    R = mean_t( -log|det(I - M Sigma_t)| + |z_t|^2 / (2 sigma^2) )                   Eq. 24; the second term on request
    loss = L_LM + lambda R                                                          Eq. 27

A token's barrier ``-log|det|`` is large where the attention that generates its embedding is nearly degenerate; the tokens with the
largest are the support tokens. Only this stage has such a term (section 6): layers whose attention reads the layer before have I.

Shapes: B batch, T tokens of this pass, S tokens so far, D width, R rank.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from keel.errors import KeelError, suggest
from keel.hosts import HostShape
from keel.ops.logdet import (
    Degeneracy,
    LogDeterminants,
    attention_blocks,
    attention_logdet,
    attention_weights,
    degeneracy,
    visible_past,
)
from keel.ops.logdet_estimate import estimate_logdet
from keel.ops.support import running_support
from keel.streams.base import Flow, PassInputs, PassResult, State, Stream, StreamLoss

_COUPLINGS = ("free", "positive", "negative")
ESTIMATE_STEPS = 10  # products a probe: the quadrature's error is then below that of any affordable number of probes


@dataclass(frozen=True, kw_only=True)
class MarginConfig:
    """Configuration of a margin prior.

    Attributes:
        rank: of the coupling M; None for a full D x D matrix, as in the paper.
        coupling: ``free`` leaves M any matrix, as in the paper: where it is negative the term has no barrier and rewards dispersion
            without bound. ``positive`` is M = U U', the regime of the margin; ``negative`` is M = -U U'.
        include_self: a token attends to itself too (App. A); ``False`` is the strict attention of the main text.
        weight: lambda, >= 0, or points (step, lambda) between which it is linear: ``((0, 0.0), (500, 0.05))`` warms up,
            ``((0, 0.02), (1000, 0.02), (1200, 0.05))`` walks a path of weights.
        noise: sigma of the squared error |z|^2 / (2 sigma^2), > 0; None leaves that term out, as in the paper's experiments.
        probes: 0 for exact log-determinants; else the number of probes of ``estimate_logdet``, at least 2, for strict attention.
    """

    rank: int | None = 64
    coupling: Literal["free", "positive", "negative"] = "free"
    include_self: bool = False
    weight: float | tuple[tuple[int, float], ...] = 0.05
    noise: float | None = None
    probes: int = 0

    def __post_init__(self) -> None:
        if self.coupling not in _COUPLINGS:
            raise KeelError(f"margin prior: coupling={self.coupling!r}; {suggest(str(self.coupling), _COUPLINGS)}")
        if self.rank is not None and self.rank < 1:
            raise KeelError(f"margin prior: rank={self.rank}; give at least 1, or null for full rank")
        if self.noise is not None and self.noise <= 0:
            raise KeelError(
                f"margin prior: noise={self.noise}; give a standard deviation > 0, or null for no squared error"
            )
        if self.probes == 1 or self.probes < 0 or (self.probes and self.include_self):
            raise KeelError(
                f"margin prior: probes={self.probes}, include_self={self.include_self}; give 0 for exact log-determinants, or at least "
                "2 with include_self=False"
            )
        if not _is_schedule(self.weight):
            raise KeelError(
                f"margin prior: weight={self.weight!r}; give a number >= 0 or points (step, weight) of rising steps"
            )

    def points(self) -> list[tuple[int, float]]:
        """Return the schedule of the weight as points (step, weight)."""
        return [(0, self.weight)] if isinstance(self.weight, int | float) else [(s, w) for s, w in self.weight]


def _is_schedule(given: object) -> bool:
    """Whether ``given`` is a weight, or points (step, weight) of rising steps."""

    def is_weight(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf

    if not isinstance(given, list | tuple):
        return is_weight(given)
    pairs = [point for point in given if isinstance(point, list | tuple) and len(point) == 2]
    steps = [step for step, _ in pairs]
    return (
        bool(pairs)
        and len(pairs) == len(given)
        and all(is_weight(step) and is_weight(weight) for step, weight in pairs)
        and steps == sorted(set(steps))
    )


class PriorTerms(NamedTuple):
    """What the prior says of each token [B, T]: its log-determinants, and ``|z_t|^2 / (2 sigma^2)`` where it has a squared error."""

    logdets: LogDeterminants
    residual_BT: Tensor | None

    def penalty(self) -> Tensor:
        """Return the token's part of R (Eq. 24) [B, T]: the barrier, and the squared error where there is one."""
        barrier_BT = self.logdets.barrier()
        return barrier_BT if self.residual_BT is None else barrier_BT + self.residual_BT


class MarginFlow(Flow):
    """What a pass computed; None and empty where nobody asked for it."""

    terms: PriorTerms | None = None
    rows: State
    signals: dict[str, Tensor]

    def __init__(self, inputs: PassInputs) -> None:
        self.inputs = inputs
        self.rows, self.signals = {}, {}


class MarginPrior(Stream):
    """Support tokens' embedding prior (Eqs. 24, 27): a named loss and per-token signals, on any host.

    It computes where gradients are on (training) or signals are asked for, and nothing else: generation costs what the host costs.

    Losses: ``barrier``, R; training also logs the share of ``crossed`` tokens, beyond the boundary. Signals, all [B, T]: ``barrier``,
    ``-log|det|`` and beyond the boundary what ``LogDeterminants.barrier`` says, 0 for a token without a past and for padding;
    ``margin``, ``det``, negative beyond the boundary (Eq. 9 in one dimension); ``residual`` with a squared error; and of the tokens
    so far (section 7.4) ``support_weight``, the token's own, ``top5_share`` and ``effective_size``. While decoding with signals
    the cache keeps the projected embeddings and barriers of all tokens.
    Reference twin: ``keel.ops.logdet.reference_logdet``.
    """

    type_name = "margin"
    config_class = MarginConfig
    config: MarginConfig

    def build(self, shape: HostShape) -> None:
        """See ``Stream.build``. Raises: KeelError for a rank beyond the width."""
        width = shape.hidden_size
        rank = width if self.config.rank is None else self.config.rank
        if rank > width:
            raise KeelError(f"margin prior: rank={rank}, but the host is {width} wide; give at most that, or null")
        self.left = nn.Parameter(torch.empty(rank, width))
        if self.config.coupling == "free" and self.config.rank is not None:
            self.right = nn.Parameter(torch.empty(rank, width))

    def init_weights(self) -> None:
        """See ``Stream.init_weights``: normal with variance 1/D, so that logits have the size of the embeddings' squares."""
        for parameter in self.parameters():
            init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        init.zeros_(self.step)

    def write_sites(self) -> list[tuple[str, int]]:
        """See ``Stream.write_sites``: none."""
        return []

    def weight(self) -> Tensor:
        """Return lambda at the current training step."""
        points = self.config.points()
        weight = torch.full_like(self.step, points[0][1], dtype=torch.float32)
        for (first, low), (last, high) in itertools.pairwise(points):
            share = ((self.step - first) / (last - first)).clamp(0, 1)
            weight = torch.where(self.step >= first, low + (high - low) * share, weight)
        return weight

    def project(self, embeddings_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries ``U' x`` and keys ``V' x`` [B, T, R]; at full and free rank ``M' x`` and x itself."""
        embeddings_BTD = embeddings_BTD.to(torch.promote_types(embeddings_BTD.dtype, torch.float32))
        queries_BTR = embeddings_BTD @ self.left.to(embeddings_BTD.dtype).T
        if self.config.coupling == "free":
            keys_BTR = (
                embeddings_BTD if self.config.rank is None else embeddings_BTD @ self.right.to(embeddings_BTD.dtype).T
            )
            return queries_BTR, keys_BTR
        return (queries_BTR if self.config.coupling == "positive" else -queries_BTR), queries_BTR

    def open(self, inputs: PassInputs, state: State) -> MarginFlow:
        """Compute what training or the asker of signals needs.

        Raises: KeelError for a cache whose first tokens were read without signals: their embeddings are not in it.
        """
        flow = MarginFlow(inputs)
        trains = torch.is_grad_enabled() and max(weight for _, weight in self.config.points()) > 0
        if not trains and not inputs.collect_signals:
            return flow
        if inputs.num_past and "keys" not in state and inputs.collect_signals:
            raise KeelError(
                f"margin prior: signals are asked for after {inputs.num_past} tokens whose embeddings were not kept; give "
                "collect_signals=True from the first token of the cache on"
            )
        device = inputs.embeddings_BTD.device.type
        with torch.autocast(device, enabled=False):
            self._compute(flow, inputs, state)
        return flow

    def _compute(self, flow: MarginFlow, inputs: PassInputs, state: State) -> None:
        batch, length, width = inputs.embeddings_BTD.shape
        device = inputs.embeddings_BTD.device
        queries_BTR, keys_BTR = self.project(inputs.embeddings_BTD)
        attended_BT = inputs.attended_BT
        documents_BT = None if inputs.document_starts_BT is None else inputs.document_starts_BT.long().cumsum(1)
        flow.rows = {
            "queries": queries_BTR,
            "keys": keys_BTR,
            "attended": torch.ones(batch, length, dtype=torch.bool, device=device)
            if attended_BT is None
            else attended_BT,
            "documents": torch.zeros(batch, length, dtype=torch.long, device=device)
            if documents_BT is None
            else documents_BT,
        }
        if self.config.noise is not None:
            flow.rows["embeddings"] = inputs.embeddings_BTD.to(queries_BTR.dtype)
        everything = flow.rows
        if "keys" in state:
            flow.rows["documents"] = flow.rows["documents"] + state["documents"][:, -1:]
            everything = {key: torch.cat([state[key], new], 1) for key, new in flow.rows.items()}
            attended_BT, documents_BT = everything["attended"], everything["documents"]
        queries_BSR, keys_BSR = everything["queries"], everything["keys"]
        past = (length, keys_BSR.shape[1])
        visible = visible_past(*past, self.config.include_self, attended_BT, documents_BT, device)
        flow.terms = self._terms(queries_BSR, keys_BSR, visible, width, everything.get("embeddings"))
        if inputs.collect_signals:
            barrier_BT = flow.terms.logdets.barrier().detach()
            barriers_BS = torch.cat([state["barrier"], barrier_BT], 1) if "barrier" in state else barrier_BT
            flow.rows["barrier"] = barrier_BT
            support = running_support(barriers_BS, visible_past(*past, True, attended_BT, documents_BT, device))
            flow.signals = {
                "support_weight": support.weight_BT,
                "top5_share": support.top_share_BT,
                "effective_size": support.effective_size_BT,
            }

    def _terms(
        self, queries_BSR: Tensor, keys_BSR: Tensor, visible_BTS: Tensor, width: int, embeddings_BSD: Tensor | None
    ) -> PriorTerms:
        """Return the terms of the last T of S tokens; ``embeddings_BSD`` is read for the squared error alone."""
        if self.config.probes and torch.is_grad_enabled():
            estimate = estimate_logdet(
                queries_BSR, keys_BSR, visible_BTS, probes=self.config.probes, steps=ESTIMATE_STEPS
            )
            logdets = LogDeterminants(estimate.logabs_BT, torch.ones_like(estimate.logabs_BT))
        else:
            logdets = attention_logdet(queries_BSR, keys_BSR, visible_BTS, width if self.config.include_self else None)
        if self.config.noise is None:
            return PriorTerms(logdets, None)
        assert embeddings_BSD is not None
        length = visible_BTS.shape[1]
        weights_BTS = attention_weights(queries_BSR[:, -length:], keys_BSR, visible_BTS)
        residual_BTD = embeddings_BSD[:, -length:] - weights_BTS @ embeddings_BSD
        return PriorTerms(logdets, residual_BTD.square().sum(-1) / (2 * self.config.noise**2))

    def terms(self, embeddings_BTD: Tensor) -> PriorTerms:
        """Return what the prior says of the embeddings of whole rows without padding, outside of a model's pass."""
        queries_BTR, keys_BTR = self.project(embeddings_BTD)
        length, width = embeddings_BTD.shape[1:]
        visible = visible_past(length, length, self.config.include_self, device=embeddings_BTD.device)
        return self._terms(queries_BTR, keys_BTR, visible, width, embeddings_BTD.to(queries_BTR.dtype))

    def write(self, site: str, layer: int, hidden_BTD: Tensor, flow: Flow) -> Tensor:
        """Never called: the prior writes nowhere."""
        raise AssertionError("the margin prior writes nowhere")

    def close(self, flow: Flow) -> PassResult:
        """Return the loss and, where asked for, signals and what later tokens need of these."""
        assert isinstance(flow, MarginFlow)
        if flow.terms is None:
            return PassResult()
        inputs, losses, counts, signals = flow.inputs, {}, {}, flow.signals
        logabs_BT, sign_BT = flow.terms.logdets
        if torch.is_grad_enabled():
            penalty_BT, crossed_BT = flow.terms.penalty(), sign_BT < 0
            if inputs.attended_BT is not None:
                penalty_BT, crossed_BT = penalty_BT * inputs.attended_BT, crossed_BT & inputs.attended_BT
            losses["barrier"] = StreamLoss(token_sum=penalty_BT.sum(), weight=self.weight())
            counts["crossed"] = crossed_BT.sum().to(penalty_BT.dtype)
        if inputs.collect_signals:
            signals["barrier"] = flow.terms.logdets.barrier()
            signals["margin"] = sign_BT * logabs_BT.clamp(max=math.log(torch.finfo(torch.float32).max)).exp()
            if flow.terms.residual_BT is not None:
                signals["residual"] = flow.terms.residual_BT
        return PassResult(
            losses=losses, counts=counts, signals=signals, rows=flow.rows if inputs.collect_signals else {}
        )

    @torch.no_grad()
    def degeneracy(self, embeddings_BTD: Tensor, attended_BT: Tensor | None = None) -> Degeneracy:
        """Return every token's distance to degeneracy (Eq. 25, Lemma B.4) from the embeddings of whole rows, strict attention.

        The eigenvalues of a matrix a token: a look at a text, not a part of training.

        Raises: KeelError with ``include_self``, whose block is another one (App. A) and has no such lemma.
        """
        if self.config.include_self:
            raise KeelError(
                "margin prior: degeneracy is of strict attention, and this prior has include_self=True; its margin is in the signals"
            )
        queries_BTR, keys_BTR = self.project(embeddings_BTD)
        length = embeddings_BTD.shape[1]
        visible = visible_past(length, length, False, attended_BT, device=embeddings_BTD.device)
        return degeneracy(attention_blocks(queries_BTR, keys_BTR, visible), embeddings_BTD.shape[-1])
