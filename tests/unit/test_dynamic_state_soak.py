"""Ten thousand tokens under faults at random: no number is lost, memory stays flat, and safe mode is the host bit for bit.

The paper asks for a path that runs on (§12). Shapes: B batch, D hidden size.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import DynamicCache

import keel
from keel.streams.base import PassInputs, State
from keel.streams.dynamic_state import FAILURES, DynamicStateStream, Mode, Telemetry
from keel.streams.dynamic_state.safeguards import NUDGE
from keel.streams.dynamic_state.telemetry import FEATURES

sys.path.insert(0, str(Path(__file__).parents[1] / "dynamic_state_support"))

from dynamic_state_cases import UNTRAINED, WIDTH, make_stream

FLOOR = 0.05
LIMITS = {
    "coherence_least": 0.05, "alignment_least": 0.02, "patience": 4, "cooldown": 5, "noise_most": 20.0, "change_most": 1.0,
    "continuity_least": 0.2, "change_least": 1e-5,
}  # fmt: skip
FAULTS = ("nan", "infinite", "loud", "silent", "stuck", "opposed", "exhausted")
SETTLED = 1000  # tokens until every buffer has been made once


class Distress(Telemetry):
    """Telemetry that a test sets."""

    def __init__(self) -> None:
        self.features_R = torch.zeros(len(FEATURES))

    def read(self, positions_BT: Tensor | None) -> Tensor:
        return self.features_R


class Faults:
    """What a host in trouble gives: steady text with noise, and now and then a fault for some tokens, in the first row."""

    def __init__(self, batch: int) -> None:
        self.random, self.generator = random.Random(7), torch.Generator().manual_seed(7)
        self.steady_BD = torch.randn(batch, WIDTH, generator=self.generator)
        self.fault, self.left = "", 0
        self.seen: Counter[str] = Counter()

    def next(self) -> tuple[Tensor, Tensor, float]:
        """Hidden state and residual, [B, 1, D], and the distress of the machine."""
        if not self.left:
            self.fault = self.random.choice(FAULTS) if self.random.random() < 0.02 else ""
            self.left = self.random.randint(1, 40) if self.fault else 1
            self.seen[self.fault] += 1
        self.left -= 1
        noise_BD = torch.randn(self.steady_BD.shape, generator=self.generator) * (self.fault != "stuck")
        hidden_BD = self.steady_BD + 0.5 * noise_BD
        residual_BD = hidden_BD.clone()
        if self.fault in ("nan", "infinite"):
            hidden_BD[0] = residual_BD[0] = torch.nan if self.fault == "nan" else torch.inf
        factor = {"loud": 1e4, "silent": 1e-6}.get(self.fault, 1.0)
        residual_BD[0] *= factor
        if self.fault == "opposed":
            hidden_BD[0] *= -self.random.uniform(0.5, 20.0) if self.left % 2 else 1.0
        return hidden_BD.unsqueeze(1), residual_BD.unsqueeze(1), float(self.fault == "exhausted")


def token(
    stream: DynamicStateStream, hidden: Tensor, residual: Tensor, state: State
) -> tuple[Tensor, State, dict[str, Any]]:
    flow = stream.open(PassInputs(embeddings_BTD=hidden, collect_signals=True), state)
    stream.write("final_norm_input", -1, residual, flow)
    written = stream.write("final_hidden", -1, hidden, flow)
    result = stream.close(flow)
    return written, result.state, dict(result.signals)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


def held() -> tuple[int, int]:
    """Tensors that are alive, and bytes of the process.

    The bytes are read first: the list of all objects is itself some 15 MB in a long-lived process, and the allocator may keep it.
    """
    gc.collect()
    size = psutil.Process().memory_info().rss
    return sum(type(thing) is Tensor for thing in gc.get_objects()), size


@pytest.mark.parametrize(("batch", "length"), [(1, 10_000), (2, 2_000)], ids=["one row", "two rows"])
def test_a_long_run_under_faults(batch: int, length: int) -> None:
    stream = make_stream(safeguards=LIMITS, noise_floor=FLOOR, retention=0.5).float().eval()
    stream.telemetry = Distress()
    faults, state, modes = Faults(batch), {}, Counter()
    failed = torch.zeros(len(FAILURES))
    history = []
    with torch.no_grad():
        for t in range(length):
            hidden, residual, distress = faults.next()
            stream.telemetry.features_R = torch.full((len(FEATURES),), distress)
            written, state, signals = token(stream, hidden, residual, state)
            assert all(bool(state[name].isfinite().all()) for name in ("tpc", "s", "baseline"))
            assert bool((torch.linalg.vector_norm(state["s"], dim=-1) <= 1 / FLOOR + NUDGE).all())
            away_B = signals["governor"][:, 0] != Mode.ACTIVE
            assert torch.equal(bits(written[away_B]), bits(hidden[away_B])), t
            assert bool(written[~away_B].isfinite().all()), t
            modes[int(signals["governor"][0, 0])] += 1
            failed += signals["failures"][0, 0]
            if t in (SETTLED, (SETTLED + length) // 2, length - 1):
                history.append(held())
    # What leaks a token leaks in both halves, and a tensor kept is counted, however small. The bytes are a backstop with room for the
    # allocator, which after hundreds of other tests in the same process gives and takes some megabytes.
    grown = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(history)]
    assert min(tensors for tensors, _ in grown) <= 4 and min(size for _, size in grown) <= 16 * 2**20, grown
    assert min(modes[mode] for mode in Mode) > length / 50, modes
    assert set(faults.seen) == {"", *FAULTS} and int((failed > 0).sum()) >= 6, failed


def test_in_safe_mode_the_logits_are_the_hosts_bit_for_bit() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, initializer_range=0.2
    )  # fmt: skip
    host = AutoModelForCausalLM.from_config(config).eval()
    stream = DynamicStateStream(state_size=8, retention=0.3, noise_floor=0.02, safeguards={**UNTRAINED, "cooldown": 3})
    model: Any = keel.attach(host, stream).eval()
    stream.telemetry = Distress()
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    same, modes, cache, own = [], [], None, DynamicCache(config=config)
    with torch.no_grad():
        for t in range(30):
            stream.telemetry.features_R = torch.full((len(FEATURES),), float(10 <= t < 20))
            ids = torch.tensor([[t % 7]])
            output = model(ids, past_key_values=cache, use_cache=True, collect_signals=True)
            with model.disable_streams():
                bare = model(ids, past_key_values=own, use_cache=True)
            cache = output.past_key_values
            modes.append(int(output.signals["dynamic_state.governor"]))
            same.append(torch.equal(output.logits, bare.logits))
    assert modes == [Mode.ACTIVE] * 10 + [Mode.SAFE] * 10 + modes[20:] and Mode.COOL_DOWN in modes[20:]
    assert modes[-1] == Mode.ACTIVE
    assert same[1:] == [mode != Mode.ACTIVE for mode in modes][1:]
