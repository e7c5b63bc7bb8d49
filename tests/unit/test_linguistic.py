"""Linguistic probes: examples made from annotated text, states averaged over places, readers that find what is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from keel.data.conllu import read_conllu
from keel.data.masking import with_mask_tokens
from keel.encoder import DstgConfig, DstgForMaskedLM
from keel.errors import KeelError
from keel.evaluation.linguistic import linguistic_scores, probe_metrics
from keel.evaluation.linguistic_tasks import PROBES, Example, Probe, make_probes
from keel.evaluation.states import layer_vectors

CONLLU = """\
# newdoc id = one
# text = She can't see dogs.
1\tShe\tshe\tPRON\t_\tNumber=Sing\t4\tnsubj\t_\t_
2-3\tcan't\t_\t_\t_\t_\t_\t_\t_\t_
2\tca\tcan\tAUX\t_\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\t_\t_\t4\tadvmod\t_\t_
4\tsee\tsee\tVERB\t_\tVerbForm=Fin|Mood=Ind\t0\troot\t_\t_
5\tdogs\tdog\tNOUN\t_\tNumber=Plur\t4\tobj\t_\tSpaceAfter=No
5.1\tghost\tghost\tNOUN\t_\t_\t4\tobj\t_\t_
6\t.\t.\tPUNCT\t_\t_\t5\tpunct\t_\t_

# text = Dogs bark
1\tDogs\tdog\tNOUN\t_\tNumber=Plur\t2\tnsubj:outer\t_\t_
2\tbark\tbark\tVERB\t_\t_\t0\troot\t_\t_

