"""Log-likelihoods of what may follow a prompt: a prompt is read once, its options go on from its cache.

A prompt whose trees are others with an option behind it (one that ends within a sentence, in scope ``sentence``) is read with each.

GTCA Eq. 9: an option scores the sum of the log-probabilities of its tokens, each after the prompt and the tokens before it.
``reference_scores`` is the specification: every prompt and option in a pass of its own.

Shapes: B prompts, P tokens of a prompt, N options, C tokens of an option, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.evaluation.scoring import evaluating
from keel.model import KeelForCausalLM
from keel.ops.padding import rows_of_length
from keel.streams import TreeStream
from keel.trees.fields import FieldReader, Row, continues, padded_left, row_inputs, visible_before
from keel.trees.lookup import Lookup, open_lookup

_READ_AT_ONCE = 128  # requests
_PASS_TOKENS = 128  # a pass of its own costs a small host as much as so many tokens more, on a processor


class Request(NamedTuple):
    """A prompt, maybe empty, and what may follow it."""

    prompt: str
    options: Sequence[str]


class Scored(NamedTuple):
    """Log-likelihood of an option in nats, and whether each of its tokens was the likeliest."""

    loglikelihood: float
    greedy: bool


class _Prompt(NamedTuple):
    """A request as rows: of the prompt alone, and with each option behind it."""

    number: int
    alone: Row
    rows: list[Row]

    @property
    def cost(self) -> tuple[int, int]:
        """Tokens of the prompt, and of its longest option."""
        return self.alone.num_prompt, max(len(row.ids) - row.num_prompt for row in self.rows)


def option_scores(
    model: KeelForCausalLM,
    reader: FieldReader,
    requests: Sequence[Request],
    *,
    token_budget: int = 8192,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[list[float]]:
    """Return for every request the log-likelihood of each of its options, in nats. Reference twin: ``reference_scores``.

    The arguments are those of ``scored_options``.
    """
    found = scored_options(model, reader, requests, token_budget=token_budget, device=device, progress=progress)
    return [[option.loglikelihood for option in row] for row in found]


def scored_options(
    model: KeelForCausalLM,
    reader: FieldReader,
    requests: Sequence[Request],
    *,
    token_budget: int = 8192,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[list[Scored]]:
    """Score each option of every request.

    Args:
        reader: makes the rows, with trees where the model's stream reads them from the batch.
        token_budget: most tokens in one forward pass, or one request.
        progress: called with the number of finished requests.
    """
    prompts, lookup = sorted(_read(reader, requests), key=lambda one: one.cost), _lookup_of(model)
    shared: list[_Prompt] = []
    apart: list[_Prompt] = []
    for one in prompts:
        (shared if all(_continues(row, one.alone, lookup) for row in one.rows) else apart).append(one)
    scores: list[list[Scored]] = [[] for _ in requests]
    done = 0
    with evaluating(model):
        for batch in _batches(shared, token_budget):
            for prompt, found in zip(batch, _score(model, batch, device), strict=True):
                scores[prompt.number] = found
            done += len(batch)
            if progress is not None:
                progress(done)
        scores_apart = _score_apart(model, apart, token_budget, device)
        for prompt, found in zip(apart, scores_apart, strict=True):
            scores[prompt.number] = found
            done += 1
            if progress is not None:
                progress(done)
    return scores


def _read(reader: FieldReader, requests: Sequence[Request]) -> Iterator[_Prompt]:
    """Read requests, many at once, so that their fields are parsed together."""
    for begin in range(0, len(requests), _READ_AT_ONCE):
        some = requests[begin : begin + _READ_AT_ONCE]
        rows = iter(reader.read_all([(one.prompt, option) for one in some for option in ("", *one.options)]))
        for number, request in enumerate(some, begin):
            yield _Prompt(number, next(rows), [next(rows) for _ in request.options])


def _lookup_of(model: KeelForCausalLM) -> Lookup | None:
    """Return what finds the trees of rows that have none with them."""
    configs = [stream.config for stream in model.wires.streams.values() if isinstance(stream, TreeStream)]
    named = [(config.lookup, config.tree_scope) for config in configs if config.lookup is not None]
    return open_lookup(*named[0]) if named else None


def _continues(row: Row, prompt: Row, lookup: Lookup | None) -> bool:
    """Return whether an option that goes on from its prompt's cache sees what it sees in a pass of its own."""
    if lookup is None or row.chunks is not None:
        return continues(row, prompt)
    row, prompt = (dataclasses.replace(one, chunks=lookup(one.ids)) for one in (row, prompt))
    # Its last token is not read, so that another text is looked up, or none is found and the prompt's chunks are read on.
    found, behind = lookup(row.ids[:-1]), len(row.ids) - 1
    read_on = visible_before(prompt.chunks if found is None else found, behind)
    return continues(row, prompt) and read_on == visible_before(row.chunks, behind)


