"""`packed-sdpa info`: what is installed, what this machine can run, and which backend takes which call."""

from __future__ import annotations

import importlib.metadata

import torch
from rich.console import Console
from rich.table import Table

import packed_sdpa
from packed_sdpa import host
from packed_sdpa._library import LIBRARY_PATH, ops
from packed_sdpa.tables import make_console

# (what is asked, dtype, head dim, arguments of the call)
_CALLS: tuple[tuple[str, torch.dtype, int, dict[str, object]], ...] = (
    ("float32", torch.float32, 64, {}),
    ("float64", torch.float64, 64, {}),
    ("bfloat16", torch.bfloat16, 64, {}),
    ("float16", torch.float16, 64, {}),
    ("head dim 59", torch.float32, 59, {}),
    ("head dim 512", torch.float32, 512, {}),
    ("window", torch.float32, 64, {"window_size": (255, 0)}),
    ("both ways", torch.float32, 64, {"is_causal": False}),
    ("dropout", torch.float32, 64, {"dropout_p": 0.1}),
)
_OPTIONAL = ("transformers", "accelerate", "tokenizers", "matplotlib", "pyarrow")


def facts() -> list[tuple[str, str]]:
    """(name, value) of everything that a bug report needs."""
    return [
        ("packed_sdpa", packed_sdpa.__version__),
        ("library", str(LIBRARY_PATH)),
        ("built with torch", ops.built_with_torch()),
        *host.machine().items(),
        *((name, _version(name)) for name in _OPTIONAL),
        ("CUDA", torch.cuda.get_device_name() if torch.cuda.is_available() else "no device"),
        ("backends", ", ".join(packed_sdpa.available_backends())),
        ("CPU instruction sets", ", ".join(host.available_cpu_isas())),
        ("CPU instruction set in use", host.cpu_isa()),
    ]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def support() -> dict[str, dict[str, str]]:
    """Call -> backend -> "chosen", "could", or why not, for self-attention on this machine's best device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout = packed_sdpa.PackedLayout.from_doc_ids(torch.ones(1, 8, dtype=torch.int64))
    answers = {}
    for name, dtype, head_dim, arguments in _CALLS:
        query = torch.empty(1, 4, 8, head_dim, dtype=dtype, device=device)
        key = torch.empty(1, 2, 8, head_dim, dtype=dtype, device=device)
        reports = packed_sdpa.explain(query, key, key, layout, **arguments)  # type: ignore[arg-type]
        answers[f"{name}, {device}"] = {report.name: str(report).split(": ", 1)[1] for report in reports}
    return answers


def print_info(console: Console | None = None) -> None:
    """Prints facts and support as tables."""
    console = console or make_console()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts():
        grid.add_row(name, value)
    console.print(grid, highlight=False)
    answers = support()
    backends = list(next(iter(answers.values())))
    table = Table("call", *backends, title="which backend takes which call", title_justify="left", show_edge=False)
    for call, answer in answers.items():
        table.add_row(call, *(answer[backend] for backend in backends))
    console.print()
    console.print(table, highlight=False)
