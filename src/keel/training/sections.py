"""The sections of a recipe as pydantic models: every field with its type, range and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, model_validator
from transformers import AutoConfig, PreTrainedConfig

import keel.encoder  # noqa: F401 - makes "dstg" known to AutoConfig
from keel.data.corpora import CorpusConfig
from keel.errors import build_config
from keel.positions import Positions
from keel.training.section import Count, NonNegative, Positive, Section
from keel.training.tree_sections import (
    Adapters,
    ArmTrees,
    Benchmark,
    Cloze,
    Leak,
    Pairs,
    Syntax,
    TrainingQuestions,
    Trees,
)

DEFAULT_SCALE = "small"
LinguisticProbe = Literal[
    "pos", "dependency_depth", "subject_number", "sentence_order", "top_constituents", "tree_depth"
]

GlueName = Literal["sst2", "mrpc", "rte", "stsb"]


class Tokenizer(Section):
    """``bpe``: train a byte-level BPE of this many entries; ``pretrained``: take that of this name or folder."""

    bpe: Annotated[int, Field(ge=258)] | None = None
    pretrained: str | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Tokenizer:
        if (self.bpe is None) == (self.pretrained is None):
            raise ValueError("give exactly one of bpe (number of entries) and pretrained (name or path)")
        return self


class Task(Section):
    """A made-up language to complete strings of.

    Attributes:
        language: a name in ``keel.data.languages.LANGUAGES``.
        options: fields of that language's configuration.
        train_samples: strings that one pass over the data has; they are made when they are read.
        valid_samples: strings of the validation curve.
    """

    language: str
    options: dict[str, Any] = {}
    train_samples: Count = 10_000
    valid_samples: Count = 256


class Masking(Section):
    """Masked language modelling, for an encoder: a ``rate`` of a window's tokens is replaced by [MASK] and to be guessed."""

    rate: Annotated[float, Field(gt=0, lt=1)] = 0.2


class Data(Section):
    """What the arms learn: text, with its ``tokenizer``, or a ``task``.

    ``corpus`` has the fields of ``keel.data.corpora.CorpusConfig``. With ``masking`` the text is not continued but filled in; the
    windows of the phases then count [CLS] and [SEP]. ``questions`` are for phases that name them, beside the text.
    """

    corpus: dict[str, Any] | None = None
    tokenizer: Tokenizer | None = None
    task: Task | None = None
    masking: Masking | None = None
    questions: TrainingQuestions | None = None

    @model_validator(mode="after")
    def _text_or_task(self) -> Data:
        if self.task is None and (self.corpus is None or self.tokenizer is None):
            raise ValueError("give corpus and tokenizer (text), or task (a made-up language)")
        if self.task is not None and self.masking is not None:
            raise ValueError("masking is of text, and a task brings strings of its own: remove one of the two")
        if self.task is not None and (self.corpus is not None or self.tokenizer is not None):
            raise ValueError("a task brings its own strings and tokens: remove it, or corpus and tokenizer")
        return self

    def corpus_config(self) -> CorpusConfig:
        """Return the corpus section as the data room's configuration; there must be one."""
        assert self.corpus is not None
        return build_config(CorpusConfig, self.corpus, "data.corpus")


class Arm(Section):
    """One competitor.

    ``host`` has fields of the recipe's host that this arm has otherwise (an encoder's ``position``).
    ``streams`` maps a name to a stream's fields (``type`` defaults to the name). ``positions`` has the fields of
    ``keel.positions.Positions``. An arm with ``weights_of`` is not trained: it is that arm, evaluated with other
    positions, or with its embeddings made ``embedding_scale`` times as large and all else adapted so that it computes the same
    (``keel.evaluation.robustness.rescale_embeddings``), or with the weights it had after its phase ``weights_after``, or with
    ``streams``: one that it has gets these fields in place of its own, another is put beside it untrained. ``phases`` replace the
    recipe's; one that is named like one of those has its fields where it says nothing else; none at all is a host as it is.
    ``match_parameters_of`` names the arm to whose number of parameters this one's feed-forward is widened, where the recipe as a
    whole does not match them. An arm with ``host_of`` begins with the host that this arm trained with the same seed; its ``adapters``
    are put into it, and into its weights when it is trained. ``trees`` are what its tree stream reads.
    """

    label: str | None = None
    host: dict[str, Any] = {}
    streams: dict[str, dict[str, Any]] = {}
    positions: dict[str, Any] | None = None
    weights_of: str | None = None
    weights_after: str | None = None
    embedding_scale: Positive | None = None
    host_of: str | None = None
    adapters: Adapters | None = None
    trees: ArmTrees | None = None
    phases: list[Phase] | None = None
    match_parameters_of: str | None = None

    def stream_configs(self) -> dict[str, dict[str, Any]]:
        """Return the streams with their type spelled out, as ``KeelConfig`` stores them."""
        return {name: {"type": name, **fields} for name, fields in self.streams.items()}


