"""Training steps of a small Llama on a packed row, end to end: stock Transformers, packed_sdpa, and no attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import packed_sdpa
from packed_sdpa.bench_measure import interleave
from packed_sdpa.data import help_topics, tokenize
from packed_sdpa.errors import import_extra
from packed_sdpa.packing import pack

LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
STOCK, FLOOR = "transformers", "no attention"
_LONGEST_DOCUMENT = 2000
_FLOOR_ATTENTION = "packed_sdpa_bench_no_attention"


def training_row(tokens: int) -> dict[str, Tensor]:
    """A row of ``tokens`` tokens of Python's help topics, documents cut at 2,000."""
    texts = list(help_topics().values())
    documents = tokenize(texts, LLAMA["vocab_size"]).documents
    while sum(map(len, documents)) < 2 * tokens:
        documents = documents + documents
    rows = pack(documents, tokens, max_doc_len=min(tokens, _LONGEST_DOCUMENT))
    return rows.select([rows.num_rows // 2])


def measure_training(
    tokens: int,
    dtype: torch.dtype,
    *,
    rounds: int,
    seconds_each: float,
    llama: dict[str, int] | None = None,
    on_run: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """One row a contender: seconds of forward, loss and backward with activation checkpointing, and the loss."""
    batch = training_row(tokens)
    settings = {**LLAMA, **(llama or {}), "max_position_embeddings": tokens}
    stock, ours, floor = (_model(settings, dtype, attention) for attention in ("sdpa", "sdpa", _FLOOR_ATTENTION))
    handle = packed_sdpa.attach(ours)
    losses: dict[str, float] = {}
    marked = ("input_ids", "labels", "position_ids")

    def step(name: str, model: nn.Module, keep: tuple[str, ...]) -> Callable[[], float]:
        def run() -> float:
            started = time.perf_counter()
            loss = model(**{key: batch[key] for key in keep}).loss
            loss.backward()
            seconds = time.perf_counter() - started
            model.zero_grad(set_to_none=True)
            losses[name] = loss.item()
            return seconds

        return run

    runs = {
        packed_sdpa.__name__: step(packed_sdpa.__name__, ours, (*marked, "doc_ids")),
        STOCK: step(STOCK, stock, marked),
        FLOOR: step(FLOOR, floor, marked),
    }
    samples = interleave(runs, rounds, seconds_each, on_run)
    taken, passed = packed_sdpa.report(handle).taken, packed_sdpa.report(handle).passed
    handle.detach()
    return [
        {
            "tokens": tokens,
            "documents": int(batch["doc_ids"].max()),
            "dtype": str(dtype).removeprefix("torch."),
            "contender": name,
            "seconds": sample.best,
            "runs": len(sample.seconds),
            "loss": losses[name],
            **({"calls_taken": taken, "calls_passed": passed} if name == packed_sdpa.__name__ else {}),
        }
        for name, sample in samples.items()
    ]


def _model(settings: dict[str, int], dtype: torch.dtype, attention: str) -> nn.Module:
    transformers = import_extra("transformers", "demo")
    # Not measured: what attention costs. Keys and values get no gradient here, so this floor is a little too low.
    transformers.AttentionInterface.register(_FLOOR_ATTENTION, _no_attention)
    transformers.AttentionMaskInterface.register(_FLOOR_ATTENTION, _no_mask)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**settings, use_cache=False, bos_token_id=None, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    model.train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model


def _no_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention that gives back its query, ``[B, H, S, D]`` -> ``[B, S, H, D]``."""
    return query.transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None
