"""Cached decoding, greedy, a token: the host with a stream against the bare host, both through ``generate``.

python benchmarks/decode.py
python benchmarks/decode.py --device cuda --dtype bf16 --size large
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import models
import timing
import torch
from transformers import GenerationMixin

CELLS = ("gru", "diagonal", "scan")
GUARDED = "dynamic state"  # with every signal collected and the governor on
TARGET = timing.Target(most=1.10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
    device, size = timing.prepare(given), models.SIZES[given.size]
    host = models.bare_host(size, positions=given.prompt_tokens + given.new_tokens)
    built = {"host": host, **{cell: models.with_stream(host, cell, shared=True) for cell in CELLS}}
    built[GUARDED] = models.with_dynamic_state(host)
    prompt_BT = torch.randint(0, size.vocabulary, (given.batch, given.prompt_tokens), device=device)
    arms = {
        name: decoding(
            model.to(device, models.DTYPES[given.dtype]).eval(), prompt_BT, given.new_tokens, signals=name == GUARDED
        )
        for name, model in built.items()
    }
    samples = timing.take_turns(arms, given.rounds, device)
    rows = [row(name, samples[name], given) for name in arms]
    lines = [
        timing.comparison(f"host + {name} stream / host", timing.time_ratios(samples, name, "host"), TARGET)
        for name in (*CELLS, GUARDED)
    ]
    setup = f"Greedy decoding, {size}, batch {given.batch}, {given.prompt_tokens} tokens and {given.new_tokens} new ones, {given.dtype}"
    timing.finish("decode", given, setup, rows, lines)


def decoding(
    model: GenerationMixin, prompt_BT: torch.Tensor, new_tokens: int, signals: bool = False
) -> Callable[[], None]:
    mask_BT = torch.ones_like(prompt_BT)
    options = {"collect_signals": True} if signals else {}

    def decode() -> None:
        model.generate(
            prompt_BT,
            attention_mask=mask_BT,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            **options,
        )

    return decode


def row(name: str, samples: list[timing.Sample], given: argparse.Namespace) -> dict[str, object]:
    a_token = statistics.median(sample.wall_s for sample in samples) / given.new_tokens
    return {"arm": name, "milliseconds a token": 1e3 * a_token, "tokens/s": given.batch / a_token}


if __name__ == "__main__":
    main()
