"""What makes training on a processor quicker: Keel's cross-entropy and attention against PyTorch's, each alone and in a training step.

    python benchmarks/processor.py
    python benchmarks/processor.py --dtype fp32

In bfloat16 by default, as recipes train at ``small`` scale. Large pages are no part of the ratios: they are as the shell has them, and with
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 as ``keel run`` has them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext

import models
import step
import timing
import torch
import torch.nn.functional as F
from torch import Tensor

from keel.ops import attention, cross_entropy_sum, reference_cross_entropy_sum
from keel.training.processor import quick_on_processor

FEW = 64
PAIRS = ("cross-entropy", "attention", f"attention of {FEW} keys in fp32", "training step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser)
    parser.set_defaults(dtype="bf16")
    given = parser.parse_args()
    device, size = timing.prepare(given), models.SIZES[given.size]
    if device.type != "cpu":
        parser.error(f"--device {device.type}: these are for processors; leave it out")
    works = {
        **cross_entropies(size, given.dtype),
        **attentions(size, given.dtype),
        **of_few_keys(size),
        **steps(size, given.dtype, device),
    }
    samples = timing.take_turns(works, given.rounds, device)
    rows = [
        {
            "arm": name,
            **{
                kind: 1e3 * statistics.median(getattr(s, f"{kind}_s") for s in samples[name])
                for kind in ("wall", "processor")
            },
        }
        for name in works
    ]
    lines = [
        timing.comparison(
            f"PyTorch's / Keel's {pair}",
            timing.time_ratios(samples, f"{pair}, PyTorch", pair),
            None,
            judged="processor",
        )
        for pair in PAIRS
    ]
    setup = f"On a processor, {size}, T = {size.length}, batch {size.batch}, {given.dtype}; forward and backward, ms"
    timing.finish("processor", given, setup, rows, lines)


def cross_entropies(size: models.Size, dtype: str) -> dict[str, Callable[[], None]]:
    rows = size.batch * size.length
    logits_NV = torch.randn(rows, size.vocabulary, dtype=models.DTYPES[dtype], requires_grad=True)
    labels_N = torch.randint(size.vocabulary, (rows,))

    def of(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.backward(loss(logits_NV, labels_N) / rows, inputs=[logits_NV])

    return {"cross-entropy": of(cross_entropy_sum), "cross-entropy, PyTorch": of(reference_cross_entropy_sum)}


def attentions(size: models.Size, dtype: str) -> dict[str, Callable[[], None]]:
    shape = (size.batch, size.length, size.heads, size.width // size.heads)
    parts = [torch.randn(shape, dtype=models.DTYPES[dtype]).transpose(1, 2).requires_grad_() for _ in range(3)]
    weigh = torch.randn_like(parts[0])

    def of(attend: Callable[..., Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.backward(attend(*parts, is_causal=True), weigh, inputs=parts)

    return {"attention": of(attention), "attention, PyTorch": of(F.scaled_dot_product_attention)}


def of_few_keys(size: models.Size) -> dict[str, Callable[[], None]]:
    """As a tree stream reads: every token some of a few chunks, in float32."""
    queries, width = (size.batch, size.heads, size.length), size.width // size.heads
    parts = [torch.randn(*queries, width)] + [torch.randn(*queries[:2], FEW, width) for _ in range(2)]
    parts, weigh = [part.requires_grad_() for part in parts], torch.randn(*queries, width)
    mask = torch.rand(size.batch, 1, size.length, FEW) < 0.7

    def of(attend: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.backward(attend(mask), weigh, inputs=parts)

    return {
        PAIRS[2]: of(lambda mask: attention(*parts, mask=mask)),
        f"{PAIRS[2]}, PyTorch": of(lambda mask: F.scaled_dot_product_attention(*parts, attn_mask=mask)),
    }


def steps(size: models.Size, dtype: str, device: torch.device) -> dict[str, Callable[[], None]]:
    model = models.bare_host(size, positions=size.length).train()
    work = step.training_step(model, size, dtype, device)

    def of(quick: bool) -> Callable[[], None]:
        def run() -> None:
            with quick_on_processor(model) if quick else nullcontext():
                work()

        return run

    return {"training step": of(True), "training step, PyTorch": of(False)}


if __name__ == "__main__":
    main()
