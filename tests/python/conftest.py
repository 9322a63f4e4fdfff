from __future__ import annotations

import gc
import os
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))  # tests/cases.py, for every suite
sys.path.insert(0, str(pathlib.Path(__file__).parent))  # oracle.py

import required

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config: pytest.Config) -> None:
    """An unknown name in PACKED_SDPA_REQUIRE is an error before any test runs."""
    try:
        required.required()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(autouse=True)
def _own_random_state():
    """No test sees or leaves a random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True, scope="module")
def _collects_only_its_own_garbage():
    """What was there before a module's tests need not be looked at by each gc.collect() of theirs (seconds)."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
