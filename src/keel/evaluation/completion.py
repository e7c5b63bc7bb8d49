"""Completion of strings of a made-up language: greedy, batched and cached, judged by the language's own rules.

S-Former, App. A.2 and A.3 (Algorithms 2 and 3).

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keel.data import TaskData
from keel.data.languages import Sample
from keel.data.tasks import language_tokens
from keel.errors import KeelError
from keel.evaluation.corruption import OF_WHOLE_ROWS, corrupted
from keel.evaluation.items import ItemMetric
from keel.evaluation.scoring import evaluating
from keel.model import KeelForCausalLM

# What is lower in a better model; everything else that a language judges is higher.
_LOWER_IS_BETTER = ("syntax_error", "contradiction")
_UNITS = {"field_f1": "F1"}
_KEPT = 0.875  # with a smaller share of rows unfinished the others are let go: the cache is copied then, as it is at every token anyway


def complete(
    model: KeelForCausalLM,
    prompts: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    batch_size: int = 256,
    use_cache: bool = True,
    keep_finished: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Return the greedy continuation of every prompt, without the end token and what would follow it.

    Args:
        prompts: token ids, each at least one; the padding that a batch needs is on the left.
        tokenizer: says which tokens pad and end.
        max_new_tokens: where a continuation without an end token is cut.
        keep_finished: let rows that are finished stay in the batch, for models in which a row sees another.
        progress: called with the number of finished prompts.
    Raises: KeelError for an empty prompt.
    """
    if not all(prompts):
        raise KeelError("completion: a prompt has no token; begin each with the start token")
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    # Prompts of about one length together: little padding.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: list[list[int]] = [[] for _ in prompts]
    device = next(model.parameters()).device
    with evaluating(model):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            longest = max(len(prompts[index]) for index in chosen)
            rows = [[pad] * (longest - len(prompts[index])) + list(prompts[index]) for index in chosen]
            mask = [[0] * (longest - len(prompts[index])) + [1] * len(prompts[index]) for index in chosen]
            prompts_BT, mask_BT = torch.tensor(rows, device=device), torch.tensor(mask, device=device)
            if use_cache:
                new = _greedy(model, prompts_BT, mask_BT, (pad, end), max_new_tokens, 0.0 if keep_finished else _KEPT)
            else:
                new = model.generate(
                    prompts_BT,
                    attention_mask=mask_BT,
                    do_sample=False,
                    num_beams=1,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=end,
                    pad_token_id=pad,
                    use_cache=False,
                )[:, longest:].tolist()
            for index, new_T in zip(chosen, new, strict=True):
                found[index] = new_T[: new_T.index(end)] if end in new_T else new_T
            if progress is not None:
                progress(min(start + batch_size, len(order)))
    return found


def _greedy(
    model: KeelForCausalLM,
    prompts_BT: Tensor,
    mask_BT: Tensor,
    pad_and_end: tuple[int, int],
    max_new_tokens: int,
    kept: float,
) -> list[list[int]]:
    """Return what ``generate`` would, but let rows go once no more than a share ``kept`` is unfinished: most are early."""
    pad, end = pad_and_end
    new: list[list[int]] = [[] for _ in prompts_BT]
    rows_B = torch.arange(len(new), device=prompts_BT.device)
    going_B = torch.ones_like(rows_B, dtype=torch.bool)
    ids_Bt, positions_Bt, cache = prompts_BT, (mask_BT.cumsum(1) - 1).clamp(min=0), None
    for _ in range(max_new_tokens):
        output = model(
            ids_Bt,
            attention_mask=mask_BT,
            position_ids=positions_Bt,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        chosen_B = output.logits[:, -1].argmax(-1).masked_fill(~going_B, pad)
        for row, token in zip(rows_B.tolist(), chosen_B.tolist(), strict=True):
            new[row].append(token)
        going_B = going_B & (chosen_B != end)
        if not going_B.any():
            break
        mask_BT, positions_Bt = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], 1), positions_Bt[:, -1:] + 1
        ids_Bt = chosen_B[:, None]
        if going_B.sum() < kept * len(going_B):
            left = going_B.nonzero().squeeze(1)
            cache.batch_select_indices(left)
            rows_B, mask_BT, positions_Bt, ids_Bt = (x[left] for x in (rows_B, mask_BT, positions_Bt, ids_Bt))
            going_B = going_B[left]
    return new


def completion(
    model: KeelForCausalLM,
    data: TaskData,
    samples: int,
    *,
    corruptions: Sequence[str] = (),
    corrupted_samples: int = 200,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[ItemMetric]:
    """Complete test strings of the language and of its harder sets.

    Args:
        data: the task that the model has learnt.
        samples: strings of each set.
        corruptions: kinds of ``keel.evaluation.corruption``: the first ``corrupted_samples`` strings are completed again with the
            stream's state so corrupted, and once uncorrupted for comparison (``@intact``).
        progress: called with what is completed, how many are done, and of how many.
    Returns: ``<language>.<metric>``, then ``<language>.<metric>@<set>``, then ``<language>.<metric>@<corruption>``.
    """
    language, metrics = data.language, []
    for name, kind in {"": language, **language.harder()}.items():
        chosen = [kind.sample("test", index) for index in range(samples)]
        metrics += _judged(model, data, kind, chosen, name, None, progress)
    if corruptions:
        chosen = [language.sample("test", index) for index in range(corrupted_samples)]
        for name in ("intact", *corruptions):
            metrics += _judged(model, data, language, chosen, name, name, progress)
    return metrics


def _judged(
    model: KeelForCausalLM,
    data: TaskData,
    language: Any,
    samples: Sequence[Sample],
    condition: str,
    corruption: str | None,
    progress: Callable[[str, int, int], None] | None,
) -> list[ItemMetric]:
    name = language.family
    prompts = [[data.tokenizer.bos_token_id, *data.encode(sample.prompt)] for sample in samples]

    def tell(done: int) -> None:
        if progress is not None:
            progress(f"{name} strings {condition}".rstrip(), done, len(samples))

    corrupt = nullcontext() if corruption in (None, "intact") else corrupted(model, corruption or "")
    with corrupt:
        found = complete(
            model,
            prompts,
            data.tokenizer,
            max_new_tokens=language.longest,
            use_cache=corruption not in OF_WHOLE_ROWS,
            keep_finished=corruption == "other",
            progress=tell,
        )
    texts = [language_tokens(data.tokenizer, ids) for ids in found]
    judged = [language.judge(sample, text) for sample, text in zip(samples, texts, strict=True)]
    suffix = f"@{condition}" if condition else ""
    return [
        ItemMetric(
            name=f"{name}.{metric}{suffix}",
            unit=_UNITS.get(metric, "share of strings"),
            higher_is_better=metric not in _LOWER_IS_BETTER,
            numerators=tuple(one[metric][0] for one in judged),
            denominators=tuple(one[metric][1] for one in judged),
        )
        for metric in judged[0]
    ]
