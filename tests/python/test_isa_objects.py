"""Code of one instruction set must not stand in for shared inline functions of the whole program."""

from __future__ import annotations

import pathlib
import platform
import re
import shutil
import subprocess

import pytest

from required import need

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "cpu" / "x86").glob("*.cpp"))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_no_weak_symbol(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        need(source.stem)
    compiler, nm = shutil.which("g++"), shutil.which("nm")
    assert compiler is not None and nm is not None, "g++ and nm are missing: make build installs them"
    target = tmp_path / "kernels.o"
    flags = ["-std=c++20", "-O3", "-DNDEBUG", "-fPIC", f"-I{ROOT / 'src'}"]
    subprocess.run([compiler, *flags, "-c", str(source), "-o", str(target)], check=True)
    listed = subprocess.run([nm, "-C", str(target)], check=True, capture_output=True, text=True).stdout
    assert f"packed_sdpa::cpu::{source.stem}::kernels" in listed
    weak = [line for line in listed.splitlines() if re.match(r"[0-9a-f]*\s+[WwVvu]\s", line)]
    weak = [line for line in weak if not re.match(r"\s+[wv]\s", line)]  # undefined ones are somebody else's
    assert not weak, "\n".join(weak)


def test_every_source_is_there() -> None:
    assert [source.stem for source in SOURCES] == ["amx", "avx2", "avx512", "avx512_bf16"]
