"""packed_sdpa.pack: every token once, no row over full, ids, positions and labels right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import packed_sdpa
from packed_sdpa.packing import IGNORED_LABEL, PackedRows


def token_documents(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens are all different, so that a token that is lost or doubled shows."""
    documents, start = [], 1
    for length in lengths:
        documents.append(list(range(start, start + length)))
        start += length
    return documents


def assert_sound(rows: PackedRows, documents: list[list[int]], longest: int) -> None:
    """What must hold of any packing, by the definitions in PackedRows."""
    real = rows.doc_ids != 0
    assert sorted(rows.input_ids[real].tolist()) == sorted(token for document in documents for token in document)
    assert rows.num_tokens == int(real.sum()) == sum(map(len, documents))
    for row in range(rows.num_rows):
        pieces = rows.row_pieces(row)
        assert pieces and sum(piece.length for piece in pieces) <= rows.seq_len
        column = 0
        for number, piece in enumerate(pieces, 1):
            assert piece.column == column and 1 <= piece.length <= longest
            here = slice(column, column + piece.length)
            source = documents[piece.document][piece.start : piece.start + piece.length]
            assert rows.input_ids[row, here].tolist() == source
            assert rows.doc_ids[row, here].tolist() == [number] * piece.length
            assert rows.position_ids[row, here].tolist() == list(range(piece.length))
            assert rows.labels[row, here].tolist() == [IGNORED_LABEL, *source[1:]]
            column += piece.length
        assert not rows.doc_ids[row, column:].any()
        assert (rows.labels[row, column:] == IGNORED_LABEL).all()
        assert rows.position_ids[row, column:].tolist() == list(range(rows.seq_len - column))


@settings(deadline=None, max_examples=200, print_blob=True)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any),
    seq_len=st.integers(1, 24),
    data=st.data(),
)
def test_any_packing_is_sound(lengths: list[int], seq_len: int, data: st.DataObject) -> None:
    longest = data.draw(st.none() | st.integers(1, seq_len), label="max_doc_len")
    documents = token_documents(lengths)
    rows = packed_sdpa.pack(documents, seq_len, max_doc_len=longest)
    limit = seq_len if longest is None else longest
    assert_sound(rows, documents, limit)
    assert rows.num_split == sum(length > limit for length in lengths)
    assert rows.num_empty == lengths.count(0)


def test_best_fit_leaves_no_row_that_another_would_have_held() -> None:
    rows = packed_sdpa.pack(token_documents([6, 5, 4, 3, 2]), seq_len=10)
    assert rows.num_rows == 2 and rows.fill == 1.0
    assert [[piece.length for piece in rows.row_pieces(row)] for row in range(2)] == [[6, 4], [5, 3, 2]]


def test_any_two_rows_hold_more_than_one_row_could() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (500,), generator=generator).tolist()
    rows = packed_sdpa.pack(token_documents(lengths), seq_len=64)
    used = sorted(sum(piece.length for piece in rows.row_pieces(row)) for row in range(rows.num_rows))
    assert used[0] + used[1] > 64


def test_a_document_longer_than_the_row_becomes_pieces() -> None:
    rows = packed_sdpa.pack([list(range(1, 26)), [90, 91]], seq_len=10)
    assert rows.num_split == 1
    assert sorted(piece.length for piece in rows.pieces if piece.document == 0) == [5, 10, 10]
    assert_sound(rows, [list(range(1, 26)), [90, 91]], 10)


def test_tensors_are_ready_for_a_model() -> None:
    rows = packed_sdpa.pack([torch.arange(1, 4, dtype=torch.int32), [7, 8]], seq_len=4, pad_id=99)
    assert rows.input_ids.tolist() == [[1, 2, 3, 99], [7, 8, 99, 99]]
    assert rows.labels.tolist() == [[-100, 2, 3, -100], [-100, 8, -100, -100]]
    batches = list(rows.batches(batch_size=3))
    assert len(batches) == 1 and batches[0]["input_ids"].shape == (2, 4)
    assert set(batches[0]) == {"input_ids", "position_ids", "labels", "doc_ids"}
    assert rows.select([1])["doc_ids"].tolist() == [[1, 1, 0, 0]]
    layout = packed_sdpa.PackedLayout.from_doc_ids(rows.doc_ids)
    assert (layout.num_documents, layout.total_k) == (2, 5)


@pytest.mark.parametrize(
    ("documents", "options", "error", "text"),
    [
        ([[1]], {"seq_len": 0}, ValueError, "seq_len must be at least 1, got 0"),
        ([[1]], {"seq_len": 4, "max_doc_len": 5}, ValueError, "max_doc_len must be between 1 and seq_len 4, got 5"),
        ([[1]], {"seq_len": 4, "max_doc_len": 0}, ValueError, "max_doc_len must be between 1 and seq_len 4, got 0"),
        ([[], []], {"seq_len": 4}, ValueError, r"documents hold no tokens \(2 documents, all empty\)"),
        ([], {"seq_len": 4}, ValueError, r"documents hold no tokens \(0 documents"),
        ([[1], [0.5]], {"seq_len": 4}, TypeError, r"documents\[1\] must hold integer token ids, got torch.float32"),
        ([[[1, 2]]], {"seq_len": 4}, ValueError, r"documents\[0\] must be 1-D token ids, got shape \[1, 2\]"),
    ],
)
def test_bad_input_is_named(documents: list, options: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        packed_sdpa.pack(documents, **options)


def test_batch_size_below_one_is_named() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        next(packed_sdpa.pack([[1]], seq_len=1).batches(0))
