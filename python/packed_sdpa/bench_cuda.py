"""Packed attention on CUDA against its peers, forward and backward, timed by CUDA events.

``packed-sdpa bench --device cuda`` or ``python -m packed_sdpa.bench_cuda``. Needs torch alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import packed_sdpa
from packed_sdpa.bench_cases import Case, log_normal_seqlens
from packed_sdpa.bench_options import check_targets
from packed_sdpa.errors import InputError
from packed_sdpa.png import write_bars

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
PLOT_FILE = "bench_cuda.png"
_WARMUP_CALLS = 2
_DENSE_LIMIT = 32_768
_FLEX_SHAPES = (("M1", 8192), ("M2", 8192), ("M1", 32_768))  # each is a compilation


def cuda_cases(seq_lens: Sequence[int]) -> list[Case]:
    """M1 (documents of mean 512), M2 (mean 2048), M3 (one document) at each length; 16 query and 4 kv heads, D 128."""
    cases = []
    for size in seq_lens:
        for name, seqlens in (
            ("M1", log_normal_seqlens(512, size)),
            ("M2", log_normal_seqlens(2048, size)),
            ("M3", (size,)),
        ):
            cases.append(Case(name, f"{name}, S {size}", 16, 4, 128, seqlens))
    return cases


def _ours(case: Case) -> Attention:
    layout = packed_sdpa.PackedLayout.from_doc_ids(case.doc_ids)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_sdpa.packed_attention(query, key, value, layout, backend="flash")

    return run


def _direct_flash(case: Case) -> Attention:
    """torch's flash varlen operator called directly, with its own autograd."""
    offsets = torch.tensor((0, *case.seqlens)).cumsum(0).to("cuda", torch.int32)
    longest = max(case.seqlens)
    scale = case.head_dim**-0.5

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        out = torch.ops.aten._flash_attention_forward(
            *packed, offsets, offsets, longest, longest, 0.0, True, False, scale=scale
        )[0]
        return out.transpose(0, 1)[None]

    return run


def _dense(case: Case) -> Attention:
    ids = case.doc_ids[0].cuda()
    mask = (ids[:, None] == ids[None, :]).tril_()[None, None]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    return run


def _loop(case: Case) -> Attention:
    """One stock call a document."""
    seqlens = list(case.seqlens)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(tensor.split(seqlens, dim=2) for tensor in (query, key, value)), strict=True)
        return torch.cat(
            [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts], dim=2
        )

    return run


