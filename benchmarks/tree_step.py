"""Training step with a tree stream against the host's own: forward, backward and optimizer.

    python benchmarks/tree_step.py
    python benchmarks/tree_step.py --threads 1 --rounds 4

The host is a Llama from random weights; the trees are random binary ones of 25 tokens, laid out beforehand as a data loader does.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import NamedTuple

import timing
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from tree_memory import make_trees

import keel
from keel.streams.tree import TreeStream


class Size(NamedTuple):
    """What is trained."""

    width: int
    layers: int
    vocabulary: int
    length: int
    batch: int


SIZES = {"toy": Size(32, 2, 64, 32, 2), "small": Size(256, 6, 4096, 256, 8)}
TARGET = timing.Target(most=1.30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser)
    given = parser.parse_args()
    device, size = timing.prepare(given), SIZES[given.size]
    steps = {"host": step(size, device, with_trees=False), "tree": step(size, device, with_trees=True)}
    samples = timing.take_turns(steps, given.rounds, device)
    rows = []
    for name in steps:
        seconds = statistics.median(sample.wall_s for sample in samples[name])
        rows.append({"arm": name, "seconds": seconds, "tokens/s": size.batch * size.length / seconds})
    ratios = timing.time_ratios(samples, "tree", "host")
    setup = f"Training step, {size}, fp32"
    timing.finish("tree_step", given, setup, rows, [timing.comparison("host + tree stream / host", ratios, TARGET)])


def step(size: Size, device: torch.device, with_trees: bool) -> Callable[[], object]:
    """Return one training step of a model of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=8 * size.width // 3, max_position_embeddings=size.length,
        tie_word_embeddings=True,
    )  # fmt: skip
    host = AutoModelForCausalLM.from_config(config)
    model = keel.attach(host, {"tree": TreeStream()} if with_trees else {}).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(size.vocabulary, (size.batch, size.length), device=device)
    trees = make_trees(size.batch, size.length, size.layers) if with_trees else {}
    given = {"trees": {name: tensor.to(device) for name, tensor in trees.items()}} if with_trees else {}

    def run() -> None:
        optimizer.zero_grad()
        model(ids, labels=ids, **given).loss.backward()
        optimizer.step()

    return run


if __name__ == "__main__":
    main()
