"""``keel``: parse, call, print.

torch and transformers take seconds to import, so commands import the rooms below when they run: help answers at once.

Exit codes: 0 done, 1 a run that failed, 2 input that cannot be used, 130 stopped with Ctrl-C. Errors are one line on
stderr; the traceback is shown with ``--debug`` only.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.exceptions import TyperException

from keel.errors import KeelError

if TYPE_CHECKING:
    from keel.training.recipe import Recipe, Simulation

FAILED, BAD_INPUT, STOPPED = 1, 2, 130

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Side streams for Transformers: attach one to any Hugging Face model, train it there, and measure whether it "
    "helped.",
    epilog="Start with [bold]keel doctor[/bold] and [bold]keel run demo[/bold]. Every command has an example: "
    "[bold]keel COMMAND --help[/bold].",
)
trees_app = typer.Typer(
    no_args_is_help=True,
    help="Parse trees for the tree stream: train a parser, parse a corpus into a cache.",
    epilog="Example:  keel trees train treebank.mrg --out parser.safetensors",
)
app.add_typer(trees_app, name="trees")
out = Console(highlight=False, soft_wrap=True)


class Scale(StrEnum):
    """Sizes of a recipe."""

    tiny = "tiny"
    small = "small"
    paper = "paper"


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class FailedRun(Exception):
    """A run that began and did not end."""


class Stopped(Exception):
    """Ctrl-C; the message says how to go on."""


DeviceOption = Annotated[Device, typer.Option(help="Where to compute; auto takes the GPU where there is one.")]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code; see the module's docstring for the codes."""
    words = list(sys.argv[1:] if argv is None else argv)
    plain, behind = (words[: words.index("--")], words[words.index("--") :]) if "--" in words else (words, [])
    debug = "--debug" in plain
    words = [word for word in plain if word != "--debug"] + behind
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(_call(words) if debug else _call_in_one_line(words))


