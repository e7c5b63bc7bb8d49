"""The structural probe: can distances in the dependency tree be read off hidden states, layer by layer (GTCA section 4.4, Fig. 3)?

Hewitt and Manning (2019): a linear map B is learnt so that ||B (h_i - h_j)||^2 is the number of edges between words i and j, in the L1
loss over all pairs, each sentence divided by the square of its length. The minimum spanning tree of the predicted distances is held
against the gold edges: UUAS, the share of them that it has; punctuation is left out.

Two controls: the same probe on random vectors a token (what words alone give), and the probe of real text on sentences whose content
words are nonsense (does it read syntax or vocabulary?). Beside them the share that the chain of neighbours has.

Shapes: W words of a sentence, D hidden size, L layers, R rank of the probe, B sentences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from keel.data.dependencies import ParsedSentence, with_nonsense
from keel.errors import KeelError
from keel.model import KeelForCausalLM
from keel.trees.fields import FieldReader, row_inputs

_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class SyntaxProbe:
    """What the probe finds, sentence by sentence of the test set.

    Attributes:
        edges: gold edges of each sentence.
        found: condition -> how many of them the probe's tree has: ``@layer<k>`` (0 the embeddings), ``.nonsense@layer<k>``,
            ``.random`` and ``.linear``.
    """

    edges: tuple[int, ...]
    found: dict[str, tuple[int, ...]]

    def metrics(self) -> dict[str, tuple[int, ...]]:
        """Return the hits by metric name: ``uuas@layer3``."""
        return {f"uuas{condition}": hits for condition, hits in self.found.items()}


def probe_syntax(
    model: KeelForCausalLM,
    reader: FieldReader,
    train: Sequence[ParsedSentence],
    test: Sequence[ParsedSentence],
    *,
    rank: int = 64,
    epochs: int = 10,
    learning_rate: float = 1e-3,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> SyntaxProbe:
    """Fit a probe for every layer on the first sentences and score it on the others.

    Args:
        reader: makes the rows, with trees where the model's stream reads them.
        rank: of the probe; at most the hidden size is of use.
        epochs, learning_rate: of Adam, in batches of 16 sentences.
    Raises: KeelError without sentences that have an edge.
    """
    test = [sentence for sentence in test if sentence.edges()]
    if not train or not test:
        raise KeelError(f"structural probe: {len(train)} and {len(test)} sentences; give some to fit and some to test")
    tell = progress or (lambda what, done, of: None)
    tell("reading sentences", 0, 3)
    to_fit = word_states(model, reader, train, seed)
    probes_LRD = fit_probes(to_fit, train, rank, epochs, learning_rate, seed, tell)
    del to_fit
    tell("scoring sentences", 1, 3)
    layers = len(probes_LRD) - 1
    names = [*(f"@layer{layer}" for layer in range(layers)), ".random"]
    found = dict(zip(names, _scored(probes_LRD, word_states(model, reader, test, seed), test), strict=True))
    tell("scoring nonsense", 2, 3)
    nonsense = [with_nonsense(sentence, seed) for sentence in test]
    made_up = _scored(probes_LRD, word_states(model, reader, nonsense, seed), nonsense)
    found |= {f".nonsense@layer{layer}": made_up[layer] for layer in range(layers)}
    found[".linear"] = tuple(len(one.edges() & _chain(one)) for one in test)
    return SyntaxProbe(edges=tuple(len(one.edges()) for one in test), found=found)


@torch.no_grad()
def word_states(
    model: KeelForCausalLM, reader: FieldReader, sentences: Sequence[ParsedSentence], seed: int = 0
) -> list[Tensor]:
    """Return for each sentence the mean state of every word's tokens, [L + 2, W, D] float32 on the CPU.

    The last of the layers is the control: a random vector for each token of the vocabulary.
    """
    was_training, device = model.training, model.device
    model.eval()
    states: list[Tensor] = [torch.empty(0)] * len(sentences)
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index].text))
    embeddings: Any = model.get_input_embeddings()
    table_VD = torch.randn(tuple(embeddings.weight.shape), generator=torch.Generator().manual_seed(seed))
    for begin in range(0, len(order), _BATCH):
        batch = order[begin : begin + _BATCH]
        rows = reader.read_all([(sentences[index].text, "") for index in batch])
        longest = max(len(row.ids) for row in rows)
        ids_BT = torch.tensor([[*row.ids, *[0] * (longest - len(row.ids))] for row in rows])
        attended_BT = torch.tensor([[1] * len(row.ids) + [0] * (longest - len(row.ids)) for row in rows])
        inputs = row_inputs(rows, model.host.config.get_text_config().num_hidden_layers, device=device)
        output = model(
            ids_BT.to(device), attention_mask=attended_BT.to(device), output_hidden_states=True, use_cache=False, **inputs
        )  # fmt: skip
        hidden = [layer.float().cpu() for layer in output.hidden_states]
        stacked_LBTD = torch.stack([*hidden, table_VD[ids_BT]])
        for place, index in enumerate(batch):
            mean_WT = _word_means(reader, sentences[index], longest)
            states[index] = torch.einsum("wt,ltd->lwd", mean_WT, stacked_LBTD[:, place])
    model.train(was_training)
    return states


def _word_means(reader: FieldReader, sentence: ParsedSentence, length: int) -> Tensor:
    """Return the weights with which tokens make the mean of each word, [W, T]; a token of two words counts for both."""
    offsets = [(0, 0), *reader.tokenizer.encode(sentence.text, add_special_tokens=False).offsets]
    starts, ends = (torch.tensor([pair[side] for pair in offsets]) for side in (0, 1))
    words = torch.tensor(sentence.places())
    inside_WT = (starts[None] < words[:, 1:]) & (ends[None] > words[:, :1])
    inside_WT = F.pad(inside_WT, (0, length - len(offsets))).float()
    return inside_WT / inside_WT.sum(1, keepdim=True)


def tree_distances(sentence: ParsedSentence) -> Tensor:
    """Return the number of edges between every two words, [W, W]."""
    size = len(sentence.words)
    distance = np.full((size, size), float(2 * size))
    np.fill_diagonal(distance, 0)
    for word, head in enumerate(sentence.heads):
        if head >= 0:
            distance[word, head] = distance[head, word] = 1
    for between in range(size):
        distance = np.minimum(distance, distance[:, between, None] + distance[None, between])
    return torch.from_numpy(distance).float()


def fit_probes(
    states: Sequence[Tensor],
    sentences: Sequence[ParsedSentence],
    rank: int,
    epochs: int,
    learning_rate: float,
    seed: int,
    tell: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Tensor:
    """Fit one probe a layer, all at once, since none depends on another. Returns: [L + 1, R, D].

    Each is fitted on states of mean square 1 a channel: a layer of small numbers would else have learnt less of its probe by the last step,
    and layers could not be compared.
    """
    layers, _, width = states[0].shape
    generator = torch.Generator().manual_seed(seed)
    scale_L11 = torch.cat([each.square().mean(-1) for each in states], 1).mean(1).sqrt().clamp(min=1e-12)[:, None, None]
    probes_LRD = torch.nn.Parameter((torch.rand(layers, rank, width, generator=generator) - 0.5) / 10)
    optimizer = torch.optim.Adam([probes_LRD], lr=learning_rate)
    gold = [tree_distances(sentence) for sentence in sentences]
    order = sorted(range(len(states)), key=lambda index: states[index].shape[1])
    batches = [order[begin : begin + _BATCH] for begin in range(0, len(order), _BATCH)]
    for epoch in range(epochs):
        tell("fitting the structural probe", epoch, epochs)
        for number in torch.randperm(len(batches), generator=generator).tolist():
            loss = torch.zeros(())
            for index in batches[number]:
                apart_LWW = _squared(probes_LRD, states[index] / scale_L11)
                loss = loss + (apart_LWW - gold[index]).abs().sum() / apart_LWW.shape[1] ** 2
            optimizer.zero_grad()
            (loss / len(batches[number])).backward()
            optimizer.step()
    return probes_LRD.detach() / scale_L11


def _squared(probes_LRD: Tensor, states_LWD: Tensor) -> Tensor:
    """Return ||B (h_i - h_j)||^2 for every layer and pair, [L, W, W]."""
    mapped_LWR = states_LWD @ probes_LRD.mT
    apart_LWWR = mapped_LWR.unsqueeze(2) - mapped_LWR.unsqueeze(1)
    return apart_LWWR.square().sum(-1)


def _scored(probes_LRD: Tensor, states: Sequence[Tensor], sentences: Sequence[ParsedSentence]) -> list[tuple[int, ...]]:
    """Return for every layer how many gold edges of each sentence its tree has."""
    hits: list[list[int]] = [[] for _ in probes_LRD]
    for states_LWD, sentence in zip(states, sentences, strict=True):
        kept = [index for index, tag in enumerate(sentence.tags) if tag != "PUNCT"]
        edges = sentence.edges()
        for layer, apart_WW in enumerate(_squared(probes_LRD, states_LWD[:, kept])):
            found = {(kept[a], kept[b]) for a, b in spanning_tree(apart_WW.numpy())}
            hits[layer].append(len(found & edges))
    return [tuple(row) for row in hits]


def spanning_tree(distance_WW: np.ndarray) -> set[tuple[int, int]]:
    """Return the edges of the minimum spanning tree (Prim), the smaller index first."""
    size = len(distance_WW)
    nearest, cost = np.zeros(size, dtype=int), distance_WW[0].astype(float).copy()
    outside = np.ones(size, dtype=bool)
    outside[:1] = False
    edges = set()
    while outside.any():
        new = int(np.where(outside, cost, np.inf).argmin())
        edges.add((min(new, int(nearest[new])), max(new, int(nearest[new]))))
        outside[new] = False
        closer = distance_WW[new] < cost
        nearest[closer], cost[closer] = new, distance_WW[new][closer]
    return edges


def _chain(sentence: ParsedSentence) -> set[tuple[int, int]]:
    """The edges between neighbours, punctuation left out."""
    kept = [index for index, tag in enumerate(sentence.tags) if tag != "PUNCT"]
    return set(itertools.pairwise(kept))
