"""A step of training on a processor: with Keel's cross-entropy and attention by products a host has the gradients it has without."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from cases import Case, host_cases, tokens
from torch import Tensor

from keel.positions import Positions, get_positions, set_positions
from keel.training.labelled import head_at_labels
from keel.training.processor import quick_on_processor


@pytest.mark.parametrize("padding", [None, "right", "left"])
@host_cases
def test_a_step_is_as_without(case: Case, padding: str | None) -> None:
    """The loss is another one, and attention, in bfloat16 and (these keys are few) in float32; afterwards all is as before."""
    model, ids = case.model().train(), tokens(3, 16)
    mask = torch.ones_like(ids)
    for row, length in ((0, 12), (1, 9)):
        mask[row, slice(length, None) if padding != "left" else slice(None, 16 - length)] = 0
    given = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    if padding is not None:
        given["attention_mask"] = mask
    before = model.host.config._attn_implementation

    def step(quick: bool, autocast: bool) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        torch.manual_seed(0)
        with quick_on_processor(model) if quick else nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
                loss = model(**given, num_items_in_batch=40).loss
            loss.backward()
        names = _names(loss)
        assert ("_CrossEntropySumBackward" in names) == quick and ("LogSoftmaxBackward0" in names) != quick
        if before == "sdpa":
            assert ("SoftmaxBackward0" in names) == quick
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        return loss.detach(), gradients

    for autocast, tolerance in ((False, 1e-4), (True, 0.05)):
        (loss, expected), (quick_loss, found) = step(False, autocast), step(True, autocast)
        torch.testing.assert_close(quick_loss, loss, rtol=tolerance / 10, atol=0.0)
        assert expected.keys() == found.keys() and len(expected) > 4
        largest = max(float(gradient.norm()) for gradient in expected.values())
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= tolerance * (gradient.norm() + 0.1 * largest), (name, autocast)
    assert model.host.config._attn_implementation == before and not hasattr(model.host, "_loss_function")


def _names(loss: Tensor) -> set[str]:
    """The names of all functions that a loss was made by."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return {node.name() for node in seen}


@host_cases
def test_a_head_for_labelled_tokens_alone_has_the_same_loss(case: Case) -> None:
    model, ids = case.model().train(), tokens(3, 16)
    labels = torch.full_like(ids, -100)
    for row, place in ((0, slice(10, 13)), (1, slice(15, 16)), (2, slice(0, 2))):
        labels[row, place] = ids[row, place]

    def step(**head: Tensor) -> tuple[Tensor, tuple[int, ...], dict[str, Tensor]]:
        model.zero_grad()
        torch.manual_seed(0)
        output = model(ids, labels=labels, num_items_in_batch=5, **head)
        output.loss.backward()
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        return output.loss.detach(), tuple(output.logits.shape[:-1]), gradients

    (loss, every, expected), (found, few, gradients) = step(), step(**head_at_labels(labels))
    assert every == (3, 16) and few == (5,), "what would follow the last token, and the first token, are no targets"
    torch.testing.assert_close(found, loss)
    assert expected.keys() == gradients.keys() and len(expected) > 4
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", ["alibi", "nope"])
def test_a_position_scheme_stays(scheme: str) -> None:
    model, ids = Case("llama", "gru_model").model(), tokens(2, 9)
    set_positions(model.host, Positions(scheme=scheme))
    before, name = model(ids, labels=ids).loss, model.host.config._attn_implementation
    with quick_on_processor(model):
        torch.testing.assert_close(model(ids, labels=ids).loss, before)
    assert model.host.config._attn_implementation == name and get_positions(model.host).scheme == scheme
    assert torch.equal(model(ids, labels=ids).loss, before)