def _batches(prompts: Sequence[_Prompt], token_budget: int) -> Iterator[list[_Prompt]]:
    batch: list[_Prompt] = []
    for prompt in prompts:
        grown = [*batch, prompt]
        longest, behind = (max(one.cost[side] for one in grown) for side in (0, 1))
        options = sum(len(one.rows) for one in grown)
        if batch and max(len(grown) * longest, options * behind) > token_budget:
            yield batch
            grown = [prompt]
        batch = grown
    if batch:
        yield batch


def _score(model: KeelForCausalLM, batch: list[_Prompt], device: torch.device | str) -> list[list[Scored]]:
    """Read the prompts of a batch, then all their options behind them."""
    longest = max(one.alone.num_prompt for one in batch)
    ids_BP = torch.tensor([padded_left(list(one.alone.ids), longest, 0) for one in batch], device=device)
    attended_BP = torch.tensor([padded_left([1] * one.alone.num_prompt, longest, 0) for one in batch], device=device)
    options = [row for one in batch for row in one.rows]
    owners = [index for index, one in enumerate(batch) for _ in one.rows]
    longer = [n for n, row in enumerate(options) if len(row.ids) > row.num_prompt + 1]
    output = model(
        ids_BP,
        attention_mask=attended_BP,
        position_ids=_positions(attended_BP),
        use_cache=bool(longer),  # an option of one token is predicted by the prompt alone
        logits_to_keep=1,
        **row_inputs([one.alone for one in batch], num_layers(model), longest, device),
    )
    logs_BV = output.logits[:, -1].float().log_softmax(-1)
    logs = [logs_BV[owner, None] for owner in owners]
    cost = _PASS_TOKENS if torch.device(device).type == "cpu" else 2**63
    groups = rows_of_length([len(options[n].ids) - options[n].num_prompt for n in longer], cost)
    for number, group in enumerate(groups, 1):
        chosen = [longer[place] for place in group]
        cache = output.past_key_values if number == len(groups) else copy.deepcopy(output.past_key_values)
        owner_N = torch.tensor([owners[n] for n in chosen], device=device)
        behind_NCV = _go_on(model, [options[n] for n in chosen], owner_N, cache, attended_BP)
        for n, behind_CV in zip(chosen, behind_NCV, strict=True):
            logs[n] = torch.cat([logs[n], behind_CV[: len(options[n].ids) - options[n].num_prompt - 1]])
    found: list[list[Scored]] = [[] for _ in batch]
    for owner, row, logs_CV in zip(owners, options, logs, strict=True):
        found[owner].append(_scored(row, logs_CV))
    return found


def _scored(row: Row, logs_CV: Tensor) -> Scored:
    """Score what stands behind the prompt, given the log-probabilities before each of its tokens."""
    ids_C = torch.tensor(row.ids[row.num_prompt :], device=logs_CV.device)
    scores_C = logs_CV.gather(-1, ids_C.unsqueeze(-1)).squeeze(-1)
    return Scored(float(scores_C.double().sum()), bool((logs_CV.argmax(-1) == ids_C).all()))


