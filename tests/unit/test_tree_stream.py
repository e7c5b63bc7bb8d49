"""The tree stream against the formulas: its fast path equals ``reference_memory`` and ``reference_read``.

Everything runs in float64, so that a difference of 1e-10 is already an error of the formula and not of rounding.

Shapes: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.errors import KeelError
from keel.hosts import HostShape
from keel.streams import tree
from keel.streams.base import PassInputs
from keel.streams.tree import TreeFlow, TreeStream, reference_memory, reference_read
from keel.trees import Span, Tree, collate, fixed_chunks, prefix_chunks, sentence_chunks, token_spans
from keel.trees.align import Nodes, tree_nodes
from keel.trees.chunks import Chunks, Scope, joined
from keel.trees.lookup import LOOKUPS, open_lookup

WIDTH, LAYERS, LENGTH = 6, 3, 9
SHAPE = HostShape(hidden_size=WIDTH, num_layers=LAYERS, num_heads=4, num_key_value_heads=2, head_size=3)
TOLERANCE: dict[str, float] = {"rtol": 1e-10, "atol": 1e-10}


def _tree(rng: random.Random, start: int, end: int, depth: int = 0) -> list[Span]:
    spans = [Span(start, end, depth, "X")]
    if end - start > 1:
        cut = rng.randrange(start + 1, end)
        spans += _tree(rng, start, cut, depth + 1) + _tree(rng, cut, end, depth + 1)
    return spans


def _chunks(length: int, scope: Scope, seed: int = 0) -> Chunks:
    """Random trees over tokens of one letter: a short one and one over the rest."""
    spans = token_spans("x" * length, [(t, t + 1) for t in range(length)])
    if scope == "sentence":
        rng, cut = random.Random(seed), min(3, length)
        pieces = [(0, cut), (cut, length)] if cut < length else [(0, length)]
        return sentence_chunks([Tree(tuple(_tree(rng, *piece))) for piece in pieces], spans)

    def nodes_at(t: int) -> list[Nodes]:
        nodes = tree_nodes(Tree(tuple(_tree(random.Random(f"{seed} {t // 2}"), 0, t + 1))), spans)
        return [] if nodes is None else [nodes]

    return prefix_chunks(length, nodes_at)


def _stream(**fields: Any) -> TreeStream:
    stream = TreeStream(**fields)
    stream.build(SHAPE)
    stream.init_weights()
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(0.7 * torch.randn_like(parameter))
    return stream.double()


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _write(
    stream: TreeStream, inputs: PassInputs, hidden_LBTD: Sequence[Tensor], state: Any = None
) -> tuple[Any, Tensor]:
    """What the stream adds at each of its layers [R, B, T, D], and what it leaves behind."""
    flow = stream.open(inputs, state or {})
    added = []
    for layer, hidden in zip(stream.layer_index, hidden_LBTD, strict=True):
        assert stream.write("attention_input", layer, hidden, flow) is hidden
        added.append(stream.write("attention_output", layer, torch.zeros_like(hidden), flow))
    return stream.close(flow), torch.stack(added)


ROWS = [LENGTH, 4, 1]
PADDED = torch.tensor([[1] * 9, [0, 0, 1, 1, 0, 1, 0, 1, 0], [0] * 8 + [1]]).bool()


@pytest.mark.parametrize("scope", ["sentence", "prefix"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"gate": "none"}, {"layers": (0, 2), "start_step": 2, "warmup_steps": 4}],
    ids=["plain", "no gate", "layers"],
)
def test_values_and_every_gradient_equal_the_references(scope: Scope, fields: dict[str, Any]) -> None:
    stream = _stream(tree_scope=scope, coefficient=0.5, **fields)
    stream.step.fill_(4)
    rows = [_chunks(length, scope, seed=length) for length in ROWS]
    trees = collate(rows, LAYERS)
    embeddings = _normal(3, LENGTH, WIDTH, seed=1).requires_grad_()
    hidden = [_normal(3, LENGTH, WIDTH, seed=10 + index).requires_grad_() for index in range(len(stream.layer_index))]
    updated = _normal(3, LENGTH, seed=5) > -0.5

    inputs = PassInputs(
        embeddings_BTD=embeddings, attended_BT=PADDED, trees=trees, updated_BT=updated, collect_signals=True
    )
    result, fast = _write(stream, inputs, hidden)
    slow = torch.zeros_like(fast)
    for b, length in enumerate(ROWS):
        row = {name: tensor[b] for name, tensor in trees.items()}
        # Alone and without padding, and no chunk that is only there to fill the batch.
        chunks = reference_memory(
            stream, embeddings[b, PADDED[b]][None], *(row[name][None] for name in ("left", "right", "height"))
        )[0]
        for index, layer in enumerate(stream.layer_index):
            read = reference_read(stream, layer, hidden[index][b, PADDED[b]], chunks, row)
            assert len(read) == length
            slow[index, b, PADDED[b]] = read * updated[b, PADDED[b], None]
    torch.testing.assert_close(fast[:, PADDED], slow[:, PADDED], **TOLERANCE)
    assert (slow[0, 0, 0] == 0).all() or scope == "sentence"  # the first token sees nothing
    assert (slow.abs().amax((1, 3)) > 1e-3).any()
    assert ("gate" in result.signals) is (stream.config.gate == "head")

    weigh = _normal(*fast.shape, seed=7) * PADDED.unsqueeze(-1)
    inputs_of = [*stream.parameters(), embeddings, *hidden]
    for mine, theirs in zip(
        torch.autograd.grad((fast * weigh).sum(), inputs_of),
        torch.autograd.grad((slow * weigh).sum(), inputs_of),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, **TOLERANCE)
        assert theirs.abs().max() > 0


def test_filling_is_skipped_and_bfloat16_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers have chunks of their own number; what is skipped changes nothing, and products stand for the fused kernel."""
    rows = [_chunks(length, "sentence", seed=length) for length in ROWS]
    trees, hidden = collate(rows, LAYERS), [_normal(3, LENGTH, WIDTH, seed=10 + layer) for layer in range(LAYERS)]
    inputs = PassInputs(embeddings_BTD=_normal(3, LENGTH, WIDTH, seed=1), attended_BT=PADDED, trees=trees)
    filled = [tree._filled(trees["first"][:, layer], trees["last"][:, layer]) for layer in range(LAYERS)]
    assert min(filled) < max(filled) == trees["chunk"].shape[2]
    stream = _stream(coefficient=0.5)
    skipped = _write(stream, inputs, hidden)[1]
    monkeypatch.setattr(tree, "_filled", lambda first_BP, last_BP: first_BP.shape[1])
    torch.testing.assert_close(skipped, _write(stream, inputs, hidden)[1], **TOLERANCE)
    assert skipped.abs().max() > 1e-3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        added = _write(stream.float(), dataclasses.replace(inputs, embeddings_BTD=inputs.embeddings_BTD.float()), [
            one.float() for one in hidden
        ])[1]  # fmt: skip
    torch.testing.assert_close(
        added[:, PADDED].double(), skipped[:, PADDED], rtol=0.05, atol=0.06
    )  # every product is rounded


