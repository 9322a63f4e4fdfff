"""Packs token documents into rows of one length, best fit, with every document marked.

R rows of S = ``seq_len`` tokens. The tensors can be handed to a model as they are::

    rows = packed_sdpa.pack(documents, seq_len=4096)
    for batch in rows.batches(batch_size=1):        # input_ids, position_ids, labels, doc_ids, each [B, S]
        loss = model(**batch).loss                  # after packed_sdpa.attach(model)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED_LABEL = -100  # the label that torch's cross entropy and Hugging Face's losses skip


class Piece(NamedTuple):
    """Where a document, or a piece of one that did not fit into a row, was put."""

    document: int  # index into the documents given
    start: int  # first token of the piece within its document
    length: int
    row: int
    column: int  # first token of the piece within its row


@dataclass(frozen=True)
class PackedRows:
    """Rows of packed documents; tensors are int64 ``[R, S]``."""

    input_ids: Tensor
    doc_ids: Tensor  # 1, 2, ... within each row; 0 is padding
    position_ids: Tensor  # restart at 0 with every document, and with the padding at the row's end
    labels: Tensor  # input_ids, and -100 at padding and at the first token of a document (nothing predicts it)
    pieces: tuple[Piece, ...]  # in row order
    num_split: int  # documents that were cut because they are longer than a row
    num_empty: int  # documents without a token, left out

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(piece.length for piece in self.pieces)

    @property
    def fill(self) -> float:
        """Share of the rows that is not padding, in (0, 1]."""
        return self.num_tokens / self.input_ids.numel()

    def select(self, rows: Sequence[int] | slice) -> dict[str, Tensor]:
        """Keyword arguments for a model's forward: input_ids, position_ids, labels, doc_ids, each ``[B, S]``."""
        index = slice(rows.start, rows.stop, rows.step) if isinstance(rows, slice) else list(rows)
        return {
            "input_ids": self.input_ids[index],
            "position_ids": self.position_ids[index],
            "labels": self.labels[index],
            "doc_ids": self.doc_ids[index],
        }

    def batches(self, batch_size: int = 1) -> Iterator[dict[str, Tensor]]:
        """The rows in order, ``batch_size`` at a time; the last batch may be smaller."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        for first in range(0, self.num_rows, batch_size):
            yield self.select(slice(first, first + batch_size))

    def row_pieces(self, row: int) -> tuple[Piece, ...]:
        """The documents of one row, from left to right; piece k has doc_id k + 1."""
        return tuple(piece for piece in self.pieces if piece.row == row)


def pack(
    documents: Sequence[Sequence[int] | Tensor], seq_len: int, *, max_doc_len: int | None = None, pad_id: int = 0
) -> PackedRows:
    """Puts whole documents into rows of ``seq_len`` tokens so that little padding is left.

    documents: token ids of each, as lists or 1-D integer tensors. A document longer than ``max_doc_len`` (default and
    upper limit: ``seq_len``) is cut into pieces, each a document of its own. Best-fit decreasing: the longest piece
    first, each into the fullest row that still takes it; at most 11/9 of the fewest rows possible, plus one (Johnson
    1974). Padding (``pad_id``) stands at a row's end only.

    Raises ValueError (lengths below 1, no tokens at all, a document that is not 1-D), TypeError (ids that are not
    integers).
    """
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    longest = seq_len if max_doc_len is None else max_doc_len
    if not 1 <= longest <= seq_len:
        raise ValueError(f"max_doc_len must be between 1 and seq_len {seq_len}, got {max_doc_len}")
    tokens = [_as_tokens(document, index) for index, document in enumerate(documents)]
    spans = [
        (index, start, min(longest, len(document) - start))
        for index, document in enumerate(tokens)
        for start in range(0, len(document), longest)
    ]
    if not spans:
        raise ValueError(f"documents hold no tokens ({len(tokens)} documents, all empty); pass at least one token")
    pieces = _best_fit(spans, seq_len)
    return PackedRows(
        **_fill(tokens, pieces, seq_len, pad_id),
        pieces=pieces,
        num_split=sum(len(document) > longest for document in tokens),
        num_empty=sum(len(document) == 0 for document in tokens),
    )


def _as_tokens(document: Sequence[int] | Tensor, index: int) -> Tensor:
    tokens = document if isinstance(document, Tensor) else torch.as_tensor(document, device="cpu")
    if tokens.dim() != 1:
        raise ValueError(f"documents[{index}] must be 1-D token ids, got shape {list(tokens.shape)}")
    if tokens.numel() and (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool):
        raise TypeError(f"documents[{index}] must hold integer token ids, got {tokens.dtype}; tokenize the text first")
    return tokens.to(device="cpu", dtype=torch.int64)


def _best_fit(spans: list[tuple[int, int, int]], seq_len: int) -> tuple[Piece, ...]:
    """spans: (document, start, length) of each piece -> places, ordered by row and column."""
    rows_by_free: dict[int, list[int]] = {}  # free tokens -> rows with that many, newest last
    free_sizes: list[int] = []  # keys of rows_by_free with a row, ascending
    num_rows = 0
    pieces = []
    for document, start, length in sorted(spans, key=lambda span: -span[2]):
        at = bisect_left(free_sizes, length)
        if at == len(free_sizes):
            row, free = num_rows, seq_len
            num_rows += 1
        else:
            free = free_sizes[at]
            row = rows_by_free[free].pop()
            if not rows_by_free[free]:
                free_sizes.pop(at)
        pieces.append(Piece(document, start, length, row, seq_len - free))
        left = free - length
        if left:
            if not rows_by_free.get(left):
                insort(free_sizes, left)
            rows_by_free.setdefault(left, []).append(row)
    return tuple(sorted(pieces, key=lambda piece: (piece.row, piece.column)))


def _fill(tokens: list[Tensor], pieces: tuple[Piece, ...], seq_len: int, pad_id: int) -> dict[str, Tensor]:
    _, _, lengths, rows, columns = torch.tensor(pieces, dtype=torch.int64, device="cpu").t().contiguous().unbind(0)
    num_rows = int(rows[-1]) + 1
    first_in_row = torch.searchsorted(rows, rows)  # index of the first piece of each piece's row
    numbers = torch.arange(len(pieces), device="cpu") - first_in_row + 1
    used = torch.zeros(num_rows, dtype=torch.int64, device="cpu").index_add_(0, rows, lengths)

    def per_token(values: Tensor) -> Tensor:
        return values.repeat_interleave(lengths)

    position = torch.arange(int(lengths.sum()), device="cpu") - per_token(lengths.cumsum(0) - lengths)
    place = per_token(rows * seq_len + columns) + position
    source = torch.cat([tokens[piece.document][piece.start : piece.start + piece.length] for piece in pieces])

    def grid(values: Tensor, fill: int) -> Tensor:
        rows = torch.full((num_rows * seq_len,), fill, device="cpu")
        return rows.index_put_((place,), values).view(num_rows, seq_len)

    padding_position = (torch.arange(seq_len, device="cpu") - used[:, None]).clamp_(min=0)
    doc_ids = grid(per_token(numbers), 0)
    return {
        "input_ids": grid(source, pad_id),
        "doc_ids": doc_ids,
        "position_ids": torch.where(doc_ids == 0, padding_position, grid(position, 0)),
        "labels": grid(torch.where(position == 0, IGNORED_LABEL, source), IGNORED_LABEL),
    }
