"""Tables where there is no terminal."""

from __future__ import annotations

import pytest

from packed_sdpa import bench_report
from packed_sdpa.bench_measure import GEMM, TILES
from packed_sdpa.tables import make_console


def test_no_heading_is_cut_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    names = ("packed_sdpa", "loop_expanded", "loop_gqa", "dense", "flex", GEMM, TILES)
    row = {"case": "M1", "title": "mean 512", "dtype": "float32", "pass": "forward"}
    rows = [{**row, "contender": name, "gflops": 1234.5} for name in names]
    grid = bench_report.kernel_grid(rows, "float32", "forward")
    bench_report.print_tables(make_console(), {"machine": {}, "kernels": rows})
    printed = capsys.readouterr().out
    assert "…" not in printed
    for heading in grid.head:
        assert heading in printed


def test_columns_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert make_console().width == 60
