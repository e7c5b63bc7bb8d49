"""Masked language modelling: what is masked, in which order, a run that resumes, recipes that cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from keel.data import MaskedCorpus, TokenCorpus, TokenStream, with_mask_tokens
from keel.encoder import DstgForMaskedLM
from keel.errors import KeelError
from keel.evaluation.masked import masked_scores
from keel.training import load_recipe, parse_recipe, read_training_report, train
from keel.training.build import build_model, matched_widths
from keel.training.schedules import BatchPlan

WORDS = 40


def tokenizer_of() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(WORDS)} | {"<end>": WORDS}
    backend = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return with_mask_tokens(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


def stream_of(count: int, seed: int) -> TokenStream:
    ids = np.random.default_rng(seed).integers(0, WORDS, size=count).astype(np.int32)
    ids[9::50] = WORDS  # a text ends here
    return TokenStream(ids=ids, starts=np.array([0]), token_bytes=np.ones(count, dtype=np.uint16), names=["made up"])


def corpus_of(rate: float = 0.2) -> MaskedCorpus:
    streams = {name: stream_of(900, seed) for seed, name in enumerate(("train", "valid", "test"))}
    return MaskedCorpus.of(TokenCorpus(**streams, tokenizer=tokenizer_of(), fingerprint="made up"), rate)


def test_a_tokenizer_gets_what_it_lacks_and_keeps_what_it_has() -> None:
    tokenizer = tokenizer_of()
    assert (tokenizer.eos_token, tokenizer.cls_token, tokenizer.mask_token) == ("<end>", "[CLS]", "[MASK]")
    assert len(tokenizer) == WORDS + 1 + 4 == len(with_mask_tokens(tokenizer))
    with pytest.raises(KeelError, match="a tokenizer with a cls_token"):
        tokenizer.cls_token = None
        MaskedCorpus.of(TokenCorpus(*[stream_of(99, 0)] * 3, tokenizer=tokenizer, fingerprint=""), 0.2)


def test_a_share_of_a_window_is_masked_and_nothing_else_changes() -> None:
    corpus = corpus_of()
    tokenizer, windows = corpus.tokenizer, corpus.windows(corpus.train, 32, 32, seed=1)
    assert len(windows) == 900 // 30
    for index in range(len(windows)):
        window = windows[index]
        ids, labels = window["input_ids"], window["labels"]
        text = torch.from_numpy(corpus.train.ids[30 * index : 30 * index + 30].astype(np.int64))
        assert (int(ids[0]), int(ids[-1])) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        masked = labels != -100
        assert int(masked.sum()) == round(0.2 * int((text != WORDS).sum()))
        assert torch.equal(masked, ids == tokenizer.mask_token_id)
        assert torch.equal(torch.where(masked, labels, ids)[1:-1], text)
        assert WORDS not in labels.tolist()


def test_masks_depend_on_seed_and_pass_alone() -> None:
    corpus = corpus_of()
    windows, again = (corpus.windows(corpus.train, 32, 32, seed=1) for _ in range(2))
    other = corpus.windows(corpus.train, 32, 32, seed=2)
    torch.manual_seed(5)
    assert torch.equal(windows[3]["labels"], again[3]["labels"])
    assert not torch.equal(windows[3]["labels"], other[3]["labels"])
    in_second_pass = windows[3 + len(windows)]
    assert not torch.equal(windows[3]["labels"], in_second_pass["labels"])
    ids = lambda window: torch.where(window["labels"] == -100, window["input_ids"], window["labels"])  # noqa: E731
    assert torch.equal(ids(windows[3]), ids(in_second_pass))


def test_every_place_is_masked_in_time_at_the_rate() -> None:
    corpus = corpus_of(rate=0.3)
    windows = corpus.windows(corpus.train, 32, 32, seed=0)
    text = torch.from_numpy(corpus.train.ids[30:60].astype(np.int64))
    share = sum((windows[1 + 30 * k]["labels"][1:-1] != -100).double() for k in range(600)) / 600
    assert isinstance(share, Tensor)
    wanted = round(0.3 * int((text != WORDS).sum())) / int((text != WORDS).sum())
    assert (share[text != WORDS] - wanted).abs().max() < 5 * math.sqrt(0.3 * 0.7 / 600)
    assert not share[text == WORDS].any()


def test_the_order_of_the_windows_counts_its_passes() -> None:
    plain = BatchPlan(num_windows=7, steps=5, batch_size=4, seed=1)
    counted = BatchPlan(num_windows=7, steps=5, batch_size=4, seed=1, count_passes=True)
    entries = [counted.window(entry) for entry in range(20)]
    assert [entry % 7 for entry in entries] == [plain.window(entry) for entry in range(20)]
    assert [entry // 7 for entry in entries] == [entry // 7 for entry in range(20)]


def test_windows_too_short_for_their_ends_are_refused() -> None:
    corpus = corpus_of()
    with pytest.raises(KeelError, match="a masked window of 3 tokens"):
        corpus.windows(corpus.train, 3, 3, seed=0)


class Interrupted(Exception):
    pass


def trained(folder: Path, arm: str, stop_at: int | None = None, resume: bool = False) -> dict[str, Tensor]:
    recipe = load_recipe("dstg/pretrain", "tiny")
    corpus = corpus_of()
    model = build_model(recipe, arm, 0, corpus.tokenizer)
    assert isinstance(model, DstgForMaskedLM)

    def progress(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == stop_at:
            raise Interrupted

    train(model, corpus, recipe.phases, arm=arm, seed=0, folder=folder, device="cpu", resume=resume, progress=progress)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_bias_by_position_learns_at_a_rate_of_its_own(tmp_path: Path) -> None:
    """After one step of Adam a number has moved by its learning rate, whatever its gradient; weight decay is off here."""
    recipe, corpus = load_recipe("dstg/pretrain", "tiny"), corpus_of()
    moved = {}
    for rate in (None, 0.05):
        torch.manual_seed(0)
        model = build_model(recipe, "dstg", 0, corpus.tokenizer)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        fields = {"steps": 1, "warmup_steps": 0, "weight_decay": 0.0, "bias_learning_rate": rate}
        phase = recipe.phases[0].model_copy(update=fields)
        train(model, corpus, [phase], arm="dstg", seed=0, folder=tmp_path / str(rate), device="cpu")
        after = model.state_dict()
        for part in ("relative_bias.bucket", "mlp.down.weight"):
            name = next(name for name in before if name.endswith(part))
            moved[rate, part] = float((after[name] - before[name]).abs().max()) / phase.learning_rate
    wanted = 0.05 / recipe.phases[0].learning_rate
    assert moved[None, "relative_bias.bucket"] == pytest.approx(1.0, rel=1e-2)
    assert moved[0.05, "relative_bias.bucket"] == pytest.approx(wanted, rel=1e-2)
    assert moved[0.05, "mlp.down.weight"] == pytest.approx(moved[None, "mlp.down.weight"], rel=1e-2)


def test_a_resumed_run_ends_bitwise_like_an_uninterrupted_one(tmp_path: Path) -> None:
    """Through the random shift of the positions too, which is drawn in the forward pass."""
    whole = trained(tmp_path / "whole", "dstg")
    with pytest.raises(Interrupted):
        trained(tmp_path / "cut", "dstg", stop_at=3)
    torch.manual_seed(99)
    resumed = trained(tmp_path / "cut", "dstg", resume=True)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    one, two = (read_training_report(tmp_path / which) for which in ("whole", "cut"))
    assert one is not None and two is not None and one.curve == two.curve and len(one.curve) == 2
    saved = DstgForMaskedLM.from_pretrained(tmp_path / "cut" / "model").state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in whole.items())


def test_arms_have_the_parameters_of_the_largest() -> None:
    recipe, tokenizer = load_recipe("dstg/pretrain", "small"), tokenizer_of()
    widths = matched_widths(recipe, tokenizer)
    counts = {
        arm: sum(p.numel() for p in build_model(recipe, arm, 0, tokenizer, widths[arm]).parameters())
        for arm in recipe.arms
    }
    assert max(counts.values()) - min(counts.values()) <= 6 * 3 * 256
    unmatched = load_recipe("dstg/pretrain", "small", ["match_parameters=false"])
    assert set(matched_widths(unmatched, tokenizer).values()) == {None}
    model = build_model(unmatched, "rope", 0, tokenizer)
    assert model.config.special_token_ids == [tokenizer.cls_token_id, tokenizer.sep_token_id]
    assert sum(p.numel() for p in model.parameters()) < 0.97 * counts["dstg"]


class Guesser(nn.Module):
    """Gives every token the same logits, which favour token 0."""

    def forward(self, input_ids: Tensor) -> Any:
        logits = torch.zeros(*input_ids.shape, 4)
        logits[..., 0] = math.log(3)
        return type("Output", (), {"logits": logits})


def test_the_scores_of_a_model_that_is_known() -> None:
    windows = [
        {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([-100, 0, 1])},
        {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([-100, 0, -100])},
    ]
    loss, accuracy, counted = masked_scores(Guesser(), windows, "mlm", seen_V=torch.tensor([2, 0, 0, 0]))
    assert (loss.name, accuracy.name, counted.name) == ("mlm.loss", "mlm.accuracy", "mlm.loss_by_counts")
    assert counted.value == pytest.approx(loss.value), "counts, with one more of each, are what the guesser goes by"
    assert loss.value == pytest.approx((2 * math.log(2) + math.log(6)) / 3)
    assert accuracy.value == pytest.approx(2 / 3)
    with pytest.raises(KeelError, match="no windows"):
        masked_scores(Guesser(), [], "mlm", seen_V=torch.ones(4))


WRONG = {
    "no masking": ({"data.masking": None}, "is an encoder, which learns from masked text; add data.masking"),
    "masking of a language model": ({"host": {"family": "llama", "hidden_size": 16}}, "is no encoder; remove it"),
    "rate": ({"data.masking.rate": 1.0}, "data.masking.rate: input should be less than 1"),
    "unknown position": ({"arms.ap.host": {"position": "apx"}}, "arms.ap.host: DstgConfig: unknown position 'apx'"),
    "unknown field": (
        {"arms.ap.host": {"positon": "ap"}},
        "arms.ap.host.positon: unknown field of dstg; did you mean 'position'",
    ),
    "streams": ({"arms.ap.streams": {"structural": {}}}, "arms.ap.streams: an encoder has none"),
    "window": (
        {"host.max_position_embeddings": 16},
        "phase 'train': window 32 is longer than host.max_position_embeddings 16",
    ),
    "other measurement": (
        {"evaluation": {"blocks": {"length": 32, "count": 2}}},
        "evaluation.blocks: is measured on text",
    ),
    "part of a host": (
        {"phases.0.trainable": "host"},
        "trainable, label_smoothing and stream_learning_rate are not for",
    ),
    "length of the masked text": ({"evaluation.masked.length": 65}, "evaluation.masked.length: 65 is longer"),
    "length of a probe": (
        {"evaluation.heads": {"documents": 4, "length": 63}},
        "evaluation.heads.length, with [CLS] and [SEP]: 65 is longer than host.max_position_embeddings 64",
    ),
    "gates": ({"evaluation.gates": {}}, "evaluation.gates: an encoder has none"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_recipes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    given = load_recipe("dstg/pretrain", "tiny").model_dump(mode="json")
    given["arms"] = {name: arm for name, arm in given["arms"].items() if name in ("ap", "dstg")}
    parse_recipe(given)
    for path, value in changes.items():
        *parents, last = path.split(".")
        target: Any = given
        for key in parents:
            target = target[int(key) if key.isdigit() else key]
        target[last] = value
    if given["host"]["family"] == "llama":
        for arm in given["arms"].values():
            arm["host"] = {}
        given["evaluation"] = {"masked": {"length": 32, "count": 2}}
    with pytest.raises(KeelError) as caught:
        parse_recipe(given)
    assert message in str(caught.value)