def _score_apart(
    model: KeelForCausalLM, prompts: Sequence[_Prompt], token_budget: int, device: torch.device | str
) -> Iterator[list[Scored]]:
    """Read every prompt with each of its options anew; yields the scores prompt by prompt."""
    batch: list[_Prompt] = []
    for prompt, following in itertools.zip_longest(prompts, prompts[1:]):
        batch.append(prompt)
        grown = [row for one in (*batch, following) if one is not None for row in one.rows]
        if following is not None and len(grown) * max(len(row.ids) for row in grown) <= token_budget:
            continue
        rows = iter([score for part in _parts(batch, token_budget) for score in _score_whole(model, part, device)])
        for one in batch:
            yield [next(rows) for _ in one.rows]
        batch = []


def _parts(batch: Sequence[_Prompt], token_budget: int) -> Iterator[list[Row]]:
    """Yield the rows of a batch in as few parts as the budget allows: one, but for a request that is too large alone."""
    rows = [row for one in batch for row in one.rows]
    at_once = max(1, token_budget // max(len(row.ids) for row in rows))
    for begin in range(0, len(rows), at_once):
        yield rows[begin : begin + at_once]


def _score_whole(model: KeelForCausalLM, rows: list[Row], device: torch.device | str) -> list[Scored]:
    """Score what stands behind the prompt of each row, in one pass without a cache."""
    width = max(len(row.ids) for row in rows)
    before = min(row.num_prompt for row in rows) - 1  # columns whose logits nobody asks for
    ids_NT = torch.tensor([[*row.ids, *[0] * (width - len(row.ids))] for row in rows], device=device)
    attended_NT = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows], device=device)
    logits_NCV = model(
        ids_NT,
        attention_mask=attended_NT,
        logits_to_keep=width - before,
        **row_inputs(rows, num_layers(model), device=device),
    ).logits
    return [
        _scored(row, logits_CV[row.num_prompt - 1 - before : len(row.ids) - 1 - before].float().log_softmax(-1))
        for row, logits_CV in zip(rows, logits_NCV, strict=True)
    ]


def _go_on(model: KeelForCausalLM, options: list[Row], owner_N: Tensor, cache: Any, attended_BP: Tensor) -> Tensor:
    """Return the log-probabilities behind each token of options but the last, [N, C - 1, V], from the cache of their prompts."""
    width, device = max(len(row.ids) - row.num_prompt for row in options), attended_BP.device
    behind_NC = torch.tensor([_behind(row, width - 1, 0) for row in options], device=device)
    filled_NC = torch.tensor([_behind(row, width - 1, None) for row in options], device=device)
    attended_NS = torch.cat([attended_BP[owner_N], filled_NC], 1)
    cache.batch_select_indices(owner_N)
    longest = attended_BP.shape[1]
    output = model(
        behind_NC,
        attention_mask=attended_NS,
        position_ids=_positions(attended_NS)[:, longest:],
        past_key_values=cache,
        use_cache=True,
        **row_inputs(options, num_layers(model), longest, device),
    )
    logs_NCV: Tensor = output.logits.float().log_softmax(-1)
    return logs_NCV


def _behind(row: Row, width: int, filling: int | None) -> list[int]:
    """The tokens of an option but its last, filled up on the right; without ``filling`` ones for them and zeros behind."""
    ids = list(row.ids[row.num_prompt : -1])
    rest = [0] * (width - len(ids))
    return [1] * len(ids) + rest if filling is None else ids + [filling] * len(rest)


def num_layers(model: KeelForCausalLM) -> int:
    """Return the layers of the host."""
    return int(model.host.config.get_text_config().num_hidden_layers)


def _positions(attended_BT: Tensor) -> Tensor:
    return (attended_BT.cumsum(1) - 1).clamp(min=0)


def reference_scores(model: KeelForCausalLM, reader: FieldReader, requests: Sequence[Request]) -> list[list[float]]:
    """The obvious way, the oracle of ``option_scores``: every prompt with every option in a pass of its own, without a cache."""
    scores = []
    with evaluating(model):
        for request in requests:
            found = []
            for option in request.options:
                row = reader.read(request.prompt, option)
                logits_TV = model(torch.tensor([row.ids]), **row_inputs([row], num_layers(model))).logits[0]
                logs_TV = logits_TV.float().log_softmax(-1)
                found.append(
                    float(sum(logs_TV[t - 1, row.ids[t]].double() for t in range(row.num_prompt, len(row.ids))))
                )
            scores.append(found)
    return scores
