"""What the benchmark measures: seeded packings, and the arithmetic that counts as useful."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from packed_sdpa.data import help_topics

_SIGMA = 0.8  # of the log of document lengths
_BYTES_PER_TOKEN = 4  # of the help topics, as a large tokenizer would cut them


@dataclass(frozen=True)
class Case:
    """One row of S tokens: Hq query heads, Hkv key/value heads, head dim D, and the lengths of its documents."""

    name: str
    title: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seqlens: tuple[int, ...]
    window_left: int = -1

    @property
    def seq_len(self) -> int:
        return sum(self.seqlens)

    @property
    def doc_ids(self) -> Tensor:
        """int64 ``[1, S]``."""
        lengths = torch.tensor(self.seqlens)
        return torch.arange(1, len(self.seqlens) + 1).repeat_interleave(lengths)[None]

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """query, grad_out ``[1, Hq, S, D]`` and key, value ``[1, Hkv, S, D]`` as views of ``[1, S, H, D]`` memory,
        which is how models hold them; in the order query, key, value, grad_out."""
        generator = torch.Generator().manual_seed(seed)

        def rows(heads: int) -> Tensor:
            shape = (1, self.seq_len, heads, self.head_dim)
            return torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)

        return rows(self.num_heads), rows(self.num_kv_heads), rows(self.num_kv_heads), rows(self.num_heads)

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of which the query sees the key: n (n + 1) / 2 a document, fewer with a window."""
        reach = self.window_left + 1 if self.window_left >= 0 else self.seq_len
        full = [min(length, reach) for length in self.seqlens]
        return sum(
            near * (near + 1) // 2 + (length - near) * reach for length, near in zip(self.seqlens, full, strict=True)
        )

    def useful_flops(self, backward: bool) -> float:
        """4 Hq D a visible pair forward (two products of a multiply and an add), 2.5 times that backward (five
        products); ``backward``: forward and backward together."""
        forward = 4.0 * self.num_heads * self.head_dim * self.visible_pairs
        return forward * 3.5 if backward else forward


def log_normal_seqlens(mean: int, seq_len: int, seed: int = 0) -> tuple[int, ...]:
    """Document lengths with that mean that fill ``seq_len``; the last one is cut."""
    generator = torch.Generator().manual_seed(seed)
    location = math.log(mean) - _SIGMA**2 / 2
    lengths: list[int] = []
    left = seq_len
    while left:
        drawn = math.exp(location + _SIGMA * torch.randn((), generator=generator).item())
        lengths.append(min(left, max(1, round(drawn))))
        left -= lengths[-1]
    return tuple(lengths)


def help_topic_seqlens(seq_len: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of Python's help topics (4 bytes a token), in a seeded order, until ``seq_len`` is full."""
    sizes = [math.ceil(len(text.encode()) / _BYTES_PER_TOKEN) for text in help_topics().values()]
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed)).tolist()
    return repeated(tuple(sizes[place] for place in order), seq_len)


def kernel_cases() -> dict[str, Case]:
    """M1 to M7, by name."""
    m1 = Case("M1", "mean 512", 16, 4, 128, log_normal_seqlens(512, 8192))
    m4 = Case("M4", "help topics, S 16384", 8, 4, 64, help_topic_seqlens(16384))
    cases = (
        m1,
        replace(m1, name="M2", title="mean 2048", seqlens=log_normal_seqlens(2048, 8192)),
        replace(m1, name="M3", title="one document", seqlens=(8192,)),
        m4,
        replace(m1, name="M5", title="mean 64", seqlens=log_normal_seqlens(64, 8192)),
        replace(m1, name="M6", title="mean 512, window 256", window_left=255),
        replace(m1, name="M7", title="mean 512, D 256", head_dim=256),
    )
    return {case.name: case for case in cases}


def length_sweep(means: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4096)) -> list[Case]:
    """M1 with other mean lengths of documents."""
    m1 = kernel_cases()["M1"]
    return [
        replace(m1, name=f"mean {mean}", title=f"mean {mean}", seqlens=log_normal_seqlens(mean, m1.seq_len))
        for mean in means
    ]


def row_sweep(seq_lens: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)) -> list[Case]:
    """M4's heads, documents of mean 512, rows of other lengths: the documents of 4,096 tokens again and again, because
    those of each length's own draw would see more or fewer keys."""
    m4 = kernel_cases()["M4"]
    documents = log_normal_seqlens(512, 4096)
    return [
        replace(m4, name=f"S {size}", title=f"mean 512, S {size}", seqlens=repeated(documents, size))
        for size in seq_lens
    ]


def repeated(seqlens: tuple[int, ...], total: int) -> tuple[int, ...]:
    """These lengths over and over, ``total`` tokens in all; the last one is cut there."""
    lengths: list[int] = []
    left = total
    for length in itertools.cycle(seqlens):
        if left == 0:
            break
        lengths.append(min(length, left))
        left -= lengths[-1]
    return tuple(lengths)
