"""The user's question as a recipe: their checkpoint on their text, fine-tuned alone and with a side stream.

A few steps of both arms are timed first; from what they cost follow batch size, number of steps and how much text is
scored, so that the whole comparison fits into a budget of minutes. What comes out is an ordinary recipe.

Shapes: B windows, T tokens of a window.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.data import TokenCorpus
from keel.data.windows import SlidingWindows, evaluation_segments
from keel.errors import KeelError, suggest
from keel.evaluation.extrapolation import extrapolation
from keel.model import KeelForCausalLM
from keel.pretrained import check_host
from keel.streams import STREAMS
from keel.training.build import build_model, load_tokens
from keel.training.phases import VALIDATION_WINDOWS
from keel.training.processor import native_precision, quick_on_processor
from keel.training.recipe import Recipe, parse_recipe

LARGEST_WINDOW, SMALLEST_WINDOW = 512, 16
LARGEST_BATCH = 16
MICRO_BATCH_TOKENS = 4096
GOOD_STEPS, FEWEST_STEPS = 200, 10
PASSES = 3
MOST_SEGMENTS = 64
SHARE_OF_EVALUATION = 0.2
RESERVE = 0.1
_DISK_BYTES_PER_S = 150e6
_PROCESS_S = 10.0  # an arm runs in a process of its own, which imports torch and reads the tokens again

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """The recipe of a trial, and lines that tell a person how it was chosen."""

    recipe: Recipe
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the text and the host allow: ``window`` in tokens, ``longest`` evaluation length in tokens."""

    window: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured here, both arms together, in seconds.

    Attributes:
        micro_batch: windows of a micro-batch that was timed.
        window_s: training on one window.
        token_s: scoring one token.
        fixed_s: building and saving the models.
    """

    micro_batch: int
    window_s: float
    token_s: float
    fixed_s: float


def plan_trial(
    host: str, corpus: str, *, stream: str, minutes: float, device: str | None = None, say: Say = lambda text: None
) -> TrialPlan:
    """Choose sizes and steps, such that both arms and their evaluation take about ``minutes`` on this machine.

    Args:
        host: a folder, or a name on the Hub.
        corpus: ``source`` of a ``CorpusConfig``.
        stream: type of the stream.
        device: ``cpu``, or None for the fastest there is.
        say: told in a few words what is being done.
    Raises: KeelError for a checkpoint, corpus or stream that cannot be used, or a budget too small to learn anything.
    """
    began = time.monotonic()
    if not minutes > 0:
        raise KeelError(f"budget is {minutes:g} minutes; give more than 0")
    if stream not in STREAMS:
        raise KeelError(f"no stream {stream!r}; {suggest(stream, STREAMS)}")
    config = check_host(host)
    draft = _recipe(host, corpus, stream, minutes)
    say("reading the text")
    tokens = load_tokens(draft)
    sizes = choose_sizes(tokens, int(config.max_position_embeddings))
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    costs = _measure(draft, tokens, sizes, place, 60 * minutes, say)
    left = 60 * minutes - (time.monotonic() - began)
    fields = choose_fields(tokens, sizes, costs, left, 60 * minutes)
    fields["phases"][0] |= {"precision": native_precision(place), **learning_rates(config.hidden_size)}
    recipe = parse_recipe({**draft.model_dump(exclude_none=True), **fields})
    return TrialPlan(recipe=recipe, notes=_notes(recipe, tokens, costs))


def choose_sizes(tokens: TokenCorpus, max_positions: int) -> Sizes:
    """Choose the training window and the longest evaluation length, powers of two that text and host have room for.

    Raises: KeelError for a text that is too short.
    """
    train, valid, test = len(tokens.train), len(tokens.valid), len(tokens.test)
    room = min(max_positions, train // 8, valid, test // 2 - 1)
    if room < SMALLEST_WINDOW:
        raise KeelError(
            f"the corpus is too short: {train:,} tokens to train on, {valid:,} to validate, {test:,} to test; at least "
            f"{8 * SMALLEST_WINDOW}, {SMALLEST_WINDOW} and {2 * SMALLEST_WINDOW + 2} are needed; give more text"
        )
    return Sizes(
        window=min(LARGEST_WINDOW, _power_of_two(room)), longest=_power_of_two(min(max_positions, test // 2 - 1))
    )


def choose_fields(tokens: TokenCorpus, sizes: Sizes, costs: Costs, left_s: float, budget_s: float) -> dict[str, Any]:
    """Return phases and evaluation of a recipe whose run takes about ``left_s`` seconds at these costs.

    Raises: KeelError when that allows fewer than ``FEWEST_STEPS`` steps; it says which budget would do.
    """
    window = sizes.window
    lengths, segments = _choose_evaluation(len(tokens.test), sizes, costs, SHARE_OF_EVALUATION * left_s)
    scored = segments * lengths[-1] * len(lengths)
    validated = min(VALIDATION_WINDOWS, len(tokens.valid) // window) * window
    usable = (1 - RESERVE) * left_s - costs.fixed_s - scored * costs.token_s
    points = max(1, min(5, int(0.1 * usable / (validated * costs.token_s))))
    usable -= points * validated * costs.token_s
    windows = usable / costs.window_s
    available = len(SlidingWindows(tokens.train, window, window))
    batch = max(1, min(LARGEST_BATCH, _power_of_two(windows / GOOD_STEPS), _power_of_two(available / 8)))
    batch = max(batch, min(costs.micro_batch, _power_of_two(available / 8)))
    steps = min(int(windows / batch), PASSES * available // batch)
    if windows / batch < FEWEST_STEPS:
        missing_s = (FEWEST_STEPS * batch - windows) * costs.window_s / (1 - RESERVE - SHARE_OF_EVALUATION)
        raise KeelError(
            f"a budget of {budget_s / 60:g} minutes leaves time for {max(0, int(windows / batch))} steps of {batch} × "
            f"{window} tokens on this machine, at least {FEWEST_STEPS} are needed; give a budget of "
            f"{_round_up((budget_s + missing_s) / 60)} minutes or more"
        )
    phase = {
        "name": "train",
        "steps": steps,
        "batch_size": batch,
        "accumulation": max(1, batch // costs.micro_batch),
        "window": window,
        "warmup_steps": steps // 10,
        "weight_decay": 0.01,
        "validate_every": -(-steps // points),
        "checkpoint_every": -(-steps // 2),
    }
    return {
        "phases": [phase],
        "evaluation": {"extrapolation": {"lengths": lengths, "segments": segments, "split": "test"}},
    }


def learning_rates(hidden_size: int) -> dict[str, float]:
    """Return peak learning rates for a pretrained host of this width, as fields of a phase.

    The best one falls with the width (Yang et al. 2022, muP): 1e-3 at 100, 1e-4 at 1,000 and 2.4e-5 at 4,096 are what such
    hosts are commonly fine-tuned with. A baseline at a poor learning rate would make any stream look good. The stream's
    parameters are new and its scale starts at zero: they get up to ten times that rate.
    """
    rates = {"learning_rate": min(1e-3, 0.1 / hidden_size), "stream_learning_rate": min(3e-3, 1 / hidden_size)}
    return {name: _two_digits(rate) for name, rate in rates.items()}


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def _choose_evaluation(test: int, sizes: Sizes, costs: Costs, budget_s: float) -> tuple[list[int], int]:
    """Lengths from the window up by factors of two while two segments fit into the budget; how many segments do."""
    affordable = budget_s / costs.token_s
    lengths = [sizes.window]
    while 2 * lengths[-1] <= sizes.longest and 2 * (2 * lengths[-1]) * (len(lengths) + 1) <= affordable:
        lengths.append(2 * lengths[-1])
    segments = int(min(test // (lengths[-1] + 1), affordable / (lengths[-1] * len(lengths)), MOST_SEGMENTS))
    return lengths, max(2, segments)


def _recipe(host: str, corpus: str, stream: str, minutes: float) -> Recipe:
    """The recipe with sizes that only hold its place."""
    checkpoint = str(Path(host).expanduser().resolve()) if Path(host).expanduser().is_dir() else host
    source = str(Path(corpus).expanduser().resolve()) if Path(corpus).expanduser().exists() else corpus
    name = Path(checkpoint).name
    return parse_recipe(
        {
            "name": "try",
            "title": f"{name} on {Path(source).name}: fine-tuned alone, and with a {stream} stream",
            "expected_minutes": {"small": minutes},
            "data": {"corpus": {"source": source, "test_fraction": 0.1}, "tokenizer": {"pretrained": checkpoint}},
            "host": {"checkpoint": checkpoint},
            "arms": {
                "host": {"label": f"{name} alone"},
                stream: {"label": f"{name} + {stream} stream", "streams": {stream: {}}},
            },
            "phases": [{"name": "train", "steps": 1, "learning_rate": 1e-4}],
            "evaluation": {"extrapolation": {"lengths": [SMALLEST_WINDOW]}},
        }
    )


def _measure(
    recipe: Recipe, tokens: TokenCorpus, sizes: Sizes, place: torch.device, budget_s: float, say: Say
) -> Costs:
    """Time both arms, with the micro-batch that the first is found to have time for."""
    micro, window_s, token_s, fixed_s = 0, 0.0, 0.0, 0.0
    for arm in recipe.arms:
        say(f"timing {recipe.label_of(arm)}")
        began = time.monotonic()
        model = build_model(recipe, arm, recipe.seeds[0], tokens.tokenizer).to(place)
        written = 40 * sum(parameter.numel() for parameter in model.parameters())  # a model and three checkpoints
        fixed_s += _PROCESS_S + 2 * (time.monotonic() - began) + written / _DISK_BYTES_PER_S
        micro = micro or _micro_batch(model, tokens, sizes.window, place, budget_s)
        window_s += _seconds_a_step(model, _batch(tokens, micro, sizes.window).to(place), 0.01 * budget_s) / micro
        token_s += _seconds_a_token(model, tokens, sizes.window, place)
        del model
        if place.type == "cuda":
            torch.cuda.empty_cache()  # the arms run in processes of their own, which need the room
    return Costs(micro_batch=micro, window_s=window_s, token_s=token_s, fixed_s=fixed_s)


def _micro_batch(model: KeelForCausalLM, tokens: TokenCorpus, window: int, place: torch.device, budget_s: float) -> int:
    """Double the micro-batch from one window on, while the budget would hold enough steps of twice its size in both arms."""
    micro = 1
    while 2 * micro <= min(LARGEST_BATCH, MICRO_BATCH_TOKENS // window):
        step_s = _seconds_a_step(model, _batch(tokens, micro, window).to(place), 0.0)
        if 2 * step_s * 2 * GOOD_STEPS > budget_s:
            break
        micro *= 2
    return micro


def _seconds_a_step(model: KeelForCausalLM, ids_BT: Tensor, patience: float) -> float:
    """Median time of a training step, after one to warm up; repeated for ``patience`` seconds (10 at most), two at least.

    The learning rate is zero; the weights stay as they are, up to the optimizer's own cost.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model.train()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < min(10.0, patience) and len(times) < 30):
        began = time.perf_counter()
        native = native_precision(ids_BT.device) == "bf16"
        with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=native), quick_on_processor(model):
            loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the GPU
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))


