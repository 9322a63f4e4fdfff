"""The outer forward that runs now on this thread: its documents, and the ledger in which its layers are counted."""

from __future__ import annotations

import threading
import weakref

from torch import Tensor, nn

from packed_sdpa import _torch_private
from packed_sdpa.documents import Documents
from packed_sdpa.interception import check_greenlet, current_greenlet
from packed_sdpa.mask_audit import DenseMaskAudit
from packed_sdpa.records import ModuleRecord

NOTES_FORWARDS = "packed_sdpa notes which forward runs"


class Ledger:
    """The records of one attachment's attention modules, and the causes it has already warned about."""

    def __init__(self) -> None:
        self.records: weakref.WeakKeyDictionary[nn.Module, ModuleRecord] = weakref.WeakKeyDictionary()
        self.warned: set[str] = set()
        self.mask_audit: DenseMaskAudit | None = None
        self.layouts_built = 0
        self.packed: set[ForwardScope] = set()  # running forwards with documents, of all threads

    def taken(self) -> int:
        """Calls of all modules together."""
        return sum(record.taken for record in list(self.records.values()))

    def record(self, module: nn.Module) -> ModuleRecord:
        found = self.records.get(module)
        if found is None:
            found = self.records[module] = ModuleRecord(f"({type(module).__name__}, not seen by attach)")
        return found


class ForwardScope:
    """One outer forward. ``documents`` None: it runs unpacked."""

    __slots__ = (
        "dense_mask",
        "documents",
        "gave_masks",
        "greenlet",
        "inside",
        "ledger",
        "on_mask",
        "ran",
        "seen",
        "sees_encoder",
        "taken_before",
    )

    def __init__(
        self, ledger: Ledger, documents: Documents | None, seen: frozenset[str], on_mask: str, dense_mask: Tensor | None
    ) -> None:
        self.ledger = ledger
        self.documents = documents
        self.seen = seen  # names of the arguments in which documents were looked for
        self.on_mask = on_mask
        self.dense_mask = dense_mask  # the caller's own 4-D mask, audited where the layer's rule is known
        self.sees_encoder = False  # its tokens see, whole, what an encoder made (cross-attention)
        self.greenlet = current_greenlet()
        self.inside: list[tuple[nn.Module, str]] = []  # modules whose call or forward runs
        self.gave_masks = False  # that carry the documents, to layers of the interface
        self.taken_before = ledger.taken() if documents is not None else 0
        self.ran: dict[nn.Module, tuple[int, int]] = {}  # attention modules that ran -> (taken, calls) before they did


class _Stack(threading.local):
    def __init__(self) -> None:
        self.scopes: list[ForwardScope] = []


_STACK = _Stack()


def current_scope() -> ForwardScope | None:
    """The innermost outer forward of this thread, or None outside any."""
    return _STACK.scopes[-1] if _STACK.scopes else None


def scope_of(ledger: Ledger) -> ForwardScope | None:
    """The running outer forward of one attachment, or None."""
    return next((scope for scope in reversed(_STACK.scopes) if scope.ledger is ledger), None)


def is_within_itself(ledger: Ledger, module: nn.Module, way: str) -> bool:
    """A call or forward of the module that begins now is within another one of it, in this thread."""
    ways = [way for scope in _STACK.scopes if scope.ledger is ledger for inner, way in scope.inside if inner is module]
    calls, forwards = ways.count("__call__"), ways.count("forward")
    if way == "__call__":
        return calls + forwards > 0
    return forwards > 0 and forwards >= calls  # else it is the forward of the call that began last


@_torch_private.untraced(NOTES_FORWARDS)
def leave_module(ledger: Ledger) -> None:
    """Ends the call or forward of a module that began last in the running outer forward."""
    scope = scope_of(ledger)
    if scope is not None and scope.inside:
        scope.inside.pop()


@_torch_private.untraced(NOTES_FORWARDS)
def push_scope(scope: ForwardScope) -> None:
    if _STACK.scopes:
        check_greenlet(_STACK.scopes[-1].greenlet)
    _STACK.scopes.append(scope)


@_torch_private.untraced(NOTES_FORWARDS)
def pop_scope(scope: ForwardScope) -> None:
    """Ends a scope, and any above it; harmless when an interrupt came before it was pushed."""
    scopes = _STACK.scopes
    if scope in scopes:
        del scopes[scopes.index(scope) :]