def _call(words: list[str]) -> int:
    code = app(words, prog_name="keel", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _call_in_one_line(words: list[str]) -> int:
    """Run a command; whatever it raises becomes one line and an exit code."""
    try:
        return _call(words)
    except (KeyboardInterrupt, typer.Abort):
        return _end("stopped", STOPPED)
    except Stopped as stopped:
        return _end(str(stopped), STOPPED)
    except BrokenPipeError:  # `keel recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except TyperException as error:
        return _end(f"error: {getattr(error, 'format_message', error.__str__)()}", BAD_INPUT)
    except KeelError as error:
        return _end(f"error: {error}", BAD_INPUT)
    except FailedRun as error:
        return _end(f"error: {error}", FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _end(
            f"error: {where}{error.strerror or error}", BAD_INPUT if isinstance(error, FileNotFoundError) else FAILED
        )
    except Exception as error:
        return _end(f"error: {type(error).__name__}: {error} (--debug shows where)", FAILED)


def _end(line: str, code: int) -> int:
    print(" ".join(line.split()), file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def _keel(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (may stand anywhere in the line).")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        out.print(f"keel {version_of('keel')}")
    elif context.invoked_subcommand is None:
        out.print(context.get_help(), end="")


@app.command(name="try")
def try_host(
    host: Annotated[
        str, typer.Option(help="Checkpoint to start from: a folder, or a name on the Hub.", metavar="CHECKPOINT")
    ],
    corpus: Annotated[
        str,
        typer.Option(help="Your text: a file or folder (txt, md, py, jsonl, parquet, gz), or stdlib.", metavar="PATH"),
    ],
    stream: Annotated[str, typer.Option(help="Which side stream to attach.")] = "structural",
    budget: Annotated[
        float, typer.Option(help="Minutes for everything: both trainings and the evaluation.", metavar="MINUTES")
    ] = 30.0,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder for recipe, models and report.", show_default="runs/try-HOST")
    ] = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Would a side stream help this checkpoint on this text?

    Fine-tunes the checkpoint alone and with the stream, the same steps on the same windows in the same order, scores
    the same held-out text with both, and says what came out. A few steps are timed first; their number follows from
    the budget.

    Example:  keel try --host Qwen/Qwen2.5-0.5B --corpus ~/notes --budget 60
    """
    from keel.trial import plan_trial

    folder = out_dir or Path("runs") / f"try-{Path(host).name}"
    if (folder / "recipe.yaml").exists():
        raise KeelError(f"{folder} already holds a run; go on with {_resume_line(folder)}, or choose another --out")
    with _working() as say:
        plan = plan_trial(host, corpus, stream=stream, minutes=budget, device=_device(device), say=say)
    for note in plan.notes:
        out.print(escape(note))
    _run(plan.recipe, folder, device=device)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (keel recipes), or a YAML file.")],
    scale: Annotated[
        Scale | None,
        typer.Option(
            help="tiny: seconds an arm, a test; small: this machine; paper: the paper's sizes.", show_default="small"
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for models, results and report.", show_default="runs/RECIPE.SCALE"),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds, instead of the recipe's.", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a field: --set phases.train.steps=100 (again for more).",
            metavar="A.B=VALUE",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the folder holds.")] = False,
    device: DeviceOption = Device.auto,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Arms and seeds at the same time.", show_default="as many as fit")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Run this arm only (again for more).", metavar="ARM", show_default=False),
    ] = None,
) -> None:
    """Run a recipe: train its arms, evaluate them on the same text, write results.json and report.html.

    Example:  keel run demo --out runs/demo

    Example:  keel run s_former/wikitext103_extrapolation --seeds 1 --only rope --set phases.train.steps=100
    """
    from keel.experiment import run_simulation
    from keel.training.recipe import Simulation

    chosen = _load(recipe, scale, list(changes or []), seeds)
    folder = out_dir or Path("runs") / f"{chosen.name}.{chosen.scale}"
    if isinstance(chosen, Simulation):
        if only:
            raise KeelError(f"--only: {chosen.name} trains nothing and takes seconds; leave it out")
        run_simulation(chosen, folder, resume=resume)
        return _show(folder)
    _run(chosen, folder, device=device, resume=resume, jobs=jobs, only=only)


@app.command()
def recipes() -> None:
    """List the recipes: what paper table each serves, its scales, and the time expected on 2 CPU cores.

    Example:  keel recipes
    """
    from keel.doctor import duration, runnable

    table = _table("recipe", "serves", "scale", "expected")
    previous = ""
    for row in runnable():
        first = row.recipe != previous
        table.add_row(row.recipe if first else "", row.serves if first else "", row.scale, duration(row.minutes))
        previous = row.recipe
    out.print(table)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or results files.", metavar="DIR...")],
    docs: Annotated[
        bool, typer.Option("--docs", help="Write pages of docs/results and keep the results files beside them.")
    ] = False,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write into.", show_default="the run's folder, or docs/results"),
    ] = None,
) -> None:
    """Write a report from results.json files: one HTML page, or with --docs a Markdown page for each paper.

    Example:  keel report runs/demo

    Example:  keel report runs/s_former/wikitext103_extrapolation.small --docs
    """
    from keel.publishing import publish
    from keel.report import write_report

    files = [folder / "results.json" if folder.is_dir() else folder for folder in folders]
    if docs:
        pages = publish(files, out_dir or Path("docs/results"))
    elif out_dir is None and len(files) > 1:
        raise KeelError("report: several runs go into one page; name its folder with --out")
    else:
        pages = [write_report(files, out_dir or files[0].parent)]
    for page in pages:
        out.print(escape(str(page)))


@app.command()
def generate(
    checkpoint: Annotated[str, typer.Argument(help="Keel checkpoint or bare host: a folder, or a name on the Hub.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 64,
    beams: Annotated[int, typer.Option(min=1, help="Beams; 1 is greedy.")] = 1,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the likeliest.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the draw, with --sample.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw, with --sample.")] = 0,
    signals: Annotated[
        bool, typer.Option("--signals", help="Draw the streams' signals while the text is written.")
    ] = False,
    signals_out: Annotated[
        Path | None, typer.Option("--signals-out", help="File for the signals of every token, as JSON.", metavar="FILE")
    ] = None,
    safeguards: Annotated[
        bool,
        typer.Option(
            "--safeguards",
            help="Guard a dynamic state path that has no thresholds of its own: a row that fails runs as the host alone.",
        ),
    ] = False,
    telemetry: Annotated[
        str | None,
        typer.Option(
            help="What a dynamic state path hears of the machine: constant (healthy), simulated (throttling, memory pressure and "
            "latency spikes over this text), live (this machine), or the file of a recorded trace.",
            metavar="constant|simulated|live|FILE",
            show_default="constant",
        ),
    ] = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Continue a text with a trained checkpoint; the tokenizer that lies beside it is used.

    Example:  keel generate runs/demo/structural/seed0/model "def main(" --max-new-tokens 40

    Example:  keel generate my/dynamic_state/model "The harbour at night" --signals --signals-out signals.json

    Example:  keel generate my/dynamic_state/model "The harbour at night" --signals --safeguards --telemetry simulated
    """
    from keel.pretrained import continue_text

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "num_beams": beams, "do_sample": sample}
    options |= {"safeguards": safeguards, "telemetry": telemetry}
    if sample:
        options["temperature"] = temperature
    if signals or signals_out is not None:
        from keel.watching import continue_with_signals

        shown = out if signals else None
        text = continue_with_signals(
            checkpoint, prompt, console=shown, file=signals_out, seed=seed, device=_device(device), **options
        )
        if signals:
            print()
    else:
        with _working():
            text = continue_text(checkpoint, prompt, seed=seed, device=_device(device), **options)
    print(text)  # rich would take control characters out


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="Keel checkpoint or bare host: a folder, or a name on the Hub.")],
    onnx: Annotated[Path, typer.Option("--onnx", help="File to write, such as model.onnx.", metavar="FILE")],
) -> None:
    """Write one token of decoding as ONNX, with a description and a program that runs it without torch beside it.

    Keys, values, the state of every stream and the telemetry go in and come out by name.

    Example:  keel export runs/demo/structural/seed0/model --onnx exported/model.onnx
    """
    from keel.export import export_onnx
    from keel.pretrained import load_model

    with _working() as say:
        model = load_model(checkpoint).float()
        say("exporting")
        files = export_onnx(model, onnx)
    for file in files:
        out.print(escape(str(file)))


