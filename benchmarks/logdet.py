"""Time and memory of the log-determinants: through rank r, d x d in chunks, d x d at once, and the estimate.

python benchmarks/logdet.py
python benchmarks/logdet.py --batch 1 --rank 32

Every candidate runs in a process of its own, so that its greatest memory is its own; ratios are of neighbours in time. The d x d form at
once is what automatic differentiation gives: all covariances, all factorisations, kept for the backward pass. The last lines are the
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

import timing
import torch
from torch import Tensor

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


def estimates(given: argparse.Namespace) -> dict[str, list[float]]:
    """The estimate against the exact d x d value, forward alone, round by round: ratio of times, error of the mean and of a token.

    Errors are relative to the mean of the exact values' sizes.
    """
    width, length = given.estimate_width, given.length
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(1, length, width, generator=generator)
    coupling = torch.randn(width, width, generator=generator) / width
    visible = visible_past(length, length, False)
    few = visible_past(2, length, False)
    for _ in range(6):  # the radius depends on the attention, which depends on the scale
        blocks = attention_blocks(embeddings @ coupling, embeddings, few)
        coupling = coupling * (0.9 / degeneracy(blocks, width).spectral_radius_BT.max()) ** 0.5
    queries = embeddings @ coupling
    found: dict[str, list[float]] = {"wall": [], "error of the mean": [], "error of a token": []}
    for _ in range(given.rounds):
        begin = time.perf_counter()
        exact_BT = attention_logdet(queries, embeddings, visible).logabs_BT
        between = time.perf_counter()
        estimate_BT = estimate_logdet(
            queries, embeddings, visible, probes=given.probes, steps=10, generator=generator
        ).logabs_BT
        found["wall"].append((time.perf_counter() - between) / (between - begin))
        size = exact_BT.abs().mean()
        found["error of the mean"].append(float((estimate_BT.mean() - exact_BT.mean()).abs() / size))
        found["error of a token"].append(float((estimate_BT - exact_BT).abs().mean() / size))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser, rounds=3)
    sizes = (("batch", 4), ("length", 512), ("width", 384), ("rank", 64), ("probes", 8), ("estimate-width", 1024))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--form", choices=FORMS, help="used by the benchmark itself: run this form alone")
    given = parser.parse_args()
    if given.size == "toy":
        given.batch, given.length, given.width, given.rank, given.estimate_width = 1, 12, 16, 4, 16
    timing.prepare(given)
    if given.form:
        one_form(given)
        return
    rounds = [{form: measured(form, given) for form in FORMS} for _ in range(given.rounds)]
    rows = [
        {"arm": form, **{key: median(row[form][key] for row in rounds) for key in ("seconds", "mebibytes")}}
        for form in FORMS
    ]
    lines = []
    for form in ("rank", "chunks"):
        slower = {"wall": timing.spread([row["at once"]["seconds"] / row[form]["seconds"] for row in rounds])}
        least = timing.Target(least=40.0) if form == "rank" else None
        lines.append(timing.comparison(f"time, at once / {form}", slower, least))
        smaller = [max(1.0, row["at once"]["mebibytes"]) / max(1.0, row[form]["mebibytes"]) for row in rounds]
        least = timing.Target(least=20.0) if form == "rank" else None
        lines.append(
            timing.comparison(f"memory, at once / {form}", {"memory": timing.spread(smaller)}, least, judged="memory")
        )
    for kind, values in estimates(given).items():
        most = {"wall": 0.1, "error of the mean": 0.02}.get(kind)
        target = None if most is None else timing.Target(most=most)
        label = f"estimate of {given.probes} probes / exact, d = {given.estimate_width}"
        lines.append(timing.comparison(label, {kind: timing.spread(values)}, target, judged=kind))
    shape = f"[B, T, d] = {[given.batch, given.length, given.width]}, rank {given.rank}"
    timing.finish("logdet", given, f"Log-determinants, forward and backward, {shape}", rows, lines)


if __name__ == "__main__":
    main()
