"""How well the work items of a call would fill many cores, from times measured on few."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import packed_sdpa
from packed_sdpa._library import ops
from packed_sdpa.bench_cases import Case, kernel_cases, log_normal_seqlens


@dataclass(frozen=True)
class Schedule:
    """``makespan`` seconds until the last core is done; ``efficiency`` is the share of all cores' time that is work."""

    cores: int
    makespan: float
    efficiency: float


def simulate(item_seconds: Sequence[float], cores: int) -> Schedule:
    """Items in order, each to the core that is free first, as the thread pool takes them."""
    if cores < 1:
        raise ValueError(f"cores must be at least 1, got {cores}")
    if not item_seconds:
        raise ValueError("item_seconds is empty; a call with at least one document has at least one item")
    free = [0.0] * cores
    for seconds in item_seconds:
        heapq.heapreplace(free, free[0] + seconds)
    makespan = max(free)
    return Schedule(cores, makespan, sum(item_seconds) / (cores * makespan))


def schedule_cases() -> list[Case]:
    """M1's heads at 32,768 tokens: documents of mean 512, and one long document."""
    m1 = kernel_cases()["M1"]
    return [
        replace(m1, name="M1 S 32768", title="mean 512", seqlens=log_normal_seqlens(512, 32768)),
        replace(m1, name="one of 32768", title="one document", seqlens=(32768,)),
    ]


def measure_schedules(cores: int, dtype_name: str) -> list[dict[str, Any]]:
    """One row a case and pass: efficiency on so many cores, from item times measured here."""
    rows: list[dict[str, Any]] = []
    for case in schedule_cases():
        for step, backward in (("forward", False), ("backward", True)):
            schedule = simulate(item_seconds(case, getattr(torch, dtype_name), backward), cores)
            row = {"case": case.name, "dtype": dtype_name, "pass": step, "cores": cores}
            rows.append({**row, "efficiency": schedule.efficiency, "seconds": schedule.makespan})
    return rows


def item_seconds(case: Case, dtype: torch.dtype, backward: bool) -> list[float]:
    """Seconds of each work item of a call, in the order in which threads take them."""
    query, key, value, _ = case.inputs(dtype)
    layout = packed_sdpa.PackedLayout.from_doc_ids(case.doc_ids)
    return list(
        ops.cpu_work_item_seconds(query, key, value, list(layout.tensors()), True, case.window_left, 0, backward)
    )
