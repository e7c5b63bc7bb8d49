"""The encoder as a Hugging Face model: embeddings, blocks, final norms; and what each forward pass shares.

Shapes: B batch, T tokens, D width of the whole state (semantic channels first, then those of absolute position), H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput

from keel.encoder.attention import Layout, RelativeBias
from keel.encoder.block import DstgBlock, StreamNorm, Surroundings, rotation_of
from keel.encoder.config import DstgConfig
from keel.errors import KeelError, ShapeError


@dataclass
class EncoderOutput(ModelOutput):
    """What ``DstgModel`` returns.

    Attributes:
        last_hidden_state: [B, T, D] after the final norms.
        hidden_states: the embeddings and the state after every block, [B, T, D] each, without the final norms; on request.
    """

    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class PositionTable(nn.Embedding):
    """The learned rows of absolute positions, told from other tables by their own spread at the start."""


class DstgPreTrainedModel(PreTrainedModel):
    """What the encoder and the models with a head have in common."""

    config_class = DstgConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DstgBlock"]  # noqa: RUF012 - the library's own name and type

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RelativeBias):
            init.zeros_(module.bucket)
            init.zeros_(module.special)
        elif isinstance(module, PositionTable) and self.config.position_initializer_range is not None:
            init.normal_(module.weight, std=self.config.position_initializer_range)
        else:
            super()._init_weights(module)


class DstgModel(DstgPreTrainedModel):
    """DSTG-NeoBERT, or by ``config.position`` one of its baselines, without a head."""

    def __init__(self, config: DstgConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.semantic_size, padding_idx=config.pad_token_id)
        table_size = {"dstg": config.position_size, "ap": config.semantic_size}.get(config.position)
        self.embed_positions = PositionTable(config.max_position_embeddings, table_size) if table_size else None
        self.layers = nn.ModuleList([DstgBlock(config) for _ in range(config.num_hidden_layers)])
        self.final_norm = StreamNorm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> EncoderOutput:
        """Encode token ids.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 0 where padded, at either end; padding changes nothing for the other tokens.
            position_ids: [B, T] rows of the absolute-position table, or RoPE's places; by default counted from each document's
                first token, and in training shifted at random where ``config.random_position_shift``.
            document_starts: [B, T] bool, True where a packed document begins; documents do not see each other.
            output_hidden_states: also return the states between the blocks.
        Raises: ShapeError; KeelError for more tokens than the position table has rows.
        """
        for name, given in {"attention_mask": attention_mask, "document_starts": document_starts}.items():
            if given is not None and given.shape != input_ids.shape:
                raise ShapeError(
                    f"{name}: expected the shape of input_ids {list(input_ids.shape)}, got {list(given.shape)}"
                )
        if self.embed_positions is not None and input_ids.shape[1] > self.config.max_position_embeddings:
            raise KeelError(
                f"{input_ids.shape[1]} tokens, but the position table has {self.config.max_position_embeddings} rows; truncate, or "
                "train with a larger max_position_embeddings"
            )
        attention_mask = _only_padding(attention_mask)
        if position_ids is None:
            position_ids = self._positions(input_ids, attention_mask, document_starts)
        semantic, place = self.embed(input_ids, position_ids)
        around = self.surroundings(input_ids, attention_mask, position_ids, document_starts)
        states = [_whole(semantic, place)] if output_hidden_states else []
        for layer in self.layers:
            semantic, place = layer(semantic, place, around)
            if output_hidden_states:
                states.append(_whole(semantic, place))
        last = _whole(*self.final_norm(semantic, place))
        return EncoderOutput(last_hidden_state=last, hidden_states=tuple(states) or None)

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the streams at the first block; the baseline "ap" adds its table to the only one."""
        semantic = self.embed_tokens(input_ids)
        if self.embed_positions is None:
            return semantic, None
        place = self.embed_positions(position_ids)
        if self.config.disentangled:
            return semantic, place.expand(len(semantic), -1, -1)
        return semantic + place, None

    def surroundings(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        document_starts: Tensor | None = None,
    ) -> Surroundings:
        """Return what the blocks share in a pass over these tokens."""
        visible = _visible(attention_mask, document_starts)
        if self.config.position == "rope":
            rotation = rotation_of(position_ids, self.config.head_size, self.config.rope_theta, self.dtype)
            return Surroundings(Layout(None, visible), rotation=rotation)
        if not self.config.has_relative_bias:
            return Surroundings(Layout(None, visible))
        special = self._special(input_ids)
        regular = ~special[:, None, :, None] if self.config.disentangled else None
        return Surroundings(Layout(special, visible), regular)

    def _special(self, input_ids: Tensor) -> Tensor:
        """Return where special tokens are: [1, T] bool where all rows agree, so that one bias serves them all."""
        ids = torch.tensor(self.config.special_token_ids, device=input_ids.device, dtype=input_ids.dtype)
        special_BT = torch.isin(input_ids, ids)
        if not torch.compiler.is_compiling() and bool((special_BT == special_BT[:1]).all()):
            return special_BT[:1]
        return special_BT

    def _positions(self, input_ids: Tensor, attention_mask: Tensor | None, document_starts: Tensor | None) -> Tensor:
        """Return places counted from the first token of each document, [B or 1, T], in training with the random shift."""
        if attention_mask is None and document_starts is None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        else:
            attended = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
            places = attended.cumsum(dim=1) - 1
            if document_starts is not None:
                places = places - torch.where(document_starts, places, 0).cummax(dim=1).values
            places = places.clamp(min=0)
        if not (self.training and self.config.random_position_shift and self.embed_positions is not None):
            return places
        free_B1 = self.config.max_position_embeddings - places.amax(dim=1, keepdim=True)
        chance_B1 = torch.rand(len(input_ids), 1, device=input_ids.device)
        return places + (chance_B1 * free_B1).long()


def _only_padding(attention_mask: Tensor | None) -> Tensor | None:
    """Drop a mask that hides nothing, since without one the fused kernel reads less."""
    if attention_mask is None or torch.compiler.is_compiling():
        return attention_mask
    return None if bool(attention_mask.all()) else attention_mask


def _visible(attention_mask: Tensor | None, document_starts: Tensor | None) -> Tensor | None:
    """Return the keys that may be seen: None for all, [B, T], or [B, T, T] by query where documents are packed."""
    keys_BT = None if attention_mask is None else attention_mask.bool()
    if document_starts is None:
        return keys_BT
    document_BT = document_starts.long().cumsum(dim=1)
    together = document_BT[:, :, None] == document_BT[:, None, :]
    return together if keys_BT is None else together & keys_BT[:, None]


def _whole(semantic: Tensor, place: Tensor | None) -> Tensor:
    return semantic if place is None else torch.cat((semantic, place), dim=-1)
