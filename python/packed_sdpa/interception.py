"""Puts the packed function in the place of SDPA, only while a hooked forward runs, only in its thread.

Two ways at once, because each misses calls that the other sees:

- the attribute ``torch.nn.functional.scaled_dot_product_attention`` (what most models call, also
  ``nn.MultiheadAttention``, and what torch.compile traces). It is one for all threads, and a thread that has read it
  may make its call after the hooked forward has ended, so the packed function itself passes through what a thread
  outside of every hooked forward calls as SDPA (`called_as_sdpa`);
- a kernel for the operator on a dispatch key that is on in this thread only (by-name imports, ``torch.ops.aten``,
  ``functools.partial``, the fused operator of ``nn.MultiheadAttention`` in evaluation). A TorchFunctionMode would see
  them too, at 90 us a hooked call, and torch itself can leave one behind when an interrupt comes.

Leaving is idempotent and goes by the height of a thread's stack, so that a guard can repeat it after an interrupt at
any point.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from packed_sdpa import _torch_private
from packed_sdpa.call_site import names_at_call

if TYPE_CHECKING:
    from packed_sdpa.hooks import AttentionHook

Sdpa = Callable[..., Tensor]
T = TypeVar("T")


class Frame:
    """One running forward of a hooked module."""

    __slots__ = ("calls", "greenlet", "hook", "in_forward")

    def __init__(self, hook: AttentionHook) -> None:
        self.hook = hook
        self.greenlet = current_greenlet()
        self.calls = 0  # attention calls that were seen
        self.in_forward = False  # the module's forward has begun


def current_greenlet() -> object:
    """Of a thread's greenlets the one that runs; None where nobody uses any."""
    getcurrent = getattr(sys.modules.get("greenlet"), "getcurrent", None)  # it may be half imported
    return None if getcurrent is None else getcurrent()


def check_greenlet(of_running: object) -> None:
    """Raises when another greenlet of this thread stands in the middle of a forward."""
    now: Any = current_greenlet()
    was_imported_since = of_running is None and now is not None and now.parent is None
    if of_running is not now and not was_imported_since:
        raise RuntimeError(
            "packed_sdpa: another greenlet of this thread was left in the middle of an attached or hooked forward, "
            "whose documents would be taken for those of this one; switch greenlets between forwards, or run them in "
            "threads"
        )


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.outside = False  # an intercepted call is being passed through
        self.level = 0  # place in _found of what it is passed to
        self.by_name = False  # the operator itself was called, past the attribute


_SDPA = "scaled_dot_product_attention"
_PACKED = "_packed_varlen_sdpa"

_thread = _ThreadState()
_lock = threading.RLock()
_inside: set[int] = set()  # threads within a hooked forward
_visitors: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # those that have been within one, but for recomputes
_packed: Sdpa | None = None  # the function that takes SDPA's place
_has_swapped = False  # at least once
_is_swapped = False  # the packed function is in SDPA's place by us, not by the user's own hand
_outer: Sdpa = F.scaled_dot_product_attention  # what was there when the first thread entered
_MOST_FOUND = 16
_found: list[Sdpa] = [_torch_private.STOCK_SDPA]  # what has been there, the oldest first, _outer the last


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

    _torch_private.catch_operators({_SDPA: by_name, "_native_multi_head_attention": native})


def current_frame() -> Frame | None:
    frames = _thread.frames
    return frames[-1] if frames else None


_DEPTH_OF_PATCHES = 8  # frames between a patch and the call of what it found


