"""Attention over packed documents, as functions of tensors.

Axis letters: B batch, L query rows, S key rows, Hq query heads, Hkv key/value heads (``Hq % Hkv == 0``), D head dim of
query and key, Dv head dim of value, Tq / Tk tokens of a packed ``[T, H, D]`` tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from packed_sdpa import _torch_private, package_registry
from packed_sdpa._library import ops
from packed_sdpa.graph_layout import GraphLayout
from packed_sdpa.layout import LayoutTensors, PackedLayout
from packed_sdpa.packages import PackageCall

_forward = ops.varlen_attention_forward.default  # the packet would look for its overload at each call


@overload
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout | GraphLayout,
    *,
    is_causal: bool = ...,
    window_size: tuple[int, int] = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout | GraphLayout,
    *,
    is_causal: bool = ...,
    window_size: tuple[int, int] = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout | GraphLayout,
    *,
    is_causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T + mask) V within each document of ``layout``; differentiable.

    query ``[B, Hq, L, D]``, key ``[B, Hkv, S, D]``, value ``[B, Hkv, S, Dv]`` (float32, float64, bfloat16 or float16,
    any strides) -> out ``[B, Hq, L, Dv]`` in the query's memory layout, and with ``return_lse`` the natural log of the
    softmax denominator ``[B, Hq, L]`` (float32, float64 for float64; -inf for padding; not differentiable).

    is_causal: a query sees the keys at or before its own place; bottom-right aligned where a document has other counts
    of queries and keys. 2 queries over 4 keys::

        1 1 1 0
        1 1 1 1

    window_size: inclusive counts of rows behind and ahead, -1 unlimited (as flash-attention).
    scale: None is ``D ** -0.5``. dropout_p: in [0, 1), seeded from the default generator.
    backend: ``auto`` takes the first that can; a name is an order, and raises with the backend's reasons; ``auto:NAME``
    is a wish.

    Rows outside every document give 0, lse -inf and zero gradients, whatever they hold.
    """
    _check_layout(query, key, layout)
    _check_options(is_causal, window_size, backend)
    out, lse = attention_on_tensors(
        query,
        key,
        value,
        layout.tensors(query.device),
        is_causal=is_causal,
        window_size=window_size,
        scale=scale,
        dropout_p=dropout_p,
        backend=backend,
        need_lse=return_lse,
    )
    return (out, lse) if return_lse else out


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    is_causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As :func:`packed_attention`, on packed tensors.

    query ``[Tq, Hq, D]``, key ``[Tk, Hkv, D]``, value ``[Tk, Hkv, Dv]``, offsets integer ``[N + 1]`` -> out
    ``[Tq, Hq, Dv]``, lse ``[Hq, Tq]``.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}; pass torch.as_tensor(...)")
        if tensor.dim() != 3:
            raise ValueError(f"{name} must be 3-D [T, H, D], got shape {list(tensor.shape)}")
    _check_options(is_causal, window_size, backend)
    _check_numbers(scale, dropout_p)
    layout = PackedLayout.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, query.shape[0], key.shape[0])
    out, lse = attention_on_tensors(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        layout.tensors(query.device),
        is_causal=is_causal,
        window_size=window_size,
        scale=scale,
        dropout_p=dropout_p,
        backend=backend,
        need_lse=return_lse,
    )
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def attention_on_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: LayoutTensors,
    *,
    is_causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    need_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator call itself: layout tensors already on the query's device -> (out, lse).

    Backends that are Python packages give an empty lse; with need_lse they have a reason not to take the call.
    """
    _check_numbers(scale, dropout_p)
    if dropout_p != 0.0 and _torch_private.in_func_transform():
        raise NotImplementedError(
            f"dropout_p is {dropout_p!r} under a torch.func transform, whose randomness= the kernels do not follow; "
            "use dropout_p=0.0 there, or call it for each sample"
        )
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5  # the operator refuses head_dim 0
    package = package_registry.named(backend)
    if package is not None:
        if _torch_private.in_func_transform():
            raise NotImplementedError(
                f"backend '{backend}' does not support torch.func transforms (vmap, grad, jvp, ...); use "
                "loss.backward() or torch.autograd.grad, or under vmap backend='auto'"
            )
        sides = _reachable(window_size)
        call = PackageCall(query, key, value, layout, is_causal, sides, scale, dropout_p, need_lse)
        reasons = package.unsupported_reasons(call)
        if not reasons:
            return package.attention(call), query.new_empty(0, dtype=torch.float32)
        if not backend.startswith(package_registry.AUTO_PREFIX):
            raise RuntimeError(
                f"backend '{backend}' cannot take this call: {'; '.join(reasons)}. "
                "backend='auto' takes the first that can"
            )
        backend = "auto"
    out, lse, _ = _forward(
        query, key, value, *layout, is_causal, window_size[0], window_size[1], scale, dropout_p, backend
    )
    return out, lse


@dataclass(frozen=True)
class BackendReport:
    """One backend's answer to a call: no reasons means it can; ``chosen`` is the one that would run."""

    name: str
    chosen: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "chosen" if self.chosen else "could" if not self.reasons else "; ".join(self.reasons)
        return f"{self.name}: {verdict}"


