"""What the how-to pages show is true: marked Python blocks run and print what they say, commands parse, the recipe is one."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.exceptions import TyperException

from keel import cli, streams
from keel.training.recipe import load_recipe, recipe_scales

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "how-to").glob("*.md"))
BLOCK = re.compile(r"^(?:<!-- (?P<mark>\w+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```", re.M | re.S)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Mark, language and text of every fenced block."""
    return [match.group("mark", "language", "text") for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def complaint(line: str) -> str | None:
    """What is wrong with a ``keel`` line: an unknown command or option, a missing argument; None when it parses."""
    command = typer.main.get_command(cli.app)
    try:
        with command.make_context("keel", shlex.split(line, comments=True)[1:]) as context:
            name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[attr-defined]
            found.make_context(name, rest).close()
    except TyperException as error:
        return str(error)
    return None


def keel_lines(page: Path) -> list[str]:
    """Every command line of a page that calls ``keel``, also through torchrun and in code spans."""
    shell = [text for _, language, text in blocks(page) if language == "shell"]
    spans = re.findall(r"`(torchrun [^`]+)`", page.read_text(encoding="utf-8"))
    return [line[line.index("keel ") :] for text in [*shell, *spans] for line in text.splitlines() if "keel " in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_keel_command_parses(page: Path) -> None:
    lines = keel_lines(page)
    assert lines or "```shell" not in page.read_text(encoding="utf-8")
    assert [(line, complaint(line)) for line in lines if complaint(line) is not None] == []


@pytest.mark.parametrize(
    "line", ["keel rum demo", "keel run demo --scales tiny", "keel try --host x", "keel run demo --seeds x"]
)
def test_a_wrong_command_is_found(line: str) -> None:
    assert complaint(line) is not None


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(mark == "test" for mark, _, _ in blocks(page))], ids=lambda page: page.stem
)
def test_marked_python_runs_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(streams, "STREAMS", streams.STREAMS.copy())
    printed, names = "", {"__name__": "__main__"}  # a page's blocks follow one another
    for mark, _, text in blocks(page):
        if mark == "test":
            stdout = io.StringIO()
            with contextlib.redirect_stdout(stdout):
                exec(compile(text, str(page), "exec"), names)
            printed = stdout.getvalue()
        if mark == "output":
            assert printed.split() == text.split()


def test_the_recipe_of_the_page_is_one_at_every_scale(tmp_path: Path) -> None:
    shown = [text for page in PAGES for mark, _, text in blocks(page) if mark == "recipe"]
    assert len(shown) == 1
    path = tmp_path / "mine.yaml"
    path.write_text(shown[0], encoding="utf-8")
    assert recipe_scales(path) == ["tiny", "small"]
    for scale in recipe_scales(path):
        assert list(load_recipe(path, scale).arms) == ["rope", "gru", "scan", "window"]
