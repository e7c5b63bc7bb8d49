"""The model: a host that runs with its streams open, generates, saves and loads.

Shapes: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from keel.cache import StreamCacheLayer, new_cache, stream_layer
from keel.errors import KeelError, build_config
from keel.hosts import fingerprint, host_family, host_shape, logits_from_hidden, site_modules
from keel.model.config import KeelConfig, KeelOutput
from keel.positions import Positions, set_positions
from keel.storage import save_streams
from keel.streams import stream_from_config
from keel.streams.base import (
    Flow,
    FusedProjectionHook,
    InputHook,
    KeyHook,
    OutputHook,
    PassInputs,
    PassResult,
    QueryHook,
    Stream,
    Wires,
)


class KeelForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model with side streams. Made by ``keel.attach``, ``keel.load`` or ``from_pretrained``."""

    config_class = KeelConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self, config: KeelConfig, host: PreTrainedModel | None = None, streams: Mapping[str, Stream] | None = None
    ):
        super().__init__(config)
        if host is None:
            if config.text_config is None:
                raise KeelError(
                    f"{config.name_or_path or 'the configuration'} says no host (text_config): its config.json is missing, or of "
                    "another kind of model; put streams beside a bare host with keel.attach"
                )
            host = AutoModelForCausalLM.from_config(config.text_config)
        else:
            _mark_initialized(host)
        self.host = host
        self.family = host_family(host)
        if config.positions is not None:
            set_positions(host, build_config(Positions, config.positions, "positions"))
        if streams is None:
            streams = {
                name: stream_from_config(fields, f"streams.{name}") for name, fields in (config.streams or {}).items()
            }
        for stream in streams.values():
            stream.build(host_shape(host.config))
        self.streams = nn.ModuleDict(dict(streams))
        self.generation_config = host.generation_config
        self._wire(dict(streams))
        self.post_init()

    # -- wiring ---------------------------------------------------------------------------------------------------------

    def _wire(self, streams: dict[str, Stream]) -> None:
        """Register one hook a site; done once, before any compile."""
        self.wires = Wires()
        self.wires.streams = streams
        self.streams_enabled = True
        self._checkpointing = False
        self._hooks: dict[tuple[str, int], list[tuple[nn.Module, Any]]] = {}
        writers: dict[tuple[str, int], list[str]] = {}
        for name, stream in streams.items():
            for pair in stream.write_sites():
                writers.setdefault(pair, []).append(name)
        self.embedding_writers = writers.pop(("embeddings", -1), [])
        self._writers = writers
        for site, layer in writers:
            self._hook(site, layer)

    def _hook(self, site: str, layer: int) -> None:
        names, places = self._writers[site, layer], site_modules(self.host, self.family, site, layer)
        hooks = self._hooks[site, layer] = []
        for index, (module, is_input, fused) in enumerate(places):
            if fused is not None:
                handle = module.register_forward_hook(FusedProjectionHook(self.wires, names, site, layer, fused))
            elif is_input:
                kind = InputHook if len(places) == 1 else (QueryHook, KeyHook)[index]
                handle = module.register_forward_pre_hook(kind(self.wires, names, site, layer), with_kwargs=True)
            else:
                handle = module.register_forward_hook(OutputHook(self.wires, names, site, layer))
            hooks.append((module, handle))

    def _follow_wrapped_modules(self) -> None:
        """Move hooks to where a module at a site was wrapped since, as PEFT does: the wrapper's own part would miss them."""
        for (site, layer), hooks in list(self._hooks.items()):
            places = site_modules(self.host, self.family, site, layer)
            if any(place.module is not module for place, (module, _) in zip(places, hooks, strict=True)):
                for _, handle in hooks:
                    handle.remove()
                self._hook(site, layer)

    @contextmanager
    def disable_streams(self) -> Iterator[None]:
        """Let the bare host run inside this context."""
        before, self.streams_enabled = self.streams_enabled, False
        try:
            yield
        finally:
            self.streams_enabled = before

    def detach(self) -> PreTrainedModel:
        """Take the hooks off and return the host; without training it is bitwise the one that was attached."""
        for hooks in self._hooks.values():
            for _, hook in hooks:
                hook.remove()
        self._hooks, self.streams_enabled = {}, False
        if self.config.positions is not None:
            set_positions(self.host, Positions())
        return self.host

    # -- forward --------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_starts: Tensor | None = None,
        trees: Mapping[str, Tensor] | None = None,
        update_mask: Tensor | None = None,
        collect_signals: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        num_tokens_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> KeelOutput:
        """Run host and streams.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, labels, use_cache, logits_to_keep: as in
                any causal model of transformers; the mask is [B, T] or, with a cache, [B, past + T].
            document_starts: [B, T] bool, True where a packed document begins: recurrent states restart there.
            trees: parse trees of the rows from their beginning, past included, as ``keel.trees.collate`` lays them out.
            update_mask: [B, past + T] bool from the beginning of the row, False at tokens that a tree stream may read and not
                write to; what lies beyond it is written to.
            collect_signals: also return per-token signals.
            num_items_in_batch: number of label tokens in the whole accumulated batch, which the cross-entropy is divided by.
            num_tokens_in_batch: likewise of attended tokens, for the auxiliary losses.
        Returns: KeelOutput; ``loss`` is the host's plus every auxiliary loss.
        Raises: KeelError for a mask or a cache with which the streams could not be exact.
        """
        kwargs.pop("return_dict", None)
        if num_items_in_batch is not None and labels is not None:
            kwargs["num_items_in_batch"] = num_items_in_batch
        call = functools.partial(
            self.host,
            labels=labels,
            logits_to_keep=logits_to_keep,
            position_ids=position_ids,
            return_dict=True,
            **kwargs,
        )
        # With positions of the caller's own the mask stays: without one, hosts read restarting positions as packed documents.
        if position_ids is None:
            attention_mask = _unless_all_attended(attention_mask)
        given = {"document_starts_BT": document_starts, "trees": trees, "collect_signals": collect_signals}
        output, results, num_tokens = self._pass(
            call, input_ids, inputs_embeds, attention_mask, past_key_values, use_cache, update_mask, given
        )
        in_batch = num_items_in_batch if num_tokens_in_batch is None else num_tokens_in_batch
        total = num_tokens if in_batch is None else in_batch
        losses: dict[str, Tensor] = dict(
            getattr(output, "losses", {})
        )  # of what was put into the host, see training/shadow.py
        shares: dict[str, Tensor] = {}
        for name, result in results.items():
            for key, auxiliary in result.losses.items():
                losses[f"{name}.{key}"] = auxiliary.weight * auxiliary.token_sum / total
            for key, count in result.counts.items():
                shares[f"{name}.{key}"] = count / total
        loss = output.loss
        if loss is not None:
            for term in losses.values():
                loss = loss + term
        return KeelOutput(
            loss=loss,
            logits=output.logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            losses=losses or None,
            shares=shares or None,
            signals=_named_signals(results) if collect_signals else None,
        )

    def final_hidden(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        inputs_embeds: Tensor | None = None,
        document_starts: Tensor | None = None,
        trees: Mapping[str, Tensor] | None = None,
        update_mask: Tensor | None = None,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states that the head would read, [B, T, D], with the streams at work and without the head."""
        call = functools.partial(self.host.base_model, return_dict=True)
        attention_mask = _unless_all_attended(attention_mask)
        given = {"document_starts_BT": document_starts, "trees": trees}
        output, _, _ = self._pass(
            call, input_ids, inputs_embeds, attention_mask, past_key_values, use_cache, update_mask, given
        )
        return output

    def logits_from_hidden(self, hidden_BTD: Tensor) -> Tensor:
        """Apply the host's head: [B, T, V]."""
        return logits_from_hidden(self.host, hidden_BTD)

    def _pass(
        self,
        call: Any,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None,
        use_cache: bool | None,
        update_mask: Tensor | None,
        given: Mapping[str, Any],
    ) -> tuple[Any, dict[str, PassResult], Tensor | int]:
        """Open every stream, run the host while the wires carry their flows, close them, keep their states.

        ``given`` is what of ``PassInputs`` comes from the caller as it is.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise KeelError("give exactly one of input_ids and inputs_embeds")
        embeddings_BTD: Tensor = (
            inputs_embeds if inputs_embeds is not None else self.host.base_model.get_input_embeddings()(input_ids)
        )
        if use_cache is None:
            use_cache = self.host.config.use_cache and not self.training
        if self.training and self._checkpointing:
            use_cache, cache = False, None
        if not isinstance(self.streams, nn.ModuleDict):
            raise KeelError(
                "the streams were replaced by a copy (PEFT's modules_to_save does that) that would never run; leave them out of "
                "modules_to_save and call streams.requires_grad_(True) after get_peft_model"
            )
        active = self.wires.streams if self.streams_enabled else {}
        # Not for every token of decoding: it takes time, and a prompt comes first.
        if embeddings_BTD.shape[1] > 1 and not torch.compiler.is_compiling():
            self._follow_wrapped_modules()
        layer: StreamCacheLayer | None = None
        if active and (
            use_cache or cache is not None
        ):  # the host goes on in a cache that it is given, so do the streams
            cache = new_cache(self.host.config) if cache is None else cache
            layer = stream_layer(cache, self.host.config)
        length = embeddings_BTD.shape[1]
        num_past = 0 if layer is None else layer.seen
        inputs = PassInputs(
            embeddings_BTD=embeddings_BTD,
            attended_BT=_attended(attention_mask, length) if active else None,
            input_ids_BT=input_ids,
            num_past=num_past,
            updated_BT=None if update_mask is None else _updated(update_mask, num_past, length),
            keep_history=layer is not None and layer.record_past,
            **given,
        )
        flows: dict[str, Flow] = {
            name: stream.open(inputs, {} if layer is None else layer.previous(name)) for name, stream in active.items()
        }
        for name in self.embedding_writers if active else ():
            embeddings_BTD = active[name].write("embeddings", -1, embeddings_BTD, flows[name])
        wires = self.wires
        before, wires.flows = wires.flows, flows if active else wires.flows
        try:
            output = call(
                inputs_embeds=embeddings_BTD, attention_mask=attention_mask, past_key_values=cache, use_cache=use_cache
            )
        finally:
            wires.flows = before
        results = {name: stream.close(flows[name]) for name, stream in active.items()}
        if layer is not None:
            layer.store(results, length)
        attended_BT = inputs.attended_BT
        num_tokens = embeddings_BTD.shape[0] * length if attended_BT is None else attended_BT.sum().clamp(min=1)
        return output, results, num_tokens

    # -- training -------------------------------------------------------------------------------------------------------

    def set_step(self, step: int) -> None:
        """Tell the streams' schedules the training step; saved with the model."""
        for stream in self.wires.streams.values():
            stream.step.fill_(step)

    def trainable(self, what: str) -> KeelForCausalLM:
        """Let ``"all"``, only the ``"streams"`` or only the ``"host"`` take gradients; returns self."""
        if what not in ("all", "streams", "host"):
            raise KeelError(f"trainable({what!r}): valid: all, streams, host")
        self.host.requires_grad_(what != "streams")
        self.streams.requires_grad_(what != "host")
        return self

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **kwargs: Any
    ) -> None:
        given = getattr(gradient_checkpointing_func, "keywords", {})
        if enable:
            if given.get("use_reentrant"):
                raise KeelError("use_reentrant=True would give silently wrong gradients here; use use_reentrant=False")
            options = {**given, "use_reentrant": False, "context_fn": self.wires.checkpoint_contexts}
            gradient_checkpointing_func = functools.partial(checkpoint, **options)
        self._checkpointing = enable
        super()._set_gradient_checkpointing(
            enable=enable, gradient_checkpointing_func=gradient_checkpointing_func, **kwargs
        )

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Stream):
            module.init_weights()
        elif not isinstance(module, KeelForCausalLM):
            super()._init_weights(module)

    # -- generation -----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The host's device. Generation asks twice a token, and the search for a first parameter starts further inside here."""
        return self.host.base_model.device

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Any:
        """Leave positions to the host where nothing is padded: it counts on from its cache, which costs a token less."""
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is None or bool(attention_mask.all()):
            return None
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        implementation = generation_config.cache_implementation
        if self.streams and implementation is not None and implementation not in ("dynamic", "offloaded"):
            raise KeelError(
                f"cache_implementation={implementation!r} would lose or round the streams' state; use 'dynamic' or 'offloaded'"
            )
        prepared = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if cache is not None and self.streams and self.streams_enabled:
            layer = stream_layer(cache, self.host.config)
            if generation_config.is_assistant:
                layer.activate_past_recording()
        return prepared

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> Any:
        """As in transformers, which repeats tensors for beams, and overlooks those of the trees."""
        if kwargs.get("trees") is not None and expand_size > 1:
            kwargs["trees"] = {
                name: tensor.repeat_interleave(expand_size, 0) for name, tensor in kwargs["trees"].items()
            }
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """With a cache the trees of the prompt have been read once the first token is chosen: their memory is kept there."""
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if outputs.past_key_values is not None:
            updated.pop("trees", None)
        return updated

    # -- saving and loading ---------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save host and streams as one checkpoint (safetensors), with a fingerprint of the host's weights as they are now.

        Raises: KeelError when the disk is full or the folder cannot be written; what it holds then is no checkpoint any more.
        """
        self.config.host_fingerprint = fingerprint(self.host)
        try:
            super().save_pretrained(save_directory, **kwargs)
        except (OSError, SafetensorError) as error:
            raise KeelError(f"cannot write the checkpoint {save_directory}: {error}") from error

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a whole checkpoint.

        Raises: KeelError for a missing, unexpected or misshapen weight, a damaged file, or a host that is not the one saved.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *args,
                **{**kwargs, "output_loading_info": True, "use_safetensors": True, "ignore_mismatched_sizes": True},
            )
        except SafetensorError as error:
            raise KeelError(
                f"{pretrained_model_name_or_path}: the weights file is damaged or truncated ({error})"
            ) from error
        except OSError as error:
            reason = " ".join(str(error).split())
            raise KeelError(f"{pretrained_model_name_or_path} holds no whole checkpoint of Keel: {reason}") from error
        wrong = {
            kind: list(info[kind])[:3] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]
        }
        if wrong:
            raise KeelError(f"{pretrained_model_name_or_path}: the checkpoint does not fit its configuration: {wrong}")
        # Rounding float32 to float16 and then to bfloat16 is not rounding it to bfloat16: such a load cannot be compared.
        comparable = model.dtype in (torch.float32, torch.bfloat16)
        if comparable and fingerprint(model.host) != model.config.host_fingerprint:
            raise KeelError(
                f"{pretrained_model_name_or_path}: the host's weights are not those that were saved; copy it anew"
            )
        return (model, info) if wants_info else model

    def save_streams(self, folder: str | os.PathLike[str]) -> None:
        """Save the streams alone; ``keel.load(folder, backbone=host)`` puts them beside the same host again.

        Raises: KeelError when the host was trained since attach: its weights would be lost; save the whole model.
        """
        if fingerprint(self.host) != self.config.host_fingerprint:
            raise KeelError(
                "the host's weights changed since attach, and streams alone do not hold them; use save_pretrained"
            )
        save_streams(Path(folder), self.streams.state_dict(), self.config)

    # -- embeddings, status ---------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> nn.Module:
        """Return the host's token embeddings."""
        return self.host.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the host's token embeddings."""
        self.host.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Return the host's head."""
        return self.host.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the host's head."""
        self.host.set_output_embeddings(new_embeddings)

    def get_decoder(self) -> nn.Module:
        """Return the host's base model."""
        return self.host.get_decoder()

    def stream_status(self) -> dict[str, Any]:
        """Return what is attached where: family, fingerprint, and for each stream its type, sites, parameters, step, gradients."""
        streams = {
            name: {
                "type": stream.type_name,
                "config": stream.to_config(),
                "sites": [f"{site}:{layer}" if layer >= 0 else site for site, layer in stream.write_sites()],
                "parameters": sum(p.numel() for p in stream.parameters()),
                "trainable": all(p.requires_grad for p in stream.parameters()),
                "step": int(stream.step),
                "enabled": self.streams_enabled,
            }
            for name, stream in self.wires.streams.items()
        }
        return {
            "host": {
                "model_type": self.host.config.model_type,
                "name": self.config.host_name,
                "fingerprint": self.config.host_fingerprint,
                "parameters": sum(p.numel() for p in self.host.parameters()),
                "trainable": any(p.requires_grad for p in self.host.parameters()),
                "positions": self.config.positions or {"scheme": "as the host"},
            },
            "streams": streams,
            "hooks": sum(len(hooks) for hooks in self._hooks.values()),
        }