class BackendReports(tuple[BackendReport, ...]):
    """The backends in the order in which they are tried; prints as a list."""

    @property
    def chosen(self) -> str | None:
        return next((report.name for report in self if report.chosen), None)

    def __str__(self) -> str:
        return "\n".join(str(report) for report in self)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout | GraphLayout,
    *,
    is_causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> BackendReports:
    """Which backend would take this call, and for each other one why not. Nothing is run."""
    _check_layout(query, key, layout)
    _check_options(is_causal, window_size, backend)
    return explain_on_tensors(
        query,
        key,
        value,
        layout.tensors(query.device),
        is_causal=is_causal,
        window_size=window_size,
        dropout_p=dropout_p,
        backend=backend,
    )


def explain_on_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: LayoutTensors,
    *,
    is_causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> BackendReports:
    """As :func:`explain`, of a call of :func:`attention_on_tensors`."""
    _check_numbers(None, dropout_p)
    call = PackageCall(query, key, value, layout, is_causal, _reachable(window_size), 1.0, dropout_p, False)
    asked = package_registry.named(backend)
    package_takes_it = asked is not None and not asked.unsupported_reasons(call)
    if asked is not None and backend.startswith(package_registry.AUTO_PREFIX) and not package_takes_it:
        backend = "auto"
    rows = ops.explain(query, key, value, list(layout), is_causal, *window_size, dropout_p, backend)
    reports = []
    for name, chosen, *reasons in rows:
        package = package_registry.named(name)
        if package is None:
            reports.append(BackendReport(name, chosen == "1" and not package_takes_it, tuple(reasons)))
        else:
            reasons = package.unsupported_reasons(call)
            reports.append(BackendReport(name, package is asked and package_takes_it, tuple(reasons)))
    return BackendReports(reports)


def available_backends() -> list[str]:
    """Names that ``backend=`` takes beside ``auto``, in the order in which auto tries them."""
    return ops.backend_names()


def _check_options(is_causal: bool, window_size: tuple[int, int], backend: str) -> None:
    """What the operator's own types cannot tell apart."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
    is_pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not is_pair or not (_is_count(window_size[0]) and _is_count(window_size[1])):
        raise TypeError(f"window_size must be two ints (left, right), -1 for unlimited, got {window_size!r}")
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name such as 'auto', got {backend!r}")


_MOST_ROWS = 2**31 - 1


def _reachable(window_size: tuple[int, int]) -> tuple[int, int]:
    """The same window, with -1 for counts that no two rows are apart: packages keep them in 32 bits."""
    left, right = (side if side < _MOST_ROWS else -1 for side in window_size)
    return left, right


def _is_count(value: object) -> bool:
    return type(value) is int or (isinstance(value, int) and not isinstance(value, bool))


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def _check_numbers(scale: object, dropout_p: object) -> None:
    if scale is not None and not _is_number(scale):
        cure = "multiply query by it instead" if isinstance(scale, Tensor) else "convert it with float()"
        raise TypeError(f"scale must be a number, or None for D ** -0.5, got {scale!r}; {cure}")
    if not _is_number(dropout_p):
        raise TypeError(f"dropout_p must be a number in [0, 1), got {dropout_p!r}; convert it with float()")


def _is_number(value: object) -> bool:
    """Also a number of NumPy and a tensor of one element, as torch; but not one whose gradient would be lost."""
    if isinstance(value, _NUMBERS):
        return True
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad
    return hasattr(value, "__float__")


def _check_layout(query: Tensor, key: Tensor, layout: PackedLayout | GraphLayout) -> None:
    if not isinstance(layout, (PackedLayout, GraphLayout)):
        raise TypeError(
            f"layout must be a PackedLayout, got {type(layout).__name__}; make one with PackedLayout.from_doc_ids(ids)"
        )
    if not isinstance(query, Tensor) or not isinstance(key, Tensor):
        name, wrong = ("key", key) if isinstance(query, Tensor) else ("query", query)
        raise TypeError(f"{name} must be a tensor, got {type(wrong).__name__}; pass torch.as_tensor(...)")
    query_shape, key_shape = query.shape, key.shape
    if len(query_shape) != 4 or len(key_shape) != 4:
        raise ValueError(
            f"query and key must be 4-D [B, H, S, D], got shapes {list(query_shape)} and {list(key_shape)}"
        )
    if (layout.batch, layout.rows_q, layout.rows_k) != (query_shape[0], query_shape[2], key_shape[2]):
        raise ValueError(
            f"layout is for B {layout.batch}, {layout.rows_q} query rows and {layout.rows_k} key rows, got query "
            f"{list(query_shape)} and key {list(key_shape)}; make the layout from this batch's doc_ids"
        )
