"""What the processes of a run are given: threads, and an allocator that keeps large tensors' memory unless the user said otherwise."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.experiment import runner
from keel.experiment.unit import Unit


@pytest.mark.parametrize(("said", "expected"), [(None, "0"), ("65536", "65536")])
def test_a_process_keeps_memory_unless_the_user_said_otherwise(
    said: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []

    def popen(words: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        given.append(env)
        return SimpleNamespace(stdout=io.StringIO(), wait=lambda: 0, terminate=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    if said is not None:
        monkeypatch.setenv("MALLOC_MMAP_MAX_", said)
    recipe: Any = SimpleNamespace(needed_by=lambda arm: [])
    display: Any = SimpleNamespace(begin=lambda unit: None, finish=lambda unit: None)
    runner._Pool(recipe, [Unit("rope", 0)], tmp_path, None, 2, display, lambda: None).run()
    assert [environment["MALLOC_MMAP_MAX_"] for environment in given] == [expected]
    assert given[0]["OMP_NUM_THREADS"] == str(max(1, runner._cores() // 2))
