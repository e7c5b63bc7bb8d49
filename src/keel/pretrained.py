"""Checkpoints as people name them, a folder or a name on the Hub: safetensors only, never code that came with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from keel.errors import KeelError, suggest
from keel.hosts import FAMILIES
from keel.model import KeelForCausalLM
from keel.storage import is_streams_folder
from keel.streams import DynamicStateStream
from keel.streams.dynamic_state import open_telemetry


def load_config(checkpoint: str) -> PreTrainedConfig:
    """Return the configuration of a checkpoint.  Raises: KeelError when there is none, or it names code of its own."""
    _check_folder(checkpoint)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise KeelError(
            f"checkpoint {checkpoint}: no usable config.json ({_first_line(error)}); check the name or the folder"
        ) from error
    return config


def check_host(checkpoint: str) -> PreTrainedConfig:
    """Return the configuration of a bare host of a supported family.

    Raises: KeelError for a missing checkpoint, an unsupported architecture, a quantised host, or a Keel checkpoint.
    """
    config = load_config(checkpoint)
    if config.model_type == "keel":
        raise KeelError(f"checkpoint {checkpoint} already has streams; give the bare host that they were attached to")
    if config.model_type not in FAMILIES:
        raise KeelError(
            f"checkpoint {checkpoint}: architecture {config.model_type!r} is not supported; "
            + suggest(config.model_type, FAMILIES)
        )
    if getattr(config, "quantization_config", None):
        raise KeelError(
            f"checkpoint {checkpoint} is quantised and cannot be fine-tuned; give the checkpoint it was made from"
        )
    return config


def load_model(checkpoint: str) -> PreTrainedModel:
    """Load what can generate: a whole Keel checkpoint, or a bare host of any architecture that transformers itself has.

    Raises: KeelError for a missing, damaged or incomplete checkpoint, or streams saved without their host.
    """
    if is_streams_folder(Path(checkpoint)):
        raise KeelError(f"{checkpoint} holds streams alone; in Python: keel.load({checkpoint!r}, backbone=host)")
    if load_config(checkpoint).model_type != "keel":
        return _load_bare(checkpoint)
    try:
        model: PreTrainedModel = KeelForCausalLM.from_pretrained(checkpoint)
    except (OSError, RuntimeError) as error:
        raise _unloadable(checkpoint, error) from error
    return model


def load_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside a checkpoint.  Raises: KeelError when there is none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except Exception as error:  # the libraries raise many kinds here, down to bare Exception
        raise KeelError(
            f"checkpoint {checkpoint}: no tokenizer beside the model ({_first_line(error)}); save one there "
            "with save_pretrained"
        ) from error
    return tokenizer


def continue_text(
    checkpoint: str,
    prompt: str,
    *,
    device: str | None = None,
    seed: int = 0,
    safeguards: bool = False,
    telemetry: str | None = None,
    **options: Any,
) -> str:
    """Return ``prompt`` and what the checkpoint writes after it.

    Args:
        device: a torch device, None for the GPU where there is one.
        seed: of the draw, where ``options`` ask for one, and of simulated telemetry.
        safeguards, telemetry: see ``dynamic_state_as``.
        options: of ``generate``, such as ``max_new_tokens``, ``num_beams``, ``do_sample``.
    Raises: KeelError for a checkpoint that cannot be loaded, or a prompt without a token.
    """
    model, tokenizer, inputs, options = open_continuation(checkpoint, prompt, device=device, options=options)
    num_tokens = inputs["input_ids"].shape[1] + options.get("max_new_tokens", 0)
    with dynamic_state_as(model, num_tokens, safeguards=safeguards, telemetry=telemetry, seed=seed):
        torch.manual_seed(seed)
        ids_BT = model.generate(**inputs, **options)
    text: str = tokenizer.decode(ids_BT[0], skip_special_tokens=True)
    return text


@contextmanager
def dynamic_state_as(
    model: PreTrainedModel, num_tokens: int, *, safeguards: bool = False, telemetry: str | None = None, seed: int = 0
) -> Iterator[None]:
    """Run the body with the model's dynamic state path under safeguards, or reading another telemetry; then as it was.

    Args:
        num_tokens: how many a simulated trace lasts.
        safeguards: turn on those with default thresholds, where the path has none of its own.
        telemetry: see ``keel.streams.dynamic_state.open_telemetry``; None leaves the path's.
        seed: of simulated telemetry.
    Raises: KeelError for a model without such a path, where either is asked for, or telemetry that is not there.
    """
    if not safeguards and telemetry is None:
        yield
        return
    found = model.wires.first(DynamicStateStream) if isinstance(model, KeelForCausalLM) else None
    if found is None:
        wanted = "safeguards" if safeguards else "telemetry"
        raise KeelError(f"{wanted}: the checkpoint has no dynamic state path; give one that was trained with it")
    stream = found[1]
    config, source = stream.config, stream.telemetry
    if telemetry is not None:
        stream.telemetry = open_telemetry(telemetry, num_tokens, seed=seed)
    if safeguards and config.safeguards is None:
        stream.guard()
    try:
        yield
    finally:
        stream.telemetry.close()
        stream.config, stream.telemetry = config, source


def open_continuation(
    checkpoint: str, prompt: str, *, device: str | None, options: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Any, dict[str, Any]]:
    """Return model, tokenizer, the prompt's inputs and the options with which ``generate`` continues it; see ``continue_text``."""
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(place)
    if inputs["input_ids"].shape[1] == 0:
        raise KeelError(f"prompt {prompt!r} has no token; give some text to continue")
    if tokenizer.pad_token_id is None:
        options = {**options, "pad_token_id": tokenizer.eos_token_id}
    return model.to(place).eval(), tokenizer, inputs, options


def _load_bare(checkpoint: str) -> PreTrainedModel:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint, output_loading_info=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _unloadable(checkpoint, error) from error
    if info["missing_keys"]:
        absent = sorted(info["missing_keys"])
        raise KeelError(
            f"checkpoint {checkpoint}: {len(absent)} weights are missing, {absent[0]!r} the first; copy it anew"
        )
    loaded: PreTrainedModel = model
    return loaded


def _check_folder(checkpoint: str) -> None:
    path = Path(checkpoint)
    if path.is_dir() and not (path / "config.json").is_file():
        raise KeelError(
            f"checkpoint {checkpoint}: the folder has no config.json; give the folder that save_pretrained wrote"
        )
    if path.is_file():
        raise KeelError(
            f"checkpoint {checkpoint} is a file; give the folder that holds it, with config.json and *.safetensors"
        )
    if not path.exists() and (checkpoint.count("/") > 1 or checkpoint.startswith(("/", ".", "~"))):
        raise KeelError(
            f"checkpoint {checkpoint} does not exist; give a folder, or a name on the Hub such as Qwen/Qwen2.5-0.5B"
        )


def _unloadable(checkpoint: str, error: Exception) -> KeelError:
    if isinstance(error, KeelError):
        return error
    return KeelError(
        f"checkpoint {checkpoint}: the weights cannot be loaded ({_first_line(error)}); whole safetensors "
        "files are expected"
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
