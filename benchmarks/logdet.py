"""Time and memory of the log-determinants: through rank r, d x d in chunks, d x d at once, and the estimate.

    python benchmarks/logdet.py [--rounds 3] [--threads 2] [--batch 4] [--length 512] [--width 384] [--rank 64]

Every candidate runs in a process of its own, so that its greatest memory is its own; ratios are of neighbours in time. The d x d form at
once is what automatic differentiation gives: all covariances, all factorisations, kept for the backward pass. The last table is the
estimate against the exact value at width 1,024, where the coupling is scaled to a spectral radius of about 0.9.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median

import torch
from torch import Tensor

from keel.ops import logdet as module
from keel.ops.logdet import attention_blocks, attention_logdet, attention_weights, degeneracy, visible_past
from keel.ops.logdet_estimate import estimate_logdet

FORMS = ("rank", "chunks", "at once")


def at_once(embeddings_BTD: Tensor, coupling_DD: Tensor) -> Tensor:
    """The formula as it is written, for all tokens: ``log|det(I - M Sigma_t)|`` [B, T]."""
    length, width = embeddings_BTD.shape[1:]
    visible = visible_past(length, length, False)
    weights_BTS = attention_weights(embeddings_BTD @ coupling_DD, embeddings_BTD, visible)
    means_BTD = weights_BTS @ embeddings_BTD
    products = torch.einsum("bts,bsd,bse->btde", weights_BTS, embeddings_BTD, embeddings_BTD)
    covariances = products - means_BTD.unsqueeze(-1) * means_BTD.unsqueeze(-2)
    return torch.linalg.slogdet(torch.eye(width) - coupling_DD @ covariances).logabsdet


def inputs(options: argparse.Namespace, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings of size one, and the factors of a coupling of moderate size."""
    generator = torch.Generator().manual_seed(0)
    width = options.width
    embeddings = torch.randn(options.batch, options.length, width, generator=generator).requires_grad_()
    left, right = (torch.randn(width, rank, generator=generator) * 0.3 * width**-0.5 for _ in range(2))
    return embeddings, left.requires_grad_(), right.requires_grad_()


def work(form: str, options: argparse.Namespace) -> None:
    """Run one form forward and backward."""
    embeddings, left, right = inputs(options, options.rank)
    visible = visible_past(options.length, options.length, False)
    if form == "rank":
        value = attention_logdet(embeddings @ left, embeddings @ right, visible).logabs_BT
    elif form == "chunks":
        value = attention_logdet(embeddings @ (left @ right.T), embeddings, visible).logabs_BT
    else:
        value = at_once(embeddings, left @ right.T)
    value.sum().backward()
    print(json.dumps({"value": float(value.detach().mean())}), file=sys.stderr)


def measured(form: str, options: argparse.Namespace) -> dict[str, float]:
    """Run a form in a process of its own: seconds of wall-clock, and MiB above what it held before."""
    command = [sys.executable, __file__, "--form", form]
    for name in ("threads", "batch", "length", "width", "rank"):
        command += [f"--{name}", str(getattr(options, name))]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def one_form(options: argparse.Namespace) -> None:
    """What the process of a form does: a small run first, then the one that is measured."""
    small = argparse.Namespace(**{**vars(options), "length": 8, "batch": 1})
    work(options.form, small)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    work(options.form, options)
    seconds = time.perf_counter() - begin
    mebibytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"seconds": seconds, "mebibytes": mebibytes}))


def estimates(options: argparse.Namespace) -> None:
    """Print the estimate's error and time against the exact d x d value at width 1,024, forward alone."""
    width, length = 1024, options.length
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(1, length, width, generator=generator)
    coupling = torch.randn(width, width, generator=generator) / width
    visible = visible_past(length, length, False)
    few = visible_past(2, length, False)
    for _ in range(6):  # the radius depends on the attention, which depends on the scale
        blocks = attention_blocks(embeddings @ coupling, embeddings, few)
        coupling = coupling * (0.9 / degeneracy(blocks, width).spectral_radius_BT.max()) ** 0.5
    queries = embeddings @ coupling
    rows = []
    for _ in range(options.rounds):
        times = []
        begin = time.perf_counter()
        exact = attention_logdet(queries, embeddings, visible).logabs_BT
        times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        found = estimate_logdet(queries, embeddings, visible, probes=options.probes, steps=10, generator=generator)
        times.append(time.perf_counter() - begin)
        error = float((found.logabs_BT.mean() - exact.mean()).abs() / exact.mean().abs())
        rows.append((times[0], times[1], error))
    exact_s, estimate_s = (median(row[index] for row in rows) for index in (0, 1))
    print(
        f"estimate, d = {width}, T = {length}, {options.probes} probes x 10 steps: exact {exact_s:.2f} s, "
        f"estimate {estimate_s:.2f} s, ratio {median(row[1] / row[0] for row in rows):.3f}, "
        f"relative error of the mean {median(row[2] for row in rows):.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of log-determinants.")
    for name, default in (
        ("rounds", 3),
        ("threads", 2),
        ("batch", 4),
        ("length", 512),
        ("width", 384),
        ("rank", 64),
        ("probes", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--form", choices=FORMS, help="used by the benchmark itself: run this form alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.form:
        one_form(options)
        return
    print(
        f"[B, T, d] = {[options.batch, options.length, options.width]}, rank {options.rank}, {options.threads} threads, "
        f"{options.rounds} rounds, workspace {module.WORKSPACE:,} numbers"
    )
    rounds = [{form: measured(form, options) for form in FORMS} for _ in range(options.rounds)]
    for form in FORMS:
        seconds, memory = (median(row[form][key] for row in rounds) for key in ("seconds", "mebibytes"))
        slower = median(row["at once"]["seconds"] / row[form]["seconds"] for row in rounds)
        smaller = median(row["at once"]["mebibytes"] / max(1.0, row[form]["mebibytes"]) for row in rounds)
        print(
            f"{form:8} {seconds:8.2f} s  {memory:8.0f} MiB  {slower:6.1f} times faster, {smaller:6.1f} times smaller than at once"
        )
    estimates(options)


if __name__ == "__main__":
    main()
