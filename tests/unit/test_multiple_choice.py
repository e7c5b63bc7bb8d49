"""Prompts field by field, questions and minimal pairs: the cached way equals the obvious one, and nothing of the future is read."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.data.questions import Question, cloze_questions, prompt_of, read_questions
from keel.data.sources import Document
from keel.errors import KeelError
from keel.evaluation import options
from keel.evaluation.items import ItemMetric, item_statistic
from keel.evaluation.leak import text_leak
from keel.evaluation.minimal_pairs import MinimalPair, minimal_pairs, read_pairs
from keel.evaluation.multiple_choice import best, multiple_choice, requests_of
from keel.evaluation.options import Request, option_scores, reference_scores
from keel.evaluation.statistics import Bootstrap
from keel.trees import BuildPlan, Span, Tree, TreeCache, build, sources
from keel.trees.chunks import ARRAYS
from keel.trees.corrupted import CORRUPTIONS, CorruptedSource
from keel.trees.fields import FieldReader, could_be_label, read_fields, reader_of, row_inputs, start_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tree_support"))

import tree_cases as cases  # found through the line above

TOKENIZER = cases.tokenizer()
QUESTION = Question(
    text="Which of the cats that saw the dog\nwere asleep?", options=("the cats", "a dog", "none"), answer=0
)
SHOWN = Question(text="Who answered the old man?", options=("nobody", "the river thinks", "Read"), answer=2)
PROMPT = prompt_of(QUESTION, [SHOWN])
REQUESTS = [
    Request("", ("The old man has answered.", "Answer the man.", "Old")),
    Request(PROMPT, QUESTION.continuations()),
    Request("Sentence: The dog were.\nAnswer:", (" 0", " 1")),
    Request("Question: Who?\nAnswer:", (" the old man by the river",)),
]
# Prompts that end within what is parsed: their trees are others with an option behind them, where a tree is of a whole sentence.
MIDWAY = [
    Request("The old man by the", (" river thinks", " dog")),
    Request("Question: The old man thinks.", (" river thinks", " dog sat down", ".")),
    Request("The man thinks.\n", ("river thinks", "The dog sat down")),
]


def test_fields_of_a_prompt() -> None:
    found = [(PROMPT[f.start : f.end].strip(), f.parsed, f.updated) for f in read_fields(PROMPT)]
    assert ("Question:", False, False) in found
    assert ("Which of the cats that saw the dog were asleep?", True, True) in found
    assert ("the river thinks", True, False) in found
    assert found[-1] == ("Answer:", True, True)
    assert found.count(("Answer:", True, True)) == 2
    assert ("Read", False, True) in found  # the answer of the demonstration
    assert ("Read", True, False) in found  # the same as an option
    assert not found[1][1]


def test_blank_tokens_go_with_what_stands_before_them() -> None:
    row = reader_of(TOKENIZER).read(PROMPT)
    assert row.updated is not None
    pieces = TOKENIZER.convert_ids_to_tokens(list(row.ids))
    blank = [index for index, piece in enumerate(pieces) if index and not TOKENIZER.decode(row.ids[index]).strip()]
    assert len(blank) > 8 and all(row.updated[index] == row.updated[index - 1] for index in blank)
    options = [index for index in blank if not row.updated[index]]
    assert options and row.updated[0] and any(row.updated[index] for index in blank)


@pytest.mark.parametrize("kind", ["sentence", "prefix"])
def test_an_answer_does_not_tell_how_it_goes_on(kind: str) -> None:
    """Even where trees have read the words to come, those of a candidate have not: its first words are scored alike."""
    model, reader = cases.model(len(TOKENIZER), **KINDS[kind]), _reader(kind)
    short, long = " the river", " the river that saw the old man"
    rows = [reader.read(PROMPT, answer) for answer in (short, long)]
    size = len(rows[0].ids)
    assert rows[1].ids[:size] == rows[0].ids
    logits = [
        model(torch.tensor([row.ids]), **row_inputs([row], model.host.config.num_hidden_layers)).logits[0, :size]
        for row in rows
    ]
    assert torch.allclose(logits[0], logits[1], atol=1e-9)


def test_plain_text_has_plain_fields() -> None:
    text = "A. is no option here.\nThe cats.\n\nOptions:\nA. one\nmore of it\n\nB. no option"
    found = [(text[f.start : f.end].strip(), f.parsed, f.updated) for f in read_fields(text)]
    assert found[:2] == [("A. is no option here.", True, True), ("The cats.", True, True)]
    assert found[-3:] == [("one", True, False), ("more of it", True, False), ("B. no option", True, True)]


@pytest.mark.parametrize(
    ("line", "expected"), [("Qu", True), ("A", True), ("B.", True), ("B. x", False), ("The", False)]
)
def test_what_could_be_a_label(line: str, expected: bool) -> None:
    assert could_be_label(line) is expected


KINDS: dict[str, dict[str, Any]] = {
    "bare": {},
    "sentence": {"tree_scope": "sentence"},
    "prefix": {"tree_scope": "prefix"},
    "fixed": {"lookup": "fixed:2"},
}


def _reader(kind: str, **options: Any) -> FieldReader:
    wants_trees = kind in ("sentence", "prefix")
    scope = "prefix" if kind == "prefix" else "sentence"
    return reader_of(TOKENIZER, source=cases.MadeUpSource() if wants_trees else None, scope=scope, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [8192, 60])
def test_a_prompt_read_once_gives_what_every_option_alone_gives(kind: str, budget: int) -> None:
    model, reader = cases.model(len(TOKENIZER), **KINDS[kind]), _reader(kind)
    found = option_scores(model, reader, [*REQUESTS, *MIDWAY], token_budget=budget)
    expected = reference_scores(model, reader, [*REQUESTS, *MIDWAY])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)
    if kind != "bare":  # the stream has an effect: without it the scores are others
        with model.disable_streams():
            bare = option_scores(model, _reader("bare"), [*REQUESTS, *MIDWAY])
        assert max(abs(a - b) for x, y in zip(found, bare, strict=True) for a, b in zip(x, y, strict=True)) > 1e-3


def test_trees_that_are_looked_up_give_what_every_option_alone_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sources._KINDS, "made", lambda rest: cases.MadeUpSource())
    backend, requests = TOKENIZER.backend_tokenizer.to_str(), [*REQUESTS, *MIDWAY]
    plan = BuildPlan(cache=tmp_path / "trees", source="made:up", tokenizer=backend, start=start_of(TOKENIZER))
    build([(one.prompt, option) for one in requests for option in ("", *one.options)], plan)
    model, reader = cases.model(len(TOKENIZER), lookup=f"cache:{plan.cache}"), _reader("bare")
    given = cases.model(len(TOKENIZER), **KINDS["sentence"])
    found = option_scores(model, reader, requests)
    for expected in (
        reference_scores(model, reader, requests),
        option_scores(given, _reader("sentence"), requests),
    ):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("prompt", [PROMPT, "The old man by the river", "Sentence: The old man thinks."])
@pytest.mark.parametrize("scope", ["sentence", "prefix"])
def test_decoding_behind_a_prompt_is_as_without_a_cache(scope: Any, prompt: str) -> None:
    model = cases.model(len(TOKENIZER), tree_scope=scope)
    row = reader_of(TOKENIZER, source=cases.MadeUpSource(), scope=scope).read(prompt)
    ids, inputs = torch.tensor([row.ids]), row_inputs([row], 3)
    asked: Any = dict(
        attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, **inputs
    )
    cached, uncached = (model.generate(ids, use_cache=use, **asked) for use in (True, False))
    assert torch.equal(cached, uncached)
    with torch.no_grad():
        past = model(ids, use_cache=True, **inputs).past_key_values
        whole = model(cached[:, :-1], **inputs).logits[:, len(row.ids) :]
        parts = model(cached[:, len(row.ids) : -1], past_key_values=past).logits
    torch.testing.assert_close(parts, whole)


def test_a_call_to_the_tokenizer_that_cut_off_changes_no_row() -> None:
    tokenizer = cases.tokenizer()
    before = reader_of(tokenizer, source=cases.MadeUpSource())
    expected = before.read(PROMPT)
    tokenizer([PROMPT, "The"], truncation=True, max_length=4, padding=True)
    after = reader_of(tokenizer, source=cases.MadeUpSource())
    assert after.read(PROMPT).ids == expected.ids and after.making == before.making


@pytest.mark.parametrize("kind", KINDS)
def test_long_options_go_on_apart_from_short_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the options goes on from the cache, and then another from the same cache; those of one token not at all."""
    monkeypatch.setattr(options, "_PASS_TOKENS", 2)
    model, reader = cases.model(len(TOKENIZER), **KINDS[kind]), _reader(kind)
    requests = [
        *REQUESTS,
        Request("Question: Who?\nAnswer:", (" 1", " the river", " the old dog that saw the man by the river")),
    ]
    shapes: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    found = option_scores(model, reader, requests)
    hook.remove()
    lengths = [
        len(row.ids) - row.num_prompt - 1 for one in requests for row in map(reader.read, [one.prompt] * 9, one.options)
    ]
    after_prompts = shapes[1:]
    assert len(after_prompts) > 2 and sum(rows for rows, _ in after_prompts) == sum(length > 0 for length in lengths)
    assert sum(rows * width for rows, width in after_prompts) < max(lengths) * sum(length > 0 for length in lengths)
    for mine, theirs in zip(found, reference_scores(model, reader, requests), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)


