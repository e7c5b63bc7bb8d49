"""A decoding step in onnxruntime is the model's own, for 200 tokens, from Python and from the program beside the file.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, PreTrainedModel

import keel
from keel import cli
from keel.cache import signals_of
from keel.errors import KeelError
from keel.export import DecodingStep, export_onnx, onnx
from keel.export.runner import Step
from keel.streams.dynamic_state import Mode

VOCABULARY, LENGTH, TOLERANCE = 96, 200, 1e-4
SIZES: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                             max_position_embeddings=256, initializer_range=0.15, pad_token_id=0,
                             bos_token_id=None, eos_token_id=None)  # fmt: skip
# Thresholds that random weights cross now and then: rows go into safe mode and come back.
LIMITS = {
    "coherence_least": 0.9, "noise_most": 100.0, "alignment_least": 0.01, "patience": 3, "cooldown": 2, "change_most": 3.0,
    "instability_most": 0.7,
}  # fmt: skip


def make_host(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gpt2":
        return AutoModelForCausalLM.from_config(GPT2Config(**SIZES, n_inner=48)).eval()
    if kind == "mistral":
        return AutoModelForCausalLM.from_config(
            MistralConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, sliding_window=4)
        ).eval()
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2)).eval()


def make_model(kind: str) -> Any:
    """GPT-2 with a guarded dynamic state path; Llama with one that is not but reads turbulence, after a structural one."""
    dynamic: dict[str, Any] = {"state_size": 8, "retention": 0.3, "noise_floor": 0.02}
    streams = {
        "gpt2": {"dynamic_state": keel.DynamicStateStream(**dynamic, safeguards=LIMITS)},
        "llama": {
            "structural": keel.StructuralStream(cell="gru"),
            "dynamic_state": keel.DynamicStateStream(**dynamic, turbulence=3),
        },
    }
    model = keel.attach(make_host(kind), streams[kind]).eval()
    with torch.no_grad():
        for parameter in model.streams.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


class Exported(NamedTuple):
    model: Any
    file: Path


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    model = make_model(request.param)
    file = tmp_path_factory.mktemp(request.param) / "model.onnx"
    assert [path.name for path in export_onnx(model, file)] == ["model.onnx", "model.json", "model.py"]
    return Exported(model, file)


def decoded(model: Any, ids_BT: Tensor) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits [B, T, V] and signals of the model itself, token by token with its cache."""
    rows, cache = [], None
    with torch.no_grad():
        for t in range(ids_BT.shape[1]):
            output = model(ids_BT[:, t : t + 1], past_key_values=cache, use_cache=True, collect_signals=True)
            cache = output.past_key_values
            rows.append(output.logits[:, -1])
    return torch.stack(rows, 1).numpy(), {name: signal.numpy() for name, signal in signals_of(cache).items()}


@pytest.mark.parametrize("batch", [1, 2])
def test_two_hundred_tokens_are_those_of_the_model(exported: Exported, batch: int) -> None:
    ids_BT = torch.randint(0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(batch))
    logits_BTV, expected = decoded(exported.model, ids_BT)
    step = Step(exported.file)
    step.reset(batch)
    modes = []
    for t in range(LENGTH):
        logits_BV, signals = step(ids_BT[:, t : t + 1].numpy())
        assert np.abs(logits_BV - logits_BTV[:, t]).max() < TOLERANCE
        assert signals.keys() == expected.keys()
        for name, signal in signals.items():
            assert np.allclose(signal, expected[name][:, t], rtol=1e-3, atol=1e-3), name
        modes.append(signals.get("dynamic_state.governor"))
    if exported.model.host.config.model_type == "gpt2":
        assert {Mode.ACTIVE, Mode.SAFE, Mode.COOL_DOWN} <= set(np.concatenate(modes).astype(int).tolist())


def test_the_command_writes_what_runs_as_the_checkpoint_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = make_model("gpt2"), tmp_path / "exported" / "model.onnx"
    model.save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(tmp_path / "checkpoint"), "--onnx", str(file)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == [str(file.with_suffix(end)) for end in (".onnx", ".json", ".py")]
    ids_BT = torch.randint(0, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(3))
    logits_BTV, _ = decoded(model, ids_BT)
    step = Step(file)
    for t in range(20):
        assert np.abs(step(ids_BT[:, t : t + 1].numpy())[0] - logits_BTV[:, t]).max() < TOLERANCE
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(tmp_path / "checkpoint"), "--onnx", str(tmp_path / "model.pt")])
    assert ended.value.code == cli.BAD_INPUT and "does not end in .onnx" in capsys.readouterr().err


