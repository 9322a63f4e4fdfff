"""One half of the demo, in a process of its own: trains the model, and for the packed half proves that documents are
isolated. ``python -m packed_sdpa.demo_worker JOB.json`` writes one JSON object a line to standard output: a step each,
then the result."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import packed_sdpa
from packed_sdpa.demo_model import DTYPES, build_model, make_config
from packed_sdpa.errors import InputError
from packed_sdpa.host import peak_rss_mb

Batch = dict[str, Tensor]


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
    most = int(rows["doc_ids"].max(dim=1).values.argmax())
    batch = {name: tensor[most : most + 1] for name, tensor in rows.items()}
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


def count_calls(report: packed_sdpa.Report) -> dict[str, Any]:
    """Attention calls of the training steps so far."""
    return {
        "attention_calls_taken": report.taken,
        "attention_calls_passed": report.passed,
        "backend": ", ".join(report.backends) or "none",
    }


def document_masks(doc_ids: Tensor) -> list[Tensor]:
    """Bool ``[S]`` of each document of a row ``[1, S]``."""
    return [doc_ids[0] == document for document in range(1, int(doc_ids.max()) + 1)]


def cross_document_gradients(model: nn.Module, batch: Batch, documents: int = 3) -> dict[str, float]:
    """Largest absolute gradient of one document's loss with respect to the embeddings of all others, and of its own;
    for a few documents from first to last, in training mode with checkpointing."""
    embed = model.get_input_embeddings()  # type: ignore[operator]
    masks = document_masks(batch["doc_ids"])
    chosen = sorted({round(index * (len(masks) - 1) / max(1, documents - 1)) for index in range(documents)})
    across, own = 0.0, float("inf")
    for index in chosen:
        embeddings = embed(batch["input_ids"]).detach().requires_grad_()
        logits = model(
            inputs_embeds=embeddings, position_ids=batch["position_ids"], doc_ids=batch["doc_ids"], use_cache=False
        ).logits
        logits[0, masks[index]].float().square().mean().backward()
        assert embeddings.grad is not None
        gradient = embeddings.grad[0].abs()
        across = max(across, gradient[~masks[index]].max().item() if (~masks[index]).any() else 0.0)
        own = min(own, gradient[masks[index]].max().item())
    model.zero_grad(set_to_none=True)
    return {"cross_document_grad": across, "own_document_grad": own}


@torch.no_grad()
def isolation(model: nn.Module, handle: packed_sdpa.Handle, batch: Batch) -> dict[str, float]:
    """Largest absolute difference between the logits of a packed row and those of each document alone through stock
    attention; beside it the same for the row without marks, and the largest logit, to judge it by."""
    model.eval()
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    packed = model(**inputs, doc_ids=batch["doc_ids"], use_cache=False).logits
    handle.enabled = False
    whole_row = torch.arange(batch["input_ids"].shape[1])[None]
    unmarked = model(input_ids=batch["input_ids"], position_ids=whole_row, use_cache=False).logits
    difference = leak = largest = 0.0
    for mask in document_masks(batch["doc_ids"]):
        alone = model(**{name: tensor[:, mask] for name, tensor in inputs.items()}, use_cache=False).logits
        difference = max(difference, (packed[:, mask] - alone).abs().max().item())
        leak = max(leak, (unmarked[:, mask] - alone).abs().max().item())
        largest = max(largest, alone.abs().max().item())
    handle.enabled = True
    model.train()
    return {"isolation_max_abs": difference, "unmarked_max_abs": leak, "largest_logit": largest}


def main() -> int:
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