class Probe(StrEnum):
    """What to look at in a checkpoint."""

    geometry = "geometry"
    span = "span"
    gates = "gates"
    support = "support"


@app.command()
def probe(
    what: Annotated[
        Probe,
        typer.Argument(
            help="geometry: what the stream writes; span: attention's reach; gates: against depth; support: tokens that press."
        ),
    ],
    checkpoints: Annotated[
        list[str], typer.Argument(help="A Keel checkpoint; for span several, hosts too.", metavar="CHECKPOINT...")
    ],
    corpus: Annotated[
        str, typer.Option(help="Text: a path, data:NAME, hub:DATASET or stdlib. Gates read bracket words.")
    ] = "stdlib",
    out_dir: Annotated[Path, typer.Option("--out", help="New folder for table.json and the figures.")] = Path("probe"),
    length: Annotated[list[int], typer.Option(min=2, help="Tokens of a row; for span again for more.")] = [256],  # noqa: B006
    sequences: Annotated[int, typer.Option(min=1, help="Rows of text, or words.")] = 16,
    device: DeviceOption = Device.auto,
) -> None:
    """Look into a trained checkpoint: a table on the screen, the same as JSON, and figures.

    Example:  keel probe geometry runs/demo/structural/seed0/model --out probes/geometry

    Example:  keel probe span runs/demo/rope/seed0/model runs/demo/structural/seed0/model --length 256 --length 2048

    Example:  keel probe gates runs/s_former/dyck.small/fusion/seed0/model --sequences 500

    Example:  keel probe support runs/support_tokens/robustness.small/margin_005/seed0/model --sequences 4
    """
    from keel import probing

    if what is not Probe.span and len(checkpoints) > 1:
        raise KeelError(
            f"probe {what.value}: {len(checkpoints)} checkpoints given; it takes one, only span compares several"
        )
    if (out_dir / "table.json").exists():
        raise KeelError(f"{out_dir} already holds a probe; choose another folder with --out")
    common: dict[str, Any] = {"sequences": sequences, "device": _device(device)}
    with _working():
        if what is Probe.gates:
            table = probing.probe_gates(checkpoints[0], out_dir, **common)
        elif what is Probe.span:
            table = probing.probe_spans(checkpoints, corpus, out_dir, lengths=length, **common)
        elif what is Probe.support:
            table = probing.probe_support(checkpoints[0], corpus, out_dir, length=length[-1], **common)
        else:
            table = probing.probe_geometry(checkpoints[0], corpus, out_dir, length=length[-1], **common)
    out.print(table)
    out.print(escape(str(out_dir)))


