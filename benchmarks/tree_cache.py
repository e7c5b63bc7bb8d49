"""The cache of trees: look-ups a second, sentences built a second, and whether memory grows while it is built.

python benchmarks/tree_cache.py
python benchmarks/tree_cache.py --size toy --rounds 1

The texts are made-up sentences of 3 to 40 words, every one different, under right-branching trees: what is measured is the builder and the
cache, not a parser. A look-up decodes and checks its row; rows are asked for in random order, through one connection.
Memory is the resident size of the process after each tenth of the texts; its growth is from the end of the second tenth, when
everything is loaded, to the end of the last. Look-ups are judged by processor time: they run on one thread, and a machine that does
other work takes longer by the clock alone.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import timing
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from keel.trees import BuildPlan, build
from keel.trees.build import BuildCounts, Builder

WORDS = 4000
LOOKUPS = timing.Target(least=20_000.0)
GROWTH = timing.Target(most=1.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser, rounds=5)
    parser.add_argument("--sentences", type=int, default=100_000)
    parser.add_argument("--lookups", type=int, default=50_000, help="in a round")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if options.size == "toy":
        options.sentences, options.lookups = 2_000, 2_000
    timing.prepare(options)
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder) / "trees.sqlite")
        seconds, sizes = built(plan, options.sentences, options.workers)
        rates = {
            kind: timing.spread([options.lookups / seconds for seconds in samples])
            for kind, samples in zip(
                ("wall", "processor"),
                zip(
                    *(looked_up(plan, options.sentences, options.lookups, n) for n in range(options.rounds)),
                    strict=True,
                ),
                strict=True,
            )
        }
        on_disk = plan.cache.stat().st_size
    growth = sizes[-1] / sizes[1]
    rows = [
        {"arm": "build", "sentences/s": options.sentences / seconds, "bytes a sentence": on_disk / options.sentences},
        {"arm": "memory MiB", **{f"{10 * (tenth + 1)} %": size / 2**20 for tenth, size in enumerate(sizes)}},
        {"arm": "look-ups", "a second": rates["wall"]["median"], "a processor second": rates["processor"]["median"]},
    ]
    lines = [
        timing.comparison("look-ups a second", rates, LOOKUPS, "processor"),
        timing.comparison(
            "memory at the end / after a fifth", {"resident": timing.spread([growth])}, GROWTH, "resident"
        ),
    ]
    setup = f"Cache of {options.sentences:,} sentences of 3 to 40 words, workers: {options.workers}, {options.lookups:,} look-ups a round"
    timing.finish("tree_cache", options, setup, rows, lines)


def make_plan(cache: Path) -> BuildPlan:
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return BuildPlan(cache=cache, source="branching:right", tokenizer=tokenizer.to_str())


def sentence(number: int) -> str:
    """Return the text of this number; three words that spell the number make it different from all others."""
    rng = random.Random(number)
    own = [number % WORDS, number // WORDS % WORDS, number // WORDS**2]
    return " ".join(f"w{word}" for word in [*own, *(rng.randrange(WORDS) for _ in range(rng.randrange(38)))])


def built(plan: BuildPlan, count: int, workers: int) -> tuple[float, list[int]]:
    """Build the cache; return seconds, and the resident bytes of this process after each tenth."""
    process, sizes = psutil.Process(), list[int]()

    def watch(counts: BuildCounts) -> None:
        while len(sizes) < 10 and 10 * counts.parsed >= count * (len(sizes) + 1):
            sizes.append(process.memory_info().rss)

    def texts() -> Iterator[str]:
        return (sentence(number) for number in range(count))

    begin = time.perf_counter()
    found = build(texts(), plan, workers, watch)
    assert found.parsed == count, f"{found}: every sentence is a row of its own"
    return time.perf_counter() - begin, sizes


def looked_up(plan: BuildPlan, count: int, lookups: int, turn: int) -> timing.Sample:
    """Return the seconds of so many look-ups of rows in random order, all of which are there."""
    builder, rng = Builder(plan), random.Random(turn)
    assert builder.cache is not None
    asked = [builder.chunks(sentence(rng.randrange(count)))[0] for _ in range(lookups)]
    cache, making = builder.cache, builder.making

    def run() -> None:
        for ids in asked:
            assert cache.get(making, ids) is not None

    return timing.measure(run, torch.device("cpu"))


if __name__ == "__main__":
    main()
