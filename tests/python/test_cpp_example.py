"""A libtorch program outside the tree finds the installed package, trains, and keeps documents apart."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import packed_sdpa

ROOT = pathlib.Path(__file__).parents[2]


def test_cpp_train(tmp_path):
    source = shutil.copytree(ROOT / "examples" / "cpp_train", tmp_path / "cpp_train")
    build = tmp_path / "build"

    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    cmake = shutil.which("cmake", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    assert cmake is not None, "CMake is missing: make build installs it into .venv"
    run(
        cmake,
        *("-S", str(source), "-B", str(build)),
        f"-DCMAKE_PREFIX_PATH={packed_sdpa.cmake_prefix_path}",
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    run(cmake, "--build", str(build))
    output = run(str(build / "cpp_train"), *map(str, sorted(ROOT.glob("*.md"))), "--steps", "20")
    assert "packed logits against each document alone" in output
    assert output.splitlines()[-1] == "ok"
    refused = subprocess.run([str(build / "cpp_train")], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("usage: cpp_train FILE")
