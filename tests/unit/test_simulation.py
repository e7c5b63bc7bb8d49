"""The scalar prior: its paths against the general log-determinant, its density, and the recipe that draws it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from keel.cli import main
from keel.errors import KeelError
from keel.evaluation.results import read_results
from keel.evaluation.scalar_prior import conditional_density, density_grid, scalar_metrics, scalar_paths
from keel.experiment import run_simulation
from keel.ops.logdet import attention_logdet, visible_past
from keel.training.recipe import Simulation, load_any, load_recipe


def simulation(*changes: str) -> Simulation:
    loaded = load_any("support_tokens/scalar_illustration", "tiny", changes)
    assert isinstance(loaded, Simulation)
    return loaded


@pytest.mark.parametrize("coupling", [-1.5, 0.0, 0.4])
def test_paths_are_the_general_prior_at_width_one(coupling: float) -> None:
    values_NT = np.random.default_rng(0).standard_normal((6, 5))
    paths = scalar_paths(values_NT, coupling)
    values = torch.from_numpy(values_NT)[..., None]
    found = attention_logdet(coupling * values, values, visible_past(5, 5, False))
    np.testing.assert_allclose(paths.margin_NT, (found.sign_BT * found.logabs_BT.exp()).numpy(), atol=1e-9)
    assert (paths.variance_NT[:, 0] == 0).all() and (paths.variance_NT >= 0).all()


def test_the_density_is_one_in_all_where_the_map_can_be_inverted() -> None:
    """A past of -1 and 1 has a variance of at most 1: with w below 1 every z belongs to one x."""
    grid_G = density_grid()
    for coupling in (-2.0, 0.0, 0.9):
        density_G, factor_G = conditional_density(grid_G, [-1.0, 1.0], coupling)
        assert (factor_G > 0).all()
        assert np.trapezoid(density_G, grid_G) == pytest.approx(1, abs=1e-3)
    assert np.trapezoid(conditional_density(grid_G, [-1.0, 1.0], 3.0)[0], grid_G) > 1.2, "folded: points counted again"


def test_paths_and_conditional_density_agree() -> None:
    past, last = [0.3, -1.2, 0.8], 0.5
    paths = scalar_paths(np.array([[*past, last]]), 0.4)
    shorter = scalar_paths(np.array([past]), 0.4)
    density_G, factor_G = conditional_density(np.array([last]), past, 0.4)
    assert factor_G[0] == pytest.approx(paths.margin_NT[0, -1])
    assert np.log(density_G[0]) == pytest.approx(paths.log_density_N[0] - shorter.log_density_N[0])


def test_only_a_positive_coupling_excludes_sequences() -> None:
    """613 of the paper's 4,000 sequences are excluded (section 3.4); so with w = 0.8 and standard normal embeddings."""
    share = {
        coupling: scalar_metrics(coupling, sequences=4000, length=5, spreads=[1.0], past=[1.0], seed=0)[0].value
        for coupling in (-0.8, 0.0, 0.8)
    }
    assert share[-0.8] == share[0.0] == 0
    assert share[0.8] == pytest.approx(613 / 4000, abs=0.015)


def test_a_run_writes_results_that_repeat(tmp_path: Path) -> None:
    first, second = (run_simulation(simulation(), tmp_path / name) for name in ("a", "b"))
    assert first.arms == second.arms and read_results(tmp_path / "a" / "results.json").arms == first.arms
    assert all((tmp_path / "a" / picture.file).is_file() for picture in first.figures) and len(first.figures) == 3
    assert (
        first.arms["positive"].metrics["excluded.share"].values[0]
        != first.arms["positive"].metrics["excluded.share"].values[1]
    )
    with pytest.raises(KeelError, match="already holds a run"):
        run_simulation(simulation(), tmp_path / "a")
    assert run_simulation(simulation(), tmp_path / "a", resume=True).arms == first.arms
    with pytest.raises(KeelError, match="already holds a run"):
        run_simulation(simulation("scalar_prior.length=4"), tmp_path / "a", resume=True)


def test_keel_run_says_what_agrees_with_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def keel(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["run", "support_tokens/scalar_illustration", "--scale", "tiny", *words])
        return int(ended.value.code or 0), *capsys.readouterr()

    code, out, err = keel("--out", str(tmp_path / "out"))
    assert code == 0, err
    assert "A description" in out and "0.1532" in out
    assert json.loads((tmp_path / "out" / "results.json").read_text())["recipe"] == "support_tokens/scalar_illustration"
    assert "The embedding prior in one dimension" in (tmp_path / "out" / "report.html").read_text()
    code, _, err = keel("--only", "positive", "--out", str(tmp_path / "new"))
    assert code == 2 and "trains nothing" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("scalar_prior.spreads=[1.0, 1.0]", "spreads: each once"),
        ("scalar_prior.length=1", "length"),
        ("scalar_prior.spread=1", "did you mean 'spreads'"),
    ],
)
def test_a_wrong_field_is_named(change: str, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        simulation(change)


def test_what_trains_nothing_is_no_recipe_to_train() -> None:
    with pytest.raises(KeelError, match="trains nothing"):
        load_recipe("support_tokens/scalar_illustration")
