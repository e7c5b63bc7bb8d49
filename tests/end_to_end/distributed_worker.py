"""What each process of test_distributed.py runs, under torchrun or alone: the same training in several ways.

python distributed_worker.py OUT WAY...    each WAY leaves OUT/<way>/training.json and OUT/<way>/model

The way "experiment" runs OUT/recipe.yaml whole.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from keel.data import TokenCorpus, TokenStream
from keel.experiment import run_experiment
from keel.model import KeelForCausalLM, attach
from keel.streams import StructuralStream
from keel.training import Phase, load_recipe, train

VOCABULARY = 31
PHASE = Phase(
    name="train",
    steps=6,
    batch_size=8,
    accumulation=2,
    window=12,
    stride=5,
    learning_rate=1e-2,
    label_smoothing=0.1,
    validate_every=3,
    checkpoint_every=2,
)


def stream_of(count: int, seed: int) -> TokenStream:
    """Made-up text in which each token follows from the one before."""
    generator = np.random.default_rng(seed)
    return TokenStream(
        ids=(np.cumsum(generator.integers(1, 3, size=count)) % VOCABULARY).astype(np.int32),
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


CORPUS = TokenCorpus(
    train=stream_of(900, 0),
    valid=stream_of(200, 1),
    test=stream_of(200, 2),
    tokenizer=NoTokenizer(),
    fingerprint="made up",
)


def model_of(dropout: float) -> KeelForCausalLM:
    """A host with tied embeddings and a stream with a loss of its own, from a fixed seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return attach(LlamaForCausalLM(config), StructuralStream(init="paper", confidence_penalty=0.5))


class Interrupted(Exception):
    """Stands for a crash."""


def run(out: Path, *, dropout: float = 0.0, until: int | None = None, resume: bool = False) -> None:
    """Train; with ``until``, stop as if by a crash after that many steps."""
    model = model_of(dropout)
    if until is not None:
        before = model.set_step

        def set_step(step: int) -> None:
            if step == until:
                raise Interrupted
            before(step)

        model.set_step = set_step  # type: ignore[method-assign]
    train(model, CORPUS, [PHASE], arm="a", seed=3, folder=out, device="cpu", resume=resume)


def main() -> None:
    """Run the ways that the command line names."""
    out, *ways = sys.argv[1:]
    torch.set_num_threads(1)
    for way in ways:
        os.environ["ACCELERATE_USE_FSDP"] = "true" if "fsdp" in way else "false"
        folder = Path(out) / way
        if way == "experiment":
            run_experiment(load_recipe(Path(out) / "recipe.yaml"), folder, device="cpu")
            continue
        if way.endswith("resumed"):
            try:
                run(folder, dropout=0.3, until=5)
            except Interrupted:
                run(folder, dropout=0.3, resume=True)
        else:
            run(folder, dropout=0.3 if way.endswith("whole") else 0.0)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
