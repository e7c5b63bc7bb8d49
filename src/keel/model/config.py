"""What a host with streams is configured by, and what it returns."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast


class KeelConfig(PreTrainedConfig):
    """Configuration of a host with streams.

    Attributes:
        text_config: the host's own configuration (this name is the one that generation and caches look for).
        streams: name -> {"type": ..., fields}.
        positions: fields of ``keel.positions.Positions`` where the host's position scheme is replaced, else None.
        host_name: where the host was loaded from.
        host_fingerprint: ``keel.hosts.fingerprint`` of the host's weights: at attach, and anew at every save.
    """

    model_type = "keel"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    streams: dict[str, Any] | None = None
    positions: dict[str, Any] | None = None
    host_name: str = ""
    host_fingerprint: str = ""

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            self.text_config = AutoConfig.for_model(**self.text_config)
        self.streams = self.streams or {}
        super().__post_init__(**kwargs)


@dataclass
class KeelOutput(CausalLMOutputWithPast):
    """``CausalLMOutputWithPast`` with what the streams add.

    Attributes:
        losses: named auxiliary losses with their weight, already part of ``loss``.
        shares: named shares of the attended tokens that a stream counts, no part of ``loss``.
        signals: named per-token signals, [B, T] or [B, T, L]; only with ``collect_signals=True``.
    """

    losses: dict[str, Tensor] | None = None
    shares: dict[str, Tensor] | None = None
    signals: dict[str, Tensor] | None = None

    # As in ModelOutput, which lists its fields anew for every attribute and once more at the end: for a token of decoding that
    # would cost as much as the writes at two layers.
    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None and name in type(self).__dataclass_fields__:
            OrderedDict.__setitem__(self, name, value)
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        if self.loss is not None and not isinstance(self.loss, Tensor):  # made from a dict, as accelerate does
            super().__post_init__()
