"""Golden loss trajectories: a change anywhere between data order and optimizer that moves the losses is seen here.

A change that is meant to move them: ``python tests/golden/test_trajectories.py`` writes the file anew; say in the commit why.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from keel.data import TokenCorpus, TokenStream
from keel.model import attach
from keel.positions import Positions
from keel.streams import stream_from_config
from keel.training import Phase, read_training_report, train

GOLDEN = Path(__file__).with_name("trajectories.json")
VOCABULARY = 61
PHASE = Phase(
    name="train",
    steps=8,
    batch_size=8,
    accumulation=2,
    window=24,
    stride=7,
    learning_rate=5e-3,
    warmup_steps=2,
    weight_decay=0.1,
    label_smoothing=0.03,
    validate_every=4,
)
STRUCTURAL = {"type": "structural", "init": "paper"}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama_alibi": {"family": "llama", "positions": Positions(scheme="alibi")},
    "llama_structural_gru": {"family": "llama", "stream": STRUCTURAL},
    "llama_structural_layers": {
        "family": "llama",
        "stream": {
            **STRUCTURAL,
            "share": "layer",
            "gate": "channel",
            "confidence_penalty": 0.1,
            "temperature": (4.0, 2.0, 6),
            "gate_warmup_steps": 4,
        },
    },
    "gpt2_structural_scan": {"family": "gpt2", "stream": {"type": "structural", "cell": "scan", "init": "identity"}},
}


def text(count: int, seed: int) -> TokenStream:
    generator = np.random.default_rng(seed)
    return TokenStream(
        ids=(np.cumsum(generator.integers(1, 5, size=count)) % VOCABULARY).astype(np.int32),
        starts=np.array([0], dtype=np.int64),
        token_bytes=np.ones(count, dtype=np.uint16),
        names=["made up"],
    )


class NoTokenizer(PreTrainedTokenizerFast):
    """Stands where a tokenizer is saved beside the model."""

    def __init__(self) -> None:
        pass

    def save_pretrained(self, folder: Any, **kwargs: Any) -> tuple[str, ...]:
        return ()


def trajectory(name: str, folder: Path) -> dict[str, list[float]]:
    """Losses by step and by name, then those of validation."""
    case = CASES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        case["family"], hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    if case["family"] == "llama":
        config.intermediate_size = 48
    for field in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, field, 0.0)
    streams = {"structural": stream_from_config(case["stream"])} if "stream" in case else {}
    model = attach(AutoModelForCausalLM.from_config(config), streams, positions=case.get("positions"))
    corpus = TokenCorpus(
        train=text(2000, 0), valid=text(300, 1), test=text(300, 2), tokenizer=NoTokenizer(), fingerprint="made up"
    )
    train(model, corpus, [PHASE], arm=name, seed=0, folder=folder, device="cpu")
    report = read_training_report(folder)
    assert report is not None
    points = report.log["train"]
    found = {key: [point[key] for point in points] for key in points[0] if key.startswith(("loss", "nll"))}
    return {**found, "valid_nll": [point["nll"] for point in report.curve]}


@pytest.mark.parametrize("name", CASES)
def test_losses_follow_the_golden_trajectory(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    found = trajectory(name, tmp_path)
    assert found.keys() == golden.keys()
    assert golden["loss"][-1] < golden["loss"][0]
    for key, values in golden.items():
        # Another processor adds in another order: float32 rounding, enlarged by eight steps of Adam.
        assert found[key] == pytest.approx(values, rel=2e-4), key


def test_the_cases_differ_by_far_more_than_the_tolerance() -> None:
    golden = json.loads(GOLDEN.read_text())
    last = sorted(values["nll"][-1] for values in golden.values())
    assert golden.keys() == CASES.keys()
    assert min(high / low for low, high in itertools.pairwise(last)) > 1.001


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        written = {name: trajectory(name, Path(scratch) / name) for name in CASES}
    GOLDEN.write_text(json.dumps(written, indent=1) + "\n")
