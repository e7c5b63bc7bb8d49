"""Write docs/results/performance.md from the records that the benchmarks kept (``--record``).

python benchmarks/page.py docs/results/data/performance.cpu.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from timing import DATA, shown, shown_spread

from keel.files import write_atomically

PAGE = DATA.parent / "performance.md"


def main() -> None:
    """Write the page from the records named on the command line."""
    if not sys.argv[1:]:
        sys.exit("no record given; expected their paths, such as docs/results/data/performance.cpu.json")
    parts = ["# Performance\n", "<!-- Written by `python benchmarks/page.py RECORD…`. Do not edit: run it again. -->\n"]
    parts.append(
        "Ratios are medians over rounds in which the arms take turns; in brackets the least and the greatest.\n"
    )
    for path in map(Path, sys.argv[1:]):
        for name, entry in json.loads(path.read_text(encoding="utf-8"))["benchmarks"].items():
            parts += section(name, entry)
    write_atomically(PAGE, ("\n".join(parts).rstrip() + "\n").encode())
    print(PAGE)


def section(name: str, entry: dict[str, Any]) -> list[str]:
    """Return one benchmark: its setup, a row an arm, a line a ratio, and the conditions."""
    fields = list(dict.fromkeys(field for arm in entry["arms"] for field in arm))
    script, *rest = name.split(", ")
    title = ", ".join([f"`benchmarks/{script}.py`", *rest])
    lines = [
        f"## {title}\n",
        entry["setup"] + ".\n",
        f"| {' | '.join(fields)} |",
        "|---" * len(fields) + "|",
    ]
    lines += [
        f"| {' | '.join(shown(arm[field]) if field in arm else '' for field in fields)} |" for arm in entry["arms"]
    ]
    lines.append("")
    for line in entry["comparisons"]:
        ratios = "; ".join(f"{kind} {shown_spread(values)}" for kind, values in line["ratios"].items())
        target = line["target"]
        judged = f" Target {target['text']}: **{'met' if target['met'] else 'missed'}**." if target else ""
        lines.append(f"- {line['label']}: {ratios}.{judged}")
    about = {key: value for key, value in entry["conditions"].items() if key != "versions"}
    versions = ", ".join(f"{key} {value}" for key, value in entry["conditions"]["versions"].items())
    lines.append(f"\nConditions: {', '.join(f'{key} {value}' for key, value in about.items())}; {versions}.\n")
    return lines


if __name__ == "__main__":
    main()
