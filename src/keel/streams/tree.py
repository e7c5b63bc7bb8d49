"""The tree stream of GTCA: tokens read the constituents of a parse by gated cross-attention beside the host's attention.

    c_j = LN(W_height mean(x_left … x_right))             Eqs. 1 and 2, x the token embeddings
    layer l reads the chunks of height min(l, D)          Eq. 3 and section 3.2, D the tree's own greatest height
    O = softmax(Q K^T / sqrt(d)) V                        Eqs. 4 and 5: Q from what the block's attention reads, K and V from c
    Delta = W_o [sigmoid(W_g h) * O]                      Eqs. 6 and 7, one gate a head
    attention output += lambda * mask_t * Delta_t         Eq. 8; at a token that sees no chunk, Delta is zero

Which token sees which chunk is in the chunks (``keel.trees``): from their last token on, or under strict causality from the
next. ``reference_memory`` and ``reference_read`` are the specification: loops over nodes and over tokens.

Shapes: B batch, T tokens of this pass, S tokens so far, D hidden size, H shelves of chunks of one height, M chunks of a shelf,
L layers of the host, R layers that read, P chunks that a layer reads, Q query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from keel.errors import KeelError, ShapeError, suggest
from keel.hosts import HostShape
from keel.ops.attention import attention, better_by_products
from keel.ops.padding import take_columns
from keel.ops.spans import span_means
from keel.streams.base import Flow, PassInputs, PassResult, State, Stream
from keel.trees.chunks import collate
from keel.trees.lookup import Lookup, look_up, open_lookup

_CHOICES = {"tree_scope": ("sentence", "prefix"), "gate": ("head", "none"), "init": ("identity", "paper")}


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """Configuration of a tree stream.

    Attributes:
        tree_scope: ``sentence`` is the paper's, whose trees have read the words to come; ``prefix`` is strictly causal. The trees
            are made accordingly (``keel.trees.sentence_chunks``, ``prefix_chunks``), and those of the other scope are refused.
        lookup: name of what finds trees by token ids where a pass is given none (``keel.trees.lookup``); None for nothing.
        coefficient: lambda, >= 0; 0 is the bare host, bit for bit. The paper has 0.15.
        start_step, warmup_steps: lambda is 0 before the first and rises linearly from there over the second (section 3.4).
        gate: ``head`` is Eq. 6, ``none`` the ablation of Table 4.
        layers: layers that read chunks; None for all.
        init: ``identity`` starts the output projection at zero, so attaching changes nothing; ``paper`` does not.
    """

    tree_scope: Literal["sentence", "prefix"] = "sentence"
    lookup: str | None = None
    coefficient: float = 0.15
    start_step: int = 0
    warmup_steps: int = 0
    gate: Literal["head", "none"] = "head"
    layers: tuple[int, ...] | None = None
    init: Literal["identity", "paper"] = "identity"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise KeelError(
                    f"tree stream: {name}={getattr(self, name)!r}; {suggest(str(getattr(self, name)), choices)}"
                )
        for name in ("coefficient", "start_step", "warmup_steps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise KeelError(f"tree stream: {name}={getattr(self, name)}; give a number of at least 0")


@dataclass(frozen=True, kw_only=True)
class ChunkMemory:
    """What the layers read in one pass: keys and values [B, R, P, G, K], and who sees them, ``first`` and ``last`` [B, R, P]."""

    keys_BRPGK: Tensor
    values_BRPGK: Tensor
    first_BRP: Tensor
    last_BRP: Tensor


class LayerMemory(NamedTuple):
    """One layer's weights and its part of the chunk memory, without the places behind its last chunk; no gate where there is none."""

    query_ND: Tensor
    output_DN: Tensor
    gate_QD: Tensor | None
    keys_BPGK: Tensor
    values_BPGK: Tensor
    first_B1P: Tensor
    last_B1P: Tensor


