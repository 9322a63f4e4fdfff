"""Backends that are other people's Python packages: taken by name only, imported when first asked for.

They stand in the same list as the compiled backends: each says in sentences why it cannot take a call. They are
differentiable by themselves and give no lse.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from packed_sdpa._library import ops
from packed_sdpa.layout import LayoutTensors, host_offsets


@dataclass(frozen=True)
class PackageCall:
    """A call as a package backend judges and runs it; tensors as for packed_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    layout: LayoutTensors
    is_causal: bool
    window_size: tuple[int, int]
    scale: float
    dropout_p: float
    need_lse: bool


@dataclass(frozen=True)
class RealRows:
    """Real tokens as a varlen kernel of a package wants them, T of them. index: None where every row is one."""

    query: Tensor  # [Tq, Hq, D]
    key: Tensor  # [Tk, Hkv, D]
    value: Tensor  # [Tk, Hkv, Dv]
    cu_seqlens_q: Tensor  # int32 [N + 1], N documents with queries and keys
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    index_q: Tensor | None  # int64 [Tq], flat rows


def is_installed(package: str) -> bool:
    return package in sys.modules or _can_be_found(package)


@functools.cache
def _can_be_found(package: str) -> bool:
    """Searched once a process: this is asked at every new layout, and the search takes Python's global import lock,
    which an interrupt at the wrong moment leaves locked for all other threads."""
    return importlib.util.find_spec(package) is not None


class PackageBackend(ABC):
    """One package. ``device_types``: the kinds of device that its kernels run on."""

    name: str
    package: str

    def __init__(self, device_types: tuple[str, ...] = ("cuda",)) -> None:
        self.device_types = device_types

    def unsupported_reasons(self, call: PackageCall) -> list[str]:
        """Why it cannot take this call, in sentences; nothing is imported or run."""
        reasons = []
        if not is_installed(self.package):
            reasons.append(f"the package {self.package} is not installed")
        device = call.query.device.type
        if device not in self.device_types:
            reasons.append(f"it runs on {' and '.join(self.device_types)}, not on {device}")
        if call.query.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"it takes float16 and bfloat16, not {str(call.query.dtype).removeprefix('torch.')}")
        head_dim, head_dim_v = call.query.shape[-1], call.value.shape[-1]
        if head_dim != head_dim_v:
            reasons.append(f"query and value must have one head dim, not {head_dim} and {head_dim_v}")
        if head_dim > 256 or head_dim % 8 != 0:
            reasons.append(f"its head dim is a multiple of 8 up to 256, not {head_dim}")
        if call.layout.diagonal_offsets.numel() > 0:
            reasons.append("it needs queries that end with their document's keys")
        if call.layout.token_index_k.numel() > 0 and call.window_size != (-1, -1):
            reasons.append("a window counts rows, and a document here may have other rows between its own")
        if host_offsets(call.layout) is None:
            reasons.append("it takes padding out by offsets on the host, which this layout (GraphLayout) does not have")
        if call.need_lse:
            reasons.append("it gives no lse")
        return reasons

    @abstractmethod
    def attend(self, call: PackageCall, rows: RealRows) -> Tensor:
        """[Tq, Hq, D] of the packed rows."""

    def attention(self, call: PackageCall) -> Tensor:
        """[B, Hq, L, D], zero where there is no document."""
        query = call.query
        batch, num_heads, length, _ = query.shape
        head_dim = call.value.shape[-1]
        rows = packed_rows(call)
        if rows is None:  # nothing sees anything; zeros that still lead to all three for autograd
            out = torch.zeros(batch, length, num_heads, head_dim, dtype=query.dtype, device=query.device)
            return out.transpose(1, 2) + 0.0 * (_nothing_of(query) + _nothing_of(call.key) + _nothing_of(call.value))
        out = self.attend(call, rows)
        if rows.index_q is not None:
            out = out.new_zeros(batch * length, num_heads, head_dim).index_copy(0, rows.index_q, out)
        out = out.view(batch, length, num_heads, head_dim).transpose(1, 2)
        return out if query.stride(2) > query.stride(1) else out.contiguous()


def _nothing_of(tensor: Tensor) -> Tensor:
    return tensor[..., :0].sum()


def _side(tensor: Tensor, offsets: Tensor, kept: Tensor, token_index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """[B, H, S, D] -> packed rows of the kept documents, their offsets (host), and their flat rows (None: all)."""
    packed = tensor.transpose(1, 2).flatten(0, 1)
    counts = offsets.diff()[kept]
    new_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    total = int(new_offsets[-1])
    index = None
    if token_index.numel() > 0:
        index = token_index.long()
        if not bool(kept.all()):
            index = index.index_select(0, ops.sent_to(tensor.device, _ranges(offsets[:-1][kept], counts)))
    elif total != packed.shape[0]:
        index = ops.sent_to(tensor.device, _ranges(offsets[:-1][kept], counts))
    return (packed if index is None else packed.index_select(0, index)), new_offsets, index


def _ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """starts[i] .. starts[i] + counts[i], one behind the other."""
    begins = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum())) + (starts - begins).repeat_interleave(counts)


def packed_rows(call: PackageCall) -> RealRows | None:
    """Documents that have queries and keys; None when there is none. Reads the host's offsets, never the device."""
    offsets = host_offsets(call.layout)
    assert offsets is not None, "asked for in unsupported_reasons"
    offsets_q, offsets_k = offsets
    kept = (offsets_q.diff() > 0) & (offsets_k.diff() > 0)
    if not bool(kept.any()):
        return None
    query, new_q, index_q = _side(call.query, offsets_q, kept, call.layout.token_index_q)
    key, new_k, _ = _side(call.key, offsets_k, kept, call.layout.token_index_k)
    value, _, _ = _side(call.value, offsets_k, kept, call.layout.token_index_k)
    cu_seqlens_q, cu_seqlens_k = call.layout.cu_seqlens_q, call.layout.cu_seqlens_k  # there already
    if not bool(kept.all()):
        cu_seqlens_q, cu_seqlens_k = (ops.sent_to(call.query.device, new.int()) for new in (new_q, new_k))
    return RealRows(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        int(new_q.diff().max()),
        int(new_k.diff().max()),
        index_q,
    )
