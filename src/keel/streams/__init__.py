"""Side streams: the contract (``base``) and one file or folder a mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keel.errors import KeelError, build_config, suggest
from keel.streams.base import PassInputs, PassResult, Stream, StreamLoss
from keel.streams.dynamic_state import DynamicStateConfig, DynamicStateStream
from keel.streams.learned_positions import LearnedPositionsConfig, LearnedPositionsStream
from keel.streams.margin import MarginConfig, MarginPrior
from keel.streams.structural import StructuralConfig, StructuralStream
from keel.streams.tree import TreeConfig, TreeStream

STREAMS: dict[str, type[Stream]] = {
    stream.type_name: stream
    for stream in (StructuralStream, TreeStream, MarginPrior, DynamicStateStream, LearnedPositionsStream)
}


def stream_from_config(given: Mapping[str, Any], where: str = "stream") -> Stream:
    """Make an unbuilt stream from ``{"type": ..., field: value}``.

    Raises: KeelError for an unknown type or field, naming the nearest valid one.
    """
    fields = dict(given)
    kind = fields.pop("type", None)
    if kind not in STREAMS:
        raise KeelError(f"{where}: unknown stream type {kind!r}; {suggest(str(kind), STREAMS)}")
    stream_class = STREAMS[kind]
    config: Any = build_config(stream_class.config_class, fields, where)
    return stream_class(config)


__all__ = [
    "STREAMS",
    "DynamicStateConfig",
    "DynamicStateStream",
    "LearnedPositionsConfig",
    "LearnedPositionsStream",
    "MarginConfig",
    "MarginPrior",
    "PassInputs",
    "PassResult",
    "Stream",
    "StreamLoss",
    "StructuralConfig",
    "StructuralStream",
    "TreeConfig",
    "TreeStream",
    "stream_from_config",
]
