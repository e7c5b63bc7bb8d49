"""Time of the recurrences: Keel's operators, torch.nn.GRU, the naive twins, and a host's training step beside them.

    python benchmarks/recurrence.py [--threads 2] [--repeats 11] [--batch 16] [--length 256] [--width 256]

All candidates of a table run in turn in every round, so that a change in the machine's load meets them alike; each line gives
the medians over rounds, in milliseconds of wall-clock and of processor time (summed over threads), and the median of the
ratios of wall-clock within a round.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from keel.ops.gru import gru, reference_gru
from keel.ops.scan import linear_scan, reference_linear_scan

Work = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of the recurrences against their peers.")
    for name, default in (("threads", 2), ("repeats", 11), ("batch", 16), ("length", 256), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{device}, {platform.machine()}, {options.threads} threads, torch {torch.__version__}, {options.repeats} rounds"
    )
    shape = options.batch, options.length, options.width
    compare(f"forward and backward, [B, T, D] = {list(shape)}", training(shape, device), options.repeats)
    compare("forward without gradients, the same shape", inference(shape, device), options.repeats)
    compare("one token, B = 1", inference((1, 1, options.width), device, inner=100), options.repeats)
    compare("forward without gradients, B = 1, T = 8192", inference((1, 8192, options.width), device), options.repeats)


def make_gru(width: int, groups: int, device: torch.device) -> tuple[torch.nn.GRU, list[Tensor]]:
    """Return a torch GRU and ``groups`` copies of its weights, as the operator takes them."""
    peer = torch.nn.GRU(width, width, batch_first=True).to(device)
    return peer, [p.detach().expand(groups, *p.shape).contiguous().requires_grad_() for p in peer.parameters()]


def training(shape: tuple[int, int, int], device: torch.device) -> dict[str, Work]:
    """Return what is timed with gradients; the first entry is what the others are divided by."""
    batch, length, width = shape
    peer, weights = make_gru(width, 1, device)
    _, weights_of_4 = make_gru(width, 4, device)
    inputs, weigh = torch.randn(shape, device=device, requires_grad=True), torch.randn(shape, device=device)
    decay = torch.rand(shape, device=device, requires_grad=True)
    ids = torch.randint(4096, (batch, length), device=device)
    host = make_host(width, device)
    return {
        "gru (keel)": lambda: gru(inputs, *weights)[0][0].backward(weigh),
        "gru (torch.nn.GRU)": lambda: peer(inputs)[0].backward(weigh),
        "gru (naive twin)": lambda: reference_gru(inputs, *weights)[0][0].backward(weigh),
        "4 grus (keel)": lambda: gru(inputs, *weights_of_4)[0].sum(0).backward(weigh),
        "linear scan (keel)": lambda: linear_scan(decay, inputs)[0].backward(weigh),
        "linear scan (naive twin)": lambda: reference_linear_scan(decay, inputs)[0].backward(weigh),
        "host of 4 layers (Llama)": lambda: host(input_ids=ids, labels=ids).loss.backward(),
    }


def inference(shape: tuple[int, int, int], device: torch.device, inner: int = 1) -> dict[str, Work]:
    """Return what is timed without gradients, each ``inner`` times."""
    peer, weights = make_gru(shape[2], 1, device)
    inputs, decay = torch.randn(shape, device=device), torch.rand(shape, device=device)
    state = torch.zeros(1, shape[0], shape[2], device=device)
    works: dict[str, Work] = {
        "gru (keel)": lambda: gru(inputs, *weights, state),
        "gru (torch.nn.GRU)": lambda: peer(inputs, state),
        "gru (naive twin)": lambda: reference_gru(inputs, *weights, state),
        "linear scan (keel)": lambda: linear_scan(decay, inputs, state[0]),
        "linear scan (naive twin)": lambda: reference_linear_scan(decay, inputs, state[0]),
    }

    def without_gradients(work: Work) -> Work:
        def run() -> None:
            with torch.no_grad():
                for _ in range(inner):
                    work()

        return run

    return {name: without_gradients(work) for name, work in works.items()}


def make_host(width: int, device: torch.device) -> torch.nn.Module:
    """Return a Llama of four layers, whose training step is what a stream's time adds to."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=max(8, width * 8 // 3 // 8 * 8),
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config).to(device)


def compare(title: str, works: dict[str, Work], repeats: int) -> None:
    """Run all works in turn ``repeats`` times, after one round that does not count, and print the table."""
    wall: dict[str, list[float]] = {name: [] for name in works}
    processor: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            wall_begin, processor_begin = time.perf_counter(), time.process_time()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            wall[name].append(1e3 * (time.perf_counter() - wall_begin))
            processor[name].append(1e3 * (time.process_time() - processor_begin))
    first = next(iter(works))
    print(f"\n{title}\n{'':26}{'wall ms':>10}{'cpu ms':>10}{'ratio':>8}")
    for name in works:
        ratio = median(mine / base for mine, base in zip(wall[name][1:], wall[first][1:], strict=True))
        print(f"{name:26}{median(wall[name][1:]):10.2f}{median(processor[name][1:]):10.2f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
