"""``keel export``: a decoding step as an ONNX file, with what a program needs to run it beside it.

model.onnx     the step (weights beyond 1.5 GB in model.onnx.data)
model.json     names and shapes of what goes in and comes out, and what replaces what at the next token
model.py       a program that needs numpy and onnxruntime alone, and runs the two
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from keel.errors import KeelError
from keel.export.step import DecodingStep
from keel.files import write_atomically
from keel.model import KeelForCausalLM

INLINE_BYTES = 1_500_000_000  # an ONNX file is a protocol buffer, and those end at 2 GB
NEEDED = ("onnx", "onnxscript")
FORMAT = "keel-onnx-step-1"


def export_onnx(model: PreTrainedModel, file: str | Path) -> list[Path]:
    """Write one step of a host, bare or with streams, as ``file`` (.onnx), with its description and a program beside it.

    Batch and past are free axes; keys, values, every stream's state and the telemetry are inputs, and what follows them outputs.
    Attention runs unfused (``eager``) in the exported graph; the model is left as it was.

    Returns: the files written.  Raises: KeelError where packages are missing, or for what cannot be exported.
    """
    file = Path(file)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise KeelError(f"export: {' and '.join(missing)} not installed; run: pip install 'keel[onnx]'")
    if file.suffix != ".onnx":
        raise KeelError(f"export: {file} does not end in .onnx; give a name such as model.onnx")
    host = model.host if isinstance(model, KeelForCausalLM) else model
    training, attention = model.training, host.config._attn_implementation
    host.set_attn_implementation("eager")
    try:
        step = DecodingStep(model)
        _write(step, file)
    finally:
        host.set_attn_implementation(attention)
        model.train(training)
    description, program = file.with_suffix(".json"), file.with_suffix(".py")
    write_atomically(description, (json.dumps(describe(step), indent=1) + "\n").encode())
    shutil.copyfile(Path(__file__).with_name("runner.py"), program)
    data = file.with_name(file.name + ".data")
    return [file, *([data] if data.exists() else []), description, program]


def describe(step: DecodingStep) -> dict[str, Any]:
    """Return names, shapes and the beginning of a step as JSON-able values."""
    config = step.host.config
    return {
        "format": FORMAT,
        "host": config.model_type,
        "streams": {name: stream.to_config() for name, stream in step.streams.items()},
        "vocabulary": config.vocab_size,
        "beginning": "every input but input_ids is zeros, with past = 0",
        "inputs": [asdict(port) for port in step.inputs],
        "outputs": step.outputs,
    }


def _write(step: DecodingStep, file: Path) -> None:
    example = [port.zeros({"batch": 2, "past": 3}) for port in step.inputs]
    axes = {"batch": torch.export.Dim.DYNAMIC, "past": torch.export.Dim.DYNAMIC}
    free = [{i: axes[size] for i, size in enumerate(port.shape) if isinstance(size, str)} for port in step.inputs]
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in step.parameters())
    file.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            step, (example[0], example[1:]), file, dynamo=True, external_data=nbytes > INLINE_BYTES, verbose=False,
            input_names=[port.name for port in step.inputs], output_names=step.outputs,
            dynamic_shapes=(free[0], free[1:]),
        )  # fmt: skip