def _seconds_a_token(model: KeelForCausalLM, tokens: TokenCorpus, length: int, place: torch.device) -> float:
    segments = evaluation_segments(tokens.test, length, 1)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        extrapolation(model, segments, [length], device=place)
        times.append(time.perf_counter() - began)
    return times[1] / length


def _batch(tokens: TokenCorpus, size: int, window: int) -> Tensor:
    windows = SlidingWindows(tokens.train, window, window)
    return torch.stack([windows[index % len(windows)]["input_ids"] for index in range(size)])


def _power_of_two(value: float) -> int:
    """The largest power of two up to ``value``, 0 below 1."""
    return 0 if value < 1 else 1 << (int(value).bit_length() - 1)


def _round_up(minutes: float) -> str:
    """Two significant digits, rounded up."""
    unit = 10.0 ** (np.floor(np.log10(minutes)) - 1)
    return f"{np.ceil(minutes / unit) * unit:g}"


def _notes(recipe: Recipe, tokens: TokenCorpus, costs: Costs) -> list[str]:
    phase, measured = recipe.phases[0], recipe.evaluation.extrapolation
    assert measured is not None
    trained = phase.steps * phase.batch_size * phase.window
    lines = [
        f"{phase.steps} steps of {phase.batch_size} × {phase.window} tokens for each arm "
        f"({trained:,} tokens, {trained / len(tokens.train):.1f} times the training text); "
        f"a step takes {phase.batch_size * costs.window_s:.2g} s in both arms together.",
        f"Scored on {measured.segments} × {measured.lengths[-1]} tokens of held-out text, at lengths "
        f"{', '.join(map(str, measured.lengths))}.",
    ]
    if len(tokens.test.names) < 2:
        lines.append(
            "The held-out text is one document, so that no interval can be given; give a folder of several files."
        )
    return lines
