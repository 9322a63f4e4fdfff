"""Hooks on attention modules, and the scope of one outer forward. Internal; what other modules of the package use:

``hook_attention(module, record, *, attachment=None, window_size=None, audit=None) -> unhook``
    While ``module`` runs (called, or its ``forward`` called directly), and only in that thread, attention calls go to
    the packed function: taken when the documents in force fit, else passed through to stock; ``record`` counts each as
    taken or passed with its reason. A module with ``is_causal = False`` is passed through; its ``sliding_window`` is
    its window (`hf.window_of_width`) unless ``window_size`` gives one. ``attachment`` names whose forward scopes the
    module listens to; without one only the armed state counts. ``audit(documents, window_size, attn_mask, is_causal)``
    is asked about the mask of each call that would be taken: it returns a reason to pass the call through, or None, or
    raises. ``unhook()`` leaves the module as it was found, once no graph is left that may repeat a forward of it.

``new_attachment() -> int``
    A number for one attached model.

``forward_scope(documents_or_None, attachment)``
    Context manager for one outer forward: hooked calls of that attachment inside use these documents (None: unarmed),
    also when they are recomputed in backward, in whatever thread. The innermost scope of an attachment counts;
    ``in_forward_scope(attachment)`` tells whether one runs. Give the forward's output to
    ``keep_documents(output, documents)``, so that its graph keeps the documents for recompute.

``run_scoped(documents, attachment, call, args, kwargs)``
    The same around one call, output kept, safe against KeyboardInterrupt at any point: for a `guard.Around`.

``ArmedDocuments(doc_ids, backend)``, ``armed_documents()`` (package modules ``armed`` and ``state``)
    Documents, built once a forward; those that were armed by hand.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from packed_sdpa import _torch_private, guard, hf, interception
from packed_sdpa._library import ops
from packed_sdpa.armed import ArmedDocuments, Kept, documents_of_call, keep_documents
from packed_sdpa.records import ModuleRecord
from packed_sdpa.repeats import Lingering
from packed_sdpa.scope import NOTES_FORWARDS
from packed_sdpa.state import _PACKED_STATE

__all__ = [
    "AttentionHook",
    "armed_documents",
    "forward_scope",
    "hook_attention",
    "hooks_of",
    "in_forward_scope",
    "keep_documents",
    "new_attachment",
    "run_scoped",
]

BREAKS_AT_ATTENTION = (
    "packed_sdpa finds the documents of a hooked attention module when it runs, so the graph breaks there; compile "
    "without fullgraph=True, or use attach(model, route='interface'), which needs no break within a layer"
)


_attachment_numbers = itertools.count(1)

Audit = Callable[[ArmedDocuments, tuple[int, int], Tensor | None, bool], str | None]


def new_attachment() -> int:
    return next(_attachment_numbers)


def armed_documents() -> ArmedDocuments | None:
    """What was armed by hand, as this thread sees it."""
    return _PACKED_STATE.get()


class AttentionHook:
    """One hooking of one module: the real pre/post hook pair, and the guard around it.

    Once it is ended (unhooked) it still repeats, in backward, the forwards that ran under it, and goes with the last of
    their documents. Where some of these cannot be followed (`Kept.IN_RING`) it stays, until the next such hooking of
    the module ends, and stands for it too.
    """

    is_copy = False  # came with a module that was copied: does nothing

    def __init__(
        self,
        module: nn.Module,
        record: ModuleRecord,
        attachment: int | None,
        window_size: tuple[int, int] | None,
        audit: Audit | None = None,
    ) -> None:
        self.audit = audit
        self._module = weakref.ref(module)
        self.record = record
        self.attachment = attachment
        self._attachments = set() if attachment is None else {attachment}  # of those too that it stands for
        self.window_size = window_size
        self._warned: set[str] = set()
        self.lingering = Lingering()
        self._latest: weakref.ref[ArmedDocuments] | None = None
        self._handles = (
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, always_call=True),
        )
        self.hook_ids = tuple(handle.id for handle in self._handles)
        guard.add_around(module, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionHook:
        copied = AttentionHook.__new__(AttentionHook)
        copied.is_copy = True
        return copied

    def unhook(self) -> None:
        self.lingering.end(self._remove)
        module = self._module()
        if module is None or not self.lingering.stays:
            return
        for hook in hooks_of(module):
            if hook is not self and hook.lingering.has_ended and hook.lingering.stays:
                self.lingering.take_over(hook.lingering)
                self._attachments |= hook._attachments
                hook._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        module = self._module()
        if module is not None:
            guard.remove_around(module, self)

    def _is_off(self) -> bool:
        """Does nothing here: a copy's, or an ended one but for recomputes of forwards that ran under it."""
        if self.is_copy:
            return True
        if not self.lingering.has_ended or (_torch_private.in_backward() and not self.lingering.ran_outside()):
            return False
        self.lingering.leaves_alone()
        return True

    @property
    def hooked_at(self) -> tuple[int, int]:
        """Since when the module is hooked."""
        return min(hook.lingering.first for hook in self._hooks_of_module()).began

    @property
    def attachments(self) -> tuple[int, ...]:
        """Whose scopes count, newest first: those of every hooking of this module."""
        return tuple(sorted(set().union(*(hook._attachments for hook in self._hooks_of_module())), reverse=True))

    def _hooks_of_module(self) -> tuple[AttentionHook, ...]:
        module = self._module()
        return (module is not None and hooks_of(module)) or (self,)

    def is_causal(self) -> bool:
        return getattr(self._module(), "is_causal", None) is not False

    def window(self) -> tuple[int, int]:
        if self.window_size is not None:
            return self.window_size
        return hf.window_of_width(getattr(self._module(), "sliding_window", None))

    def documents(self) -> ArmedDocuments | None:
        """Those of the call that runs now; see `documents_of_call`."""
        hooks = self._hooks_of_module()
        if len(hooks) > 1 and _torch_private.in_backward() and all(hook.lingering.ran_outside() for hook in hooks):
            raise RuntimeError(
                f"packed_sdpa: a forward of {self.record.name} that ran between two attachments of its model is "
                "recomputed in backward while it is attached; detach, or attach only after that backward"
            )
        documents = documents_of_call(self.attachments, self.hooked_at)
        if documents is None and self.lingering.has_ended and self.attachment is not None:
            raise RuntimeError(
                f"packed_sdpa: {self.record.name} is recomputed in backward after the model was detached, and it "
                "cannot be told whether its forward had documents (the whole forward is recomputed, or it ran "
                "unpacked); detach after backward, and let go of what still holds a packed forward's graph (its loss, "
                "outputs in a list)"
            )
        return documents

    def may_repeat(self, documents: ArmedDocuments, kept: Kept) -> None:
        """A backward may ask for a call under these documents once more, if anything keeps them."""
        if kept is Kept.NOT:
            return
        if kept is Kept.IN_RING:
            self.lingering.cannot_follow()
        if self._latest is None or self._latest() is not documents:
            self._latest = weakref.ref(documents)
            self.lingering.add(documents)

    def passed_while_armed(self, reason: str, sizes: str) -> None:
        """Warns, once a reason. Attached models have their own way to tell."""
        if self.attachment is None:
            self._warn_once(
                f"made an attention call that was passed through to stock while documents are armed: {reason}", sizes
            )

    def _warn_once(self, cause: str, details: str = "") -> None:
        if cause in self._warned:
            return
        self._warned.add(cause)
        warnings.warn(f"packed_sdpa: {self.record.name} {cause}{details and f' ({details})'}", stacklevel=5)

    # The hook pair. _after runs for every Exception; for the others the guard below does.

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # a module that was compiled before it was hooked
            return _untraced(self._before, module, args)
        if not self._is_off():
            interception.enter(self)
        return None

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return _untraced(self._after, module, args, output)
        if self.is_copy:
            return None
        frame = interception.current_frame()
        if frame is None or frame.hook is not self:
            return None
        interception.leave(interception.height() - 1)
        if frame.calls == 0 and self.attachment is None and _PACKED_STATE.get() is not None:
            self._warn_once(
                "ran without calling scaled_dot_product_attention while documents are armed, so its attention was not "
                "packed; make it use SDPA (attn_implementation='sdpa', need_weights=False)"
            )
        return None

    # The guard.

    def around_call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _untraced(self.around_call, call, args, kwargs)
        height = interception.height()
        try:
            try:
                return call(*args, **kwargs)
            finally:
                interception.leave(height)
        finally:
            interception.leave(height)  # once more, should an interrupt have cut the first one short

    def around_forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _untraced(self.around_forward, call, args, kwargs)
        if self._is_off():
            return call(*args, **kwargs)
        frame = interception.current_frame()
        if frame is not None and frame.hook is self and not frame.in_forward:
            frame.in_forward = True
            return call(*args, **kwargs)
        height = interception.height()
        try:
            try:
                interception.enter(self).in_forward = True
                return call(*args, **kwargs)
            finally:
                interception.leave(height)
        finally:
            interception.leave(height)


