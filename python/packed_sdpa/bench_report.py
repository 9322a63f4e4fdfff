"""Tables, plots and the Markdown page of the benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from packed_sdpa import plots
from packed_sdpa.bench_contenders import CONTENDERS, LOOPS, OURS
from packed_sdpa.bench_measure import GEMM, PASSES, TILES, TURN_RUNS

Row = dict[str, Any]
_LEGEND = (
    "Useful operations: 4 Hq D for each query and key it sees, 2.5 times that backward; masked tiles do not count. The "
    "loop is one stock SDPA call a document on tensors cut by `torch.split`; over loop: packed_sdpa over the better of "
    "the two; torch.mm is 2048 x 2048 x 2048 in the same dtype and run; brgemm tiles: one thread's rate of torch's own "
    "64 x 128 x 128 tile product out of its cache, times the threads. FlexAttention is compiled and has no backward "
    "on CPU."
)
_BEGIN, _END = "<!-- bench: begin -->", "<!-- bench: end -->"


class Grid(NamedTuple):
    """A table before it is printed by rich or written as Markdown."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def kernel_grid(rows: Iterable[Row], dtype: str, step: str) -> Grid:
    """Useful GFLOP/s of one dtype and pass: a line a case, with ours over the better loop and over torch.mm."""
    chosen = [row for row in rows if row["dtype"] == dtype and row["pass"] == step]
    names = [name for name in CONTENDERS if any(row["contender"] == name for row in chosen)]
    head = ("case", *(CONTENDERS[name].title for name in names), GEMM, TILES, "over loop", "of torch.mm")
    lines = []
    for case in dict.fromkeys(row["case"] for row in chosen):
        speed = {row["contender"]: row["gflops"] for row in chosen if row["case"] == case and "gflops" in row}
        title = next(row["title"] for row in chosen if row["case"] == case)
        loops = [speed[name] for name in LOOPS if name in speed]
        ours = speed.get(OURS)
        lines.append(
            (
                case if title == case else f"{case} {title}",
                *(_speed(speed.get(name)) for name in (*names, GEMM, TILES)),
                f"{ours / max(loops):.2f}x" if ours and loops else "-",
                f"{ours / speed[GEMM]:.0%}" if ours and GEMM in speed else "-",
            )
        )
    return Grid(f"{step}, {dtype}: useful GFLOP/s", head, lines)


def _speed(gflops: float | None) -> str:
    if gflops is None:
        return "-"
    return f"{gflops:,.0f}" if gflops >= 10 else f"{gflops:.1f}"


def training_grid(rows: Iterable[Row]) -> Grid:
    """Seconds of a training step, and ours over stock and over the floor."""
    from packed_sdpa.bench_training import FLOOR, STOCK

    rows = list(rows)
    lines = []
    for tokens, dtype in dict.fromkeys((row["tokens"], row["dtype"]) for row in rows):
        seconds = {row["contender"]: row["seconds"] for row in rows if (row["tokens"], row["dtype"]) == (tokens, dtype)}
        lines.append(
            (
                f"{tokens:,} {dtype}",
                *(f"{seconds[name]:.2f}" for name in (STOCK, OURS, FLOOR)),
                f"{seconds[STOCK] / seconds[OURS]:.2f}x",
                f"{seconds[OURS] / seconds[FLOOR]:.2f}x",
            )
        )
    head = ("tokens", "Transformers", "packed_sdpa", "no attention", "faster than Transformers", "time over the floor")
    return Grid("training step of a small Llama, with checkpointing: seconds", head, lines)


def memory_grid(rows: Iterable[Row]) -> Grid:
    """MiB beyond inputs, outputs and gradients."""
    rows = list(rows)
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines = []
    for size in dict.fromkeys(row["seq_len"] for row in rows):
        found = {row["contender"]: row for row in rows if row["seq_len"] == size}
        cells = (found[name].get("extra_peak_mib") for name in names)
        lines.append((f"{size:,}", *("-" if cell is None else f"{cell:,.0f}" for cell in cells)))
    head = ("tokens in the row", *(CONTENDERS[name].title for name in names))
    return Grid(f"forward and backward, {rows[0]['dtype']}: extra peak memory, MiB", head, lines)


