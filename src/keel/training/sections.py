"""The sections of a recipe as pydantic models: every field with its type, range and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator
from transformers import AutoConfig, PreTrainedConfig

import keel.encoder  # noqa: F401 - makes "dstg" known to AutoConfig
from keel.data.corpora import CorpusConfig
from keel.errors import build_config
from keel.positions import Positions
from keel.training.evaluation_sections import Evaluation
from keel.training.section import Count, NonNegative, Positive, Precision, Section
from keel.training.tree_sections import (
    Adapters,
    ArmTrees,
    Shadow,
    TrainingQuestions,
    Trees,
)

DEFAULT_SCALE = "small"


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
    ``streams``: one that it has gets these fields in place of its own, another is put beside it untrained; or, ``host_alone``, without
    those that it was trained with (its parameters are counted all the same). ``phases`` replace the
    recipe's; one that is named like one of those has its fields where it says nothing else; none at all is a host as it is.
    ``match_parameters_of`` names the arm to whose number of parameters this one's feed-forward is widened, where the recipe as a
    whole does not match them. An arm with ``host_of`` begins with the host that this arm trained with the same seed; its ``adapters``
    are put into it, and into its weights when it is trained; its ``shadow`` stays beside it. ``trees`` are what its tree stream reads.
    With ``save_host`` what it trained is also kept as an ordinary checkpoint, OUT/<arm>/seed<k>/host, for ``host.checkpoint`` of others.
    A ``control`` has a stream that reads what should not help (random trees): reports count it among the baselines.
    A ``stage`` is what another arm was on the way (a host before its last phases, a path not yet trained): reports show it, and leave it
    out where they say whether the stream helped.
    """

    label: str | None = None
    host: dict[str, Any] = {}
    streams: dict[str, dict[str, Any]] = {}
    positions: dict[str, Any] | None = None
    weights_of: str | None = None
    weights_after: str | None = None
    host_alone: bool = False
    embedding_scale: Positive | None = None
    host_of: str | None = None
    adapters: Adapters | None = None
    shadow: Shadow | None = None
    trees: ArmTrees | None = None
    phases: list[Phase] | None = None
    match_parameters_of: str | None = None
    control: bool = False
    stage: bool = False
    save_host: bool = False

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
        bias_learning_rate: of an encoder's bias by relative position, on the same schedule. AdamW moves a number by at most its rate a
            step: by no more than a logit or two in a short training. null for the same.
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
        precision: ``fp32``, ``bf16`` for autocast, or ``auto``: ``bf16`` where the machine that a run is begun on computes it itself,
            else ``fp32`` (``keel.training.processor.native_precision``).
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
    bias_learning_rate: Positive | None = None
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
    precision: Precision = "fp32"
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


class Target(Section):
    """What is asked of a metric; see ``keel.evaluation.results.Target``. Checked here too, before anything is trained."""

    says: str
    metric: str
    arm: str
    baseline: str | None = None
    ratio: bool = False
    least: float | None = None
    most: float | None = None
    why: str = ""

    @model_validator(mode="after")
    def _one_bound(self) -> Target:
        if (self.least is None) == (self.most is None):
            raise ValueError(f"target {self.says!r}: give one of least and most")
        if self.ratio and self.baseline is None:
            raise ValueError(f"target {self.says!r}: a ratio needs a baseline")
        return self


class PaperReference(Section):
    """What the paper printed: ``values`` by arm, then by metric; and what is asked of ours."""

    paper: str
    table: str
    note: str = ""
    values: dict[str, dict[str, float]]
    targets: list[Target] = []


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
        wanted = {name: getattr(self.evaluation, name) for name in ("last_word", "selective_words", "posterior_words")}
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

    def is_same_for_all_seeds(self, arm: str) -> bool:
        """Return whether nothing about ``arm`` is random: it is the checkpoint as it was loaded."""
        own = self.arms[arm]
        return "checkpoint" in self.host and not (own.streams or own.weights_of or own.host_of or self.phases_of(arm))

    def streams_of(self, arm: str) -> dict[str, dict[str, Any]]:
        """Return the streams of ``arm``; of one that uses another's weights, those of the other with its own fields in place."""
        if self.arms[arm].host_alone:
            return {}
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

    def in_precision(self, native: str) -> Recipe:
        """Return the recipe with ``native`` (``fp32`` or ``bf16``) wherever a precision is left to the machine."""
        return Recipe.model_validate(_with_precision(self.model_dump(), native))

    def to_yaml(self) -> str:
        """Return the recipe as a YAML file that ``load_recipe`` reads back to the same recipe."""
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True, width=120)


def _with_precision(value: Any, native: str) -> Any:
    if isinstance(value, dict):
        return {
            key: native if key == "precision" and entry == "auto" else _with_precision(entry, native)
            for key, entry in value.items()
        }
    return [_with_precision(entry, native) for entry in value] if isinstance(value, list) else value
