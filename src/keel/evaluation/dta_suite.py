"""The evaluation suite of the Dynamic Transformer Architecture on real generation (DTA §11), for a path and, as far as it can, a bare host.

Each row begins with a paragraph of a held-out document. It is continued once freely, once with random tokens read into the middle;
what it wrote is read again while the substrate degrades, and while its hidden states are disturbed ever more. Stories of facts are
continued and judged, and a planted fact is asked for. A metric is the mean over rows, which are its items.

Shapes: R rows, T tokens, K state size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keel.data.disruptions import HIDDEN_RMS, KINDS, with_hidden_noise
from keel.data.languages import Facts
from keel.data.languages.base import generator
from keel.evaluation import dta_metrics as dta
from keel.evaluation.inference import sentences
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.judges import TopicJudge, answer_probabilities, count_contradictions, planted_fact
from keel.evaluation.rollout import Rollout, read_signals, roll_out
from keel.evaluation.statistics import Array
from keel.hosts import rewritten_layer_input
from keel.model import KeelForCausalLM
from keel.streams import DynamicStateStream
from keel.streams.dynamic_state import Disturbance, TraceTelemetry, simulated_trace

ESCALATION = (1.0, 2.0, 4.0, 8.0, 16.0)  # hidden noise in root mean squares, §11.10
PASSAGE = 50  # tokens whose topic is judged together
DEGRADED_MEMORY = 0.4  # distress of a degraded substrate: S falls to about a third under the weights a path begins with


@dataclass(frozen=True, kw_only=True)
class SuiteSizes:
    """How much is generated.

    Attributes:
        tokens: of every free continuation; §11.2 has 800 to 1,200.
        noise: random tokens read into the interrupted one; as long before and after it are ``around`` tokens.
        around: see ``noise``.
        distances: tokens between a planted fact and the question; the last is that of ``dta.dct``.
        planted: facts planted at each distance.
    """

    tokens: int = 1000
    noise: int = 40
    around: int = 150
    distances: tuple[int, ...] = (50, 400)
    planted: int = 16


Tell = Callable[[str, int, int], None]


def dta_suite(
    model: KeelForCausalLM,
    prompts_RT: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    topics: TopicJudge,
    sizes: SuiteSizes,
    *,
    contradicts: Callable[[Sequence[str], str], bool] | None = None,
    device: torch.device | str = "cpu",
    tell: Tell = lambda what, done, of: None,
) -> tuple[list[ItemMetric], Rollout]:
    """Measure all that the model has.

    Args:
        prompts_RT: a paragraph of a held-out document a row.
        contradicts: judge of contradictions in free text, see ``dta_metrics.contradicting_pairs``; None leaves them to the stories,
            which are judged exactly.
        tell: called with what is measured now, and how much of it is done.
    Returns: ``dta.<metric>`` and ``generation.repetition`` and ``generation.drift``, and the interrupted continuation, whose signals
        can be drawn. A bare host has CPI, TCS, DCT and the last two alone. With ``contradicts`` also ``dta.cpi_text``.
    """
    prompts_RT = prompts_RT.to(device)
    tell("free generation", 0, 5)
    free = roll_out(model, [prompts_RT, sizes.tokens], seed=0)
    values = text_metrics(free, tokenizer, topics)
    tell("interrupted generation", 1, 5)
    source = np.random.default_rng(0)
    noise_RT = torch.from_numpy(source.integers(len(tokenizer), size=(len(prompts_RT), sizes.noise))).to(device)
    interrupted = roll_out(model, [prompts_RT, sizes.around, noise_RT, sizes.around], seed=1)
    if model.wires.first(DynamicStateStream) is not None:
        values |= continuity_metrics(free)
        values |= interruption_metrics(interrupted)
        tell("a substrate that degrades", 2, 5)
        values |= substrate_metrics(model, free.ids_BT.to(device))
        tell("escalating noise", 3, 5)
        values["rdt"] = divergence(model, free.ids_BT[:, : 4 * sizes.around].to(device))
        rows = [{name: each[row] for name, each in values.items()} for row in range(len(prompts_RT))]
        values["dtss"] = [dta.dtss(row) for row in rows]
    tell("facts", 4, 5)
    metrics = [_metric(name, each) for name, each in values.items()]
    metrics += fact_metrics(model, tokenizer, len(prompts_RT), sizes, device)
    if contradicts is not None:
        metrics.append(contradictions_of_text(free, tokenizer, contradicts))
    return metrics, interrupted


def _metric(name: str, values: Sequence[float]) -> ItemMetric:
    if name in dta.METRICS:
        about = dta.METRICS[name]
        return mean(f"dta.{name}", values, unit=about.unit, higher_is_better=about.higher_is_better)
    return mean(f"generation.{name}", values, unit="share", higher_is_better=False)


def text_metrics(free: Rollout, tokenizer: PreTrainedTokenizerBase, topics: TopicJudge) -> dict[str, list[float]]:
    """TCS, repetition and drift of free continuations: of their text alone."""
    prompt_end = free.stages[0][1]
    found: dict[str, list[float]] = {"tcs": [], "repetition": [], "drift": []}
    for row in free.ids_BT.tolist():
        prompt, written = tokenizer.decode(row[:prompt_end], skip_special_tokens=True), row[prompt_end:]
        parts = dta.passages(len(written), PASSAGE)
        texts = [tokenizer.decode(written[start:end], skip_special_tokens=True) for start, end in parts]
        consistent = topics.topics(texts) == topics.topics([prompt])[0]
        found["tcs"].append(dta.tcs(consistent.tolist(), [end - start for start, end in parts]))
        found["repetition"].append(dta.repetition(written))
        last_quarter = tokenizer.decode(written[-len(written) // 4 :], skip_special_tokens=True)
        found["drift"].append(topics.drift(prompt, last_quarter))
    return found


def contradictions_of_text(
    free: Rollout, tokenizer: PreTrainedTokenizerBase, contradicts: Callable[[Sequence[str], str], bool]
) -> ItemMetric:
    """Return ``dta.cpi_text``: sentences of free continuations that contradict one of the few before them, a generated token."""
    prompt_end, counts, tokens = free.stages[0][1], [], []
    for row in free.ids_BT.tolist():
        written = row[prompt_end:]
        told = sentences(tokenizer.decode(written, skip_special_tokens=True))
        counts.append(float(dta.contradicting_pairs(told, contradicts)))
        tokens.append(float(len(written)))
    return ItemMetric(
        name="dta.cpi_text", unit=dta.METRICS["cpi"].unit, higher_is_better=False, numerators=tuple(counts), denominators=tuple(tokens)
    )  # fmt: skip


def continuity_metrics(free: Rollout) -> dict[str, list[float]]:
    """LCDS, PF, ISI, ACS and DOI of free continuations."""
    signals = {name: free.stage(1, name) for name in ("coherence", "alignment", "tpc", "state", "query")}
    before_RK = free.stage(0, "tpc")[:, -1:]
    rows = range(len(free.ids_BT))
    return {
        "lcds": [dta.lcds(signals["coherence"][row]) for row in rows],
        "pf": [dta.pf(np.concatenate([before_RK[row], signals["tpc"][row]])) for row in rows],
        "isi": [dta.isi(signals["state"][row]) for row in rows],
        "acs": [dta.acs(signals["query"][row], signals["tpc"][row]) for row in rows],
        "doi": [dta.doi(signals["alignment"][row]) for row in rows],
    }


def interruption_metrics(interrupted: Rollout) -> dict[str, list[float]]:
    """ICT, NSR and RSCS of continuations that random tokens interrupt.

    Half of what follows the noise is for recovering; what is compared comes after that.
    """
    coherence, alignment, noise = (
        [interrupted.stage(stage, name) for stage in (1, 2, 3)] for name in ("coherence", "alignment", "noise")
    )
    late = slice(coherence[2].shape[1] // 2, None)
    rows = range(len(interrupted.ids_BT))
    return {
        "ict": [dta.ict(coherence[0][row], coherence[2][row, late]) for row in rows],
        "nsr": [dta.nsr(np.concatenate([noise[1][row], noise[2][row]]), noise[0][row]) for row in rows],
        "rscs": [dta.rscs(alignment[1][row], alignment[2][row, late]) for row in rows],
    }


def substrate_metrics(model: KeelForCausalLM, ids_RT: Tensor) -> dict[str, list[float]]:
    """SSS, GDI and SSR: rows are read on a healthy machine and on one whose middle third is under memory pressure."""
    found = model.wires.first(DynamicStateStream)
    assert found is not None
    length = ids_RT.shape[1]
    third = length // 3
    pressure = Disturbance(kind="memory_pressure", start=third, length=third, level=DEGRADED_MEMORY)
    trace_TR = simulated_trace(length, [pressure], seed=0)
    healthy = read_signals(model, ids_RT)
    before, found[1].telemetry = found[1].telemetry, TraceTelemetry(trace_TR)
    try:
        degraded = read_signals(model, ids_RT)
    finally:
        found[1].telemetry = before
    instability_T = trace_TR.mean(-1).double().numpy()
    values: dict[str, list[float]] = {"sss": [], "gdi": [], "ssr": []}
    for row in range(len(ids_RT)):
        lengths = [np.linalg.norm(signals["state"][row], axis=-1) for signals in (healthy, degraded)]
        degradation_T = 1 - lengths[1] / np.maximum(lengths[0], 1e-9)
        values["sss"].append(dta.sss(instability_T, degradation_T))
        middle = [
            {name: signal[row, third : 2 * third] for name, signal in signals.items()}
            for signals in (healthy, degraded)
        ]
        values["gdi"].append(dta.gdi(*middle))
        values["ssr"].append(dta.ssr(degraded["alignment"][row, 2 * third + third // 2 :]))
    return values


def divergence(model: KeelForCausalLM, ids_RT: Tensor) -> list[float]:
    """RDT of every row: its second half is read under hidden noise of every size of ``ESCALATION``."""
    level_RT = torch.zeros(ids_RT.shape, device=ids_RT.device)
    level_RT[:, ids_RT.shape[1] // 2 :] = 1.0
    kind_RT = torch.where(level_RT > 0, KINDS.index("hidden"), 0)
    seeds_R = torch.arange(len(ids_RT))
    middle = model.host.config.num_hidden_layers // 2

    def lengths(size: float) -> Array:
        noisy = functools.partial(with_hidden_noise, level_RT * (size / HIDDEN_RMS), kind_RT, seeds_R)
        with rewritten_layer_input(model.host, model.family, middle, noisy):
            found: Array = np.linalg.norm(read_signals(model, ids_RT)["state"], axis=-1)
        return found

    calm_RT, runs = lengths(0.0), [lengths(size) for size in ESCALATION]
    return [dta.rdt([run[row] for run in runs], calm_RT[row]) for row in range(len(ids_RT))]


def fact_metrics(
    model: KeelForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    stories: int,
    sizes: SuiteSizes,
    device: torch.device | str,
) -> list[ItemMetric]:
    """CPI of continued stories, how many statements they make a token (CPI is empty without), and DCT at every distance."""
    about = dta.METRICS["cpi"]
    prompts = [Facts().story(generator("cpi", index), 12) for index in range(stories)]
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    shortest = min(map(len, encoded))  # a shorter story is a story
    ids_RT = torch.tensor([ids[:shortest] for ids in encoded]).to(device)
    run = roll_out(model, [ids_RT, sizes.tokens], seed=2)
    counts = []
    for row in run.ids_BT.tolist():
        texts = [tokenizer.decode(part, skip_special_tokens=True) for part in (row[:shortest], row[shortest:])]
        counts.append(count_contradictions(*texts))
    tokens = (float(sizes.tokens),) * len(counts)
    metrics = [
        ItemMetric(
            name="dta.cpi", unit=about.unit, higher_is_better=False, denominators=tokens,
            numerators=tuple(float(wrong) for wrong, _ in counts),
        ),
        ItemMetric(
            name="facts.statements", unit="statements a token", higher_is_better=None, denominators=tokens,
            numerators=tuple(float(statements) for _, statements in counts),
        ),
    ]  # fmt: skip
    for distance in sizes.distances:
        shares = []
        for seed in range(sizes.planted):
            story, answers, planted = planted_fact(tokenizer, distance, seed)
            probabilities = answer_probabilities(model, story, answers)
            shares.append(dta.dct(probabilities, planted) if math.fsum(probabilities) else 0.0)
        name = "dta.dct" if distance == sizes.distances[-1] else f"dta.dct_near@{distance}"
        metrics.append(mean(name, shares, unit=dta.METRICS["dct"].unit, higher_is_better=True))
    return metrics
