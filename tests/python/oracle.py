"""What is right, from the definition, in plain torch: no code shared with the library.

Query row i sees key row j iff ids[b, i] == ids[b, j] != 0, j <= i (causal), i - j <= left, j - i <= right.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def _documents(ids: Tensor):
    for row in range(ids.shape[0]):
        for document in ids[row].unique().tolist():
            if document != 0:
                yield row, (ids[row] == document).nonzero().squeeze(1)


def visible(query_rows: Tensor, key_rows: Tensor, is_causal: bool, window_size: tuple[int, int]) -> Tensor:
    behind = query_rows[:, None] - key_rows[None, :]
    seen = torch.ones_like(behind, dtype=torch.bool)
    if is_causal:
        seen &= behind >= 0
    if window_size[0] >= 0:
        seen &= behind <= window_size[0]
    if window_size[1] >= 0 and not is_causal:
        seen &= -behind <= window_size[1]
    return seen


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    *,
    is_causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    row_offset: int = 0,
    by_torch: bool = False,
) -> Tensor:
    """out [B, Hq, L, Dv] in the inputs' dtype, each document alone. by_torch: stock SDPA's math path, else by hand."""
    ids = ids.reshape(-1, ids.shape[-1]).long()
    batch, heads, rows, head_dim = query.shape
    groups = heads // key.shape[1]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    out_rows = [torch.zeros(heads, rows, value.shape[-1], dtype=query.dtype) for _ in range(batch)]
    for row, key_rows in _documents(ids):
        query_rows = key_rows[(key_rows >= row_offset) & (key_rows < row_offset + rows)]
        if query_rows.numel() == 0:
            continue
        q = query[row][:, query_rows - row_offset]
        k = key[row][:, key_rows].repeat_interleave(groups, 0)
        v = value[row][:, key_rows].repeat_interleave(groups, 0)
        seen = visible(query_rows, key_rows, is_causal, window_size)
        if by_torch:
            with sdpa_kernel(SDPBackend.MATH):
                part = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=scale)[0]
        else:
            part = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -math.inf).softmax(-1) @ v
        out_rows[row] = out_rows[row].index_copy(1, query_rows - row_offset, part)
    return torch.stack(out_rows)


def with_gradients(function, inputs: tuple[Tensor, ...], grad_out: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """[out, grad of each input] of function(*inputs) computed in dtype."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    out = function(*leaves)
    if not out.requires_grad:  # no document at all
        return [out, *map(torch.zeros_like, leaves)]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(dtype))]


def assert_close(name: str, actual: Tensor, right: Tensor, plain: Tensor, repro: str = "", norm: float = 0.0) -> None:
    """Error against the float64 oracle at most twice that of torch's own math path, plus a floor of eps x norm.

    norm: size of the terms that were added up, which may cancel (a one-token document's query gradient is 0).
    """
    assert actual.shape == right.shape, f"{name}: shape {list(actual.shape)}, expected {list(right.shape)} {repro}"
    if actual.numel() == 0:
        return
    right = right.double()
    error = (actual.double() - right).abs()
    # float32 and float64 are summed in themselves. Half types are summed in float32, so their roundings count: one of
    # the result, and in gradients one more of `out` and of dS, which they are made of.
    roundings = 16 if actual.dtype in (torch.float32, torch.float64) else 1 if name == "out" else 3
    summed_in = torch.promote_types(actual.dtype, torch.float32)
    floor = roundings * torch.finfo(actual.dtype).eps * right.abs().max() + torch.finfo(summed_in).eps * norm
    bound = float(2 * (plain.double() - right).abs().max() + floor)
    worst = int(error.nan_to_num(nan=math.inf).argmax())
    assert bool((error <= bound).all()), (
        f"{name}: worst at {list(map(int, torch.unravel_index(torch.tensor(worst), error.shape)))}, expected "
        f"{float(right.flatten()[worst])}, got {float(actual.flatten()[worst])}, bound {bound} {repro}"
    )


def check_against_oracle(function, inputs, ids: Tensor, grad_out: Tensor | None = None, repro: str = "", **options):
    """function(query, key, value) -> out, forward and backward, in the inputs' dtype."""
    dtype = inputs[0].dtype
    if grad_out is None:
        grad_out = torch.randn(*inputs[0].shape[:-1], inputs[2].shape[-1], dtype=torch.float64).to(dtype)
    actual = with_gradients(function, inputs, grad_out, dtype)
    right = with_gradients(lambda q, k, v: dense_attention(q, k, v, ids, **options), inputs, grad_out, torch.float64)
    plain = with_gradients(
        lambda q, k, v: dense_attention(q, k, v, ids, by_torch=True, **options), inputs, grad_out, dtype
    )
    largest = [float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in (*inputs, grad_out)]
    terms = largest[2] * largest[3] * inputs[2].shape[-1]  # of dO V^T
    norms = {"grad_query": terms * largest[1], "grad_key": terms * largest[0]}
    for name, *tensors in zip(("out", "grad_query", "grad_key", "grad_value"), actual, right, plain, strict=True):
        assert_close(name, *tensors, repro, norms.get(name, 0.0))
    return actual


def random_inputs(ids: Tensor, dtype: torch.dtype, heads=4, kv_heads=2, head_dim=16, value_dim=None, rows=None, seed=0):
    """query [B, Hq, L, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv]."""
    generator = torch.Generator().manual_seed(seed)
    batch, size = ids.reshape(-1, ids.shape[-1]).shape

    def draw(count, length, dim):
        return torch.randn(batch, count, length, dim, generator=generator, dtype=torch.float64).to(dtype)

    return (
        draw(heads, size if rows is None else rows, head_dim),
        draw(kv_heads, size, head_dim),
        draw(kv_heads, size, head_dim if value_dim is None else value_dim),
    )


def uniform_probe(ids: Tensor, dtype: torch.dtype = torch.float64, heads: int = 1, rows: slice = slice(None)):
    """q = k = 0 and value row j = j: each output is the mean of the visible row numbers."""
    ids = ids.reshape(-1, ids.shape[-1])
    batch, size = ids.shape
    zeros = torch.zeros(batch, heads, size, 8, dtype=dtype)
    value = torch.arange(size, dtype=dtype).view(1, 1, size, 1).expand(batch, heads, size, 8).contiguous()
    return zeros[:, :, rows], zeros, value
