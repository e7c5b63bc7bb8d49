"""Signals while a text is written: what is shown, as a picture, as lines and as JSON, is what the model's passes give.

Shapes: B batch (1), S tokens read.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import keel
from keel import cli
from keel.errors import KeelError
from keel.pretrained import continue_text, dynamic_state_as, load_model
from keel.streams.dynamic_state import Mode, SafeguardConfig, TraceTelemetry
from keel.streams.dynamic_state.telemetry import FEATURES
from keel.watching import LETTERS, NOT_A_NUMBER, Record, continue_with_signals, curve, line, picture

WORDS = [
    "nothing",
    "tide",
    "keel",
    "mast",
    "anchor",
    "rope",
    "deck",
    "harbour",
    "wind",
    "sail",
    "stone",
    "river",
    "light",
]
PROMPT, NEW = "tide keel mast", 12
SAFEGUARDS = {
    "coherence_least": 0.9, "noise_most": 100.0, "alignment_least": 0.01, "patience": 3, "cooldown": 2, "instability_most": 0.7,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="nothing"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="nothing", pad_token="nothing")


@pytest.fixture(scope="module")
def save(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    def saved(*streams: Any) -> str:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            initializer_range=0.5, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model: Any = AutoModelForCausalLM.from_config(config)
        if streams:
            model = keel.attach(model, streams[0])
            with torch.no_grad():
                for parameter in model.streams.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return saved


@pytest.fixture(scope="module")
def guarded(save: Callable[..., str]) -> str:
    return save(keel.DynamicStateStream(state_size=8, retention=0.3, noise_floor=0.02, safeguards=SAFEGUARDS))


def test_the_file_holds_the_signals_of_one_pass_over_the_text(guarded: str, tmp_path: Path) -> None:
    file = tmp_path / "signals.json"
    text = continue_with_signals(guarded, PROMPT, console=None, file=file, device="cpu", max_new_tokens=NEW)
    assert text == continue_text(guarded, PROMPT, device="cpu", max_new_tokens=NEW)
    told = json.loads(file.read_text(encoding="utf-8"))
    assert told["text"] == text and text.startswith(PROMPT)
    assert len(told["ids"]) == len(PROMPT.split()) + NEW - 1, "nobody has read the last token"
    with torch.no_grad():
        signals = keel.load(guarded).eval()(torch.tensor([told["ids"]]), collect_signals=True).signals
    for name in ("coherence", "alignment", "noise", "continuity", "substrate", "update", "change"):
        assert told["signals"][f"dynamic_state.{name}"] == pytest.approx(
            signals[f"dynamic_state.{name}"][0].tolist(), abs=1e-5
        )
    names = {Mode.ACTIVE: "active", Mode.SAFE: "safe mode", Mode.COOL_DOWN: "cool-down"}
    modes = [names[Mode(int(mode))] for mode in signals["dynamic_state.governor"][0].tolist()]
    assert told["governor"] == modes and len(set(modes)) > 1
    assert [len(names) for names in told["failures"]] == signals["dynamic_state.failures"][0].sum(-1).tolist()


def test_outside_a_terminal_each_token_is_a_line(
    guarded: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "signals.json"
    words = ["generate", guarded, PROMPT, "--max-new-tokens", str(NEW), "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--signals", "--signals-out", str(file)])
    assert ended.value.code == 0
    told = json.loads(file.read_text(encoding="utf-8"))
    *lines, nothing, text = capsys.readouterr().out.splitlines()
    assert nothing == "" and text == told["text"] and len(lines) == len(told["ids"])
    for index, shown in enumerate(lines):
        assert f"I {told['signals']['dynamic_state.coherence'][index]:.4f}  C " in shown
        assert f"governor {told['governor'][index]}" in shown
        assert json.dumps(told["pieces"][index]) in shown


def test_a_terminal_gets_curves_the_governor_and_the_text(guarded: str) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system="standard")
    continue_with_signals(guarded, PROMPT, console=console, device="cpu", max_new_tokens=NEW)
    shown = screen.getvalue()
    for name in (*LETTERS, "update", "governor", "failures", *PROMPT.split()):
        assert name in shown
    assert "▁" in shown and "█" in shown and "\x1b[4;31m" in shown, "tokens read in safe mode are marked"


def test_safeguards_can_be_turned_on_for_a_path_that_was_trained_without(
    save: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    free = save(keel.DynamicStateStream(state_size=8, retention=0.3, noise_floor=0.02))
    file = tmp_path / "signals.json"
    words = ["generate", free, PROMPT, "--max-new-tokens", str(NEW), "--device", "cpu", "--signals-out", str(file)]
    told = {}
    for case in ((), ("--safeguards",), ("--safeguards", "--telemetry", "simulated")):
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, *case])
        assert ended.value.code == 0
        told[case] = json.loads(file.read_text(encoding="utf-8"))
    assert "governor" not in told[()], "without the option nothing is guarded"
    assert len(told["--safeguards",]["governor"]) == len(told["--safeguards",]["ids"])
    # Memory pressure brings S below its threshold, and the governor takes the row out.
    failures = told["--safeguards", "--telemetry", "simulated"]["failures"]
    assert not any("substrate_collapse" in names for names in told["--safeguards",]["failures"])
    assert any("substrate_collapse" in names for names in failures)


def test_telemetry_is_read_from_the_file_of_a_trace(save: Callable[..., str], tmp_path: Path) -> None:
    path = save(keel.DynamicStateStream(state_size=8, retention=0.3, noise_floor=0.02))
    trace_NR = torch.zeros(PROMPT.count(" ") + NEW, len(FEATURES))
    trace_NR[5:7, FEATURES.index("memory")] = 1.0
    trace, file = tmp_path / "trace.json", tmp_path / "signals.json"
    TraceTelemetry(trace_NR).save(trace)
    options: dict[str, Any] = {"console": None, "file": file, "device": "cpu", "max_new_tokens": NEW}
    continue_with_signals(path, PROMPT, telemetry=str(trace), **options)
    substrate = json.loads(file.read_text(encoding="utf-8"))["signals"]["dynamic_state.substrate"]
    assert [index for index, value in enumerate(substrate) if value < 0.01] == [5, 6]
    continue_with_signals(path, PROMPT, telemetry="live", **options)
    substrate = json.loads(file.read_text(encoding="utf-8"))["signals"]["dynamic_state.substrate"]
    assert all(0 < value < 1 for value in substrate)
    assert not [thread for thread in threading.enumerate() if thread.name == "keel-telemetry"], "its thread has ended"
    for source, words in (("nowhere.json", "no such file"), (str(file), "no trace of telemetry")):
        with pytest.raises(KeelError, match=words):
            continue_text(path, PROMPT, device="cpu", telemetry=source, max_new_tokens=2)


def test_a_path_is_as_it_was_after_its_text(save: Callable[..., str]) -> None:
    model = load_model(save(keel.DynamicStateStream(state_size=8)))
    stream = model.wires.first(keel.DynamicStateStream)[1]
    config, telemetry = stream.config, stream.telemetry
    with dynamic_state_as(model, 10, safeguards=True, telemetry="simulated"):
        assert stream.config.limits == SafeguardConfig() and stream.telemetry.follows_tokens
    assert stream.config is config and stream.telemetry is telemetry
    for options in ({"safeguards": True}, {"telemetry": "constant"}):
        with pytest.raises(KeelError, match="no dynamic state path"):
            continue_text(save(), PROMPT, device="cpu", max_new_tokens=2, **options)


def test_curves_fit_the_screen_and_show_what_is_no_number(tokenizer: PreTrainedTokenizerFast) -> None:
    assert curve([0.0, 0.5, 1.0, 2.0, float("nan")], 0.0, 1.0) == f"▁▅██{NOT_A_NUMBER}"
    assert curve([0.0, 0.0], 0.0, 0.0) == "▁▁"
    record = Record(tokenizer)
    many = torch.linspace(0, 1, 500).unsqueeze(0)
    record.take(
        torch.zeros(500, dtype=torch.long),
        {"a.noise": 7 * many, "a.coherence": many, "a.gate": many[..., None].expand(1, 500, 2)},
    )
    assert record.ordered() == ["a.coherence", "a.noise", "a.gate"]
    screen = io.StringIO()
    Console(file=screen, width=80).print(picture(record, 80))
    rows = screen.getvalue().splitlines()
    assert rows[0].startswith("I coherence 1") and rows[0].rstrip().endswith("█") and max(map(len, rows)) <= 80
    assert line(record, 499).endswith("I 1.0000  N 7.0000  gate 1.0000")
    record.take(torch.zeros(501, dtype=torch.long), {"a.noise": torch.full((1, 501), float("nan"))})
    assert record.as_json()["signals"]["a.noise"][-1] is None


@pytest.mark.parametrize(
    ("stream", "options", "words"),
    [
        (None, {}, "has no streams"),
        (lambda: keel.LearnedPositionsStream(max_positions=32), {}, "have none a token"),
        (keel.DynamicStateStream, {"num_beams": 2}, "beams"),
    ],
    ids=["bare host", "stream without signals", "beams"],
)
def test_what_cannot_be_shown_is_refused(
    save: Callable[..., str], stream: Any, options: dict[str, Any], words: str
) -> None:
    folder = save(*([] if stream is None else [stream()]))
    with pytest.raises(KeelError, match=words):
        continue_with_signals(folder, PROMPT, console=None, device="cpu", max_new_tokens=3, **options)
