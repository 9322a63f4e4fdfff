"""The benchmark on tiny cases: arithmetic, contenders that agree, rows, tables, files. No times are asserted."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from packed_sdpa import bench, bench_cases, bench_measure, bench_overheads, bench_report, bench_schedule, cli, host
from packed_sdpa._library import ops
from packed_sdpa.bench_cases import Case
from packed_sdpa.bench_contenders import CONTENDERS, dense_mask
from packed_sdpa.bench_options import CASE_NAMES, CONTENDER_NAMES, PLOT_FILES, BenchOptions, check_targets
from packed_sdpa.bench_schedule import Item
from packed_sdpa.errors import InputError

TINY = Case("T", "tiny", num_heads=4, num_kv_heads=2, head_dim=8, seqlens=(5, 1, 9))
TINY_WINDOW = replace(TINY, name="TW", window_left=2)
# torch has its tile product in both types where the processor has bfloat16 instructions.
HAS_TILES = "avx512_bf16" in host.available_cpu_isas()
STAY = tuple(name for name in CONTENDER_NAMES if name != "flex")


def test_names_of_options_are_those_of_the_tables() -> None:
    assert tuple(bench_cases.kernel_cases()) == CASE_NAMES
    assert tuple(CONTENDERS) == CONTENDER_NAMES


def test_cases_are_those_of_the_targets() -> None:
    cases = bench_cases.kernel_cases()
    assert [case.seq_len for case in cases.values()] == [8192, 8192, 8192, 16384, 8192, 8192, 8192]
    assert (cases["M1"].num_heads, cases["M1"].num_kv_heads, cases["M1"].head_dim) == (16, 4, 128)
    assert (cases["M4"].num_heads, cases["M4"].num_kv_heads, cases["M4"].head_dim) == (8, 4, 64)
    assert cases["M3"].seqlens == (8192,) and cases["M6"].window_left == 255 and cases["M7"].head_dim == 256
    assert cases["M1"] == bench_cases.kernel_cases()["M1"]


def test_rows_of_every_length_hold_the_same_documents() -> None:
    short, long = bench_cases.row_sweep((4096, 65536))
    assert long.seqlens == short.seqlens * 16 and sum(short.seqlens) == 4096
    assert bench_cases.row_sweep((1000,))[0].seqlens == bench_cases.repeated(short.seqlens, 1000)
    assert bench_cases.repeated((3, 4), 9) == (3, 4, 2) and bench_cases.repeated((3, 4), 0) == ()


@pytest.mark.parametrize("mean", [64, 512, 2048])
def test_log_normal_lengths_have_their_mean_and_fill_the_row(mean: int) -> None:
    lengths = bench_cases.log_normal_seqlens(mean, 1_000_000, seed=3)
    assert sum(lengths) == 1_000_000 and min(lengths) >= 1
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.15)


@pytest.mark.parametrize("case", [TINY, TINY_WINDOW, replace(TINY, window_left=0)], ids=lambda case: case.window_left)
def test_useful_operations_count_visible_pairs(case: Case) -> None:
    assert case.visible_pairs == int(dense_mask(case).sum())
    forward = 4.0 * 4 * 8 * case.visible_pairs
    assert case.useful_flops(backward=False) == forward
    assert case.useful_flops(backward=True) == 3.5 * forward


@pytest.mark.parametrize("case", [TINY, TINY_WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("name", STAY)
def test_contenders_compute_the_same(name: str, case: Case) -> None:
    query, key, value, _ = case.inputs(torch.float64)
    group = case.num_heads // case.num_kv_heads
    scores = query @ key.repeat_interleave(group, 1).mT * case.head_dim**-0.5
    expected = scores.masked_fill(~dense_mask(case), -torch.inf).softmax(-1) @ value.repeat_interleave(group, 1)
    torch.testing.assert_close(CONTENDERS[name].make(case)(query, key, value), expected)


@pytest.mark.slow
def test_flex_computes_the_same() -> None:
    case = replace(TINY, head_dim=16, seqlens=(70, 1, 57))
    assert CONTENDERS["flex"].why_not(case) is None
    query, key, value, _ = case.inputs(torch.float32)
    with torch.no_grad():
        expected = CONTENDERS["dense"].make(case)(query, key, value)
        torch.testing.assert_close(CONTENDERS["flex"].make(case)(query, key, value), expected, rtol=1e-4, atol=1e-5)


def test_rows_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_measure, "GEMM_SIZE", 64)
    rows = bench_measure.measure_case(TINY, torch.float32, STAY, rounds=2, seconds_each=60.0, forward_only=False)
    assert {(row["contender"], row["pass"]) for row in rows} == {
        (name, step)
        for name in (
            *STAY,
            bench_measure.GEMM,
            *([bench_measure.TILES] if bench_measure.tiles_run(torch.float32) else []),
        )
        for step in bench_measure.PASSES
    }
    for row in rows:
        assert 3 <= row["runs"] <= 3 * bench_measure.TURN_RUNS and row["seconds"] > 0 and row["gflops"] > 0
        assert row["off_by"] < 1e-5


def test_tile_products_of_torch() -> None:
    if not HAS_TILES:
        assert bench_measure.tiles_run(torch.bfloat16) is None
        return
    for dtype in (torch.float32, torch.bfloat16):
        tiles = bench_measure.tiles_run(dtype)
        assert tiles is not None
        run, flops = tiles
        assert run() > 0.0 and flops == torch.get_num_threads() * 2000 * 2 * 64 * 128 * 128
    assert bench_measure.tiles_run(torch.float16) is None
    with pytest.raises(NotImplementedError, match="measured in float32 and bfloat16, got Half"):
        ops.cpu_brgemm_seconds(torch.float16, 1)


def test_interleaving_takes_turns_drops_the_warm_up_and_lets_the_slow_sit_out() -> None:
    calls: list[str] = []
    times = {"fast": iter([9.0, 3.0, 1.0, 2.0]), "slow": iter([50.0, 40.0])}

    def run(name: str) -> float:
        calls.append(name)
        return next(times[name])

    samples = bench_measure.interleave(
        {"fast": lambda: run("fast"), "slow": lambda: run("slow")}, rounds=3, seconds_each=60.0
    )
    assert calls == ["fast", "slow", "fast", "slow", "fast", "fast"]
    assert samples["fast"].best == 1.0 and samples["slow"].best == 40.0
    assert bench_measure.Samples([7.0]).best == 7.0


def test_a_turn_is_several_runs_of_what_is_fast() -> None:
    calls: list[str] = []
    times = {"fast": iter([0.2, 0.1, 0.1] * 2), "middle": iter([0.4, 0.2] * 2), "slow": iter([0.6, 0.5])}

    def run(name: str) -> float:
        calls.append(name)
        return next(times[name])

    runs = {name: lambda name=name: run(name) for name in times}
    samples = bench_measure.interleave(runs, rounds=1, seconds_each=60.0)
    assert calls == ["fast", "fast", "fast", "middle", "middle", "slow"] * 2
    assert [samples[name].best for name in times] == [0.1, 0.2, 0.5]


def test_dense_mask_sits_out_where_it_would_not_fit() -> None:
    reason = CONTENDERS["dense"].why_not(replace(TINY, seqlens=(20_000,)))
    assert reason is not None and "16384 x 16384" in reason


def test_schedule_on_more_cores() -> None:
    even = bench_schedule.simulate([Item(1.0)] * 8, cores=4)
    assert (even.makespan, even.efficiency) == (2.0, 1.0)
    waiting = bench_schedule.simulate([Item(1.0), Item(1.0), Item(6.0)], cores=2)
    assert waiting.makespan == 7.0 and waiting.efficiency == pytest.approx(8 / 14)
    with pytest.raises(ValueError, match="cores must be at least 1, got 0"):
        bench_schedule.simulate([Item(1.0)], cores=0)
    with pytest.raises(ValueError, match="items is empty"):
        bench_schedule.simulate([], cores=1)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", [TINY, TINY_WINDOW], ids=["causal", "window"])
def test_work_items_are_measured(case: Case, backward: bool) -> None:
    seconds = [item.seconds for item in bench_schedule.measured_items(case, torch.float32, backward, 2)]
    assert seconds and all(second >= 0.0 for second in seconds) and sum(seconds) > 0.0


def test_items_of_one_sum_wait_for_their_turns() -> None:
    # Four tiles of a second each; the second item is a tile behind the first, or waits for nothing at other tiles.
    first = Item(4.0, sum=3, num_tiles=4)
    assert bench_schedule.simulate([first, first], cores=2).makespan == 4.0  # done with a tile at the same time
    slow = Item(8.0, sum=3, num_tiles=4)
    assert bench_schedule.simulate([slow, first], cores=2).makespan == 8.0
    late = Item(1.0, sum=3, first_tile=1, num_tiles=1)  # done there at 6, not at 1
    assert bench_schedule.simulate([slow, late, Item(5.0)], cores=2).makespan == 11.0
    other = Item(1.0, sum=4, first_tile=1, num_tiles=1)
    assert bench_schedule.simulate([slow, other, Item(5.0)], cores=2).makespan == 8.0


def test_items_of_a_long_document_take_turns() -> None:
    case = replace(TINY, seqlens=(2048,))
    assert all(item.sum == -1 for item in bench_schedule.measured_items(case, torch.float32, False, 2))
    items = bench_schedule.measured_items(case, torch.float32, True, 2)
    by_sum: dict[int, list[Item]] = {}
    for item in items:
        by_sum.setdefault(item.sum, []).append(item)
    assert len(by_sum) == case.num_kv_heads and -1 not in by_sum
    for blocks in by_sum.values():  # each block of keys is seen by the queries from its own place to the end
        ends = {item.first_tile + item.num_tiles for item in blocks}
        firsts = [item.first_tile for item in blocks]
        assert len(ends) == 1 and len(blocks) > 1
        assert firsts == sorted(firsts) and firsts[0] == 0


def test_targets_are_looked_at_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "kernels.png").mkdir()
    with pytest.raises(InputError, match=r"--plot .*kernels\.png is a folder; pass a file to write"):
        bench.run_bench(BenchOptions(plot=tmp_path))
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    check_targets(tmp_path / "file", tmp_path / "new" / "page.md", None, ())
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    (tmp_path / "file").write_bytes(b"\xff\xfe mine")
    with pytest.raises(InputError, match=r"--markdown .*file is not UTF-8 \(invalid start byte\); pass another file"):
        bench.run_bench(BenchOptions(markdown=tmp_path / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kernels.png"]


def test_schedule_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [case.seq_len for case in bench_schedule.schedule_cases()] == [32768, 32768]

    def items(case: Case, dtype: torch.dtype, backward: bool, cores: int) -> list[Item]:
        return [Item(0.5)] * (3 if backward else 4)

    monkeypatch.setattr(bench_schedule, "measured_items", items)
    rows = bench_schedule.measure_schedules(2, "float32")
    assert [row["efficiency"] for row in rows] == [1.0, 0.75, 1.0, 0.75]
    assert bench_report.schedule_grid(rows).rows[1] == ("M1 S 32768", "float32", "backward", "2", "75%")


def test_overheads_have_a_row_each() -> None:
    calls = bench_overheads.small_calls(rounds=1)
    assert len(calls) == 3 and all(row["microseconds"] > 0 for row in calls)
    layout = bench_overheads.layout(rounds=1, seq_len=2048, documents=20)
    assert "2,048 tokens" in layout["what"] and layout["microseconds"] > 0
    lines = bench_report.overhead_grid([layout, {"what": "threads", "times": 1.9}]).rows
    assert lines[0][1].endswith(" us") and lines[1] == ("threads", "1.90x")


def test_thread_scaling_leaves_the_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_overheads, "kernel_cases", lambda: {"M1": TINY})
    threads = torch.get_num_threads()
    rows = bench_overheads.thread_scaling(torch.float32, rounds=1, seconds_each=5.0, cases=("M1",))
    assert torch.get_num_threads() == threads
    assert rows[0]["what"] == f"M1 float32, {threads} threads against one" and rows[0]["times"] > 0


@pytest.fixture
def tiny_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_measure, "GEMM_SIZE", 64)
    sweep = [replace(TINY, name=name) for name in ("mean 4", "mean 8")]
    monkeypatch.setattr(
        bench, "kernel_cases", lambda: {"M1": replace(TINY, name="M1"), "M6": replace(TINY_WINDOW, name="M6")}
    )
    monkeypatch.setattr(bench, "length_sweep", lambda: sweep)
    monkeypatch.setattr(bench, "row_sweep", lambda sizes=(15, 30): [replace(TINY, name=f"S {size}") for size in sizes])


def test_the_whole_command_writes_what_was_asked_for(tiny_cases: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "performance.md").write_text("# Speed\n\nText that stays.\n", encoding="utf-8")
    options = BenchOptions(
        cases=("M1", "M6"),
        contenders=STAY,
        rounds=1,
        seconds_each=1.0,
        threads=1,
        sweeps=True,
        json=tmp_path / "new" / "bench.json",
        plot=tmp_path / "plots",
        markdown=tmp_path / "performance.md",
    )
    console = Console(file=io.StringIO(), width=160)
    threads = torch.get_num_threads()
    results = bench.run_bench(options, console)
    assert torch.get_num_threads() == threads
    assert json.loads((tmp_path / "new" / "bench.json").read_text(encoding="utf-8")) == results
    assert {row["dtype"] for row in results["kernels"]} == {"float32", "bfloat16"}
    assert results["machine"]["threads"] == "1" and results["machine"]["commit"]
    text = console.file.getvalue()
    assert "forward+backward, bfloat16: useful GFLOP/s" in text and "over loop" in text
    page = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert page.startswith("# Speed\n\nText that stays.\n") and "| M6 tiny |" in page
    again = bench_report.markdown_page(results, tmp_path / "performance.md")
    assert again.count("bench: begin") == 1 and "Text that stays." in again
    plots = sorted(plot.name for plot in (tmp_path / "plots").iterdir())
    assert plots == ["cost_per_token.png", "gflops_by_document_length.png", "kernels.png"]
    assert set(plots) < set(PLOT_FILES)


def test_tables_of_training_and_memory() -> None:
    training = [
        {"tokens": 4096, "dtype": "float32", "contender": name, "seconds": seconds}
        for name, seconds in (("packed_sdpa", 2.0), ("transformers", 6.0), ("no attention", 1.6))
    ]
    assert bench_report.training_grid(training).rows == [("4,096 float32", "6.00", "2.00", "1.60", "3.00x", "1.25x")]
    memory = [
        {"seq_len": 65536, "dtype": "float32", "contender": "packed_sdpa", "extra_peak_mib": 12.4},
        {"seq_len": 65536, "dtype": "float32", "contender": "dense", "why_not": "too large"},
    ]
    assert bench_report.memory_grid(memory).rows == [("65,536", "12", "-")]


def test_training_rows_on_a_tiny_llama() -> None:
    pytest.importorskip("transformers")
    from packed_sdpa.bench_training import FLOOR, STOCK, measure_training

    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    rows = {
        row["contender"]: row for row in measure_training(128, torch.float32, rounds=1, seconds_each=30.0, llama=tiny)
    }
    assert set(rows) == {"packed_sdpa", STOCK, FLOOR}
    assert rows["packed_sdpa"]["loss"] == pytest.approx(rows[STOCK]["loss"], rel=1e-4)
    assert rows[FLOOR]["loss"] != pytest.approx(rows[STOCK]["loss"], rel=1e-6)
    ours = rows["packed_sdpa"]  # two layers, forward and recompute
    assert ours["runs"] >= 2 and ours["calls_taken"] == ours["runs"] * 2 * 2 and ours["calls_passed"] == 0


@pytest.mark.slow
def test_memory_in_a_process_of_its_own() -> None:
    from packed_sdpa.bench_memory import extra_peak_mib

    dense = extra_peak_mib("dense", 4096, "float32", threads=1)
    assert dense > extra_peak_mib("packed_sdpa", 4096, "float32", threads=1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cases", "M1,M9"], "--cases must be of M1, M2, M3, M4, M5, M6, M7, got 'M9'"),
        (["--cases", ","], "--cases is empty; pass at least one of"),
        (["--contenders", "xformers"], "--contenders must be of packed_sdpa, loop_expanded"),
        (["--dtype", "int8"], "--dtype must be of float32, bfloat16, float16, got 'int8'"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--seconds-each", "0"], "--seconds-each must be above 0, got 0.0"),
        (["--seconds-each", "nan"], "--seconds-each must be above 0, got nan"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--memory", "4096,x"], "--memory must be counts of at least 1 separated by commas, got '4096,x'"),
        (["--json", "."], "--json . is a folder; pass a file to write"),
        (["--markdown", "/dev/null/page.md"], "--markdown /dev/null/page.md: /dev/null is a file; pass a folder"),
        (["--json", "/proc/new/bench.json"], "--json /proc/new/bench.json cannot be written ("),
        (["--json", "x" * 300], "cannot be written ("),
        (["--plot", "/dev/null"], "--plot /dev/null: /dev/null is a file; pass a folder to write into"),
        (["--plot", "/proc/new"], "--plot /proc/new cannot be written into ("),
        (["--device", "cuda", "--json", "."], "--json . is a folder; pass a file to write"),
        (["--device", "cuda", "--plot", "/proc/new"], "--plot /proc/new cannot be written into ("),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and expected in captured.err
