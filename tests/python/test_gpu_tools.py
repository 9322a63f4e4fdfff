"""What of tools/gpu_check can be tried without a device."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import pathlib
import struct
import subprocess
import sys
import time
import zlib

import pytest
import torch

from packed_sdpa import bench_cuda
from packed_sdpa.png import write_bars

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


def test_png_of_bars(tmp_path):
    path = tmp_path / "bars.png"
    write_bars(path, "TITLE", [("ours packed_sdpa", 3.0), ("other", 1.5), ("none", 0.0)], highlight="packed_sdpa")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (depth, kind) == (8, 2)
    begin = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[begin - 4 : begin])
    pixels = zlib.decompress(data[begin + 4 : begin + 4 + length])
    assert len(pixels) == height * (1 + 3 * width)
    rows = [pixels[i * (1 + 3 * width) + 1 : (i + 1) * (1 + 3 * width)] for i in range(height)]
    ours = max(row.count(bytes((47, 111, 186))) for row in rows)
    other = max(row.count(bytes((160, 174, 192))) for row in rows)
    assert 1.9 < ours / other < 2.1


def test_cuda_cases_and_ratios():
    cases = bench_cuda.cuda_cases([2048])
    assert [case.name for case in cases] == ["M1", "M2", "M3"] and all(case.seq_len == 2048 for case in cases)
    timings = [
        bench_cuda.Timing("M1", 2048, 4, "packed_sdpa", 1.0, 2.0, 1.0, 1.0),
        bench_cuda.Timing("M1", 2048, 4, "flex", 1.0, 3.0, 1.0, 1.0),
        bench_cuda.Timing("M2", 2048, 4, "flex", 1.0, 3.0, 1.0, 1.0),
    ]
    assert bench_cuda._ratios(timings) == {"M1, S 2048": {"flex": 1.5}}


def test_plot_of_a_result(tmp_path):
    timing = bench_cuda.asdict(bench_cuda.Timing("M1", 8192, 4, "packed_sdpa", 1.0, 2.0, 1.0, 321.0))
    assert bench_cuda.plot({"timings": [timing]}, tmp_path / "plots").stat().st_size > 100


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no device")
def test_bench_without_a_device():
    with pytest.raises(RuntimeError, match="the CUDA benchmark needs a CUDA device, and this machine has none"):
        bench_cuda.run_bench([1024], 1, 1.0)
    asked = subprocess.run(
        [sys.executable, "-m", "packed_sdpa.cli", "bench", "--device", "cuda"], capture_output=True, text=True
    )
    assert asked.returncode == 2
    assert asked.stderr == ("packed-sdpa bench: error: --device cuda needs a CUDA device, and this machine has none\n")


def test_gpu_check_describes_itself():
    asked = subprocess.run([sys.executable, str(TOOLS / "gpu_check"), "--help"], capture_output=True, text=True)
    assert asked.returncode == 0 and "--minutes" in asked.stdout


def test_gpu_check_stops_and_reports_when_there_is_no_time(tmp_path):
    asked = subprocess.run(
        [sys.executable, str(TOOLS / "gpu_check"), "--out", str(tmp_path), "--minutes", "0"],
        capture_output=True,
        text=True,
    )
    assert asked.returncode == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["steps"]["build"] == {"passed": False, "ended": "no time left"}


_IMPORT_WITH_TORCH_ALONE = """
import sys

class OnlyTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"rich", "transformers", "matplotlib", "hypothesis", "psutil", "accelerate"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, OnlyTorch())
import packed_sdpa.bench_cuda
"""


def test_a_machine_with_torch_alone_can_run_the_check():
    asked = subprocess.run([sys.executable, "-c", _IMPORT_WITH_TORCH_ALONE], capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no device")
@pytest.mark.parametrize("required,outcome", [("", "1 skipped"), ("cuda", "1 error"), ("amx,cuda", "1 error")])
def test_required_devices_turn_skips_into_failures(required, outcome):
    test = "tests/python/test_backends_parity.py::test_packing[cuda-flash-one_document-bfloat16]"
    asked = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        capture_output=True,
        text=True,
        cwd=TOOLS.parent,
        env={**os.environ, "PACKED_SDPA_REQUIRE": required},
    )
    assert outcome in asked.stdout, asked.stdout
    assert asked.returncode == (1 if required else 0)
    assert ("PACKED_SDPA_REQUIRE=cuda, but this machine has no CUDA device" in asked.stdout) == bool(required)


def test_a_step_that_runs_out_of_time_ends_with_what_it_started():
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(TOOLS / "gpu_check"))
    gpu_check = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(gpu_check)
    step = gpu_check.run(["bash", "-c", "sleep 300 & echo $!; wait"], 1.0, dict(os.environ))
    assert not step["passed"] and step["ended"] == "stopped after 1 s"
    child = pathlib.Path("/proc", step["output"].strip(), "stat")
    for _ in range(1000):
        if not child.exists() or child.read_text().split()[2] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("what the step started still runs")
