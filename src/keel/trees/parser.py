"""A small self-attentive span parser, trained where it is used: words in, labelled trees out.

Kitaev & Klein 2018 ("Constituency Parsing with a Self-Attentive Encoder"): an encoder, scores of labels for every span from the difference
of its edges (section 2), the best tree by CKY. What differs is for a treebank of a few thousand sentences and no pretrained weights:
words are known by their letters at both ends too, a convolution stands before each attention, positions are relative, and a label's score
is its log odds against no constituent (Teng & Zhang 2018, the local model), learnt by cross-entropy over all spans.

Shapes: B sentences, T words with one mark at each end, F features of a word, D width, H heads, E edges between words, S spans, C labels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from keel.errors import KeelError, build_config
from keel.files import write_atomically
from keel.trees.charts import best_splits, tree_spans

_FORMAT = 1
_REACH = 16  # words; the relative position of what lies further off is that of the sixteenth
_SPANS_AT_ONCE = 40_000
_SPANS_OF_A_BATCH = 10_000  # what is done once a batch takes about as long
AFFIXES = 4  # letters of the longest prefix and suffix that is a feature
NUM_FEATURES = 2 + 2 * AFFIXES
SHAPES = str.maketrans(
    {
        **{chr(c): "X" for c in range(65, 91)},
        **{chr(c): "x" for c in range(97, 123)},
        **{str(d): "9" for d in range(10)},
    }
)


@dataclass(frozen=True, kw_only=True)
class ParserConfig:
    """Sizes of a parser: width, layers, heads, hidden size of the span scorer, share of what is dropped in training."""

    width: int = 160
    num_layers: int = 2
    num_heads: int = 4
    span_width: int = 160
    dropout: float = 0.25


def features_of(word: str) -> list[str]:
    """Return what a word is known by: itself, its shape, its first and last letters."""
    lower = word.lower()
    shape = word.translate(SHAPES)
    short = "".join(letter for index, letter in enumerate(shape) if shape[index - 2 : index] != 2 * letter)
    ends = [(f"<{lower[:size]}", f"{lower[-size:]}>") for size in range(1, AFFIXES + 1)]
    return [f"={lower}", f"~{short}", *(affix for pair in ends for affix in pair)]


class Layer(nn.Module):
    """A convolution over three words, self-attention with learnt relative positions, a feed-forward part; each with a residual."""

    def __init__(self, config: ParserConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.num_heads, config.dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.near = nn.Conv1d(width, width, 3, padding=1)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.distance = nn.Parameter(torch.zeros(config.num_heads, 2 * _REACH + 1))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden_BTD: Tensor, filled_BT: Tensor) -> Tensor:
        """Return the new hidden states; what is not filled is read by nobody."""
        clean_BDT = (self.norms[0](hidden_BTD) * filled_BT.unsqueeze(-1)).mT
        hidden_BTD = hidden_BTD + self._drop(F.gelu(self.near(clean_BDT)).mT)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.mixed(self.norms[1](hidden_BTD)).chunk(3, -1)
        )
        places = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
        apart_TT = (places[None] - places[:, None]).clamp(-_REACH, _REACH) + _REACH
        mask_BHTT = self.distance[:, apart_TT].masked_fill(~filled_BT[:, None, None], float("-inf"))
        read_BHTK = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_BHTT)
        hidden_BTD = hidden_BTD + self._drop(self.out(read_BHTK.transpose(1, 2).flatten(2)))
        return hidden_BTD + self._drop(self.down(F.gelu(self.up(self.norms[2](hidden_BTD)))))

    def _drop(self, tensor: Tensor) -> Tensor:
        return F.dropout(tensor, self.dropout, self.training)


class SpanParser(nn.Module):
    """The parser; made by ``keel.trees.parser_training.train_parser`` or ``load_parser``.

    Args:
        features: known features of words, see ``features_of``.
        labels: of constituents; a chain of unary nodes is one label, from the top, with ``+`` between. Index 0 means no constituent.
        tags: parts of speech.
    """

    def __init__(
        self, config: ParserConfig, features: Sequence[str], labels: Sequence[str], tags: Sequence[str]
    ) -> None:
        super().__init__()
        self.config, self.features, self.labels, self.tags = config, list(features), list(labels), list(tags)
        # 0 is no feature, 1 and 2 are the marks before and behind the sentence.
        self.index = {feature: number for number, feature in enumerate(self.features, 3)}
        self.table = nn.Embedding(len(self.features) + 3, config.width, padding_idx=0)
        self.norm = nn.LayerNorm(config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.edge = nn.Linear(config.width, config.span_width)
        self.span_norm = nn.LayerNorm(config.span_width)
        self.label = nn.Linear(config.span_width, len(self.labels) + 1)
        self.tag = nn.Linear(config.width, len(self.tags))
        nn.init.normal_(self.table.weight, std=0.3)
        with torch.no_grad():
            self.table.weight[0] = 0
            self.label.bias[0] += 4.0  # most spans are no constituent

    def encode(self, sentences: Sequence[Sequence[str]]) -> Tensor:
        """Return the features of every word, int64 [B, T, F], with the marks at both ends; 0 where there is none."""
        longest = max(len(words) for words in sentences) + 2
        ids = torch.zeros(len(sentences), longest, NUM_FEATURES, dtype=torch.long)
        different = {word for words in sentences for word in words}
        known = {word: [self.index.get(feature, 0) for feature in features_of(word)] for word in different}
        for row, words in enumerate(sentences):
            ids[row, 1 : len(words) + 1] = torch.tensor([known[word] for word in words])
            ids[row, 0, 0], ids[row, len(words) + 1, 0] = 1, 2
        return ids

    def forward(self, ids_BTF: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the edges between words [B, E, span_width], E = T - 1, and the hidden states of the words [B, T - 2, D]."""
        flat = F.embedding_bag(ids_BTF.flatten(0, 1), self.table.weight, mode="sum", padding_idx=0)
        hidden_BTD = F.dropout(self.norm(flat), self.config.dropout, self.training).unflatten(0, ids_BTF.shape[:2])
        filled_BT = torch.arange(ids_BTF.shape[1]) < lengths_B[:, None] + 2
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, filled_BT)
        hidden_BTD = self.final_norm(hidden_BTD)
        forward_BTC, backward_BTC = hidden_BTD.chunk(2, -1)
        edges_BED = torch.cat([forward_BTC[:, :-1], -backward_BTC[:, 1:]], -1)
        return self.edge(edges_BED), hidden_BTD[:, 1:-1]

    def span_logits(self, edges_BEN: Tensor, left_S: Tensor, right_S: Tensor) -> Tensor:
        """Return the logits of no constituent and of every label for the spans between two edges, [B, S, 1 + C]."""
        spans_BSN = edges_BEN[:, right_S] - edges_BEN[:, left_S]
        logits_BSC: Tensor = self.label(
            F.dropout(F.relu(self.span_norm(spans_BSN)), self.config.dropout, self.training)
        )
        return logits_BSC

    @torch.no_grad()
    def parse(self, sentences: Sequence[Sequence[str]]) -> list[tuple[list[tuple[int, int, str]], list[str]]]:
        """Return for every sentence its constituents (first word, word behind the last, label) in preorder, and parts of speech.

        A node above another one over the same words comes first. Raises: KeelError for a sentence without words.
        """
        if not all(sentences):
            raise KeelError("the parser was given a sentence without words; leave it out")
        found: list[Any] = [None] * len(sentences)
        order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
        begin = 0
        squares = [len(sentences[index]) ** 2 for index in order]
        while begin < len(order):
            end, filled = begin + 1, squares[begin]
            while end < len(order):
                filled += squares[end]  # and the rest of the batch's charts is padding, which costs as much
                if (end + 1 - begin) * squares[end] > min(2 * _SPANS_AT_ONCE, 2 * filled + _SPANS_OF_A_BATCH):
                    break
                end += 1
            chosen = order[begin:end]
            for index, tree in zip(chosen, self._parse_batch([sentences[index] for index in chosen]), strict=True):
                found[index] = tree
            begin = end
        return found

    def _parse_batch(self, sentences: list[Sequence[str]]) -> list[tuple[list[tuple[int, int, str]], list[str]]]:
        lengths = [len(words) for words in sentences]
        edges_BEN, words_BTD = self(self.encode(sentences), torch.tensor(lengths))
        longest = max(lengths)
        left, right = torch.triu_indices(longest, longest)
        right = right + 1
        logits_BSC = self.span_logits(edges_BEN, left, right)
        odds = (logits_BSC[..., 1:] - logits_BSC[..., :1]).max(-1)
        scores = torch.zeros(len(sentences), longest, longest + 1)
        scores[:, left, right] = odds.values.clamp(min=0)
        label = torch.zeros(scores.shape, dtype=torch.long)
        label[:, left, right] = odds.indices
        splits = best_splits(scores)[1].numpy()
        likely, best_label = (scores > 0).numpy(), label.numpy()
        tags = self.tag(words_BTD).argmax(-1).tolist()
        trees = []
        for row, length in enumerate(lengths):
            # No constituent where its odds are below one half; the root is one in any case.
            chosen = [
                (i, j, name)
                for i, j in tree_spans(splits[row], length)
                if likely[row, i, j] or j - i == length
                for name in self.labels[best_label[row, i, j]].split("+")
            ]
            trees.append((chosen, [self.tags[tag] for tag in tags[row][:length]]))
        return trees


def save_parser(parser: SpanParser, path: str | Path) -> str:
    """Write a parser to one safetensors file; returns its sha256. Raises: KeelError where the file cannot be written."""
    kept = {
        "format": _FORMAT, "config": asdict(parser.config),
        "features": parser.features, "labels": parser.labels, "tags": parser.tags,
    }  # fmt: skip
    weights = {name: tensor.contiguous() for name, tensor in parser.state_dict().items()}
    return write_atomically(Path(path), save(weights, {"keel_parser": json.dumps(kept)}))


def load_parser(path: str | Path) -> SpanParser:
    """Read a parser that ``save_parser`` wrote, ready to parse. Raises: KeelError for a missing, damaged or other file."""
    try:
        with safe_open(str(path), "pt") as file:
            kept = json.loads((file.metadata() or {})["keel_parser"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        config = build_config(ParserConfig, kept["config"], f"{path}: config")
        parser = SpanParser(config, kept["features"], kept["labels"], kept["tags"])
        parser.load_state_dict(weights)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise KeelError(
            f"{path} is no parser of keel trees train ({reason}); train one, or name another file"
        ) from error
    return parser.eval()
