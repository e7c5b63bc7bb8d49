"""What README.md shows is true: marked Python blocks run and print what they say, commands and names exist.

The convention, visible in the source of README.md only:

* a Python block after ``<!-- test -->`` is run, in a namespace and a folder of its own;
* a text block after ``<!-- output -->`` is what the run block above it prints; ``...`` in it stands for anything, and
  white space does not count;
* every other Python block must parse, and every ``keel.NAME`` in it must exist;
* in shell blocks every ``make TARGET`` must be a target, every ``keel COMMAND --option`` an option that the command's
  help knows, every ``recipes/….yaml`` a file.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import keel

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
FIRST_SCREEN_LINES = 60
SHELL = {"shell", "sh", "bash", "console"}
BLOCK = re.compile(
    r"^(?:<!-- *(?P<mark>test|output) *-->[ \t]*\n+)?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```", re.M | re.S
)


class Block(NamedTuple):
    """One fenced block: the line of its fence (from 1), its language, its text, and the mark above it ("" for none)."""

    line: int
    language: str
    text: str
    mark: str


def blocks_of(page: str) -> list[Block]:
    """All fenced blocks of a Markdown page, in order."""
    return [
        Block(page.count("\n", 0, match.start("language")) + 1, match["language"], match["text"], match["mark"] or "")
        for match in BLOCK.finditer(page)
    ]


def run_python(text: str) -> str:
    """Run a snippet as a script of its own and return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def prints(expected: str, got: str) -> bool:
    """Whether ``got`` is what a README promises: ``...`` matches anything, white space does not count."""
    return doctest.OutputChecker().check_output(expected, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def missing_names(text: str, package: object) -> list[str]:
    """Names that a snippet reads from ``keel`` and that ``keel`` does not have."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "keel"
    }
    return sorted(name for name in used if not hasattr(package, name))


def commands_of(text: str) -> list[list[str]]:
    """Words of each command line of a shell block, comments and prompts removed."""
    lines = text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    pieces = [" ".join(shlex.quote(word) for word in line).replace("';'", "\n").replace("'&&'", "\n") for line in words]
    return [shlex.split(piece) for line in pieces for piece in line.split("\n") if piece.strip()]


def wrong_commands(text: str, targets: set[str], help_of: dict[str, str]) -> list[str]:
    """One line for each command of a shell block that cannot work: unknown target, command, option or recipe."""
    wrong = []
    for words in commands_of(text):
        if words[0] == "make":
            wrong += [f"make {w}: no such target" for w in words[1:] if "=" not in w and w not in targets]
        if words[0] == "keel" and len(words) > 1:
            page = help_of.get(words[1])
            options = [w.split("=")[0] for w in words[2:] if w.startswith("-")]
            wrong += [f"keel {words[1]}: no such command"] if page is None else []
            wrong += [f"keel {words[1]} {o}: no such option" for o in options if page and o not in page.split()]
        wrong += [
            f"{w}: no such recipe" for w in words if re.fullmatch(r"recipes/.*\.yaml", w) and not (ROOT / w).is_file()
        ]
    return wrong


def make_targets() -> set[str]:
    """Targets of the Makefile that a user may name."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def keel_help(command: str) -> str | None:
    """Help page of ``keel COMMAND`` without colours and frames, None when there is no such command."""
    plain = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    call = [sys.executable, "-c", "from keel.cli import main; main()", command, "--help"]
    done = subprocess.run(call, capture_output=True, text=True, env=plain, check=False)
    return re.sub(r"[│|,]", " ", done.stdout) if done.returncode == 0 else None


@pytest.fixture(scope="module")
def readme() -> str:
    return README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def blocks(readme: str) -> list[Block]:
    return blocks_of(readme)


def test_the_first_screen_has_both_commands_and_a_tested_snippet_with_its_output(blocks: list[Block]) -> None:
    first = [block for block in blocks if block.line <= FIRST_SCREEN_LINES]
    commands = [words for block in first if block.language in SHELL for words in commands_of(block.text)]
    assert ["make", "demo"] in commands and ["make", "test"] in commands
    assert [b for b in first if b.mark == "test" and b.language == "python"], (
        "no block after <!-- test --> on the first screen"
    )
    assert [b for b in blocks if b.mark == "output"], "no block after <!-- output -->: the README prints nothing"


def test_every_block_is_closed_and_every_mark_is_used(readme: str, blocks: list[Block]) -> None:
    """A mark that stands right above no block, or a fence that the pattern misses, would silently test nothing."""
    assert len(re.findall(r"^```", readme, re.M)) == 2 * len(blocks)
    assert len(re.findall(r"<!-- *(?:test|output) *-->", readme)) == sum(bool(block.mark) for block in blocks)
    assert all(block.language == "python" for block in blocks if block.mark == "test")


def test_marked_python_blocks_run_and_print_what_the_readme_says(
    blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran, printed = 0, None
    for block in blocks:
        if block.mark == "test":
            ran, printed = ran + 1, run_python(block.text)
        if block.mark == "output":
            assert printed is not None, f"line {block.line}: output without a tested block above it"
            assert prints(block.text, printed), f"line {block.line}: expected\n{block.text}\nbut it printed\n{printed}"
    assert ran > 0


def test_other_python_blocks_parse_and_name_what_exists(blocks: list[Block]) -> None:
    for block in (block for block in blocks if block.language == "python"):
        assert missing_names(block.text, keel) == [], f"line {block.line}"


def test_shell_blocks_name_what_exists(blocks: list[Block]) -> None:
    shell = [block for block in blocks if block.language in SHELL]
    names = {words[1] for block in shell for words in commands_of(block.text) if words[0] == "keel" and words[1:]}
    help_of = {name: page for name in names if (page := keel_help(name)) is not None}
    assert [line for block in shell for line in wrong_commands(block.text, make_targets(), help_of)] == []


PAGE = """# Title
<!-- test -->
```python
print("loss", 1 + 1)
```
<!-- output -->
```text
loss ...
```
```sh
make demo    # a comment
```
"""


def test_the_reader_finds_blocks_marks_and_lines() -> None:
    assert [(b.line, b.language, b.mark) for b in blocks_of(PAGE)] == [
        (3, "python", "test"),
        (7, "text", "output"),
        (10, "sh", ""),
    ]


def test_a_wrong_output_and_a_broken_snippet_are_found() -> None:
    snippet, output, _ = blocks_of(PAGE)
    assert prints(output.text, run_python(snippet.text))
    assert not prints("loss 3\n", run_python(snippet.text))
    with pytest.raises(NameError):
        run_python("print(nowhere)")


def test_a_missing_name_is_found() -> None:
    assert missing_names("import keel\nkeel.attach(host); keel.atach(host)", type("Package", (), {"attach": None})) == [
        "atach"
    ]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("make demo  # trains", 0),
        ("make demmo", 1),
        ("cd keel && make demmo", 1),
        ("keel run recipes/x --scale tiny", 0),
        ("keel run recipes/nowhere.yaml --scales tiny", 2),
        ("$ keel rum", 1),
    ],
)
def test_wrong_commands_are_found(line: str, wrong: int) -> None:
    assert len(wrong_commands(line, {"demo", "test"}, {"run": "--scale  tiny, small"})) == wrong
