"""The command line: what it prints, what it refuses in one line, which exit code it ends with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import keel
from keel import cli, trial
from keel.data import CorpusConfig, TokenCorpus, TokenStream, load_corpus, train_bpe
from keel.errors import KeelError
from keel.evaluation.results import Arm, Metric, Provenance, Results, write_results
from keel.training.recipe import Recipe, list_recipes

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("try", "run", "recipes", "report", "generate", "export", "doctor")
WORDS = ["tide", "keel", "mast", "anchor", "rope", "deck", "harbour", "wind", "sail", "stone", "river", "light"]


class Ended(NamedTuple):
    """How a call of ``keel`` ended."""

    code: int
    out: str
    err: str


Keel = Callable[..., Ended]


@pytest.fixture
def run_keel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Keel:
    """Call ``keel`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "out", cli.Console(highlight=False, soft_wrap=True, width=200))

    def call(*words: object) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return call


def write_text(folder: Path, files: int, words: int) -> Path:
    """Write files of made-up sentences."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for number in range(files):
        sentences = [" ".join(draw.choice(WORDS, 8)) + ".\n" for _ in range(words // 8)]
        (folder / f"{number:02}.txt").write_text("".join(sentences), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "notes", files=12, words=240)


@pytest.fixture(scope="module")
def tokenizer(text: Path) -> PreTrainedTokenizerFast:
    return train_bpe(load_corpus(CorpusConfig(source=str(text))), 300)


@pytest.fixture(scope="module")
def host(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer beside it."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=64, bos_token_id=None, **sizes))
    return save(model, tokenizer, tmp_path_factory.mktemp("host") / "tiny-llama")


@pytest.fixture(scope="module")
def keel_checkpoint(host: Path, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same host with a stream that has an effect."""
    bare = AutoModelForCausalLM.from_pretrained(host)
    torch.manual_seed(2)
    model = keel.attach(bare, keel.StructuralStream(init="paper"))
    with torch.no_grad():
        for parameter in model.streams.parameters():
            parameter.normal_()
    return save(model, tokenizer, tmp_path_factory.mktemp("keel") / "model")


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# -- help --------------------------------------------------------------------------------------------------------------


def test_the_command_line_imports_nothing_slow() -> None:
    """The rooms below are imported by the commands; the package around cli is left out, since this is about cli alone."""
    source = ROOT / "src" / "keel"
    code = (
        "import sys, types; package = types.ModuleType('keel'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['keel'] = package; import keel.cli\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(source)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_names_every_command_and_each_has_an_example(run_keel: Keel) -> None:
    page = run_keel("--help")
    assert page.code == 0 and all(f" {name} " in page.out for name in COMMANDS)
    assert run_keel().out.split() == page.out.split(), "keel without a command shows its help"
    for name in COMMANDS:
        help_page = run_keel(name, "--help")
        assert help_page.code == 0 and f"Example:  keel {name}" in help_page.out


def test_python_m_keel_is_keel_and_its_help_is_plain_where_colours_are_refused() -> None:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}
    call = [sys.executable, "-m", "keel", "run", "--help"]
    done = subprocess.run(call, capture_output=True, text=True, check=True, env=environment)
    assert "\x1b[" not in done.stdout and "Usage: keel run" in done.stdout and "--resume" in done.stdout


def test_the_version_is_printed(run_keel: Keel) -> None:
    assert run_keel("--version").out == f"keel {keel.__version__}\n"


def test_recipes_and_doctor_name_every_recipe_and_scale(run_keel: Keel) -> None:
    listed, examined = run_keel("recipes"), run_keel("doctor")
    assert listed.code == examined.code == 0
    for name in list_recipes():
        assert name in listed.out and name in examined.out
    assert "S-Former, Table 2, Figs. 3 and 4" in listed.out
    for what in (
        "Python",
        "torch ",
        "transformers",
        "memory",
        "GPU",
        "bfloat16",
        "torch.compile",
        "cache",
        "data root",
    ):
        assert what in examined.out


def test_doctor_ends_with_1_where_the_cache_cannot_be_written(run_keel: Keel, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Path("blocked").absolute()
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("KEEL_CACHE", str(blocked / "cache"))
    ended = run_keel("doctor")
    assert ended.code == 1 and ended.err.startswith("error: cache")


# -- bad input ---------------------------------------------------------------------------------------------------------


def broken(host: Path, folder: Path, change: Callable[[Path], object]) -> Path:
    """A copy of a checkpoint, changed."""
    shutil.copytree(host, folder)
    change(folder)
    return folder


def rewrite(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BAD_CALLS: dict[str, tuple[str, str]] = {
    "no such command": ("rum", "Did you mean 'run'"),
    "no such option": ("run demo --sede 1", "--sede"),
    "missing argument": ("run", "recipe"),
    "missing option": ("try --host {host}", "--corpus"),
    "no such recipe": ("run demos", "did you mean 'demo'"),
    "no such scale": ("run demo --scale huge", "huge"),
    "recipe is a text": ("run {text}/00.txt", "mapping"),
    "misspelt field": ("run demo --set phases.train.stesp=3", "did you mean 'steps'"),
    "contradiction": ("run demo --set phases.train.stride=999", "stride 999"),
    "change without a value": ("run demo --set seeds", "a.b=value"),
    "no such arm": ("run demo --scale tiny --only ropes", "did you mean 'rope'"),
    "no seeds": ("run demo --seeds 0", "--seeds"),
    "a GPU that is not there": ("run demo --scale tiny --device cuda", "no usable GPU"),
    "no such corpus": ("run demo --scale tiny --set data.corpus.source=./nowhere", "nowhere does not exist"),
    "a window longer than the text": (
        "run demo --scale tiny --set data.corpus.source={text} --set phases.train.window=50000",
        "a window of 50,000 tokens does not fit",
    ),
    "a stretch longer than the text": (
        "run demo --scale tiny --set data.corpus.source={text} --set evaluation.extrapolation.lengths=[32,90000]",
        "the split has",
    ),
    "no such checkpoint": ("generate ./nowhere hello", "does not exist"),
    "folder without a model": ("generate {text} hello", "no config.json"),
    "file as checkpoint": ("generate {host}/config.json hello", "is a file"),
    "truncated weights": ("generate {truncated} hello", "cannot be loaded"),
    "architecture of nobody": ("generate {unknown} hello", "no usable config.json"),
    "code of its own": ("generate {code} hello", "no usable config.json"),
    "no tokenizer": ("generate {bare} hello", "no tokenizer"),
    "streams alone": ("generate {streams} hello", "streams alone"),
    "empty prompt": ("generate {host} ''", "no token"),
    "no stream of that name": ("try --host {host} --corpus {text} --stream structure", "did you mean 'structural'"),
    "no budget": ("try --host {host} --corpus {text} --budget 0", "more than 0"),
    "small budget": ("try --host {host} --corpus {text} --budget 0.001", "at least 10 are needed"),
    "try without a host": ("try --host ./nowhere --corpus {text}", "does not exist"),
    "try without a corpus": ("try --host {host} --corpus ./nowhere", "does not exist"),
    "try on an empty corpus": ("try --host {host} --corpus {empty}", "empty"),
    "try on a short corpus": ("try --host {host} --corpus {short}", "too short"),
    "try an unsupported host": ("try --host {bert} --corpus {text}", "architecture 'bert'"),
    "try a host with streams": ("try --host {keel} --corpus {text}", "already has streams"),
    "try a quantised host": ("try --host {quantised} --corpus {text}", "quantised"),
    "try over another run": ("try --host {host} --corpus {text} --out {taken}", "already holds a run"),
    "report of nothing": ("report ./nowhere", "nowhere"),
    "report of a damaged file": ("report {damaged}", "not JSON"),
    "several reports to nowhere": ("report {text} {text}", "--out"),
    "a probe of a bare host": ("probe geometry {host} --corpus {text}", "has no streams to look at"),
    "a probe of too little text": ("probe geometry {keel} --corpus {short}", "too few for 16 rows of 256"),
    "support without a prior": ("probe support {keel} --corpus {text}", "has no margin prior"),
    "geometry of two": ("probe geometry {keel} {keel}", "it takes one, only span compares several"),
}


@pytest.fixture(scope="module")
def places(host: Path, text: Path, keel_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the table above names in braces."""
    root = tmp_path_factory.mktemp("bad")
    bare = AutoModelForCausalLM.from_pretrained(host)
    keel.attach(bare, keel.StructuralStream()).save_streams(root / "streams")
    for name, content in (
        ("empty.txt", "  \n"),
        ("short.txt", "tide keel.\nmast rope.\nwind sail.\n"),
        ("damaged.json", "{"),
    ):
        (root / name).write_text(content)
    (root / "taken").mkdir()
    (root / "taken" / "recipe.yaml").write_text("name: other\n")
    code = {"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}
    return {
        "host": host,
        "text": text,
        "keel": keel_checkpoint,
        "streams": root / "streams",
        "empty": root / "empty.txt",
        "short": root / "short.txt",
        "damaged": root / "damaged.json",
        "taken": root / "taken",
        "truncated": broken(host, root / "truncated", truncate),
        "unknown": broken(host, root / "unknown", lambda folder: rewrite(folder, model_type="nobody")),
        "code": broken(host, root / "code", lambda folder: rewrite(folder, **code)),
        "bert": broken(host, root / "bert", lambda folder: rewrite(folder, model_type="bert")),
        "quantised": broken(host, root / "quantised", lambda folder: rewrite(folder, quantization_config={"bits": 4})),
        "bare": broken(host, root / "bare", lambda folder: [path.unlink() for path in folder.glob("tokenizer*")]),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="one case is about a machine without a GPU")
@pytest.mark.parametrize(("line", "told"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_input_ends_with_2_and_one_line(line: str, told: str, places: dict[str, Path], run_keel: Keel) -> None:
    words = [word.format(**places) for word in line.split()]
    ended = run_keel(*["" if word == "''" else word for word in words])
    assert ended.code == 2
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1 and "Traceback" not in ended.err
    assert told in ended.err
    assert ended.out == "" and not list(Path().glob("runs/**/results.json"))


def test_debug_shows_where(run_keel: Keel) -> None:
    with pytest.raises(KeelError, match="did you mean 'demo'"):
        cli.main(["run", "demos", "--debug"])
    assert run_keel("run", "demos").code == 2


# -- run ---------------------------------------------------------------------------------------------------------------


class Calls:
    """Stands in for ``run_experiment``: keeps what it was called with, then does what it is told."""

    def __init__(self, end: Callable[[Path], object]) -> None:
        self.end, self.recipe, self.options = end, None, {}

    def __call__(self, recipe: Recipe, folder: Path, **options: Any) -> None:
        self.recipe, self.options = recipe, {"folder": folder, **options}
        self.end(folder)


def begin_and(error: BaseException) -> Callable[[Path], None]:
    def end(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
        raise error

    return end


def finish(folder: Path) -> None:
    write_results(results(), folder / "results.json")


def results(recipe: str = "demo") -> Results:
    """A results file with a stream that helped."""

    def arm(label: str, value: float, streams: list[str]) -> Arm:
        metric = Metric(
            values=[value], mean=value, ci95=(value - 1, value + 1), unit="perplexity per token", higher_is_better=False
        )
        return Arm(
            label=label,
            streams=streams,
            params_total=10,
            params_trainable=10,
            train_tokens_per_s=1.0,
            peak_memory_bytes=1,
            metrics={"ppl@64": metric},
        )

    provenance = Provenance(
        git=None, versions={"python": "3"}, device="cpu", seeds=[0], started="2026-01-01T00:00:00+00:00", wall_s=1.0
    )
    arms = {"host": arm("RoPE", 30.0, []), "structural": arm("RoPE + stream", 20.0, ["structural"])}
    return Results(recipe=recipe, scale="tiny", title="Made up", provenance=provenance, arms=arms)


def test_run_passes_on_what_it_was_told_and_prints_the_verdict(run_keel: Keel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(finish)
    monkeypatch.setattr("keel.experiment.run_experiment", calls)
    change = ("--seeds", 3, "--set", "phases.train.steps=7")
    ended = run_keel(
        "run",
        "demo",
        "--scale",
        "tiny",
        *change,
        "--resume",
        "--device",
        "cpu",
        "--jobs",
        2,
        "--only",
        "rope",
        "--out",
        "o",
    )
    assert ended.code == 0, ended.err
    assert calls.options == {"folder": Path("o"), "resume": True, "device": "cpu", "jobs": 2, "only": ["rope"]}
    assert calls.recipe is not None
    assert calls.recipe.scale == "tiny" and calls.recipe.seeds == [0, 1, 2] and calls.recipe.phases[0].steps == 7
    assert "the stream helped: RoPE + stream" in ended.out and str(Path("o/report.html")) in ended.out
    assert Path("o/report.html").stat().st_size > 1000


def test_run_has_a_folder_of_its_own_for_each_recipe_and_scale(run_keel: Keel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(finish)
    monkeypatch.setattr("keel.experiment.run_experiment", calls)
    assert run_keel("run", "s_former/wikitext103_extrapolation", "--scale", "tiny").code == 0
    assert calls.options["folder"] == Path("runs/s_former/wikitext103_extrapolation.tiny")
    assert calls.options["resume"] is False and calls.options["device"] is None and calls.options["only"] is None


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        (begin_and(KeelError("arm 'rope', seed 0: the loss is not finite")), 1, "error: arm 'rope', seed 0"),
        (begin_and(KeyboardInterrupt()), 130, "go on with: keel run o/recipe.yaml --out o --resume"),
        (begin_and(OSError(28, "No space left on device", "o/x")), 1, "error: o/x: No space left on device"),
        (begin_and(RuntimeError("two\nlines")), 1, "error: RuntimeError: two lines (--debug shows where)"),
    ],
    ids=["a loss that is not finite", "Ctrl-C", "a full disk", "a defect"],
)
def test_a_run_that_fails_says_so_in_one_line(
    end: Callable[[Path], None], code: int, told: str, run_keel: Keel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.experiment.run_experiment", Calls(end))
    ended = run_keel("run", "demo", "--out", "o")
    assert ended.code == code and told in ended.err and ended.err.count("\n") == 1


# -- report ------------------------------------------------------------------------------------------------------------


def test_report_writes_beside_the_results_or_where_it_is_told(run_keel: Keel) -> None:
    write_results(results(), Path("a/results.json"))
    write_results(results("other"), Path("b/results.json"))
    assert run_keel("report", "a").out == f"{Path('a/report.html')}\n"
    assert run_keel("report", "a", "b/results.json", "--out", "both").code == 0
    page = Path("both/report.html").read_text(encoding="utf-8")
    assert page.count("RoPE + stream") > Path("a/report.html").read_text(encoding="utf-8").count("RoPE + stream") > 0


def test_docs_keep_the_results_and_a_page_holds_all_that_is_kept_of_its_paper(run_keel: Keel) -> None:
    for recipe, folder in (("s_former/one", "a"), ("s_former/two", "b"), ("demo", "c")):
        write_results(results(recipe), Path(folder, "results.json"))
    assert run_keel("report", "a", "c", "--docs").out.split() == ["docs/results/s_former.md", "docs/results/demo.md"]
    assert run_keel("report", "b", "--docs").out.split() == ["docs/results/s_former.md"]
    kept = sorted(
        path.relative_to("docs/results/data").as_posix() for path in Path("docs/results/data").rglob("*.json")
    )
    assert kept == ["demo.tiny.json", "s_former/one.tiny.json", "s_former/two.tiny.json"]
    page = Path("docs/results/s_former.md").read_text(encoding="utf-8")
    assert "demo" not in page and 0 < page.index("`s_former/one`") < page.index("`s_former/two`")
    # One recipe again: the other sections stay, in their order.
    write_results(results("s_former/one").model_copy(update={"title": "Again"}), Path("a/results.json"))
    run_keel("report", "a", "--docs")
    again = Path("docs/results/s_former.md").read_text(encoding="utf-8")
    assert "## Again\n" in again and again.index("`s_former/one`") < again.index("`s_former/two`")
    assert again.split("## ")[-1] == page.split("## ")[-1]


# -- generate ----------------------------------------------------------------------------------------------------------

PROMPT = "tide keel mast"


def expected(folder: Path, **options: Any) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=12, **options)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("words", "options"), [((), {}), (("--beams", "3"), {"num_beams": 3})], ids=["greedy", "beams"]
)
def test_generate_continues_with_hosts_and_with_keel_checkpoints(
    words: tuple[str, ...], options: dict[str, Any], host: Path, keel_checkpoint: Path, run_keel: Keel
) -> None:
    texts = []
    for folder in (host, keel_checkpoint):
        ended = run_keel("generate", folder, PROMPT, "--max-new-tokens", 12, *words)
        assert ended.code == 0 and ended.out.rstrip("\n") == expected(folder, **options).rstrip("\n")
        assert ended.out.startswith(PROMPT)
        texts.append(ended.out)
    assert texts[0] != texts[1], "the stream has an effect"


def test_generate_draws_by_seed(host: Path, run_keel: Keel) -> None:
    texts = [run_keel("generate", host, PROMPT, "--sample", "--seed", seed).out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


# -- try: what the plan makes of sizes and costs -------------------------------------------------------------------------


def stream_of(tokens: int) -> TokenStream:
    starts = np.arange(0, tokens, 100, dtype=np.int64)
    return TokenStream(
        ids=np.zeros(tokens, np.int32),
        starts=starts,
        token_bytes=np.ones(tokens, np.uint16),
        names=[str(start) for start in starts],
    )


def corpus_of(train: int, valid: int, test: int, tokenizer: PreTrainedTokenizerFast) -> TokenCorpus:
    return TokenCorpus(
        train=stream_of(train), valid=stream_of(valid), test=stream_of(test), tokenizer=tokenizer, fingerprint=""
    )


@pytest.mark.parametrize(
    ("train", "valid", "test", "positions", "window", "longest"),
    [
        (10**6, 10**5, 10**5, 4096, 512, 4096),
        (10**6, 10**5, 10**5, 300, 256, 256),
        (10**6, 10**5, 3000, 4096, 512, 1024),
        (10**6, 100, 3000, 4096, 64, 1024),
        (1000, 10**5, 3000, 4096, 64, 1024),
    ],
)
def test_sizes_follow_the_shortest_split_and_the_host(
    train: int, valid: int, test: int, positions: int, window: int, longest: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    sizes = trial.choose_sizes(corpus_of(train, valid, test, tokenizer), positions)
    assert (sizes.window, sizes.longest) == (window, longest)


@pytest.mark.parametrize("budget_s", [60.0, 600.0, 36_000.0])
@pytest.mark.parametrize("window_s", [1e-4, 0.01, 0.3])
def test_the_chosen_run_fits_its_budget(budget_s: float, window_s: float, tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = corpus_of(3_000_000, 100_000, 200_000, tokenizer)
    sizes = trial.choose_sizes(tokens, 2048)
    costs = trial.Costs(micro_batch=4, window_s=window_s, token_s=window_s / 512 / 3, fixed_s=10.0)
    fields = trial.choose_fields(tokens, sizes, costs, budget_s, budget_s)
    phase, measured = fields["phases"][0], fields["evaluation"]["extrapolation"]
    trained_s = phase["steps"] * phase["batch_size"] * window_s
    points = -(-phase["steps"] // phase["validate_every"])
    validated_s = points * trial.VALIDATION_WINDOWS * sizes.window * costs.token_s
    scored_s = measured["segments"] * sum(measured["lengths"][-1] for _ in measured["lengths"]) * costs.token_s
    total = costs.fixed_s + trained_s + validated_s + scored_s
    assert total <= budget_s
    passes = phase["steps"] * phase["batch_size"] * sizes.window / len(tokens.train)
    assert total > 0.6 * budget_s or passes > 0.9 * trial.PASSES
    assert phase["batch_size"] % phase["accumulation"] == 0
    assert measured["segments"] * (measured["lengths"][-1] + 1) <= len(tokens.test)


def test_wider_hosts_learn_slower() -> None:
    rates = [trial.learning_rates(width)["learning_rate"] for width in (64, 1000, 4096)]
    assert rates == [1e-3, 1e-4, 2.4e-5]


def test_a_budget_that_is_too_small_names_one_that_is_not(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = corpus_of(3_000_000, 100_000, 200_000, tokenizer)
    sizes, costs = (
        trial.Sizes(window=512, longest=2048),
        trial.Costs(micro_batch=4, window_s=3, token_s=2e-3, fixed_s=99),
    )
    with pytest.raises(KeelError, match=r"give a budget of ([\d.e+]+) minutes") as refused:
        trial.choose_fields(tokens, sizes, costs, 120.0, 120.0)
    minutes = float(str(refused.value).split("a budget of ")[2].split()[0])
    fields = trial.choose_fields(tokens, sizes, costs, 60 * minutes, 60 * minutes)
    assert fields["phases"][0]["steps"] >= trial.FEWEST_STEPS


def test_the_plan_is_a_recipe_with_both_arms_that_reads_back(
    host: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_PROCESS_S", 0.0)
    plan = trial.plan_trial(str(host), str(text), stream="structural", minutes=0.5)
    assert Recipe.model_validate(yaml.safe_load(plan.recipe.to_yaml())) == plan.recipe
    assert plan.recipe.arms["host"].streams == {} and list(plan.recipe.arms["structural"].streams) == ["structural"]
    assert plan.recipe.phases_of("host") == plan.recipe.phases_of("structural"), "the same steps on the same windows"
    assert plan.recipe.host == {"checkpoint": str(host)} and Path(plan.recipe.data.corpus["source"]) == text
    assert f"{plan.recipe.phases[0].steps} steps" in plan.notes[0]


def test_probes_print_a_table_and_leave_figures(run_keel: Keel, keel_checkpoint: Path, host: Path, text: Path) -> None:
    few = ("--corpus", text, "--sequences", 2, "--length", 16)
    for words, says in (
        (("geometry", keel_checkpoint, *few), "relative strength"),
        (("span", keel_checkpoint, host, *few, "--length", 32), "distance"),
        (("gates", keel_checkpoint, "--sequences", 3), "mean r"),
    ):
        ended = run_keel("probe", *words, "--out", words[0])
        assert ended.code == 0, ended.err
        assert says in ended.out
        assert json.loads(Path(words[0], "table.json").read_text())["schema"] == "keel.probe/1"
        assert list(Path(words[0]).glob("*.svg")) and list(Path(words[0]).glob("*.png"))
    bare, tokenizer = AutoModelForCausalLM.from_pretrained(host), AutoTokenizer.from_pretrained(host)
    with_prior = save(keel.attach(bare, keel.MarginPrior(rank=4)), tokenizer, Path("prior"))
    ended = run_keel("probe", "support", with_prior, *few, "--out", "support")
    assert ended.code == 0, ended.err
    assert "effective size" in ended.out and Path("support", "table.json").is_file()
    page = Path("support", "tokens.html").read_text(encoding="utf-8")
    assert page.count("<h2>") == 2 and 2 <= page.count('class="marked"') <= 10
    again = run_keel("probe", "gates", keel_checkpoint, "--out", "gates")
    assert again.code == 2 and "already holds a probe" in again.err
