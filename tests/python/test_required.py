"""PACKED_SDPA_REQUIRE turns the skip of a test into a failure."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import required
from test_ops import test_every_instruction_set as kernel_test

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def bare_machine(monkeypatch):
    """Without a device, and with no instruction set but the plain one."""
    monkeypatch.setattr(required, "is_there", lambda name: name == "scalar")


@pytest.mark.parametrize(
    "name,missing", [("cuda", "no CUDA device"), ("avx512_bf16", "no instruction set avx512_bf16")]
)
def test_what_is_missing_skips_unless_it_is_required(bare_machine, monkeypatch, name, missing):
    for value in ("", "avx2", "scalar, avx512"):
        monkeypatch.setenv("PACKED_SDPA_REQUIRE", value)
        with pytest.raises(pytest.skip.Exception, match=missing):
            required.need(name)
        required.need("scalar")
    for value in (name, f"scalar, {name}", f"{name},"):
        monkeypatch.setenv("PACKED_SDPA_REQUIRE", value)
        with pytest.raises(pytest.fail.Exception, match=f"PACKED_SDPA_REQUIRE={name}, but this machine has {missing}"):
            required.need(name)


@pytest.mark.parametrize(
    "value,told", [("amx,gpu", "'gpu'"), ("AMX", "'AMX'"), ("avx512_bf16 cuda", "'avx512_bf16 cuda'")]
)
def test_an_unknown_name_is_refused_before_any_test(value, told):
    asked = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/python/test_required.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PACKED_SDPA_REQUIRE": value},
    )
    assert asked.returncode == pytest.ExitCode.USAGE_ERROR and "passed" not in asked.stdout
    expected = (
        f"PACKED_SDPA_REQUIRE: got {told}, which is unknown; use names of: cuda, scalar, avx2, avx512, avx512_bf16, amx"
    )
    assert expected in asked.stderr


@pytest.mark.parametrize("name", ["avx2", "amx"])
def test_every_test_of_an_instruction_set_asks(bare_machine, monkeypatch, name):
    monkeypatch.setenv("PACKED_SDPA_REQUIRE", name)
    with pytest.raises(pytest.fail.Exception, match=f"this machine has no instruction set {name}"):
        kernel_test(name, torch.float32)