@_torch_private.untraced(BREAKS_AT_ATTENTION)
def _untraced(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def hooks_of(module: nn.Module) -> tuple[AttentionHook, ...]:
    return tuple(around for around in guard.arounds_of(module) if isinstance(around, AttentionHook))


def hook_attention(
    module: nn.Module,
    record: ModuleRecord,
    *,
    attachment: int | None = None,
    window_size: tuple[int, int] | None = None,
    audit: Audit | None = None,
) -> Callable[[], None]:
    """Hooks one attention module; see the top of this file."""
    return AttentionHook(module, record, attachment, window_size, audit).unhook


def in_forward_scope(attachment: int) -> bool:
    return ops.in_scope(attachment)


class forward_scope:  # noqa: N801 - used as a function, as torch.no_grad is
    """Context manager for one outer forward of an attached model; see the top of this file."""

    @_torch_private.untraced(NOTES_FORWARDS)
    def __init__(self, documents: ArmedDocuments | None, attachment: int) -> None:
        self._documents = documents
        self._attachment = attachment
        self._mark = ops.scope_mark()

    @_torch_private.untraced(NOTES_FORWARDS)
    def __enter__(self) -> ArmedDocuments | None:
        self._mark = ops.scope_mark()
        ops.enter_scope(self._attachment, 0 if self._documents is None else self._documents.id)
        return self._documents

    @_torch_private.untraced(NOTES_FORWARDS)
    def __exit__(self, *exception: object) -> None:
        ops.leave_scope(self._mark)


def run_scoped(
    documents: ArmedDocuments | None,
    attachment: int,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``call(*args, **kwargs)`` in a forward scope, whose output's graph keeps the documents."""
    scope = forward_scope(documents, attachment)
    try:
        try:
            scope.__enter__()
            output = call(*args, **kwargs)
        finally:
            scope.__exit__()
    finally:
        scope.__exit__()  # once more, should an interrupt have cut the first one short
    keep_documents(output, documents)
    return output


def modules_ending_with(model: nn.Module, suffix: str) -> dict[str, nn.Module]:
    """Modules by qualified name (wrappers' own names left out, the innermost module of each counts)."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        clean = ".".join(part for part in name.split(".") if part not in _torch_private.MODULE_WRAPPERS)
        if clean.endswith(suffix):
            found[clean] = module  # parents come first, so the innermost stays
    return found


def hook_self_attention(model: nn.Module) -> int:
    """Hooks every module whose name ends with ``self_attn``, once; returns how many there are. Warns without one."""
    modules = modules_ending_with(model, "self_attn")
    guard.refuse_scripted(modules.values())
    for name, module in modules.items():
        if not any(hook.attachment is None for hook in hooks_of(module)):
            hook_attention(module, ModuleRecord(name))
    if not modules:
        kinds = sorted(
            {type(module).__name__ for module in model.modules() if "attention" in type(module).__name__.lower()}
        )
        seen = f"; its attention-like modules are of class {', '.join(kinds)}" if kinds else ""
        warnings.warn(
            f"packed_sdpa: no module of {type(model).__name__} has a name that ends with 'self_attn'{seen}, so nothing "
            "was hooked; use packed_sdpa.attach(model, match=...) to name them",
            stacklevel=3,
        )
    return len(modules)