class _Together(cases.MadeUpSource):
    """Parses many texts in a call, and counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def parse_all(self, texts: Sequence[str]) -> list[list[Tree]]:
        self.calls += 1
        return [self.parse(text) for text in texts]


@pytest.mark.parametrize("corruption", [None, "random"])
@pytest.mark.parametrize("scope", ["sentence", "prefix"])
def test_prompts_that_are_read_together_are_parsed_in_one_call(scope: Any, corruption: Any, tmp_path: Path) -> None:
    texts = [(one.prompt, option) for one in REQUESTS for option in ("", *one.options)]
    plain: Any = cases.MadeUpSource()
    source = _Together()
    given, alone = (one if corruption is None else CorruptedSource(one, corruption) for one in (source, plain))
    reader = reader_of(TOKENIZER, source=given, scope=scope, cache=TreeCache(tmp_path / "trees.sqlite"))
    expected = reader_of(TOKENIZER, source=alone, scope=scope)
    rows = reader.read_all(texts)
    assert source.calls == 1 and source.parsed > 10
    for row, text in zip(rows, texts, strict=True):
        other = expected.read(*text)
        assert (row.ids, row.num_prompt, row.updated) == (other.ids, other.num_prompt, other.updated)
        assert row.chunks is not None and other.chunks is not None and len(row.chunks) == len(other.chunks)
        assert all(np.array_equal(getattr(row.chunks, name), getattr(other.chunks, name)) for name in ARRAYS)
    count = source.parsed
    again = reader_of(TOKENIZER, source=given, scope=scope, cache=TreeCache(tmp_path / "trees.sqlite"))
    again.read_all(texts)
    assert source.parsed == count, "all was in the cache"
    bare = reader.read_all(texts[:2], with_trees=False)
    assert [row.chunks for row in bare] == [None, None] and bare[1].ids == rows[1].ids


def test_a_field_without_a_tree_is_told_by_who_reads_it() -> None:
    class Picky(cases.MadeUpSource):
        def parse(self, text: str) -> list[Tree]:
            if "dog" in text:
                raise KeelError("no tree for dogs")
            return super().parse(text)

        def parse_all(self, texts: Sequence[str]) -> list[list[Tree]]:
            return [self.parse(text) for text in texts]

    reader = reader_of(TOKENIZER, source=Picky())
    assert [row.chunks is None for row in reader.read_all([("The cats.", ""), ("A man.", "")])] == [False, False]
    with pytest.raises(KeelError, match="no tree for dogs"):
        reader.read_all([("The cats saw.", ""), ("The dogs.", "")])


def test_options_are_read_only() -> None:
    model = cases.model(len(TOKENIZER), tree_scope="sentence")
    masked, free = (option_scores(model, _reader("sentence", masked=flag), REQUESTS) for flag in (True, False))
    assert masked[0] == free[0]  # plain text: all is updated
    assert masked[1] != pytest.approx(free[1], abs=1e-3)
    row = _reader("sentence").read(PROMPT, " the cats")
    assert row.updated is not None
    texts = [TOKENIZER.decode([i]) for i, u in zip(row.ids, row.updated, strict=True) if not u]
    assert "".join(texts).count("nobody") == 1
    assert "Which" not in "".join(texts)


def test_strict_trees_of_prompts_know_no_future() -> None:
    """Whatever follows, the logits before it stay; the paper's trees are seen to leak, so the test can fail."""
    text = "Question: The cats saw the old dog.\nOptions:\nA. the old man\nInstruction manuals were read.\nAnswer: the river"
    others = [
        text[:cut] + rest
        for cut in range(3, len(text) - 3, 9)
        for rest in ("ers by the dog that answered", ".\nAnswer: one")
    ]
    for kind in ("prefix", "sentence"):
        model, reader = cases.model(len(TOKENIZER), **KINDS[kind]), _reader(kind)
        worst = max(_change(model, reader, text, other) for other in others)
        assert worst < 1e-9 if kind == "prefix" else worst > 1e-3