class Scope(StrEnum):
    """What a tree may have read at a token."""

    sentence = "sentence"
    prefix = "prefix"


class Engine(StrEnum):
    """What parses a corpus; see ``keel.trees.build``."""

    local = "local"
    ray = "ray"


@trees_app.command(name="train")
def train_parser(
    file: Annotated[
        Path, typer.Argument(help="Bracketed trees as the Penn Treebank has them, .gz or plain.", metavar="FILE")
    ],
    out_file: Annotated[Path, typer.Option("--out", help="New file for the parser.")] = Path("parser.safetensors"),
    held_out: Annotated[int, typer.Option(min=1, help="Trees at the end that it is scored on, and never sees.")] = 300,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the trees.", show_default="14")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
) -> None:
    """Train a parser on bracketed trees, and score it on the last of them by evalb's rules.

    Example:  keel trees train treebank.mrg --out parser.safetensors
    """
    from keel import parsing
    from keel.trees.parser_training import TrainingConfig

    training = TrainingConfig(seed=seed) if epochs is None else TrainingConfig(epochs=epochs, seed=seed)
    with Console(stderr=True).status("reading the trees") as status:
        scores = parsing.train(
            file, out_file, held_out=held_out, training=training,
            progress=lambda epoch, loss: status.update(f"epoch {epoch} of {training.epochs}, loss {loss:.3f}"),
        )  # fmt: skip
    table = _table("measure", "value")
    for name, value in scores.items():
        table.add_row(name, f"{value:.2f}")
    out.print(table)
    out.print(escape(str(out_file)))


@trees_app.command(name="build")
def build_trees(
    corpus: Annotated[
        Path, typer.Argument(help="Text, one sentence or document a line, .gz or plain.", metavar="FILE")
    ],
    source: Annotated[
        str,
        typer.Option(
            help="bracketed:FILE, treesitter:LANGUAGE, keel:PARSER, stanza:LANGUAGE, benepar:MODEL or branching:SHAPE."
        ),
    ],
    tokenizer: Annotated[str, typer.Option(help="Checkpoint or folder with the model's fast tokenizer.")],
    out_file: Annotated[Path, typer.Option("--out", help="Cache; one that is there is added to.")] = Path(
        "trees.sqlite"
    ),
    scope: Annotated[
        Scope, typer.Option(help="sentence: the paper's; prefix: strictly causal, a parse for every token.")
    ] = Scope.sentence,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longer rows are cut off there.", show_default="no limit")
    ] = None,
    prompts: Annotated[
        bool,
        typer.Option(
            "--prompts",
            help='FILE has a JSON object a line, {"prompt": "…", "options": ["…"]}; parsed field by field, alone and with each option.',
        ),
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that parse.")] = 1,
    engine: Annotated[
        Engine, typer.Option(help="local: processes of this machine; ray: Ray Data, also on many machines.")
    ] = Engine.local,
) -> None:
    """Parse a corpus into a cache of trees. Stopped and started again, it goes on where it was.

    Example:  keel trees build text.txt --source keel:parser.safetensors --tokenizer Qwen/Qwen2.5-0.5B --workers 2

    Example:  keel trees build asked.jsonl --prompts --source keel:parser.safetensors --tokenizer Qwen/Qwen2.5-0.5B
    """
    from keel import parsing

    options: dict[str, Any] = {
        "scope": scope.value,
        "max_tokens": max_tokens,
        "prompts": prompts,
        "workers": workers,
        "engine": engine.value,
    }
    with Console(stderr=True).status("starting") as status:
        counts = parsing.build_cache(
            corpus, out_file, source=source, tokenizer=tokenizer, **options,
            progress=lambda now: status.update(f"{now.parsed:,} parsed, {now.known:,} there, {now.without:,} without"),
        )  # fmt: skip
    out.print(f"{counts.parsed:,} parsed, {counts.known:,} there already, {counts.without:,} without a tree")
    if counts.without:
        out.print(escape(f"the first without: {counts.reason}"))
    out.print(escape(str(out_file)))


