"""Loops that are compiled from C: equal to those in Python, and never taken where they cannot be had or trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keel.ops import compiled as compiling
from keel.streams.dynamic_state import recurrence

needs_compiler = pytest.mark.skipif(compiling.find_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_CACHE", str(tmp_path / "cache"))


def arguments(
    batch: int, length: int, size: int, dtype: torch.dtype, *, resets: bool
) -> tuple[list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(batch + length + size)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scale = size**-0.5
    tensors = [
        drawn(length, batch, 3 * size),
        F.normalize(drawn(length, batch, size), dim=-1),
        drawn(length, batch, 1),
        drawn(length, batch, 2).sigmoid(),
        *(drawn(3 * size, size) * scale for _ in range(2)),
        drawn(3 * size),
        drawn(size),
        drawn(size, size) * scale,
        drawn(batch, 2 * size),
    ]
    keep = (drawn(length, batch) > -1.0).to(dtype) if resets else None
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], keep


def states_and_gradients(given: list[Tensor], keep: Tensor | None) -> list[Tensor]:
    states, *_ = recurrence.dynamic_state_forward(*given, keep, True)
    weigh = torch.randn(states.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(states.dtype)
    return [states.detach(), *torch.autograd.grad((states * weigh).sum(), given)]


@needs_compiler
@pytest.mark.parametrize("resets", [False, True])
# One row and several, more than are worked on together; widths below, at and beside a whole register.
@pytest.mark.parametrize(("batch", "length", "size"), [(1, 5, 7), (3, 9, 4), (8, 40, 16), (19, 6, 20)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_compiled_loops_equal_those_in_python(
    dtype: torch.dtype,
    tolerance: float,
    batch: int,
    length: int,
    size: int,
    resets: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, keep = arguments(batch, length, size, dtype, resets=resets)
    assert recurrence._compiled_for(given[0]) is not None
    found = states_and_gradients(given, keep)
    again = states_and_gradients(given, keep)
    monkeypatch.setattr(recurrence, "_compiled_for", lambda tensor: None)
    for one, same, other in zip(found, again, states_and_gradients(given, keep), strict=True):
        assert torch.equal(one, same)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.detach().abs().max()))


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, 1e-6, 30.0, 1e4])
def test_gates_at_the_ends_of_their_range_are_those_of_torch(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny gates keep their digits (the tanh of a small number is that number), and huge ones do not overflow."""
    given, _ = arguments(8, 12, 16, torch.float32, resets=False)
    given = [given[0].detach() * scale, *given[1:4], *(0 * tensor for tensor in given[4:7]), *given[7:9], 0 * given[9]]
    found, *_ = recurrence.dynamic_state_forward(*given, None, False)
    monkeypatch.setattr(recurrence, "_compiled_for", lambda tensor: None)
    other, *_ = recurrence.dynamic_state_forward(*given, None, False)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, other, rtol=2e-5, atol=2e-6 * float(other.detach().abs().max()))


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_stays_broken_and_leaves_the_others_alone(bad: float) -> None:
    given, _ = arguments(9, 6, 8, torch.float32, resets=False)
    given = [tensor.detach() for tensor in given]
    whole, *_ = recurrence.dynamic_state_forward(*given, None, False)
    given[9][3] = bad
    broken, *_ = recurrence.dynamic_state_forward(*given, None, False)
    others = [row for row in range(9) if row != 3]
    assert torch.equal(broken[:, others], whole[:, others])
    assert bool(broken[:, 3].isnan().any(-1).all())


@needs_compiler
def test_what_was_compiled_is_kept_and_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling.compiled.cache_clear()
    assert compiling.compiled(recurrence._SOURCE, torch.float32) is not None
    folder = tmp_path / "cache" / "compiled"
    (made,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    compiling.compiled.cache_clear()
    monkeypatch.setattr(compiling, "_FLAGS", ("--nonsense",))  # another name is asked for, and cannot be made
    assert compiling.compiled(recurrence._SOURCE, torch.float32) is None
    assert list(folder.iterdir()) == [made]
    monkeypatch.undo()
    monkeypatch.setenv("KEEL_CACHE", str(tmp_path / "cache"))
    compiling.compiled.cache_clear()
    os.chmod(folder, 0o777)
    assert compiling.compiled(recurrence._SOURCE, torch.float32) is None
    compiling.compiled.cache_clear()


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler_the_loops_are_those_in_python(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling.compiled.cache_clear()
    monkeypatch.setenv("CC", compiler)
    assert recurrence._compiled_for(torch.zeros(1)) is None
    assert bool(states_and_gradients(*arguments(2, 3, 4, torch.float32, resets=True))[0].isfinite().all())
    compiling.compiled.cache_clear()


def test_other_types_and_devices_are_not_compiled_for() -> None:
    assert recurrence._compiled_for(torch.zeros(1, dtype=torch.bfloat16)) is None
    assert recurrence._compiled_for(torch.zeros(1, device="meta")) is None
