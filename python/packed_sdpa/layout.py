"""Documents of a packed batch, as the tensors that travel with an attention call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from packed_sdpa._library import ops


class LayoutTensors(NamedTuple):
    """What an attention op is given (C++ `LayoutTensors`). N documents, Tq / Tk tokens in them.

    All on the device of the query but ``max_seqlens``, which stays on the host. Offsets index the gathered order, in
    which the tokens of a document stand side by side; ``token_index_*`` maps it to flat rows (``b * S + i``) and is
    empty when gathered order is row order.
    """

    cu_seqlens_q: Tensor  # int32 [N + 1]
    cu_seqlens_k: Tensor  # int32 [N + 1]
    token_index_q: Tensor  # int32 [Tq] or [0]
    token_index_k: Tensor  # int32 [Tk] or [0]
    diagonal_offsets: Tensor  # int32 [N] or [0]
    max_seqlens: Tensor  # int64, host: longest q, longest k; beside device tensors the host's mirror of offsets follows


def host_offsets(layout: LayoutTensors) -> tuple[Tensor, Tensor] | None:
    """int64 offsets of queries and keys ``[N + 1]`` on the host. No device is read: None for a GraphLayout on one."""
    if layout.cu_seqlens_q.device.type == "cpu":
        return layout.cu_seqlens_q.long(), layout.cu_seqlens_k.long()
    mirror = layout.max_seqlens[3:]  # behind the maxima and flags (src/rows.cpp)
    count = layout.cu_seqlens_q.numel()
    return (mirror[:count], mirror[count:]) if mirror.numel() > 0 else None


def layouts_in(tensors: list[Tensor]) -> list[LayoutTensors]:
    size = len(LayoutTensors._fields)
    return [LayoutTensors(*tensors[begin : begin + size]) for begin in range(0, len(tensors), size)]


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; pass torch.as_tensor(...)")
    return value


class PackedLayout:
    """Which query and key rows belong together. Immutable; checked once, when it is made.

    Make one with :meth:`from_doc_ids`, :meth:`from_seqlens`, :meth:`from_cu_seqlens` or :meth:`from_position_ids`.
    """

    __slots__ = ("_copies", "_host", "batch", "rows_k", "rows_q")

    batch: int  # B
    rows_q: int  # L, query rows of a batch row
    rows_k: int  # S, key rows of a batch row
    _host: LayoutTensors
    _copies: dict[torch.device, LayoutTensors]

    def __init__(
        self, tensors: LayoutTensors, batch: int, rows_q: int, rows_k: int, copies: tuple[LayoutTensors, ...] = ()
    ) -> None:
        object.__setattr__(self, "_host", tensors)
        object.__setattr__(self, "_copies", {copy.cu_seqlens_q.device: copy for copy in copies})
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "rows_q", rows_q)
        object.__setattr__(self, "rows_k", rows_k)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"PackedLayout is immutable, so {name} cannot be set; make a new layout")

    def __reduce__(self) -> tuple[type[PackedLayout], tuple[LayoutTensors, int, int, int]]:
        return type(self), (self._host, self.batch, self.rows_q, self.rows_k)  # copies on devices are made again

    @classmethod
    def from_doc_ids(cls, doc_ids: Tensor, row_offset: int = 0, rows: int | None = None) -> PackedLayout:
        """doc_ids: integer or bool ``[B, S]`` or ``[S]``, any device, copied; 0 is padding.

        Queries are rows ``row_offset .. row_offset + rows`` of each batch row (``rows=None``: the rest). An id that
        comes back after a gap in the same row is the same document; equal ids of different rows are not.

        Ids on a CUDA device are searched there; the host waits for them once, and ``tensors`` of that device then for
        nothing. (A batch of more than max(2**15, tokens / 4) stretches of equal ids makes it wait twice.)

        Raises ValueError (shape, negative ids, rows out of range) or TypeError (float ids).
        """
        tensors, *copies = layouts_in(ops.layout_from_doc_ids(_tensor("doc_ids", doc_ids), row_offset, rows))
        size = doc_ids.shape[-1]
        batch = doc_ids.shape[0] if doc_ids.dim() == 2 else 1
        return cls(tensors, batch, size - row_offset if rows is None else rows, size, tuple(copies))

    @classmethod
    def from_seqlens(cls, seqlens: Tensor | list[int], total: int | None = None) -> PackedLayout:
        """seqlens: lengths ``[N]`` of the documents of one row of ``total`` tokens (default: their sum)."""
        if isinstance(seqlens, list):
            wrong = next((n for n in seqlens if not isinstance(n, int) or isinstance(n, bool)), None)
            if wrong is not None:
                raise TypeError(f"seqlens must hold ints, got {wrong!r} in the list")
            lengths = torch.tensor(seqlens, dtype=torch.int64, device="cpu")
        else:
            lengths = _tensor("seqlens", seqlens)
        tensors = LayoutTensors(*ops.layout_from_seqlens(lengths, total))
        rows = int(tensors.cu_seqlens_k[-1]) if total is None else total
        return cls(tensors, 1, rows, rows)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int | None = None, total_k: int | None = None
    ) -> PackedLayout:
        """cu_seqlens_q, cu_seqlens_k: offsets ``[N + 1]`` of one row; the rest up to total_q / total_k is padding."""
        offsets = _tensor("cu_seqlens_q", cu_seqlens_q), _tensor("cu_seqlens_k", cu_seqlens_k)
        tensors = LayoutTensors(*ops.layout_from_cu_seqlens(*offsets, total_q, total_k))
        rows_q = int(tensors.cu_seqlens_q[-1]) if total_q is None else total_q
        rows_k = int(tensors.cu_seqlens_k[-1]) if total_k is None else total_k
        return cls(tensors, 1, rows_q, rows_k)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> PackedLayout:
        """position_ids: ``[B, S]`` or ``[S]``; a document begins where one is not its left neighbour plus one."""
        tensors, *copies = layouts_in(ops.layout_from_position_ids(_tensor("position_ids", position_ids)))
        batch = position_ids.shape[0] if position_ids.dim() == 2 else 1
        return cls(tensors, batch, position_ids.shape[-1], position_ids.shape[-1], tuple(copies))

    @property
    def num_documents(self) -> int:
        return self._host.cu_seqlens_k.numel() - 1

    @property
    def total_q(self) -> int:
        """Real (non-padding) query tokens."""
        return int(self._host.cu_seqlens_q[-1])

    @property
    def total_k(self) -> int:
        """Real (non-padding) key tokens."""
        return int(self._host.cu_seqlens_k[-1])

    @property
    def max_seqlen_q(self) -> int:
        return int(self._host.max_seqlens[0])

    @property
    def max_seqlen_k(self) -> int:
        return int(self._host.max_seqlens[1])

    def tensors(self, device: torch.device | str = "cpu") -> LayoutTensors:
        """The layout's tensors for kernels on a device, copied there once; the host does not wait for the copy.

        Padding between documents may then be told as documents without queries or keys, which saves a gather.
        """
        if not isinstance(device, torch.device):
            device = torch.device(device)
        if device.type == "cpu":
            return self._host
        if device.index is None and not torch.compiler.is_compiling():
            device = torch.empty(0, device=device).device  # with the index of the current one
        copies: dict[torch.device, LayoutTensors] = self._copies
        if device not in copies:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"this layout has no tensors on {device} yet, and they cannot be made while tracing; call "
                    f"layout.tensors({str(device)!r}) once before the compiled function"
                )
            copies[device] = LayoutTensors(
                *ops.layout_to_device(list(self._host), self.batch, self.rows_q, self.rows_k, device)
            )
        return copies[device]

    def materialize_mask(self, *, is_causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        """Dense bool mask ``[B, L, S]``, True where a query sees a key. For debugging and tests: O(B L S) memory."""
        return ops.layout_mask(list(self._host), self.batch, self.rows_q, self.rows_k, is_causal, *window_size)

    def __repr__(self) -> str:
        return (
            f"PackedLayout(B={self.batch}, L={self.rows_q}, S={self.rows_k}, num_documents={self.num_documents}, "
            f"total_q={self.total_q}, total_k={self.total_k}, max_seqlen_q={self.max_seqlen_q}, "
            f"max_seqlen_k={self.max_seqlen_k})"
        )
