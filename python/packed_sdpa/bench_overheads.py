"""What a call costs beside its arithmetic: small calls, the layout, and how much a second thread brings."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import packed_sdpa
from packed_sdpa import packed
from packed_sdpa.bench_cases import Case, kernel_cases, log_normal_seqlens
from packed_sdpa.bench_contenders import CONTENDERS, OURS
from packed_sdpa.bench_measure import interleave, timed_both

_CALLS = 50  # of a small call, timed together

Row = dict[str, Any]


def _repeated(call: Callable[[], object]) -> Callable[[], float]:
    """Seconds of one call, from many."""

    def run() -> float:
        started = time.perf_counter()
        for _ in range(_CALLS):
            call()
        return (time.perf_counter() - started) / _CALLS

    return run


def small_calls(rounds: int) -> list[Row]:
    """Seconds of a forward on one document of 16 tokens, 8 heads of 64, float32, by three entries and stock SDPA."""
    case = Case("small", "one document of 16", 8, 8, 64, (16,))
    query, key, value, _ = case.inputs(torch.float32)
    layout = packed_sdpa.PackedLayout.from_doc_ids(case.doc_ids)
    packed.enable_cp1_packed_varlen(case.doc_ids, "flash")
    runs = {
        "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        "packed_attention": lambda: packed_sdpa.packed_attention(query, key, value, layout),
        "the armed SDPA replacement": lambda: packed._packed_varlen_sdpa(query, key, value, is_causal=True),
    }
    try:
        with torch.no_grad():
            samples = interleave({name: _repeated(run) for name, run in runs.items()}, 10 * rounds, 10.0)
    finally:
        packed.disable_cp1_packed_varlen()
    return [
        {"what": f"forward of 16 tokens, 8 heads: {name}", "microseconds": sample.best * 1e6}
        for name, sample in samples.items()
    ]


def layout(rounds: int, seq_len: int = 131_072, documents: int = 1000) -> Row:
    """Seconds of PackedLayout.from_doc_ids."""
    seqlens = log_normal_seqlens(seq_len // documents, seq_len)
    ids = Case("layout", "", 1, 1, 1, seqlens).doc_ids
    samples = interleave({"layout": _once(lambda: packed_sdpa.PackedLayout.from_doc_ids(ids))}, 4 * rounds, 10.0)
    what = f"PackedLayout.from_doc_ids, {seq_len:,} tokens, {len(seqlens):,} documents"
    return {"what": what, "microseconds": samples["layout"].best * 1e6}


def _once(call: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return run


def thread_scaling(
    dtype: torch.dtype, rounds: int, seconds_each: float, cases: tuple[str, ...] = ("M1", "M3")
) -> list[Row]:
    """How many times as fast forward and backward are with all threads as with one."""
    threads = torch.get_num_threads()
    rows = []
    for name in cases:
        case = kernel_cases()[name]
        inputs = case.inputs(dtype)
        attention = CONTENDERS[OURS].make(case)

        def run(count: int, attention: Any = attention, inputs: Any = inputs) -> float:
            torch.set_num_threads(count)
            try:
                return timed_both(attention, *inputs)
            finally:
                torch.set_num_threads(threads)

        samples = interleave({"one": lambda: run(1), "all": lambda: run(threads)}, rounds, seconds_each)
        ratio = samples["one"].best / samples["all"].best
        dtype_name = str(dtype).removeprefix("torch.")
        rows.append({"what": f"{name} {dtype_name}, {threads} threads against one", "times": ratio})
    return rows


def measure_overheads(dtypes: list[torch.dtype], rounds: int, seconds_each: float) -> list[Row]:
    """All of the above."""
    rows = [*small_calls(rounds), layout(rounds)]
    for dtype in dtypes:
        rows += thread_scaling(dtype, rounds, seconds_each)
    return rows
