"""Keel checkpoints under lm-evaluation-harness: its tasks ask, our scorer answers, with trees where the stream reads them.

    lm = harness_model(model, reader_of(tokenizer, source=...))
    lm_eval.simple_evaluate(model=lm, tasks=["blimp"])

Contexts are read field by field as our own prompts are (``keel.trees.fields``), so that both ways give the same numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from keel.errors import KeelError
from keel.evaluation.options import Request, Scored, num_layers, scored_options
from keel.evaluation.scoring import evaluating
from keel.model import KeelForCausalLM
from keel.trees.fields import FieldReader, row_inputs

_NEW_TOKENS = 256  # where a task does not say


class _Answers:
    """The three kinds of requests of lm-evaluation-harness; see its ``lm_eval.api.model.LM``."""

    model: KeelForCausalLM
    reader: FieldReader
    token_budget: int
    at: torch.device | str

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations; those of one context are scored together."""
        places: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            places.setdefault(request.args[0], []).append(index)
        asked = [Request(context, [requests[i].args[1] for i in indices]) for context, indices in places.items()]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for indices, row in zip(places.values(), self._scored(asked), strict=True):
            for index, option in zip(indices, row, strict=True):
                found[index] = (option.loglikelihood, option.greedy)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts from the start token on.  Raises: KeelError for one that the host cannot read at once."""
        texts = [request.args[0] for request in requests]
        most = self.model.host.config.get_text_config().max_position_embeddings
        for text in texts:
            length = 1 + len(self.reader.tokenizer.encode(text, add_special_tokens=False).ids)
            if length > most:
                raise KeelError(
                    f"a text of {length:,} tokens is longer than the {most:,} that the host reads at once; give shorter texts"
                )
        return [row[0].loglikelihood for row in self._scored([Request("", [text]) for text in texts])]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts by the likeliest tokens up to one of the task's stop strings."""
        return [self._continued(*request.args) for request in requests]

    def _scored(self, requests: list[Request]) -> list[list[Scored]]:
        return scored_options(
            self.model, self.reader, requests, token_budget=self.token_budget, device=self.at
        )  # fmt: skip

    def _continued(self, context: str, options: dict[str, Any]) -> str:
        row = self.reader.read(context)
        ids_1T = torch.tensor([row.ids], device=self.at)
        until = options.get("until") or []
        with evaluating(self.model):
            output = self.model.generate(
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                max_new_tokens=int(options.get("max_gen_toks", _NEW_TOKENS)),
                do_sample=False,
                **row_inputs([row], num_layers(self.model), device=self.at),
            )
        text = self.reader.tokenizer.decode(output[0, ids_1T.shape[1] :].tolist())
        ends = [text.find(stop) for stop in ([until] if isinstance(until, str) else until) if stop in text]
        return text[: min(ends)] if ends else text


def harness_model(
    model: KeelForCausalLM, reader: FieldReader, *, token_budget: int = 8192, device: torch.device | str = "cpu"
) -> Any:
    """Return the model as lm-evaluation-harness wants it (``lm_eval.api.model.LM``).

    Args:
        reader: makes the rows (``keel.trees.fields.reader_of``), with trees where the model's stream reads them from the batch.
        token_budget: most tokens in one forward pass, or one request.
        device: where the model is.
    Raises: KeelError without the package lm-eval.
    """
    try:
        base = importlib.import_module("lm_eval.api.model").LM
    except ModuleNotFoundError as error:
        raise KeelError("this needs the package lm-eval; pip install 'keel[harness]'") from error
    made = type("KeelLM", (_Answers, base), {})()
    made.model, made.reader, made.token_budget, made.at = model, reader, token_budget, device
    return made
