"""Named packings on which packed attention goes wrong, as lists of document ids a row. 0 is padding.

One list for tests, benchmark and support tables. Tile sizes of the kernels are around 32, 64 and 128.
"""

from __future__ import annotations

import torch


def ids_of(*runs: tuple[int, int]) -> list[int]:
    """(id, count) runs -> ids of one row."""
    return [document for document, count in runs for _ in range(count)]


PACKINGS: dict[str, list[list[int]]] = {
    "one_document": [ids_of((1, 7))],
    "padding_inside_and_tail": [[1, 1, 1, 0, 2, 2, 0, 0]],
    "padding_head": [[0, 0, 1, 1, 2]],
    "padding_between_singles": [[1, 0, 2, 0, 3]],
    "equal_ids_in_two_rows": [[1, 2], [2, 2]],
    "rows_split_differently": [ids_of((1, 5)), ids_of((1, 2), (2, 3)), [1, 1, 3, 3, 3]],
    "id_comes_back": [[1, 1, 2, 1, 1]],
    "padding_inside_document": [[1, 0, 1, 1]],
    "interleaved": [[1, 2, 1, 2, 3, 1, 0, 2, 3]],
    "huge_ids": [[2**40, 2**40, 5]],
    "descending_ids": [[9, 9, 3, 3, 700]],
    "all_padding": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "one_row_all_padding": [ids_of((1, 6)), [0] * 6],
    "single_token_documents": [[1, 2, 3, 4]],
    "one_token": [[1]],
    "tile_minus_one": [ids_of((1, 31), (2, 63), (3, 127))],
    "tile": [ids_of((1, 32), (2, 64), (3, 128))],
    "tile_plus_one": [ids_of((1, 33), (2, 65), (3, 129))],
    "long_and_many_short": [ids_of((1, 300), *((document, 1 + document % 7) for document in range(2, 60)))],
    "short_then_long_batch": [ids_of((1, 3), (2, 197)), ids_of((5, 150), (0, 17), (6, 33))],
    "gaps_across_tiles": [ids_of((1, 70), (2, 40), (1, 70), (0, 9), (2, 50), (1, 3))],
    "mostly_padding": [ids_of((1, 5), (0, 250))],
}


def packing(name: str) -> torch.Tensor:
    """int64 ids [B, S] of a named packing."""
    return torch.tensor(PACKINGS[name], dtype=torch.int64)


def random_packing(generator: torch.Generator, batch: int, size: int) -> torch.Tensor:
    """Random ids [B, S]: documents of mixed lengths, padding anywhere, now and then an id that comes back."""
    ids = torch.zeros(batch, size, dtype=torch.int64)
    for row in range(batch):
        begin = 0
        while begin < size:
            longest = size if torch.rand((), generator=generator) < 0.2 else 9
            count = int(torch.randint(1, longest + 1, (), generator=generator))
            document = int(torch.randint(0, 2 + size // 4, (), generator=generator))
            ids[row, begin : begin + count] = document
            begin += count
    return ids