def test_the_leak_of_texts_that_go_on_where_others_end() -> None:
    pairs = [("The old man by the", "The old man by the river thinks that nobody"), ("The old man.", "The old man.")]
    for kind in ("prefix", "sentence"):
        model, reader = cases.model(len(TOKENIZER), **KINDS[kind]), _reader(kind)
        most, average = text_leak(model, reader, pairs)
        assert (most.name, average.name) == ("leak.max_logit_change", "leak.mean_logit_change")
        assert average.numerators[1] == 0.0 and most.numerators[0] == average.numerators[0]
        assert average.numerators[0] < 1e-6 if kind == "prefix" else average.numerators[0] > 1e-3


@torch.no_grad()
def _change(model: Any, reader: FieldReader, text: str, other: str) -> float:
    rows = [reader.read(one) for one in (text, other)]
    first, second = (model(torch.tensor([row.ids]), **row_inputs([row], 3)).logits[0] for row in rows)
    same = next((i for i, (a, b) in enumerate(zip(rows[0].ids, rows[1].ids, strict=False)) if a != b), None)
    return 0.0 if same is None else float((first[:same] - second[:same]).abs().max())


def test_a_field_is_parsed_once_and_kept(tmp_path: Path) -> None:
    cache = TreeCache(tmp_path / "trees.sqlite")
    first = _reader("sentence", cache=cache)
    row = first.read(PROMPT, " the cats")
    assert first.source.parsed > 4  # type: ignore[union-attr]
    again = _reader("sentence", cache=cache)
    found = again.read(PROMPT, " the cats")
    assert again.source.parsed == 0  # type: ignore[union-attr]
    assert row.chunks is not None and found.chunks is not None
    assert np.array_equal(row.chunks.left, found.chunks.left) and len(row.chunks) == len(found.chunks)


