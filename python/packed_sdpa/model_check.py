"""`packed-sdpa check`: proves on a model folder of the user's that no document of a packed row sees another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import packed_sdpa
from packed_sdpa import proofs
from packed_sdpa.demo import DemoOptions, prepare
from packed_sdpa.demo_model import DTYPES, build_model, make_config
from packed_sdpa.demo_report import Check, judge_gradients
from packed_sdpa.errors import InputError
from packed_sdpa.tables import make_console

_ARGUMENTS = ("input_ids", "position_ids", "doc_ids")


@dataclass(frozen=True)
class CheckOptions:
    """Arguments of the check; see ``packed-sdpa check --help``."""

    model: Path
    data: Path | None = None
    text_field: str = "text"
    seq_len: int = 512
    dtype: str = "float32"
    seed: int = 0


def check_model_folder(options: CheckOptions, console: Console | None = None) -> bool:
    """Attaches the model, packs one row of documents cut to a fifth of it, and returns whether all holds.

    Prints the table of :func:`packed_sdpa.check_isolation`, which names the first layer that leaks; beside it the
    gradients in training mode, with activation checkpointing, and whether every attention call was taken.
    """
    console = console or make_console()
    shared = {name: getattr(options, name) for name in ("model", "data", "text_field", "seq_len", "dtype", "seed")}
    prepared = prepare(DemoOptions(steps=1, **shared), max_doc_len=max(1, options.seq_len // 5))
    batch = proofs.row_of_most_documents(prepared.rows.select(slice(None)))
    config = make_config(options.model, 0, options.seq_len)
    model = build_model(config, options.model, DTYPES[options.dtype], options.seed)
    try:
        handle = packed_sdpa.attach(model)
    except ValueError as error:
        raise InputError(f"--model {options.model}: {error}") from error
    gradients = proofs.cross_document_gradients(model, batch)
    calls = proofs.count_calls(packed_sdpa.report(handle))
    isolation = packed_sdpa.check_isolation(model, {name: batch[name] for name in _ARGUMENTS})
    checks = [
        judge_gradients(gradients["cross_document_grad"], gradients["own_document_grad"]),
        Check(
            "every attention call taken",
            f"{calls['attention_calls_taken']:,} taken, {calls['attention_calls_passed']:,} passed through",
            calls["attention_calls_taken"] > 0 and calls["attention_calls_passed"] == 0,
        ),
    ]
    console.print(f"{type(model).__name__}, one row of {options.seq_len} tokens, {options.dtype}")
    console.print(isolation)
    for check in checks:
        console.print(check.line(), highlight=False)
    return isolation.ok and all(check.holds for check in checks)
