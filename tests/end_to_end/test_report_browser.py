"""A report opened in headless Chromium: drawn, silent, asking nothing of any network, and as wide as a phone."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report_support"))

from report_cases import make_dyck, make_mixed, make_results, make_text, write_with_pictures

from keel.evaluation.results import write_results
from keel.report import write_report

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="chromium is not installed")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
    "--hide-scrollbars",
]
# Chromium itself asks for updates; without name resolution that stays here.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"
# What the page looks like from inside: measured by a wrapper, since the report itself runs no script.
PROBE = """
const inside = document.getElementById("frame").contentDocument, root = inside.documentElement;
const box = element => element.getBoundingClientRect();
const leaves = (text, svg) => box(text).left < box(svg).left - 1 || box(text).right > box(svg).right + 1;
const drawn = [...inside.querySelectorAll(".wide svg, .narrow svg")].filter(svg => box(svg).width > 0);
document.getElementById("probe").textContent = JSON.stringify({
  viewport: root.clientWidth,
  content: root.scrollWidth,
  figures: drawn.filter(svg => !svg.classList.contains("swatch")).map(svg => ({
    width: box(svg).width,
    height: box(svg).height,
    paths: [...svg.querySelectorAll("path")].filter(path => box(path).width > 0).length,
    leaving: [...svg.querySelectorAll("text")].filter(text => leaves(text, svg)).map(text => text.textContent),
  })),
  pictures: [...inside.querySelectorAll("img")].map(picture => picture.naturalWidth),
  scrolling: [...inside.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth).length,
});
"""


@dataclass(frozen=True)
class Visit:
    """What came of opening a page: its DOM, console messages, and the addresses that the page asked for."""

    dom: str
    console: list[str]
    requests: list[str]


def chromium(*arguments: str, profile: Path) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None, "chromium is missing: .ci/run installs it (apt-get install chromium)"
    command = [CHROMIUM, *FLAGS, OFFLINE, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def visit(page: Path, tmp_path: Path, *arguments: str) -> Visit:
    log = tmp_path / "net.json"
    run = chromium(f"--log-net-log={log}", "--dump-dom", *arguments, page.as_uri(), profile=tmp_path / "profile")
    return Visit(run.stdout, [line for line in run.stderr.splitlines() if ":CONSOLE" in line], requests_of(log))


def requests_of(log: Path) -> list[str]:
    """Addresses that a page asked for; the browser's own requests have no origin as their initiator."""
    data = json.loads(log.read_text())
    start = data["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [
        event["params"] for event in data["events"] if event["type"] == start and "url" in event.get("params", {})
    ]
    return [
        p["url"]
        for p in started
        if p.get("initiator") != "not an origin" and not p["url"].startswith(("file:", "data:"))
    ]


def probe(page: str, width: int, tmp_path: Path) -> dict[str, Any]:
    """Lay a page out in a frame of the given width and measure it."""
    wrapper = tmp_path / f"wrapper-{width}.html"
    frame = f'<iframe id="frame" style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    wrapper.write_text(f'<body>{frame}<pre id="probe"></pre><script>onload = () => {{{PROBE}}}</script></body>')
    dom = chromium("--dump-dom", wrapper.as_uri(), profile=tmp_path / "profile").stdout
    found = re.search(r'<pre id="probe">(.+?)</pre>', dom)
    assert found is not None, "the wrapper's script did not run"
    measured: dict[str, Any] = json.loads(html.unescape(found[1]))
    return measured


# What is made of a file: cells in a row of the first table, and figures.
CASES = {"extrapolation": (10, 3), "dyck": (4, 8), "text": (4, 6), "mixed": (2, 9)}
MAKE = {"extrapolation": make_results, "dyck": make_dyck, "text": make_text, "mixed": make_mixed}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pages = {}
    for case, make in MAKE.items():
        folder = tmp_path_factory.mktemp(case)
        write = write_with_pictures if case == "dyck" else lambda made, at: write_results(made, at / "results.json")
        pages[case] = write_report([write(make(), folder / "run")], folder / "out")
    return pages


@pytest.fixture
def report(reports: dict[str, Path]) -> Path:
    return reports["extrapolation"]


@pytest.mark.parametrize("case", CASES)
def test_the_console_is_silent_nothing_is_requested_and_every_arm_is_there(
    reports: dict[str, Path], tmp_path: Path, case: str
) -> None:
    seen = visit(reports[case], tmp_path)
    assert seen.console == [] and seen.requests == []
    for name, arm in MAKE[case]().arms.items():
        row = re.search(rf'<tr data-arm="{name}">(.*?)</tr>', seen.dom)
        assert row is not None and arm.label in row[1] and row[1].count("<td") == CASES[case][0]


def test_a_page_that_is_loud_and_asks_for_things_is_caught(tmp_path: Path) -> None:
    page = tmp_path / "loud.html"
    page.write_text('<!DOCTYPE html><img src="http://192.0.2.1/x.png"><script>console.error("broken")</script>')
    seen = visit(page, tmp_path)
    assert any("broken" in line for line in seen.console) and seen.requests == ["http://192.0.2.1/x.png"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [390, 1280])
def test_figures_are_drawn_and_the_page_is_no_wider_than_the_screen(
    reports: dict[str, Path], tmp_path: Path, width: int, case: str
) -> None:
    seen = probe(reports[case].read_text(encoding="utf-8"), width, tmp_path)
    assert seen["viewport"] == width and seen["content"] == width
    assert len(seen["figures"]) == CASES[case][1]
    for figure in seen["figures"]:
        # The smallest figure has one row; without data, a figure is its background and its axis.
        assert figure["width"] > 0.75 * min(width, 800) and figure["height"] > 80
        assert figure["paths"] >= 4 and figure["leaving"] == []
    assert seen["pictures"] == ([1, 1] if case == "dyck" else [])
    if width == 390 or case == "extrapolation":
        assert seen["scrolling"] >= 1  # the wide table scrolls inside its own box


def test_a_page_that_is_too_wide_is_caught(report: Path, tmp_path: Path) -> None:
    page = report.read_text(encoding="utf-8").replace("<main>", '<main><div style="width:600px">wide</div>')
    assert probe(page, 390, tmp_path)["content"] >= 600


def test_light_and_dark_are_painted_as_asked(report: Path, tmp_path: Path) -> None:
    for scheme, bright in ((1, True), (0, False)):
        picture = tmp_path / f"{scheme}.png"
        chromium(
            f"--blink-settings=preferredColorScheme={scheme}",
            "--window-size=1280,2400",
            f"--screenshot={picture}",
            report.as_uri(),
            profile=tmp_path / "profile",
        )
        pixels_HWC = matplotlib.image.imread(picture)[..., :3]
        background = pixels_HWC[5, 5].mean()
        assert background > 0.9 if bright else background < 0.2
        # Ink, muted text, rules and at least the stream's colours stand out from the paper.
        assert (abs(pixels_HWC.mean(axis=-1) - background) > 0.3).mean() > 0.01
        colourful = (pixels_HWC.max(axis=-1) - pixels_HWC.min(axis=-1)) > 0.3
        assert colourful[1200:].mean() > 0.002
