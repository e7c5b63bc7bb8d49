"""``keel try`` as a user runs it, on one core: a tiny checkpoint, a few made-up files; then what its folder is good for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from keel import cli
from keel.data import CorpusConfig, load_corpus, train_bpe
from keel.evaluation.results import read_results

WORDS = ["tide", "keel", "mast", "anchor", "rope", "deck", "harbour", "wind", "sail", "stone", "river", "light"]


class Trial(NamedTuple):
    """A finished ``keel try``: its folder and what it printed."""

    folder: Path
    printed: str
    host: Path


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """Arms use as many threads as there are cores, which only costs time where tests already run side by side."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory, one_core: None) -> Trial:
    root = tmp_path_factory.mktemp("try")
    (root / "notes").mkdir()
    draw = np.random.default_rng(0)
    for number in range(20):
        sentences = [" ".join(draw.choice(WORDS, 8)) + ".\n" for _ in range(30)]
        (root / "notes" / f"{number:02}.txt").write_text("".join(sentences), encoding="utf-8")
    tokenizer = train_bpe(load_corpus(CorpusConfig(source=str(root / "notes"))), 280)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    host = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, bos_token_id=None, **sizes)
    )
    host.save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    words = (
        "try",
        "--host",
        root / "llama",
        "--corpus",
        root / "notes",
        "--budget",
        5,
        "--out",
        root / "out",
        "--device",
        "cpu",
    )
    return Trial(root / "out", keel(*words), root / "llama")


def keel_here(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Call ``keel`` in this process, which already has torch, and return what it printed."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    printed, complaints = capsys.readouterr()
    assert not ended.value.code, complaints
    return printed


def keel(*words: object) -> str:
    """Run ``keel`` in a process of its own and return what it printed."""
    done = subprocess.run([sys.executable, "-m", "keel", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_try_compares_the_checkpoint_alone_with_the_checkpoint_and_a_stream(tried: Trial) -> None:
    results = read_results(tried.folder / "results.json")
    assert {name: arm.streams for name, arm in results.arms.items()} == {"host": [], "structural": ["structural"]}
    assert results.arms["structural"].params_total > results.arms["host"].params_total
    assert results.comparisons and {comparison.arm for comparison in results.comparisons} == {"structural"}
    tokens = [curve.x[-1] for arm in results.arms.values() for curve in arm.curves.values()]
    assert len(set(tokens)) == 1 and tokens[0] > 0, "both arms train on equally many tokens"
    nll = [arm.metrics[results.comparisons[0].metric].mean for arm in results.arms.values()]
    assert nll[0] != nll[1], "the stream has an effect"


def test_try_prints_what_it_chose_the_verdict_and_where_everything_is(tried: Trial) -> None:
    recipe = yaml.safe_load((tried.folder / "recipe.yaml").read_text(encoding="utf-8"))
    assert tried.printed.startswith(f"{recipe['phases'][0]['steps']} steps of {recipe['phases'][0]['batch_size']} × ")
    assert "the stream" in tried.printed
    for name in ("report.html", "results.json", "recipe.yaml"):
        assert str(tried.folder / name) in tried.printed and (tried.folder / name).stat().st_size > 0


def test_a_checkpoint_of_the_trial_generates(tried: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    model = tried.folder / "structural" / "seed0" / "model"
    text = keel_here(capsys, "generate", model, "tide keel", "--max-new-tokens", 8)
    assert text.startswith("tide keel") and len(text) > len("tide keel\n")


def test_the_recipe_of_the_trial_runs_again(tried: Trial, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = tmp_path / "again"
    keel_here(capsys, "run", tried.folder / "recipe.yaml", "--only", "host", "--out", again)
    assert read_losses(again) == read_losses(tried.folder), "the same recipe on the same machine gives the same numbers"


def test_a_finished_trial_is_resumed_without_training(tried: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    model = tried.folder / "structural" / "seed0" / "model" / "model.safetensors"
    before = model.stat().st_mtime_ns, read_losses(tried.folder)
    printed = keel_here(capsys, "run", tried.folder / "recipe.yaml", "--out", tried.folder, "--resume")
    assert (model.stat().st_mtime_ns, read_losses(tried.folder)) == before
    assert str(tried.folder / "report.html") in printed


def read_losses(folder: Path) -> dict[str, list[float]]:
    """What the host's evaluation summed up, by length."""
    evaluation = json.loads((folder / "host" / "seed0" / "evaluation.json").read_text(encoding="utf-8"))
    return {length: sums["nll"] for length, sums in evaluation["extrapolation"]["sums"].items()}
