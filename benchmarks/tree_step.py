"""Time of a training step with a tree stream against the host's own, forward, backward and optimizer.

    python benchmarks/tree_step.py [--threads 1] [--rounds 5] [--batch 8] [--length 256] [--width 256] [--layers 6] [--vocabulary 4096]

The host is a Llama from random weights; the trees are random binary ones of 25 tokens, laid out beforehand as a data loader does. Times
are medians, in milliseconds: of wall-clock, and of processor time (summed over threads), which other work on the machine disturbs less.
The two kinds of steps take turns.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from tree_memory import make_trees

import keel
from keel.streams.tree import TreeStream

SIZES = {"threads": 1, "rounds": 5, "batch": 8, "length": 256, "width": 256, "layers": 6, "vocabulary": 4096}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a training step with a tree stream against the host's.")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps = {"host": step(options, with_trees=False), "host and tree stream": step(options, with_trees=True)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(options.rounds + 1):
        for name, work in steps.items():
            begin = time.perf_counter(), time.process_time()
            work()
            if turn:  # the first warms up
                times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    print(f"cpu, {platform.machine()}, {options.threads} threads, torch {torch.__version__}, {vars(options)}")
    base = [median(column) for column in zip(*times["host"], strict=True)]
    print(f"{'':26}{'wall ms':>12}{'cpu ms':>12}{'wall ratio':>12}{'cpu ratio':>12}")
    for name, measured in times.items():
        wall, processor = (median(column) for column in zip(*measured, strict=True))
        print(f"{name:26}{1e3 * wall:12.1f}{1e3 * processor:12.1f}{wall / base[0]:12.2f}{processor / base[1]:12.2f}")


def step(options: argparse.Namespace, with_trees: bool) -> Callable[[], None]:
    """Return one training step of a model of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.width, num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=8 * options.width // 3,
        max_position_embeddings=options.length, tie_word_embeddings=True,
    )  # fmt: skip
    host = AutoModelForCausalLM.from_config(config)
    model = keel.attach(host, {"tree": TreeStream()} if with_trees else {}).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(options.vocabulary, (options.batch, options.length))
    given = {"trees": make_trees(options.batch, options.length, options.layers)} if with_trees else {}

    def run() -> None:
        optimizer.zero_grad()
        model(ids, labels=ids, **given).loss.backward()
        optimizer.step()

    return run


if __name__ == "__main__":
    main()
