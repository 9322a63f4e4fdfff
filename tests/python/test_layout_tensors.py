"""Layouts made by hand: whatever is wrong with their tensors is said before a kernel reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import packed_sdpa
from packed_sdpa.layout import LayoutTensors, PackedLayout

# Two batch rows of 8: documents of 3 and 4 and padding behind them; a document that comes back, and one inside it.
IDS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 2, 2, 0, 1, 1, 0]])


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good() -> LayoutTensors:
    return PackedLayout.from_doc_ids(IDS).tensors()


def use(tensors: LayoutTensors) -> Tensor:
    query = torch.randn(2, 2, 8, 16)
    return packed_sdpa.packed_attention(query, query, query, PackedLayout(tensors, 2, 8, 8))


def test_the_good_one_is_taken() -> None:
    tensors = good()
    assert tensors.cu_seqlens_q.tolist() == [0, 3, 7, 11, 13]
    assert tensors.token_index_q.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 13, 14, 10, 11]
    assert use(tensors).shape == (2, 2, 8, 16)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t._replace(cu_seqlens_q=t.cu_seqlens_q.long()), "cu_seqlens_q must be a 1-D int32 tensor, got"),
        (lambda t: t._replace(token_index_k=t.token_index_k[:, None]), "token_index_k must be a 1-D int32 tensor, got"),
        (lambda t: t._replace(cu_seqlens_k=torch.stack((t.cu_seqlens_k,) * 2, 1)[:, 0]), "cu_seqlens_k must be contig"),
        (lambda t: t._replace(max_seqlens=t.max_seqlens.int()), "max_seqlens must be int64"),
        (lambda t: t._replace(max_seqlens=t.max_seqlens[:1]), "max_seqlens must be int64 [2] on the host"),
        (
            lambda t: t._replace(cu_seqlens_q=t.cu_seqlens_q[:0], cu_seqlens_k=t.cu_seqlens_k[:0]),
            "cu_seqlens_q must have at least one entry (the leading 0), got none",
        ),
        (
            lambda t: t._replace(max_seqlens=torch.tensor([1, 1])),
            "max_seqlens is [1, 1] but the longest document has 4",
        ),
        (lambda t: t._replace(cu_seqlens_q=t.cu_seqlens_q[:-1]), "must describe the same documents, got 4 and 5"),
        (lambda t: t._replace(diagonal_offsets=int32(0)), "diagonal_offsets must have an entry a document (4) or none"),
        (lambda t: t._replace(cu_seqlens_q=int32(1, 3, 7, 11, 13)), "cu_seqlens_q must start at 0, got 1"),
        (lambda t: t._replace(cu_seqlens_k=int32(0, 7, 3, 11, 13)), "cu_seqlens_k must not decrease, but entry 2 is 3"),
        (lambda t: t._replace(cu_seqlens_q=int32(0, 3, 7, 11, 99)), "cu_seqlens_q ends at 99 but there are only 16"),
        (
            lambda t: t._replace(token_index_q=t.token_index_q[:-1].clone()),
            "token_index_q must have as many entries as tokens (13) or none, got 12",
        ),
        (
            lambda t: t._replace(token_index_q=t.token_index_q.flip(0).contiguous()),
            "token_index_q: the rows of document 0 must ascend",
        ),
        (
            lambda t: t._replace(token_index_k=int32(0, 1, 2, 3, 4, 5, 6, 8, 9, 13, 14, 15, 16)),
            "token_index_k: document 3 has rows 15 to 16 outside the 16 rows of the batch",
        ),
        (
            lambda t: t._replace(token_index_k=int32(0, 1, 2, 3, 4, 5, 8, 9, 10, 13, 14, 11, 12)),
            "token_index_k: document 1 (rows 3 to 8) runs over a batch row of 8 tokens",
        ),
        (
            lambda t: t._replace(token_index_k=int32(0, 1, 2, 3, 4, 5, 6, 8, 9, 13, 14, 9, 11)),
            "token_index_k: row 9 belongs to two documents; give each row to one document",
        ),
        (
            lambda t: t._replace(token_index_q=int32(), token_index_k=int32()),
            "token_index_q: document 2 (rows 7 to 10) runs over a batch row of 8 tokens",
        ),
        (
            lambda t: t._replace(token_index_q=int32(8, 9, 10, 3, 4, 5, 6, 0, 1, 2, 7, 13, 14)),
            "token_index_k: document 0 has its queries in batch row 1 and its keys in batch row 0",
        ),
        (
            lambda t: t._replace(diagonal_offsets=int32(0, 0, 1, 0)),
            "diagonal_offsets: document 2 has gaps, 4 queries and 4 keys, so its offset must be in [0, 0], got 1",
        ),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[LayoutTensors], LayoutTensors], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        use(change(good()))
    assert text in str(caught.value)


def test_rows_shared_by_documents_of_a_device_copy() -> None:
    shared = good()._replace(token_index_k=int32(0, 1, 2, 3, 4, 5, 6, 8, 9, 13, 14, 9, 11))
    with pytest.raises(ValueError, match="row 9 belongs to two documents"):
        PackedLayout(shared, 2, 8, 8).tensors("meta")


def test_a_device_copy_of_a_device_copy_is_refused() -> None:
    copied = PackedLayout.from_doc_ids(IDS).tensors("meta")
    with pytest.raises(ValueError, match="layout tensors must be on the CPU, got meta; make the PackedLayout of host"):
        PackedLayout(copied, 2, 8, 8).tensors("meta")


def test_a_list_of_other_length() -> None:
    from packed_sdpa._library import ops

    with pytest.raises(ValueError, match=r"layout must be the 6 tensors of PackedLayout.tensors\(\), got 5"):
        ops.layout_mask(list(good())[:5], 2, 8, 8, True, -1, -1)
