"""`packed-sdpa bench`: attention and training steps against every peer, side by side in one process."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import packed_sdpa
from packed_sdpa import bench_report, bench_schedule, host
from packed_sdpa.bench_cases import Case, kernel_cases, length_sweep, row_sweep
from packed_sdpa.bench_contenders import CONTENDERS
from packed_sdpa.bench_measure import measure_case
from packed_sdpa.bench_memory import extra_peak_mib
from packed_sdpa.bench_options import PLOT_FILES, BenchOptions, check_targets
from packed_sdpa.bench_overheads import measure_overheads
from packed_sdpa.errors import import_extra
from packed_sdpa.tables import make_console

Results = dict[str, Any]

_TRAINING_SECONDS = 3  # of `--seconds-each`


def run_bench(options: BenchOptions, console: Console | None = None) -> Results:
    """Measures what the options ask for, prints tables, writes the files asked for, and returns every number.

    The result has ``machine`` (strings) and lists of rows: ``kernels`` and the sweeps ``by_document_length`` and
    ``by_row_length`` (a row a case, dtype, pass and contender), ``training``, ``memory``, ``overheads``, ``schedule``.
    """
    console = console or make_console()
    check_targets(options.json, options.markdown, options.plot, PLOT_FILES)
    if options.plot is not None:
        import_extra("matplotlib", "demo")
    if options.training_tokens:
        import_extra("transformers", "demo")
    threads = torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    results: Results = {"machine": machine()}
    try:
        with Progress(console=console, transient=True) as progress:
            for key, rows in _sections(options, progress):
                results[key] = rows
                if options.json is not None:  # after each section, so that an interrupted run keeps its numbers
                    _write(options.json, json.dumps(results, indent=1) + "\n")
    finally:
        torch.set_num_threads(threads)
    bench_report.print_tables(console, results)
    if options.markdown is not None:
        _write(options.markdown, bench_report.markdown_page(results, options.markdown))
    for file in (options.json, options.markdown):
        if file is not None:
            console.print(f"wrote {file}", highlight=False, soft_wrap=True)
    if options.plot is not None:
        options.plot.mkdir(parents=True, exist_ok=True)
        for plot in bench_report.write_plots(options.plot, results):
            console.print(f"wrote {plot}", highlight=False, soft_wrap=True)
    return results


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _sections(options: BenchOptions, progress: Progress) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    cases = [kernel_cases()[name] for name in options.cases]
    yield "kernels", _measure_cases("packings", cases, options, options.contenders, progress)
    if options.sweeps:
        few = tuple(name for name in options.contenders if name != "flex")
        quick = replace(options, rounds=min(3, options.rounds), seconds_each=options.seconds_each / 4)
        for key, sweep in (("by_document_length", length_sweep()), ("by_row_length", row_sweep())):
            yield key, _measure_cases(key.replace("_", " "), sweep, quick, few, progress)
    if options.training_tokens:
        yield "training", _measure_training(options, progress)
    if options.memory:
        yield "memory", _measure_memory(options, progress)
    if options.overheads:
        progress.add_task("overheads", total=None)
        dtypes = [getattr(torch, dtype) for dtype in options.dtypes]
        yield "overheads", measure_overheads(dtypes, options.rounds, options.seconds_each)
    if options.simulate_cores is not None:
        progress.add_task("work items", total=None)
        parts = [bench_schedule.measure_schedules(options.simulate_cores, dtype) for dtype in options.dtypes]
        yield "schedule", [row for part in parts for row in part]


def _measure_cases(
    title: str, cases: list[Case], options: BenchOptions, names: tuple[str, ...], progress: Progress
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    task = progress.add_task(title, total=len(cases) * len(options.dtypes))
    for dtype in options.dtypes:
        for case in cases:
            progress.update(task, description=f"{title}: {case.name} {dtype}")
            rows += measure_case(
                case,
                getattr(torch, dtype),
                names,
                rounds=options.rounds,
                seconds_each=options.seconds_each,
                forward_only=options.forward_only,
            )
            progress.advance(task)
    return rows


def _measure_training(options: BenchOptions, progress: Progress) -> list[dict[str, Any]]:
    from packed_sdpa.bench_training import measure_training

    dtypes = [dtype for dtype in options.dtypes if dtype != "float16"]  # its gradients need loss scaling
    task = progress.add_task("training steps", total=len(options.training_tokens) * len(dtypes))
    rows: list[dict[str, Any]] = []
    for tokens in options.training_tokens:
        for dtype in dtypes:
            progress.update(task, description=f"training steps: {tokens:,} tokens {dtype}")
            seconds = _TRAINING_SECONDS * options.seconds_each  # a step is many calls: more than its warm-up should fit
            rows += measure_training(tokens, getattr(torch, dtype), rounds=options.rounds, seconds_each=seconds)
            progress.advance(task)
    return rows


def _measure_memory(options: BenchOptions, progress: Progress) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    names = [name for name in options.contenders if CONTENDERS[name].has_backward]
    task = progress.add_task("memory", total=len(options.memory) * len(names))
    for size in options.memory:
        for name in names:
            progress.update(task, description=f"memory: {size:,} tokens, {name}")
            row: dict[str, Any] = {"seq_len": size, "dtype": options.dtypes[0], "contender": name}
            why_not = CONTENDERS[name].why_not(row_sweep((size,))[0])
            if why_not is None:
                row["extra_peak_mib"] = extra_peak_mib(name, size, options.dtypes[0], torch.get_num_threads())
            else:
                row["why_not"] = why_not
            rows.append(row)
            progress.advance(task)
    return rows


def machine() -> dict[str, str]:
    """What the numbers depend on, the source commit included."""
    return {
        **host.machine(),
        "packed_sdpa": packed_sdpa.__version__,
        "cpu_isa": host.cpu_isa(),
        "commit": _commit(),
    }


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown (no git)"
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown (not a checkout)"
