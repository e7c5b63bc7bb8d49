"""LAMBADA: predict the last word of a passage, after a context of a given length (Paperno et al. 2016; S-Former, App. B).

A passage has some 80 words. To evaluate at 512 to 4,096 tokens, as S-Former does, each is preceded by other passages, so that target
and passage are the same at every length and only what stands before them grows. How the paper fills the context is not said.

Shapes: B batch, T tokens of context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keel.data import Document
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, accuracy
from keel.evaluation.scoring import LanguageModel, evaluating, score_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Passage:
    """A passage as token ids; the last ``num_targets`` of them spell its last word."""

    ids: list[int]
    num_targets: int


def read_passages(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    single_token: bool = False,
    most: int | None = None,
) -> list[Passage]:
    """Tokenise passages and find the tokens of each last word, its leading space included.

    Args:
        single_token: keep only passages whose last word is one token, as S-Former does.
        most: passages to find, the first ones; None for all.
    Raises: KeelError where no passage is left.
    """
    passages: list[Passage] = []
    for document in documents:
        if len(passages) == most:
            break
        text = document.text.rstrip()
        cut = max(text.rfind(" "), text.rfind("\n"))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        before = tokenizer(text[:cut], add_special_tokens=False)["input_ids"] if cut > 0 else []
        # Where the words before do not tokenise alike on their own, the boundary is not between two tokens.
        if before and ids[: len(before)] == before and (not single_token or len(ids) == len(before) + 1):
            passages.append(Passage(ids=ids, num_targets=len(ids) - len(before)))
    if not passages:
        raise KeelError(
            "last word: no passage is left whose last word begins a token; give passages of at least two words, or "
            "single_token: false"
        )
    return passages


def last_word(
    model: LanguageModel,
    passages: Sequence[Passage],
    contexts: Sequence[int],
    family: str,
    *,
    separator: int,
    num_passages: int,
    token_budget: int = 8192,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> list[ItemMetric]:
    """Score the last words of the first ``num_passages`` passages after each context length.

    Args:
        contexts: tokens before the last word, ascending; a passage longer than that loses its beginning.
        separator: the id between two passages, the end-of-text token.
        token_budget: most tokens in one forward pass, or one row.
        progress: called with the context and the number of finished passages.
    Returns: for every context ``<family>.accuracy@<context>``, the share of words of which every token was the likeliest, and
        ``<family>.ppl@<context>``, the exponential of the mean negative log-likelihood of a word.
    Raises: KeelError where the passages together are shorter than the longest context.
    """
    chosen = passages[:num_passages]
    metrics = []
    with evaluating(model):
        for context in contexts:
            nats: list[float] = []
            hits: list[bool] = []
            rows = [_row(passages, index, context, separator) for index in range(len(chosen))]
            size = max(1, token_budget // context)
            for start in range(0, len(rows), size):
                for nll, hit in _score(model, rows[start : start + size], chosen[start : start + size], device):
                    nats.append(nll)
                    hits.append(hit)
                if progress is not None:
                    progress(context, len(nats))
            metrics += _metrics(family, context, nats, hits)
    return metrics


def _row(passages: Sequence[Passage], index: int, context: int, separator: int) -> list[int]:
    """The ``context`` tokens before the last word of a passage, then that word; other passages, from the end on, come first."""
    row = list(passages[index].ids)
    wanted = context + passages[index].num_targets
    before = index
    while len(row) < wanted:
        before = (before - 1) % len(passages)
        if before == index:
            raise KeelError(
                f"last word: all {len(passages)} passages together are shorter than a context of {context:,} tokens; give "
                "more passages or shorter contexts"
            )
        row = [*passages[before].ids, separator, *row]
    return row[-wanted:]


def _score(
    model: LanguageModel, rows: list[list[int]], passages: Sequence[Passage], device: torch.device | str
) -> list[tuple[float, bool]]:
    """Nats and hit of every row. Rows are as long as the context and their word; the shorter are padded behind their word."""
    longest = max(len(row) for row in rows)
    # What stands behind the last word is not read by it: the model is causal.
    ids_BT = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    hidden_BTD = model.final_hidden(input_ids=ids_BT).last_hidden_state
    found = []
    for row, passage, hidden_TD in zip(rows, passages, hidden_BTD, strict=True):
        first = len(row) - passage.num_targets
        targets: Tensor = torch.tensor(row[first:], device=device)
        score = score_tokens(model, hidden_TD[first - 1 : len(row) - 1], targets)
        found.append((float(score.nll_R.sum()), bool(score.hit_R.all())))
    return found


def _metrics(family: str, context: int, nats: list[float], hits: list[bool]) -> list[ItemMetric]:
    return [
        accuracy(f"{family}.accuracy@{context}", hits),
        ItemMetric(
            name=f"{family}.ppl@{context}",
            unit="perplexity per word",
            higher_is_better=False,
            numerators=tuple(nats),
            denominators=(1.0,) * len(nats),
            exponential=True,
        ),
    ]
