"""Training step of masked language modelling: the DSTG encoder against the RoPE baseline of the same width.

    python benchmarks/encoder.py
    python benchmarks/encoder.py --device cuda --dtype bf16 --size large

"small" is the paper's encoder (6 layers, 6 heads, 384 + 48 channels, 512 tokens) in batches of 8, "large" the same in batches of 64. The
baseline has as many channels as both streams together, so that both arms move as wide a state; its SwiGLU has as many too. One
token in five is masked, at the same places.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import NamedTuple

import timing
import torch

from keel.encoder import DstgConfig, DstgForMaskedLM, count_parameters


class Size(NamedTuple):
    """What is trained: the encoder's semantic and position channels, its vocabulary, layers and batch."""

    semantic: int
    position: int
    heads: int
    layers: int
    vocabulary: int
    length: int
    batch: int


SIZES = {
    "toy": Size(24, 8, 2, 2, 64, 16, 2),
    "small": Size(384, 48, 6, 6, 30522, 512, 8),
    "large": Size(384, 48, 6, 6, 30522, 512, 64),
}
TARGETS = {"cpu": timing.Target(most=1.15), "cuda": timing.Target(most=1.10)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser)
    given = parser.parse_args()
    device, size = timing.prepare(given), SIZES[given.size]
    configs = {"rope": config_of(size, "rope"), "dstg": config_of(size, "dstg")}
    steps = {name: training_step(config, size, given.dtype, device) for name, config in configs.items()}
    samples = timing.take_turns(steps, given.rounds, device)
    rows = []
    for name, config in configs.items():
        seconds = statistics.median(sample.wall_s for sample in samples[name])
        tokens = size.batch * size.length / seconds
        rows.append({"arm": name, "parameters": count_parameters(config), "seconds": seconds, "tokens/s": tokens})
    setup = f"Masked language modelling step, {size}, {given.dtype}"
    ratios = timing.time_ratios(samples, "dstg", "rope")
    timing.finish(
        "encoder", given, setup, rows, [timing.comparison("DSTG / RoPE of one width", ratios, TARGETS[device.type])]
    )


def config_of(size: Size, position: str) -> DstgConfig:
    """Return an arm; the baseline's one stream is as wide as both."""
    width = size.semantic if position == "dstg" else size.semantic + size.position
    return DstgConfig(
        vocab_size=size.vocabulary,
        semantic_size=width,
        position_size=size.position,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.length,
        special_token_ids=[1, 2],
        position=position,
    )


def training_step(config: DstgConfig, size: Size, dtype: str, device: torch.device) -> Callable[[], None]:
    """Return one optimizer step on a fixed batch."""
    model = DstgForMaskedLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(3, size.vocabulary, (size.batch, size.length), generator=generator)
    ids_BT[:, 0], ids_BT[:, -1] = 1, 2
    labels_BT = torch.where(torch.arange(size.length) % 5 == 3, ids_BT, -100).to(device)
    ids_BT = ids_BT.to(device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss = model(ids_BT, labels=labels_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
