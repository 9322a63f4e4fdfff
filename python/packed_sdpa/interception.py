"""Puts the packed function in the place of scaled_dot_product_attention, only while a hooked forward runs, only in its thread.

Two ways at once, because each misses calls that the other sees:

- the attribute ``torch.nn.functional.scaled_dot_product_attention`` (what most models call, also
  ``nn.MultiheadAttention``, and what torch.compile traces). It is one for all threads, so the packed function itself
  passes calls of threads that are outside of every hooked forward through;
- a kernel for the operator on a dispatch key that is on in this thread only (by-name imports, ``torch.ops.aten``,
  ``functools.partial``). A TorchFunctionMode would see them too, at 90 us a hooked call.

Leaving is idempotent and goes by the height of a thread's stack, so that a guard can repeat it after an interrupt at
any point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from packed_sdpa import _torch_private

if TYPE_CHECKING:
    from packed_sdpa.hooks import AttentionHook

Sdpa = Callable[..., Tensor]


class Frame:
    """One running forward of a hooked module."""

    __slots__ = ("calls", "hook", "in_forward", "mode", "seen_documents")

    def __init__(self, hook: AttentionHook) -> None:
        self.hook = hook
        self.calls = 0  # attention calls that were seen
        self.in_forward = False  # the module's forward has begun
        self.mode: _NoFastPath | None = None
        self.seen_documents = False


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.outside = False  # an intercepted call is being passed through


class _NoFastPath(TorchFunctionMode):
    """Does nothing; while it is active, nn.MultiheadAttention takes its ordinary path, which calls SDPA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


_thread = _ThreadState()
_lock = threading.RLock()
_inside: set[int] = set()  # threads within a hooked forward
_packed: Sdpa | None = None  # the function that takes SDPA's place
_outer: Sdpa = F.scaled_dot_product_attention  # what was there when the first thread entered
_before_outer: Sdpa = _torch_private.STOCK_SDPA


def install(packed: Sdpa) -> None:
    """Says, once, what takes SDPA's place."""
    global _packed
    _packed = packed

    def by_name(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not _thread.frames or _thread.outside:
            return without_catching(_torch_private.STOCK_SDPA, query, key, value, *args, **kwargs)
        return packed(query, key, value, *args, **kwargs)

    _torch_private.catch_sdpa_operator(by_name)


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
        if hook.holds_multihead_attention and not hook.module_is_training():
            frame.mode = _NoFastPath()
            frame.mode.__enter__()
    return frame


def leave(down_to: int) -> None:
    """Ends this thread's hooked forwards above a height; those that have ended already are no matter."""
    frames = _thread.frames
    while len(frames) > down_to:
        frame = frames[-1]
        if frame.mode is not None and _torch_private.newest_function_mode() is frame.mode:
            frame.mode.__exit__(None, None, None)
        frames.pop()
    if frames or down_to > 0:
        return
    if not torch.compiler.is_compiling():
        _torch_private.set_catching(False)
    thread = threading.get_ident()
    if thread in _inside:
        with _lock:
            if _inside == {thread} and F.scaled_dot_product_attention is _packed:
                F.scaled_dot_product_attention = _outer  # type: ignore[assignment]
            _inside.discard(thread)


def without_catching(function: Sdpa, *args: Any, **kwargs: Any) -> Tensor:
    catching = _torch_private.is_catching()
    if catching:
        _torch_private.set_catching(False)
    try:
        return function(*args, **kwargs)
    finally:
        if catching:
            _torch_private.set_catching(True)


def call_outside(*args: Any, **kwargs: Any) -> Tensor:
    """Calls what F.scaled_dot_product_attention is outside of hooked forwards."""
    if _thread.outside:  # a patch of somebody else that calls the packed function as the original
        return without_catching(
            _before_outer if _before_outer is not _packed else _torch_private.STOCK_SDPA, *args, **kwargs
        )
    current = F.scaled_dot_product_attention
    outer = current if current is not _packed else _outer
    _thread.outside = True
    try:
        return without_catching(outer, *args, **kwargs)
    finally:
        _thread.outside = False
