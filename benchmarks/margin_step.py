"""Training step (forward, backward, AdamW) of a model with the margin prior, against cross-entropy alone.

    python benchmarks/margin_step.py --size deep
    python benchmarks/margin_step.py --size deep --device cuda --dtype bf16

``deep`` is the model of support tokens' experiments: 12 layers, d = 384, 512 tokens.
"""

from __future__ import annotations

import argparse
import copy

import models
import step
import timing

import keel

TARGETS = {"rank 32": timing.Target(most=1.10), "rank 64": timing.Target(most=1.20)}
ON_A_GPU = timing.Target(most=1.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser)
    given = parser.parse_args()
    device, size = timing.prepare(given), models.SIZES[given.size]
    host = models.bare_host(size, positions=size.length)
    # The prior's share of a step is the same whatever the embeddings hold, but flat attention would hide a slow path.
    host.get_input_embeddings().weight.data.normal_(std=0.5)
    built = {"host": host}
    for name in TARGETS:
        rank = min(int(name.split()[1]), size.width)
        built[name] = keel.attach(copy.deepcopy(host), keel.MarginPrior(rank=rank, weight=0.05))
    built = {name: model.to(device).train() for name, model in built.items()}
    works = {name: step.training_step(model, size, given.dtype, device) for name, model in built.items()}
    samples = timing.take_turns(works, given.rounds, device)
    timing.finish(
        "margin_step",
        given,
        f"Training step with a margin prior, {size}, T = {size.length}, batch {size.batch}, {given.dtype}",
        [step.row(name, model, samples, size, given) for name, model in built.items()],
        [
            timing.comparison(
                f"host + margin prior of {name} / host",
                timing.time_ratios(samples, name, "host"),
                ON_A_GPU if device.type == "cuda" else target,
            )
            for name, target in TARGETS.items()
        ],
    )


if __name__ == "__main__":
    main()