def _flex(case: Case) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = case.doc_ids[0].cuda()

    def visible(batch: Tensor, head: Tensor, query_row: Tensor, key_row: Tensor) -> Tensor:
        return (key_row <= query_row) & (ids[query_row] == ids[key_row])

    block_mask = create_block_mask(visible, None, None, case.seq_len, case.seq_len, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled(query, key, value, block_mask=block_mask, enable_gqa=True)

    return run


CONTENDERS: dict[str, Callable[[Case], Attention]] = {
    "packed_sdpa": _ours,
    "direct_flash": _direct_flash,
    "loop": _loop,
    "dense": _dense,
    "flex": _flex,
}


def _why_not(contender: str, case: Case) -> str | None:
    if contender == "dense" and case.seq_len > _DENSE_LIMIT:
        return f"the mask would have more than {_DENSE_LIMIT} x {_DENSE_LIMIT} elements"
    if contender == "flex" and (case.name, case.seq_len) not in _FLEX_SHAPES:
        return "compiled at three shapes only"
    return None


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the least of the rounds. skipped: why there are none."""

    case: str
    seq_len: int
    documents: int
    contender: str
    forward_ms: float | None = None
    both_ms: float | None = None
    peak_mb: float | None = None
    tflops_both: float | None = None
    skipped: str | None = None


def _milliseconds(function: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _measure(contender: str, case: Case, rounds: int) -> Timing:
    timing = Timing(case.name, case.seq_len, len(case.seqlens), contender, skipped=_why_not(contender, case))
    if timing.skipped is not None:
        return timing
    attention = CONTENDERS[contender](case)
    *tensors, grad_out = (tensor.cuda() for tensor in case.inputs(torch.bfloat16))
    leaves = [tensor.requires_grad_() for tensor in tensors]

    def forward() -> None:
        with torch.no_grad():
            attention(*leaves)

    def both() -> None:
        torch.autograd.grad(attention(*leaves), leaves, grad_out)

    torch.cuda.reset_peak_memory_stats()
    least = []
    for function in (forward, both):
        for _ in range(_WARMUP_CALLS):
            function()
        torch.cuda.synchronize()
        least.append(min(_milliseconds(function) for _ in range(rounds)))
    return replace(
        timing,
        forward_ms=least[0],
        both_ms=least[1],
        peak_mb=torch.cuda.max_memory_allocated() / 2**20,
        tflops_both=case.useful_flops(backward=True) / least[1] / 1e9,
    )


def run_bench(
    seq_lens: Sequence[int], rounds: int, seconds: float, contenders: Sequence[str] = tuple(CONTENDERS)
) -> dict[str, object]:
    """Measures until done or until ``seconds`` have passed; what was left out says so."""
    if not torch.cuda.is_available():
        raise RuntimeError("the CUDA benchmark needs a CUDA device, and this machine has none")
    deadline = time.monotonic() + seconds
    timings = []
    # Ours and the direct call first, so that a short budget still has the comparison that counts.
    for contender in contenders:
        for case in cuda_cases(seq_lens):
            if time.monotonic() > deadline:
                timings.append(Timing(case.name, case.seq_len, len(case.seqlens), contender, skipped="out of time"))
                continue
            timings.append(_measure(contender, case, rounds))
            torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "packed_sdpa": packed_sdpa.__version__,
        "timings": [asdict(timing) for timing in timings],
        "ratios": _ratios(timings),
    }


def _ratios(timings: Sequence[Timing]) -> dict[str, dict[str, float]]:
    """Time of each peer over ours, forward and backward together, by case; above 1 we are faster."""
    ours = {(t.case, t.seq_len): t.both_ms for t in timings if t.contender == "packed_sdpa" and t.both_ms}
    ratios: dict[str, dict[str, float]] = {}
    for timing in timings:
        own = ours.get((timing.case, timing.seq_len))
        if timing.contender != "packed_sdpa" and timing.both_ms and own:
            ratios.setdefault(f"{timing.case}, S {timing.seq_len}", {})[timing.contender] = timing.both_ms / own
    return ratios


def plot(result: dict, folder: Path) -> Path:
    """Bars of useful TFLOP/s, forward and backward together, to ``folder/bench_cuda.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    bars = [
        (f"{t['case']} S{t['seq_len'] // 1024}K {t['contender']}", t["tflops_both"])
        for t in sorted(result["timings"], key=lambda t: (t["seq_len"], t["case"]))
        if t["tflops_both"] is not None
    ]
    path = folder / PLOT_FILE
    write_bars(path, "USEFUL TFLOP/S, FORWARD + BACKWARD, BF16", bars, highlight="packed_sdpa")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="packed_sdpa.bench_cuda", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seq-lens", default="8192,32768,131072", help="row lengths, separated by commas")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="separated by commas")
    parser.add_argument("--rounds", type=int, default=7, help="the least of so many is reported")
    parser.add_argument("--seconds", type=float, default=180.0, help="what has not begun by then is left out")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="folder for the PNG")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.contenders.split(",") if name not in CONTENDERS]
    if unknown:
        parser.error(f"--contenders: unknown {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    try:
        check_targets(options.json, None, options.plot, (PLOT_FILE,))
    except InputError as error:
        parser.error(str(error))
    result = run_bench(
        [int(size) for size in options.seq_lens.split(",")],
        options.rounds,
        options.seconds,
        options.contenders.split(","),
    )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot is not None:
        plot(result, options.plot)
    print(json.dumps(result["ratios"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
