"""Peak memory of one forward and backward, in a process of its own: ``python -m packed_sdpa.bench_memory NAME S DTYPE``
prints it in MiB. Linux only."""

from __future__ import annotations

import subprocess
import sys

import torch

from packed_sdpa import host
from packed_sdpa.bench_cases import row_sweep
from packed_sdpa.bench_contenders import CONTENDERS
from packed_sdpa.errors import WorkerError

_WARM_UP_TOKENS = 1024


def extra_peak_mib(name: str, seq_len: int, dtype_name: str, threads: int) -> float:
    """MiB beyond query, key, value, out, lse and their gradients, measured in a new process."""
    command = [sys.executable, "-m", "packed_sdpa.bench_memory", name, str(seq_len), dtype_name, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WorkerError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr.strip()}")
    return float(done.stdout)


def _measure(name: str, seq_len: int, dtype: torch.dtype) -> float:
    attention, warm_up = (CONTENDERS[name].make(*row_sweep((size,))) for size in (seq_len, _WARM_UP_TOKENS))
    query, key, value, grad_out = row_sweep((_WARM_UP_TOKENS,))[0].inputs(dtype)
    warm_up(*(tensor.requires_grad_() for tensor in (query, key, value))).backward(grad_out)
    query, key, value, grad_out = row_sweep((seq_len,))[0].inputs(dtype)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    before = host.reset_peak_rss()
    out = attention(*leaves)
    out.backward(grad_out)
    lse_bytes = 4 * query.shape[1] * seq_len
    results = [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    result_bytes = lse_bytes + sum(tensor.numel() * tensor.element_size() for tensor in results)
    return host.peak_rss_mb() - before - result_bytes / 2**20


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]))
    print(_measure(sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])))
