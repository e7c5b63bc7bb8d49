"""Training step (forward, backward, AdamW): the host with a stream against the bare host, and that against x-transformers.

    python benchmarks/step.py
    python benchmarks/step.py --device cuda --dtype bf16 --size large --peak-tflops 989

bf16 is autocast over float32 weights, as ``precision: bf16`` trains. The x-transformers model has the host's sizes and parameter
count; both compute the same cross-entropy over all tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import models
import timing
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARMS = ("gru", "diagonal", "scan", "dynamic state", "x-transformers")
TARGETS = {
    "gru": timing.Target(most=1.25),
    "diagonal": timing.Target(most=1.10),
    "scan": timing.Target(most=1.10),
    "dynamic state": timing.Target(most=1.25),
}
PEER = timing.Target(least=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    given = parser.parse_args()
    device, size = timing.prepare(given), models.SIZES[given.size]
    built = build(size, given.arms, device)
    samples = timing.take_turns(
        {name: training_step(model, size, given.dtype, device) for name, model in built.items()}, given.rounds, device
    )
    setup = f"Training step, {size}, T = {size.length}, batch {size.batch}, {given.dtype}"
    timing.finish(
        "step",
        given,
        setup,
        [row(name, model, samples, size, given) for name, model in built.items()],
        compare(samples),
    )


def build(size: models.Size, arms: list[str], device: torch.device) -> dict[str, nn.Module]:
    host = models.bare_host(size, positions=size.length)
    built: dict[str, nn.Module] = {"host": host}
    others = {
        "x-transformers": lambda: models.x_transformer(size),
        "dynamic state": lambda: models.with_dynamic_state(host),
    }
    for name in arms:
        built[name] = others[name]() if name in others else models.with_stream(host, name)
    return {name: model.to(device).train() for name, model in built.items()}


def training_step(model: nn.Module, size: models.Size, dtype: str, device: torch.device) -> Callable[[], None]:
    """Return one optimizer step on a fixed batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids_BT = torch.randint(0, size.vocabulary, (size.batch, size.length), device=device)
    targets_N = F.pad(ids_BT[:, 1:], (0, 1), value=-100).flatten()

    def loss() -> Tensor:
        if hasattr(model, "generation_config"):
            return model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        return F.cross_entropy(model(ids_BT).flatten(0, 1).float(), targets_N, ignore_index=-100)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bf16"):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def row(
    name: str, model: nn.Module, samples: dict[str, list[timing.Sample]], size: models.Size, given: argparse.Namespace
) -> dict[str, object]:
    seconds = statistics.median(sample.wall_s for sample in samples[name])
    shown: dict[str, object] = {
        "arm": name,
        "parameters": models.num_parameters(model),
        "seconds": seconds,
        "tokens/s": size.batch * size.length / seconds,
    }
    if given.peak_tflops:
        table = model.token_emb.emb if name == "x-transformers" else model.get_input_embeddings()
        shown["share of peak"] = models.step_flops(model, size, table) / seconds / (given.peak_tflops * 1e12)
    return shown


def compare(samples: dict[str, list[timing.Sample]]) -> list[dict[str, object]]:
    lines = []
    for name in samples:
        if name in TARGETS:
            ratios = timing.time_ratios(samples, name, "host")
            lines.append(timing.comparison(f"host + {name} stream / host", ratios, TARGETS[name]))
        elif name == "x-transformers":
            lines.append(timing.comparison("x-transformers / host", timing.time_ratios(samples, name, "host"), PEER))
    return lines


if __name__ == "__main__":
    main()
