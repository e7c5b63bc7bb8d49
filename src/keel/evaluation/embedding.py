"""An encoder as a model of texts for the package ``mteb``: mean pooling, cosine similarity (DSTG §3.4, App. C.2).

Shapes: N texts, R channels.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, mean
from keel.evaluation.scoring import evaluating
from keel.evaluation.states import encode_text, pad_rows


class MeanPoolingEncoder:
    """What ``mteb`` calls an encoder: texts become the mean of their tokens' last states, [CLS] and [SEP] among them.

    Of a disentangled encoder these are the channels that its heads read: the semantic stream, or with ``mlm_head="full"`` both.

    Args:
        model: a Hugging Face encoder, with or without a head, that returns ``last_hidden_state``.
        tokenizer: a fast one with [CLS] and [SEP].
        name: by which results are filed; "organisation/name" as mteb wants it.
        max_length: tokens read of a text, [CLS] and [SEP] included.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "keel/encoder",
        max_length: int = 512,
        batch_size: int = 32,
    ) -> None:
        if name.count("/") != 1:
            raise KeelError(f"name {name!r}: mteb wants organisation/name, with one slash")
        self.model, self.tokenizer, self.name = getattr(model, "base_model", model), tokenizer, name
        self.max_length, self.batch_size = max_length, batch_size
        self.width = getattr(self.model.config, "readout_size", None) or self.model.config.hidden_size

    def encode(self, inputs: Iterable[Mapping[str, Sequence[str]]], **about: Any) -> NDArray[np.float32]:
        """Return the vectors of texts, float32 [N, R], for ``mteb``.

        Args:
            inputs: batches with the texts under "text".
            about: what mteb says of the task; an encoder without prompts has no use for it.
        """
        return self.encode_texts([text for batch in inputs for text in batch["text"]])

    def encode_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts, float32 [N, R]."""
        rows = [encode_text(self.tokenizer, text, self.max_length)[0] for text in texts]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        found = torch.zeros(len(rows), self.width)
        with evaluating(self.model):
            for start in range(0, len(order), self.batch_size):
                chosen = order[start : start + self.batch_size]
                ids_BT, mask_BT = pad_rows(self.tokenizer, [rows[index] for index in chosen])
                ids_BT, mask_BT = ids_BT.to(self.model.device), mask_BT.to(self.model.device)
                states_BTD = self.model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
                kept_BTR = states_BTD[..., : self.width].float() * mask_BT[..., None]
                found[chosen] = (kept_BTR.sum(dim=1) / mask_BT.sum(dim=1, keepdim=True)).cpu()
        return found.numpy()

    def similarity(self, first: Any, second: Any) -> Tensor:
        """Return the cosine of every vector of the first with every one of the second, [N, M]."""
        return _unit(first) @ _unit(second).mT

    def similarity_pairwise(self, first: Any, second: Any) -> Tensor:
        """Return the cosine of every pair, [N]."""
        return (_unit(first) * _unit(second)).sum(dim=-1)

    @property
    def mteb_model_meta(self) -> Any:
        """What ``mteb`` files results under.  Raises: KeelError without the package."""
        about = {
            "name": self.name,
            "revision": "local",
            "max_tokens": self.max_length,
            "embed_dim": self.width,
            "n_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "framework": ["PyTorch"],
            "similarity_fn_name": "cosine",
            "languages": ["eng-Latn"],
        }
        return optional("mteb.models.model_meta").ModelMeta.create_empty(about)


def mteb_scores(encoder: MeanPoolingEncoder, tasks: Sequence[str | Any]) -> list[ItemMetric]:
    """Run tasks of ``mteb`` and return ``mteb.<task>``, each task's main score.

    Args:
        tasks: names, whose data mteb downloads, or task objects.
    Raises: KeelError without the package, or for a name that it does not know.
    """
    mteb = optional("mteb")
    names = [task for task in tasks if isinstance(task, str)]
    try:
        found = [*mteb.get_tasks(tasks=names)] if names else []
    except KeyError as error:
        raise KeelError(f"mteb does not know one of {', '.join(names)}: {error}") from error
    found += [task for task in tasks if not isinstance(task, str)]
    results = mteb.evaluate(encoder, found, cache=None, show_progress_bar=False)
    return [
        mean(f"mteb.{result.task_name}", [float(result.get_score())], unit="main score", higher_is_better=True)
        for result in results.task_results
    ]


def optional(module: str) -> Any:
    """Import a module of ``mteb``.  Raises: KeelError saying what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "mteb":
            raise
        raise KeelError("MTEB needs the package mteb; pip install 'keel[mteb]'") from error


def _unit(vectors: Any) -> Tensor:
    given = torch.atleast_2d(torch.as_tensor(vectors).float())
    return F.normalize(given, dim=-1)