def _mark_initialized(host: nn.Module) -> None:
    """Tell transformers that these weights are to be kept: building a model around them must not initialise them again."""
    for module in host.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]


def _unless_all_attended(attention_mask: Tensor | None) -> Tensor | None:
    """Return None instead of a 2-D mask without padding: host and streams then do nothing for it.

    Only on a processor: elsewhere the look would wait for the device.
    """
    if attention_mask is None or attention_mask.dim() != 2 or attention_mask.device.type != "cpu":
        return attention_mask
    if torch.compiler.is_compiling():
        return attention_mask
    return None if bool(attention_mask.all()) else attention_mask


def _attended(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Return the [B, T] bool mask of this pass's tokens, from a mask that may also cover the past."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise KeelError(
            f"streams need a padding mask of shape [batch, tokens], got {list(attention_mask.shape)}; pass the 2-D mask, the host "
            "makes its own causal one"
        )
    return attention_mask[:, -length:].bool()


def _updated(update_mask: Tensor, num_past: int, length: int) -> Tensor:
    """Return the [B, T] bool part for this pass of a mask from the beginning of the row; what lies beyond it is True."""
    if update_mask.dim() != 2:
        raise KeelError(
            f"update_mask has shape {list(update_mask.shape)}; expected [batch, tokens], as the attention mask"
        )
    here_BT = update_mask[:, num_past : num_past + length].bool()
    return torch.nn.functional.pad(here_BT, (0, length - here_BT.shape[1]), value=True)


def _named_signals(results: Mapping[str, PassResult]) -> dict[str, Tensor]:
    return {f"{name}.{key}": signal for name, result in results.items() for key, signal in result.signals.items()}


AutoConfig.register("keel", KeelConfig)
AutoModelForCausalLM.register(KeelConfig, KeelForCausalLM)
