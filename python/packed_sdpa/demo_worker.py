"""One half of the demo, in a process of its own: trains the model, and for the packed half proves that documents are
isolated. ``python -m packed_sdpa.demo_worker JOB.json`` writes one JSON object a line to standard output: a step each,
then the result. It ends when its standard input does: with whoever started it, however that came to an end."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import packed_sdpa
from packed_sdpa.demo_model import DTYPES, build_model, make_config
from packed_sdpa.errors import InputError
from packed_sdpa.host import peak_rss_mb
from packed_sdpa.proofs import Batch, count_calls, cross_document_gradients, isolation, row_of_most_documents


@dataclass(frozen=True)
class Job:
    """What a worker does; travels as JSON."""

    kind: str  # "stock" or "packed"
    rows: str  # file with input_ids, position_ids, labels, doc_ids, each int64 [R, S]
    order: list[int]  # row of each step
    model: str | None
    vocab_size: int
    dtype: str
    learning_rate: float
    seed: int
    threads: int

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Job:
        return Job(**json.loads(path.read_text(encoding="utf-8")))


def run(job: Job, emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Trains, emits ``{"step", "loss", "seconds", "tokens"}`` for each step, and returns the result."""
    torch.set_num_threads(job.threads)
    rows: Batch = torch.load(job.rows, weights_only=True)
    config = make_config(job.model, job.vocab_size, rows["input_ids"].shape[1])
    model = build_model(config, job.model, DTYPES[job.dtype], job.seed)
    batches = [{name: tensor[row : row + 1] for name, tensor in rows.items()} for row in job.order]
    if job.kind == "stock":
        # Transformers finds the documents in position_ids that restart, and builds a dense mask.
        train(model, batches, job.learning_rate, emit, keep=("input_ids", "position_ids", "labels"))
        return {"peak_rss_mb": peak_rss_mb()}
    handle = packed_sdpa.attach(model)
    train(model, batches, job.learning_rate, emit, keep=("input_ids", "position_ids", "labels", "doc_ids"))
    result: dict[str, Any] = {"peak_rss_mb": peak_rss_mb(), **count_calls(packed_sdpa.report(handle))}
    batch = row_of_most_documents(rows)
    result.update(cross_document_gradients(model, batch))
    result.update(isolation(model, handle, batch))
    return result


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    learning_rate: float,
    emit: Callable[[dict[str, Any]], None],
    keep: tuple[str, ...],
) -> None:
    """One AdamW step a batch; ``keep`` are the entries of a batch that the model is given."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    for step, batch in enumerate(batches):
        started = time.perf_counter()
        loss = model(**{name: batch[name] for name in keep}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        tokens = int((batch["doc_ids"] != 0).sum())
        emit({"step": step + 1, "loss": loss.item(), "seconds": seconds, "tokens": tokens})


def _end_with_standard_input() -> None:
    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # sys.stdin itself would be locked when the interpreter ends
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    _end_with_standard_input()
    job = Job.load(Path(sys.argv[1]))

    def emit(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    try:
        emit({"result": run(job, emit)})
    except InputError as error:
        emit({"input_error": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