def test_questions_are_scored_and_shown_by_group() -> None:
    model, reader = cases.model(len(TOKENIZER)), _reader("bare")
    questions = [
        Question(text=f"Who is number {n}?", options=("one", "two"), answer=n % 2, group="g") for n in range(6)
    ]
    shown = [Question(text=f"Shown {n}", options=("one", "two"), answer=0, group="g" if n else "h") for n in range(4)]
    metric = multiple_choice(model, reader, questions, "test", shots=2, demonstrations=shown)[0]
    requests = requests_of(questions, 2, shown, 0)
    expected = [
        best(row) == q.answer for q, row in zip(questions, reference_scores(model, reader, requests), strict=True)
    ]
    assert metric.name == "test.accuracy" and metric.numerators == tuple(map(float, expected))
    assert all(request.prompt.count("Shown") == 2 and "Shown 0" not in request.prompt for request in requests)
    with pytest.raises(KeelError, match="2 shots from 1 demonstrations"):
        multiple_choice(model, reader, questions, "test", shots=2, demonstrations=shown[:1])
    with pytest.raises(KeelError, match="none of them asked"):
        multiple_choice(model, reader, questions, "test", shots=1, demonstrations=questions)
    assert best([1.0, 2.0, 2.0]) is None


def test_a_draw_between_minimal_pairs_is_wrong() -> None:
    model, reader = cases.model(len(TOKENIZER)), _reader("bare")
    pairs = [
        MinimalPair(good="The cats saw", bad="The cats saw", paradigm="equal", field="syntax"),
        MinimalPair(good="The cats saw", bad="The dog saw of that were", paradigm="one", field="syntax"),
        MinimalPair(good="The dog saw of that were", bad="The cats saw", paradigm="two", field="semantics"),
    ]
    found = {metric.name: metric for metric in minimal_pairs(model, reader, pairs)}
    assert list(found) == ["blimp.overall", "blimp.syntax", "blimp.semantics", "blimp.equal", "blimp.one", "blimp.two"]
    assert found["blimp.equal"].value == 0.0
    assert found["blimp.one"].value + found["blimp.two"].value == 1.0
    assert found["blimp.overall"].value == pytest.approx(1 / 3)
    assert found["blimp.one"].higher_is_better is None and found["blimp.syntax"].higher_is_better


