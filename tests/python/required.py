"""PACKED_SDPA_REQUIRE: what this machine must have, so that no test of it skips. The C++ tests read it likewise.

Names, separated by commas: ``cuda``, and those of instruction sets.
"""

from __future__ import annotations

import os

import pytest
import torch

VARIABLE = "PACKED_SDPA_REQUIRE"
ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
NAMES = ("cuda", *ISAS)


def required() -> tuple[str, ...]:
    """The names, in the order given. Raises ValueError for an unknown one."""
    names = tuple(name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip())
    for name in names:
        if name not in NAMES:
            raise ValueError(f"{VARIABLE}: got '{name}', which is unknown; use names of: {', '.join(NAMES)}")
    return names


def is_there(name: str) -> bool:
    from packed_sdpa._library import ops  # not with conftest.py: an unknown name is told before anything is loaded

    return torch.cuda.is_available() if name == "cuda" else name in ops.available_cpu_isas()


def need(name: str) -> None:
    """Skips the running test where the machine has no such thing, or fails it where that is required."""
    if is_there(name):
        return
    missing = "CUDA device" if name == "cuda" else f"instruction set {name}"
    if name in required():
        pytest.fail(f"{VARIABLE}={name}, but this machine has no {missing}")
    pytest.skip(f"no {missing}")
