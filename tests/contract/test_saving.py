"""Whatever is saved comes back equal, from files that hold nothing but tensors and text."""

from __future__ import annotations

from pathlib import Path

import torch
from cases import Case, every_case, perturb, spread_cases, tokens
from transformers import AutoModelForCausalLM

import keel

LENGTH = 11


def _aligned(model: keel.KeelForCausalLM) -> keel.KeelForCausalLM:
    """Move weights from a file, which lie at any address there: the processor sums unaligned ones in another order."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _same_output(found: keel.KeelForCausalLM, model: keel.KeelForCausalLM) -> None:
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(found(ids).logits, expected)
        assert not torch.allclose(perturb(found, seed=9)(ids).logits, expected, atol=1e-2)


def _only_plain_files(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names and all(name.endswith((".safetensors", ".json")) for name in names), names


@every_case
def test_a_whole_model_comes_back_equal(case: Case, tmp_path: Path) -> None:
    model = case.model()
    with torch.no_grad():
        for parameter in model.host.parameters():  # as after training of the whole
            parameter.mul_(1.01)
    model.save_pretrained(tmp_path)
    _only_plain_files(tmp_path)
    found = _aligned(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert isinstance(found, keel.KeelForCausalLM) and not found.training
    expected = model.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    assert found.stream_status()["streams"] == model.stream_status()["streams"]
    _same_output(found, model)


@every_case
def test_streams_alone_come_back_equal_beside_the_same_host(case: Case, tmp_path: Path) -> None:
    model = case.model()
    model.save_streams(tmp_path)
    _only_plain_files(tmp_path)
    host_bytes = sum(p.numel() * p.element_size() for p in model.host.parameters())
    stream_bytes = sum(p.numel() * p.element_size() for p in model.streams.parameters())
    assert stream_bytes <= (tmp_path / "streams.safetensors").stat().st_size < stream_bytes + host_bytes // 2
    _same_output(_aligned(keel.load(tmp_path, backbone=case.host())), model)


@spread_cases
def test_a_loaded_model_can_be_saved_trained_and_detached(case: Case, tmp_path: Path) -> None:
    ids = tokens(2, LENGTH)
    case.model().save_pretrained(tmp_path / "first")
    found = _aligned(keel.load(tmp_path / "first")).train()
    found(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in found.streams.parameters())
    found.eval().save_pretrained(tmp_path / "second")
    _same_output(_aligned(keel.load(tmp_path / "second")), found)
    with torch.no_grad():
        assert torch.equal(found.detach()(ids).logits, case.host()(ids).logits)


@spread_cases
def test_bf16_comes_back_bf16(case: Case, tmp_path: Path) -> None:
    case.model().save_pretrained(tmp_path / "float32")
    model = _aligned(AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "bfloat16")
    found = _aligned(keel.load(tmp_path / "bfloat16"))
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    _same_output(found, model)
