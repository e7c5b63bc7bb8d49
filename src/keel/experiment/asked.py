"""What a recipe asks a language model: minimal pairs, questions, gaps; whether its trees leak, and whether its states hold syntax."""

from __future__ import annotations

from keel.data import load_corpus
from keel.data.corpora import CorpusConfig
from keel.data.dependencies import read_dependencies
from keel.data.questions import Question, chosen, cloze_questions, read_questions
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.leak import text_leak
from keel.evaluation.minimal_pairs import minimal_pairs, read_pairs
from keel.evaluation.multiple_choice import multiple_choice
from keel.experiment.subject import Subject
from keel.experiment.trees import parser_scores, reader_for
from keel.probes.syntax import probe_syntax
from keel.training.tree_sections import Benchmark
from keel.trees.fields import FieldReader

TOKENS = 8192  # in a forward pass


def _reader(subject: Subject) -> FieldReader:
    return reader_for(subject.recipe, subject.arm, subject.data.tokenizer, subject.folder.parents[1])


def measure_blimp(subject: Subject) -> list[ItemMetric]:
    """BLiMP by paradigm, field and overall."""
    wanted = subject.recipe.evaluation.blimp
    assert wanted is not None
    pairs = read_pairs(wanted.source, wanted.count, disjoint_from=wanted.disjoint_from)
    return minimal_pairs(
        subject.model,  # type: ignore[arg-type]  # no encoder: the recipe was checked
        _reader(subject),
        pairs,
        token_budget=TOKENS,
        device=subject.device,
        progress=lambda done: subject.tell("minimal pairs", done, len(pairs)),
    )


def measure_benchmark(subject: Subject, name: str) -> list[ItemMetric]:
    """One of CoLA, HellaSwag, WinoGrande and MMLU."""
    wanted: Benchmark = getattr(subject.recipe.evaluation, name)
    questions, shown = _with_demonstrations(name, wanted)
    return _ask(subject, questions, name, wanted.shots, shown)


def _with_demonstrations(name: str, wanted: Benchmark) -> tuple[list[Question], list[Question]]:
    questions = read_questions(name, wanted.source)
    shown: list[Question] = []
    if wanted.shots and wanted.demonstrations is None:
        kept = 10 * wanted.shots
        if len(questions) <= kept:
            raise KeelError(
                f"evaluation.{name}: {len(questions)} items, {kept} are kept for demonstrations; give demonstrations a source"
            )
        questions, shown = questions[:-kept], questions[-kept:]
    elif wanted.shots:
        shown = read_questions(name, str(wanted.demonstrations))
    shown = [one for one in shown if one not in questions]
    return chosen(questions, wanted.count, 0, wanted.disjoint_from), shown


def measure_cloze(subject: Subject) -> list[ItemMetric]:
    """Gaps in a text."""
    wanted = subject.recipe.evaluation.cloze
    assert wanted is not None
    corpus = load_corpus(CorpusConfig(source=wanted.source))
    return _ask(subject, cloze_questions(getattr(corpus, wanted.split), wanted.count), "cloze", 0, [])


def _ask(subject: Subject, questions: list[Question], name: str, shots: int, shown: list[Question]) -> list[ItemMetric]:
    return multiple_choice(
        subject.model,  # type: ignore[arg-type]
        _reader(subject),
        questions,
        name,
        shots=shots,
        demonstrations=shown,
        token_budget=TOKENS,
        device=subject.device,
        progress=lambda done: subject.tell(name, done, len(questions)),
    )


def measure_leak(subject: Subject) -> list[ItemMetric]:
    """The largest change of earlier logits when later words change, and the score of the parser that the trees are from."""
    wanted = subject.recipe.evaluation.leak
    assert wanted is not None
    subject.tell("what the trees tell of the future", 0, 1)
    pairs = [(pair.good, pair.bad) for pair in read_pairs(wanted.source, wanted.count)]
    metrics = text_leak(subject.model, _reader(subject), pairs, subject.device)  # type: ignore[arg-type]
    scores = parser_scores(subject.recipe, subject.arm, subject.folder.parents[1])
    if "parser.f1" in scores:
        metrics.append(mean("parser.f1", [scores["parser.f1"]], unit="percent", higher_is_better=None))
    return metrics


def measure_syntax(subject: Subject) -> list[ItemMetric]:
    """UUAS of the structural probe by layer, on real and on nonsense words, on random vectors, and of the chain of neighbours."""
    wanted = subject.recipe.evaluation.syntax
    assert wanted is not None
    found = probe_syntax(
        subject.model,  # type: ignore[arg-type]
        _reader(subject),
        chosen(read_dependencies(wanted.train), wanted.sentences, seed=0),
        chosen(read_dependencies(wanted.test), wanted.test_sentences, seed=0),
        rank=wanted.rank,
        epochs=wanted.epochs,
        progress=subject.tell,
    )
    return [
        ItemMetric(
            name=name,
            unit="share of edges",
            # What the controls give is held beside, not striven for.
            higher_is_better=True if name.startswith("uuas@") else None,
            numerators=tuple(map(float, hits)),
            denominators=tuple(map(float, found.edges)),
        )
        for name, hits in found.metrics().items()
    ]
