"""Stand-ins for torch's CUDA varlen operators, registered for the CPU while a test runs.

They compute exactly what the real kernels document, segment by segment, refuse what the real ones refuse, and leave
what the real ones leave unwritten as NaN. Every call is recorded with the arguments it was handed.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_DOCUMENTS = 65_535


@dataclass
class Calls:
    """Arguments by name, one entry a call."""

    flash_forward: list[dict] = field(default_factory=list)
    flash_backward: list[dict] = field(default_factory=list)
    efficient_forward: list[dict] = field(default_factory=list)
    efficient_backward: list[dict] = field(default_factory=list)


def _garbage(like: Tensor, shape=None, dtype=None) -> Tensor:
    shape = like.shape if shape is None else shape
    return torch.full(tuple(shape), math.nan, dtype=dtype or like.dtype)


def _garbage_like(tensor: Tensor) -> Tensor:
    """As at::empty_like lies in memory."""
    return torch.empty_like(tensor).fill_(math.nan)


def _segments(cu_q: Tensor, cu_k: Tensor):
    offsets_q, offsets_k = cu_q.tolist(), cu_k.tolist()
    for document in range(len(offsets_q) - 1):
        yield (
            document,
            slice(offsets_q[document], offsets_q[document + 1]),
            slice(offsets_k[document], offsets_k[document + 1]),
        )


def _count(rows: slice) -> int:
    return rows.stop - rows.start


def _seen(count_q: int, count_k: int, is_causal: bool, left: int, right: int) -> Tensor:
    """Bottom-right aligned."""
    place = torch.arange(count_q)[:, None] + (count_k - count_q)
    behind = place - torch.arange(count_k)[None, :]
    seen = torch.ones(count_q, count_k, dtype=torch.bool)
    if is_causal:
        seen &= behind >= 0
    if left >= 0:
        seen &= behind <= left
    if right >= 0:
        seen &= behind >= -right
    return seen


def _keep(seed: int, document: int, shape, dropout_p: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7919 * document)
    return (torch.rand(shape, generator=generator) >= dropout_p).float() / (1.0 - dropout_p)


def _expand(rows: Tensor, heads: int) -> Tensor:
    return rows.float().repeat_interleave(heads // rows.shape[1], 1).transpose(0, 1)  # [H, n, D]


def _check_offsets(cu_q, cu_k, max_q, max_k, total_q, total_k):
    for offsets, total in ((cu_q, total_q), (cu_k, total_k)):
        assert offsets.dtype == torch.int32 and offsets.is_contiguous() and offsets.dim() == 1
        values = offsets.tolist()
        assert values[0] == 0 and values == sorted(values) and values[-1] <= total, values
    assert cu_q.shape == cu_k.shape and 1 <= cu_q.numel() - 1 <= MAX_DOCUMENTS
    assert int(cu_q.diff().max()) <= max_q and int(cu_k.diff().max()) <= max_k
    assert isinstance(max_q, int) and isinstance(max_k, int)


def _check_flash_operands(query, key, value):
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[2]
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.dim() == 3 and key.shape == value.shape and key.shape[2] == head_dim
    assert head_dim <= 256 and head_dim % 8 == 0
    assert heads % kv_heads == 0
    for tensor in (query, key, value):
        assert tensor.stride(-1) == 1
        assert tensor.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride, size in zip(tensor.stride()[:2], tensor.shape, strict=False) if size > 1)


def _windows(left, right, is_causal):
    left = -1 if left is None else left
    right = -1 if right is None else right
    return left, 0 if is_causal else right


def _attend(query, key, value, scale, seen, keep):
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(1)[None, :, None], 0.0)
    return (weights if keep is None else weights * keep) @ value, scores.logsumexp(-1)


def _gradients(query, key, value, out, lse, grad_out, scale, seen, keep):
    """From the saved out and lse, as the kernels do: S -> P = exp(S - lse)."""
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
    weights = torch.exp(scores - lse[..., None])
    grad_weights = grad_out @ value.transpose(1, 2)
    dropped = weights
    if keep is not None:
        grad_weights, dropped = grad_weights * keep, weights * keep
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_scores = torch.where(weights == 0, 0.0, weights * (grad_weights - delta) * scale)
    return grad_scores @ key, grad_scores.transpose(1, 2) @ query, dropped.transpose(1, 2) @ grad_out


def _sum_heads(gradient: Tensor, kv_heads: int) -> Tensor:
    """[H, n, D] -> [n, Hkv, D]"""
    heads, count, head_dim = gradient.shape
    return gradient.view(kv_heads, heads // kv_heads, count, head_dim).sum(1).transpose(0, 1)


@contextlib.contextmanager
def stand_ins(*devices: str):
    """Registers all four for these dispatch keys (by default the CPU's); gives the record of calls."""
    calls = Calls()

    def flash_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
        block_table=None, num_splits=None,
    ):  # fmt: skip
        calls.flash_forward.append(dict(locals()))
        assert seqused_k is None and alibi_slopes is None and block_table is None and num_splits is None
        assert not return_debug_mask and scale is not None
        _check_flash_operands(query, key, value)
        _check_offsets(cum_seq_q, cum_seq_k, max_q, max_k, query.shape[0], key.shape[0])
        assert max_q > 1, "the real kernel would take its decoding path, which assumes one row a document"
        left, right = _windows(window_size_left, window_size_right, is_causal)
        out, heads = _garbage_like(query), query.shape[1]
        lse = _garbage(query, (heads, query.shape[0]), torch.float32)
        seed = int(torch.randint(2**31, ())) if dropout_p > 0 else 0
        for document, rows_q, rows_k in _segments(cum_seq_q, cum_seq_k):
            seen = _seen(_count(rows_q), _count(rows_k), is_causal, left, right)
            keep = _keep(seed, document, (heads, *seen.shape), dropout_p) if dropout_p > 0 else None
            part, part_lse = _attend(
                _expand(query[rows_q], heads), _expand(key[rows_k], heads), _expand(value[rows_k], heads),
                scale, seen, keep,
            )  # fmt: skip
            out[rows_q] = part.transpose(0, 1).to(out.dtype)
            lse[:, rows_q] = part_lse.masked_fill(~seen.any(1), math.inf)
        state = torch.tensor([seed, 5], dtype=torch.int64).view(torch.uint64)
        return out, lse, state, torch.empty((), dtype=torch.uint64), torch.empty(0, dtype=query.dtype)

    def flash_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        calls.flash_backward.append(dict(locals()))
        _check_flash_operands(query, key, value)
        _check_offsets(cum_seq_q, cum_seq_k, max_q, max_k, query.shape[0], key.shape[0])
        assert max_q > 1 and rng_state.dtype == torch.uint64 and rng_state.shape == (2,)
        assert unused.dtype == torch.uint64
        assert out.shape == query.shape == grad_out.shape
        assert logsumexp.shape == (query.shape[1], query.shape[0]) and logsumexp.is_contiguous()
        left, right = _windows(window_size_left, window_size_right, is_causal)
        gradients = [_garbage_like(query), _garbage_like(key), _garbage_like(value)]
        heads, kv_heads = query.shape[1], key.shape[1]
        seed, offset = rng_state.view(torch.int64).tolist() if dropout_p > 0 else (0, 5)
        assert offset == 5
        for document, rows_q, rows_k in _segments(cum_seq_q, cum_seq_k):
            seen = _seen(_count(rows_q), _count(rows_k), is_causal, left, right)
            keep = _keep(seed, document, (heads, *seen.shape), dropout_p) if dropout_p > 0 else None
            grad_q, grad_k, grad_v = _gradients(
                _expand(query[rows_q], heads), _expand(key[rows_k], heads), _expand(value[rows_k], heads),
                _expand(out[rows_q], heads), logsumexp[:, rows_q], _expand(grad_out[rows_q], heads), scale, seen, keep,
            )  # fmt: skip
            gradients[0][rows_q] = grad_q.transpose(0, 1).to(query.dtype)
            gradients[1][rows_k] = _sum_heads(grad_k, kv_heads).to(query.dtype)
            gradients[2][rows_k] = _sum_heads(grad_v, kv_heads).to(query.dtype)
        return tuple(gradients)

    def check_efficient(query, key, value, bias, cu_q, cu_k, max_q, max_k, dropout_p, custom_mask_type, window_size):
        """How far back a row sees, -1 without a window: the real window_size counts the row itself."""
        if window_size is not None:
            assert custom_mask_type == 2 and 1 <= window_size <= max(max_k, 1)
            pairs = [(_count(q), _count(k)) for _, q, k in _segments(cu_q, cu_k)]
            assert all(q == k for q, k in pairs if q and k), "the real backward takes the window from the top left"
        assert bias is None and dropout_p == 0.0 and custom_mask_type in (0, 2)
        assert query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0] == 1
        assert query.shape[2] == key.shape[2] == value.shape[2], "the real kernel has no grouped heads"
        assert query.shape[3] == key.shape[3] and key.shape[1] == value.shape[1]
        assert max_q <= query.shape[1] and max_k <= key.shape[1]
        for tensor in (query, key, value):
            assert tensor.stride(-1) == 1 and tensor.stride(1) % 4 == 0 and tensor.data_ptr() % 16 == 0
        _check_offsets(cu_q, cu_k, max_q, max_k, query.shape[1], key.shape[1])
        return -1 if window_size is None else window_size - 1

    def efficient_forward(
        query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type,
        compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
    ):  # fmt: skip
        calls.efficient_forward.append(dict(locals()))
        assert seqlen_k is None and compute_log_sumexp and scale is not None
        left = check_efficient(query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               dropout_p, custom_mask_type, window_size)  # fmt: skip
        heads = query.shape[2]
        out = _garbage(query, (*query.shape[:3], value.shape[3]))
        aligned = (max_seqlen_q + 31) // 32 * 32
        lse = torch.full((cu_seqlens_q.numel() - 1, heads, aligned), math.inf)
        for document, rows_q, rows_k in _segments(cu_seqlens_q, cu_seqlens_k):
            seen = _seen(_count(rows_q), _count(rows_k), custom_mask_type == 2, left, -1)
            part, part_lse = _attend(
                _expand(query[0, rows_q], heads), _expand(key[0, rows_k], heads), _expand(value[0, rows_k], heads),
                scale, seen, None,
            )  # fmt: skip
            some = seen.any(1)
            out[0, rows_q][some] = part.transpose(0, 1)[some].to(out.dtype)  # rows that see nothing stay undefined
            lse[document, :, : _count(rows_q)] = part_lse
        zero = torch.zeros((), dtype=torch.int64)
        return out, lse, zero, zero, max_seqlen_q, max_seqlen_k

    def efficient_backward(
        grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, logsumexp,
        dropout_p, philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *, scale=None,
        num_splits_key=None, window_size=None, shared_storage_dqdkdv=False,
    ):  # fmt: skip
        calls.efficient_backward.append(dict(locals()))
        assert not bias_requires_grad and num_splits_key is None and not shared_storage_dqdkdv
        left = check_efficient(query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               dropout_p, custom_mask_type, window_size)  # fmt: skip
        heads = query.shape[2]
        assert logsumexp.shape == (cu_seqlens_q.numel() - 1, heads, (max_seqlen_q + 31) // 32 * 32)
        assert logsumexp.stride(0) % 8 == 0 and logsumexp.stride(1) % 8 == 0
        gradients = [_garbage(query), _garbage(key), _garbage(value)]
        for document, rows_q, rows_k in _segments(cu_seqlens_q, cu_seqlens_k):
            if _count(rows_q) == 0 or _count(rows_k) == 0:
                continue  # left undefined
            assert torch.isposinf(logsumexp[document, :, _count(rows_q) :]).all()
            seen = _seen(_count(rows_q), _count(rows_k), custom_mask_type == 2, left, -1)
            parts = _gradients(
                _expand(query[0, rows_q], heads), _expand(key[0, rows_k], heads), _expand(value[0, rows_k], heads),
                _expand(out[0, rows_q], heads), logsumexp[document, :, : _count(rows_q)],
                _expand(grad_out_[0, rows_q], heads), scale, seen, None,
            )  # fmt: skip
            for gradient, rows, part in zip(gradients, (rows_q, rows_k, rows_k), parts, strict=True):
                gradient[0, rows] = part.transpose(0, 1).to(gradient.dtype)
        return (*gradients, torch.empty(0))

    with torch.library._scoped_library("aten", "IMPL") as library:
        for device in devices or ("CPU",):
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", device)
            override = {"allow_override": True} if has_kernel else {}  # of a CUDA build
            library.impl("_flash_attention_forward", flash_forward, device, **override)
            library.impl("_flash_attention_backward", flash_backward, device, **override)
            library.impl("_efficient_attention_forward", efficient_forward, device, **override)
            library.impl("_efficient_attention_backward", efficient_backward, device, **override)
        yield calls
