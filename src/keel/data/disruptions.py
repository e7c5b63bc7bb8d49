"""Disrupted text with the exact level of disruption of every token: what signals of a dynamic state are taught and tested with (DTA §9B).

A window is clean text in which spans are disrupted, one kind a span:

    scramble        the span's tokens in another order; level 1 where another token stands than before
    tokens          every token of the span replaced by a random other one; level 1
    hidden          the text stays; normal noise is to be added to hidden states, as many root mean squares as the level, 0.5 to 1, says
    splice          a span of another document in place of the text; level 1
    contradiction   in a story of ``keel.data.languages.facts``: the place that contradicts; level 1

Everything is a function of seed and index alone; nothing is kept. Shapes: B windows, T tokens, D hidden size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from keel.data.languages.base import generator
from keel.data.languages.facts import Facts, judge_facts
from keel.data.tokens import Longs, TokenStream
from keel.data.windows import SlidingWindows
from keel.errors import KeelError, suggest

SPAN_KINDS = ("scramble", "tokens", "hidden", "splice")
KINDS = ("clean", *SPAN_KINDS, "contradiction")
"""A token's kind is its index here."""
LEAST_HIDDEN = 0.5
HIDDEN_RMS = 2.0  # hidden noise at level 1, in root mean squares of the hidden states
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class DisruptionConfig:
    """How much of a window is disrupted, and how.

    Attributes:
        kinds: of ``SPAN_KINDS``, each span one of them at random.
        share: of the tokens of a text window that lie in disrupted spans, on average, in [0, 0.8].
        span: shortest and longest span, tokens.
        gap: least number of clean tokens before every span, in which signals can recover.
        facts: share of the windows that are a story of facts instead of text.
        contradictions: share of a story's statements that contradict it, of those that could.
    """

    kinds: tuple[str, ...] = SPAN_KINDS
    share: float = 0.25
    span: tuple[int, int] = (8, 32)
    gap: int = 16
    facts: float = 0.0
    contradictions: float = 0.0

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in SPAN_KINDS:
                raise KeelError(f"disruptions: kind {kind!r}; {suggest(str(kind), SPAN_KINDS)}")
        object.__setattr__(self, "kinds", tuple(self.kinds))
        object.__setattr__(self, "span", tuple(self.span))
        if not self.kinds or len(self.span) != 2 or not 2 <= self.span[0] <= self.span[1] or self.gap < 0:
            raise KeelError(
                f"disruptions: kinds={self.kinds}, span={self.span}, gap={self.gap}; give at least one kind, spans of at least 2 "
                "tokens with the longest last, and a gap of at least 0"
            )
        for name, most in (("share", 0.8), ("facts", 1.0), ("contradictions", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise KeelError(f"disruptions: {name}={getattr(self, name)}; give a share in [0, {most}]")


@dataclass(frozen=True, eq=False)
class Disrupted:
    """A disrupted window.

    Attributes:
        ids_T: int64, the tokens as they now stand.
        kind_T: int64, index in ``KINDS``; 0 where a token is clean, also inside a span.
        level_T: float32 in [0, 1], 0 exactly where the kind is 0.
    """

    ids_T: Longs
    kind_T: Longs
    level_T: np.ndarray  # type: ignore[type-arg]


def disrupt(
    ids_T: Longs, elsewhere_T: Longs, config: DisruptionConfig, vocabulary: int, source: np.random.Generator
) -> Disrupted:
    """Disrupt spans of a window of text.

    Args:
        ids_T: clean tokens.
        elsewhere_T: as many tokens of other documents, for splices.
        vocabulary: entries that a random token is drawn from.
        source: of everything random here.
    """
    ids, kind = ids_T.copy(), np.zeros(len(ids_T), dtype=np.int64)
    level = np.zeros(len(ids_T), dtype=np.float32)
    for start, end in spans(len(ids_T), config, source):
        name = config.kinds[source.integers(len(config.kinds))]
        here = slice(start, end)
        if name == "scramble":
            ids[here] = ids_T[here][derangement(end - start, source)]
        elif name == "tokens":
            ids[here] = (ids_T[here] + source.integers(1, vocabulary, size=end - start)) % vocabulary
        elif name == "splice":
            ids[here] = elsewhere_T[here]
        changed = ids[here] != ids_T[here]
        if name == "hidden":
            level[here] = source.uniform(LEAST_HIDDEN, 1.0)
        else:
            level[here] = 1.0 if name == "splice" else changed
        kind[here] = np.where(level[here] > 0, KINDS.index(name), 0)
    return Disrupted(ids, kind, level)


def derangement(size: int, source: np.random.Generator) -> Longs:
    """Return an order of ``size`` places in which none stays where it is: one cycle, uniform among these (Sattolo). One stays alone."""
    order = np.arange(size, dtype=np.int64)
    for last in range(size - 1, 0, -1):
        other = int(source.integers(last))
        order[[last, other]] = order[[other, last]]
    return order


def spans(length: int, config: DisruptionConfig, source: np.random.Generator) -> list[tuple[int, int]]:
    """Return the spans [start, end) of a window: in order, apart by at least the gap, ``share`` of the tokens on average."""
    if config.share == 0:
        return []
    mean_gap = sum(config.span) / 2 * (1 - config.share) / config.share
    found: list[tuple[int, int]] = []
    at = 0
    # The first gap is drawn in full, so that the beginning of a window is clean: there is nothing yet that it could break.
    while True:
        at += config.gap + int(source.exponential(max(1.0, mean_gap - config.gap)))
        end = at + int(source.integers(config.span[0], config.span[1] + 1))
        if end > length:
            return found
        found.append((at, end))
        at = end


class DisruptedWindows(Dataset[dict[str, Tensor]]):
    """Windows of a token stream, disrupted anew in every pass; made when they are read.

    An index may go beyond the number of windows: ``index = pass · N + window``, see ``keel.data.masking.MaskedWindows``.
    """

    varies_by_pass = True

    def __init__(
        self,
        stream: TokenStream,
        length: int,
        stride: int,
        tokenizer: PreTrainedTokenizerBase,
        config: DisruptionConfig,
        *,
        seed: int,
    ) -> None:
        """Take windows of ``length`` tokens, ``stride`` apart.  Raises: KeelError for sizes that do not fit the text."""
        self.text = SlidingWindows(stream, length, stride)
        begins = np.arange(len(self.text), dtype=np.int64) * stride
        self._first, self._last = stream.documents_at(begins), stream.documents_at(begins + length - 1)
        self.tokenizer, self.config, self.seed = tokenizer, config, seed

    def __len__(self) -> int:
        """Return the number of windows of one pass."""
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one window, each entry [T] but the last.

        ``input_ids`` and ``labels`` int64 (-100 where a token was scrambled or replaced, and at places that contradict: nothing to
        learn); ``level`` float32 and ``kind`` int64, see ``Disrupted``; ``noise_seed`` int64, of the hidden noise (``with_hidden_noise``).
        Raises: IndexError below 0.
        """
        if index < 0:
            raise IndexError(f"disrupted window {index}")
        entropy = hashlib.sha256(f"disrupt {self.seed} {index}".encode()).digest()
        source = np.random.default_rng(int.from_bytes(entropy[:8], "little"))
        if source.random() < self.config.facts:
            found = self._story(index)
        else:
            window = index % len(self.text)
            clean = self.text[window]["input_ids"].numpy()
            elsewhere = self.text[self._elsewhere(window, source)]["input_ids"].numpy()
            found = disrupt(clean, elsewhere, self.config, len(self.tokenizer), source)
        ids = torch.from_numpy(found.ids_T)
        kind = torch.from_numpy(found.kind_T)
        nothing_to_learn = (kind == 1) | (kind == 2) | (kind == KINDS.index("contradiction"))
        return {
            "input_ids": ids,
            "labels": ids.masked_fill(nothing_to_learn, IGNORED),
            "level": torch.from_numpy(found.level_T),
            "kind": kind,
            "noise_seed": torch.tensor(int.from_bytes(entropy[8:15], "little")),
        }

    def _elsewhere(self, window: int, source: np.random.Generator) -> int:
        """Draw a window of other documents; where the text is one document, any window."""
        apart = np.flatnonzero((self._last < self._first[window]) | (self._first > self._last[window]))
        return int(apart[source.integers(len(apart))] if len(apart) else source.integers(len(self.text)))

    def _story(self, index: int) -> Disrupted:
        length, statements = self.text.length, self.text.length // 4 + 1
        # A token covers at least one character and a statement about 25: this many fill the window.
        source = generator("story", self.seed, index)
        text = Facts().story(source, statements, self.config.contradictions)
        return encode_story(text, self.tokenizer, length)


def encode_story(text: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Disrupted:
    """Return the first ``length`` tokens of a story, with level 1 at the tokens of places that contradict it.

    Raises: KeelError for a story of fewer tokens.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if len(encoded["input_ids"]) < length:
        raise KeelError(f"a story of {len(encoded['input_ids'])} tokens does not fill {length}; give more statements")
    ids = np.array(encoded["input_ids"][:length], dtype=np.int64)
    kind = np.zeros(length, dtype=np.int64)
    wrong = [(s.start, s.end) for s in judge_facts(text) if s.verdict == "contradiction"]
    for at, (start, end) in enumerate(encoded["offset_mapping"][:length]):
        if any(start < last and first < end for first, last in wrong):
            kind[at] = KINDS.index("contradiction")
    return Disrupted(ids, kind, (kind > 0).astype(np.float32))


def with_hidden_noise(level_BT: Tensor, kind_BT: Tensor, seeds_B: Tensor, hidden_BTD: Tensor) -> Tensor:
    """Return hidden states with the noise that a batch of ``DisruptedWindows`` wants; the same object where it wants none.

    The noise is normal, at tokens of the kind ``hidden`` alone; its standard deviation is ``HIDDEN_RMS`` times the level times the root
    mean square of the row. Row b draws from ``seeds_B[b]`` alone, whatever batch it is in.
    """
    scale_BT = HIDDEN_RMS * level_BT * (kind_BT == KINDS.index("hidden"))
    if not bool(scale_BT.any()):
        return hidden_BTD
    rows = []
    for seed in seeds_B.tolist():
        rows.append(torch.randn(hidden_BTD.shape[1:], generator=torch.Generator().manual_seed(seed)))
    rms_B11 = hidden_BTD.detach().float().square().mean((1, 2), keepdim=True).sqrt()
    noise_BTD = torch.stack(rows).to(hidden_BTD.device) * scale_BT.unsqueeze(-1) * rms_B11
    return hidden_BTD + noise_BTD.to(hidden_BTD.dtype)
