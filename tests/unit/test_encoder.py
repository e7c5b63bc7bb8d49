"""The DSTG encoder and its baselines: the fused call against the sum of three logits, invariances, saving, parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from keel.encoder import (
    DstgConfig,
    DstgForMaskedLM,
    DstgForQuestionAnswering,
    DstgForSequenceClassification,
    DstgForTokenClassification,
    DstgModel,
    count_parameters,
)
from keel.encoder.attention import RelativeBias, buckets_of, reference_attention, reference_bucket, widened
from keel.encoder.block import StreamNorm
from keel.encoder.config import POSITIONS
from keel.encoder.model import DstgPreTrainedModel
from keel.errors import KeelError

CLS, SEP, PAD = 1, 2, 0
HEADS = [DstgForMaskedLM, DstgForSequenceClassification, DstgForTokenClassification, DstgForQuestionAnswering]


def small_config(position: str = "dstg", **fields: object) -> DstgConfig:
    given = {
        "vocab_size": 30,
        "semantic_size": 16,
        "position_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 24,
        "relative_buckets": 8,
        "relative_max_distance": 6,
        "special_token_ids": [CLS, SEP],
        "pad_token_id": PAD,
    }
    return DstgConfig(**{**given, "position": position, **fields})


def perturbed(model: DstgPreTrainedModel) -> DstgPreTrainedModel:
    """Move every parameter away from its start, where the biases are zero and everything is near uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def sequences(rows: int = 3, length: int = 9) -> Tensor:
    ids = torch.randint(3, 30, (rows, length))
    ids[:, 0], ids[:, -1] = CLS, SEP
    return ids


def test_every_bucket_is_the_definitions() -> None:
    for length, buckets, distance in ((40, 32, 128), (300, 32, 128), (12, 8, 6)):
        offsets = torch.arange(-length, length + 1)
        expected = [reference_bucket(offset, buckets, distance) for offset in offsets.tolist()]
        assert buckets_of(offsets, buckets, distance).tolist() == expected
    assert len(set(expected)) == 7 and max(expected) == 7  # distance 0 is of one side only


def test_the_bias_of_a_pair_is_that_of_its_bucket() -> None:
    module = RelativeBias(2, 8, 6)
    with torch.no_grad():
        module.bucket.copy_(torch.arange(16).view(8, 2))
    found = module(9)
    for query in range(9):
        for key in range(9):
            assert found[:, query, key].tolist() == module.bucket[reference_bucket(key - query, 8, 6)].tolist()


