"""Documents in buffers of fixed address and capacity: for CUDA graphs, which replay kernels on the same memory."""

from __future__ import annotations

import torch
from torch import Tensor

from packed_sdpa._library import ops
from packed_sdpa.layout import LayoutTensors, layouts_in


class GraphLayout:
    """A layout that is refilled between replays of a captured step, where :class:`PackedLayout` is immutable.

    Capture the step with it once, then :meth:`refill` it before each replay::

        layout = GraphLayout(batch=1, rows=8192, max_documents=256, max_seqlen=4096, device="cuda")
        layout.refill(doc_ids)
        with torch.cuda.graph(graph):
            loss = step(layout)
            loss.backward()
        layout.refill(next_doc_ids)
        graph.replay()

    batch, rows: B and S of doc_ids. max_documents: capacity, in documents and stretches of padding between them (a
    stretch counts twice, and more where it is longer than max_seqlen). max_seqlen: upper bound of a document's length
    (default: rows); kernels size their grids by it.
    """

    def __init__(
        self,
        batch: int,
        rows: int,
        *,
        max_documents: int,
        max_seqlen: int | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        for name, number in (("batch", batch), ("rows", rows), ("max_documents", max_documents)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        max_seqlen = rows if max_seqlen is None else max_seqlen
        if not 1 <= max_seqlen <= rows:
            raise ValueError(f"max_seqlen must be in [1, {rows}] (the rows of a batch row), got {max_seqlen}")
        self.batch = batch
        self.rows_q = rows
        self.rows_k = rows
        self.max_documents = max_documents
        self.max_seqlen = max_seqlen
        self._buffer = torch.zeros(2 * (max_documents + 1), dtype=torch.int32, device=device)
        self._none = torch.empty(0, dtype=torch.int32, device=device)
        self._max_seqlens = torch.tensor([max_seqlen, max_seqlen, 0], device="cpu")  # longest q, longest k, no flags
        self.refill(torch.zeros(batch, rows, dtype=torch.int64, device="cpu"))

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def refill(self, doc_ids: Tensor) -> None:
        """Take the documents of the next batch, integer or bool ``[B, S]`` or ``[S]`` with 0 for padding.

        Raises RuntimeError while a backward that reads the present documents is pending, ValueError where doc_ids do
        not fit (shape, capacity, max_seqlen) or an id comes back after a gap. The present documents stay then.
        """
        if ops.storage_use_count(self._buffer) > 1:
            raise RuntimeError(
                "GraphLayout.refill: a backward that reads the present documents is pending (or something else holds "
                "this layout's tensors); run backward, or drop its loss, before the refill"
            )
        shape = (1, *doc_ids.shape) if doc_ids.dim() == 1 else tuple(doc_ids.shape)
        if shape != (self.batch, self.rows_k):
            raise ValueError(f"doc_ids must be [{self.batch}, {self.rows_k}] as this layout, got {list(doc_ids.shape)}")
        host = layouts_in(ops.layout_from_doc_ids(doc_ids, 0, None))[0]
        in_order = ops.layout_in_row_order(host, self.batch, self.rows_q, self.rows_k, self.max_seqlen)
        if not in_order:
            raise ValueError(
                "doc_ids have an id that comes back after a gap, which a GraphLayout cannot hold; use PackedLayout"
            )
        form = LayoutTensors(*in_order)
        longest = int(form.max_seqlens.max())
        if longest > self.max_seqlen:
            raise ValueError(
                f"doc_ids have a document of {longest} tokens, max_seqlen is {self.max_seqlen}; enlarge it"
            )
        count = form.cu_seqlens_q.numel() - 1
        if count > self.max_documents:
            raise ValueError(
                f"doc_ids need {count} documents and stretches of padding, max_documents is {self.max_documents}; "
                "enlarge it"
            )
        # Entries behind the last document repeat its end: documents of no rows.
        filled = torch.empty(2, self.max_documents + 1, dtype=torch.int32, device="cpu")
        for row, offsets in zip(filled, (form.cu_seqlens_q, form.cu_seqlens_k), strict=True):
            row[: count + 1] = offsets
            row[count + 1 :] = offsets[-1]
        flat = filled.view(-1)
        self._buffer.copy_(flat.pin_memory() if self.device.type == "cuda" else flat, non_blocking=True)

    def tensors(self, device: torch.device | str | None = None) -> LayoutTensors:
        """Views of the buffers, for one call."""
        if device is not None and torch.device(device).type != self.device.type:
            raise ValueError(f"this GraphLayout is on {self.device}, not on {device}; make one there")
        size = self.max_documents + 1
        return LayoutTensors(
            self._buffer.narrow(0, 0, size),
            self._buffer.narrow(0, size, size),
            self._none,
            self._none,
            self._none,
            self._max_seqlens,
        )
