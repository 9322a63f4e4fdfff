"""Puts the packed function in the place of SDPA, only while a hooked forward runs, only in its thread.

Two ways at once, because each misses calls that the other sees:

- the attribute ``torch.nn.functional.scaled_dot_product_attention`` (what most models call, also
  ``nn.MultiheadAttention``, and what torch.compile traces). It is one for all threads, so the packed function itself
  passes calls of threads that are outside of every hooked forward through;
- a kernel for the operator on a dispatch key that is on in this thread only (by-name imports, ``torch.ops.aten``,
  ``functools.partial``, the fused operator of ``nn.MultiheadAttention`` in evaluation). A TorchFunctionMode would see
  them too, at 90 us a hooked call, and torch itself can leave one behind when an interrupt comes.

Leaving is idempotent and goes by the height of a thread's stack, so that a guard can repeat it after an interrupt at
any point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from packed_sdpa import _torch_private

if TYPE_CHECKING:
    from packed_sdpa.hooks import AttentionHook

Sdpa = Callable[..., Tensor]
T = TypeVar("T")


class Frame:
    """One running forward of a hooked module."""

    __slots__ = ("calls", "hook", "in_forward")

    def __init__(self, hook: AttentionHook) -> None:
        self.hook = hook
        self.calls = 0  # attention calls that were seen
        self.in_forward = False  # the module's forward has begun


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.outside = False  # an intercepted call is being passed through
        self.by_name = False  # the operator itself was called, past the attribute


_thread = _ThreadState()
_lock = threading.RLock()
_inside: set[int] = set()  # threads within a hooked forward
_packed: Sdpa | None = None  # the function that takes SDPA's place
_outer: Sdpa = F.scaled_dot_product_attention  # what was there when the first thread entered
_before_outer: Sdpa = _torch_private.STOCK_SDPA


def install(packed: Sdpa, native_multi_head_attention: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    """Says, once, what takes SDPA's place, and that of nn.MultiheadAttention's fused operator in evaluation."""
    global _packed
    _packed = packed

    def by_name(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not _thread.frames or _thread.outside:
            return without_catching(_torch_private.STOCK_SDPA, query, key, value, *args, **kwargs)
        _thread.by_name = True
        try:
            return packed(query, key, value, *args, **kwargs)
        finally:
            _thread.by_name = False

    def native(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if not _thread.frames:
            return without_catching(_torch_private.NATIVE_MULTI_HEAD_ATTENTION, *args, **kwargs)
        return native_multi_head_attention(*args, **kwargs)

    _torch_private.catch_operators({"scaled_dot_product_attention": by_name, "_native_multi_head_attention": native})


def current_frame() -> Frame | None:
    frames = _thread.frames
    return frames[-1] if frames else None


def is_bystander() -> bool:
    """This thread is outside of every hooked forward while another one is inside of one."""
    return not _thread.frames and bool(_inside)


def height() -> int:
    return len(_thread.frames)


def enter(hook: AttentionHook) -> Frame:
    """Begins a hooked forward in this thread. The caller leaves it, by the height before, in a ``finally``."""
    global _outer, _before_outer
    frame = Frame(hook)
    frames = _thread.frames
    frames.append(frame)
    thread = threading.get_ident()
    if thread not in _inside or F.scaled_dot_product_attention is not _packed:
        with _lock:
            _inside.add(thread)
            current = F.scaled_dot_product_attention
            if current is not _packed:
                if current is not _outer:
                    _before_outer = _outer
                    _outer = current
                F.scaled_dot_product_attention = _packed  # type: ignore[assignment]
    if not torch.compiler.is_compiling():
        _torch_private.set_catching(True)
    return frame


def leave(down_to: int) -> None:
    """Ends this thread's hooked forwards above a height; those that have ended already are no matter."""
    frames = _thread.frames
    while len(frames) > down_to:
        frames.pop()
    if frames or down_to > 0:
        return
    _thread.outside = _thread.by_name = False
    if not torch.compiler.is_compiling():
        _torch_private.set_catching(False)
    thread = threading.get_ident()
    if thread in _inside:
        with _lock:
            if _inside == {thread} and F.scaled_dot_product_attention is _packed:
                F.scaled_dot_product_attention = _outer
            _inside.discard(thread)


def without_catching(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    catching = _torch_private.is_catching()
    if catching:
        _torch_private.set_catching(False)
    try:
        return function(*args, **kwargs)
    finally:
        if catching:
            _torch_private.set_catching(True)


def call_outside(*args: Any, **kwargs: Any) -> Tensor:
    """Calls what F.scaled_dot_product_attention is outside of hooked forwards, or the operator that was asked for."""
    outer = _outside_of(F.scaled_dot_product_attention)
    was_outside = _thread.outside
    _thread.outside = True
    try:
        return without_catching(outer, *args, **kwargs)
    finally:
        _thread.outside = was_outside


def _outside_of(current: Sdpa) -> Sdpa:
    if _thread.by_name:
        return _torch_private.STOCK_SDPA
    if _thread.outside:  # somebody's patch calls the packed function, which it took for the original
        return _before_outer if _before_outer is not _packed else _torch_private.STOCK_SDPA
    return _outer if _thread.frames or current is _packed else current
