"""The process of one unit: ``python -m keel.experiment OUT ARM SEED``. ``keel run`` starts these; people do not.

It says what happens in lines of JSON on standard output. It ends when standard input does, so that it never outlives
its runner.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the unit that the command line names; 0 when it is finished, 2 for a failure that was told, 1 for another."""
    parser = argparse.ArgumentParser(prog="python -m keel.experiment")
    parser.add_argument("out", type=Path)
    parser.add_argument("arm")
    parser.add_argument("seed", type=int)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default=None)
    given = parser.parse_args()
    threading.Thread(target=_end_with_runner, daemon=True).start()
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints belongs to the log

    def tell(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=channel, flush=True)

    try:
        _run(given, tell)
    except Exception as error:
        from keel.errors import KeelError

        traceback.print_exc()
        known = isinstance(error, KeelError)
        where = f"arm {given.arm!r}, seed {given.seed}: {type(error).__name__}: "
        tell({"event": "error", "message": str(error) if known else f"{where}{' '.join(str(error).split())}"})
        return 2 if known else 1
    return 0


def _run(given: argparse.Namespace, tell: Any) -> None:
    import torch
    from transformers.utils import logging

    from keel.experiment.unit import Unit, load_unit_inputs, run_unit

    torch.set_num_threads(given.threads)
    logging.disable_progress_bar()
    recipe, plan, tokens = load_unit_inputs(given.out)
    run_unit(recipe, plan, Unit(given.arm, given.seed), given.out, tokens, device=given.device, progress=tell)


def _end_with_runner() -> None:
    # Not sys.stdin: a thread that waits inside it holds its lock, and a clean exit would then fail.
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
