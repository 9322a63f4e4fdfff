"""PackedLayout against the definition, and every bad input."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import PACKINGS, packing, random_packing
from hypothesis import given, settings
from hypothesis import strategies as st

from packed_sdpa import PackedLayout, packed_attention


def mask_by_definition(ids, row_offset=0, rows=None, is_causal=True, window_size=(-1, -1)):
    ids = ids.reshape(-1, ids.shape[-1])
    size = ids.shape[1]
    end = size if rows is None else row_offset + rows
    i = torch.arange(row_offset, end)[:, None]
    j = torch.arange(size)[None, :]
    mask = (ids[:, row_offset:end, None] == ids[:, None, :]) & (ids[:, None, :] != 0)
    if is_causal:
        mask = mask & (j <= i)
    if window_size[0] >= 0:
        mask = mask & (i - j <= window_size[0])
    if window_size[1] >= 0:
        mask = mask & (j - i <= window_size[1])
    return mask


@pytest.mark.parametrize("name", PACKINGS)
def test_mask_is_the_definition(name):
    ids = packing(name)
    layout = PackedLayout.from_doc_ids(ids)
    assert torch.equal(layout.materialize_mask(), mask_by_definition(ids))
    for options in ({"window_size": (2, -1)}, {"is_causal": False}, {"is_causal": False, "window_size": (1, 3)}):
        assert torch.equal(layout.materialize_mask(**options), mask_by_definition(ids, **options))


@settings(max_examples=200, deadline=None, print_blob=True)
@given(data=st.data(), seed=st.integers(0, 2**31), batch=st.integers(1, 3), size=st.integers(1, 60))
def test_random_ids(data, seed, batch, size):
    ids = random_packing(torch.Generator().manual_seed(seed), batch, size)
    row_offset = data.draw(st.integers(0, size))
    rows = data.draw(st.none() | st.integers(0, size - row_offset))
    window = (data.draw(st.integers(-1, size)), -1)
    layout = PackedLayout.from_doc_ids(ids, row_offset=row_offset, rows=rows)
    assert torch.equal(
        layout.materialize_mask(window_size=window), mask_by_definition(ids, row_offset, rows, window_size=window)
    )
    per_row = [set(row.unique().tolist()) - {0} for row in ids]
    assert layout.num_documents == sum(map(len, per_row))
    assert layout.total_k == int((ids != 0).sum())


def test_equal_documents_by_every_constructor():
    ids = PackedLayout.from_doc_ids(torch.tensor([4, 4, 4, 2, 2]))
    others = [
        PackedLayout.from_seqlens([3, 2]),
        PackedLayout.from_seqlens(torch.tensor([3, 2], dtype=torch.int32), total=5),
        PackedLayout.from_cu_seqlens(torch.tensor([0, 3, 5]), torch.tensor([0, 3, 5])),
        PackedLayout.from_position_ids(torch.tensor([0, 1, 2, 0, 1])),
        PackedLayout.from_position_ids(torch.tensor([[7, 8, 9, 3, 4]])),
    ]
    for layout in others:
        assert torch.equal(layout.materialize_mask(), ids.materialize_mask())
        assert (layout.batch, layout.rows_q, layout.rows_k) == (1, 5, 5)


def test_lengths_that_leave_padding():
    layout = PackedLayout.from_seqlens([2, 1], total=5)
    assert torch.equal(layout.materialize_mask(), mask_by_definition(torch.tensor([[1, 1, 2, 0, 0]])))


def test_layout_is_immutable_and_prints_itself():
    layout = PackedLayout.from_seqlens([3, 2])
    with pytest.raises(AttributeError, match="PackedLayout is immutable, so batch cannot be set"):
        layout.batch = 2
    assert "num_documents=2" in repr(layout)


def test_large_unsigned_ids():
    ids = torch.tensor([2**63 + 5, 2**63 + 5, 1, 0], dtype=torch.uint64)
    layout = PackedLayout.from_doc_ids(ids)
    assert torch.equal(layout.materialize_mask(), mask_by_definition(torch.tensor([[7, 7, 1, 0]])))


def test_made_in_inference_mode_and_used_in_training():
    with torch.inference_mode():
        layout = PackedLayout.from_doc_ids(torch.tensor([1, 1, 2]))
    query = torch.randn(1, 2, 3, 8, requires_grad=True)
    packed_attention(query, query, query, layout).sum().backward()
    assert query.grad is not None


BAD = [
    (lambda: PackedLayout.from_doc_ids(torch.tensor([[1, -1]])), ValueError, "doc_ids must not be negative, got -1"),
    (lambda: PackedLayout.from_doc_ids(torch.tensor([1.5])), TypeError, "doc_ids must have an integer dtype"),
    (
        lambda: PackedLayout.from_doc_ids(torch.ones(1, 2, 3).long()),
        ValueError,
        r"doc_ids must be \[B, S\] or \[S\], got shape \[1, 2, 3\]",
    ),
    (
        lambda: PackedLayout.from_doc_ids(torch.tensor(1)),
        ValueError,
        r"doc_ids must be \[B, S\] or \[S\], got shape \[\]",
    ),
    (
        lambda: PackedLayout.from_doc_ids(torch.ones(4).long(), row_offset=5),
        ValueError,
        r"row_offset must be in \[0, 4\], got 5",
    ),
    (
        lambda: PackedLayout.from_doc_ids(torch.ones(4).long(), row_offset=-1),
        ValueError,
        r"row_offset must be in \[0, 4\], got -1",
    ),
    (
        lambda: PackedLayout.from_doc_ids(torch.ones(4).long(), row_offset=2, rows=3),
        ValueError,
        r"rows must be in \[0, 2\]",
    ),
    (lambda: PackedLayout.from_seqlens([3, 4], total=5), ValueError, "seqlens sum to 7 but the row has only 5 tokens"),
    (lambda: PackedLayout.from_seqlens([3, -4]), ValueError, "seqlens must not be negative, got -4"),
    (
        lambda: PackedLayout.from_seqlens(torch.tensor([1.0])),
        TypeError,
        "seqlens must have an integer dtype, got Float",
    ),
    (
        lambda: PackedLayout.from_cu_seqlens(torch.tensor([1, 3]), torch.tensor([0, 3])),
        ValueError,
        "cu_seqlens_q must start at 0, got 1",
    ),
    (
        lambda: PackedLayout.from_cu_seqlens(torch.tensor([0, 3]), torch.tensor([2, 3])),
        ValueError,
        "cu_seqlens_k must start at 0, got 2",
    ),
    (
        lambda: PackedLayout.from_cu_seqlens(torch.tensor([0, 3, 2]), torch.tensor([0, 3, 3])),
        ValueError,
        "cu_seqlens_q must not decrease, but entry 2 is 2 after 3",
    ),
    (
        lambda: PackedLayout.from_cu_seqlens(torch.tensor([0, 3]), torch.tensor([0, 3]), total_q=2),
        ValueError,
        "cu_seqlens_q ends at 3 but there are only 2 tokens",
    ),
    (
        lambda: PackedLayout.from_cu_seqlens(torch.tensor([0, 3]), torch.tensor([0, 1, 3])),
        ValueError,
        "must describe the same documents, got 2 and 3 entries",
    ),
    (
        lambda: PackedLayout.from_cu_seqlens(torch.tensor([]).int(), torch.tensor([]).int()),
        ValueError,
        "at least one entry",
    ),
]


@pytest.mark.parametrize("call,error,message", BAD, ids=[message for _, _, message in BAD])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_copies_and_pickles():
    layout = PackedLayout.from_doc_ids(torch.tensor([[1, 1, 0, 2]]))
    for other in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert torch.equal(other.materialize_mask(), layout.materialize_mask())
        assert (other.batch, other.rows_q, other.rows_k) == (1, 4, 4)


WRONG_TYPES = [
    (lambda: PackedLayout.from_doc_ids([1, 1, 2]), "doc_ids must be a tensor, got list"),
    (lambda: PackedLayout.from_seqlens([2.9, 3.9]), "seqlens must hold ints, got 2.9"),
    (lambda: PackedLayout.from_seqlens([True]), "seqlens must hold ints, got True"),
    (lambda: PackedLayout.from_seqlens((2, 3)), "seqlens must be a tensor, got tuple"),
    (lambda: PackedLayout.from_cu_seqlens([0, 2], torch.tensor([0, 2])), "cu_seqlens_q must be a tensor, got list"),
]


@pytest.mark.parametrize("call,message", WRONG_TYPES, ids=[message for _, message in WRONG_TYPES])
def test_wrong_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()
