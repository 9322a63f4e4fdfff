"""What the demo and `packed-sdpa check` prove on an attached model: no document of a packed row sees another.

A batch is a dict of ``input_ids``, ``position_ids`` and ``doc_ids``, each int64 ``[1, S]``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import packed_sdpa

Batch = dict[str, Tensor]


def row_of_most_documents(rows: Batch) -> Batch:
    """``[R, S]`` -> ``[1, S]``: the row in which most can go wrong."""
    most = int(rows["doc_ids"].max(dim=1).values.argmax())
    return {name: tensor[most : most + 1] for name, tensor in rows.items()}


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


def largest_of(values: Iterable[float]) -> float:
    """The largest, 0 of none; NaN when one is NaN, which Python's ``max`` may drop."""
    return torch.tensor([0.0, *values], dtype=torch.float64).max().item()


def smallest_of(values: Iterable[float]) -> float:
    """The smallest, infinity of none; NaN when one is NaN."""
    return torch.tensor([float("inf"), *values], dtype=torch.float64).min().item()


def cross_document_gradients(model: nn.Module, batch: Batch, documents: int = 3) -> dict[str, float]:
    """Largest absolute gradient of one document's loss with respect to the embeddings of all others, and of its own;
    for a few documents from first to last, in training mode with checkpointing. NaN when a gradient is NaN."""
    embed = model.get_input_embeddings()  # type: ignore[operator]
    masks = document_masks(batch["doc_ids"])
    chosen = sorted({round(index * (len(masks) - 1) / max(1, documents - 1)) for index in range(documents)})
    across: list[float] = []
    own: list[float] = []
    for index in chosen:
        embeddings = embed(batch["input_ids"]).detach().requires_grad_()
        logits = model(
            inputs_embeds=embeddings, position_ids=batch["position_ids"], doc_ids=batch["doc_ids"], use_cache=False
        ).logits
        logits[0, masks[index]].float().square().mean().backward()
        assert embeddings.grad is not None
        gradient = embeddings.grad[0].abs()
        across.append(gradient[~masks[index]].max().item() if (~masks[index]).any() else 0.0)
        own.append(gradient[masks[index]].max().item())
    model.zero_grad(set_to_none=True)
    return {"cross_document_grad": largest_of(across), "own_document_grad": smallest_of(own)}


@torch.no_grad()
def isolation(model: nn.Module, handle: packed_sdpa.Handle, batch: Batch) -> dict[str, float]:
    """Largest absolute difference between the logits of a packed row and those of each document alone through stock
    attention; beside it the same for the row without marks, and the largest logit, to judge it by. NaN when a logit is
    NaN. The training mode and ``handle.enabled`` are left as they were, also when a forward raises."""
    modes = {module: module.training for module in model.modules()}
    enabled = handle.enabled
    try:
        model.eval()
        return _compare_logits(model, handle, batch)
    finally:
        handle.enabled = enabled
        for module, training in modes.items():
            module.training = training


def _compare_logits(model: nn.Module, handle: packed_sdpa.Handle, batch: Batch) -> dict[str, float]:
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    packed = model(**inputs, doc_ids=batch["doc_ids"], use_cache=False).logits
    handle.enabled = False
    whole_row = torch.arange(batch["input_ids"].shape[1])[None]
    unmarked = model(input_ids=batch["input_ids"], position_ids=whole_row, use_cache=False).logits
    difference: list[float] = []
    leak: list[float] = []
    largest: list[float] = []
    for mask in document_masks(batch["doc_ids"]):
        alone = model(**{name: tensor[:, mask] for name, tensor in inputs.items()}, use_cache=False).logits
        difference.append((packed[:, mask] - alone).abs().max().item())
        leak.append((unmarked[:, mask] - alone).abs().max().item())
        largest.append(alone.abs().max().item())
    return {
        "isolation_max_abs": largest_of(difference),
        "unmarked_max_abs": largest_of(leak),
        "largest_logit": largest_of(largest),
    }
