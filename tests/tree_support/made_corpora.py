"""A data root with a few made-up rows of everything that the recipes of GTCA read, in the form of the real files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PARADIGMS = {"made_agreement": "morphology", "made_island": "syntax"}
NAMES = ("Anna", "Bert", "Carla", "Dora", "Emil", "Frida")


def make_root(root: Path) -> Path:
    """Write the files and return the folder that KEEL_DATA is to name."""
    for paradigm, field in PARADIGMS.items():
        pairs = [(f"The {name} twins are here.", f"The {name} twins is here.") for name in NAMES]
        rows = [{"sentence_good": good, "sentence_bad": bad, "UID": paradigm, "field": field} for good, bad in pairs]
        _write(root / f"blimp/{paradigm}.jsonl.gz", _lines(rows))
    for name in ("in_domain_dev", "in_domain_train"):
        judged = [f"gj04\t{index % 2}\t\t{who} has answered the letter." for index, who in enumerate(NAMES)]
        _write(root / f"cola/raw/{name}.tsv", "\n".join(judged) + "\n")
    endings = ["sits down.", "flies away.", "reads on.", "sings."]
    shown = [{"ctx": f"{who} opens a book. She", "endings": endings, "label": 2} for who in NAMES]
    _write(root / "hellaswag/rows.jsonl", _lines(shown))
    twins = [
        {"sentence": f"{a} thanked {b} because _ had helped.", "option1": a, "option2": b, "answer": "2"}
        for a in NAMES
        for b in NAMES
        if a != b
    ]
    _write(root / "winogrande/rows.jsonl", _lines(twins))
    asked = [
        {"question": f"Who wrote to {who}?", "choices": list(NAMES[:4]), "answer": 1, "subject": "letters"}
        for who in NAMES
    ]
    _write(root / "mmlu/test.jsonl.gz", _lines(asked))
    trees = [f"( (S (NP (NNP {who})) (VP (VBD read) (NP (DT the) (NN letter))) (. .)) )" for who in 2 * NAMES]
    _write(root / "treebank/wsj_sample.mrg.gz", "\n".join(trees) + "\n")
    for name in ("en_ewt-ud-train.conllu.gz", "en_ewt-ud-test.conllu"):
        _write(root / f"ud_english_ewt/{name}", "".join(map(_dependencies, NAMES)))
    return root


def _dependencies(who: str) -> str:
    words = [(who, "PROPN", 2), ("read", "VERB", 0), ("the", "DET", 4), ("letter", "NOUN", 2), (".", "PUNCT", 2)]
    text = f"# text = {who} read the letter.\n"
    rows = [
        f"{place}\t{word}\t_\t{tag}\t_\t_\t{head}\t_\t_\t{'SpaceAfter=No' if word == 'letter' else '_'}\n"
        for place, (word, tag, head) in enumerate(words, start=1)
    ]
    return text + "".join(rows) + "\n"


def _lines(rows: list[Mapping[str, Any]] | list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
