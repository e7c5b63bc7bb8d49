"""The benchmarks run, at a toy size: what they print and record has every arm and every ratio. No time is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ["--size", "toy", "--rounds", "2", "--threads", "1"]


@pytest.mark.parametrize(
    ("name", "options", "arms", "key"),
    [
        ("step", [], {"host", "gru", "diagonal", "scan", "dynamic state", "x-transformers"}, "step"),
        ("decode", ["--new-tokens", "4"], {"host", "gru", "diagonal", "scan", "dynamic state"}, "decode"),
        ("margin_step", [], {"host", "rank 32", "rank 64"}, "margin_step"),
        ("dynamic_state", [], {"operator", "hoisted loop", "blueprint"}, "dynamic_state"),
        ("encoder", [], {"rope", "dstg"}, "encoder"),
        ("recurrence", [], {"torch.nn.GRU", "gru", "diagonal gru", "scan"}, "recurrence"),
        ("logdet", [], {"rank", "chunks", "at once"}, "logdet"),
        ("tree_memory", [], {"prefix sums", "loop"}, "tree_memory"),
        ("tree_cache", [], {"build", "memory MiB", "look-ups"}, "tree_cache"),
        ("tree_step", [], {"host", "tree"}, "tree_step"),
        (
            "evaluation",
            ["--tokens", "64", "--lengths", "16", "--arms", "gru"],
            {"host", "gru"},
            "evaluation, blocks of 16",
        ),
        (
            "completion",
            ["--words", "4", "--slow-words", "1", "--length", "8"],
            {"batched", "one by one"},
            "completion",
        ),
    ],
)
def test_a_benchmark_compares_every_arm_with_the_host(
    name: str, options: list[str], arms: set[str], key: str, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *SMALL, *options, "--record", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-800:]
    entry = json.loads(record.read_text(encoding="utf-8"))["benchmarks"][key]
    assert {arm["arm"].split(",")[0] for arm in entry["arms"]} >= arms
    assert len(entry["comparisons"]) >= len(arms) - 1
    for line in entry["comparisons"]:
        assert all(ratio["min"] <= ratio["median"] <= ratio["max"] for ratio in line["ratios"].values())
        assert all(ratio["median"] > 0 for ratio in line["ratios"].values())
