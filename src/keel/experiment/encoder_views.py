"""The probes of an encoder as measurements of an experiment, with what its pictures are drawn from (DSTG §4, §5, App. B)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.data import TokenCorpus, evaluation_segments
from keel.encoder import DstgForMaskedLM
from keel.errors import KeelError
from keel.evaluation.items import ItemMetric, mean
from keel.experiment.subject import Subject
from keel.files import write_atomically
from keel.probes.encoder_views import component_maps, position_table_of, position_trajectories, table_shape
from keel.probes.heads import HeadInfluence
from keel.probes.inter_model import probe_between
from keel.probes.positions import boundary_ids

HEADS_FILE, TABLE_FILE, TRAJECTORIES_FILE = "heads.json", "position_table.json", "trajectories.json"
_MAP_TOKENS = 64
_TRAJECTORY_TOKENS = 160


def texts_of(subject: Subject, length: int, count: int) -> tuple[Tensor, list[int]]:
    """Return stretches of the test split, [count, length], and the document that each begins in.

    They begin anywhere: where documents do, what they begin with would tell how far a token is into one.
    """
    assert isinstance(subject.data, TokenCorpus)
    segments = evaluation_segments(subject.data.test, length - 1, count, at_starts=False)
    return torch.stack([segment.ids for segment in segments]), [int(segment.document_T[0]) for segment in segments]


def ends_of(subject: Subject) -> tuple[int, int]:
    """Return the ids of [CLS] and [SEP]."""
    tokenizer = subject.data.tokenizer
    return int(tokenizer.cls_token_id), int(tokenizer.sep_token_id)


def keep_heads(subject: Subject, found: HeadInfluence) -> None:
    """Keep what Figs. 2 and 3 show: the shares of all heads, and the maps of the most semantic and most positional ones on a text."""
    shares = found.shares
    chosen: list[tuple[int, int]] = []
    for component in range(min(2, len(found.components))):
        order = np.argsort(-shares[..., component], axis=None)[:2]
        chosen += [(int(at) // shares.shape[1], int(at) % shares.shape[1]) for at in order]
    heads = list(dict.fromkeys(chosen))
    first, last = ends_of(subject)
    wanted = subject.recipe.evaluation.heads
    assert wanted is not None
    ids_T = torch.tensor([first, *_text(subject, min(_MAP_TOKENS - 2, wanted.length)).tolist(), last])
    maps = component_maps(subject.model, ids_T, heads)
    tokens = subject.data.tokenizer.batch_decode(ids_T.unsqueeze(1))
    shown = [{name: np.round(part, 4).tolist() for name, part in each.items()} for each in maps]
    content = {
        "components": found.components,
        "shares": shares.tolist(),
        "groups": found.groups().tolist(),
        "heads": heads,
        "maps": shown,
        "tokens": tokens,
    }
    _write(subject, HEADS_FILE, content)


def keep_positions(subject: Subject) -> None:
    """Keep what Figs. 4, 6 and 9 show: the shape of the position table beside others', and the states of a text across the blocks."""
    wanted = subject.recipe.evaluation.position_probe
    assert wanted is not None and isinstance(subject.model, DstgForMaskedLM)
    table = subject.model.encoder.embed_positions
    if table is None:
        return
    tables = {"": table.weight.detach()} | {name: position_table_of(name) for name in wanted.tables_of}
    shapes = {
        name: {key: each.tolist() for key, each in vars(table_shape(rows)).items()} for name, rows in tables.items()
    }
    _write(subject, TABLE_FILE, shapes)
    if subject.model.config.disentangled:
        ids_T = _text(subject, min(_TRAJECTORY_TOKENS, wanted.length))
        found = position_trajectories(subject.model, ids_T, boundary_ids(subject.data.tokenizer), ends=ends_of(subject))
        _write(subject, TRAJECTORIES_FILE, {key: np.round(each, 5).tolist() for key, each in vars(found).items()})


def measure_inter_model(subject: Subject) -> list[ItemMetric]:
    """How much of the target arm's streams this arm's states tell (DSTG App. B.2, Fig. 8); nothing for the target itself."""
    wanted = subject.recipe.evaluation.inter_model
    assert wanted is not None
    if subject.arm == wanted.target:
        return []
    subject.tell(f"what the states tell of {wanted.target}", 0, 1)
    path = subject.folder.parent.parent / wanted.target / f"seed{subject.seed}" / "model"
    if not path.is_dir():
        raise KeelError(f"evaluation.inter_model: arm {wanted.target!r} has no weights at {path}; run it first")
    target = DstgForMaskedLM.from_pretrained(path).to(subject.device)
    rows_NT, sources = texts_of(subject, wanted.length, wanted.documents)
    ends = ends_of(subject)
    found = probe_between(subject.model, target, rows_NT, sources=sources, ends=ends, seeds=wanted.divisions)
    return [mean(name, each, unit="R²", higher_is_better=True) for name, each in found.items()]


def _text(subject: Subject, length: int) -> Tensor:
    """The first stretch of the test split."""
    assert isinstance(subject.data, TokenCorpus)
    return evaluation_segments(subject.data.test, length - 1, 1)[0].ids


def _write(subject: Subject, name: str, content: Any) -> None:
    write_atomically(subject.folder / name, json.dumps(content).encode())