def test_telemetry_is_an_input(exported: Exported) -> None:
    step = Step(exported.file)
    substrates = []
    for distress in (0.0, 1.0):
        step.telemetry[:] = distress
        substrates.append(step(np.array([[5]]))[1]["dynamic_state.substrate"].item())
    assert substrates[0] > 0.99 and substrates[1] < 0.01


def test_the_program_beside_the_file_runs_alone(exported: Exported) -> None:
    prompt = [5, 17, 3]
    words = [sys.executable, "-S", "-c", ALONE, str(exported.file.with_suffix(".py"))]
    words += ["--tokens", ",".join(map(str, prompt)), "--new", str(LENGTH - len(prompt)), "--signals"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    *lines, ids = ended.stdout.splitlines()
    read = [int(word) for word in ids.split(",")]
    assert len(read) == LENGTH and read[:3] == prompt
    ids_1T = torch.tensor([read])
    logits_1TV, expected = decoded(exported.model, ids_1T[:, :-1])
    # The likeliest token of the model too, but for ties within the tolerance.
    chosen_T = np.take_along_axis(logits_1TV[0, 2:], ids_1T[0, 3:, None].numpy(), -1)[:, 0]
    assert (logits_1TV[0, 2:].max(-1) - chosen_T < 2 * TOLERANCE).all()
    written = [json.loads(line) for line in lines]
    assert [line["token"] for line in written] == read[:-1]
    assert [line["dynamic_state.coherence"] for line in written] == pytest.approx(
        expected["dynamic_state.coherence"][0].tolist(), abs=1e-3
    )


# The program, with torch and Keel out of its reach.
ALONE = f"""
import runpy, sys
sys.path += {[path for path in sys.path if path.endswith("site-packages")]!r}
for name in ("torch", "keel", "transformers", "onnx"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_description_names_what_replaces_what(exported: Exported) -> None:
    told = json.loads(exported.file.with_suffix(".json").read_text(encoding="utf-8"))
    inputs = {port["name"]: port for port in told["inputs"]}
    assert inputs["past.0.value"]["shape"][0::2] == ["batch", "past"]
    assert inputs["past.0.value"]["after"] == "new.past.0.value" in told["outputs"]
    assert inputs["state.dynamic_state.s"] == {
        "name": "state.dynamic_state.s", "shape": ["batch", 8], "after": "new.state.dynamic_state.s", "dtype": "float32",
    }  # fmt: skip
    assert inputs["telemetry"]["shape"] == [6] and inputs["telemetry"]["after"] is None
    assert told["streams"]["dynamic_state"]["state_size"] == 8
    carried = [port["after"] for port in told["inputs"] if port["after"] is not None]
    assert told["outputs"][0] == "logits" and told["outputs"][-len(carried) :] == carried


def test_an_export_leaves_the_model_as_it_was(exported: Exported) -> None:
    model = exported.model
    assert model.host.config._attn_implementation == "sdpa"
    assert type(model.streams["dynamic_state"].telemetry).__name__ == "ConstantTelemetry"


def test_a_step_of_a_bare_host_sees_as_far_as_its_window() -> None:
    """In torch, without the file: keys and values are all kept, and the mask has the window."""
    host = make_host("mistral")
    ids_BT = torch.randint(0, VOCABULARY, (2, 12))
    with torch.no_grad():
        expected_BTV = host(ids_BT).logits
        host.set_attn_implementation("eager")
        step = DecodingStep(host)
        carried = step.beginning(batch=2)
        for t in range(12):
            logits_BV, *carried = step(ids_BT[:, t : t + 1], carried)
            assert torch.allclose(logits_BV, expected_BTV[:, t], atol=1e-5)
    assert carried[0].shape == (2, 2, 12, 8)


def refused(model: Any, file: str = "model.onnx") -> str:
    with pytest.raises(KeelError) as raised:
        export_onnx(model, Path(file))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_cannot_be_exported_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "stream 'margin'" in refused(keel.attach(make_host("gpt2"), keel.MarginPrior(rank=8)))
    assert "bfloat16" in refused(make_host("llama").bfloat16())
    assert "does not end in .onnx" in refused(make_host("llama"), "model.bin")
    monkeypatch.setattr(onnx.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'keel[onnx]'" in refused(make_host("llama"))
