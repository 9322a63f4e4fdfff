"""`packed-sdpa check`: proves on a model folder of the user's that no document of a packed row sees another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import packed_sdpa
from packed_sdpa import proofs
from packed_sdpa.demo import DemoOptions, prepare
from packed_sdpa.demo_model import DTYPES, build_model, make_config
from packed_sdpa.demo_report import Check, judge_gradients, judge_logits
from packed_sdpa.errors import InputError
from packed_sdpa.tables import make_console


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
    """Attaches the model, packs one row of documents cut to a fifth of it, and returns whether all holds."""
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
    found = {**proofs.cross_document_gradients(model, batch), **proofs.isolation(model, handle, batch)}
    calls = proofs.count_calls(packed_sdpa.report(handle))
    checks = [
        judge_logits(found["isolation_max_abs"], found["unmarked_max_abs"], found["largest_logit"], options.dtype),
        judge_gradients(found["cross_document_grad"], found["own_document_grad"]),
        Check(
            "every attention call taken",
            f"{calls['attention_calls_taken']:,} taken, {calls['attention_calls_passed']:,} passed through",
            calls["attention_calls_taken"] > 0 and calls["attention_calls_passed"] == 0,
        ),
    ]
    documents = int(batch["doc_ids"].max())
    console.print(f"{type(model).__name__}, {documents} documents in a row of {options.seq_len}, {options.dtype}")
    for check in checks:
        console.print(check.line(), highlight=False)
    return all(check.holds for check in checks)
