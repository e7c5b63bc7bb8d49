"""Made-up languages: exact validators, exact control, strings by random access, splits that share none."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from keel.data.languages import LANGUAGES, Dyck, JsonObjects, Sample
from keel.data.languages.dyck import BRACKETS, depths, outcome, valid
from keel.data.languages.json_objects import KEYS, UNSEEN_KEYS, depth_of, key_paths
from keel.data.tasks import TaskData, language_tokens
from keel.errors import KeelError

every_language = pytest.mark.parametrize("language", [Dyck(), JsonObjects()], ids=["dyck", "json"])
VALIDATORS: dict[str, Any] = {"dyck": valid, "json": lambda text: key_paths(text) is not None}


@every_language
def test_a_string_is_a_function_of_seed_split_and_index(language: Any) -> None:
    backwards = [language.sample("train", index) for index in reversed(range(30))]
    forwards = [language.sample("train", index) for index in range(30)]
    assert forwards == backwards[::-1] and len(set(forwards)) > 25
    other = type(language)(seed=1)
    assert [other.sample("train", index) for index in range(30)] != forwards
    assert language.sample("train", 999_999_999).whole


@every_language
def test_splits_share_no_string(language: Any) -> None:
    found = {
        split: {language.sample(split, index).whole for index in range(150)} for split in ("train", "valid", "test")
    }
    assert all(len(strings) > 60 for strings in found.values())
    assert not found["train"] & found["test"] and not found["valid"] & found["test"]
    assert not found["train"] & found["valid"]
    with pytest.raises(KeelError, match="split 'dev'; expected one of train, valid, test"):
        language.sample("dev", 0)


def test_a_language_without_a_string_for_a_split_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.data.languages.base._PARTS", {"test": range(3, 4)})  # where none of its nine words falls
    with pytest.raises(KeelError, match="the language is too small"):
        Dyck(min_length=4, max_length=4, min_depth=2, max_depth=2).sample("test", 0)


@every_language
def test_every_string_is_valid_and_every_damaged_one_is_not(language: Any) -> None:
    accepts = VALIDATORS[language.family]
    for index in range(60):
        sample = language.sample("valid", index)
        assert accepts(sample.whole) and sample.prompt and sample.target
        assert 0.2 < len(sample.prompt) / len(sample.whole) < 0.8
        assert not accepts(sample.prompt), "a prompt that is whole leaves nothing to complete"
        damaged = language.invalid("valid", index)
        assert not accepts(damaged) and abs(len(damaged) - len(sample.whole)) < 12


def test_the_dyck_validator_agrees_with_erasing_pairs() -> None:
    def erased(text: str) -> bool:
        while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", text)) != text:
            text = shorter
        return not text

    generator = torch.Generator().manual_seed(0)
    words = ["".join(BRACKETS[i] for i in torch.randint(6, (n,), generator=generator)) for n in (2, 2, 4) * 300]
    words += [Dyck().invalid("test", index) for index in range(20)] + [
        Dyck().sample("test", index).whole for index in range(20)
    ]
    agreed = [valid(word) for word in words]
    assert agreed == [erased(word) for word in words]
    assert 20 < sum(agreed) < len(words) - 20


@pytest.mark.parametrize(("length", "depth"), [(8, 3), (30, 8), (64, 5), (100, 50)])
def test_dyck_words_have_exactly_the_length_and_depth_asked_for(length: int, depth: int) -> None:
    language = Dyck(min_length=length, max_length=length, min_depth=min(depth, length // 2), max_depth=depth)
    for index in range(30):
        word = language.sample("test", index).whole
        assert len(word) == length and max(depths(word)) == depth


def test_dyck_paths_are_uniform() -> None:
    """Of the five paths of length 6, three touch depth 2 and no more."""
    language = Dyck(min_length=6, max_length=6, min_depth=2, max_depth=2)
    words = [language.sample("train", index).whole for index in range(900)]
    shapes = [re.sub(r"[(\[{]", "u", re.sub(r"[)\]}]", "d", word)) for word in words]
    counts = {shape: shapes.count(shape) for shape in set(shapes)}
    assert set(counts) == {"uduudd", "uuddud", "uududd"} and min(counts.values()) > 230


def test_the_depth_of_a_bracket_is_the_pairs_open_at_it() -> None:
    assert depths("([]){}") == [1, 2, 2, 1, 1, 1]
    assert depths(")(") == [0, 0]


def test_a_dyck_completion_is_judged() -> None:
    sample = Sample("([", "])()")
    said = {name: tuple(outcome(sample, text)) for name, text in (("", "])()"),)}
    assert said[""] == ("structural_accuracy", "exact_match", "valid_not_exact", "syntax_error")
    judged = {text: tuple(outcome(sample, text).values()) for text in ("])()", "])", ")]", "", "])(")}
    assert judged["])()"] == (True, True, False, False)
    assert judged["])"] == (True, False, True, False)
    for wrong in (")]", "", "])("):
        assert judged[wrong] == (False, False, False, True)


def test_json_strings_have_the_depth_width_length_and_keys_asked_for() -> None:
    for name, language in JsonObjects().harder().items():
        for index in range(8):
            text = language.sample("test", index).whole
            tree = json.loads(text)
            assert language.min_length <= len(text) <= language.max_length and text == json.dumps(
                tree, separators=(",", ":")
            )
            assert language.min_depth <= depth_of(text) <= language.max_depth
            widths = {len(found) for found in _objects(tree)}
            assert len(widths) == 1 and language.min_width <= widths.pop() <= language.max_width
            keys = {key for found in _objects(tree) for key in found}
            assert keys <= set(UNSEEN_KEYS if name == "unseen" else KEYS)


def _objects(value: Any) -> list[dict[str, Any]]:
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [*([value] if isinstance(value, dict) else []), *(found for child in children for found in _objects(child))]


def test_unseen_keys_share_none_with_the_others() -> None:
    assert not set(KEYS) & set(UNSEEN_KEYS)


def test_a_json_completion_is_judged() -> None:
    sample, language = Sample('{"a":1,', '"b":[2,{"c":3}]}'), JsonObjects()
    assert key_paths(sample.whole) == {".a", ".b", ".b[0]", ".b[1]", ".b[1].c"}
    judged = {text: language.judge(sample, text) for text in ('"b":[2,{"c":3}]}', '"b":[2]}', '"b":[2}', '"b":NaN}')}
    assert judged['"b":[2,{"c":3}]}'] == {
        "validity": (1, 1), "exact_match": (1, 1), "field_f1": (10, 10), "syntax_error": (0, 1)
    }  # fmt: skip
    assert judged['"b":[2]}'] == {"validity": (1, 1), "exact_match": (0, 1), "field_f1": (6, 8), "syntax_error": (0, 1)}
    for wrong in ('"b":[2}', '"b":NaN}'):
        assert judged[wrong] == {"validity": (0, 1), "exact_match": (0, 1), "field_f1": (0, 5), "syntax_error": (1, 1)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_length": 7}, "dyck: lengths"),
        ({"min_length": 30, "max_length": 20}, "dyck: lengths"),
        ({"min_depth": 5, "max_depth": 4}, "dyck: depths"),
        ({"min_depth": 5}, "at most half of min_length"),
    ],
)
def test_impossible_words_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        Dyck(**fields)


def test_impossible_objects_are_refused() -> None:
    with pytest.raises(KeelError, match="json: depths from 5 to 4"):
        JsonObjects(min_depth=5, max_depth=4)
    with pytest.raises(KeelError, match="json: max_width=9; there are 8 keys"):
        JsonObjects(max_width=9)
    with pytest.raises(KeelError, match="no string of 24 to 30 characters"):
        JsonObjects(max_length=30, min_width=8).sample("train", 0)


@every_language
def test_samples_of_a_task_spell_their_strings_and_score_the_target_alone(language: Any) -> None:
    data = TaskData(language, train_samples=50, valid_samples=4)
    tokenizer, samples = data.tokenizer, data.train()
    assert len(samples) == 50 and len(data.valid()) == 4
    lengths = set()
    for index in range(20):
        sample, item = language.sample("train", index), samples[index]
        ids, labels = item["input_ids"], item["labels"]
        assert ids[0] == tokenizer.bos_token_id and ids[-1] == tokenizer.eos_token_id and item["attention_mask"].all()
        assert language_tokens(tokenizer, ids.tolist()) == sample.whole
        assert tokenizer(sample.whole)["input_ids"] == ids[1:-1].tolist()
        assert tokenizer.decode(ids, skip_special_tokens=True) == sample.whole
        scored = labels != -100
        assert language_tokens(tokenizer, labels[scored].tolist()) == sample.target and scored[-1]
        assert torch.equal(labels[scored], ids[scored])
        lengths.add(len(ids))
    assert len(lengths) > 5
    with pytest.raises(IndexError):
        samples[50]


@every_language
def test_the_fingerprint_of_a_task_is_that_of_its_samples(language: Any) -> None:
    prints = {
        TaskData(kind, train_samples=size, valid_samples=4).fingerprint
        for kind in (language, type(language)(seed=1), type(language)(max_length=100))
        for size in (50, 60)
    }
    assert len(prints) == 6
    assert TaskData(language, train_samples=50, valid_samples=4).fingerprint in prints


def test_all_languages_are_listed_by_the_family_of_their_metrics() -> None:
    assert {name: kind().family for name, kind in LANGUAGES.items()} == {
        name: name for name in ("dyck", "facts", "json", "markov")
    }