def test_matthews_correlation_is_resampled() -> None:
    chance = np.random.default_rng(0)
    truths = chance.integers(2, size=60).astype(float)
    guesses = np.where(chance.random(60) < 0.7, truths, 1 - truths)
    metric = ItemMetric(
        name="cola.mcc",
        unit="",
        higher_is_better=True,
        numerators=tuple(guesses),
        denominators=tuple(truths),
        matthews=True,
    )
    assert metric.value == pytest.approx(np.corrcoef(guesses, truths)[0, 1])
    assert ItemMetric.from_json("cola.mcc", metric.to_json()) == metric
    statistic = item_statistic([metric])
    counts = chance.multinomial(60, np.full(60, 1 / 60), size=5).astype(float)
    for row, value in zip(counts, statistic.measure(counts)[:, 0], strict=True):
        picked = np.repeat(np.arange(60), row.astype(int))
        assert value == pytest.approx(np.corrcoef(guesses[picked], truths[picked])[0, 1])
    estimate = Bootstrap(1, 60, resamples=99).estimate(statistic)
    assert estimate.ci95 is not None and estimate.ci95[0] < metric.value < estimate.ci95[1]
    flat = ItemMetric(
        name="x", unit="", higher_is_better=True, numerators=(1.0, 1.0), denominators=(1.0, 0.0), matthews=True
    )
    assert flat.value == 0.0


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corrupted_trees_keep_words_and_spans(kind: Any) -> None:
    text = "The old man by the river thinks that nobody has answered."
    source = cases.MadeUpSource()
    (true,), (wrong,) = source.parse(text), CorruptedSource(source, kind).parse(text)
    words = [[span[:2] for span, leaf in zip(tree.spans, tree.leaves(), strict=True) if leaf] for tree in (true, wrong)]
    assert words[0] == words[1] and len(true.spans) == len(wrong.spans)
    assert {span[:2] for span in true.spans} != {span[:2] for span in wrong.spans}
    assert CorruptedSource(source, kind).parse(text)[0] == wrong
    if kind == "random":  # of two children there is one other order, of random trees there are many
        assert CorruptedSource(source, kind, seed=1).parse(text)[0] != wrong
    chain = Tree((Span(0, 5, 0, "S"), Span(0, 5, 1, "X"), Span(0, 2, 2, "a"), Span(3, 5, 2, "b")))
    assert len(CorruptedSource(_Fixed(chain), kind).parse("ab cd")[0].spans) == 4
    deep, last = [], 1199  # deeper than calls may be, as sums in code are
    for word in range(last):
        deep += [Span(2 * word, 2 * last + 1, word, "X"), Span(2 * word, 2 * word + 1, word + 1, "W")]
    deep.append(Span(2 * last, 2 * last + 1, last, "W"))
    wrong = CorruptedSource(_Fixed(Tree(tuple(deep))), kind).parse("x " * 1200)[0]
    assert len(wrong.spans) == len(deep) and wrong.spans != tuple(deep)


