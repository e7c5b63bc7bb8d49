"""What a dynamic state path is taught: targets that fall and recover, the losses of §9 by name, phases that resume bit for bit."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from keel.data import TokenCorpus, TokenStream
from keel.data.disruptions import DisruptedWindows, DisruptionConfig
from keel.data.languages import Facts
from keel.data.tasks import language_tokenizer
from keel.errors import KeelError
from keel.model import KeelForCausalLM, attach
from keel.streams import DynamicStateStream
from keel.training import Phase, parse_recipe, train
from keel.training.dynamics import disrupted_pass, prepare
from keel.training.signal_losses import LOSSES, signal_losses
from keel.training.signal_targets import (
    CALM,
    DISRUPTED,
    SignalTargets,
    reference_trace,
    signal_targets,
    trace_of,
)

TOKENIZER = language_tokenizer(Facts().alphabet)
SIZE, WINDOW = 4, 24


def stream_of(count: int, seed: int) -> TokenStream:
    ids = np.cumsum(np.random.default_rng(seed).integers(1, 3, size=count)) % (len(TOKENIZER) - 3) + 3
    return TokenStream(
        ids=ids.astype(np.int32), starts=np.array([0], dtype=np.int64),
        token_bytes=np.ones(count, dtype=np.uint16), names=["made up"],
    )  # fmt: skip


CORPUS = TokenCorpus(
    train=stream_of(600, 0), valid=stream_of(100, 1), test=stream_of(100, 2), tokenizer=TOKENIZER, fingerprint="made up"
)


def model_of(seed: int = 0, **fields: Any) -> KeelForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return attach(LlamaForCausalLM(config), DynamicStateStream(state_size=SIZE, noise="hidden", **fields))


DISRUPTIONS = {"share": 0.3, "span": [2, 6], "gap": 2, "facts": 0.2, "contradictions": 0.3}
SIGNALS = {"coherence": 1.0, "noise": 1.0, "alignment": 1.0, "tpc": 1.0}
EVERY = dict.fromkeys(LOSSES, 0.5)


def phase_of(name: str = "signals", **fields: Any) -> Phase:
    dynamics = {"disruptions": DISRUPTIONS, "losses": SIGNALS, "base": 0.0, **fields.pop("dynamics", {})}
    given = {"steps": 4, "batch_size": 4, "window": WINDOW, "learning_rate": 1e-2, "checkpoint_every": 2, **fields}
    return Phase(name=name, dynamics=dynamics, **given)


def batch_of(rows: int = 3, **fields: Any) -> dict[str, Tensor]:
    config = DisruptionConfig(**{**DISRUPTIONS, "span": (2, 6), "facts": 0.0, **fields})  # type: ignore[arg-type]
    windows = DisruptedWindows(CORPUS.train, WINDOW, WINDOW, TOKENIZER, config, seed=0)
    samples = [windows[index] for index in range(rows)]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


# -- targets ------------------------------------------------------------------------------------------------------------


def test_the_trace_is_the_level_at_once_and_halves_after_it() -> None:
    level = torch.tensor([[0, 0, 1, 0, 0, 0, 0.5, 0, 0], [0.25, 1, 0.5, 0, 0, 0, 0, 0, 0]])
    found = trace_of(level, 2.0)
    for row, expected in zip(found, level, strict=True):
        torch.testing.assert_close(row, torch.tensor(reference_trace(expected.tolist(), 2.0)))
    assert found[0, 4] == pytest.approx(0.5) and found[0, 0] == 0


def test_targets_fall_in_a_disruption_and_recover_after_it() -> None:
    level = torch.zeros(1, 80)
    level[0, 20:30] = 1.0
    query = torch.nn.functional.normalize(torch.randn(1, 80, SIZE, generator=torch.Generator().manual_seed(0)), dim=-1)
    ones = torch.ones(1, 80)
    found = signal_targets(level, query, ones, torch.ones(1, 80, SIZE) / 2, retention=0.8)
    for name in CALM:
        target = getattr(found, name)[0]
        assert target[19].item() == pytest.approx(CALM[name]) and target[29].item() == pytest.approx(DISRUPTED[name])
        assert target[79].item() == pytest.approx(CALM[name], abs=1e-3)
        sign = 1 if DISRUPTED[name] < CALM[name] else -1
        assert (sign * target[29:].diff() >= 0).all() and (sign * target[18:21].diff() <= 0).all()
    for vector in (found.tpc[0], found.state[0]):
        length = vector.norm(dim=-1)
        assert length[29] < 0.5 * length[19] and length[79] > 0.9 * length[19]


def test_the_target_of_the_state_is_the_recurrence_of_the_targets() -> None:
    level = batch_of()["level"]
    generator = torch.Generator().manual_seed(0)
    query, direction = (torch.randn(3, WINDOW, SIZE, generator=generator) for _ in range(2))
    substrate = torch.rand(3, WINDOW, generator=generator)
    found = signal_targets(level, query, substrate, direction, retention=0.8)
    state = torch.zeros(3, SIZE)
    for t in range(WINDOW):
        x = found.coherence[:, t] * found.alignment[:, t] / found.noise[:, t]
        state = (substrate[:, t] * found.continuity[:, t])[:, None] * (0.8 * state + 0.2 * x[:, None] * direction[:, t])
        torch.testing.assert_close(found.state[:, t], state)


# -- losses -------------------------------------------------------------------------------------------------------------


def made_up() -> tuple[dict[str, Tensor], SignalTargets, Tensor]:
    """Signals that equal their targets, all calm but the tokens 4 and 5."""
    level = torch.zeros(1, 12)
    level[0, 4:6] = 1.0
    query = torch.ones(1, 12, SIZE) / 2
    targets = signal_targets(level, query, torch.ones(1, 12), query, retention=0.8)
    signals = {name: getattr(targets, name).clone() for name in targets._fields}
    return signals, targets, level


def test_losses_are_zero_at_their_targets_and_grow_away_from_them() -> None:
    signals, targets, level = made_up()
    fitted = {name: 1.0 for name in LOSSES if name not in ("stability", "spike", "drift")}
    assert all(value == pytest.approx(0, abs=1e-5) for value in signal_losses(signals, targets, level, fitted).values())
    moved = {name: signal - 0.1 for name, signal in signals.items()}
    assert all(value > 1e-3 for value in signal_losses(moved, targets, level, fitted).values())


def test_the_regularisers_are_those_of_the_text() -> None:
    signals, targets, level = made_up()
    calm = level == 0
    signals["state"] = torch.zeros(1, 12, SIZE)
    signals["state"][0, 2] = 1.0
    signals["alignment"] = torch.full((1, 12), 0.3)
    signals["noise"] = torch.tensor([[0.0, 0, 0, 0, 2, 0, 0, 0.5, 0, 0, 0, 0]])
    found = signal_losses(signals, targets, level, {"stability": 1.0, "drift": 2.0, "spike": 1.0})
    assert found["stability"].item() == pytest.approx(2 * SIZE)
    assert found["drift"].item() == pytest.approx(2 * 0.2 * int(calm.sum()))
    assert found["spike"].item() == pytest.approx(0.5 - 0.2), "a rise in a disruption is wanted"


def test_the_continuity_divergence_is_of_two_outcomes() -> None:
    signals, targets, level = made_up()
    signals["continuity"] = torch.full((1, 12), 0.7)
    p, q = targets.continuity.double(), 0.7
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum()
    found = signal_losses(signals, targets, level, {"continuity_kl": 1.0})["continuity_kl"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)


# -- a step -------------------------------------------------------------------------------------------------------------


def test_every_loss_reaches_the_path_and_the_total_is_their_sum() -> None:
    model, batch = model_of(init="paper").train(), batch_of()
    for name in LOSSES:
        model.zero_grad()
        loss, output = disrupted_pass(model, batch, phase_of(dynamics={"losses": {name: 1.0}}).dynamics, 60, 72)
        assert set(output.losses) == {f"dynamic_state.{name}"}
        loss.backward()
        stream = model.wires.streams["dynamic_state"]
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in stream.parameters()), name
    both, output = disrupted_pass(model, batch, phase_of(dynamics={"losses": EVERY, "base": 0.5}).dynamics, 60, 72)
    inputs = {name: batch[name] for name in ("input_ids", "labels")}
    assert (batch["kind"] == 3).any()
    assert both.item() > sum(output.losses.values()).item() > 0
    clean = {**batch, "level": torch.zeros_like(batch["level"])}
    base, _ = disrupted_pass(model, clean, phase_of(dynamics={"losses": {}, "base": 0.5}).dynamics, 60, 72)
    expected = model(**inputs, num_items_in_batch=60).loss
    assert base.item() == pytest.approx(0.5 * expected.item())
    noisy, _ = disrupted_pass(model, batch, phase_of(dynamics={"losses": {}, "base": 0.5}).dynamics, 60, 72)
    assert noisy.item() != base.item(), "hidden noise changes what the host computes"


def test_targets_keep_float32_where_the_host_computes_in_bfloat16() -> None:
    model, batch = model_of(init="paper").train(), batch_of()
    wanted = phase_of(dynamics={"losses": EVERY}).dynamics
    with torch.autocast("cpu", torch.bfloat16):
        _, output = disrupted_pass(model, batch, wanted, 60, 72)
    stream = model.wires.streams["dynamic_state"]
    signals = {name.partition(".")[2]: value for name, value in output.signals.items()}
    targets = signal_targets(
        batch["level"],
        signals["query"].detach(),
        signals["substrate"],
        stream.directions(signals["tpc"]),
        stream.config.retention,
    )
    expected = signal_losses(signals, targets, batch["level"], EVERY)
    for name, value in expected.items():
        torch.testing.assert_close(output.losses[f"dynamic_state.{name}"], value / 72, rtol=1e-6, atol=1e-7)


def test_an_inactive_path_is_out_of_the_way() -> None:
    model, batch = model_of(init="paper").train(), batch_of(kinds=("tokens",))
    wanted = phase_of(trainable="host", dynamics={"losses": {}, "base": 1.0, "active": False}).dynamics
    assert wanted is not None
    loss, _ = disrupted_pass(model, batch, wanted, 60, 72)
    with model.disable_streams():
        expected = model(input_ids=batch["input_ids"], labels=batch["labels"], num_items_in_batch=60).loss
    assert torch.equal(loss, expected)
    active, _ = disrupted_pass(model, batch, wanted.model_copy(update={"active": True}), 60, 72)
    assert not torch.equal(active, loss)


def test_truncation_cuts_gradients_and_nothing_else() -> None:
    model, batch = model_of(init="paper").train(), batch_of(kinds=("tokens",))
    stream = model.wires.streams["dynamic_state"]
    assert isinstance(stream, DynamicStateStream)
    ids = batch["input_ids"][:1]
    embeddings = model.host.base_model.get_input_embeddings()(ids).detach()

    def reached(truncation: int | None) -> tuple[Tensor, Tensor]:
        stream.truncation = truncation
        given = embeddings.clone().requires_grad_()
        out = model(inputs_embeds=given, use_cache=False, collect_signals=True).signals["dynamic_state.tpc"]
        stream.truncation = None
        return out, torch.autograd.grad(out[0, 10:].sum(), given, retain_graph=True)[0]

    whole, grad_whole = reached(None)
    cut, grad_cut = reached(5)
    torch.testing.assert_close(cut, whole)
    assert not torch.allclose(grad_cut, grad_whole)
    # The last stretch has 5 tokens of its own: what it owes to the states before them is what is cut.
    torch.testing.assert_close(reached(WINDOW)[1], grad_whole)


# -- phases -------------------------------------------------------------------------------------------------------------

PHASES = [
    phase_of("base", steps=2, trainable="host", dynamics={"base": 1.0, "losses": {}, "active": False}),
    phase_of("signals", trainable="streams", dynamics={"parameters": ["hidden_weight", "hidden_bias", "tpc_weight"]}),
    phase_of("total", trainable="all", dynamics={"losses": EVERY, "base": 1.0, "truncation": 8}),
]


def run(folder: Path, phases: list[Phase] = PHASES, **given: Any) -> dict[str, Tensor]:
    model = model_of()
    train(model, CORPUS, phases, arm="path", seed=3, folder=folder, device="cpu", **given)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_each_phase_trains_its_own_parameters(tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in model_of().state_dict().items()}
    base = run(tmp_path / "base", PHASES[:1])
    assert {name.split(".")[0] for name in before if not torch.equal(before[name], base[name])} == {"host", "streams"}
    streams = [name for name in before if name.startswith("streams.") and not name.endswith(".step")]
    assert all(torch.equal(before[name], base[name]) for name in streams)
    signals = run(tmp_path / "signals", PHASES[:2])
    learnt = {name.rpartition(".")[2] for name in before if not torch.equal(base[name], signals[name])} - {"step"}
    assert learnt == {"hidden_weight", "hidden_bias", "tpc_weight"}
    with pytest.raises(KeelError, match="no 'tpc_weigth'"):
        prepare(model_of(), phase_of(trainable="streams", dynamics={"parameters": ["tpc_weigth"]}))


def test_total_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", PHASES[2:])

    class Stop(Exception):
        pass

    def stop_in_total(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["phase"] == "total" and event["step"] == 3:
            raise Stop

    with pytest.raises(Stop):
        run(tmp_path / "broken", PHASES[2:], progress=stop_in_total)
    assert (tmp_path / "broken" / "checkpoints" / "0-total").is_dir()
    copied = tmp_path / "other"
    shutil.copytree(tmp_path / "broken", copied)
    resumed = run(tmp_path / "broken", PHASES[2:], resume=True)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    changed = [phase_of("total", trainable="all", dynamics={"losses": EVERY, "base": 0.5, "truncation": 8})]
    with pytest.raises(KeelError, match="resume as it was begun"):
        run(copied, changed, resume=True)


RECIPE = {
    "name": "r", "title": "t", "data": {"corpus": {"source": "stdlib"}, "tokenizer": {"bpe": 300}},
    "host": {"family": "llama"}, "arms": {"a": {"streams": {"dynamic_state": {}}}},
    "evaluation": {"blocks": {"length": 8, "count": 1}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("dynamics", "message"),
    [
        ({"losses": {"coherense": 1.0}}, "coherence"),
        ({"disruptions": {"shares": 0.1}}, "share"),
        ({"disruptions": {"share": 0.95}}, "share"),
        ({"base": 0.0}, "nothing would be learnt"),
    ],
)
def test_a_recipe_names_what_is_wrong(dynamics: dict[str, Any], message: str) -> None:
    phase = {"name": "p", "steps": 1, "learning_rate": 1e-3, "dynamics": dynamics}
    with pytest.raises(KeelError, match=message):
        parse_recipe({**RECIPE, "phases": [phase]})
    assert math.isfinite(parse_recipe({**RECIPE, "phases": [{**phase, "dynamics": {}}]}).phases[0].dynamics.base)
