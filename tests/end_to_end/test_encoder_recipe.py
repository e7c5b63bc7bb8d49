"""The encoder's comparison at its tiny scale, every section of it, on made-up annotations: each metric that is documented is there."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from keel.evaluation.results import Results
from keel.experiment import run_experiment
from keel.report import write_docs_page, write_report
from keel.training import Recipe, load_recipe

WORDS = ["cat", "dog", "sat", "ran", "on", "mat", "good", "bad", "old", "red"]
SENTENCES = """\
# newdoc id = {number}
# text = {subject} {verb} home .
1\t{subject}\t_\tNOUN\t_\tNumber={grammar}\t2\tnsubj\t_\t_
2\t{verb}\t_\tVERB\t_\t_\t0\troot\t_\t_
3\thome\t_\tADV\t_\t_\t2\tadvmod\t_\t_
4\t.\t_\tPUNCT\t_\t_\t2\tpunct\t_\t_

# text = It was {verb} .
1\tIt\t_\tPRON\t_\tNumber=Sing\t3\tnsubj\t_\t_
2\twas\t_\tAUX\t_\t_\t3\taux\t_\t_
3\t{verb}\t_\tVERB\t_\t_\t0\troot\t_\t_
4\t.\t_\tPUNCT\t_\t_\t3\tpunct\t_\t_

"""
TREES = "( (S (NP (NN {0})) (VP (VBD {1})) (. .)) )\n( (NP (NP (NP (NN {0})) (CC and)) (NP (NN {2}))) )\n"


def phrase(random: np.random.Generator) -> str:
    return " ".join(random.choice(WORDS, size=5).tolist()) + f" {random.integers(10**6)}"


def annotations(folder: Path) -> dict[str, str]:
    """Write what the recipe reads beside its corpus; return the overrides that point to it."""
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        found = [
            SENTENCES.format(number=index, subject=WORDS[index % 2], verb=WORDS[2 + index % 3], grammar=grammar)
            for index, grammar in enumerate(["Sing", "Plur"] * 8)
        ]
        write(folder / "ud" / f"x-ud-{split}.conllu", "".join(found))
    trees = [TREES.format(*random.choice(WORDS, size=3)) for _ in range(16)]
    write(folder / "bank" / "x.mrg", "".join(trees))
    pairs = [{"sentence1": phrase(random), "sentence2": phrase(random), "label": index % 2} for index in range(24)]
    lines = "\n".join(map(json.dumps, pairs))
    for split in ("train", "dev"):
        rows = [f"{index % 2}\t{phrase(random)}" for index in range(24)]
        write(folder / "glue" / "SST-2" / f"{split}.tsv", "\n".join(["label\tsentence", *rows]))
        rows = [f"{phrase(random)},{phrase(random)},{random.uniform(0, 5):.2f}" for _ in range(24)]
        write(folder / "glue" / "STS-B" / f"stsb-en-{split}.csv", "\n".join(rows))
    rows = [f"{index % 2}\t1\t2\t{phrase(random)}\t{phrase(random)}" for index in range(24)]
    write(folder / "glue" / "MRPC" / "msr_paraphrase_train.txt", "\n".join(["Quality\t#1\t#2\t#1\t#2", *rows]))
    rows = [
        f'<pair id="{index}" value="{"TRUE" if index % 2 else "FALSE"}"><t>{phrase(random)}</t><h>{phrase(random)}</h></pair>'
        for index in range(24)
    ]
    write(folder / "glue" / "RTE" / "rte1_dev.xml", f"<entailment-corpus>{''.join(rows)}</entailment-corpus>")
    for task in ("MRPC", "RTE"):
        write(folder / "glue" / task / "glue_dev.jsonl", lines)
    asked = [
        {"id": str(index), "title": f"t{index % 8}", "context": f"a {phrase(random)} .", "question": "what ?"}
        for index in range(40)
    ]
    rows = [json.dumps({**row, "answers": {"text": [row["context"].split()[1]]}}) for row in asked]
    write(folder / "squad" / "questions.jsonl", "\n".join(rows))
    return {
        "linguistic.dependencies": str(folder / "ud"),
        "linguistic.treebank": str(folder / "bank"),
        "glue.source": str(folder / "glue"),
        "squad.source": str(folder / "squad"),
    }


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Results, Path]:
    folder = tmp_path_factory.mktemp("comparison")
    overrides = [f"evaluation.{name}={value}" for name, value in annotations(folder / "data").items()]
    recipe = load_recipe("dstg/comparison", "tiny", overrides)
    return recipe, run_experiment(recipe, folder, only=["ap", "dstg"], device="cpu", jobs=1), folder


def test_every_arm_has_the_documented_metrics(run: tuple[Recipe, Results, Path]) -> None:
    recipe, results, _ = run
    assert recipe.evaluation.linguistic is not None and recipe.evaluation.glue is not None
    probes = [
        f"probe.{target}_r2{where}" for target in ("token", "segment", "progress") for where in ("", "@last", "@layer1")
    ]
    everywhere = ["mlm.loss", "mlm.accuracy", "mlm.loss_by_counts", *probes, "squad.em", "squad.f1"]
    everywhere += [f"glue.{task}" for task in recipe.evaluation.glue.tasks]
    everywhere += [f"linguistic.{probe}" for probe in recipe.evaluation.linguistic.probes]
    table = [
        "ap.variance_2pc",
        "ap.variance_2pc_random",
        "ap.variance_2pc_excess",
        "ap.dct_low4_pc1",
        "ap.dct_low4_pc2",
    ]
    streams = [f"probe.token_r2.{stream}{where}" for stream in ("ap", "sem") for where in ("", "@layer0")]
    heads = [f"heads.{name}{kind}" for name in ("semantic", "ap", "rp") for kind in ("", "_fraction")]
    wanted = {
        "ap": [*everywhere, *table, "inter.ap_r2@layer0"],
        "dstg": [*everywhere, *table, *streams, *heads],
    }
    for arm, names in wanted.items():
        assert set(names) <= set(results.arms[arm].metrics), arm
        for name in names:
            assert math.isfinite(results.arms[arm].metrics[name].mean or 0.0), (arm, name)
    assert results.arms["dstg"].metrics["probe.token_r2"].ci95 is not None, "documents are drawn anew"


def test_the_page_says_of_each_finding_whether_it_is_met(run: tuple[Recipe, Results, Path]) -> None:
    recipe, _, folder = run
    assert recipe.reference is not None
    page = write_report([folder / "results.json"], folder).read_text(encoding="utf-8")
    docs = write_docs_page([folder / "results.json"], folder / "docs" / "page.md").read_text(encoding="utf-8")
    measured = [target for target in recipe.reference.targets if {target.arm, target.baseline} <= {"ap", "dstg", None}]
    assert {target.says[0] for target in measured} == set("1234"), "all four findings"
    for text in (page, docs):
        assert all(target.says.replace("'", "&#39;") in text or target.says in text for target in measured)
