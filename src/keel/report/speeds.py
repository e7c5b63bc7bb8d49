"""What the benchmarks recorded of a paper's mechanism, for its page of `docs/results/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keel.errors import KeelError

# By paper: its benchmarks, and which of their ratios are its own; none named are all.
_OF: dict[str, dict[str, tuple[str, ...]]] = {
    "s_former": {
        "step": ("gru", "diagonal", "scan"),
        "decode": ("gru", "diagonal", "scan"),
        "evaluation": (),
        "recurrence": (),
        "completion": (),
    },
    "dta": {"dynamic_state": (), "step": ("dynamic state",), "decode": ("dynamic state",)},
    "dstg": {"encoder": ()},
    "gtca": {"tree_memory": (), "tree_step": (), "tree_cache": ()},
    "support_tokens": {"logdet": (), "margin_step": ()},
}


def speed_parts(record: Path, paper: str) -> list[str]:
    """Return the Markdown of a paper's speeds; nothing where none was recorded.

    Args:
        record: a file that the benchmarks write, such as `docs/results/data/performance.cpu.json`; it may be missing.
        paper: the first part of its recipes' names.
    Raises: KeelError for a file that is no record.
    """
    if not record.is_file():
        return []
    try:
        benchmarks = json.loads(record.read_text(encoding="utf-8"))["benchmarks"]
        rows = [row for name, entry in benchmarks.items() for row in _rows(name, entry, _OF.get(paper, {}))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KeelError(
            f"{record}: not a record of benchmarks ({error!r}); write it anew with `--record {record}`"
        ) from error
    if not rows:
        return []
    return [
        "## Speed and memory\n",
        "Medians over rounds in which the two take turns, in brackets the least and the greatest; on what, and how many arms there were: "
        "[performance.md](performance.md).\n",
        "| benchmark | ratio | measured | asked |\n|---|---|---:|---|\n" + "\n".join(rows) + "\n",
    ]


def _rows(name: str, entry: dict[str, Any], ours: dict[str, tuple[str, ...]]) -> list[str]:
    script = name.partition(",")[0]
    if script not in ours:
        return []
    found = []
    for line in entry["comparisons"]:
        if ours[script] and not any(word in line["label"] for word in ours[script]):
            continue
        # A measure other than the one that is judged: the first that there is.
        spread = line["ratios"].get(line["judged"]) or next(iter(line["ratios"].values()))
        measured = f"{spread['median']:,.3g} ({spread['min']:,.3g} to {spread['max']:,.3g})"
        target = line["target"]
        asked = "" if target is None else f"{target['text']}: **{'met' if target['met'] else 'missed'}**"
        found.append(f"| `benchmarks/{script}.py` | {line['label']} | {measured} | {asked} |")
    return found