class Dynamics(Section):
    """What a phase teaches a dynamic state path on disrupted text (DTA §9); the phase's windows are its rollouts.

    Attributes:
        disruptions: fields of ``keel.data.disruptions.DisruptionConfig``.
        losses: weight by name of ``keel.training.signal_losses.LOSSES``; those of §9B to §9D.
        base: weight of the cross-entropy, L_base.
        parameters: of the path that learn; null for all that the phase trains.
        truncation: tokens after which gradients are cut in the recurrence; null for none.
        active: whether the path runs at all; before its own training it does not (§9A).
    """

    disruptions: dict[str, Any] = {}
    losses: dict[str, NonNegative] = {}
    base: NonNegative = 1.0
    parameters: list[str] | None = None
    truncation: Count | None = None
    active: bool = True


class Phase(Section):
    """One stretch of training with its own trainer.

    Attributes:
        steps: optimizer steps.
        batch_size: windows a step, over all processes and accumulated micro-batches.
        accumulation: micro-batches that a step's batch is cut into.
        window, stride: length of a training window and distance between starts, tokens; stride defaults to the window.
        learning_rate: peak; linear warm-up over ``warmup_steps``, then a cosine to zero at ``steps``.
        stream_learning_rate: the streams' own peak, on the same schedule; beside a pretrained host new parameters want
            a higher one. null for the same.
        weight_decay: of AdamW, on matrices only (no biases, norms).
        embedding_weight_decay: of the token embeddings alone; null for the same as the others'.
        neftune_alpha: NEFTune (Jain et al. 2023): uniform noise of this size over the root of tokens x width is added to the
            embeddings while training; null for none.
        clip: largest gradient norm; null for none.
        label_smoothing: share of the target spread evenly over the vocabulary, 0 <= x < 1.
        trainable: what learns: ``all``, ``streams``, ``host``, the arm's ``adapters``, or ``adapters_and_streams``.
        learns: ``text``, or the ``questions`` of the data; a batch is then of whole questions, up to ``window`` tokens each.
        trees: whether a batch of questions brings the trees of the arm; without them its tree stream does nothing (lambda = 0).
        ramp: share of the steps over which a tree stream's lambda rises from 0 (GTCA section 3.4).
        precision: ``fp32``, or ``bf16`` for autocast.
        validate_every: steps between points of the validation curve; the last step always has one.
        checkpoint_every: steps between checkpoints.
        dynamics: what a dynamic state path learns; null for plain text.
    """

    name: str
    steps: Count
    batch_size: Count = 16
    accumulation: Count = 1
    window: Annotated[int, Field(ge=2)] = 256
    stride: Count | None = None
    learning_rate: Positive
    stream_learning_rate: Positive | None = None
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: NonNegative = 0.1
    embedding_weight_decay: NonNegative | None = None
    neftune_alpha: Positive | None = None
    clip: Positive | None = 1.0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    trainable: Literal["all", "streams", "host", "adapters", "adapters_and_streams"] = "all"
    learns: Literal["text", "questions"] = "text"
    trees: bool = True
    ramp: Annotated[float, Field(ge=0, le=1)] = 0.0
    precision: Literal["fp32", "bf16"] = "fp32"
    validate_every: Count = 100
    checkpoint_every: Count = 100
    dynamics: Dynamics | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        if self.batch_size % self.accumulation:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of accumulation {self.accumulation}")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leave nothing of steps {self.steps}")
        if self.stride is not None and self.stride > self.window:
            raise ValueError(f"stride {self.stride} would skip text: it is longer than window {self.window}")
        return self

    @property
    def window_stride(self) -> int:
        """Tokens between the starts of two windows."""
        return self.window if self.stride is None else self.stride