class TreeFlow(Flow):
    """Working memory of one pass; nothing is read where ``memory`` is None."""

    memory: ChunkMemory | None = None
    layers: list[LayerMemory]
    index_BT: Tensor
    document_BT: Tensor | None = None

    def __init__(self, inputs: PassInputs) -> None:
        self.inputs = inputs
        self.rows: State = {}
        self.hidden: dict[int, Tensor] = {}
        self.gates: dict[int, Tensor] = {}

    def replay(self) -> TreeFlow:
        """See ``Flow.replay``."""
        again = copy.copy(self)
        again.hidden, again.gates = {}, {}
        return again


class TreeStream(Stream):
    """GTCA's gated tree cross-attention (section 3).

    Trees come with the pass (``model(ids, trees=keel.trees.collate(...))``) or are found by the token ids so far (``lookup``); a row
    that never had any is the bare host's. Where a pass has none, as in generation after the prompt, it reads the chunk memory in
    the cache. Heads are grouped as the host's.

    State while decoding: per token ``embeddings``, ``marks`` and, with a lookup, ``ids``; the chunk memory of the latest trees.
    Signals: ``gate`` [B, T, R], the mean over heads. Reference twins: ``reference_memory``, ``reference_read``.
    """

    type_name = "tree"
    config_class = TreeConfig
    config: TreeConfig
    _lookup: Lookup | None = None

    def build(self, shape: HostShape) -> None:
        """See ``Stream.build``. Raises: KeelError when a chosen layer does not exist, or is chosen twice."""
        layers = tuple(range(shape.num_layers)) if self.config.layers is None else self.config.layers
        absent = [layer for layer in layers if not 0 <= layer < shape.num_layers]
        if absent or not layers or len(set(layers)) < len(layers):
            raise KeelError(
                f"tree stream: layers={layers}; give layers of the host, 0 to {shape.num_layers - 1}, each once, or leave layers out"
            )
        self.layer_index = {layer: index for index, layer in enumerate(layers)}
        self.num_layers, self.num_heights = shape.num_layers, max(layers) + 1
        self.heads, self.groups, width = shape.num_heads, shape.num_key_value_heads, shape.hidden_size
        self.head_size = shape.head_size or width // shape.num_heads
        reading, queries, keys = len(layers), self.heads * self.head_size, self.groups * self.head_size
        self.weight_height = nn.Parameter(torch.empty(self.num_heights, width, width))
        self.norm = nn.LayerNorm(width)
        self.weight_query = nn.Parameter(torch.empty(reading, queries, width))
        self.weight_key = nn.Parameter(torch.empty(reading, keys, width))
        self.weight_value = nn.Parameter(torch.empty(reading, keys, width))
        self.weight_output = nn.Parameter(torch.empty(reading, width, queries))
        if self.config.gate == "head":
            self.weight_gate = nn.Parameter(torch.empty(reading, self.heads, width))

    def init_weights(self) -> None:
        """See ``Stream.init_weights``: uniform as PyTorch's linear maps; with ``init="identity"`` the output projection is zero."""
        for name, parameter in self.named_parameters(recurse=False):
            if name == "weight_output" and self.config.init == "identity":
                init.zeros_(parameter)
            else:
                init.uniform_(parameter, -(parameter.shape[-1] ** -0.5), parameter.shape[-1] ** -0.5)
        init.ones_(self.norm.weight)
        init.zeros_(self.norm.bias)
        init.zeros_(self.step)

    def write_sites(self) -> list[tuple[str, int]]:
        """See ``Stream.write_sites``. At ``attention_input`` it only reads."""
        return [(site, layer) for layer in self.layer_index for site in ("attention_input", "attention_output")]

    def coefficient(self) -> Tensor | float:
        """Return lambda at the current training step."""
        if not (self.config.start_step or self.config.warmup_steps):
            return self.config.coefficient
        since, ramp = self.step - self.config.start_step, self.config.warmup_steps
        return self.config.coefficient * ((since / ramp).clamp(0.0, 1.0) if ramp else (since >= 0).float())

    # -- a pass -----------------------------------------------------------------------------------------------------------

    def open(self, inputs: PassInputs, state: State) -> TreeFlow:
        """Build the chunk memory of the pass (Eqs. 1 to 3), or take up the one in the cache.

        Raises: KeelError for trees of another scope, trees after a past that was read without any, or a text that a cache of
        trees does not have; ShapeError for trees of another batch or host.
        """
        flow = TreeFlow(inputs)
        has_trees = inputs.trees is not None or self.config.lookup is not None
        if not (has_trees or "embeddings" in state):
            return flow
        if inputs.num_past and "embeddings" not in state:
            raise KeelError(
                f"trees were given after {inputs.num_past} tokens that were read without any, and their spans may begin among those; "
                "give the trees from the first pass on, or start from an empty cache"
            )
        flow.rows = self._rows(inputs)
        rows = {key: torch.cat([state[key], new], 1) if key in state else new for key, new in flow.rows.items()}
        attended_BS = rows["marks"] > 0
        length = inputs.embeddings_BTD.shape[1]
        index_BS = attended_BS.long().cumsum(1) - 1
        flow.index_BT = index_BS[:, -length:]
        begun_BS = None
        if inputs.document_starts_BT is not None or inputs.num_past:
            begun_BS = torch.where(rows["marks"] == 2, index_BS, 0).cummax(1).values
            flow.document_BT = begun_BS[:, -length:]
        trees = inputs.trees
        goes_on: list[bool] = []
        if trees is None and has_trees:
            trees, goes_on = self._found(rows, length)
        if trees is not None:
            self._check(trees, inputs)
            flow.memory = self._memory(trees, rows["embeddings"], attended_BS, begun_BS)
        if (trees is None or any(goes_on)) and inputs.num_past and _MEMORY[0] in state:
            kept = _kept(state, index_BS[:, -length - 1] + 1)
            flow.memory = kept if flow.memory is None else _row_by_row(goes_on, kept, flow.memory)
        if flow.memory is not None:
            flow.layers = self._layers(flow.memory)
        return flow

    def _rows(self, inputs: PassInputs) -> State:
        """Return what is kept of this pass's tokens: the marks are 0 at padding, 2 where a document begins, else 1."""
        embeddings_BTD = inputs.embeddings_BTD
        if inputs.attended_BT is None:
            marks_BT = torch.ones(embeddings_BTD.shape[:2], dtype=torch.int8, device=embeddings_BTD.device)
        else:
            marks_BT = inputs.attended_BT.to(torch.int8)
        if inputs.document_starts_BT is not None:
            marks_BT = marks_BT * (1 + inputs.document_starts_BT.to(torch.int8))
        rows = {"embeddings": embeddings_BTD, "marks": marks_BT}
        if self.config.lookup is not None:
            if inputs.input_ids_BT is None:
                raise KeelError("the tree stream finds its trees by token ids, got embeddings alone; give trees=")
            rows["ids"] = inputs.input_ids_BT
        return rows

    def _found(self, rows: State, length: int) -> tuple[dict[str, Tensor] | None, list[bool]]:
        """Return the trees of the rows, None where no text is known, and which rows go on behind one: see ``look_up``."""
        if torch.compiler.is_compiling():
            raise KeelError("trees cannot be looked up inside a compiled model; give trees=")
        assert self.config.lookup is not None
        if self._lookup is None:
            self._lookup = open_lookup(self.config.lookup, self.config.tree_scope)
        ids, marks = rows["ids"], rows["marks"]
        found, goes_on = look_up(self._lookup, ids.tolist(), marks.tolist(), length, self.config.tree_scope)
        if not any(map(len, found)):
            return None, goes_on
        return {name: tensor.to(ids.device) for name, tensor in collate(found, self.num_layers).items()}, goes_on

    def _check(self, trees: Mapping[str, Tensor], inputs: PassInputs) -> None:
        given = "prefix" if "causal" in trees else "sentence"
        if given != self.config.tree_scope:
            raise KeelError(
                f"the trees were made for tree_scope={given!r}, the stream has {self.config.tree_scope!r}; make them with "
                f"keel.trees.{self.config.tree_scope}_chunks"
            )
        batch = inputs.embeddings_BTD.shape[0]
        for name, expected in (("left", [batch]), ("height", [batch]), ("chunk", [batch, self.num_layers])):
            if name not in trees:
                raise KeelError(f"trees have {', '.join(trees)} and no {name!r}; make them with keel.trees.collate")
            found = list(trees[name].shape)
            if found[: len(expected)] != expected:
                raise ShapeError(
                    f"trees[{name!r}] is {found}; expected {[*expected, '...']}: rows of the batch, layers of the host"
                )

    def _memory(
        self, trees: Mapping[str, Tensor], embeddings_BSD: Tensor, attended_BS: Tensor, begun_BS: Tensor | None
    ) -> ChunkMemory:
        """Return keys and values of what every layer reads; ``begun_BS``: the token that each one's document began with."""
        order_BS = torch.argsort(attended_BS.logical_not().to(torch.uint8), dim=1, stable=True)
        packed_BSD = take_columns(embeddings_BSD, order_BS)
        chunks_BHMD = self.chunk_memory(packed_BSD, trees["left"], trees["right"], trees["height"])
        layers, (batch, _, size, _) = list(self.layer_index), chunks_BHMD.shape
        chunk_BRP, first_BRP, last_BRP = (trees[name][:, layers] for name in ("chunk", "first", "last"))
        rows_B11 = torch.arange(batch, device=chunk_BRP.device)[:, None, None] * size
        places_BRP = chunk_BRP // size * (batch * size) + rows_B11 + chunk_BRP % size
        read_ND = chunks_BHMD.transpose(0, 1).flatten(0, 2).index_select(0, places_BRP.flatten())
        read_BRPD = read_ND.unflatten(0, chunk_BRP.shape)
        if begun_BS is not None:  # a chunk over a border would tell a document of the one before
            left_BRP = trees["left"].flatten(1).gather(1, chunk_BRP.flatten(1)).view_as(chunk_BRP)
            seen_BN = first_BRP.flatten(1).clamp(max=begun_BS.shape[1] - 1)
            begun_BRP = begun_BS.gather(1, order_BS).gather(1, seen_BN).view_as(chunk_BRP)
            last_BRP = torch.where(left_BRP < begun_BRP, -1, last_BRP)
        filled = [_filled(first_BRP[:, index], last_BRP[:, index]) for index in range(len(layers))]
        keys, values = (
            _mapped(read_BRPD, weight, filled).unflatten(-1, (self.groups, self.head_size))
            for weight in (self.weight_key, self.weight_value)
        )
        return ChunkMemory(keys_BRPGK=keys, values_BRPGK=values, first_BRP=first_BRP, last_BRP=last_BRP)

    def _layers(self, memory: ChunkMemory) -> list[LayerMemory]:
        """Part what the layers read with and of, all layers at once: a layer taken alone costs a gradient of the size of all."""
        gates = self.weight_gate.unbind() if self.config.gate == "head" else [None] * len(self.layer_index)
        parts = (getattr(memory, name).unbind(1) for name in _MEMORY)
        layers = []
        for query, output, gate, keys, values, first, last in zip(
            self.weight_query.unbind(), self.weight_output.unbind(), gates, *parts, strict=True
        ):
            taken = slice(_filled(first, last))
            seen = (first[:, None, taken], last[:, None, taken])
            layers.append(LayerMemory(query, output, gate, keys[:, taken], values[:, taken], *seen))
        return layers

    def chunk_memory(self, packed_BSD: Tensor, left_BHM: Tensor, right_BHM: Tensor, height_BH: Tensor) -> Tensor:
        """Return the chunks of every height (Eqs. 1 and 2) by prefix sums over the embeddings.

        Args:
            packed_BSD: token embeddings without padding between them.
            left_BHM, right_BHM: first and last token of each span. One that ends beyond the tokens so far is seen by none of them.
            height_BH: of each shelf, the same in every row. What is higher than all layers that read is read by none.
        Returns: [B, H, M, D] in the dtype of the stream's weights; what stands in a place that no chunk takes means nothing.
            Reference twin: ``reference_memory``.
        """
        # Shelves first, so that those of a height lie together for the product, and are not copied.
        left_N, right_N = (tensor.transpose(0, 1).flatten() for tensor in (left_BHM, right_BHM))
        batch, shelves, size = left_BHM.shape
        row_N = torch.arange(batch, device=left_BHM.device).view(1, -1, 1).expand(shelves, -1, size).flatten()
        height_H, dtype = height_BH[0].clamp(max=self.num_heights - 1), self.weight_height.dtype
        if _may_look(left_N):
            taken_K = (right_N >= left_N).nonzero().flatten()
            means_KD = span_means(packed_BSD, row_N[taken_K], left_N[taken_K], right_N[taken_K]).to(dtype)
            counts = torch.bincount(height_H[taken_K // (batch * size)], minlength=self.num_heights).tolist()
            parts = zip(means_KD.split(counts), self.weight_height, strict=True)
            normed_KD = self.norm(torch.cat([F.linear(means, weight) for means, weight in parts])).to(dtype)
            chunks_ND = normed_KD.new_zeros(len(left_N), normed_KD.shape[1]).index_copy(0, taken_K, normed_KD)
        else:
            means_HND = span_means(packed_BSD, row_N, left_N, right_N).to(dtype).unflatten(0, (shelves, -1))
            chunks_ND = self.norm(torch.bmm(means_HND, self.weight_height.mT[height_H])).to(dtype).flatten(0, 1)
        return chunks_ND.unflatten(0, (shelves, batch, size)).transpose(0, 1)

    def write(self, site: str, layer: int, hidden_BTD: Tensor, flow: Flow) -> Tensor:
        """Keep what the attention reads; add lambda mask_t Delta_t to what it gives (Eqs. 4 to 8)."""
        assert isinstance(flow, TreeFlow)
        coefficient = self.coefficient()
        if flow.memory is None or (isinstance(coefficient, float | int) and coefficient == 0):
            return hidden_BTD
        if site == "attention_input":
            flow.hidden[layer] = hidden_BTD
            return hidden_BTD
        return (hidden_BTD + self._read(layer, flow.hidden.pop(layer), flow, coefficient)).to(hidden_BTD.dtype)

    def _read(self, layer: int, hidden_BTD: Tensor, flow: TreeFlow, coefficient: Tensor | float) -> Tensor:
        """Return lambda mask_t Delta_t (Eqs. 4 to 8), [B, T, D].

        What a head gives is multiplied once, by gate, lambda and mask together, and by zero where nothing is visible: the output
        projection is linear, and a number a head costs nothing beside a pass over all channels.
        """
        index = self.layer_index[layer]
        memory, position_BT1 = flow.layers[index], flow.index_BT.unsqueeze(-1)
        visible_BTP = (memory.first_B1P <= position_BT1) & (position_BT1 <= memory.last_B1P)
        if flow.document_BT is not None:
            visible_BTP = visible_BTP & (memory.first_B1P >= flow.document_BT.unsqueeze(-1))
        some_BT1 = visible_BTP.any(-1, keepdim=True)
        queries_BQTK = _heads(F.linear(hidden_BTD, memory.query_ND), self.heads)
        keys_BGPK = memory.keys_BPGK.transpose(1, 2).to(queries_BQTK.dtype)
        values_BGPK = memory.values_BPGK.transpose(1, 2).to(queries_BQTK.dtype)
        # Where nothing is visible all is, and the outcome is thrown away: a row without any key would be no number.
        mixed_BQTK = _attend(queries_BQTK, keys_BGPK, values_BGPK, (visible_BTP | ~some_BT1).unsqueeze(1))
        written_BT1 = some_BT1 if flow.inputs.updated_BT is None else some_BT1 & flow.inputs.updated_BT.unsqueeze(-1)
        share_BTQ = written_BT1 * coefficient
        if memory.gate_QD is not None:
            gate_BTQ = torch.sigmoid(F.linear(hidden_BTD, memory.gate_QD))
            if flow.inputs.collect_signals:
                flow.gates[index] = gate_BTQ.mean(-1)
            share_BTQ = share_BTQ * gate_BTQ
        given_BTQK = mixed_BQTK.transpose(1, 2) * share_BTQ.to(mixed_BQTK.dtype).unsqueeze(-1)
        return F.linear(given_BTQK.flatten(2), memory.output_DN)

    def close(self, flow: Flow) -> PassResult:
        """Return the tokens' rows, the chunk memory of trees that were given, and the gates."""
        assert isinstance(flow, TreeFlow)
        memory = {}
        if flow.memory is not None:
            memory = {name: getattr(flow.memory, name) for name in _MEMORY}
        signals = {}
        if flow.gates:
            signals["gate"] = torch.stack([flow.gates[index] for index in sorted(flow.gates)], -1)
        return PassResult(rows=flow.rows, memory=memory, signals=signals)


_MEMORY = tuple(ChunkMemory.__dataclass_fields__)


def _kept(state: State, seen_B: Tensor) -> ChunkMemory:
    """Return the memory in the cache, without what was to be seen after the ``seen_B`` tokens so far: they were others then."""
    memory = ChunkMemory(**{name: state[name] for name in _MEMORY})
    last_BRP = torch.where(memory.first_BRP < seen_B[:, None, None], memory.last_BRP, -1)
    return dataclasses.replace(memory, last_BRP=last_BRP)


def _row_by_row(goes_on: list[bool], kept: ChunkMemory, made: ChunkMemory) -> ChunkMemory:
    """Return the memory of rows that go on as it was kept, and of all others as it was made."""
    places = max(kept.first_BRP.shape[2], made.first_BRP.shape[2])
    goes_on_B = torch.tensor(goes_on, device=made.first_BRP.device)

    def chosen(name: str) -> Tensor:
        fill = -1.0 if name == "last_BRP" else 0.0
        one, other = (
            F.pad(part, (0, 0) * (part.dim() - 3) + (0, places - part.shape[2]), value=fill)
            for part in (getattr(kept, name), getattr(made, name))
        )
        return torch.where(goes_on_B.view(-1, *[1] * (one.dim() - 1)), one, other)

    return ChunkMemory(**{name: chosen(name) for name in _MEMORY})


def _may_look(tensor: Tensor) -> bool:
    """Return whether what is computed may depend on a tensor's numbers: elsewhere than on a processor one would wait for them."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _filled(first_BP: Tensor, last_BP: Tensor) -> int:
    """Return how many of the places of a layer hold a chunk in some row, at least 1: what lies behind is filling.

    Layers have chunks of their own height, most of them few; places are as many as the one with most needs.
    """
    places = first_BP.shape[1]
    if not _may_look(first_BP):
        return places
    used_P = (last_BP >= first_BP).any(0)
    return max(1, int((used_P * torch.arange(1, places + 1)).max()))


def _mapped(read_BRPD: Tensor, weight_RKD: Tensor, filled: Sequence[int]) -> Tensor:
    """Return what every layer makes of its chunks, [B, R, P, K], and zeros behind the ``filled`` places of each."""
    places = read_BRPD.shape[2]
    if min(filled) == places:
        return torch.einsum("brpd,rkd->brpk", read_BRPD, weight_RKD)
    rows = [
        F.pad(F.linear(read_BPD[:, :count], weight_KD), (0, 0, 0, places - count))
        for read_BPD, weight_KD, count in zip(read_BRPD.unbind(1), weight_RKD.unbind(), filled, strict=True)
    ]
    return torch.stack(rows, 1)


def _attend(query_BQTK: Tensor, key_BGPK: Tensor, value_BGPK: Tensor, mask_B1TP: Tensor) -> Tensor:
    """Return what each query reads of the chunks that it sees, [B, Q, T, K]."""
    heads, groups = query_BQTK.shape[1], key_BGPK.shape[1]
    if not better_by_products(query_BQTK, key_BGPK, value_BGPK):
        return F.scaled_dot_product_attention(
            query_BQTK, key_BGPK, value_BGPK, attn_mask=mask_B1TP, enable_gqa=heads != groups
        )
    # The heads of a group are rows of one product, and its keys are not repeated.
    each = heads // groups
    rows_BGNK = query_BQTK.unflatten(1, (groups, each)).flatten(2, 3)
    mixed_BGNK = attention(rows_BGNK, key_BGPK, value_BGPK, mask=mask_B1TP.repeat(1, 1, each, 1))
    return mixed_BGNK.unflatten(2, (each, -1)).flatten(1, 2)


def _heads(flat_BTN: Tensor, heads: int) -> Tensor:
    """Return [B, heads, T, K]."""
    return flat_BTN.unflatten(-1, (heads, -1)).transpose(1, 2)


def reference_chunk(stream: TreeStream, tokens_SD: Tensor, left: int, right: int, height: int) -> Tensor:
    """Eqs. 1 and 2 for one node over the embeddings of its row, [D]."""
    normed_D: Tensor = stream.norm(stream.weight_height[height] @ tokens_SD[left : right + 1].mean(0))
    return normed_D


def reference_memory(
    stream: TreeStream, packed_BSD: Tensor, left_BHM: Tensor, right_BHM: Tensor, height_BH: Tensor
) -> Tensor:
    """Eqs. 1 and 2, one node after the other: the oracle of ``TreeStream.chunk_memory``. Returns: [B, H, M, D]."""
    rows, width = [], packed_BSD.shape[-1]
    for tokens_SD, *shelves in zip(
        packed_BSD.unbind(), left_BHM.tolist(), right_BHM.tolist(), height_BH.tolist(), strict=True
    ):
        for left_M, right_M, height in zip(*shelves, strict=True):
            known = min(height, stream.num_heights - 1)
            for left, right in zip(left_M, right_M, strict=True):
                taken = left <= right
                rows.append(
                    reference_chunk(stream, tokens_SD, left, right, known) if taken else tokens_SD.new_zeros(width)
                )
    return torch.stack(rows).unflatten(0, tuple(left_BHM.shape))


def reference_read(
    stream: TreeStream, layer: int, hidden_TD: Tensor, chunks_HMD: Tensor, trees: Mapping[str, Tensor], begin: int = 0
) -> Tensor:
    """Lambda Delta (Eqs. 4 to 8) token by token and head by head for one row without padding: the oracle of ``TreeStream.write``.

    Args:
        chunks_HMD: as ``reference_memory`` gives them.
        trees: the row's part of ``keel.trees.collate``, without the batch dimension.
        begin: the token that the document began with; chunks that begin before it are not seen.
    Returns: [T, D].
    """
    index, size, flat_ND = stream.layer_index[layer], stream.head_size, chunks_HMD.flatten(0, 1)
    places = list(zip(*(trees[name][layer].tolist() for name in ("chunk", "first", "last")), strict=True))
    lefts = trees["left"].flatten().tolist()
    rows = []
    for t, h_D in enumerate(hidden_TD):
        seen = [chunk for chunk, first, last in places if first <= t <= last and begin <= lefts[chunk]]
        outputs = []
        for head in range(stream.heads):
            group = head // (stream.heads // stream.groups)
            mine, theirs = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
            output_K = torch.zeros_like(h_D[:1]).expand(size)
            if seen:
                query_K = stream.weight_query[index, mine] @ h_D
                keys_NK = flat_ND[seen] @ stream.weight_key[index, theirs].T
                weights_N = torch.softmax(keys_NK @ query_K / math.sqrt(size), 0)
                output_K = weights_N @ (flat_ND[seen] @ stream.weight_value[index, theirs].T)
            if stream.config.gate == "head":
                output_K = output_K * torch.sigmoid(stream.weight_gate[index, head] @ h_D)
            outputs.append(output_K)
        rows.append(stream.coefficient() * (stream.weight_output[index] @ torch.cat(outputs)))
    return torch.stack(rows)
