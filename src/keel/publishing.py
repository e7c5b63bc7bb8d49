"""The pages of `docs/results/`: results files are kept beside them, and each paper's page is written from all that is kept of it."""

from __future__ import annotations

from pathlib import Path

from keel.errors import KeelError
from keel.evaluation.results import Reference, read_results, write_results
from keel.report import keep_results, speed_parts, write_docs_page
from keel.training import load_recipe


def publish(files: list[Path], folder: Path) -> list[Path]:
    """Keep results files below ``folder/data``, write the page of each paper that they are of, and return the pages.

    Raises: KeelError for a bad results file, a picture that is missing, or a folder that cannot be written.
    """
    pages = {}
    for file in files:
        results = read_results(file)
        paper = results.recipe.partition("/")[0]
        keep_results(file, folder / "data" / f"{results.recipe}.{results.scale}.json")
        pages[folder / f"{paper}.md"] = paper
    data = folder / "data"
    written = []
    for page, paper in pages.items():
        kept = sorted([*data.glob(f"{paper}.*.json"), *data.glob(f"{paper}/**/*.json")])
        for file in kept:
            renew_reference(file)
        written.append(write_docs_page(kept, page, speed_parts(data / "performance.cpu.json", paper)))
    return written


def renew_reference(file: Path) -> None:
    """Put what the recipe says of the paper today into a results file that was kept: a correction needs no new run."""
    results = read_results(file)
    try:
        recipe = load_recipe(results.recipe, results.scale)
    except KeelError:  # the user's own, or one that trains nothing
        return
    if recipe.reference is not None:
        reference = Reference(**recipe.reference.model_dump())
        if reference != results.reference:
            write_results(results.model_copy(update={"reference": reference}), file)