Arm.model_rebuild()


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
        corrupted_samples: strings for each of these; they are decoded without a cache.
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
        split: ``valid`` or ``test``.
        name: family of the metrics.
    """

    length: Annotated[int, Field(ge=2)]
    count: Count
    split: Literal["valid", "test"] = "test"
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
        noise_snr, drift_snr: the same in units of the embeddings' root mean square.
    """

    noise: list[Positive] = [0.05, 0.1, 0.2, 0.3, 0.4]
    noise_snr: list[Positive] = [0.25, 0.5, 1.0, 1.5, 2.0]
    drift: list[Positive] = [0.5, 1.0, 2.0, 4.0]
    drift_snr: list[Positive] = [2.0, 4.0, 8.0, 16.0]


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
        name: family of the metrics.
    """

    passages: dict[str, Any]
    count: Count = 500
    name: str = "lambada"


class Posterior(Windows):
    """What the average over sampled embeddings predicts (``keel.evaluation.posterior``): next tokens of text.

    Attributes:
        samples: embeddings drawn for a window.
        noise: their standard deviation, in units of the embeddings' root mean square.
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
    """

    rows: Count = 8
    prompt: Count = 96
    tokens: Annotated[int, Field(ge=80)] = 1000
    noise: Count = 40
    around: Annotated[int, Field(ge=20)] = 150
    distances: Annotated[list[Count], Field(min_length=1)] = [50, 400]
    planted: Count = 16
    topics: Annotated[int, Field(ge=2)] = 12


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
        precision: ``fp32``, or ``bf16`` for autocast.
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
    precision: Literal["fp32", "bf16"] = "fp32"


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


class PaperReference(Section):
    """What the paper printed: ``values`` by arm, then by metric."""

    paper: str
    table: str
    note: str = ""
    values: dict[str, dict[str, float]]


class Recipe(Section):
    """One scale of a recipe, complete and free of contradictions."""

    name: str
    title: str
    serves: str = ""
    scale: str = DEFAULT_SCALE
    expected_minutes: dict[str, NonNegative] = {}
    reference: PaperReference | None = None
    data: Data
    host: dict[str, Any]
    match_parameters: bool = False
    trees: Trees | None = None
    arms: Annotated[dict[str, Arm], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)] = [0]
    phases: Annotated[list[Phase], Field(min_length=1)]
    evaluation: Evaluation

    def passages(self) -> dict[str, dict[str, Any]]:
        """Return the fields of every source of passages that the evaluation reads, by where they stand in the recipe."""
        wanted = {"last_word": self.evaluation.last_word, "selective_words": self.evaluation.selective_words}
        return {f"evaluation.{name}.passages": part.passages for name, part in wanted.items() if part is not None}

    def trained_arms(self) -> list[str]:
        """Return the names of the arms that have weights of their own."""
        return [name for name, arm in self.arms.items() if arm.weights_of is None]

    def needed_by(self, arm: str) -> list[str]:
        """Return the arms that must be trained before ``arm``: whose weights or host it uses, or which is predicted from it."""
        own, inter = self.arms[arm], self.evaluation.inter_model
        found = [other for other in (own.weights_of, own.host_of) if other is not None]
        return found + ([inter.target] if inter is not None and inter.target != arm else [])

    def phases_of(self, arm: str) -> list[Phase]:
        """Return the phases that ``arm`` trains with."""
        own = self.arms[arm].phases
        return self.phases if own is None else own

    def streams_of(self, arm: str) -> dict[str, dict[str, Any]]:
        """Return the streams of ``arm``; of one that uses another's weights, those of the other with its own fields in place."""
        lent = {} if self.arms[arm].weights_of is None else self.arms[self.arms[arm].weights_of or ""].streams
        own = self.arms[arm].streams
        merged = {name: {**lent.get(name, {}), **own.get(name, {})} for name in {**lent, **own}}
        return {name: {"type": name, **fields} for name, fields in merged.items()}

    def label_of(self, arm: str) -> str:
        """Return what people call ``arm``."""
        return self.arms[arm].label or arm

    def train_window(self, arm: str) -> int:
        """Return the length of the windows that the weights of ``arm`` were last trained on."""
        return [*self.phases, *self.phases_of(self.arms[arm].weights_of or arm)][-1].window

    def positions_at(self, arm: str, length: int) -> Positions | None:
        """Return the positions of ``arm`` when it reads ``length`` tokens; None leaves the host's own.

        For yarn, ``original_length`` is by default the training window and ``factor`` the ratio of ``length`` to it,
        at least 1.
        """
        given = self.arms[arm].positions
        if given is None:
            return None
        if given.get("scheme") == "yarn":
            original = given.get("original_length", self.train_window(arm))
            given = {"original_length": original, "factor": max(1.0, length / original), **given}
        return build_config(Positions, given, f"arms.{arm}.positions")

    def host_config(self, arm: str | None = None) -> PreTrainedConfig | None:
        """Return the configuration of a host that is made from scratch, of ``arm`` where one is named; None for a checkpoint's."""
        if "checkpoint" in self.host:
            return None
        own = {} if arm is None else self.arms[self.arms[arm].weights_of or arm].host
        fields = {name: value for name, value in {**self.host, **own}.items() if name != "family"}
        return AutoConfig.for_model(self.host["family"], **fields)

    def to_yaml(self) -> str:
        """Return the recipe as a YAML file that ``load_recipe`` reads back to the same recipe."""
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True, width=120)
