"""Sizes and choices of the DSTG encoder and of its NeoBERT baselines."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig

from keel.errors import KeelError, suggest

POSITIONS = ("dstg", "rope", "ap", "rp")
_CHOICES = {
    "position": POSITIONS,
    "mlm_head": ("semantic", "full"),
    "attention_scale": ("streams", "head"),
    "residual": ("input", "normed"),
}


class DstgConfig(PreTrainedConfig):
    """Configuration of ``DstgModel``; the defaults are the paper's (DSTG-NeoBERT §3).

    Attributes:
        vocab_size: entries of the vocabulary; the default is that of bert-base-uncased.
        semantic_size: width of the semantic stream, a multiple of ``num_attention_heads``. The baselines' only width.
        position_size: width of the absolute-position stream, a multiple of ``num_attention_heads``; "dstg" only.
        num_hidden_layers, num_attention_heads: of all four models.
        intermediate_size: channels inside SwiGLU; None for 8/3 of ``hidden_size``, rounded up to a multiple of 8.
        position: "dstg" (three streams), or a baseline: "rope", "ap" (a learned table added to the embeddings), "rp" (the
            T5 bias).
        max_position_embeddings: rows of the absolute-position table; "dstg" and "ap" read no longer sequence.
        relative_buckets, relative_max_distance: of the T5 bias; half of the buckets for each direction.
        special_token_ids: tokens whose place is arbitrary ([CLS], [SEP]): three scalars a head in place of a bias by
            distance, and no absolute-position logit (TUPE).
        attention_scale: what the logits of "dstg" are divided by: "streams" for √(2 d_h) as TUPE, "head" for √d_h.
        residual: what attention and feed-forward network are added to: "input", what the norm before them reads (pre-norm, Fig. 1), or
            "normed", what it gives. At the start a feed-forward network writes more into the narrow position stream than the table
            holds; "normed" keeps the table's share.
        mlm_head: what the heads read: "semantic", or "full" for both streams (App. B.2).
        random_position_shift: in training, start the absolute positions of a row at a random place (§3.3).
        rope_theta: base of the rotations of "rope".
        rms_norm_eps: added to the mean square in every norm.
        initializer_range: standard deviation of every matrix and table at the start.
        position_initializer_range: that of the absolute-position table, where it is another; None for the same. What is learnt must
            stand out from what the rows begin with, which has no order.
        classifier_dropout: before the classifiers of fine-tuning, 0 <= x < 1.

    Raises: KeelError for an unknown choice or a width that the heads do not divide.
    """

    model_type = "dstg"

    vocab_size: int = 30522
    semantic_size: int = 384
    position_size: int = 48
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    intermediate_size: int | None = None
    position: str = "dstg"
    max_position_embeddings: int = 512
    relative_buckets: int = 32
    relative_max_distance: int = 128
    special_token_ids: list[int] | tuple[int, ...] = (101, 102)
    attention_scale: str = "streams"
    residual: str = "input"
    mlm_head: str = "semantic"
    random_position_shift: bool = True
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    position_initializer_range: float | None = None
    classifier_dropout: float = 0.1
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise KeelError(
                    f"DstgConfig: unknown {name} {getattr(self, name)!r}; {suggest(getattr(self, name), choices)}"
                )
        self.special_token_ids = [int(token) for token in self.special_token_ids]
        widths = {"semantic_size": self.semantic_size} | (
            {"position_size": self.position_size} if self.disentangled else {}
        )
        for name, width in widths.items():
            if width < 1 or width % self.num_attention_heads:
                raise KeelError(
                    f"DstgConfig: {name} {width} is no multiple of num_attention_heads {self.num_attention_heads}"
                )
        if self.position == "rope" and self.head_size % 2:
            raise KeelError(f"DstgConfig: rope needs an even head size, got {self.head_size}; change semantic_size")
        if (
            self.relative_buckets < 4
            or self.relative_buckets % 2
            or self.relative_max_distance <= self.relative_buckets // 4
        ):
            raise KeelError(
                f"DstgConfig: relative_buckets {self.relative_buckets} must be even and at least 4, and relative_max_distance "
                f"{self.relative_max_distance} more than a quarter of them"
            )
        if self.intermediate_size is None:
            self.intermediate_size = -(-self.hidden_size * 8 // 24) * 8
        super().__post_init__(**kwargs)

    @property
    def disentangled(self) -> bool:
        """Whether absolute positions have a stream of their own."""
        return self.position == "dstg"

    @property
    def has_relative_bias(self) -> bool:
        """Whether every block has a learned bias by relative position."""
        return self.position in ("dstg", "rp")

    @property
    def hidden_size(self) -> int:
        """Width of the whole state: the semantic stream's, and for "dstg" the position stream's behind it."""
        return self.semantic_size + (self.position_size if self.disentangled else 0)

    @property
    def head_size(self) -> int:
        """Channels a head of the queries and keys, the same for both streams (§3.1)."""
        return self.semantic_size // self.num_attention_heads

    @property
    def readout_size(self) -> int:
        """Channels that the heads on top read."""
        return self.hidden_size if self.mlm_head == "full" else self.semantic_size

    def baseline(self, position: str, match_parameters: bool = False) -> DstgConfig:
        """Return the configuration of another arm of the comparison.

        Args:
            position: "dstg", "rope", "ap" or "rp".
            match_parameters: widen or narrow SwiGLU to this configuration's number of parameters, to the nearest channel. The
                paper does not, so that its baselines are smaller; otherwise SwiGLU is 8/3 of the arm's own width.
        """
        fields = {**copy.deepcopy(self.to_dict()), "position": position, "intermediate_size": None}
        other = DstgConfig(**fields)
        if match_parameters:
            channel = other.num_hidden_layers * 3 * other.hidden_size
            missing = count_parameters(self) - count_parameters(other)
            other.intermediate_size = (other.intermediate_size or 0) + round(missing / channel)
        return other


def count_parameters(config: DstgConfig) -> int:
    """Return the number of parameters of the masked language model that ``config`` describes."""
    semantic, hidden, heads = config.semantic_size, config.hidden_size, config.num_attention_heads
    norms, layer = hidden, 2 * hidden + 4 * semantic**2 + 3 * hidden * (config.intermediate_size or 0)
    if config.disentangled:
        layer += 2 * config.position_size * (semantic + config.position_size)
    tables = config.vocab_size * semantic + (config.readout_size + 1) * config.vocab_size
    if config.position in ("dstg", "ap"):
        tables += config.max_position_embeddings * (config.position_size if config.disentangled else semantic)
    if config.has_relative_bias:
        layer += heads * (config.relative_buckets + 3)
    return norms + tables + config.num_hidden_layers * layer
