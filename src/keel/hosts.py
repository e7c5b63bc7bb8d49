"""Where one Hugging Face decoder can be read and written: one small table row a family.

A *site* is a named place in the host. Those between the first and the last two exist once a layer:

    embeddings, attention_norm_input, attention_input, attention_qk, attention_output, mlp_norm_input, final_norm_input,
    final_hidden

``attention_norm_input`` is what the block's own norm before attention reads, so a stream that adds to it (S-Former Eq. 6) leaves
the residual stream alone. A post-norm host (OLMo2) has no such norm: there the attention and the feed-forward read the raw
residual, and their own inputs are the site. ``attention_input`` is what the attention is given, in any host. ``attention_qk`` is
what queries and keys are projected from: a stream changes it for those two and not for the values (Eq. 4), also where one
projection makes all three.

Shapes: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from keel.errors import KeelError, suggest

LAYER_SITES = ("attention_norm_input", "attention_input", "attention_qk", "attention_output", "mlp_norm_input")
SITES = ("embeddings", *LAYER_SITES, "final_norm_input", "final_hidden")


@dataclass(frozen=True, kw_only=True)
class HostFamily:
    """Module names of one architecture, relative to its base model (``layers``, ``final_norm``) or to a layer.

    ``attention_input`` and ``mlp_input`` are the modules whose first input is the site of that name. ``attention`` is the
    attention module; ``query_key`` names the projections that queries and keys come from: two, or one that makes the values
    too. ``interleaved`` says that such a one gives query, key and value head by head, not all queries first.
    """

    layers: str = "layers"
    final_norm: str = "norm"
    attention: str = "self_attn"
    attention_input: str = "input_layernorm"
    mlp_input: str = "post_attention_layernorm"
    query_key: tuple[str, ...] = ("q_proj", "k_proj")
    interleaved: bool = False


_LLAMA = HostFamily()
_GEMMA = HostFamily(mlp_input="pre_feedforward_layernorm")
FAMILIES: dict[str, HostFamily] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": HostFamily(query_key=("qkv_proj",)),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmo2": HostFamily(attention_input="self_attn", mlp_input="mlp"),
    "gpt_neox": HostFamily(
        final_norm="final_layer_norm", attention="attention", query_key=("query_key_value",), interleaved=True
    ),
    "gpt2": HostFamily(
        layers="h", final_norm="ln_f", attention="attn", attention_input="ln_1", mlp_input="ln_2", query_key=("c_attn",)
    ),
}


@dataclass(frozen=True, kw_only=True)
class HostShape:
    """The sizes of a host that a stream is built for; ``head_size`` is ``hidden_size / num_heads`` unless it is given."""

    hidden_size: int
    num_layers: int
    num_heads: int = 1
    num_key_value_heads: int = 1
    head_size: int | None = None


def host_family(host: nn.Module) -> HostFamily:
    """Return the table row of ``host`` after checking that every module it names is there.

    Raises: KeelError for a PEFT-wrapped, quantised or unknown host, naming what is supported and what was looked for.
    """
    if hasattr(host, "peft_config"):
        raise KeelError(
            f"the host is wrapped by PEFT ({type(host).__name__}), and its plain weights are then not the host's: attach first, "
            "then get_peft_model(keel_model, LoraConfig(target_modules=[...])), or merge_and_unload() before attach"
        )
    if not isinstance(host, PreTrainedModel):
        raise KeelError(f"a host is a Hugging Face causal language model, got {type(host).__name__}")
    if getattr(host, "is_quantized", False) or getattr(host, "hf_quantizer", None) is not None:
        raise KeelError(
            "the host is quantised: its weights can be neither fingerprinted nor saved exactly; load it unquantised (dtype=torch.bfloat16)"
        )
    if host.get_output_embeddings() is None:
        raise KeelError(f"{type(host).__name__} has no language-model head: load it with AutoModelForCausalLM")
    family = FAMILIES.get(host.config.model_type)
    looked_for = family or _LLAMA
    missing = [name for name in _module_names(looked_for) if _find(host.base_model, name) is None]
    if family is None or missing:
        raise KeelError(
            f"unsupported host architecture {host.config.model_type!r} ({type(host).__name__}); supported: "
            f"{', '.join(sorted(FAMILIES))}; looked for modules {', '.join(_module_names(looked_for))} in its base model, "
            f"missing: {', '.join(missing) or 'none'}; add a row to keel.hosts.FAMILIES"
        )
    return family


def host_shape(config: PreTrainedConfig) -> HostShape:
    """Return the sizes of a host with this configuration that streams need."""
    return HostShape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )


class FusedProjection(NamedTuple):
    """How the output of one projection for query, key and value is laid out.

    It is ``groups`` equal parts, and of each the first ``query_key`` columns are query and key, the others value.
    """

    groups: int
    query_key: int


class SiteModule(NamedTuple):
    """A module at a site; the site is its output, its input, or (``fused``) its input as far as it makes query and key."""

    module: nn.Module
    is_input: bool = True
    fused: FusedProjection | None = None


def site_modules(host: PreTrainedModel, family: HostFamily, site: str, layer: int) -> list[SiteModule]:
    """Return the modules at a site: one, or two where query and key have projections of their own.

    ``layer`` is -1 outside the layers. ``embeddings`` has no module here: the model that owns the host reads and writes them
    before the host runs. Raises: KeelError for a name that is no site.
    """
    if site in ("final_norm_input", "final_hidden"):
        return [SiteModule(getattr(host.base_model, family.final_norm), site == "final_norm_input")]
    if site not in LAYER_SITES:
        raise KeelError(f"unknown site {site!r}; {suggest(site, SITES)}")
    block = getattr(host.base_model, family.layers)[layer]
    attention = getattr(block, family.attention)
    if site in ("attention_input", "attention_output"):
        return [SiteModule(attention, is_input=site == "attention_input")]
    if site == "attention_norm_input":
        return [SiteModule(getattr(block, family.attention_input))]
    if site == "mlp_norm_input":
        return [SiteModule(getattr(block, family.mlp_input))]
    fused = _fused_projection(host, family) if len(family.query_key) == 1 else None
    return [SiteModule(getattr(attention, name), fused=fused) for name in family.query_key]


@contextmanager
def rewritten_layer_input(
    host: PreTrainedModel, family: HostFamily, layer: int, rewrite: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Let a layer of ``host`` read ``rewrite(hidden_BTD)`` in place of its hidden states while the body runs."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (rewrite(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": rewrite(kwargs["hidden_states"])}

    handle = getattr(host.base_model, family.layers)[layer].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _fused_projection(host: PreTrainedModel, family: HostFamily) -> FusedProjection:
    config = host.config
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if family.interleaved:
        return FusedProjection(heads, 2 * width)
    return FusedProjection(1, (heads + (getattr(config, "num_key_value_heads", None) or heads)) * width)


def logits_from_hidden(host: PreTrainedModel, hidden_BTD: Tensor) -> Tensor:
    """Apply the host's head to final hidden states, with the final soft-capping of the Gemma family.

    Returns: [B, T, V] logits, equal to the host's own.
    """
    logits_BTV = host.get_output_embeddings()(hidden_BTD)
    cap = getattr(host.config, "final_logit_softcapping", None)
    return logits_BTV if cap is None else torch.tanh(logits_BTV / cap) * cap


def fingerprint(host: PreTrainedModel) -> str:
    """Return a short hash of the host's weights that survives a change of dtype.

    Every parameter contributes its name, its shape and up to 1,024 evenly spaced values rounded to bfloat16, so that the same
    checkpoint loaded in float32 and in bfloat16 agrees, and one fine-tuned elsewhere differs. It is a sample and no proof.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(host.named_parameters(), key=lambda item: item[0]):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        flat = parameter.detach().reshape(-1)
        stride = max(1, flat.numel() // 1024)
        digest.update(flat[::stride].to(torch.bfloat16).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _module_names(family: HostFamily) -> list[str]:
    inside = [
        family.attention_input,
        family.mlp_input,
        family.attention,
        *(f"{family.attention}.{n}" for n in family.query_key),
    ]
    return [family.final_norm, *dict.fromkeys(f"{family.layers}.0.{name}" for name in inside)]


def _find(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None) if not name.isdigit() else root[int(name)] if len(root) else None
        if root is None:
            return None
    return root
