"""What the processes of a run are given: threads, and an allocator that keeps large tensors' memory unless the user said otherwise."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.errors import KeelError
from keel.experiment import run_experiment, runner
from keel.experiment.unit import Unit
from keel.training import load_recipe
from keel.training.build import load_data, run_that_makes


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
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if said is not None:
        monkeypatch.setenv("MALLOC_MMAP_MAX_", said)
    recipe: Any = SimpleNamespace(arms={}, needed_by=lambda arm: [], is_same_for_all_seeds=lambda arm: False)
    display: Any = SimpleNamespace(begin=lambda unit: None, finish=lambda unit: None)
    runner._Pool(recipe, [Unit("rope", 0)], tmp_path, None, 2, display, lambda: None).run()
    assert [environment["MALLOC_MMAP_MAX_"] for environment in given] == [expected]
    assert "glibc.malloc.hugetlb=1" in given[0]["GLIBC_TUNABLES"]
    assert given[0]["OMP_NUM_THREADS"] == str(max(1, runner._cores() // 2))


def test_a_host_that_another_recipe_trains_is_asked_for_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("gtca/main", "small")
    with pytest.raises(
        KeelError,
        match=r"host.checkpoint runs/gtca/host.small/\S+ is not there; .* from this folder: keel run gtca/host$",
    ):
        load_data(recipe)
    assert run_that_makes("runs/a/b.paper/c/seed3/model") == "keel run a/b --scale paper"
    assert run_that_makes("Qwen/Qwen2.5-7B") is run_that_makes("runs/mine") is None
    host = Path(str(recipe.host["checkpoint"]))
    host.mkdir(parents=True)
    assert run_that_makes(str(host)) is None


@pytest.mark.parametrize(("sizes", "jobs"), [((), 1), ((3,), 4), ((2, 2), 1)])
def test_small_hosts_are_read_by_several_processes(
    sizes: tuple[int, ...], jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_cores", lambda: 8)
    monkeypatch.setattr(runner, "_SMALL_BYTES", 3)
    for index, size in enumerate(sizes):
        (tmp_path / f"model-{index}.safetensors").write_bytes(b"x" * size)
    recipe = load_recipe("gtca/main", "small", [f"host.checkpoint={tmp_path}"])
    assert runner._jobs(recipe, "cpu") == jobs
    assert runner._jobs(load_recipe("gtca/host", "small"), "cpu") == 4


def test_what_is_the_same_for_all_seeds_is_measured_by_one_of_them(tmp_path: Path) -> None:
    recipe: Any = SimpleNamespace(
        arms={}, needed_by=lambda arm: [], is_same_for_all_seeds=lambda arm: arm == "checkpoint"
    )
    units = [Unit(arm, seed) for seed in (0, 1) for arm in ("checkpoint", "path")]
    pool = runner._Pool(recipe, units, tmp_path, None, 4, SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    started: list[Unit] = []
    while (unit := pool._next()) is not None:
        started.append(unit)
        pool.running[unit] = SimpleNamespace()  # type: ignore[assignment]
    assert started == [Unit("checkpoint", 0), Unit("path", 0), Unit("path", 1)]
    del pool.running[Unit("checkpoint", 0)]
    assert pool._next() == Unit("checkpoint", 1)
    pool.running.clear()


def test_what_others_wait_for_is_started_first(tmp_path: Path) -> None:
    needs = {"base": [], "host": ["base"], "untrained": ["host"], "path": ["base"]}
    recipe: Any = SimpleNamespace(arms=needs, needed_by=needs.__getitem__, is_same_for_all_seeds=lambda arm: False)
    units = [Unit(arm, seed) for seed in (0, 1, 2) for arm in needs]
    pool = runner._Pool(recipe, units, tmp_path, None, 2, SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    order: list[Unit] = []
    running: list[Unit] = []
    while pool.waiting or running:
        while len(running) < 2 and (unit := pool._next()) is not None:
            order.append(unit)
            running.append(unit)
            pool.running[unit] = SimpleNamespace()  # type: ignore[assignment]
        del pool.running[running.pop(0)]
    assert order[:3] == [Unit("base", seed) for seed in (0, 1, 2)], "no seed's long chain is left for the end"
    assert sorted(order, key=units.index) == units
    for unit in order:
        assert all(order.index(Unit(arm, unit.seed)) < order.index(unit) for arm in needs[unit.arm])


def test_the_next_unit_starts_before_results_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def popen(words: list[str], **_: Any) -> SimpleNamespace:
        happened.append(f"start {words[4]}")
        return SimpleNamespace(stdout=io.StringIO(), wait=lambda: 0, terminate=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", popen)
    recipe: Any = SimpleNamespace(arms={}, needed_by=lambda arm: [], is_same_for_all_seeds=lambda arm: False)
    display: Any = SimpleNamespace(begin=lambda unit: None, finish=lambda unit: None)
    units = [Unit("rope", 0), Unit("path", 0)]
    runner._Pool(recipe, units, tmp_path, None, 1, display, lambda: happened.append("publish")).run()
    assert happened == ["start rope", "start path", "publish", "publish"]


def test_a_run_keeps_the_precision_of_the_machine_that_it_was_begun_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left to the machine is settled once: a run that goes on elsewhere compares arms of one precision."""
    recipe = load_recipe("demo", "tiny", ["phases.train.precision=auto", "phases.train.steps=2"])
    assert {phase.precision for phase in recipe.in_precision("bf16").phases_of("rope")} == {"bf16"}
    found = {}
    for native in ("bf16", "fp32"):
        monkeypatch.setattr(runner, "native_precision", lambda place, native=native: native)
        results = run_experiment(recipe, tmp_path, resume=True, device="cpu", seeds=[0], only=["rope"], jobs=1)
        found[native] = results.provenance.device
        trained = load_recipe(tmp_path / "recipe.yaml").phases_of("rope")
        assert {phase.precision for phase in trained} == {"bf16"}
    assert found["bf16"] == found["fp32"] and found["bf16"].endswith(", bf16")


def test_what_is_asked_may_not_change_where_it_is_left_out_of_what_is_learnt(tmp_path: Path) -> None:
    """Else a run that was begun without MMLU's test would be measured on questions that it has learnt: MMLU's splits share some."""
    recipe = load_recipe("gtca/main", "small")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    runner._check_folder(recipe, tmp_path, resume=True)
    asked = recipe.evaluation.mmlu
    assert asked is not None
    other = asked.model_copy(update={"source": "data:mmlu/dev.jsonl"})
    for change in (other, None):
        evaluation = recipe.evaluation.model_copy(update={"mmlu": change})
        with pytest.raises(KeelError, match=r"begun with evaluation\.mmlu\.source = 'data:mmlu/test"):
            runner._check_folder(recipe.model_copy(update={"evaluation": evaluation}), tmp_path, resume=True)
    fewer = recipe.evaluation.model_copy(update={"mmlu": asked.model_copy(update={"count": 3}), "cola": None})
    runner._check_folder(recipe.model_copy(update={"evaluation": fewer}), tmp_path, resume=True)
