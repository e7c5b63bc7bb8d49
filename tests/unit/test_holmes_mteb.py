"""Published benchmarks of encoders: datasets in Holmes's format, an encoder as mteb takes it, on made-up data."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from keel.data.masking import with_mask_tokens
from keel.encoder import DstgConfig, DstgForMaskedLM
from keel.errors import KeelError
from keel.evaluation import embedding
from keel.evaluation.embedding import MeanPoolingEncoder, mteb_scores
from keel.evaluation.holmes import HolmesDataset, find_holmes, holmes_scores, read_holmes, sample_vectors, score_holmes

WORDS = [f"w{index}" for index in range(12)]


def tokenizer_of() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["[UNK]", *WORDS])}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_mask_tokens(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


def model_of(tokenizer: PreTrainedTokenizerFast, position: str = "dstg") -> DstgForMaskedLM:
    torch.manual_seed(0)
    config = DstgConfig(
        vocab_size=len(tokenizer), semantic_size=16, position_size=4, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, position=position, pad_token_id=tokenizer.pad_token_id, initializer_range=0.5,
        special_token_ids=[tokenizer.cls_token_id, tokenizer.sep_token_id],
    )  # fmt: skip
    return DstgForMaskedLM(config)


def write_dataset(
    folder: Path, kind: str, rows: list[dict[str, Any]], num_labels: int = 2, file: str = "samples.csv"
) -> Path:
    folder.mkdir(parents=True)
    config = f"probe_name: made-up\nprobe_task_type: {kind}\ncontrol_task_type: NONE\nhyperparameters:\n  num_labels: [{num_labels}]\n"
    (folder / "config-none.yaml").write_text(config, encoding="utf-8")
    with (folder / file).open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, ["id", "inputs", "context", "label", "set-0"])
        writer.writeheader()
        sets = ["train", "dev", "test"]
        writer.writerows(
            {"id": at, "context": "", "label": 0, "set-0": sets[at % 3], **row} for at, row in enumerate(rows)
        )
    return folder


def state_of(model: DstgForMaskedLM, tokenizer: PreTrainedTokenizerFast, text: str) -> np.ndarray:
    """The last state of every token of a text, [CLS] and [SEP] not among them."""
    ids = torch.tensor([[tokenizer.cls_token_id, *tokenizer(text)["input_ids"], tokenizer.sep_token_id]])
    with torch.no_grad():
        states: np.ndarray = model.eval()(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, 1:-1].numpy()
    return states


FIRST, SECOND = "w1 w2 w3", "w4 w5"
# What a sample has, and from which text and which of its tokens each part of its vector is the mean.
KIND_CASES: dict[str, tuple[Any, list[tuple[str, list[int]]]]] = {
    "SENTENCE": ([FIRST], [(FIRST, [0, 1, 2])]),
    "SENTENCE_PAIR_BI": ([FIRST, SECOND], [(FIRST, [0, 1, 2]), (SECOND, [0, 1])]),
    "SENTENCE_PAIR_CROSS": ([FIRST, SECOND], [(f"{FIRST} [SEP] {SECOND}", [0, 1, 2, 3, 4, 5])]),
    "SENTENCE_TOKENS": ([("w2", 0, 3, 5)], [(FIRST, [1])]),
    "SENTENCE_PAIR_TOKENS_BI": ([("w3", 0, 6, 8), ("w4", 1, 0, 2)], [(FIRST, [2]), (SECOND, [0])]),
    "SENTENCE_PAIR_TOKENS_CROSS": (
        [("w3", 0, 6, 8), ("w5", 1, 3, 5)],
        [(f"{FIRST} [SEP] {SECOND}", [2]), (f"{FIRST} [SEP] {SECOND}", [5])],
    ),
    "SENTENCE_SPANS": ([("w1", 0, 0, 2, 0), ("w2", 0, 3, 5, 0), ("w3", 0, 6, 8, 1)], [(FIRST, [0, 1]), (FIRST, [2])]),
}


@pytest.mark.parametrize("kind", KIND_CASES)
@pytest.mark.parametrize("file", ["samples.csv", "folds.csv"])
def test_vectors_of_every_kind_of_task(tmp_path: Path, kind: str, file: str) -> None:
    inputs, parts = KIND_CASES[kind]
    context = str([FIRST, SECOND]) if "TOKENS" in kind or "SPANS" in kind else ""
    folder = write_dataset(tmp_path / "one", kind, [{"inputs": str(inputs), "context": context}] * 3, file=file)
    tokenizer = tokenizer_of()
    model, dataset = model_of(tokenizer), read_holmes(folder)
    assert find_holmes(str(tmp_path)) == [folder] and (dataset.name, dataset.numeric) == ("made-up", False)
    vectors = sample_vectors(model, tokenizer, dataset, max_length=32)
    expected = np.concatenate([state_of(model, tokenizer, text)[tokens].mean(axis=0) for text, tokens in parts])
    np.testing.assert_allclose(vectors, np.stack([expected] * 3), atol=1e-5)


@pytest.mark.parametrize(("num_labels", "unit"), [(2, "F1"), (3, "F1"), (1, "Pearson's r")])
def test_a_probe_tells_the_words_that_make_the_label(tmp_path: Path, num_labels: int, unit: str) -> None:
    random = np.random.default_rng(0)
    rows = []
    for _ in range(180):
        label = int(random.integers(max(2, num_labels)))
        words = [f"w{label}", *random.choice(WORDS[4:], 3)]
        rows.append({"inputs": str([" ".join(words)]), "label": label + (0.5 if num_labels == 1 else 0)})
    folder = write_dataset(tmp_path / "one", "SENTENCE", rows, num_labels)
    tokenizer = tokenizer_of()
    (metric,) = holmes_scores(model_of(tokenizer), tokenizer, [folder], max_length=32)
    assert metric.name == "holmes.made-up" and metric.unit == unit and metric.value > 0.75


def test_scores_are_those_of_the_benchmark() -> None:
    """With channels that tell all but one of the test samples: F1 of class 1 for two classes, the mean of all for three."""

    def score(labels: list[int]) -> float:
        states = np.eye(3, dtype=np.float32)[labels]
        truth = [*labels[:-1], (labels[-1] + 1) % (max(labels) + 1)]
        dataset = HolmesDataset(
            name="x", kind="SENTENCE", numeric=False, inputs=(), contexts=(), labels=tuple(map(float, [*labels, *labels, *truth])),
            sets=("train",) * len(labels) + ("dev",) * len(labels) + ("test",) * len(labels),
        )  # fmt: skip
        return score_holmes(dataset, np.concatenate([states] * 3)).value

    assert score([0, 0, 1, 1, 1]) == pytest.approx(2 * 2 / (2 * 2 + 1))  # one of three is a 0 in truth
    # Told 0 0 1 1 2 2, in truth 0 0 1 1 2 0: F1 of 4/5, 1 and 2/3.
    assert score([0, 0, 1, 1, 2, 2]) == pytest.approx((4 / 5 + 1 + 2 / 3) / 3)


WRONG_DATASETS = {
    "kind": ("SENTENCES", {}, "did you mean 'SENTENCE'"),
    "code": ("SENTENCE", {"inputs": "open('x')"}, "not in the format of Holmes"),
    "label": ("SENTENCE", {"label": "high"}, "not in the format of Holmes"),
    "sets": ("SENTENCE", {"set-0": "train"}, "no sample of the set 'dev'"),
}


@pytest.mark.parametrize(("kind", "change", "message"), WRONG_DATASETS.values(), ids=WRONG_DATASETS)
def test_other_files_are_refused(tmp_path: Path, kind: str, change: dict[str, str], message: str) -> None:
    folder = write_dataset(tmp_path / "one", kind, [{"inputs": str([FIRST]), **change}] * 3)
    with pytest.raises(KeelError, match=message):
        read_holmes(folder)


def test_a_folder_without_datasets(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="no Holmes dataset"):
        find_holmes(str(tmp_path))


@pytest.mark.parametrize(("position", "head"), [("dstg", "semantic"), ("dstg", "full"), ("rope", "semantic")])
def test_a_text_is_the_mean_of_what_the_heads_read(position: str, head: str) -> None:
    tokenizer = tokenizer_of()
    config = model_of(tokenizer, position).config
    config.mlm_head = head
    model = DstgForMaskedLM(config)
    encoder = MeanPoolingEncoder(model, tokenizer, max_length=8, batch_size=2)
    texts = ["w1 w2 w3 w4", "w5", "w6 w7", " ".join(WORDS)]
    found = encoder.encode([{"text": texts[:3]}, {"text": texts[3:]}], task_metadata=None)
    assert found.shape == (4, 20 if head == "full" else 16) and found.dtype == np.float32
    for row, text in enumerate(texts):
        ids = [tokenizer.cls_token_id, *tokenizer(text)["input_ids"][:6], tokenizer.sep_token_id]
        with torch.no_grad():
            state = model.eval().encoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(found[row], state[:, : encoder.width].mean(dim=0), atol=1e-5)
    cosines = encoder.similarity(found, found[:2])
    assert cosines.shape == (4, 2) and cosines[0, 0] == pytest.approx(1.0) and -1 <= float(cosines[2, 1]) < 0.999
    torch.testing.assert_close(
        encoder.similarity_pairwise(found[:2], found[1:3]), encoder.similarity(found, found)[[0, 1], [1, 2]]
    )
    with pytest.raises(KeelError, match="one slash"):
        MeanPoolingEncoder(model, tokenizer, name="keel")


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="mteb")

    monkeypatch.setattr(embedding.importlib, "import_module", missing)
    tokenizer = tokenizer_of()
    with pytest.raises(KeelError, match=r"pip install 'keel\[mteb\]'"):
        mteb_scores(MeanPoolingEncoder(model_of(tokenizer), tokenizer), ["STS12"])


def test_mteb_runs_a_task_that_is_built_in_memory() -> None:
    """Texts that share words are alike, so that even an untrained encoder ranks the pairs."""
    pytest.importorskip("mteb", reason="the extra keel[mteb] is not installed")
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class MadeUp(AbsTaskSTS):
        metadata = TaskMetadata(
            name="MadeUp", type="STS", main_score="cosine_spearman", description="made up", reference="https://example.com",
            dataset={"path": "none", "revision": "none"}, category="t2t", eval_splits=["test"], eval_langs=["eng-Latn"],
            date=("2022-12-22", "2022-12-22"), dialect=[], domains=[], task_subtypes=[], license="cc0-1.0",
            annotations_creators="derived", modalities=["text"], sample_creation="found", bibtex_citation="",
        )  # fmt: skip
        min_score, max_score = 0, 4

        def load_data(self, **about: Any) -> None:
            random = np.random.default_rng(0)
            rows: dict[str, list[Any]] = {"sentence1": [], "sentence2": [], "score": []}
            for index in range(40):
                words = random.permutation(WORDS)
                shared = index % 5
                rows["sentence1"].append(" ".join(words[:4]))
                rows["sentence2"].append(" ".join([*words[:shared], *words[4 : 8 - shared]]))
                rows["score"].append(float(shared))
            self.dataset = DatasetDict({"test": Dataset.from_dict(rows)})
            self.data_loaded = True

    tokenizer = tokenizer_of()
    encoder = MeanPoolingEncoder(model_of(tokenizer), tokenizer)
    (metric,) = mteb_scores(encoder, [MadeUp()])
    assert metric.name == "mteb.MadeUp" and 0.6 < metric.value <= 1