@pytest.mark.parametrize("may_look", [True, False])
def test_chunk_memory_is_a_mean_projected_and_normed(may_look: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_may_look", lambda tensor: may_look)  # False: as on an accelerator
    stream = _stream()
    packed = _normal(2, 5, WIDTH, seed=1).requires_grad_()
    left, right = torch.tensor([[[0, 2], [1, 0], [4, 3]]] * 2), torch.tensor([[[4, 2], [3, -1], [4, 4]]] * 2)
    height, taken = torch.tensor([[0, 1, 1]] * 2), right >= left
    found = stream.chunk_memory(packed, left, right, height)
    expected = reference_memory(stream, packed, left, right, height)
    torch.testing.assert_close(found[taken], expected[taken], **TOLERANCE)
    inputs = [packed, stream.weight_height, *stream.norm.parameters()]
    weigh = _normal(*found[taken].shape, seed=2)
    mine, theirs = (torch.autograd.grad((memory[taken] * weigh).sum(), inputs) for memory in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
        assert other.abs().sum() > 0 and bool(one.isfinite().all())
    torch.testing.assert_close(
        found[1, 1, 0], stream.norm(stream.weight_height[1] @ packed[1, 1:4].mean(0)), **TOLERANCE
    )


def test_documents_of_a_row_do_not_see_each_other() -> None:
    stream = _stream(tree_scope="prefix")
    first, second = _chunks(4, "prefix", 1), _chunks(5, "prefix", 2)
    embeddings, hidden = _normal(1, 9, WIDTH, seed=1), [_normal(1, 9, WIDTH, seed=layer) for layer in range(LAYERS)]
    starts = torch.zeros(1, 9, dtype=torch.bool)
    starts[0, 4] = True
    packed = PassInputs(
        embeddings_BTD=embeddings,
        document_starts_BT=starts,
        trees=collate([joined([first, second.shifted(4)])], LAYERS),
    )
    alone = PassInputs(embeddings_BTD=embeddings[:, 4:], trees=collate([second], LAYERS))
    _, together = _write(stream, packed, hidden)
    _, apart = _write(stream, alone, [h[:, 4:] for h in hidden])
    torch.testing.assert_close(together[:, :, 4:], apart, **TOLERANCE)
    _, leaking = _write(stream, PassInputs(embeddings_BTD=embeddings, trees=packed.trees), hidden)
    assert not torch.allclose(leaking[:, :, 4:], apart, atol=1e-3)


def _pieces(inputs: dict[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    return [
        dict(zip(inputs, parts, strict=True))
        for parts in zip(*(t.split(list(sizes), 1) for t in inputs.values()), strict=True)
    ]


def _after(state: dict[str, Tensor], result: Any) -> dict[str, Tensor]:
    """The state that the cache would give the next pass."""
    rows = {key: torch.cat([state[key], new], 1) if key in state else new for key, new in result.rows.items()}
    return {**result.memory, **rows}


@pytest.mark.parametrize("sizes", [(4, 5), (1,) * 9, (7, 1, 1)])
@pytest.mark.parametrize("scope", ["sentence", "prefix"])
def test_trees_of_the_whole_row_serve_every_part_of_it(scope: Scope, sizes: tuple[int, ...]) -> None:
    stream = _stream(tree_scope=scope)
    trees = collate([_chunks(length, scope) for length in ROWS], LAYERS)
    embeddings, hidden = _normal(3, 9, WIDTH, seed=1), [_normal(3, 9, WIDTH, seed=layer) for layer in range(LAYERS)]
    _, whole = _write(stream, PassInputs(embeddings_BTD=embeddings, attended_BT=PADDED, trees=trees), hidden)
    state: dict[str, Tensor] = {}
    parts, past = [], 0
    for index, size in enumerate(sizes):
        here = slice(past, past + size)
        inputs = PassInputs(embeddings_BTD=embeddings[:, here], attended_BT=PADDED[:, here], trees=trees, num_past=past)
        result, part = _write(stream, inputs, [h.split(list(sizes), 1)[index] for h in hidden], state)
        state, past = _after(state, result), past + size
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 2)[:, PADDED], whole[:, PADDED], **TOLERANCE)


def test_after_the_prompt_its_chunks_are_read_from_the_cache() -> None:
    stream = _stream()
    trees = collate([_chunks(5, "sentence")], LAYERS)
    embeddings, hidden = _normal(1, 9, WIDTH, seed=1), [_normal(1, 9, WIDTH, seed=layer) for layer in range(LAYERS)]
    _, whole = _write(stream, PassInputs(embeddings_BTD=embeddings, trees=trees), hidden)
    result, prompt = _write(
        stream, PassInputs(embeddings_BTD=embeddings[:, :5], trees=trees), [h[:, :5] for h in hidden]
    )
    state = _after({}, result)
    assert {"keys_BRPGK", "embeddings"} <= state.keys()
    later = PassInputs(embeddings_BTD=embeddings[:, 5:], num_past=5)
    _, decoded = _write(stream, later, [h[:, 5:] for h in hidden], state)
    torch.testing.assert_close(torch.cat([prompt, decoded], 2), whole, **TOLERANCE)
    assert decoded.abs().max() > 1e-3

    # Rolled back into the prompt: what would have been seen later was made of tokens that are gone.
    state = {key: value if key in result.memory else value[:, :2] for key, value in state.items()}
    _, again = _write(stream, dataclasses.replace(later, num_past=2), [h[:, 5:] for h in hidden], state)
    flow = stream.open(dataclasses.replace(later, num_past=2), state)
    assert flow.memory is not None and not torch.allclose(again, decoded)
    seen = flow.memory.first_BRP <= flow.memory.last_BRP
    assert seen.any() and (flow.memory.first_BRP[seen] < 2).all()


def test_without_trees_nothing_is_written_and_nothing_kept() -> None:
    result, added = _write(
        _stream(), PassInputs(embeddings_BTD=_normal(1, 4, WIDTH, seed=1)), [_normal(1, 4, WIDTH, seed=2)] * 3
    )
    assert (added == 0).all() and not result.rows and not result.memory


def test_the_coefficient_rises_from_its_first_step() -> None:
    stream = _stream(coefficient=0.2, start_step=10, warmup_steps=4)
    found = []
    for step in (0, 10, 11, 13, 14, 99):
        stream.step.fill_(step)
        found.append(float(stream.coefficient()))
    np.testing.assert_allclose(found, [0, 0, 0.05, 0.15, 0.2, 0.2])
    assert _stream(coefficient=0.2).coefficient() == 0.2
    stream = _stream(coefficient=0.2, start_step=3)
    for step, expected in ((2, 0.0), (3, 0.2), (4, 0.2)):
        stream.step.fill_(step)
        assert float(stream.coefficient()) == pytest.approx(expected)


def test_a_lookup_finds_what_would_be_given() -> None:
    given, looking = _stream(tree_scope="prefix"), _stream(tree_scope="prefix", lookup="fixed:2")
    looking.load_state_dict(given.state_dict())
    embeddings, hidden = _normal(3, 9, WIDTH, seed=1), [_normal(3, 9, WIDTH, seed=layer) for layer in range(LAYERS)]
    ids, common = torch.arange(27).reshape(3, 9), {"embeddings_BTD": embeddings, "attended_BT": PADDED}
    trees = collate([fixed_chunks(length, 2) for length in ROWS], LAYERS)
    _, expected = _write(given, PassInputs(**common, trees=trees), hidden)
    result, found = _write(looking, PassInputs(**common, input_ids_BT=ids), hidden)
    assert torch.equal(found, expected) and expected.abs().max() > 1e-3
    assert torch.equal(result.rows["ids"], ids)
    with pytest.raises(KeelError, match="give trees="):
        looking.open(PassInputs(**common), {})


def test_what_a_lookup_found_for_the_prompt_is_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    known = _chunks(5, "sentence")
    monkeypatch.setitem(LOOKUPS, "prompt", lambda name, scope: lambda ids: known if len(ids) == 5 else None)
    given, looking = _stream(), _stream(lookup="prompt:")
    looking.load_state_dict(given.state_dict())
    embeddings, ids, trees = _normal(1, 6, WIDTH, seed=1), torch.arange(6)[None], collate([known], LAYERS)
    added = []
    for stream, fields in ((given, {"trees": trees}), (looking, {})):
        first = PassInputs(embeddings_BTD=embeddings[:, :5], input_ids_BT=ids[:, :5], **fields)
        result, _ = _write(stream, first, [_normal(1, 5, WIDTH, seed=2)] * LAYERS)
        later = PassInputs(embeddings_BTD=embeddings[:, 5:], input_ids_BT=ids[:, 5:], num_past=5)
        added.append(_write(stream, later, [_normal(1, 1, WIDTH, seed=3)] * LAYERS, _after({}, result))[1])
    assert torch.equal(*added) and added[0].abs().max() > 1e-3


@pytest.mark.parametrize("step", [1, 2])
def test_a_row_that_goes_on_keeps_its_memory_beside_one_that_is_found_again(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while decoding, where what one row has so far is a prompt with one of its options."""
    texts = [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5), (10, 11, 12)]
    known = {text: _chunks(len(text), "sentence", seed) for seed, text in enumerate(texts)}
    monkeypatch.setitem(LOOKUPS, "some", lambda name, scope: lambda ids: known.get(tuple(ids)))
    stream = _stream(lookup="some:")
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 0, 10, 11, 12, 13, 14]])
    attended = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]]).bool()
    embeddings, hidden = _normal(2, 7, WIDTH, seed=1), [_normal(2, 7, WIDTH, seed=layer) for layer in range(LAYERS)]

    def last_step(rows: list[int]) -> Tensor:
        state: dict[str, Tensor] = {}
        for begin, end in ((0, 5), (5, 6), (6, 7))[: step + 1]:
            inputs = PassInputs(
                embeddings_BTD=embeddings[rows, begin:end], input_ids_BT=ids[rows, begin:end], num_past=begin,
                attended_BT=attended[rows, begin:end],
            )  # fmt: skip
            result, added = _write(stream, inputs, [layer[rows, begin:end] for layer in hidden], state)
            state = _after(state, result)
        return added

    together = last_step([0, 1])
    for row in (0, 1):
        torch.testing.assert_close(together[:, [row]], last_step([row]), **TOLERANCE)
        assert together[:, row].abs().max() > 1e-3


def test_a_document_that_begins_behind_one_that_went_on_unknown_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {(0, 1, 2): _chunks(3, "sentence"), (7, 8, 9): _chunks(3, "sentence", 1)}
    monkeypatch.setitem(LOOKUPS, "some", lambda name, scope: lambda ids: known.get(tuple(ids)))
    stream, ids = _stream(lookup="some:"), torch.tensor([[0, 1, 2, 3, 7, 8, 9]])
    embeddings, hidden = _normal(1, 7, WIDTH, seed=1), [_normal(1, 7, WIDTH, seed=layer) for layer in range(LAYERS)]
    starts = torch.tensor([[1, 0, 0, 0, 1, 0, 0]]).bool()
    state: dict[str, Tensor] = {}
    for begin, end in ((0, 3), (3, 4), (4, 7)):
        inputs = PassInputs(
            embeddings_BTD=embeddings[:, begin:end],
            input_ids_BT=ids[:, begin:end],
            num_past=begin,
            document_starts_BT=starts[:, begin:end],
        )
        result, added = _write(stream, inputs, [layer[:, begin:end] for layer in hidden], state)
        state = _after(state, result)
    alone = PassInputs(embeddings_BTD=embeddings[:, 4:], input_ids_BT=ids[:, 4:])
    _, expected = _write(stream, alone, [layer[:, 4:] for layer in hidden])
    torch.testing.assert_close(added, expected, **TOLERANCE)
    assert expected.abs().max() > 1e-3


@pytest.mark.parametrize("scope", ["sentence", "prefix"])
def test_a_chunk_over_a_border_tells_nothing_of_the_document_before(scope: Scope) -> None:
    stream, chunks = _stream(tree_scope=scope, coefficient=0.5), fixed_chunks(8, 2, scope)
    # The second document begins inside the second chunk of two, the first of four and the one of eight.
    starts = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 0]]).bool()
    embeddings, hidden = _normal(1, 8, WIDTH, seed=1), [_normal(1, 8, WIDTH, seed=layer) for layer in range(LAYERS)]
    trees = collate([chunks], LAYERS)

    def added(embeddings: Tensor) -> Tensor:
        return _write(stream, PassInputs(embeddings_BTD=embeddings, document_starts_BT=starts, trees=trees), hidden)[1]

    other = embeddings.clone()
    other[:, :3] += 1
    before, after = added(embeddings), added(other)
    torch.testing.assert_close(
        before[:, :, 3:], after[:, :, 3:], **TOLERANCE
    )  # sums over all tokens differ by rounding
    assert (before[:, :, :3] - after[:, :, :3]).abs().max() > 1e-3
    expected = torch.stack(
        [
            reference_read(
                stream, layer, hidden[layer][0], reference_memory(stream, embeddings, trees["left"], trees["right"], trees["height"])[0],
                {name: tensor[0] for name, tensor in trees.items()}, begin=3,
            )[3:]
            for layer in range(LAYERS)
        ]
    )  # fmt: skip
    torch.testing.assert_close(before[:, 0, 3:], expected, **TOLERANCE)


def test_a_lookup_may_find_nothing_and_sees_each_document_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def made(name: str, scope: Scope) -> Any:
        return lambda ids: asked.append((name, scope, list(ids)))

    monkeypatch.setitem(LOOKUPS, "nothing", made)
    stream = _stream(lookup="nothing:x")
    starts = torch.tensor([[1, 0, 0, 1, 0]]).bool()
    inputs = PassInputs(
        embeddings_BTD=_normal(1, 5, WIDTH, seed=1), input_ids_BT=torch.tensor([[7, 8, 9, 5, 6]]), document_starts_BT=starts,
        attended_BT=torch.tensor([[1, 0, 1, 1, 1]]).bool(),
    )  # fmt: skip
    _, added = _write(stream, inputs, [_normal(1, 5, WIDTH, seed=2)] * 3)
    assert (added == 0).all() and asked == [("x", "sentence", [7, 9]), ("x", "sentence", [5, 6])]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tree_scope": "suffix"}, "prefix, sentence"),
        ({"gate": "heads"}, "did you mean 'head'"),
        ({"coefficient": -0.1}, "coefficient=-0.1; give a number of at least 0"),
        ({"coefficient": math.nan}, "coefficient=nan"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"layers": (7,)}, "layers of the host, 0 to 2"),
        ({"layers": ()}, "layers of the host, 0 to 2"),
        ({"layers": (0, 0)}, "each once"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        _stream(**fields)


def test_trees_that_do_not_fit_are_refused() -> None:
    embeddings = _normal(1, 4, WIDTH, seed=1)
    sentence, prefix = (collate([_chunks(4, scope)], LAYERS) for scope in ("sentence", "prefix"))
    cases = [
        (PassInputs(embeddings_BTD=embeddings, trees=prefix), "keel.trees.sentence_chunks"),
        (PassInputs(embeddings_BTD=embeddings, trees=sentence, num_past=3), "give the trees from the first pass on"),
        (PassInputs(embeddings_BTD=embeddings.expand(2, -1, -1), trees=sentence), "rows of the batch"),
        (PassInputs(embeddings_BTD=embeddings, trees=collate([_chunks(4, "sentence")], 2)), "layers of the host"),
        (
            PassInputs(embeddings_BTD=embeddings, trees={"left": sentence["left"]}),
            "no 'height'; make them with keel.trees.collate",
        ),
    ]
    for inputs, message in cases:
        with pytest.raises(KeelError, match=message):
            _stream().open(inputs, {})
    with pytest.raises(KeelError, match="fixed:…"):
        open_lookup("parsed:x", "prefix")
    with pytest.raises(KeelError, match="number of tokens"):
        open_lookup("fixed:x", "prefix")


def test_a_checkpointed_layer_reads_what_it_was_given_again() -> None:
    stream = _stream()
    flow = stream.open(
        PassInputs(embeddings_BTD=_normal(1, 4, WIDTH, seed=1), trees=collate([_chunks(4, "sentence")], LAYERS)), {}
    )
    again = flow.replay()
    assert isinstance(again, TreeFlow) and again.hidden is not flow.hidden and again.memory is flow.memory