class _Fixed:
    name, version = "fixed", "1"

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def parse(self, text: str) -> list[Tree]:
        return [self.tree]


def test_benchmark_files(tmp_path: Path) -> None:
    rows = [
        {"ctx": "A  man. he", "endings": ["sits", "runs"], "label": "1"},
        {"ctx": "x", "endings": ["a", "b"], "label": 0},
    ]
    (tmp_path / "h.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    question = read_questions("hellaswag", str(tmp_path / "h.jsonl"))[0]
    assert question == Question(text="A man. he", options=("sits", "runs"), answer=1, style="context")
    assert prompt_of(question).endswith("continuation.\nA man. he\nOptions:\nA. sits\nB. runs\nAnswer:")
    assert len(read_questions("hellaswag", str(tmp_path / "h.jsonl"), count=1)) == 1
    (tmp_path / "c.tsv").write_text("gj04\t1\t\tThe dog slept.\ngj04\t0\t*\tThe slept.\n", encoding="utf-8")
    judged = read_questions("cola", str(tmp_path / "c.tsv"))
    assert [one.answer for one in judged] == [1, 0]
    assert prompt_of(judged[0]).endswith("0 or 1.\nSentence: The dog slept.\nAnswer:")
    pair = {"sentence_good": "a", "sentence_bad": "b", "UID": "u", "field": "f/g"}  # spelt "f_g" in its other files
    (tmp_path / "b").mkdir()
    (tmp_path / "b/p.jsonl").write_text("\n".join([json.dumps(pair)] * 3), encoding="utf-8")
    assert read_pairs(str(tmp_path / "b"), count=2) == [MinimalPair(good="a", bad="b", paradigm="u", field="f_g")] * 2
    with pytest.raises(KeelError, match="not of the form of mmlu"):
        read_questions("mmlu", str(tmp_path / "c.tsv"))
    with pytest.raises(KeelError, match="no benchmark 'wino'"):
        read_questions("wino", str(tmp_path / "c.tsv"))


def test_gaps_in_text() -> None:
    names = ["river", "mountain", "kitchen", "garden", "window", "village", "harbour", "market"]
    text = " ".join(
        f"He came by a {a} again. The old man was walking from the {a} to the {b} today." for a in names for b in names
    )
    questions = cloze_questions([Document("d", text)], 12, seed=1)
    assert (
        questions
        == cloze_questions([Document("d", text)], 12, seed=1)
        != cloze_questions([Document("d", text)], 12, seed=2)
    )
    for question in questions:
        assert len(question.options) == len(set(question.options)) == 4
        assert question.text.replace("_", question.options[question.answer]) in text
    assert len({question.answer for question in questions}) > 1
    with pytest.raises(KeelError, match="gaps, 5000 are wanted"):
        cloze_questions([Document("d", text)], 5000)
