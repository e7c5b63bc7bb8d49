"""Disrupted windows: exact levels, the same for the same seed, and stories whose contradictions are known."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from keel.data import TokenStream
from keel.data.disruptions import (
    HIDDEN_RMS,
    KINDS,
    SPAN_KINDS,
    DisruptedWindows,
    DisruptionConfig,
    derangement,
    disrupt,
    encode_story,
    spans,
    with_hidden_noise,
)
from keel.data.languages import Facts
from keel.data.languages.facts import judge_facts
from keel.data.tasks import language_tokenizer
from keel.errors import KeelError

VOCABULARY, LENGTH = 50, 400


def disrupted(kind: str, seed: int = 0):  # type: ignore[no-untyped-def]
    clean = np.random.default_rng(1).integers(VOCABULARY, size=LENGTH)
    elsewhere = np.random.default_rng(2).integers(VOCABULARY, size=LENGTH)
    config = DisruptionConfig(kinds=(kind,), share=0.3)
    return clean, elsewhere, disrupt(clean, elsewhere, config, VOCABULARY, np.random.default_rng(seed))


@pytest.mark.parametrize("kind", SPAN_KINDS)
def test_levels_say_exactly_which_tokens_are_disrupted(kind: str) -> None:
    clean, elsewhere, found = disrupted(kind)
    touched = found.level_T > 0
    assert touched.any() and not touched.all()
    assert set(found.kind_T[touched]) == {KINDS.index(kind)} and set(found.kind_T[~touched]) == {0}
    changed = found.ids_T != clean
    if kind == "hidden":
        assert not changed.any() and found.level_T[touched].min() >= 0.5 and found.level_T.max() <= 1
    elif kind == "splice":
        assert np.array_equal(found.ids_T[touched], elsewhere[touched]) and not changed[~touched].any()
    else:
        assert np.array_equal(changed, touched)
    if kind == "scramble":
        assert Counter(found.ids_T) == Counter(clean)


def test_no_scrambled_token_stays_where_it_was() -> None:
    source, seen = np.random.default_rng(0), Counter()
    for _ in range(600):
        order = derangement(4, source)
        assert sorted(order) == [0, 1, 2, 3] and (order != np.arange(4)).all()
        seen[tuple(order.tolist())] += 1
    assert len(seen) == 6 and min(seen.values()) > 60, "all six cycles of four, about as often"
    assert derangement(1, source).tolist() == [0]


def test_a_splice_is_from_another_document() -> None:
    documents, each, length = 5, 120, 40
    ids = np.repeat(np.arange(documents, dtype=np.int32) + 5, each)
    stream = TokenStream(
        ids=ids,
        starts=np.arange(documents, dtype=np.int64) * each,
        token_bytes=np.ones(len(ids), dtype=np.uint16),
        names=[str(index) for index in range(documents)],
    )
    tokenizer = language_tokenizer(Facts().alphabet)
    config = DisruptionConfig(kinds=("splice",), share=0.3, span=(4, 8), gap=4, facts=0.0)
    windows = DisruptedWindows(stream, length, each, tokenizer, config, seed=0)
    spliced = 0
    for index in range(200):
        item = windows[index]
        touched = item["level"] > 0
        spliced += int(touched.sum())
        assert (item["input_ids"][touched] != 5 + index % len(windows)).all()
    assert spliced > 200


def test_spans_keep_their_gap_and_share() -> None:
    config, source = DisruptionConfig(share=0.25, span=(8, 32), gap=16), np.random.default_rng(0)
    found = [spans(2000, config, source) for _ in range(40)]
    for row in found:
        gaps = [start - before for start, before in zip((s for s, _ in row), (0, *(e for _, e in row)), strict=False)]
        assert min(gaps) >= 16 and all(8 <= end - start <= 32 for start, end in row) and row[-1][1] <= 2000
    share = np.mean([sum(end - start for start, end in row) / 2000 for row in found])
    assert 0.2 < share < 0.3
    assert spans(2000, DisruptionConfig(share=0.0), source) == []


def test_hidden_noise_touches_its_tokens_alone_and_no_other_row_matters() -> None:
    hidden = torch.randn(2, 6, 2000, generator=torch.Generator().manual_seed(0))
    level = torch.zeros(2, 6)
    level[0, 2], level[0, 4], level[1, 3] = 1.0, 0.5, 1.0
    kind = torch.where(level > 0, KINDS.index("hidden"), 0)
    kind[1, 3] = KINDS.index("splice")
    seeds = torch.tensor([5, 6])
    noise = with_hidden_noise(level, kind, seeds, hidden) - hidden
    assert set(map(tuple, noise.abs().sum(-1).nonzero().tolist())) == {(0, 2), (0, 4)}
    rms = hidden[0].square().mean().sqrt()
    torch.testing.assert_close(noise[0, 2].std(), HIDDEN_RMS * rms, rtol=0.05, atol=0)
    torch.testing.assert_close(noise[0, 4].std(), 0.5 * HIDDEN_RMS * rms, rtol=0.05, atol=0)
    alone = with_hidden_noise(level[:1], kind[:1], seeds[:1], hidden[:1]) - hidden[:1]
    assert torch.equal(alone[0], noise[0])
    assert with_hidden_noise(level[1:], kind[1:], seeds[1:], hidden[1:]) is not None
    assert torch.equal(with_hidden_noise(level[1:], kind[1:], seeds[1:], hidden[1:]), hidden[1:])


def windows(seed: int = 0, **fields) -> DisruptedWindows:  # type: ignore[no-untyped-def]
    tokenizer = language_tokenizer(Facts().alphabet)
    stream = TokenStream(
        ids=np.random.default_rng(3).integers(3, len(tokenizer), size=900).astype(np.int32),
        starts=np.array([0], dtype=np.int64), token_bytes=np.ones(900, dtype=np.uint16), names=["made up"],
    )  # fmt: skip
    return DisruptedWindows(stream, 128, 64, tokenizer, DisruptionConfig(**fields), seed=seed)


def test_a_window_is_a_function_of_seed_and_index_and_varies_by_pass() -> None:
    first, again, other = windows(), windows(), windows(seed=1)
    for name, tensor in first[3].items():
        assert torch.equal(again[3][name], tensor)
    assert not torch.equal(other[3]["level"], first[3]["level"])
    assert not torch.equal(first[3 + len(first)]["level"], first[3]["level"])
    sample = first[3]
    ruined = (sample["kind"] == 1) | (sample["kind"] == 2)
    assert torch.equal(sample["labels"] == -100, ruined)
    with pytest.raises(IndexError):
        first[-1]


def test_stories_carry_their_contradictions() -> None:
    sample = windows(facts=1.0, contradictions=0.4)[0]
    wrong = sample["kind"] == KINDS.index("contradiction")
    assert wrong.any() and torch.equal(sample["level"] > 0, wrong)
    text = "".join(windows().tokenizer.convert_ids_to_tokens(sample["input_ids"].tolist()))
    assert sum(s.verdict == "contradiction" for s in judge_facts(text)) == int(wrong.sum())
    assert not (windows(facts=1.0)[0]["level"] > 0).any()
    with pytest.raises(KeelError, match="does not fill"):
        encode_story("Anna went to the garden. ", windows().tokenizer, 64)


def test_the_judge_of_facts_keeps_the_books() -> None:
    text = "Anna went to the garden. Ben is in the river. Anna is in the garden. Anna is in the church. Noise! "
    text += "Anna went to the church. Anna is in the church. Ben is in the market. Ben is in the river."
    verdicts = [s.verdict for s in judge_facts(text)]
    assert verdicts == [
        "moved", "new", "consistent", "contradiction", "moved", "consistent", "contradiction", "consistent"
    ]  # fmt: skip
    places = [text[s.start : s.end] for s in judge_facts(text)]
    assert places[:4] == ["garden", "river", "garden", "church"]


def test_a_story_contradicts_itself_as_often_as_asked() -> None:
    story = Facts().story(random.Random(0), 400, 0.5)
    found = Counter(s.verdict for s in judge_facts(story))
    assert (
        sum(found.values()) == 400
        and 0.4 < found["contradiction"] / (found["contradiction"] + found["consistent"]) < 0.6
    )
    assert "contradiction" not in Counter(s.verdict for s in judge_facts(Facts().story(random.Random(0), 400)))


def test_completions_of_facts_are_judged() -> None:
    sample = Facts().sample("test", 0)
    assert judge_facts(sample.whole)[-1].verdict == "consistent"
    assert Facts().judge(sample, sample.target) == {"exact_match": (1.0, 1.0), "contradiction": (0.0, 1.0)}
    wrong = next(place for place in Facts().alphabet[4:12] if place not in sample.target)
    assert Facts().judge(sample, wrong + ". ") == {"exact_match": (0.0, 1.0), "contradiction": (1.0, 1.0)}
    assert "".join(Facts().tokens(sample.whole)) == sample.whole


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"kinds": ("splices",)}, "splice"), ({"share": 0.9}, "share"), ({"span": (4, 2)}, "span"), ({"gap": -1}, "gap")],
)
def test_wrong_fields_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        DisruptionConfig(**fields)  # type: ignore[arg-type]
