"""The paper's own scope: trees of whole sentences, given with the batch. They leak, and the leak is measured, not hidden."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import Case, close, pad, perturb, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import keel
from keel.evaluation.leak import max_logit_change
from keel.trees import Span, Tree, collate, sentence_chunks, token_spans

LENGTH, LAYERS = 11, 2
every_host = pytest.mark.parametrize(
    "host_name", ["llama", "gpt2", "olmo2"]
)  # separate and fused projections, post-norm


def _tree(rng: random.Random, start: int, end: int, depth: int = 0) -> list[Span]:
    spans = [Span(start, end, depth, "X")]
    if end - start > 1:
        cut = rng.randrange(start + 1, end)
        spans += _tree(rng, start, cut, depth + 1) + _tree(rng, cut, end, depth + 1)
    return spans


def _trees(ids: Tensor, lengths: list[int] | None = None) -> dict[str, Tensor]:
    """Trees that depend on every token of their row."""
    rows = []
    for index, row in enumerate(ids.tolist()):
        length = len(row) if lengths is None else lengths[index]
        tree = Tree(tuple(_tree(random.Random(str(row[len(row) - length :])), 0, length)))
        rows.append(sentence_chunks([tree], token_spans("x" * length, [(t, t + 1) for t in range(length)])))
    return collate(rows, LAYERS)


def _attached(host_name: str, **fields: Any) -> keel.KeelForCausalLM:
    host = Case(host_name, "").host()
    torch.manual_seed(1)
    return keel.attach(host, keel.TreeStream(**{"coefficient": 2.0, **fields}))


@every_host
def test_attaching_changes_nothing_and_a_coefficient_of_zero_never_does(host_name: str) -> None:
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        expected = Case(host_name, "").host()(ids).logits
        model, off, later = (_attached(host_name, **fields) for fields in ({}, {"coefficient": 0.0}, {"start_step": 5}))
        assert torch.equal(model(ids, trees=_trees(ids)).logits, expected)
        assert (perturb(model)(ids, trees=_trees(ids)).logits - expected).abs().max() > 1e-2
        for silent in (off, later):  # the third step, of which the later one begins at the fifth
            assert torch.equal(perturb(silent)(ids, trees=_trees(ids)).logits, expected)
        assert torch.equal(model(ids).logits, expected)  # no trees, no change


@every_host
def test_the_leak_of_whole_sentence_trees_is_measured(host_name: str) -> None:
    ids = tokens(2, LENGTH)
    changed = ids.clone()
    changed[:, 6:] = tokens(2, LENGTH - 6, seed=9)
    leak = "leak.max_logit_change"
    assert max_logit_change(perturb(_attached(host_name)), ids, changed, _trees)[leak] > 1e-2
    strict = keel.attach(
        Case(host_name, "").host(), keel.TreeStream(tree_scope="prefix", lookup="toy:", coefficient=2.0)
    )
    assert max_logit_change(perturb(strict), ids, changed)[leak] < 1e-4
    with pytest.raises(keel.KeelError, match="every row needs"):
        max_logit_change(strict, ids, ids)
    with pytest.raises(keel.KeelError, match="same shape"):
        max_logit_change(strict, ids, ids[:, 1:])


@every_host
def test_gradients_padding_and_the_update_mask(host_name: str) -> None:
    model, lengths = perturb(_attached(host_name)).trainable("streams").train(), [LENGTH, 6]
    rows = [tokens(1, length, seed=length)[0] for length in lengths]
    batch = pad(rows, "left")
    padded = model(**batch._asdict(), trees=_trees(batch.input_ids, lengths), labels=batch.input_ids)
    padded.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.streams.parameters())
    with torch.no_grad():
        for index, row in enumerate(rows):
            alone = model(row[None], trees=_trees(row[None])).logits[0]
            close(padded.logits[index, batch.attention_mask[index].bool()], alone)
            bare, none = (
                model(row[None], **given).logits
                for given in ({}, {"trees": _trees(row[None]), "update_mask": row[None] < 0})
            )
            assert torch.equal(none, bare) and not torch.allclose(bare[0], alone, atol=1e-2)
        first = torch.arange(len(rows[0]))[None] < 4
        partly = model(rows[0][None], trees=_trees(rows[0][None]), update_mask=first[:, :4]).logits
        fully = model(rows[0][None], trees=_trees(rows[0][None])).logits
        assert torch.equal(partly, fully)  # what lies beyond the mask is written to


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}], ids=["greedy", "beams", "chunked"]
)
@every_host
def test_generation_reads_the_prompts_memory(host_name: str, options: dict[str, Any]) -> None:
    model, lengths = perturb(_attached(host_name)), [LENGTH, 5]
    batch = pad([tokens(1, length, seed=length)[0] for length in lengths], "left")
    trees = _trees(batch.input_ids, lengths)
    common: dict[str, Any] = dict(attention_mask=batch.attention_mask, max_new_tokens=6, do_sample=False, **options)
    found = model.generate(batch.input_ids, trees=trees, **common)
    common.pop("prefill_chunk_size", None)
    # Without a cache the same trees are read anew at every step.
    assert torch.equal(found, model.generate(batch.input_ids, trees=trees, use_cache=False, **common))
    with torch.no_grad():
        with_trees, without = (model(**batch._asdict(), **given).logits for given in ({"trees": trees}, {}))
    assert (with_trees - without).abs().max() > 1e-2


@every_host
def test_a_compiled_model_takes_trees(host_name: str) -> None:
    model, ids = perturb(_attached(host_name)), tokens(2, LENGTH)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        close(compiled(ids, use_cache=False, trees=_trees(ids)).logits, model(ids, trees=_trees(ids)).logits)


def test_another_number_of_rows_is_not_compiled_anew() -> None:
    model, counter = perturb(_attached("llama")), CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for rows in range(2, 7):
            ids = tokens(rows, LENGTH)
            trees = _trees(tokens(6, LENGTH))  # as many shelves and places for each
            compiled(ids, use_cache=False, trees={name: tensor[:rows] for name, tensor in trees.items()})
    assert counter.frame_count <= 2, "once for the first, once for any other number"