@app.command()
def doctor() -> None:
    """What this machine has, and which recipes it can run in what time (on 2 CPU cores).

    Example:  keel doctor
    """
    from keel.doctor import duration, examine, runnable

    checks = examine()
    marks = {"ok": "[green]ok[/green]", "absent": "[yellow]--[/yellow]", "broken": "[red]broken[/red]"}
    table = _table("", "what", "found")
    for check in checks:
        table.add_row(marks[check.state], check.name, escape(check.found))
    out.print(table)
    table = _table("recipe", "scale", "expected", "lacks here")
    for row in runnable():
        table.add_row(row.recipe, row.scale, duration(row.minutes), row.lacks or "nothing")
    out.print(table)
    broken = [check.name for check in checks if check.state == "broken"]
    if broken:
        raise FailedRun(f"{', '.join(broken)}: Keel cannot work like this; see above")


def _load(recipe: str, scale: Scale | None, changes: list[str], seeds: int | None) -> Recipe | Simulation:
    from keel.training.recipe import load_any

    loaded = load_any(recipe, scale, changes)
    if seeds is None:
        return loaded
    more = (seed for seed in range(len(loaded.seeds) + seeds) if seed not in loaded.seeds)
    wanted = [*loaded.seeds, *more][:seeds]
    return load_any(recipe, scale, [*changes, f"seeds={wanted}"])


def _run(recipe: Recipe, folder: Path, *, device: Device, **options: Any) -> None:
    """Run a recipe, write its report, print what came out."""
    from keel.experiment import run_experiment

    before = _begun(folder)
    try:
        run_experiment(recipe, folder, device=_device(device), **options)
    except KeyboardInterrupt as error:
        raise Stopped(f"stopped; go on with: {_resume_line(folder)}") from error
    except KeelError as error:
        if _begun(folder) != before:
            raise FailedRun(str(error)) from error
        raise
    if os.environ.get("RANK", "0") == "0":  # the first process under torchrun
        _show(folder)


def _begun(folder: Path) -> int | None:
    """Tell apart the runs that began in a folder: each writes a new plan once data and recipe are found usable."""
    path = folder / "plan.json"
    return path.stat().st_ino if path.is_file() else None


def _resume_line(folder: Path) -> str:
    return shlex.join(["keel", "run", str(folder / "recipe.yaml"), "--out", str(folder), "--resume"])


@contextmanager
def _working() -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done, in place of the bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with Console(stderr=True).status("reading the checkpoint") as status:
        yield status.update


def _show(folder: Path) -> None:
    from keel.evaluation.results import read_results
    from keel.report import write_report
    from keel.report.findings import verdict

    results = folder / "results.json"
    page = write_report([results], folder)
    said = verdict(read_results(results))
    out.print(f"\n[bold]{escape(said.headline)}[/bold]")
    for sentence in said.sentences:
        out.print(escape(sentence))
    out.print()
    for what, path in (("Report", page), ("Results", results), ("Recipe", folder / "recipe.yaml")):
        out.print(escape(f"{what + ':':<9}{path}"))


def _device(device: Device) -> str | None:
    """The device by name, None for the fastest there is.  Raises: KeelError for a GPU that is not there."""
    import torch

    if device is Device.cuda and not torch.cuda.is_available():
        raise KeelError("device cuda: this machine has no usable GPU; leave --device out, or give cpu")
    return None if device is Device.auto else device.value


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("recipe", "scale"))
    return table
