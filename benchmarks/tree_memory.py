"""Time of the tree stream's chunk memory, forward and backward: prefix sums over the batch against loops over nodes.

python benchmarks/tree_memory.py
python benchmarks/tree_memory.py --rounds 1 --share 64

All do GTCA's Eqs. 1 and 2, the mean of the embeddings under every chunk, its projection by height and its norm, on the same
random binary trees of 25 tokens, at most 64 chunks a height and tree. There are two loops, one node after the other: one takes
each span from the batch, as one writes it at first; one takes it from its row, whose gradient is then a row's and not the batch's.
The second is the twin that specifies the fast path; their gradients are compared before anything is timed.

The loops do every ``--share``-th chunk, and their times are multiplied by it: a loop's time is that of its nodes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from statistics import median

import timing
import torch
from torch import Tensor

from keel.hosts import HostShape
from keel.streams.tree import TreeStream, reference_chunk
from keel.trees import Span, Tree, collate, sentence_chunks, token_spans

Work = Callable[[], object]
TARGET = timing.Target(least=100.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser, rounds=5)
    for name, default in (("share", 8), ("batch", 16), ("length", 512), ("width", 256), ("layers", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.size == "toy":
        options.batch, options.length, options.width, options.layers, options.share = 2, 30, 8, 3, 2
    device = timing.prepare(options)
    shape = [options.batch, options.length, options.width]
    trees = make_trees(options.batch, options.length, options.layers)
    stream = TreeStream()
    stream.build(HostShape(hidden_size=options.width, num_layers=options.layers, num_heads=4))
    stream.init_weights()
    embeddings, real = torch.randn(shape, requires_grad=True), is_chunk(trees)
    weigh = torch.randn(*real.shape, options.width) * real.unsqueeze(-1)

    def fast(weigh: Tensor = weigh) -> list[Tensor]:
        memory = stream.chunk_memory(embeddings, trees["left"], trees["right"], trees["height"])
        return gradients(memory, weigh, stream, embeddings)

    def slow(by_row: bool) -> list[Tensor]:
        return gradients(looped(stream, embeddings, trees, some, by_row), weigh[some], stream, embeddings)

    some = torch.zeros_like(real)
    some[tuple(real.nonzero()[:: options.share].T)] = True
    for mine, theirs in zip(fast(weigh * some.unsqueeze(-1)), slow(by_row=True), strict=True):
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm(), "the fast path differs from its twin"
    loops = {"loop, spans of a row": True, "loop, spans of the batch": False}
    arms: dict[str, Work] = {"prefix sums": fast, **{name: partial(slow, by_row) for name, by_row in loops.items()}}
    samples = timing.take_turns(arms, options.rounds, device)
    for name in loops:
        samples[name] = [timing.Sample(*(options.share * seconds for seconds in sample)) for sample in samples[name]]
    rows = [
        {
            "arm": name,
            "wall ms": 1e3 * median(sample.wall_s for sample in samples[name]),
            "processor ms": 1e3 * median(sample.processor_s for sample in samples[name]),
        }
        for name in arms
    ]
    lines = [
        timing.comparison(f"{name} / prefix sums", timing.time_ratios(samples, name, "prefix sums"), TARGET)
        for name in loops
    ]
    size = f"[B, T, D] = {shape}, {options.layers} heights, {int(real.sum()):,} chunks in {real.numel():,} places"
    timing.finish("tree_memory", options, f"Chunk memory of parse trees, forward and backward, {size}", rows, lines)


def make_trees(batch: int, length: int, layers: int) -> dict[str, Tensor]:
    """Return the chunks of random binary trees, each over up to 25 tokens of one letter."""
    rng, rows = random.Random(0), []
    spans = token_spans("x" * length, [(t, t + 1) for t in range(length)])
    for _ in range(batch):
        starts = list(range(0, length, 25))
        trees = [Tree(tuple(grow(rng, start, min(start + 25, length), 0))) for start in starts]
        rows.append(sentence_chunks(trees, spans))
    return collate(rows, layers)


def grow(rng: random.Random, start: int, end: int, depth: int) -> list[Span]:
    spans = [Span(start, end, depth, "X")]
    if end - start > 1:
        cut = rng.randrange(start + 1, end)
        spans += grow(rng, start, cut, depth + 1) + grow(rng, cut, end, depth + 1)
    return spans


def is_chunk(trees: dict[str, Tensor]) -> Tensor:
    """Return [B, H, M] bool: where there is a chunk, not what only fills the batch."""
    real = torch.zeros(trees["left"].shape, dtype=torch.bool)
    for b, (chunks, first, last) in enumerate(zip(trees["chunk"], trees["first"], trees["last"], strict=True)):
        real[b].view(-1)[chunks[first <= last]] = True
    return real


def looped(stream: TreeStream, embeddings: Tensor, trees: dict[str, Tensor], chosen: Tensor, by_row: bool) -> Tensor:
    """Return the chosen chunks one after the other, [N, D]; not charged for the places that only fill the batch."""
    rows = embeddings.unbind()
    nodes = chosen.nonzero()
    heights = trees["height"][nodes[:, 0], nodes[:, 1]].tolist()
    spans = zip(
        nodes[:, 0].tolist(), heights, trees["left"][chosen].tolist(), trees["right"][chosen].tolist(), strict=True
    )
    chunks = []
    for b, height, left, right in spans:
        if by_row:
            chunks.append(reference_chunk(stream, rows[b], left, right, height))
        else:
            mean = embeddings[b, left : right + 1].mean(0)
            chunks.append(stream.norm(stream.weight_height[height] @ mean))
    return torch.stack(chunks)


def gradients(memory: Tensor, weigh: Tensor, stream: TreeStream, embeddings: Tensor) -> list[Tensor]:
    inputs = [embeddings, stream.weight_height, stream.norm.weight, stream.norm.bias]
    return list(torch.autograd.grad((memory * weigh).sum(), inputs))


if __name__ == "__main__":
    main()
