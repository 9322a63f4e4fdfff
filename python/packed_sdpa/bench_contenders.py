"""The ways to run attention on a packed row that the benchmark compares.

A contender gets a case and its tensors once, outside the measurement, and gives back a function of query, key, value
that is timed. All compute the same: causal attention within documents, ``[1, Hq, S, D]``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import packed_sdpa
from packed_sdpa.bench_cases import Case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """``make`` returns the function to be timed; ``why_not`` a sentence when this case cannot be run, else None."""

    name: str
    title: str  # short, for tables
    make: Callable[[Case], Attention]
    why_not: Callable[[Case], str | None]
    has_backward: bool = True


def _always(case: Case) -> str | None:
    return None


def _ours(case: Case) -> Attention:
    layout = packed_sdpa.PackedLayout.from_doc_ids(case.doc_ids)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_sdpa.packed_attention(query, key, value, layout, window_size=(case.window_left, 0))

    return run


def dense_mask(case: Case) -> Tensor:
    """Bool ``[1, 1, S, S]``, True where a query sees a key."""
    ids = case.doc_ids[0]
    mask = (ids[:, None] == ids[None, :]).tril_()
    if case.window_left >= 0:
        mask = mask.triu_(-case.window_left)
    return mask[None, None]


def _dense(case: Case) -> Attention:
    mask = dense_mask(case)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    return run


def _dense_why_not(case: Case) -> str | None:
    # The mask alone is S * S bytes, the score gradients of the math path several times that.
    return "the mask would have more than 16384 x 16384 elements" if case.seq_len > 16384 else None


def _loop(case: Case, expand: bool) -> Attention:
    """One stock call a document. torch.split, so that backward is one concatenation and not a sum of slices."""
    seqlens = list(case.seqlens)
    group = case.num_heads // case.num_kv_heads
    masks = [_window_mask(length, case.window_left) for length in seqlens] if case.window_left >= 0 else None

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if expand:
            key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        parts = zip(*(tensor.split(seqlens, dim=2) for tensor in (query, key, value)), strict=True)
        outputs = [
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if masks is None else masks[index],
                is_causal=masks is None,
                enable_gqa=not expand,
            )
            for index, (q, k, v) in enumerate(parts)
        ]
        return torch.cat(outputs, dim=2)

    return run


def _window_mask(length: int, window_left: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril_().triu_(-window_left)


def _flex(case: Case) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = case.doc_ids[0]
    left = case.window_left if case.window_left >= 0 else case.seq_len

    def visible(batch: Tensor, head: Tensor, query_row: Tensor, key_row: Tensor) -> Tensor:
        near = (key_row <= query_row) & (query_row - key_row <= left)
        return near & (ids[query_row] == ids[key_row])

    block_mask = create_block_mask(visible, None, None, case.seq_len, case.seq_len, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled(query, key, value, block_mask=block_mask, enable_gqa=True)

    return run


def _flex_why_not(case: Case) -> str | None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return "torch.compile needs a C++ compiler: install g++"
    return None


OURS = "packed_sdpa"
LOOPS = ("loop_expanded", "loop_gqa")
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(OURS, "packed_sdpa", _ours, _always),
        Contender("loop_expanded", "loop, K/V expanded", lambda case: _loop(case, True), _always),
        Contender("loop_gqa", "loop, enable_gqa", lambda case: _loop(case, False), _always),
        Contender("dense", "dense mask", _dense, _dense_why_not),
        Contender("flex", "FlexAttention", _flex, _flex_why_not, has_backward=False),
    )
}
