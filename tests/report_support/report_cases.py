"""Made-up results for the tests of reports: realistic numbers from a made-up law, not from any run."""

from __future__ import annotations

import base64
import math
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from keel.evaluation.results import Arm, Comparison, Curve, Metric, Provenance, Reference, Results, write_results
from keel.evaluation.statistics import Bootstrap, Statistic, TokenScores, bits_per_byte, growth, perplexity

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 24576, 32768, 40960)
SEEDS = (0, 1, 2)
UNITS = {"ppl": "perplexity per token", "bpb": "bits per byte", "growth": "ratio"}
# label, streams, weights of, nats at 256 tokens, nats more each doubling (a huge one stands for a model that breaks)
ARMS: dict[str, tuple[str, list[str], str | None, float, float]] = {
    "rope": ("RoPE", [], None, 4.71, 0.062),
    "nope": ("NoPE", [], None, 4.80, 2.4),
    "alibi": ("ALiBi", [], None, 4.70, 0.004),
    "window": ("Sliding window 256", [], "rope", 4.712, -0.002),
    "yarn": ("YaRN", [], "rope", 4.71, 0.031),
    "structural": ("RoPE + structural stream", ["structural"], None, 4.43, 0.016),
    "window_structural": ("Window + structural stream", ["structural"], "structural", 4.432, -0.003),
}
PROVENANCE = Provenance(
    git="3f2c1ab",
    versions={"python": "3.11.2", "keel": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
    device="2 CPU cores, 7.6 GiB",
    seeds=list(SEEDS),
    documents=24,
    started=datetime(2026, 3, 1, 9, 30, tzinfo=UTC),
    wall_s=6312.0,
)
PAPER = Reference(
    paper="S-Former",
    table="Table 2",
    note="WikiText-103 at the paper's sizes; here a far smaller model and text.",
    values={
        "rope": {"ppl@256": 32.84, "ppl@512": 35.42, "ppl@16384": 248.84, "ppl@40960": 321.40},
        "structural": {"ppl@256": 29.63, "ppl@512": 28.68, "ppl@16384": 54.60, "ppl@40960": 68.50},
        "fusion": {"ppl@256": 29.87, "ppl@512": 29.45, "ppl@16384": 103.11, "ppl@40960": 152.96},
    },
)


def make_scores(
    arms: dict[str, tuple[str, list[str], str | None, float, float]],
    lengths: tuple[int, ...] = LENGTHS,
    documents: int = 24,
    noise: float = 0.004,
) -> dict[str, dict[int, TokenScores]]:
    """Draw a score for each arm and length: a document's difficulty is shared by all arms, `noise` (nats) is not."""
    random = np.random.default_rng(7)
    tokens_D = random.integers(400, 4000, documents).astype(np.float64)
    difficulty_D = random.normal(0, 0.25, documents)
    scores: dict[str, dict[int, TokenScores]] = {}
    for name, (_, _, _, nats, slope) in arms.items():
        seeds_S1 = random.normal(0, noise, (len(SEEDS), 1))
        own_SD = random.normal(0, 5 * noise, (len(SEEDS), documents))
        scores[name] = {}
        for length in lengths:
            doublings = math.log2(length / lengths[0])
            steeper_SD = 1 + 0.3 * random.normal(0, 1, documents) + 0.2 * random.normal(0, 1, (len(SEEDS), 1))
            rate_SD = nats + slope * doublings * steeper_SD + difficulty_D + seeds_S1 + own_SD
            scores[name][length] = TokenScores(nll_SD=rate_SD * tokens_D, tokens_D=tokens_D, bytes_D=4.1 * tokens_D)
    return scores


def statistics_of(scores: dict[int, TokenScores]) -> dict[str, Statistic]:
    """All extrapolation metrics of one arm."""
    near = scores[min(scores)]
    found = {f"ppl@{length}": perplexity(at_length) for length, at_length in scores.items()}
    found |= {f"bpb@{length}": bits_per_byte(at_length) for length, at_length in scores.items()}
    return found | {f"growth@{length}": growth(far, near) for length, far in scores.items() if far is not near}


def make_curve(start: float, end: float) -> Curve:
    """A validation perplexity that falls from `start` to `end` nats, a little apart for each seed."""
    x = [float(step * 4096) for step in range(0, 601, 60)]
    nats = [end + (start - end) * math.exp(-step / 2.2) for step in range(len(x))]
    values: list[list[float | None]] = [[math.exp(n + 0.01 * seed) for seed in SEEDS] for n in nats]
    return Curve(x_label="training tokens", x=x, values=values)


def make_results(
    arms: dict[str, tuple[str, list[str], str | None, float, float]] | None = None,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    noise: float = 0.004,
    compare: bool = True,
    reference: Reference | None = PAPER,
) -> Results:
    """A whole results file; `compare` says whether it holds paired comparisons of stream arms with the others."""
    arms = ARMS if arms is None else arms
    scores = make_scores(arms, lengths, noise=noise)
    bootstrap = Bootstrap(len(SEEDS), 24, resamples=299)
    statistics = {name: statistics_of(scores[name]) for name in arms}
    comparisons = [
        Comparison(
            metric=metric, arm=arm, baseline=baseline, **vars(bootstrap.compare(ours, statistics[baseline][metric]))
        )
        for baseline, arm in combinations(arms, 2)
        for metric, ours in statistics[arm].items()
        if compare and not metric.startswith("bpb")
    ]
    built = {}
    for name, (label, stream, weights_of, nats, _) in arms.items():
        curves = {"validation perplexity": make_curve(8.3, nats)} if weights_of is None else {}
        built[name] = Arm(
            label=label,
            streams=stream,
            weights_of=weights_of,
            params_total=1_149_952 + (1280 if stream else 0),
            params_trainable=1_149_952 + (1280 if stream else 0),
            train_tokens_per_s=None if weights_of else 11_800.0 - 1900 * bool(stream),
            peak_memory_bytes=None if weights_of else (1_412 + 120 * bool(stream)) * 2**20,
            metrics={
                metric: bootstrap.estimate(statistic).metric(UNITS[metric.split("@")[0]], higher_is_better=False)
                for metric, statistic in statistics[name].items()
            },
            curves=curves,
        )
    return Results(
        recipe="s_former/wikitext103_extrapolation",
        scale="small",
        title="Does a structural stream keep perplexity flat beyond the training length?",
        provenance=PROVENANCE,
        arms=built,
        comparisons=comparisons,
        reference=reference,
    )


# Other measurements: label and streams of an arm, then the means of its metrics.
Measured = dict[str, tuple[str, list[str], dict[str, float]]]
LOWER = ("markov.l1", "lambada.ppl", "pg19.ppl", "gate.saturation")
SPREAD = 0.01
"""Half of an interval, of a mean; that of a paired difference is half as wide."""


def _over(quantity: str, kind: str, values: tuple[int, ...], start: float, step: float) -> dict[str, float]:
    return {f"{quantity}@{kind}{value}": start + step * index for index, value in enumerate(values)}


def _dyck(accuracy: float, exact: float, drop: float, l1: float) -> dict[str, float]:
    return {
        "dyck.structural_accuracy": accuracy,
        "dyck.exact_match": exact,
        "markov.l1": l1,
        **_over("dyck.structural_accuracy", "L", (64, 80, 100), accuracy, -drop),
        **_over("dyck.structural_accuracy", "d", (3, 4, 5, 6, 7, 8), accuracy, -drop / 2),
        **_over("dyck.exact_match", "L", (64, 80, 100), exact, -drop / 2),
        "json.field_f1@seen": accuracy,
        "json.field_f1@unseen": accuracy - drop,
    }


def _text(ppl: float, accuracy: float, book_ppl: float, book_accuracy: float) -> dict[str, float]:
    return {
        "lambada.ppl": ppl,
        "lambada.accuracy": accuracy,
        "pg19.ppl": book_ppl,
        "pg19.accuracy": book_accuracy,
        **_over("lambada.accuracy", "", (512, 1024), accuracy, 0.002),
        **_over("lambada.ppl", "", (512, 1024), ppl, -20.0),
    }


DYCK: Measured = {
    "rope": ("RoPE", [], _dyck(0.55, 0.21, 0.12, 0.3)),
    "learned": ("Learned positions", [], _dyck(0.56, 0.20, 0.15, 0.31)),
    "nope": ("NoPE", [], _dyck(0.78, 0.30, 0.05, 0.2)),
    "structural": (
        "RoPE + structural stream",
        ["structural"],
        _dyck(0.92, 0.302, 0.02, 0.4)
        | {"alpha_depth.r": 0.85}
        | _over("gate.saturation", "layer", (1, 2, 3, 4), 0.2, 0.1),
    ),
}
DYCK_PAPER = Reference(
    paper="S-Former",
    table="Table 1",
    note="The paper gives neither seeds nor intervals.",
    values={
        "rope": {"dyck.structural_accuracy": 0.542, "dyck.structural_accuracy@L64": 0.6},
        "nope": {"dyck.structural_accuracy": 0.776},
        "structural": {"dyck.structural_accuracy": 0.926, "dyck.structural_accuracy@L64": 0.93, "alpha_depth.r": 0.866},
        "fusion": {"dyck.structural_accuracy": 0.91},
    },
)
TEXT: Measured = {
    "rope": ("RoPE", [], _text(620.0, 0.077, 55.8, 0.301)),
    "structural": ("RoPE + structural stream", ["structural"], _text(338.0, 0.128, 47.1, 0.324)),
}


def make_measured(measured: Measured, *, compare: bool = True, **changes: Any) -> Results:
    """A results file of other measurements than extrapolation; `changes` replace fields of the file's top level."""
    arms = {
        name: Arm(
            label=label,
            streams=streams,
            params_total=1_149_952,
            params_trainable=1_149_952,
            train_tokens_per_s=9_900.0,
            peak_memory_bytes=1_412 * 2**20,
            metrics={metric: make_metric(metric, mean) for metric, mean in means.items()},
        )
        for name, (label, streams, means) in measured.items()
    }
    pairs = [(arm, baseline, metric) for baseline, arm in combinations(arms, 2) for metric in arms[arm].metrics]
    fields: dict[str, Any] = {
        "recipe": "s_former/dyck",
        "scale": "small",
        "title": "Does a structural stream follow brackets?",
        "provenance": PROVENANCE,
        "comparisons": [
            compared(metric, arm, baseline, measured)
            for arm, baseline, metric in pairs
            if compare and metric in arms[baseline].metrics
        ],
    }
    return Results(arms=arms, **fields | changes)


def make_metric(name: str, mean: float) -> Metric:
    """One value for each seed, close together, and an interval around them."""
    quantity = name.partition("@")[0]
    return Metric(
        values=[mean * (1 + SPREAD * (seed - 1) / 2) for seed in SEEDS],
        mean=mean,
        ci95=(mean * (1 - SPREAD), mean * (1 + SPREAD)),
        unit="" if quantity.endswith((".r", ".l1")) else "perplexity per token" if "ppl" in quantity else "share",
        higher_is_better=quantity not in LOWER,
    )


def compared(metric: str, arm: str, baseline: str, measured: Measured) -> Comparison:
    """The paired difference of two arms."""
    ours, theirs = (measured[name][2][metric] for name in (arm, baseline))
    difference, half = ours - theirs, SPREAD / 2 * max(ours, theirs)
    decided = abs(difference) > half
    ci95 = (difference - half, difference + half)
    return Comparison(
        metric=metric, arm=arm, baseline=baseline, difference=difference, ci95=ci95, p=0.0002 if decided else 0.4
    )


def make_dyck(**changes: Any) -> Results:
    """Synthetic languages: some metrics won, some lost or undecided, and some that only the stream has."""
    return make_measured(DYCK, **{"reference": DYCK_PAPER} | changes)


def make_text(**changes: Any) -> Results:
    """Next words of text: four primary metrics, of which two are better when low, and two at so many tokens."""
    return make_measured(TEXT, **{"recipe": "s_former/text", "title": "Next words"} | changes)


def make_mixed(**changes: Any) -> Results:
    """Extrapolation and other measurements of the same two arms."""
    far = make_text()
    results = make_results({name: ARMS[name] for name in far.arms}, lengths=(256, 1024))
    arms = {
        name: arm.model_copy(update={"metrics": arm.metrics | far.arms[name].metrics})
        for name, arm in results.arms.items()
    }
    fields = {"arms": arms, "comparisons": [*results.comparisons, *far.comparisons], "recipe": "s_former/mixed"}
    return results.model_copy(update=fields | changes)


PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def write_with_pictures(results: Results, folder: Path) -> Path:
    """Write results that list two pictures of probes, one of them with a space in its name, and the pictures."""
    figures = [
        {"file": "figures/alpha map.png", "title": "Gate over depth", "caption": "A heat map."},
        {"file": "figures/heads.svg", "title": "Heads"},
    ]
    (folder / "figures").mkdir(parents=True)
    (folder / "figures" / "alpha map.png").write_bytes(PIXEL)
    (folder / "figures" / "heads.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"><path d="M0 0H1V1Z"/></svg>'
    )
    data = results.model_dump(by_alias=True) | {"figures": figures}
    return write_results(Results.model_validate(data), folder / "results.json")


def replace_metric(results: Results, arm: str, metric: str, **changes: Any) -> Results:
    """Return results with some fields of one metric of an arm changed."""
    data = results.model_dump(by_alias=True)
    data["arms"][arm]["metrics"][metric] |= changes
    return Results.model_validate(data)