LAYOUTS = {
    "all rows alike": {},
    "special tokens at different places": {"moved": True},
    "padding": {"padded": True},
    "packed documents": {"packed": True},
    "all of it": {"moved": True, "padded": True, "packed": True},
}


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_the_fused_call_equals_the_sum_of_three_logits(position: str, case: dict[str, bool]) -> None:
    model = perturbed(DstgModel(small_config(position)).double())
    ids, mask, starts = sequences(), torch.ones(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.bool)
    if case.get("moved"):
        ids[1, 4] = SEP
    if case.get("padded"):
        mask[0, 7:] = 0
    if case.get("packed"):
        starts[:, 5] = True
    given = {
        "attention_mask": mask if case.get("padded") else None,
        "document_starts": starts if case.get("packed") else None,
    }
    around = model.surroundings(ids, given["attention_mask"], torch.arange(9)[None], given["document_starts"])
    attention = model.layers[0].attention
    bias = attention.relative_bias
    semantic = torch.randn(3, 9, 16, dtype=torch.float64, requires_grad=True)
    place = torch.randn(3, 9, 4, dtype=torch.float64, requires_grad=True) if position == "dstg" else None
    inputs = [
        *attention.parameters(),
        semantic,
        *([place] if place is not None else []),
    ]

    document = starts.long().cumsum(1)
    visible = (document[:, :, None] == document[:, None, :]) & mask.bool()[:, None]
    streams = attention.project(semantic, place, around)
    expected = reference_attention(
        *streams,
        bias.bucket if bias else None,
        bias.special if bias else None,
        torch.isin(ids, torch.tensor([CLS, SEP])),
        visible,
        attention.scale,
        max_distance=6,
    )
    expected_out = [attention.semantic_output(expected[0].transpose(1, 2).flatten(2))]
    if expected[1] is not None:
        expected_out.append(attention.position_output(expected[1].transpose(1, 2).flatten(2)))
    found_out = [out for out in attention(semantic, place, around) if out is not None]
    weights = [torch.randn_like(out) * mask[..., None] for out in found_out]

    def gradients(outs: list[Tensor]) -> tuple[Tensor, ...]:
        total = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
        assert isinstance(total, Tensor)
        return torch.autograd.grad(total, inputs, retain_graph=True)

    for found, wanted in zip(found_out, expected_out, strict=True):
        torch.testing.assert_close(found * mask[..., None], wanted * mask[..., None], rtol=0, atol=1e-12)
    for found, wanted in zip(gradients(found_out), gradients(expected_out), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_the_components_add_up_to_what_attention_sees() -> None:
    model = perturbed(DstgModel(small_config()).double())
    ids = sequences()
    ids[1, 4] = SEP
    around = model.surroundings(ids, None, torch.arange(9)[None])
    attention = model.layers[0].attention
    semantic, place = model.embed(ids, torch.arange(9)[None])
    parts = attention.logits(semantic, place, around)
    assert set(parts) == {"semantic", "ap", "rp"}
    chance = torch.softmax(parts["semantic"] + parts["ap"] + parts["rp"], dim=-1)
    values = attention.project(semantic, place, around)[0][2]
    expected = attention.semantic_output((chance @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(semantic, place, around)[0], expected, rtol=0, atol=1e-12)
    regular = ~torch.isin(ids, torch.tensor([CLS, SEP]))
    pairs = (regular[:, :, None] & regular[:, None, :])[:, None].expand_as(parts["ap"])
    assert parts["ap"][~pairs].abs().max() == 0 < parts["ap"][pairs].abs().min()


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(position: str, side: str) -> None:
    model = perturbed(DstgModel(small_config(position)))
    ids, pad = sequences(rows=2), torch.full((2, 3), PAD)
    alone = model(ids).last_hidden_state
    assert (alone - model(sequences(rows=2)).last_hidden_state).abs().max() > 0.1
    order = (pad, ids) if side == "left" else (ids, pad)
    mask = torch.cat([torch.full_like(part, int(part is ids)) for part in order], dim=1)
    together = model(torch.cat(order, dim=1), attention_mask=mask).last_hidden_state
    torch.testing.assert_close(together[:, 3:] if side == "left" else together[:, :9], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
def test_packed_documents_do_not_see_each_other(position: str) -> None:
    model = perturbed(DstgModel(small_config(position)))
    first, second = sequences(rows=2, length=7), sequences(rows=2, length=5)
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[:, 0] = starts[:, 7] = True
    packed = model(torch.cat((first, second), dim=1), document_starts=starts).last_hidden_state
    alone = torch.cat((model(first).last_hidden_state, model(second).last_hidden_state), dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    joined = model(torch.cat((first, second), dim=1)).last_hidden_state
    assert (joined - alone).abs().max() > 0.1


def root_mean_square(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("residual", ["input", "normed"])
@pytest.mark.parametrize("position", POSITIONS)
def test_each_part_is_added_to_what_its_norm_reads_or_gives(position: str, residual: str) -> None:
    model = perturbed(DstgModel(small_config(position, residual=residual)))
    ids = sequences()
    block, norms = model.layers[0], model.layers[0].attention_norm
    streams = model.embed(ids, torch.arange(ids.shape[1])[None])
    around = model.surroundings(ids, None, torch.arange(ids.shape[1])[None])

    def step(streams: tuple[Tensor, Tensor | None], norms: StreamNorm, part: Any, *more: Any) -> tuple[Any, Any]:
        weights = [norms.semantic.weight, None if norms.position is None else norms.position.weight]
        pairs = list(zip(streams, weights, strict=True))
        normed = [None if x is None else root_mean_square(x) * weight for x, weight in pairs]
        kept = streams if residual == "input" else normed
        return tuple(None if x is None else x + y for x, y in zip(kept, part(*normed, *more), strict=True))

    expected = step(step(streams, norms, block.attention, around), block.mlp_norm, block.mlp)
    for found, wanted in zip(block(*streams, around), expected, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_normed_residual_keeps_positions_in_their_stream() -> None:
    """At the start: how much of the position stream's variance is of the position, and not of the words."""
    share = {}
    for residual in ("input", "normed"):
        torch.manual_seed(0)
        sizes = {"semantic_size": 96, "position_size": 12, "num_hidden_layers": 4, "initializer_range": 0.04}
        model = DstgModel(small_config(residual=residual, **sizes)).eval()
        states = model(sequences(rows=64, length=20), output_hidden_states=True).hidden_states
        place_BTP = states[-2][:, 1:-1, 96:].detach()
        share[residual] = float(place_BTP.mean(0).var(0).sum() / place_BTP.flatten(0, 1).var(0).sum())
    assert share["normed"] > 0.9 > 0.5 > share["input"], share


@pytest.mark.parametrize("position", POSITIONS)
def test_order_matters_to_every_arm(position: str) -> None:
    model = perturbed(DstgModel(small_config(position)))
    ids = sequences(rows=1)
    turned = ids.clone()
    turned[:, 1:-1] = ids[:, 1:-1].flip(1)
    assert (model(ids).last_hidden_state[:, 0] - model(turned).last_hidden_state[:, 0]).abs().max() > 1e-3


def test_the_semantic_head_pulls_on_no_position_of_the_last_layer() -> None:
    for mlm_head, untouched in (("semantic", True), ("full", False)):
        model = perturbed(DstgForMaskedLM(small_config(mlm_head=mlm_head))).train()
        model(sequences(), labels=sequences()).loss.backward()
        none = {
            name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
        }
        assert none == ({"encoder.final_norm.position.weight"} if untouched else set())
        down = model.encoder.layers[1].mlp.down.weight.grad
        assert down[:16].any() and down[16:].any() == (not untouched)


def test_the_loss_in_training_is_that_of_the_labelled_places() -> None:
    model = perturbed(DstgForMaskedLM(small_config(random_position_shift=False)))
    ids, labels = sequences(), torch.full((3, 9), -100)
    labels[:, 3:5] = ids[:, 3:5]
    evaluated, trained = model(ids, labels=labels), model.train()(ids, labels=labels)
    torch.testing.assert_close(trained.loss, evaluated.loss)
    assert trained.logits is None and evaluated.logits.shape == (3, 9, 30)
    expected = torch.nn.functional.cross_entropy(evaluated.logits[:, 3:5].flatten(0, 1), ids[:, 3:5].flatten())
    torch.testing.assert_close(evaluated.loss, expected)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=12).loss, expected / 2)


def test_positions_are_shifted_in_training_and_stay_in_the_table() -> None:
    model = DstgModel(small_config()).train()
    seen = torch.cat([model._positions(sequences(rows=8), None, None) for _ in range(60)])
    assert (seen.diff(dim=1) == 1).all()
    assert seen[:, 0].min() == 0 and seen[:, -1].max() == 23 and len(seen[:, 0].unique()) == 16
    assert torch.equal(model.eval()._positions(sequences(), None, None), torch.arange(9)[None])
    assert len(DstgModel(small_config(random_position_shift=False)).train()._positions(sequences(), None, None)) == 1


def test_a_sequence_longer_than_the_table_is_refused() -> None:
    with pytest.raises(KeelError, match="25 tokens, but the position table has 24 rows"):
        DstgModel(small_config())(sequences(length=25))
    assert DstgModel(small_config("rope"))(sequences(length=25)).last_hidden_state.shape == (3, 25, 16)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("head", HEADS)
def test_saved_and_loaded_through_auto_classes(tmp_path: Path, position: str, head: type[DstgPreTrainedModel]) -> None:
    automatic = dict(
        zip(
            HEADS,
            (
                AutoModelForMaskedLM,
                AutoModelForSequenceClassification,
                AutoModelForTokenClassification,
                AutoModelForQuestionAnswering,
            ),
            strict=True,
        )
    )
    model, ids = perturbed(head(small_config(position, num_labels=3))), sequences()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    again = automatic[head].from_pretrained(tmp_path)
    assert type(again) is head
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(model(ids)[0], again(ids)[0])
    assert type(AutoModel.from_pretrained(tmp_path)) is DstgModel


def test_a_new_head_on_a_saved_encoder_is_initialised(tmp_path: Path) -> None:
    """from_pretrained leaves what the checkpoint lacks to ``_init_weights``, on memory that holds anything."""
    model = perturbed(DstgForMaskedLM(small_config("rope")))
    model.save_pretrained(tmp_path)
    other = DstgForSequenceClassification.from_pretrained(tmp_path, position="rp", num_labels=2)
    for layer in other.encoder.layers:
        assert not layer.attention.relative_bias.bucket.any() and not layer.attention.relative_bias.special.any()
    assert 0.01 < other.classifier.weight.std() < 0.03
    assert torch.equal(other.encoder.embed_tokens.weight, model.encoder.embed_tokens.weight)


@pytest.mark.parametrize("position", ["dstg", "ap"])
def test_the_position_table_begins_with_a_spread_of_its_own(position: str) -> None:
    sizes = {"max_position_embeddings": 400, "vocab_size": 400, "initializer_range": 0.1}
    for spread, expected in ((None, 0.1), (0.01, 0.01)):
        torch.manual_seed(0)
        encoder = DstgModel(small_config(position, position_initializer_range=spread, **sizes))
        assert float(encoder.embed_positions.weight.std()) == pytest.approx(expected, rel=0.1)
        assert float(encoder.embed_tokens.weight.std()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("position", POSITIONS)
def test_the_count_of_parameters_is_the_models(position: str) -> None:
    for head in ("semantic", "full"):
        config = small_config(position, mlm_head=head)
        assert count_parameters(config) == sum(p.numel() for p in DstgForMaskedLM(config).parameters())


def test_baselines_can_be_matched_in_parameters() -> None:
    paper = DstgConfig()
    assert (paper.hidden_size, paper.head_size, paper.intermediate_size) == (432, 64, 1152)
    for position in ("rope", "ap", "rp"):
        loose, matched = paper.baseline(position), paper.baseline(position, match_parameters=True)
        assert loose.intermediate_size == 1024
        assert count_parameters(loose) / count_parameters(paper) < 0.96
        assert abs(count_parameters(matched) - count_parameters(paper)) <= 6 * 3 * 384 / 2


def test_heads_of_fine_tuning_learn_from_their_labels() -> None:
    ids = sequences()
    cases = [
        (DstgForSequenceClassification, {"labels": torch.tensor([0, 1, 2])}, 3),
        (DstgForSequenceClassification, {"labels": torch.tensor([0.5, 1.0, 2.0])}, 1),
        (DstgForTokenClassification, {"labels": ids % 3}, 3),
        (
            DstgForQuestionAnswering,
            {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 5, 6])},
            2,
        ),
    ]
    for head, labels, num_labels in cases:
        model = head(small_config(num_labels=num_labels)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            loss = model(ids, attention_mask=torch.ones_like(ids), **labels).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0]


def test_left_padding_moves_what_a_sequence_is_classified_by() -> None:
    model, ids = perturbed(DstgForSequenceClassification(small_config())), sequences(rows=2)
    padded = torch.cat((torch.full((2, 2), PAD), ids), dim=1)
    found = model(padded, attention_mask=(padded != PAD).long()).logits
    torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
def test_gradient_checkpointing_changes_no_gradient(position: str) -> None:
    model = perturbed(DstgForMaskedLM(small_config(position, random_position_shift=False))).train()
    ids = sequences()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for one, other in zip(plain, gradients(), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_stays_near_float32() -> None:
    model, ids = perturbed(DstgForMaskedLM(small_config(random_position_shift=False))).train(), sequences()
    whole = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(ids, labels=ids).loss
    rounded.backward()
    assert abs(whole - rounded) < 0.05 * whole
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_values_are_widened_no_further_than_a_kernel_wants() -> None:
    widths = {"cpu": {54: 96, 72: 96, 96: 96, 100: 100}, "meta": {54: 56, 72: 72, 96: 96}}
    for device, expected in widths.items():
        for width, wanted in expected.items():
            values = torch.ones(1, 1, 2, width, device=device)
            assert widened(values, 96).shape[-1] == wanted, (device, width)
    assert float(widened(torch.ones(1, 1, 2, 54), 96)[..., 54:].abs().sum()) == 0.0


def test_training_keeps_nothing_of_the_size_of_all_logits() -> None:
    """8 rows, 2 heads, 24 tokens: the logits of a layer are 9,216 numbers; the bias of all rows, 1,152, may be kept."""
    model, kept = DstgForMaskedLM(small_config()).train(), []
    ids = sequences(rows=8, length=24)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, labels=ids)
    sizes = [tuple(tensor.shape) for tensor in kept]
    assert (2, 24, 24) in sizes
    assert not [size for size in sizes if size[-2:] == (24, 24) and len(size) == 4 and size[0] > 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": "rpe"}, "unknown position 'rpe'; did you mean"),
        ({"mlm_head": "both"}, "unknown mlm_head 'both'"),
        ({"position_size": 5}, "position_size 5 is no multiple of num_attention_heads 2"),
        ({"relative_buckets": 7}, "relative_buckets 7 must be even"),
    ],
)
def test_a_wrong_configuration_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        small_config(**fields)