"""
TREES = "( (S (NP-SBJ (DT The) (NN dog)) (VP (VBZ barks)) (. .)) )\n( (NP (NP (NN war)) (CC and) (NP (NN peace))) )\n"


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[str, str]:
    folders = tmp_path / "ud", tmp_path / "bank"
    for folder in folders:
        folder.mkdir()
    for split in ("train", "test"):
        (folders[0] / f"x-ud-{split}.conllu").write_text(CONLLU, encoding="utf-8")
    (folders[1] / "x.mrg").write_text(TREES * 4, encoding="utf-8")
    (folders[1] / "x.docs.tsv").write_text("doc\tfirst_tree\tn_trees\na\t0\t2\nb\t2\t4\nc\t6\t2\n", encoding="utf-8")
    return str(folders[0]), str(folders[1])


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return with_mask_tokens(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


def test_words_stand_where_they_are_written(corpora: tuple[str, str]) -> None:
    first, second = read_conllu(Path(corpora[0]) / "x-ud-train.conllu")
    assert first.text == "She can't see dogs." and first.document == second.document == "one"
    assert [first.text[slice(*word.place)] for word in first.words] == ["She", "can't", "can't", "see", "dogs", "."]
    assert [word.form for word in first.words] == ["She", "ca", "n't", "see", "dogs", "."]
    assert first.depths() == [1, 1, 1, 0, 1, 2]
    assert first.words[3].features == {"VerbForm": "Fin", "Mood": "Ind"} and second.words[0].relation == "nsubj"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\tShe\tshe\n\n", "line 1: 3 columns"),
        (CONLLU.replace("\t4\tobj\t_\tS", "\tx\tobj\t_\tS"), "before line 11"),
        (CONLLU.replace("\t4\tobj\t_\tS", "\t9\tobj\t_\tS"), "a head that is not in the sentence"),
        ("", "no sentence"),
    ],
)
def test_files_that_are_not_conllu(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.conllu"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(KeelError, match=message):
        read_conllu(path)


def test_the_examples_of_every_probe(corpora: tuple[str, str]) -> None:
    probes = {probe.name: probe for probe in make_probes(list(PROBES), *corpora, train=10, test=1, max_words=12)}
    assert list(probes) == list(PROBES) and all(len(probe.test) == 1 for probe in probes.values())
    assert probes["pos"].train[1].labels == ("NOUN", "VERB")
    assert probes["dependency_depth"].train[0].labels == (1.0, 1.0, 1.0, 0.0, 1.0, 2.0)
    assert [one.labels for one in probes["subject_number"].train] == [("Sing",), ("Plur",)]
    (pair,) = probes["sentence_order"].train
    in_order = pair.text.startswith("She")
    assert pair.labels == ("in order" if in_order else "swapped",) and len(pair.words) == 8
    assert {one.labels[0] for one in probes["top_constituents"].train} == {"NP VP", "NP CC NP"}
    assert {one.labels[0] for one in probes["tree_depth"].train} == {3.0}
    # Three documents, one of them for the test: no sentence of it is among those to fit.
    assert len(probes["tree_depth"].train) in (4, 6)
    with pytest.raises(KeelError, match="no example"):
        make_probes(["pos"], *corpora, train=10, test=5, max_words=1)


@pytest.mark.parametrize("position", ["dstg", "rope"])
def test_vectors_are_averages_over_the_tokens_of_a_place(position: str) -> None:
    torch.manual_seed(0)
    tokenizer = tokenizer_of(["a", "b", "c", "d"])
    config = DstgConfig(
        vocab_size=len(tokenizer), semantic_size=8, position_size=4, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, position=position, pad_token_id=tokenizer.pad_token_id, special_token_ids=[5, 6],
        initializer_range=0.5,
    )  # fmt: skip
    model = DstgForMaskedLM(config)
    texts = ["a b c", "d"]
    words = layer_vectors(model, tokenizer, texts, [[(0, 3), (4, 5)], [(0, 1)]], max_length=16, batch_size=2)
    whole = layer_vectors(model, tokenizer, texts, [[], []], max_length=16, batch_size=1)
    ids = torch.tensor([[tokenizer.cls_token_id, *tokenizer("a b c")["input_ids"], tokenizer.sep_token_id]])
    model.eval()
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    for layer in range(2):
        state = states[1 + layer][0].detach().numpy()
        assert words[layer].shape == (3, config.hidden_size) and whole[layer].shape == (2, config.hidden_size)
        np.testing.assert_allclose(words[layer][0], state[1:3].mean(axis=0), atol=1e-5)
        np.testing.assert_allclose(words[layer][1], state[3], atol=1e-5)
        np.testing.assert_allclose(whole[layer][0], state[1:4].mean(axis=0), atol=1e-5)
    cut = layer_vectors(model, tokenizer, ["a b c"], [[(0, 1), (4, 5)]], max_length=4)
    assert np.any(cut[1][0]) and not np.any(cut[1][1])


def a_probe(numeric: bool, places: bool) -> tuple[Probe, np.ndarray]:
    """A hundred and twenty texts whose first channel says the label, with a word that says nothing."""
    random = np.random.default_rng(0)
    signs = random.choice([-1.0, 1.0], size=120)
    states = random.normal(size=(120, 6)).astype(np.float32)
    states[:, 2] = signs + 0.05 * states[:, 2]
    words = [f"w{index % 7}" for index in range(120)]
    place = ((0, 2),) if places else ()
    labels = [float(sign) if numeric else "+-"[int(sign < 0)] for sign in signs]
    examples = tuple(
        Example(text=word, words=(word,), places=place, labels=(label,))
        for word, label in zip(words, labels, strict=True)
    )
    return Probe(name="made_up", numeric=numeric, train=examples[:80], test=examples[80:]), states


@pytest.mark.parametrize("numeric", [False, True])
@pytest.mark.parametrize("places", [False, True])
def test_readers_find_what_is_there_and_nothing_else(numeric: bool, places: bool) -> None:
    probe, states = a_probe(numeric, places)
    noise = np.random.default_rng(1).normal(size=states.shape).astype(np.float32)
    found = {metric.name: metric.value for metric in probe_metrics(probe, [noise, states], seeds=2)}
    assert found["linguistic.made_up"] == found["linguistic.made_up@layer1"] > 0.98
    chance = 0.0 if numeric else 0.5
    for name in ("@layer0", "@control", "@majority", "@words"):
        assert found[f"linguistic.made_up{name}"] < chance + 0.3, name


def test_a_wrong_label_costs_its_own_text_alone() -> None:
    probe, states = a_probe(False, False)
    flipped = Example(text="w", words=("w",), labels=("-" if probe.test[3].labels[0] == "+" else "+",))
    other = Probe(name="made_up", numeric=False, train=probe.train, test=(*probe.test[:3], flipped, *probe.test[4:]))
    before, after = (
        next(m for m in probe_metrics(p, [states], seeds=1) if m.name == "linguistic.made_up") for p in (probe, other)
    )
    changed = [
        index for index, pair in enumerate(zip(before.numerators, after.numerators, strict=True)) if len(set(pair)) > 1
    ]
    assert changed == [3]


def test_every_block_of_an_encoder_is_probed(corpora: tuple[str, str]) -> None:
    tokenizer = tokenizer_of(["She", "can", "see", "dogs", "Dogs", "bark"])
    config = DstgConfig(
        vocab_size=len(tokenizer), semantic_size=8, position_size=4, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, special_token_ids=[7, 8], pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    probes = make_probes(["pos", "subject_number"], *corpora, train=10, test=5, max_words=12)
    found = linguistic_scores(DstgForMaskedLM(config), tokenizer, probes, seeds=2, max_length=16)
    ends = ["", "@layer0", "@layer1", "@control", "@majority", "@words"]
    assert sorted(m.name for m in found) == sorted(
        f"linguistic.{p}{end}" for p in ("pos", "subject_number") for end in ends
    )
    assert all(len(metric.numerators) == 2 for metric in found)
