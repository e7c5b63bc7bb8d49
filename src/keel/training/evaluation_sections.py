"""What a recipe measures on its trained arms, a section each; ``Evaluation`` holds them all."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from keel.training.section import Count, NonNegative, Positive, Precision, Section
from keel.training.tree_sections import (
    Benchmark,
    Cloze,
    Leak,
    Pairs,
    Syntax,
)

LinguisticProbe = Literal[
    "pos", "dependency_depth", "subject_number", "sentence_order", "top_constituents", "tree_depth"
]

GlueName = Literal["sst2", "mrpc", "rte", "stsb"]


class Extrapolation(Section):
    """Perplexity and bits per byte of the same tokens at several lengths; growth is measured from the first.

    Attributes:
        lengths: context lengths in tokens, ascending.
        segments: stretches of text that are evaluated; each is as long as the longest length, in tokens.
        split: ``valid`` or ``test``.
        token_budget: most tokens in one forward pass of the shorter lengths.
    """

    lengths: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    segments: Count = 2
    split: Literal["valid", "test"] = "test"
    token_budget: Count = 16384

    @model_validator(mode="after")
    def _ascending(self) -> Extrapolation:
        if sorted(set(self.lengths)) != self.lengths:
            raise ValueError(f"lengths must ascend without repeats, got {self.lengths}")
        return self


class Completion(Section):
    """Completion of strings of the task's language: whole strings and its harder sets.

    Attributes:
        samples: strings of each set.
        corruptions: kinds of ``keel.evaluation.corruption``: also completed with the stream's state so corrupted.
        corrupted_samples: strings for each of these; permuted and noisy ones are decoded without a cache.
    """

    samples: Count = 1000
    corruptions: list[Literal["permuted", "noise", "zeroed", "other"]] = []
    corrupted_samples: Count = 200


class LastWord(Section):
    """LAMBADA: the last word of passages, after contexts of several lengths.

    Attributes:
        passages: fields of ``keel.data.corpora.CorpusConfig``, the source of the passages.
        contexts: tokens before the last word, ascending.
        count: passages scored.
        single_token: only passages whose last word is one token, as the paper does.
        name: family of the metrics.
    """

    passages: dict[str, Any]
    contexts: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    count: Count = 500
    single_token: bool = False
    name: str = "lambada"


class Blocks(Section):
    """Perplexity and accuracy over blocks of text that do not overlap.

    Attributes:
        length: tokens of a block.
        count: blocks, spread evenly over the split.
        split: ``train``, ``valid`` or ``test``.
        name: family of the metrics.
    """

    length: Annotated[int, Field(ge=2)]
    count: Count
    split: Literal["train", "valid", "test"] = "test"
    name: str = "blocks"


class Windows(Section):
    """Windows of text that something is measured on.

    Attributes:
        windows: stretches of the split, without overlap.
        length: tokens of each.
        split: ``valid`` or ``test``.
    """

    windows: Count = 64
    length: Annotated[int, Field(ge=2)] = 256
    split: Literal["valid", "test"] = "valid"


class Robustness(Windows):
    """What a perturbation of the embeddings costs (``keel.evaluation.robustness``), on text.

    Attributes:
        noise, drift: standard deviations of the two kinds of perturbation, absolute.
        noise_snr, drift_snr: the same in units of the embeddings' root mean square, as far as the absolute ones reach in it.
    """

    noise: list[Positive] = [0.05, 0.1, 0.2, 0.3, 0.4]
    noise_snr: list[Positive] = [0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 6.0]
    drift: list[Positive] = [0.5, 1.0, 2.0, 4.0]
    drift_snr: list[Positive] = [2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


class Support(Windows):
    """How concentrated the barrier of a margin prior is (``keel.evaluation.support``), on text.

    Attributes:
        rank: of the freshly initialised prior, for arms without one of their own.
    """

    windows: Count = 32
    rank: Count = 64


class Selective(Windows):
    """Whether the model knows when it is wrong (``keel.evaluation.selective``): next tokens of text."""


class SelectiveWords(Section):
    """The same of the last word of passages.

    Attributes:
        passages: fields of ``keel.data.corpora.CorpusConfig``, the source of the passages.
        count: passages scored.
        single_token: keep only passages whose last word is one token: a small model gets hardly another right.
        name: family of the metrics.
    """

    passages: dict[str, Any]
    count: Count = 500
    single_token: bool = False
    name: str = "lambada"


class Posterior(Windows):
    """What the average over sampled embeddings predicts (``keel.evaluation.posterior``): next tokens of text.

    Attributes:
        samples: embeddings drawn for a window.
        noise: their standard deviation, in units of the embeddings' root mean square.
    """

    samples: Count = 8
    noise: NonNegative = 0.25


class PosteriorWords(SelectiveWords):
    """The same of the last word of passages.

    Attributes:
        samples, noise: as for ``posterior``.
    """

    samples: Count = 8
    noise: NonNegative = 0.25


class SignalQuality(Windows):
    """Whether a path's signals tell disrupted tokens from clean ones (``keel.evaluation.signals``), on text.

    Attributes:
        disruptions: fields of ``keel.data.disruptions.DisruptionConfig``.
    """

    split: Literal["valid", "test"] = "test"
    disruptions: dict[str, Any] = {}


class Dta(Section):
    """The evaluation suite of DTA §11 (``keel.evaluation.dta_suite``), on text.

    Attributes:
        rows: paragraphs that are continued.
        prompt: tokens of each.
        tokens: generated after each; §11.2 has 800 to 1,200.
        noise, around, distances, planted: see ``keel.evaluation.dta_suite.SuiteSizes``.
        topics: clusters of the corpus's documents.
        contradiction_judge: a model of natural language inference that judges contradictions in free text (``dta.cpi_text``): a folder,
            or a name on the Hub (``keel.evaluation.inference``). null for none: stories of facts are judged exactly, without a model.
    """

    rows: Count = 8
    prompt: Count = 96
    tokens: Annotated[int, Field(ge=80)] = 1000
    noise: Count = 40
    around: Annotated[int, Field(ge=20)] = 150
    distances: Annotated[list[Count], Field(min_length=1)] = [50, 400]
    planted: Count = 16
    topics: Annotated[int, Field(ge=2)] = 12
    contradiction_judge: str | None = None


class Faults(Section):
    """The failure-mode table of DTA §12 (``keel.evaluation.faults``), for arms with safeguards, on text.

    Attributes:
        rows: stretches of the test split that every fault is injected into.
    """

    rows: Count = 4


class Masked(Section):
    """Loss and accuracy of masked tokens (``keel.evaluation.masked``), in windows that are masked alike for all arms and seeds.

    Attributes:
        length: tokens of a window, [CLS] and [SEP] included.
        count: windows, spread evenly over the split.
        split: ``valid`` or ``test``.
        name: family of the metrics.
    """

    length: Annotated[int, Field(ge=4)]
    count: Count
    split: Literal["valid", "test"] = "test"
    name: str = "mlm"


class PositionProbe(Section):
    """What linear probes read of positions from an encoder's states, by layer, and the shape of its position table.

    Attributes:
        documents: stretches of the test split (``keel.probes.positions``).
        length: tokens of each, without [CLS] and [SEP].
        divisions: how often the documents are divided anew into those to fit and those to test.
        tables_of: encoders, by folder or by name on the Hub, whose position tables are drawn beside.
    """

    documents: Annotated[int, Field(ge=10)] = 500
    length: Annotated[int, Field(ge=4)] = 510
    divisions: Count = 5
    tables_of: list[str] = []


class InterModel(Section):
    """How much of the streams of one arm the states of every other arm tell, block by block (``keel.probes.inter_model``).

    Attributes:
        target: the arm whose streams are told, an encoder with ``position: dstg``; it is trained first.
        documents, length, divisions: as for the position probe.
    """

    target: str
    documents: Annotated[int, Field(ge=10)] = 200
    length: Annotated[int, Field(ge=4)] = 254
    divisions: Count = 5


class Heads(Section):
    """What the heads of an encoder listen to (``keel.probes.heads``).

    Attributes:
        documents: stretches of the test split.
        length: tokens of each, without [CLS] and [SEP].
    """

    documents: Count = 500
    length: Annotated[int, Field(ge=4)] = 510


class Linguistic(Section):
    """Linguistic probes of every block of an encoder (``keel.evaluation.linguistic``).

    Attributes:
        probes: names in ``keel.evaluation.linguistic_tasks.PROBES``.
        dependencies: folder of CoNLL-U files, ``data:NAME`` or a path; ``treebank``: the same of trees in brackets.
        train, test: most sentences of each probe.
        seeds: how often the readers are fitted.
        length: most tokens of a text, [CLS] and [SEP] included.
    """

    probes: Annotated[list[LinguisticProbe], Field(min_length=1)] = list(get_args(LinguisticProbe))
    dependencies: str = "data:ud_english_ewt"
    treebank: str = "data:treebank"
    train: Annotated[int, Field(ge=10)] = 2000
    test: Annotated[int, Field(ge=5)] = 500
    seeds: Count = 3
    length: Annotated[int, Field(ge=16)] = 128


class FineTuned(Section):
    """How an encoder is fine-tuned from its pretrained weights (``keel.evaluation.finetuning``), on local files.

    Attributes:
        source: folder of the data, ``data:NAME`` or a path.
        train_samples, test_samples: most examples to learn from and to score; null for all there are. A tenth of those to learn from,
            at most 500, is held out to stop and to choose.
        learning_rates, batch_sizes, weight_decays: the grid, of which every combination is tried.
        epochs, evaluate_every, patience: see ``keel.evaluation.finetuning.FineTuning``.
        length: most tokens of an example, [CLS] and [SEP] included.
        precision: as of a phase: ``fp32``, ``bf16`` for autocast, or ``auto``.
    """

    source: str
    train_samples: Annotated[int, Field(ge=10)] | None = None
    test_samples: Count | None = None
    learning_rates: Annotated[list[Positive], Field(min_length=1)] = [1e-5, 2e-5, 3e-5]
    batch_sizes: Annotated[list[Count], Field(min_length=1)] = [16, 32]
    weight_decays: Annotated[list[NonNegative], Field(min_length=1)] = [0.01]
    epochs: Count = 10
    evaluate_every: Count = 100
    patience: Count = 15
    length: Annotated[int, Field(ge=16)] = 128
    precision: Precision = "fp32"


class Glue(FineTuned):
    """Tasks of GLUE: ``tasks`` names them (``keel.data.glue``). Their development split is what is scored."""

    source: str = "data:glue"
    tasks: Annotated[list[GlueName], Field(min_length=1)] = list(get_args(GlueName))


class Squad(FineTuned):
    """Questions about paragraphs (``keel.data.squad``), divided by article into those to learn from, to hold out and to score."""

    source: str = "data:squad"
    length: Annotated[int, Field(ge=16)] = 384


class Holmes(Section):
    """The published probing datasets of Holmes or Flash-Holmes, read from an encoder's last block (``keel.evaluation.holmes``).

    Attributes:
        source: folder of the unpacked datasets, ``data:NAME`` or a path.
        length: most tokens of a text, [CLS] and [SEP] included.
    """

    source: str = "data:flash-holmes"
    length: Annotated[int, Field(ge=16)] = 512


class Mteb(Section):
    """Tasks of MTEB on mean-pooled states (``keel.evaluation.embedding``); it needs the extra ``mteb``, which downloads their data.

    Attributes:
        tasks: as mteb names them.
        length: most tokens of a text, [CLS] and [SEP] included.
    """

    tasks: Annotated[list[str], Field(min_length=1)]
    length: Annotated[int, Field(ge=16)] = 512


class Gates(Section):
    """What the gates of a structural stream do: saturation by site and, on bracket strings, their correlation with depth.

    Attributes:
        samples: strings of the task, or windows of the text, that are looked at.
    """

    samples: Count = 500


class Geometry(Section):
    """The geometry of what a structural stream writes, by layer (``keel.probes.geometry``), on text.

    Attributes:
        sequences: stretches of the test split.
        length: tokens of each.
    """

    sequences: Count = 16
    length: Annotated[int, Field(ge=2)] = 256


class Span(Section):
    """How far attention reaches (``keel.probes.attention_span``), on text.

    Attributes:
        lengths: tokens that are read at once, ascending; the last is how long the stretches are.
        sequences: stretches of the test split.
    """

    lengths: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)] = [256, 1024, 4096]
    sequences: Count = 4


class AttentionMatch(Section):
    """How far the attention is from the task's transition matrix; it has no fields: ``attention_match: {}``."""