def _is_within_patch(caller: FrameType) -> bool:
    """The call comes out of somebody's function that is now in SDPA's place: it found ours there, and was kept."""
    patch = F.scaled_dot_product_attention
    code = getattr(patch, "__code__", None) or getattr(type(patch).__call__, "__code__", None)
    if code is None or patch is _packed:
        return False
    frame: FrameType | None = caller
    for _ in range(_DEPTH_OF_PATCHES):
        if frame is None:
            return False
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def called_as_sdpa(caller: FrameType) -> bool:
    """``caller``, outside of every hooked forward, calls the packed function for SDPA, in whose place it found it.

    By when it makes the call the swap may have ended. A call by the packed function's own name is none, nor is one by a
    user who put it in SDPA's place. Where the call names neither (a variable, a partial) it counts while another
    thread runs a hooked forward; after that when the caller's code names SDPA alone and such a thread still lives.
    """
    with _lock:
        by_hand = F.scaled_dot_product_attention is _packed and not _is_swapped
        others = [thread for thread in _visitors if thread is not threading.current_thread()]
    if by_hand or not _has_swapped:
        return False
    if _is_within_patch(caller):
        return True
    called = names_at_call(caller)
    if _SDPA in called or _PACKED in called:
        return _PACKED not in called
    code = caller.f_code
    known = {*code.co_names, *code.co_freevars, *code.co_varnames}
    if _PACKED in known:
        return False
    return bool(_inside) or (_SDPA in known and any(thread.is_alive() for thread in others))


def height() -> int:
    return len(_thread.frames)


def enter(hook: AttentionHook) -> Frame:
    """Begins a hooked forward in this thread. The caller leaves it, by the height before, in a ``finally``."""
    global _outer, _has_swapped, _is_swapped
    frame = Frame(hook)
    frames = _thread.frames
    if frames:
        check_greenlet(frames[-1].greenlet)
    frames.append(frame)
    thread = threading.get_ident()
    if thread not in _inside or F.scaled_dot_product_attention is not _packed:
        with _lock:
            _inside.add(thread)
            if not _torch_private.in_backward():
                _visitors.add(threading.current_thread())
            current = F.scaled_dot_product_attention
            if current is not _packed:
                if current is not _found[-1]:
                    del _found[_level_of(current) :]
                    _found.append(current)
                    del _found[:-_MOST_FOUND]
                _outer = current
                _has_swapped = _is_swapped = True
                F.scaled_dot_product_attention = _packed  # type: ignore[assignment]
    if not torch.compiler.is_compiling():
        _torch_private.set_catching(True)
    return frame


def leave(down_to: int) -> None:
    """Ends this thread's hooked forwards above a height; those that have ended already are no matter."""
    global _is_swapped
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
            if _inside == {thread} and _is_swapped and F.scaled_dot_product_attention is _packed:
                F.scaled_dot_product_attention = _outer
                _is_swapped = False
            _inside.discard(thread)


def _forget_other_threads() -> None:
    """In a forked child: of the threads only the one that forked goes on."""
    global _lock, _is_swapped
    _lock = threading.RLock()
    _visitors.clear()
    _inside.clear()
    if _thread.frames:
        _inside.add(threading.get_ident())
    elif _is_swapped and F.scaled_dot_product_attention is _packed:
        F.scaled_dot_product_attention = _outer
        _is_swapped = False


os.register_at_fork(after_in_child=_forget_other_threads)


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
    before = _thread.outside, _thread.level
    _thread.outside, _thread.level = True, _level_of(outer)
    try:
        return without_catching(outer, *args, **kwargs)
    finally:
        _thread.outside, _thread.level = before


def _outside_of(current: Sdpa) -> Sdpa:
    if _thread.by_name:
        return _torch_private.STOCK_SDPA
    # Somebody's patch calls the packed function, which it took for the original: it gets what it should have found.
    if _thread.outside:
        return _found_before(_thread.level)
    if not _thread.frames and _is_within_patch(sys._getframe(1)):
        return _found_before(_level_of(current))
    return _outer if _thread.frames or current is _packed else current


def _level_of(function: Sdpa) -> int:
    return next((level for level, found in enumerate(_found) if found is function), len(_found))


def _found_before(level: int) -> Sdpa:
    original = _found[level - 1] if level > 0 else _torch_private.STOCK_SDPA
    return original if original is not _packed else _torch_private.STOCK_SDPA
