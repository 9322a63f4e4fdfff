"""Numbers for tuples of integers."""

from __future__ import annotations

from torch import Tensor


def numbered(*columns: Tensor) -> tuple[Tensor, int]:
    """Integer columns of one length -> for each of their tuples which of the distinct ones it is, from 0; their count.

    As ``torch.stack(columns).unique(dim=1, return_inverse=True)``, which is an operator call a tuple.
    """
    values, numbers = columns[0].unique(return_inverse=True)
    for column in columns[1:]:
        others, places = column.unique(return_inverse=True)
        values, numbers = (numbers * others.numel() + places).unique(return_inverse=True)
    return numbers, values.numel()
