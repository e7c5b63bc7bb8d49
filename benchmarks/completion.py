"""Greedy completion of Dyck words, batched through the cache, against one word at a time without a cache.

python benchmarks/completion.py
python benchmarks/completion.py --threads 1 --rounds 1

Weights are random and the end token is never the best, so that every row runs to the greatest length: the worst case. The slow way
completes ``--slow-words`` of the words; its time is given a word. The target is 1,000 words in 60 seconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import models
import timing
import torch
from transformers import PreTrainedModel

from keel.data.languages import Dyck
from keel.data.tasks import TaskData
from keel.evaluation.completion import complete

MOST_SECONDS = 60.0
BATCHED, ALONE = "batched, cached", "one by one, uncached"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser)
    parser.add_argument("--words", type=int, default=1000)
    parser.add_argument("--slow-words", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="brackets of a word, even")
    given = parser.parse_args()
    device = timing.prepare(given)
    language = Dyck(min_length=given.length, max_length=given.length)
    data = TaskData(language, train_samples=1, valid_samples=1)
    prompts = [
        [data.tokenizer.bos_token_id, *data.encode(language.sample("test", index).prompt)]
        for index in range(given.words)
    ]
    size = models.SIZES[given.size]._replace(vocabulary=len(data.tokenizer))
    model = endless(size, data.tokenizer.eos_token_id).to(device, models.DTYPES[given.dtype]).eval()

    def run(rows: list[list[int]], **options: object) -> Callable[[], None]:
        return lambda: complete(model, rows, data.tokenizer, max_new_tokens=given.length, **options) and None

    arms = {BATCHED: run(prompts), ALONE: run(prompts[: given.slow_words], batch_size=1, use_cache=False)}
    counts = {BATCHED: given.words, ALONE: given.slow_words}
    taken = timing.take_turns(arms, given.rounds, device)
    a_word = {
        name: [timing.Sample(sample.wall_s / counts[name], sample.processor_s / counts[name]) for sample in taken[name]]
        for name in arms
    }
    thousand = {
        "wall": timing.spread([1000 * sample.wall_s for sample in a_word[BATCHED]]),
        "processor": timing.spread([1000 * sample.processor_s for sample in a_word[BATCHED]]),
    }
    lines = [
        timing.comparison("seconds for 1,000 words", thousand, timing.Target(most=MOST_SECONDS)),
        timing.comparison("one by one / batched, a word", timing.time_ratios(a_word, ALONE, BATCHED), None),
    ]
    rows = [row(name, counts[name], taken[name]) for name in arms]
    setup = f"Completion of Dyck words of {given.length}, {given.length} new tokens, host + GRU, {size}, {given.dtype}"
    timing.finish("completion", given, setup, rows, lines)


def endless(size: models.Size, end: int) -> PreTrainedModel:
    """Return a host with a stream that never ends a text: the logit of the end token is the least of all."""
    model = models.with_stream(models.bare_host(size), "gru", copied=False)
    head = torch.nn.Linear(size.width, size.vocabulary)
    with torch.no_grad():
        head.weight.copy_(model.get_output_embeddings().weight)
        head.bias.zero_()
        head.bias[end] = -1e4
    model.set_output_embeddings(head)
    return model


def row(name: str, words: int, taken: list[timing.Sample]) -> dict[str, object]:
    seconds = statistics.median(sample.wall_s for sample in taken)
    return {"arm": name, "words": words, "seconds": seconds, "words/s": words / seconds}


if __name__ == "__main__":
    main()
