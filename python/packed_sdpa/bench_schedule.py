"""How well the work items of a call would fill many cores, from times measured on few."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from packed_sdpa._library import ops
from packed_sdpa.errors import InputError


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


def require_item_times() -> None:
    """Raises InputError when the library does not report the times of its work items."""
    if not hasattr(ops, "cpu_work_item_seconds"):
        raise InputError(
            "--simulate-cores: this build of the library does not report the times of its work items; "
            "leave the option out"
        )
