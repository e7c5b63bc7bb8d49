"""ShadowPEFT beside a host: nothing at first, trained and resumed as a phase says, saved beside the bare host, read back the same.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tree_support"))

import tree_cases as cases  # found through the line above

import keel
from keel.data.questions import Question
from keel.errors import KeelError
from keel.evaluation.options import Request, option_scores, reference_scores
from keel.model import KeelForCausalLM
from keel.training import Recipe, parse_recipe, train
from keel.training.adapters import set_trainable
from keel.training.build import build_model
from keel.training.labelled import head_at_labels
from keel.training.questions import QuestionData
from keel.training.shadow import load_with_shadow, save_with_shadow, shadow_of
from keel.training.tree_sections import Shadow
from keel.trees.fields import reader_of

pytest.importorskip("peft")
TOKENIZER = cases.tokenizer()
IDS = torch.arange(1, 13)[None]


def shadowed(**changes: Any) -> Recipe:
    """A recipe of two arms: one trains the host, the other puts a shadow beside it."""
    given = cases.staged_recipe()
    given["arms"]["shadow"] = {"host_of": "host", "shadow": {"rank": 2, "dropout": 0.0}, **changes}
    given["phases"] = [
        {
            "name": "adaptation",
            "steps": 2,
            "batch_size": 2,
            "window": 400,
            "learning_rate": 1e-2,
            "learns": "questions",
            "validate_every": 2,
            "checkpoint_every": 1,
            "trainable": "adapters",
        }
    ]
    return parse_recipe(given)


def made(tmp_path: Path) -> tuple[KeelForCausalLM, KeelForCausalLM]:
    """A bare host and the same with an untrained shadow."""
    host: Any = build_model(shadowed(), "host", 0, TOKENIZER)
    host.save_pretrained(tmp_path / "lent")
    model: Any = build_model(shadowed(), "shadow", 0, TOKENIZER, trained_host=tmp_path / "lent")
    return host.eval(), model.eval()


def moved(model: KeelForCausalLM) -> KeelForCausalLM:
    """Let the shadow have learnt something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "shadow_up" in name:
                torch.nn.init.normal_(parameter, std=3.0)
    return model


def test_an_untrained_shadow_changes_nothing_and_alone_learns(tmp_path: Path) -> None:
    host, model = made(tmp_path)
    assert torch.equal(model(IDS).logits, host(IDS).logits)
    set_trainable(model, "adapters")
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert learning and all("shadow_" in name for name in learning)
    assert any("shadow_backbone" in name for name in learning) and any("shadow_up" in name for name in learning)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is None for name, p in model.named_parameters() if "shadow_" not in name)
    assert (moved(model)(IDS).logits - host(IDS).logits).abs().max() > 1e-2


def test_the_loss_holds_the_shadows_own(tmp_path: Path) -> None:
    host, model = made(tmp_path)
    base = model.host.base_model
    state_BTD = base.shadow_projection["default"](
        base.shadow_backbone["default"](inputs_embeds=base.get_input_embeddings()(IDS)).last_hidden_state
    )
    own_TV = model.logits_from_hidden(state_BTD)[0, :-1]
    expected = host(IDS, labels=IDS).loss + 0.05 * torch.nn.functional.cross_entropy(own_TV, IDS[0, 1:])
    output = model(IDS, labels=IDS)
    torch.testing.assert_close(output.loss, expected)
    # It has a name: a perplexity of validation, and the logged one, leave out what has.
    torch.testing.assert_close(output.loss - output.losses["shadow"], host(IDS, labels=IDS).loss)
    labels = IDS.masked_fill(IDS < 9, -100)
    alone = model(IDS, labels=labels, num_items_in_batch=4, **head_at_labels(labels)).loss
    torch.testing.assert_close(alone, model(IDS, labels=labels, num_items_in_batch=4).loss)


def test_saved_beside_the_bare_host_and_read_back(tmp_path: Path) -> None:
    host, model = made(tmp_path)
    expected = moved(model)(IDS).logits
    save_with_shadow(model, tmp_path / "model")
    assert torch.equal(model(IDS).logits, expected)  # saving takes the shadow aside and puts it back
    again = load_with_shadow(KeelForCausalLM, tmp_path / "model")
    assert torch.equal(again(IDS).logits, expected)
    assert shadow_of(again.host) == Shadow(rank=2, dropout=0.0)
    assert torch.equal(keel.load(tmp_path / "model" / "host")(IDS).logits, host(IDS).logits)
    with pytest.raises(KeelError):
        keel.load(tmp_path / "model")
    (tmp_path / "model" / "shadow.json").write_text('{"rank": 2, "layers": 2}')
    with pytest.raises(KeelError, match="not the weights of the shadow"):
        load_with_shadow(KeelForCausalLM, tmp_path / "model")


def test_options_from_the_cache_of_a_prompt_score_as_alone(tmp_path: Path) -> None:
    model = moved(made(tmp_path)[1]).double()
    requests = [Request("The cat sat", [" on the mat", " by", " under a very large tree"]), Request("So", [" it is"])]
    reader = reader_of(TOKENIZER)
    for found, expected in zip(
        option_scores(model, reader, requests), reference_scores(model, reader, requests), strict=True
    ):
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_phase_trains_it_and_resumes_where_it_stopped(tmp_path: Path) -> None:
    asked = [Question(text=f"Are {n} cats asleep?", options=("all", "none"), answer=n % 2) for n in range(8)]
    questions = QuestionData(train=asked[2:], valid=asked[:2], reader=reader_of(TOKENIZER), num_layers=2)

    class Data:
        tokenizer = TOKENIZER

    def run(name: str, *, stop: bool = False) -> Any:
        def progress(event: dict[str, Any]) -> None:
            if stop and event["event"] == "step" and event["step"] == 2:
                raise KeyboardInterrupt

        return train(
            made(tmp_path)[1].train(), Data(), shadowed().phases_of("shadow"), arm="shadow", seed=0, folder=tmp_path / name,
            device="cpu", resume=True, progress=progress, questions=questions,
        )  # type: ignore[arg-type]  # fmt: skip

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", stop=True)
    assert not (tmp_path / "parts" / "model").exists()
    run("parts")
    whole, parts = (load_file(tmp_path / name / "model" / "shadow.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    again = load_with_shadow(KeelForCausalLM, tmp_path / "whole" / "model")
    assert (again(IDS).logits - made(tmp_path)[0](IDS).logits).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"adapters": {}}, "stands for adapters and streams"),
        ({"shadow": {"rank": 0}}, "rank"),
        ({"shadow": None}, "a phase trains adapters, but the arm has none"),
        ({"phases": [{"name": "other", "steps": 1, "learning_rate": 1e-3}]}, "no phase trains them"),
    ],
)
def test_what_a_recipe_cannot_say(arm: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        shadowed(**arm)
