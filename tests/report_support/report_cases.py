"""Made-up results for the tests of reports: realistic numbers from a made-up law, not from any run."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import combinations

import numpy as np

from keel.evaluation.results import Arm, Comparison, Curve, Provenance, Reference, Results
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
        provenance=Provenance(
            git="3f2c1ab",
            versions={"python": "3.11.2", "keel": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
            device="2 CPU cores, 7.6 GiB",
            seeds=list(SEEDS),
            documents=24,
            started=datetime(2026, 3, 1, 9, 30, tzinfo=UTC),
            wall_s=6312.0,
        ),
        arms=built,
        comparisons=comparisons,
        reference=reference,
    )
