"""Sections of a recipe with trees and questions: where trees come from, what is asked in training and in evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from keel.training.section import Count, Positive, Section


class Parser(Section):
    """A parser that is trained for this run (``keel.trees.parser_training``).

    Attributes:
        epochs: passes over the treebank.
        sentences: as many of its first trees, for a weak parser; null for all that are not held out.
    """

    epochs: Count = 14
    sentences: Count | None = None


class Trees(Section):
    """Where trees come from; arms refer to them by name.

    Attributes:
        treebank: brackets that parsers are trained on: a path, or ``data:PATH`` below the data root.
        held_out: last trees of the treebank, on which parsers are scored.
        parsers: name -> how it is trained.
        sources: name -> a source of trees as ``keel.trees.open_source`` reads it.
    """

    treebank: str | None = None
    held_out: Count = 300
    parsers: dict[str, Parser] = {}
    sources: dict[str, str] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Trees:
        if self.parsers and self.treebank is None:
            raise ValueError("parsers need a treebank to be trained on")
        both = sorted(set(self.parsers) & set(self.sources))
        if both or not (self.parsers or self.sources):
            raise ValueError(f"give at least one of parsers and sources, and each name once, got {both} twice")
        return self

    def names(self) -> list[str]:
        """Return what arms can refer to."""
        return [*self.parsers, *self.sources]


class ArmTrees(Section):
    """What an arm's tree stream reads.

    Attributes:
        source: a name of the recipe's ``trees``; null for a stream that finds its chunks itself (``lookup``).
        corruption: trees made wrong on purpose (GTCA Table 6).
        update_mask: whether options are read-only (GTCA Table 4).
    """

    source: str | None = None
    corruption: Literal["random", "permuted"] | None = None
    update_mask: bool = True


class Adapters(Section):
    """LoRA in the host's linear maps, through peft (GTCA section 3.4).

    Attributes:
        rank, alpha: of LoRA; its update is scaled by alpha / rank.
        dropout: of its input.
    """

    rank: Count = 16
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Shadow(Section):
    """ShadowPEFT beside the host, through peft: a small decoder whose state is put into every layer.

    Attributes:
        rank: of what is put into a layer, and of what moves the state on.
        strength: by which it is put in, peft's ``shadow_alpha``.
        dropout: of the difference between hidden states and state.
        layers: of the small decoder.
        intermediate_size: its feed-forward size; null for the host's.
        auxiliary: weight of the small decoder's own cross-entropy.
    """

    rank: Count = 8
    strength: Positive = 0.1
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    layers: Count = 1
    intermediate_size: Count | None = None
    auxiliary: Annotated[float, Field(ge=0)] = 0.05


class ClozeText(Section):
    """Gaps in running text (``keel.data.questions.cloze_questions``).

    Attributes:
        source: of the text, as in ``data.corpus``.
        count: questions.
    """

    source: str = "data:novels"
    count: Count = 2000


class TrainingQuestions(Section):
    """Questions to learn from: gaps in the training split of a text, and files of MMLU's form.

    Attributes:
        cloze: of the training split.
        mmlu: a source of rows; null for none.
        valid: questions, spread over all, that are kept for the validation curve.
    """

    cloze: ClozeText | None = None
    mmlu: str | None = None
    valid: Count = 64

    @model_validator(mode="after")
    def _something(self) -> TrainingQuestions:
        if self.cloze is None and self.mmlu is None:
            raise ValueError("no questions: give cloze, mmlu or both")
        return self


class Pairs(Section):
    """BLiMP (``keel.evaluation.minimal_pairs``).

    Attributes:
        source: of its rows.
        count: pairs of each paradigm; null for all.
        disjoint_from: others than those that this count would ask; to choose a setting by, without looking at what is reported.
    """

    source: str = "data:blimp"
    count: Count | None = None
    disjoint_from: Count | None = None


class Benchmark(Section):
    """A benchmark of questions (``keel.evaluation.multiple_choice``).

    Attributes:
        source: of its rows, as ``keel.data.rows.read_rows`` reads it.
        count: items, chosen at random once for all arms and seeds; null for all.
        disjoint_from: others than those that this count would ask, as with minimal pairs.
        shots: answered examples before each question.
        demonstrations: source of these; null to keep the last ``10 * shots`` items for them, which are then not asked.
    """

    source: str
    count: Count | None = None
    disjoint_from: Count | None = None
    shots: Annotated[int, Field(ge=0)] = 0
    demonstrations: str | None = None


class Cloze(Section):
    """Gaps in a text.

    Attributes:
        source: of the text, as in ``data.corpus``.
        count: questions.
        split: ``valid`` or ``test``.
    """

    source: str = "data:novels"
    count: Count = 500
    split: Literal["valid", "test"] = "test"


class Leak(Section):
    """How far earlier logits move when later words change (``keel.evaluation.leak``).

    Attributes:
        source: of minimal pairs, whose sentences agree up to a word; rows with BLiMP's fields.
        count: pairs of each paradigm.
    """

    source: str = "data:blimp"
    count: Count = 5


class Syntax(Section):
    """The structural probe of Hewitt and Manning, by layer (``keel.probes.syntax``).

    Attributes:
        train, test: CoNLL-U files that it is fitted and scored on.
        sentences, test_sentences: of each, chosen at random once for all arms and seeds.
        rank, epochs: of the probe.
    """

    train: str = "data:ud_english_ewt/en_ewt-ud-train.conllu.gz"
    test: str = "data:ud_english_ewt/en_ewt-ud-test.conllu"
    sentences: Count = 1000
    test_sentences: Count = 300
    rank: Count = 64
    epochs: Count = 10
