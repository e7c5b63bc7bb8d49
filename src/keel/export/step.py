"""One token of decoding as a pure function: ids, keys and values and every stream's state in; logits, signals and the same again out.

It runs the model's own pass, with a cache made of what is given and taken apart again: what is exported is what ``generate`` does.
All rows begin at the same token; there is no padding.

Shapes: B batch, P past tokens, S = P + 1, H key heads, E size of a head, V vocabulary, R features of telemetry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from keel.cache import StreamCacheLayer
from keel.errors import KeelError
from keel.model import KeelForCausalLM
from keel.streams import DynamicStateStream, StructuralStream
from keel.streams.dynamic_state import Telemetry
from keel.streams.dynamic_state.telemetry import FEATURES

EXPORTABLE = (DynamicStateStream, StructuralStream)
"""Streams whose whole past is a recurrent state of fixed size."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """One input of a step.

    Attributes:
        name: in the exported graph.
        shape: sizes; a name (``batch``, ``past``) where the size varies.
        after: the output that is given as this input at the next token; None for what is new at each token.
        dtype: as torch and numpy call it.
    """

    name: str
    shape: tuple[int | str, ...]
    after: str | None = None
    dtype: str = "float32"

    def zeros(self, sizes: Mapping[str, int]) -> Tensor:
        """Return zeros of this shape: at a beginning, when ``past`` is 0, every input but the ids is that."""
        shape = [size if isinstance(size, int) else sizes[size] for size in self.shape]
        return torch.zeros(shape, dtype=getattr(torch, self.dtype))


class GivenTelemetry(Telemetry):
    """Telemetry that whoever calls a step gives with it."""

    features_R: Tensor

    def read(self, positions_BT: Tensor | None) -> Tensor:
        """See ``Telemetry.read``."""
        return self.features_R


class DecodingStep(nn.Module):
    """A host, bare or with streams, as one step; ``inputs`` and ``outputs`` say what goes in and comes out, in order.

    Raises: KeelError for streams, positions or numbers that cannot be a step.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        _check(model)
        self.model = model.eval()
        self.host: PreTrainedModel = model.host if isinstance(model, KeelForCausalLM) else model
        self.streams: dict[str, Any] = dict(model.wires.streams) if isinstance(model, KeelForCausalLM) else {}
        self.windows = _windows(self.host.config)
        self.inputs, self.outputs = self._ports()

    def forward(self, input_ids_B1: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Read one token.

        Args:
            input_ids_B1: int64.
            given: in the order of ``inputs`` behind the ids.
        Returns: in the order of ``outputs``: logits [B, V], signals, keys and values [B, H, S, E], states.
        """
        named = dict(zip([port.name for port in self.inputs[1:]], given, strict=True))
        cache = self._cache(named)
        with self._telemetry(named.get("telemetry")):
            logits_BV, signals = self._run(input_ids_B1, cache, named["past.0.key"])
        found = {f"signal.{name}": signal.squeeze(1) for name, signal in signals.items()}
        for name, tensor in _carried(cache, self.host.config.num_hidden_layers).items():
            found[f"new.{name}"] = tensor
        return logits_BV, *(found[name] for name in self.outputs[1:])

    def beginning(self, batch: int = 1) -> list[Tensor]:
        """Return what is given behind the ids at the first token; healthy telemetry is zeros too."""
        return [port.zeros({"batch": batch, "past": 0}) for port in self.inputs[1:]]

    def _ports(self) -> tuple[list[Port], list[str]]:
        """Read one token as decoding does, to see what there is to carry on."""
        options = {"collect_signals": True} if self.streams else {}
        ids_B1 = torch.zeros(1, 1, dtype=torch.long, device=self.host.device)
        with torch.no_grad():
            output: Any = self.model(input_ids=ids_B1, use_cache=True, **options)
        carried = _carried(output.past_key_values, self.host.config.num_hidden_layers)
        inputs = [Port(name="input_ids", shape=("batch", 1), dtype="int64")]
        for name, tensor in carried.items():
            shape: tuple[int | str, ...] = ("batch", *tensor.shape[1:])
            if name.startswith("past."):
                shape = ("batch", tensor.shape[1], "past", tensor.shape[3])
            inputs.append(Port(name=name, shape=shape, after=f"new.{name}"))
        if any(isinstance(stream, DynamicStateStream) for stream in self.streams.values()):
            inputs.append(Port(name="telemetry", shape=(len(FEATURES),)))
        signals = getattr(output, "signals", None) or {}
        return inputs, ["logits", *(f"signal.{name}" for name in signals), *(f"new.{name}" for name in carried)]

    def _cache(self, named: Mapping[str, Tensor]) -> Cache:
        cache = Cache(layers=[_filled(named, index) for index in range(self.host.config.num_hidden_layers)])
        if self.streams:
            own = StreamCacheLayer()
            own.seen = cache.get_seq_length()
            own.states = {name: _below(named, f"state.{name}.") for name in self.streams}
            cache.layers.append(own)
        return cache

    def _run(self, input_ids_B1: Tensor, cache: Cache, key_BHPE: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        masks = {kind: _mask(key_BHPE, window) for kind, window in self.windows.items()}
        # Hosts that mix windows take a mask for each kind of layer, by name.
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        position_B1 = torch.zeros_like(input_ids_B1) + key_BHPE.shape[2]

        def call(**options: Any) -> Any:
            return self.host(**{**options, "attention_mask": mask}, position_ids=position_B1, return_dict=True)

        if not isinstance(self.model, KeelForCausalLM):
            return call(input_ids=input_ids_B1, past_key_values=cache, use_cache=True).logits[:, -1], {}
        given = {"collect_signals": True}
        output, results, _ = self.model._pass(call, input_ids_B1, None, None, cache, True, None, given)
        signals = {f"{name}.{key}": signal for name, r in results.items() for key, signal in r.signals.items()}
        return output.logits[:, -1], signals

    @contextmanager
    def _telemetry(self, features_R: Tensor | None) -> Iterator[None]:
        """Let the streams that read telemetry read this one."""
        readers = [stream for stream in self.streams.values() if isinstance(stream, DynamicStateStream)]
        before = [stream.telemetry for stream in readers]
        for stream in readers:
            assert features_R is not None
            stream.telemetry = GivenTelemetry()
            stream.telemetry.features_R = features_R
        try:
            yield
        finally:
            for stream, telemetry in zip(readers, before, strict=True):
                stream.telemetry = telemetry


def _check(model: PreTrainedModel) -> None:
    if isinstance(model, KeelForCausalLM):
        for name, stream in model.wires.streams.items():
            if not isinstance(stream, EXPORTABLE):
                known = ", ".join(kind.type_name for kind in EXPORTABLE)
                raise KeelError(
                    f"export: stream {name!r} ({stream.type_name}) keeps something of every token or reads trees, and cannot be "
                    f"one step; these can: {known}"
                )
        if model.config.positions is not None:
            raise KeelError("export: replaced positions cannot be exported; train with the host's own positions")
    dtype = next(model.parameters()).dtype
    if dtype != torch.float32:
        raise KeelError(f"export: the weights are {str(dtype).removeprefix('torch.')}; call model.float() first")


def _windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """Return how far each kind of layer sees back, None for everything."""
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if len(kinds) > 1 or config.model_type in ("qwen2", "qwen3"):
        return {kind: window if kind == "sliding_attention" else None for kind in kinds}
    return {"full_attention": window}


def _mask(key_BHPE: Tensor, window: int | None) -> Tensor:
    """Return what is added to the scores of one token, [B, 1, 1, S]."""
    batch, past = key_BHPE.shape[0], key_BHPE.shape[2]
    mask_B11S = key_BHPE.new_zeros(batch, 1, 1, past + 1)
    if window is None:
        return mask_B11S
    distance_S = past - torch.arange(past + 1, device=key_BHPE.device)
    return mask_B11S.masked_fill(distance_S >= window, torch.finfo(mask_B11S.dtype).min)


def _filled(named: Mapping[str, Tensor], index: int) -> DynamicLayer:
    """Return a layer that holds all past keys and values, also where the host looks through a window: the mask has that."""
    layer = DynamicLayer()
    layer.keys, layer.values = named[f"past.{index}.key"], named[f"past.{index}.value"]
    layer.dtype, layer.device, layer.is_initialized = layer.keys.dtype, layer.keys.device, True
    return layer


def _carried(cache: Cache, num_layers: int) -> dict[str, Tensor]:
    """Return everything in the cache by name, keys and values first."""
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers[:num_layers]):
        assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        tensors |= {f"past.{index}.key": layer.keys, f"past.{index}.value": layer.values}
    for layer in cache.layers[num_layers:]:
        assert isinstance(layer, StreamCacheLayer)
        for name, state in layer.states.items():
            tensors |= {f"state.{name}.{key}": tensor for key, tensor in state.items()}
    return tensors


def _below(named: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
