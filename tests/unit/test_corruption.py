"""Corrupted streams: each kind does what it says to the states, the model feels it, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import keel
from keel.errors import KeelError
from keel.evaluation.corruption import CORRUPTIONS, corrupted

IDS = torch.randint(1, 40, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0


@pytest.fixture
def model() -> Iterator[keel.KeelForCausalLM]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    with torch.no_grad():
        yield keel.attach(LlamaForCausalLM(config).eval(), keel.StructuralStream(init="paper"))


def _states(model: keel.KeelForCausalLM, kind: str | None, seed: int = 0) -> Tensor:
    """The states that the host reads, [B, T, D]."""
    stream, seen = model.streams["structural"], []
    close = stream.close
    stream.close = lambda flow: seen.append(flow.states_GBTD[0]) or close(flow)
    if kind is None:
        model(IDS, attention_mask=MASK)
    else:
        with corrupted(model, kind, seed):
            model(IDS, attention_mask=MASK)
    stream.close = close
    return seen[0]


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_the_output_changes_while_the_states_are_corrupted_and_not_after(
    model: keel.KeelForCausalLM, kind: str
) -> None:
    before = model(IDS, attention_mask=MASK).logits
    with corrupted(model, kind):
        assert (model(IDS, attention_mask=MASK).logits - before).abs().max() > 1e-3
    assert torch.equal(model(IDS, attention_mask=MASK).logits, before)


def test_permuted_states_are_the_same_states_in_another_order(model: keel.KeelForCausalLM) -> None:
    plain, found = _states(model, None), _states(model, "permuted")
    for row, mask in enumerate(MASK.bool()):
        assert not torch.equal(found[row], plain[row])
        assert torch.equal(found[row][~mask], plain[row][~mask])
        ours, theirs = ({tuple(state) for state in states[row][mask].tolist()} for states in (found, plain))
        assert ours == theirs
    assert torch.equal(_states(model, "permuted"), found)
    assert not torch.equal(_states(model, "permuted", seed=1), found)


def test_noise_has_the_moments_of_the_states(model: keel.KeelForCausalLM) -> None:
    plain, found = (states[MASK.bool()] for states in (_states(model, None), _states(model, "noise")))
    assert not torch.allclose(plain, found, atol=1e-2)
    error = plain.std(0) * 4 / len(plain) ** 0.5
    assert ((plain.mean(0) - found.mean(0)).abs() < error).all()


def test_zeroed_and_other_are_what_they_say(model: keel.KeelForCausalLM) -> None:
    assert not _states(model, "zeroed").any()
    assert torch.equal(_states(model, "other")[1], _states(model, None)[0])


def test_what_cannot_be_corrupted_is_refused(model: keel.KeelForCausalLM) -> None:
    with pytest.raises(KeelError, match="corruption 'permute'; did you mean 'permuted'"), corrupted(model, "permute"):
        pass
    with pytest.raises(KeelError, match="at least 2 in a batch"), corrupted(model, "other"):
        model(IDS[:1])
    bare = keel.attach(model.detach(), {})
    with pytest.raises(KeelError, match="no structural stream"), corrupted(bare, "zeroed"):
        pass
