"""How well the work items of a call would fill many cores, from times measured on few."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import packed_sdpa
from packed_sdpa._library import ops
from packed_sdpa.bench_cases import Case, kernel_cases, log_normal_seqlens

_SECONDS_ONCE = 20.0  # a pass that takes longer is measured once, others three times: the least of each item


@dataclass(frozen=True)
class Item:
    """A work item: seconds on one thread and, where items add to one sum in turn, the tiles at which it has a turn.

    Items of one ``sum`` (-1: of none) follow each other. One goes through its tiles from the last to the first and
    waits at each until the item before it is done there.
    """

    seconds: float
    sum: int = -1
    first_tile: int = 0
    num_tiles: int = 0


@dataclass(frozen=True)
class Schedule:
    """``makespan`` seconds until the last core is done; ``efficiency`` is the share of all cores' time that is work."""

    cores: int
    makespan: float
    efficiency: float


def simulate(items: Sequence[Item], cores: int) -> Schedule:
    """Items in order, each to the core that is free first, as the thread pool takes them, with their waits."""
    if cores < 1:
        raise ValueError(f"cores must be at least 1, got {cores}")
    if not items:
        raise ValueError("items is empty; a call with at least one document has at least one")
    free = [0.0] * cores
    tile_ends: dict[int, Tensor] = {}  # of each sum, when each tile was last done
    for item in items:
        begin = free[0]
        if item.sum < 0 or item.num_tiles == 0:
            heapq.heapreplace(free, begin + item.seconds)
            continue
        last = item.first_tile + item.num_tiles
        before = tile_ends.get(item.sum, torch.zeros(0, dtype=torch.float64))
        before = torch.nn.functional.pad(before, (0, max(0, last - len(before))))
        # The i-th tile from the end is done at end[i] = max(end[i - 1] + seconds of a tile, before[i]).
        work = item.seconds / item.num_tiles * torch.arange(1, item.num_tiles + 1, dtype=torch.float64)
        ends = work + (before[item.first_tile : last].flip(0) - work).clamp(min=begin).cummax(0).values
        before[item.first_tile : last] = ends.flip(0)
        tile_ends[item.sum] = before
        heapq.heapreplace(free, float(ends[-1]))
    makespan = max(free)
    return Schedule(cores, makespan, sum(item.seconds for item in items) / (cores * makespan))


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
            schedule = simulate(measured_items(case, getattr(torch, dtype_name), backward, cores), cores)
            row = {"case": case.name, "dtype": dtype_name, "pass": step, "cores": cores}
            rows.append({**row, "efficiency": schedule.efficiency, "seconds": schedule.makespan})
    return rows


def measured_items(case: Case, dtype: torch.dtype, backward: bool, cores: int) -> list[Item]:
    """The work items of a call on so many cores, in the order in which threads take them."""
    query, key, value, _ = case.inputs(dtype)
    layout = packed_sdpa.PackedLayout.from_doc_ids(case.doc_ids)

    def measure() -> list[Item]:
        columns = ops.cpu_work_items(
            query, key, value, list(layout.tensors()), True, case.window_left, 0, backward, cores
        )
        return [Item(*values) for values in zip(*columns, strict=True)]

    items = measure()
    if sum(item.seconds for item in items) > _SECONDS_ONCE:  # many items, so a disturbed one counts little
        return items
    return [min(tries, key=lambda item: item.seconds) for tries in zip(items, measure(), measure(), strict=True)]