class Evaluation(Section):
    """What is measured on the trained arms; at least one of these."""

    extrapolation: Extrapolation | None = None
    completion: Completion | None = None
    attention_match: AttentionMatch | None = None
    last_word: LastWord | None = None
    blocks: Blocks | None = None
    robustness: Robustness | None = None
    support: Support | None = None
    selective: Selective | None = None
    selective_words: SelectiveWords | None = None
    posterior: Posterior | None = None
    posterior_words: PosteriorWords | None = None
    signals: SignalQuality | None = None
    dta: Dta | None = None
    faults: Faults | None = None
    masked: Masked | None = None
    position_probe: PositionProbe | None = None
    heads: Heads | None = None
    inter_model: InterModel | None = None
    linguistic: Linguistic | None = None
    glue: Glue | None = None
    squad: Squad | None = None
    holmes: Holmes | None = None
    mteb: Mteb | None = None
    gates: Gates | None = None
    geometry: Geometry | None = None
    span: Span | None = None
    blimp: Pairs | None = None
    cola: Benchmark | None = None
    hellaswag: Benchmark | None = None
    winogrande: Benchmark | None = None
    mmlu: Benchmark | None = None
    cloze: Cloze | None = None
    leak: Leak | None = None
    syntax: Syntax | None = None

    @model_validator(mode="after")
    def _something(self) -> Evaluation:
        if not any(getattr(self, name) is not None for name in type(self).model_fields):
            raise ValueError(f"nothing is measured: give one of {', '.join(type(self).model_fields)}")
        return self
