"""Checkpoints that are truncated, half-written, of another version or another host are refused, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import keel
from keel.errors import KeelError
from keel.files import write_atomically
from keel.storage import SCHEMA, is_streams_folder, load_streams

IDS = torch.tensor([[3, 1, 4, 1, 5]])


def _host(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, num_key_value_heads=1, initializer_range=0.2, **sizes)).eval()


def _model(seed: int = 0) -> keel.KeelForCausalLM:
    model = keel.attach(_host(), keel.StructuralStream())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.streams.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def _logits(model: keel.KeelForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Streams that were saved alone."""
    _model().save_streams(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A whole checkpoint."""
    _model().save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 255
    path.write_bytes(content)


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated weights": (lambda d: _truncate(d / "streams.safetensors"), "truncated or damaged"),
    "one flipped byte": (lambda d: _flip(d / "streams.safetensors"), "truncated or damaged"),
    "empty weights": (lambda d: (d / "streams.safetensors").write_bytes(b""), "truncated or damaged"),
    "no weights": (lambda d: (d / "streams.safetensors").unlink(), "holds no streams"),
    "no description": (lambda d: (d / "streams.json").unlink(), "holds no streams"),
    "truncated description": (lambda d: _truncate(d / "streams.json"), r"streams\.json is damaged"),
    "binary description": (lambda d: (d / "streams.json").write_bytes(b"\xff\xfe\x00"), r"streams\.json is damaged"),
    "another description": (lambda d: (d / "streams.json").write_text("[1]"), "has schema None"),
    "other version": (
        lambda d: _edit(d / "streams.json", lambda m: m.update(schema="keel.streams/9")),
        "keel.streams/9",
    ),
    "missing field": (lambda d: _edit(d / "streams.json", lambda m: m.pop("host_fingerprint")), "'host_fingerprint'"),
    "misspelt option": (
        lambda d: _edit(d / "streams.json", lambda m: m["streams"]["structural"].update(celll="gru")),
        "did you mean 'cell'",
    ),
    "unknown stream": (
        lambda d: _edit(d / "streams.json", lambda m: m["streams"]["structural"].update(type="structure")),
        "did you mean 'structural'",
    ),
    "other shape": (
        lambda d: _edit(d / "streams.json", lambda m: m["streams"]["structural"].update(gate="channel")),
        "do not fit the streams' configuration: structural.gate_bias",
    ),
    "other parameters": (
        lambda d: _edit(d / "streams.json", lambda m: m["streams"]["structural"].update(cell="scan")),
        "do not fit the streams' configuration: structural.bias_",
    ),
    "nothing there": (shutil.rmtree, "holds no streams"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_streams_are_refused_in_one_line(saved: Path, damage: str) -> None:
    assert torch.equal(_logits(keel.load(saved, backbone=_host())), _logits(_model()))
    harm, message = DAMAGES[damage]
    harm(saved)
    with pytest.raises(KeelError, match=message) as caught:
        keel.load(saved, backbone=_host())
    assert "\n" not in str(caught.value)


def test_a_backbone_stays_usable_after_a_refusal(saved: Path) -> None:
    host = _host()
    with torch.no_grad():
        expected = host(IDS).logits
    _edit(saved / "streams.json", lambda m: m["streams"]["structural"].update(cell="scan"))
    with pytest.raises(KeelError, match="do not fit"):
        keel.load(saved, backbone=host)
    with torch.no_grad():
        assert torch.equal(host(IDS).logits, expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in host.modules())
    assert torch.equal(_logits(keel.attach(host, keel.StructuralStream())), expected)


def test_another_host_is_refused_and_named(saved: Path) -> None:
    with pytest.raises(KeelError, match=r"made for host .* with fingerprint .* has .*; load the same checkpoint"):
        keel.load(saved, backbone=_host(seed=1))


def test_streams_without_their_host_ask_for_it(saved: Path) -> None:
    with pytest.raises(KeelError, match="backbone=host"):
        keel.load(saved)


def test_a_host_trained_since_attach_is_not_lost_silently(tmp_path: Path) -> None:
    model = _model()
    with torch.no_grad():
        model.host.lm_head.weight.mul_(1.5)
    with pytest.raises(KeelError, match="use save_pretrained"):
        model.save_streams(tmp_path / "streams")
    assert not (tmp_path / "streams").exists()
    model.save_pretrained(tmp_path / "whole")
    torch.testing.assert_close(_logits(keel.load(tmp_path / "whole")), _logits(model))


WHOLE_DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated weights": (lambda d: _truncate(d / "model.safetensors"), "damaged or truncated"),
    "empty weights": (lambda d: (d / "model.safetensors").write_bytes(b""), "damaged or truncated"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"model\.safetensors"),
    "no configuration": (lambda d: (d / "config.json").unlink(), r"whole says no host .*config\.json is missing"),
    "truncated configuration": (lambda d: _truncate(d / "config.json"), r"config\.json"),
    "misspelt option": (
        lambda d: _edit(d / "config.json", lambda m: m["streams"]["structural"].update(celll="gru")),
        "did you mean 'cell'",
    ),
    "other parameters": (
        lambda d: _edit(d / "config.json", lambda m: m["streams"]["structural"].update(cell="scan")),
        "does not fit its configuration",
    ),
    "more layers": (
        lambda d: _edit(d / "config.json", lambda m: m["text_config"].update(num_hidden_layers=2)),
        "does not fit its configuration",
    ),
    "other host": (
        lambda d: (d / "model.safetensors").write_bytes(_other_weights(d)),
        "the host's weights are not those that were saved",
    ),
    "nothing there": (shutil.rmtree, "holds no whole checkpoint"),
}


def test_a_bare_hosts_checkpoint_is_no_checkpoint_of_keel(tmp_path: Path) -> None:
    _host().save_pretrained(tmp_path)
    with pytest.raises(KeelError, match=r"of another kind of model; put streams beside a bare host with keel\.attach"):
        keel.load(tmp_path)


def _other_weights(folder: Path) -> bytes:
    model = keel.load(folder)
    with torch.no_grad():
        for parameter in model.host.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(folder / "other")
    return (folder / "other" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("damage", WHOLE_DAMAGES)
def test_damaged_whole_checkpoints_are_refused_in_one_line(whole: Path, damage: str) -> None:
    torch.testing.assert_close(_logits(keel.load(whole)), _logits(_model()))
    harm, message = WHOLE_DAMAGES[damage]
    harm(whole)
    with pytest.raises(KeelError, match=message) as caught:
        keel.load(whole)
    assert "\n" not in str(caught.value)


class FullDisk:
    """A disk that is full after so many writes of bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
        self.left = writes
        fsync = os.fsync

        def full(descriptor: int) -> None:
            if self.left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.left -= 1
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", full)


@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_loses_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert len(before) == 2
    changed = _model(seed=5)
    with monkeypatch.context() as patch:
        FullDisk(patch, writes)
        with pytest.raises(KeelError, match="No space left on device; what was there before is intact"):
            changed.save_streams(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert torch.equal(_logits(keel.load(saved, backbone=_host())), _logits(_model()))
    changed.save_streams(saved)
    assert torch.equal(_logits(keel.load(saved, backbone=_host())), _logits(changed))


def test_a_full_disk_is_named_when_the_whole_is_saved(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(KeelError, match=r"cannot write the checkpoint .*No space left on device"):
        _model().save_pretrained(whole)


@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_leaves_no_half_written_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    FullDisk(monkeypatch, writes)
    with pytest.raises(KeelError, match="No space left on device"):
        _model().save_streams(tmp_path / "new")
    assert not is_streams_folder(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(KeelError, match="holds no streams"):
        load_streams(tmp_path / "new")


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs but what the operating system keeps."""


def _dead(*args: object, **kwargs: object) -> None:
    raise OSError("no process is there to do this")


@pytest.mark.parametrize("replaced", [0, 1])
def test_what_a_killed_process_half_wrote_is_never_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch, replaced: int
) -> None:
    names, replace = [], os.replace

    def killed(source: Path, target: Path) -> None:
        if len(names) == replaced:
            raise Killed
        names.append(Path(target).name)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(Path, "unlink", _dead)  # a killed process tidies nothing up
        with pytest.raises(Killed):
            _model(seed=5).save_streams(saved)
    assert any(path.suffix == ".partial" for path in saved.iterdir())
    if replaced == 0:
        assert torch.equal(_logits(keel.load(saved, backbone=_host())), _logits(_model()))
    else:
        with pytest.raises(KeelError, match="truncated or damaged"):
            keel.load(saved, backbone=_host())
    _model(seed=5).save_streams(saved)
    assert torch.equal(_logits(keel.load(saved, backbone=_host())), _logits(_model(seed=5)))
    whole = sorted(path.name for path in saved.iterdir() if path.suffix != ".partial")
    assert whole == ["streams.json", "streams.safetensors"]


def test_the_description_says_what_it_is(saved: Path) -> None:
    meta, weights = load_streams(saved)
    model = _model()
    assert meta["schema"] == SCHEMA
    assert meta["streams"]["structural"]["type"] == "structural"
    assert meta["host_fingerprint"] == model.config.host_fingerprint
    assert weights.keys() == model.streams.state_dict().keys()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(KeelError, match=r"cannot write .*file/streams\.safetensors"):
        _model().save_streams(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_atomic_writing_replaces_and_makes_folders(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b.bin"
    for content in (b"first", b"second and longer"):
        write_atomically(target, content)
        assert target.read_bytes() == content
    assert os.listdir(target.parent) == ["b.bin"]