def overhead_grid(rows: Iterable[Row]) -> Grid:
    """Microseconds of small calls and of the layout; how many times as fast with all threads."""
    lines = [
        (row["what"], f"{row['microseconds']:,.1f} us" if "microseconds" in row else f"{row['times']:.2f}x")
        for row in rows
    ]
    return Grid("overheads and threads", ("", ""), lines)


def schedule_grid(rows: Iterable[Row]) -> Grid:
    """Efficiency of the simulated schedule."""
    lines = [(row["case"], row["dtype"], row["pass"], f"{row['cores']}", f"{row['efficiency']:.0%}") for row in rows]
    head = ("case", "dtype", "pass", "cores", "efficiency")
    return Grid("work items on more cores, simulated from their times here", head, lines)


def grids(results: dict[str, Any]) -> list[Grid]:
    """Every table that the results have rows for."""
    tables = []
    for key in ("kernels", "by_document_length", "by_row_length"):
        rows = results.get(key, [])
        measured = [row for row in rows if "gflops" in row]
        for dtype in dict.fromkeys(row["dtype"] for row in measured):
            for step in PASSES:
                if any(row["dtype"] == dtype and row["pass"] == step for row in measured):
                    tables.append(kernel_grid(rows, dtype, step))
    if results.get("training"):
        tables.append(training_grid(results["training"]))
    if results.get("memory"):
        tables.append(memory_grid(results["memory"]))
    if results.get("overheads"):
        tables.append(overhead_grid(results["overheads"]))
    if results.get("schedule"):
        tables.append(schedule_grid(results["schedule"]))
    return tables


def print_tables(console: Console, results: dict[str, Any]) -> None:
    """All tables, and why contenders sat out."""
    console.print("  ".join(f"{name} {value}" for name, value in results["machine"].items()), highlight=False)
    for grid in grids(results):
        table = Table(title=grid.title, title_justify="left", show_edge=False)
        for index, title in enumerate(grid.head):
            table.add_column(title, justify="right" if index else "left")
        for line in grid.rows:
            table.add_row(*line)
        console.print()
        console.print(table, highlight=False)
    for reason in _reasons(results):
        console.print(reason, highlight=False)


def _reasons(results: dict[str, Any]) -> list[str]:
    rows = [row for key in ("kernels", "by_document_length", "by_row_length", "memory") for row in results.get(key, [])]
    found = (f"{CONTENDERS[row['contender']].title} sat out: {row['why_not']}" for row in rows if "why_not" in row)
    return list(dict.fromkeys(found))


def markdown(results: dict[str, Any]) -> str:
    """The tables in Markdown, with machine, versions and commit."""
    parts = [
        f"Measured by `packed-sdpa bench` in one run: minimum of interleaved rounds, in each a turn of up to "
        f"{TURN_RUNS} runs, same threads for all."
    ]
    parts.append("\n".join(f"- {name}: {value}" for name, value in results["machine"].items()))
    parts.append(_LEGEND)
    for grid in grids(results):
        sides = "| --- |" + " ---: |" * (len(grid.head) - 1)
        lines = ["| " + " | ".join(line) + " |" for line in (grid.head, *grid.rows)]
        parts.append("\n".join([f"### {grid.title[0].upper()}{grid.title[1:]}", "", lines[0], sides, *lines[1:]]))
    parts += _reasons(results)
    return "\n\n".join(parts)


def markdown_page(results: dict[str, Any], file: Path) -> str:
    """The file's text with the part between its two bench comments replaced, or with that part added at its end."""
    old = file.read_text(encoding="utf-8") if file.exists() else "# Performance\n"
    part = f"{_BEGIN}\n\n{markdown(results)}\n\n{_END}"
    if _BEGIN in old and _END in old:
        return old[: old.index(_BEGIN)] + part + old[old.index(_END) + len(_END) :]
    return f"{old.rstrip()}\n\n{part}\n"


def write_plots(folder: Path, results: dict[str, Any]) -> list[Path]:
    """Useful GFLOP/s by document length, cost per token by row length, memory by row length: those with rows."""
    written = []
    for key, name, draw in (
        ("kernels", "kernels.png", plots.plot_kernels),
        ("by_document_length", "gflops_by_document_length.png", plots.plot_speed_by_length),
        ("by_row_length", "cost_per_token.png", plots.plot_cost_per_token),
        ("memory", "memory.png", plots.plot_memory),
    ):
        if results.get(key):
            written.append(draw(folder / name, results[key]))
    return written
