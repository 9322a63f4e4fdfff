"""Timing of contenders side by side: interleaved rounds, the minimum of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packed_sdpa._library import ops
from packed_sdpa.bench_cases import Case
from packed_sdpa.bench_contenders import CONTENDERS, Attention

GEMM = "torch.mm"
GEMM_SIZE = 2048
TILES = "brgemm tiles"
_TILE_PRODUCTS, _TILE_FLOPS = 2000, 2.0 * 64 * 128 * 128
TURN_RUNS, TURN_SECONDS = 3, 0.5
PASSES = ("forward", "forward+backward")


@dataclass
class Samples:
    """Seconds of each run of one contender; the first is a warm-up and counts only when it is the only one."""

    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.seconds[1:] or self.seconds)


def interleave(
    runs: dict[str, Callable[[], float]], rounds: int, seconds_each: float, on_run: Callable[[], None] | None = None
) -> dict[str, Samples]:
    """Gives every contender a turn a round, after one round of warm-up, so that what slows the machine down for a
    while slows all of them. Each run returns its seconds. A turn is up to ``TURN_RUNS`` runs, while it has taken less
    than ``TURN_SECONDS``: the first of them finds the caches and the pages as another contender left them. One that has
    taken ``seconds_each`` in total sits out."""
    samples = {name: Samples() for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            turn: list[float] = []
            while (
                len(turn) < TURN_RUNS and sum(turn) < TURN_SECONDS and sum(samples[name].seconds + turn) < seconds_each
            ):
                turn.append(run())
            samples[name].seconds += turn
            if on_run is not None:
                on_run()
    return samples


def timed_forward(attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Seconds of one forward without gradients."""
    with torch.no_grad():
        started = time.perf_counter()
        attention(query, key, value)
        return time.perf_counter() - started


def timed_both(attention: Attention, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> float:
    """Seconds of one forward and its backward into query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    started = time.perf_counter()
    attention(*leaves).backward(grad_out)
    return time.perf_counter() - started


def gemm_run(dtype: torch.dtype) -> tuple[Callable[[], float], float]:
    """A run of torch.mm of 2048 x 2048 matrices, and its floating-point operations."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, generator=generator).to(dtype) for _ in range(2))

    def run() -> float:
        started = time.perf_counter()
        torch.mm(left, right)
        return time.perf_counter() - started

    return run, 2.0 * GEMM_SIZE**3


def tiles_run(dtype: torch.dtype) -> tuple[Callable[[], float], float] | None:
    """A run of torch's own 64 x 128 x 128 tile product on one thread, as seconds for all threads' share, and the
    floating-point operations of all of them; None where torch has no such product for the type or machine."""
    try:
        ops.cpu_brgemm_seconds(dtype, 1)
    except NotImplementedError:
        return None
    return lambda: ops.cpu_brgemm_seconds(dtype, _TILE_PRODUCTS), (
        torch.get_num_threads() * _TILE_PRODUCTS * _TILE_FLOPS
    )


def measure_case(
    case: Case,
    dtype: torch.dtype,
    names: tuple[str, ...],
    *,
    rounds: int,
    seconds_each: float,
    forward_only: bool,
    on_run: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """One row a contender and pass: seconds, useful GFLOP/s, runs, and how far its output is from the first one's.
    A contender that cannot run the case has ``why_not`` instead."""
    torch.compiler.reset()
    query, key, value, grad_out = case.inputs(dtype)
    functions: dict[str, Attention] = {}
    rows: list[dict[str, Any]] = []
    common = {"case": case.name, "title": case.title, "dtype": str(dtype).removeprefix("torch.")}
    for name in names:
        why_not = CONTENDERS[name].why_not(case)
        if why_not is None:
            functions[name] = CONTENDERS[name].make(case)
        else:
            rows += [{**common, "pass": step, "contender": name, "why_not": why_not} for step in PASSES]
    off_by = _differences(functions, query, key, value)
    peaks = {GEMM: gemm_run(dtype), **({TILES: tiles} if (tiles := tiles_run(dtype)) is not None else {})}
    for step in PASSES[:1] if forward_only else PASSES:
        backward = step == PASSES[1]
        runs = {name: peak for name, (peak, _) in peaks.items()}
        for name, function in functions.items():
            if not backward:
                runs[name] = lambda function=function: timed_forward(function, query, key, value)  # type: ignore[misc]
            elif CONTENDERS[name].has_backward:
                runs[name] = lambda function=function: timed_both(function, query, key, value, grad_out)  # type: ignore[misc]
        for name, samples in interleave(runs, rounds, seconds_each, on_run).items():
            flops = peaks[name][1] if name in peaks else case.useful_flops(backward)
            rows.append(
                {
                    **common,
                    "pass": step,
                    "contender": name,
                    "seconds": samples.best,
                    "gflops": flops / samples.best / 1e9,
                    "runs": len(samples.seconds),
                    "off_by": off_by.get(name, 0.0),
                }
            )
    return rows


def _differences(functions: dict[str, Attention], query: Tensor, key: Tensor, value: Tensor) -> dict[str, float]:
    """Largest absolute difference of each output from the first one's: contenders that disagree measure nothing."""
    differences: dict[str, float] = {}
    expected: Tensor | None = None
    with torch.no_grad():
        for name, function in functions.items():
            out = function(query, key, value).float()
            expected = out if expected is None else expected
            differences[name] = (out - expected).abs().max().item()
    return differences
