"""What every test gets: no network, one thread, fixed seeds, a cache folder of the test run's own."""

from __future__ import annotations

import os
import random
import shutil
import tempfile

import numpy as np
import pytest

# Before any import of transformers or torch, which read these once.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

SEED = 20260101


def pytest_configure(config: pytest.Config) -> None:
    """Give the run one cache folder; processes started by xdist inherit it from the one that started them."""
    torch.set_num_threads(1)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["KEEL_CACHE"] = tempfile.mkdtemp(prefix="keel-test-cache-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache folder when the process that made it ends."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["KEEL_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same random state, whatever ran before it and in which process."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
