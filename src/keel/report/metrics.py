"""How the names of metrics are taken apart: `family.metric@condition`, and the groups that differ in condition alone.

A condition may end in a number, whose prefix says what it counts: `L80` is length 80, `d6` depth 6, `layer3` layer 3, and a
plain `1024` is 1,024 tokens, or, of noise, drift and excluded sequences, a standard deviation. Any other condition is a word,
such as `unseen`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from keel.evaluation.results import Results

EXTRAPOLATION = ("ppl", "bpb", "growth")
"""The families of `keel.evaluation.extrapolation`, which have a verdict, notes and figures of their own."""
FAULTS = "fault."
"""What the metrics of injected faults begin with."""
_NUMBERED = re.compile(r"^(?P<kind>[A-Za-z_]*?)(?P<value>\d+(?:\.\d+)?)$")
_KINDS = {"": "tokens", "L": "length", "d": "depth", "w": "width"}
_MEDIAN = ".median"  # what the paper's summary of a quantity ends in (keel.evaluation.robustness)
_SIGMA = "σ"  # what a plain number counts in these families
_SIGMA_FAMILIES = ("noise", "drift", "excluded")
_QUANTITIES = {
    "growth": "growth of perplexity",
    "noise.ratio": "perplexity under noise / clean",
    "noise.ratio_snr": "perplexity under noise / clean, σ in units of the embeddings",
    "drift.ratio": "perplexity under drift / clean",
    "drift.ratio_snr": "perplexity under drift / clean, σ in units of the embeddings",
    "embedding_rms": "root mean square of the embeddings",
    "signal.auroc_noise": "AUROC of N for disrupted tokens",
    "signal.auroc_coherence": "AUROC of 1 − I for disrupted tokens",
    "baseline.auroc_surprisal": "AUROC of the token's surprisal for disrupted tokens",
    "baseline.auroc_residual": "AUROC of the residual stream's norm for disrupted tokens",
    "dta.lcds": "LCDS, logical coherence decay",
    "dta.cpi": "CPI, contradictions",
    "dta.cpi_text": "CPI of free text, by a model of inference",
    "dta.tcs": "TCS, topic continuity",
    "dta.pf": "PF, persistence fidelity",
    "dta.ict": "ICT, interrupted continuity",
    "dta.dct": "DCT, dependency carryover",
    "dta.dct_near": "DCT, near",
    "dta.nsr": "NSR, noise spike",
    "dta.isi": "ISI, change of the state",
    "dta.rdt": "RDT, rampancy divergence",
    "dta.acs": "ACS, alignment cohesion",
    "dta.doi": "DOI, drift onset",
    "dta.rscs": "RSCS, self-correction",
    "dta.sss": "SSS, substrate sensitivity",
    "dta.gdi": "GDI, loss of quality on a degraded substrate",
    "dta.ssr": "SSR, alignment after the substrate recovered",
    "dta.dtss": "DTSS, the composite",
    "dta.topic_accuracy": "accuracy of the judge of topics",
    "facts.statements": "statements in continued stories",
    "generation.nll": "next-token loss of long held-out text",
    "generation.repetition": "repeated 4-grams of what was generated",
    "generation.drift": "drift of what was generated from its prompt",
    "excluded.share": "share of sequences excluded",
    "margin.smallest": "least margin of a sequence",
    "variance.mean": "attention-weighted variance",
    "log_det.mean": "log-determinant of valid sequences",
    "log_density.mean": "log-density of valid sequences",
    "uuas": "UUAS of the structural probe",
    "uuas.nonsense": "UUAS of the structural probe on nonsense words",
    "uuas.random": "UUAS of the structural probe on random vectors",
    "uuas.linear": "UUAS of a chain of neighbours",
    "leak.max_logit_change": "greatest change of earlier logits by later words",
    "leak.mean_logit_change": "mean change of earlier logits by later words",
    "peak_density": "peak of the conditional density",
    "probe.token_r2": "R² of token positions",
    "probe.token_r2.ap": "R² of token positions in the position stream",
    "probe.token_r2.sem": "R² of token positions in the semantic stream",
    "probe.segment_r2": "R² of segment indices",
    "probe.segment_r2.ap": "R² of segment indices in the position stream",
    "probe.segment_r2.sem": "R² of segment indices in the semantic stream",
    "probe.progress_r2": "R² of progress within a segment",
    "probe.progress_r2.ap": "R² of progress within a segment in the position stream",
    "probe.progress_r2.sem": "R² of progress within a segment in the semantic stream",
    "ap.variance_2pc": "variance of the position table in two components",
    "ap.variance_2pc_random": "variance in two components of a random table",
    "ap.variance_2pc_excess": "variance in two components, above a random table's",
    "ap.dct_low4_pc1": "low-frequency power of the first component",
    "ap.dct_low4_pc2": "low-frequency power of the second component",
    "heads.semantic": "semantic heads",
    "heads.ap": "heads of absolute position",
    "heads.rp": "heads of relative position",
    "heads.semantic_fraction": "share of semantic heads",
    "heads.ap_fraction": "share of heads of absolute position",
    "heads.rp_fraction": "share of heads of relative position",
    "heads.share_semantic": "influence of meaning on heads",
    "heads.share_ap": "influence of absolute position on heads",
    "heads.share_rp": "influence of relative position on heads",
    "linguistic.pos": "probe of parts of speech",
    "linguistic.dependency_depth": "probe of depth in the dependency tree",
    "linguistic.subject_number": "probe of the subject's number",
    "linguistic.sentence_order": "probe of the order of sentences",
    "linguistic.top_constituents": "probe of top constituents",
    "linguistic.tree_depth": "probe of the depth of the tree",
    "glue.sst2": "SST-2",
    "glue.mrpc": "MRPC",
    "glue.rte": "RTE",
    "glue.stsb": "STS-B",
    "squad.em": "SQuAD, exact match",
    "squad.f1": "SQuAD, F1",
    "inter.ap_r2": "R² of the target's position stream, told from this model",
    "inter.semantic_r2": "R² of the target's semantic stream, told from this model",
}
_WORDS = {
    "aurc": "AURC",
    "ece": "ECE",
    "ppl": "perplexity",
    "bpb": "bits per byte",
    "alpha": "α",
    "dyck": "Dyck",
    "json": "JSON",
    "markov": "Markov",
    "lambada": "LAMBADA",
    "pg19": "PG-19",
    "train": "Training text",
    "blimp": "BLiMP",
    "cola": "CoLA",
    "mcc": "Matthews' correlation",
    "mmlu": "MMLU",
    "hellaswag": "HellaSwag",
    "winogrande": "WinoGrande",
    "f1": "F1",
    "l1": "L1",
    "mlm": "MLM",
    "r2": "R²",
    "ap": "AP",
    "rp": "RP",
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Metrics of one quantity under conditions of one kind.

    Args:
        quantity: what stands before the `@`.
        kind: prefix of the numbers, "" for tokens; None where the conditions are words.
        conditions: metric names by condition, ascending where they are numbers, else in the order of the file.
    """

    quantity: str
    kind: str | None
    conditions: dict[str, str]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics."""
        return list(self.conditions.values())

    @property
    def values(self) -> list[float]:
        """The numbers of the conditions; empty where they are words."""
        return [found[1] for condition in self.conditions if (found := number_in(condition))]

    @property
    def columns(self) -> list[str]:
        """Each condition as a reader sees it under the name of its kind: "40,960" of `@40960`, "6" of `@d6`."""
        return [count(value) for value in self.values] or [condition.replace("_", " ") for condition in self.conditions]

    @property
    def axis(self) -> str:
        """Name of what the conditions count: "tokens", "depth", or "condition" where they are words."""
        return "condition" if self.kind is None else kind_name(self.kind)

    @property
    def title(self) -> str:
        """Words for the group, without a capital: "Dyck exact match by length"."""
        words = quantity_phrase(self.quantity)
        return words if self.quantity in EXTRAPOLATION else f"{words} by {self.axis}"


def split_metric(name: str) -> tuple[str, str]:
    """Return ("dyck.exact_match", "L80") for "dyck.exact_match@L80"; the second is empty without a condition."""
    quantity, _, condition = name.partition("@")
    return quantity, condition


def number_in(condition: str) -> tuple[str, float] | None:
    """Return ("L", 80.0) for "L80" and ("", 256.0) for "256", None for a condition that is a word."""
    match = _NUMBERED.match(condition)
    return (match["kind"], float(match["value"])) if match else None


def kind_name(kind: str) -> str:
    """Return what a kind of condition counts: "L" is "length", "layer" is "layer"."""
    return _KINDS.get(kind, kind.replace("_", " ").strip())


def count(value: float) -> str:
    """Write the number of a condition: 40960 is "40,960"."""
    return f"{value:,.0f}" if value.is_integer() else f"{value:g}"


def quantity_phrase(quantity: str) -> str:
    """Return the words for a quantity: "dyck.exact_match" is "Dyck exact match"."""
    if quantity.endswith(_MEDIAN):
        return f"{quantity_phrase(quantity.removesuffix(_MEDIAN))}, median of 100 subsamples"
    words = re.split(r"[._]", quantity)
    return _QUANTITIES.get(quantity) or " ".join(_WORDS.get(word, word) for word in words)


def condition_phrase(condition: str, quantity: str = "") -> str:
    """Return "at 80 tokens", "at depth 6", "at σ 0.4" or "(unseen)"; nothing without a condition."""
    if not condition:
        return ""
    numbered = number_in(condition)
    if numbered is None:
        return f"({condition.replace('_', ' ')})"
    kind, value = _kind(quantity, numbered[0]), numbered[1]
    return f"at {count(value)} tokens" if kind == "" else f"at {kind_name(kind)} {count(value)}"


def metric_phrase(name: str) -> str:
    """Return the words for a metric: "ppl@4096" is "perplexity at 4,096 tokens"."""
    quantity, condition = split_metric(name)
    return f"{quantity_phrase(quantity)} {condition_phrase(condition, quantity)}".strip()


def _kind(quantity: str, prefix: str) -> str:
    return _SIGMA if not prefix and quantity.split(".")[0] in _SIGMA_FAMILIES else prefix


def is_extrapolation(name: str) -> bool:
    """Whether a metric is one of extrapolation: perplexity, bits per byte or growth at so many tokens."""
    quantity, condition = split_metric(name)
    return bool(condition) and quantity in EXTRAPOLATION


def metric_names(results: Results) -> list[str]:
    """Return every metric that some arm has, in the order in which they first appear."""
    return list(dict.fromkeys(name for arm in results.arms.values() for name in arm.metrics))


def single_metrics(results: Results) -> list[str]:
    """Return the metrics without a condition, in the order in which they first appear; those of faults have a table of their own."""
    return [name for name in metric_names(results) if not split_metric(name)[1] and not name.startswith(FAULTS)]


def details_of(results: Results) -> dict[str, list[str]]:
    """Return by family the metrics that say of what parts another of it is the mean, where they are many: BLiMP's paradigms.

    They are those without a better or a worse, ten or more, of a family that has a metric with one.
    """
    singles = single_metrics(results)
    directed = {name.split(".")[0] for name in singles if unit_of(results, name)[1] is not None}
    parts: dict[str, list[str]] = {}
    for name in singles:
        if name.split(".")[0] in directed and unit_of(results, name)[1] is None:
            parts.setdefault(name.split(".")[0], []).append(name)
    return {family: names for family, names in parts.items() if len(names) >= 10}


def groups_of(results: Results) -> list[Group]:
    """Return the metrics with a condition, grouped by quantity and kind, in the order in which they first appear."""
    found: dict[tuple[str, str | None], dict[str, str]] = {}
    for name in metric_names(results):
        quantity, condition = split_metric(name)
        if condition:
            numbered = number_in(condition)
            kind = _kind(quantity, numbered[0]) if numbered else None
            found.setdefault((quantity, kind), {})[condition] = name
    return [
        Group(quantity=quantity, kind=kind, conditions=_ascending(conditions) if kind is not None else conditions)
        for (quantity, kind), conditions in found.items()
    ]


def _ascending(conditions: dict[str, str]) -> dict[str, str]:
    return dict(sorted(conditions.items(), key=lambda pair: (number_in(pair[0]) or ("", 0.0))[1]))


def lengths_of(results: Results, quantity: str) -> list[int]:
    """Return every number of tokens at which some arm measured this quantity, ascending."""
    groups = [group for group in groups_of(results) if (group.quantity, group.kind) == (quantity, "")]
    return [int(value) for group in groups for value in group.values]


def _is_headline(group: Group, leading: dict[str, str]) -> bool:
    """Whether the verdict speaks of a group's hardest condition; ``leading`` is the first metric without one, by family."""
    if group.kind in (None, "layer", ""):
        return False
    family = group.quantity.split(".")[0]
    return leading.get(family, group.quantity) == group.quantity


def primary_metrics(results: Results) -> list[str]:
    """Return the metrics that the verdict speaks of.

    They are perplexity at the greatest length, where it was measured over lengths; all metrics without a condition; and at the hardest
    condition of every kind (the greatest length, depth, noise) what comes first of its family, or whose family has conditions alone.
    In a file that has neither of the first two, the last metric of every group.
    """
    lengths, singles, groups = lengths_of(results, "ppl"), single_metrics(results), groups_of(results)
    leading = {name.split(".")[0]: name for name in reversed(singles)}
    hardest = [group.metrics[-1] for group in groups if singles and _is_headline(group, leading)]
    primary = [f"ppl@{length}" for length in lengths[-1:]] + singles + hardest
    primary = primary or [group.metrics[-1] for group in groups]
    return [metric for metric in primary if unit_of(results, metric)[1] is not None]


DIRECTIONS = {True: "higher is better", False: "lower is better", None: "more is neither better nor worse"}


def unit_of(results: Results, metric: str) -> tuple[str, bool | None]:
    """Return the unit of a metric and whether higher is better (None: neither), as the first arm that has it says."""
    entry = next(arm.metrics[metric] for arm in results.arms.values() if metric in arm.metrics)
    return entry.unit, entry.higher_is_better
