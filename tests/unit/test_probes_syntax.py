"""The structural probe on states that are known to hold a tree, and on a model."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tree_support"))

import tree_cases as cases  # found through the line above

from keel.data.dependencies import ParsedSentence, read_dependencies, with_nonsense
from keel.errors import KeelError
from keel.probes.syntax import _scored, fit_probes, probe_syntax, spanning_tree, tree_distances, word_states
from keel.trees.fields import reader_of

CONLLU = """# text = The dogs' owner walked slowly.
1\tThe\tthe\tDET\tDT\t_\t3\tdet\t_\t_
2-3\tdogs'\t_\t_\t_\t_\t_\t_\t_\t_
2\tdogs\tdog\tNOUN\tNNS\t_\t3\tnmod\t_\t_
3\towner\towner\tNOUN\tNN\t_\t4\tnsubj\t_\t_
3.1\tthat\t_\t_\t_\t_\t_\t_\t_\t_
4\twalked\twalk\tVERB\tVBD\t_\t0\troot\t_\t_
5\tslowly\tslowly\tADV\tRB\t_\t4\tadvmod\t_\t_
6\t.\t.\tPUNCT\t.\t_\t4\tpunct\t_\t_

1\tGo\tgo\tVERB\tVB\t_\t0\troot\t_\t_
"""


def test_gold_dependencies(tmp_path: Path) -> None:
    (tmp_path / "a.conllu").write_text(CONLLU, encoding="utf-8")
    (sentence,) = read_dependencies(str(tmp_path / "a.conllu"))
    assert sentence.text == "The dogs owner walked slowly ."
    assert [sentence.text[a:b] for a, b in sentence.places()] == list(sentence.words)
    assert sentence.edges() == {(0, 2), (1, 2), (2, 3), (3, 4)}
    assert tree_distances(sentence)[0].tolist() == [0, 2, 1, 2, 3, 3]
    nonsense = with_nonsense(sentence)
    assert nonsense.words[0] == "The" and nonsense.words[5] == "." and nonsense.heads == sentence.heads
    assert all(a != b for a, b in zip(nonsense.words[1:5], sentence.words[1:5], strict=True))
    assert nonsense.words[1].endswith("s") and nonsense.words[3].endswith("ed") and nonsense.words[4].endswith("ly")
    assert with_nonsense(sentence) == nonsense != with_nonsense(sentence, seed=1)
    with pytest.raises(KeelError, match="no sentence of 10 to 40 words"):
        read_dependencies(str(tmp_path / "a.conllu"), shortest=10)
    (tmp_path / "b.conllu").write_text("1\tGo\n", encoding="utf-8")
    with pytest.raises(KeelError, match="2 columns; CoNLL-U has 10"):
        read_dependencies(str(tmp_path / "b.conllu"))


def test_spanning_tree_is_the_cheapest() -> None:
    rng = np.random.default_rng(0)
    for size in (2, 4, 5):
        distance = rng.random((size, size))
        distance = distance + distance.T
        pairs = list(itertools.combinations(range(size), 2))
        cheapest = min(
            (edges for edges in itertools.combinations(pairs, size - 1) if _connects(edges, size)),
            key=lambda edges: sum(distance[a, b] for a, b in edges),
        )
        assert spanning_tree(distance) == set(cheapest)


def _connects(edges: tuple[tuple[int, int], ...], size: int) -> bool:
    reached = {0}
    for _ in range(size):
        reached |= {node for edge in edges for node in edge if reached & set(edge)}
    return len(reached) == size


def _sentence(seed: int) -> ParsedSentence:
    chance = random.Random(seed)
    words = chance.sample(["the", "old", "man", "river", "thinks", "has", "nobody", "answered", "dog", "cats"], 7)
    heads = [-1, *(chance.randrange(word) for word in range(1, 7))]
    return ParsedSentence(words=tuple(words), tags=("NOUN",) * 7, heads=tuple(heads))


def test_a_tree_in_the_states_is_found_and_noise_is_not() -> None:
    """Squared distances between sums of one orthogonal vector an edge are tree distances, so a probe exists that is exact."""
    sentences = [_sentence(seed) for seed in range(48)]
    states = [torch.stack([_embedded(one), torch.randn(7, 24)]) for one in sentences]
    probes = fit_probes(states[:32], sentences[:32], rank=16, epochs=60, learning_rate=0.02, seed=0)
    exact, noise = (sum(hits) / (6 * 16) for hits in _scored(probes, states[32:], sentences[32:]))
    assert exact > 0.9
    assert noise < 0.6


def test_the_size_of_the_states_changes_nothing() -> None:
    """In a pre-norm host they grow from layer to layer; the probe of the first had learnt a tenth of what that of the last had."""
    sentences = [_sentence(seed) for seed in range(24)]
    plain = [_embedded(one) for one in sentences]
    states = [torch.stack([rows, 0.01 * rows]) for rows in plain]
    probes = fit_probes(states, sentences, rank=16, epochs=5, learning_rate=0.02, seed=0)
    alone = [fit_probes([each[layer : layer + 1] for each in states], sentences, 16, 5, 0.02, 0) for layer in range(2)]
    torch.testing.assert_close(alone[1], 100 * alone[0], rtol=1e-4, atol=1e-4)
    assert float((100 * probes[0]).norm() / probes[1].norm()) == pytest.approx(1, rel=0.2), (
        "other random numbers, as much learnt"
    )


def _embedded(sentence: ParsedSentence) -> torch.Tensor:
    rows = torch.zeros(len(sentence.words), 24)
    for word, head in enumerate(sentence.heads):
        if head >= 0:
            rows[word] = rows[head]
            rows[word, word] += 1
    return rows @ torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(0)))[0]


def test_states_of_words_and_all_conditions() -> None:
    tokenizer = cases.tokenizer()
    model = cases.model(len(tokenizer), tree_scope="sentence").float()
    reader = reader_of(tokenizer, source=cases.MadeUpSource())
    sentences = [_sentence(seed) for seed in range(6)]
    states = word_states(model, reader, sentences)
    ids = torch.tensor([reader.read(sentences[0].text).ids])
    places = tokenizer(sentences[0].text, return_offsets_mapping=True)["offset_mapping"]
    embedded = model.get_input_embeddings()(ids)[0, 1:]
    start, end = sentences[0].places()[2]
    mine = torch.stack([v for v, (a, b) in zip(embedded, places, strict=True) if a < end and b > start]).mean(0)
    torch.testing.assert_close(states[0][0, 2], mine)
    with model.disable_streams():  # the stream's trees matter to the states
        assert (word_states(model, reader, sentences)[0][2] - states[0][2]).abs().max() > 1e-3
    found = probe_syntax(model, reader, sentences[:4], sentences[4:], rank=4, epochs=1)
    layers = [f"@layer{layer}" for layer in range(4)]
    assert set(found.found) == {*layers, *(f".nonsense{one}" for one in layers), ".random", ".linear"}
    assert found.edges == (6, 6) and all(0 <= hit <= 6 for hits in found.found.values() for hit in hits)
    assert "uuas@layer0" in found.metrics()
    with pytest.raises(KeelError, match="some to fit and some to test"):
        probe_syntax(model, reader, [], sentences)
