"""Probes on a checkpoint as people name one: load it, cut a text into rows, measure, write table and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from keel.data import CorpusConfig, read_documents
from keel.data.languages import Dyck
from keel.data.languages.dyck import depths
from keel.errors import KeelError
from keel.evaluation.support import prior_terms, support_tokens
from keel.files import write_atomically
from keel.model import KeelForCausalLM
from keel.ops.support import TOP, support_weights
from keel.pretrained import load_model, load_tokenizer
from keel.probes.attention_span import run_span, span_table
from keel.probes.gates import run_gates
from keel.probes.geometry import run_geometry
from keel.probes.output import share_figure, write_table
from keel.probes.tokens import ShadedRow, token_page
from keel.streams import MarginPrior


def probe_geometry(
    checkpoint: str, corpus: str, out: Path, *, length: int, sequences: int, device: str | None
) -> Table:
    """Measure what a checkpoint's stream writes (``keel.probes.geometry``) on a text, and return the table of its layers."""
    model = _with_streams(checkpoint, device)
    return run_geometry(model, text_rows(checkpoint, corpus, length, sequences), out).table()


def probe_spans(
    checkpoints: Sequence[str], corpus: str, out: Path, *, lengths: Sequence[int], sequences: int, device: str | None
) -> Table:
    """Measure how far the attention of checkpoints reaches on a text that all of them read with the first one's tokenizer."""
    rows_NT = text_rows(checkpoints[0], corpus, max(lengths), sequences)
    models: dict[str, Any] = {name: load_model(name).to(_place(device)) for name in checkpoints}
    return span_table(run_span(models, rows_NT, lengths, out))


def probe_gates(checkpoint: str, out: Path, *, sequences: int, device: str | None) -> Table:
    """Hold the gates of a checkpoint that knows brackets against their depth in Dyck words (``keel.probes.gates``)."""
    model, tokenizer = _with_streams(checkpoint, device), load_tokenizer(checkpoint)
    words = [Dyck().sample("test", index).whole for index in range(sequences)]
    known = set(tokenizer.get_vocab())
    if not set("()[]{}") <= known:
        raise KeelError(
            f"checkpoint {checkpoint}: its tokenizer has no token for every bracket; give one trained by keel run s_former/dyck"
        )
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = [torch.tensor([*start, *tokenizer.convert_tokens_to_ids(list(word))]) for word in words]
    levels = [torch.tensor([0] * len(start) + depths(word)) for word in words]
    return run_gates(model, ids, levels, out).table()


def probe_support(checkpoint: str, corpus: str, out: Path, *, length: int, sequences: int, device: str | None) -> Table:
    """Show which tokens carry the barrier of a checkpoint's margin prior (``keel.evaluation.support``): shares beside those of a fresh
    prior, the curves of support tokens' Fig. 7.6, and the text itself, shaded (``tokens.html``).
    """
    model, tokenizer = _with_streams(checkpoint, device), load_tokenizer(checkpoint)
    named = model.wires.first(MarginPrior)
    if named is None:
        raise KeelError(f"checkpoint {checkpoint} has no margin prior; give one trained with the stream 'margin'")
    prior = named[1]
    rows_NT = text_rows(checkpoint, corpus, length, sequences)
    found = support_tokens(model, prior, rows_NT, rank=prior.left.shape[0], device=_place(device))
    embed = model.get_input_embeddings()
    barriers_NT = torch.cat(
        [prior_terms(prior, embed(row[None].to(_place(device)))).logdets.barrier() for row in rows_NT]
    ).cpu()
    shown = [_shaded(tokenizer, *row, index) for index, row in enumerate(zip(rows_NT, barriers_NT, strict=True))]
    title = "Support tokens"
    note = (
        f"Darker: more of the window's barrier, −log|det|. Framed: the {TOP} tokens that press most. Point at a token for its barrier, in "
        "nats; a negative one does not press."
    )
    write_atomically(out / "tokens.html", token_page(title, note, shown).encode())
    figure = share_figure(found.curves, "Mean over rows, the heaviest token first.")
    write_table(out, {metric.name: metric.value for metric in found.metrics}, [figure], "support")
    table = Table("measure", "learned", "fresh prior")
    values = {metric.name: metric.value for metric in found.metrics}
    for name in [name for name in values if "@" not in name]:
        table.add_row(
            name.removeprefix("support.").replace("_", " "), f"{values[name]:.4g}", f"{values[f'{name}@random']:.4g}"
        )
    return table


def _shaded(tokenizer: Any, ids_T: Tensor, barriers_T: Tensor, index: int) -> ShadedRow:
    weights_T = support_weights(barriers_T[None])[0]
    pieces = tokenizer.batch_decode(ids_T.unsqueeze(1), clean_up_tokenization_spaces=False)
    return ShadedRow(
        heading=f"Row {index + 1}",
        pieces=pieces,
        shades=(weights_T / weights_T.max()).sqrt().tolist(),
        notes=[f"{value:.3f}" for value in barriers_T.tolist()],
        marked=frozenset(t for t in weights_T.topk(min(TOP, len(weights_T))).indices.tolist() if barriers_T[t] > 0),
    )


def text_rows(checkpoint: str, corpus: str, length: int, sequences: int) -> Tensor:
    """Return the first rows of a text as ids [sequences, length]; documents follow one another.

    Raises: KeelError for text that is too short.
    """
    tokenizer = load_tokenizer(checkpoint)
    ids: list[int] = []
    for document in read_documents(CorpusConfig(source=corpus)):
        ids += tokenizer(document.text, add_special_tokens=False)["input_ids"]
        if len(ids) >= length * sequences:
            return torch.tensor(ids[: length * sequences]).view(sequences, length)
    raise KeelError(
        f"corpus {corpus}: {len(ids):,} tokens are too few for {sequences} rows of {length:,}; give more text, or fewer or shorter rows"
    )


def _with_streams(checkpoint: str, device: str | None) -> KeelForCausalLM:
    model = load_model(checkpoint)
    if not isinstance(model, KeelForCausalLM):
        raise KeelError(
            f"checkpoint {checkpoint} has no streams to look at; give one that keel run or save_pretrained wrote"
        )
    return model.to(_place(device))


def _place(device: str | None) -> str:
    return device or ("cuda" if torch.cuda.is_available() else "cpu")
