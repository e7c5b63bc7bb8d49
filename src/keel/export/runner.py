"""Run a decoding step that ``keel export`` wrote. Needs numpy and onnxruntime, nothing else.

python model.py --tokens 12,7,45 --new 200
python model.py --tokens 12,7,45 --new 20 --signals

Prints the ids that follow, each the likeliest; with --signals a line of JSON for each token that is read. In a program:

    step = Step("model.onnx")
    logits, signals = step(ids)      # ids int64 [batch, 1]; call again for the next token; step.reset() begins anew
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np


class Step:
    """A session of onnxruntime and everything that it carries from token to token.

    ``telemetry`` holds six degrees of distress from 0 to 1, for models with a dynamic state path; change it between tokens.
    """

    def __init__(self, file: str | Path, threads: int = 1) -> None:
        runtime = importlib.import_module("onnxruntime")
        description = json.loads(Path(file).with_suffix(".json").read_text(encoding="utf-8"))
        self.inputs: list[dict[str, Any]] = description["inputs"]
        self.outputs: list[str] = description["outputs"]
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        self.session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.reset()

    def reset(self, batch: int = 1) -> None:
        """Begin anew, with this many rows."""
        sizes = {"batch": batch, "past": 0}
        self.carried = {
            port["name"]: np.zeros([sizes.get(size, size) for size in port["shape"]], dtype=port["dtype"])
            for port in self.inputs
            if port["name"] != "input_ids"
        }

    @property
    def telemetry(self) -> np.ndarray:
        """Distress of memory, throughput, latency, temperature, clock and load."""
        return self.carried["telemetry"]

    def __call__(self, input_ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Read one token a row, int64 [batch, 1]. Returns logits [batch, vocabulary] and the signals by name."""
        values = self.session.run(self.outputs, {"input_ids": input_ids, **self.carried})
        found = dict(zip(self.outputs, values, strict=True))
        for port in self.inputs:
            if port["after"] is not None:
                self.carried[port["name"]] = found[port["after"]]
        signals = {name.removeprefix("signal."): found[name] for name in self.outputs if name.startswith("signal.")}
        return found["logits"], signals


def main() -> None:
    """Read the tokens given, then write the likeliest ones after them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).with_suffix(".onnx")))
    parser.add_argument("--tokens", required=True, help="ids of the prompt, with commas between")
    parser.add_argument("--new", type=int, default=20, help="how many to add")
    parser.add_argument("--signals", action="store_true", help="print the signals of every token read")
    given = parser.parse_args()
    step, ids = Step(given.model), [int(word) for word in given.tokens.split(",")]
    length = len(ids) + given.new
    for index in range(length - 1):
        logits, signals = step(np.array([[ids[index]]], dtype=np.int64))
        if given.signals:
            plain = {name: np.round(value[0], 4).tolist() for name, value in signals.items() if value.ndim == 1}
            print(json.dumps({"token": ids[index], **plain}))
        if index + 1 == len(ids):
            ids.append(int(logits[0].argmax()))
    print(",".join(map(str, ids)))


if __name__ == "__main__":
    main()
