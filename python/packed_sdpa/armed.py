"""Documents that are in force for attention calls which do not name them, and how a call finds its own."""

from __future__ import annotations

import contextvars
import enum
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from packed_sdpa import _torch_private
from packed_sdpa._library import ops
from packed_sdpa.layout import LayoutTensors, PackedLayout
from packed_sdpa.records import Choice

_METADATA_KEY = "packed_sdpa_documents"
UNSUPPORTED_TRANSFORM = (
    "which packed attention does not support; use loss.backward() or torch.autograd.grad, or run it unpacked under the "
    "transform (disarm, detach, or handle.enabled = False)"
)
UNSUPPORTED_TRACER = (
    "whose graph would keep these documents for every later batch; trace the model unpacked (disarm, detach), or give "
    "packed_attention(..., layout) its layout as an argument"
)
UNSUPPORTED_JIT_TRACE = (
    "which cannot call the operators that find documents; trace copy.deepcopy(model), which comes out without hooks"
)
_resolve = ops.resolve_documents.default
# Number of the documents that this context (an asyncio task, a greenlet) armed last, 0: it disarmed; None: neither.
ARMED_IN_CONTEXT: contextvars.ContextVar[int | None] = contextvars.ContextVar("packed_sdpa_armed", default=None)
NEVER_HOOKED = (0, 0)  # `documents_of_call` then asks nothing about when the module was hooked


class ArmedDocuments:
    """A copy of doc_ids with the layout that was built from it, once, and the wished-for backend.

    doc_ids: integer or bool ``[B, S]`` or ``[S]``, any device; 0 is padding. backend: as in
    :func:`packed_sdpa.packed_attention`. Raises ValueError or TypeError before anything changes.
    """

    __slots__ = ("__weakref__", "_core", "backend", "batch", "choices", "doc_ids", "id", "layout", "rows")

    def __init__(self, doc_ids: Tensor, backend: str = "auto") -> None:
        if not isinstance(doc_ids, Tensor):
            raise TypeError(
                f"doc_ids must be an integer tensor [B, S] or [S], got {type(doc_ids).__name__}; "
                "convert it with torch.as_tensor(doc_ids)"
            )
        self._fill(torch.classes.packed_sdpa.ArmedDocuments(doc_ids, backend))

    def _fill(self, core: Any) -> None:
        self._core = core
        self.id: int = core.id()
        self.doc_ids: Tensor = core.doc_ids()  # int64 [B, S], host
        self.batch, self.rows = self.doc_ids.shape
        copies = tuple(LayoutTensors(*tensors) for tensors in core.layouts_on_devices())
        self.layout = PackedLayout(LayoutTensors(*core.layout()), self.batch, self.rows, self.rows, copies)
        self.backend: str = core.backend()
        self.choices: dict[tuple[object, ...], Choice] = {}  # which backend took a call of that kind
        _alive[self.id] = self

    def __iter__(self) -> Iterator[object]:
        return iter((self.doc_ids, self.backend))

    def __repr__(self) -> str:
        return f"ArmedDocuments({self.batch} x {self.rows}, {self.layout.num_documents} documents, {self.backend})"


_alive: weakref.WeakValueDictionary[int, ArmedDocuments] = weakref.WeakValueDictionary()


def documents_with(number: int) -> ArmedDocuments | None:
    """None when they are not alive any more."""
    documents = _alive.get(number)
    if documents is None:
        core = ops.find_documents(number)
        if core is not None:
            documents = ArmedDocuments.__new__(ArmedDocuments)
            documents._fill(core)
    return documents


def documents_of_call(attachments: tuple[int, ...], hooked_at: tuple[int, int]) -> ArmedDocuments | None:
    """The documents of an attention call, here and now; None: unarmed.

    attachments: whose forward scopes count, newest first. hooked_at: thread and autograd sequence number at which the
    module was hooked. In a recompute they are those of the forward that is repeated; RuntimeError when that cannot be
    told, or when a tracer would keep them.
    """
    if _torch_private.in_recomputation_hook() and not _torch_private.in_backward():
        raise RuntimeError(
            "packed_sdpa: a checkpointed region is recomputed outside of a backward (a saved tensor was read), so the "
            "documents of its forward cannot be told; read it before, or leave that region out of the checkpoint"
        )
    tracer = _torch_private.tracer()
    if tracer == _torch_private.JIT_TRACE:
        raise RuntimeError(
            f"packed_sdpa: a hooked model or _packed_varlen_sdpa is run by {tracer}, {UNSUPPORTED_JIT_TRACE}"
        )
    documents = None
    while documents is None:
        number = _resolve(attachments, *hooked_at, _torch_private.in_backward() and asked_by_a_marked_function())
        mine = ARMED_IN_CONTEXT.get()
        if mine is not None and mine != number:
            _check_context(attachments)
        if number == 0:
            if not torch.is_grad_enabled():
                mark_running_functions()
            return None
        documents = documents_with(number)  # None: another thread has armed others since
    if tracer is not None:
        raise RuntimeError(
            f"packed_sdpa: scaled_dot_product_attention was called with armed documents in {tracer}, "
            f"{UNSUPPORTED_TRACER}"
        )
    if _torch_private.in_func_transform():
        raise NotImplementedError(
            "packed_sdpa: scaled_dot_product_attention was called with armed documents within a torch.func transform "
            f"(vmap, grad, jvp, ...), {UNSUPPORTED_TRANSFORM}"
        )
    return documents


def _check_context(attachments: tuple[int, ...]) -> None:
    """Raises when what is armed is used, and it is not what this context armed last."""
    if not _torch_private.in_backward() and not any(ops.in_scope(number) for number in attachments):
        raise RuntimeError(
            "packed_sdpa: since this asyncio task (or greenlet, or context) armed or disarmed its documents, another "
            "one has armed or disarmed others; arm right before the forward, with no await or switch between them, or "
            "give an attached model its documents as arguments"
        )


@_torch_private.untraced("packed_sdpa ties documents to the graph of a forward")
def keep_documents(output: object, documents: ArmedDocuments | None) -> None:
    """The autograd graph of ``output`` (a tensor, or containers of tensors) keeps ``documents`` as long as it lives."""
    if documents is None:
        return
    if isinstance(output, Tensor):
        metadata = _torch_private.node_metadata(output)
        if metadata is not None:
            _add(metadata, documents)
    elif isinstance(output, dict):
        for entry in output.values():
            keep_documents(entry, documents)
    elif isinstance(output, (list, tuple)):
        for entry in output:
            keep_documents(entry, documents)


class Kept(enum.Enum):
    """What keeps documents for a recompute."""

    NOT = enum.auto()  # nothing can ask for one
    BY_NODES = enum.auto()  # all autograd nodes that may ask for one
    IN_RING = enum.auto()  # for some the last 16 are all there is


def keep_for_recompute(output: Tensor, documents: ArmedDocuments) -> Kept:
    """As :func:`keep_documents` for an attention call's output.

    Without a graph of its own it may be in the region of a reentrant checkpoint (any torch.autograd.Function that runs
    it in its forward), whose node then keeps the documents. An evaluation without gradients keeps nothing.
    """
    if output.requires_grad:
        keep_documents(output, documents)
        return Kept.BY_NODES
    return Kept.NOT if torch.is_grad_enabled() else keep_for_functions(documents)


def keep_for_functions(documents: ArmedDocuments) -> Kept:
    """The node of every torch.autograd.Function whose forward runs here keeps ``documents``."""
    kept = Kept.NOT
    for metadata in _torch_private.metadata_of_running_functions():
        if metadata is None:
            ops.keep_documents(documents.id)
            kept = Kept.IN_RING
        else:
            _add(metadata, documents)
            kept = Kept.BY_NODES if kept is Kept.NOT else kept
    return kept


def _add(metadata: dict[str, Any], documents: ArmedDocuments) -> None:
    _mark(metadata)[documents.id] = documents


def _mark(metadata: dict[str, Any]) -> dict[int, ArmedDocuments]:
    """The key says that attention looked for its documents under this node, with or without finding any."""
    return metadata.setdefault(_METADATA_KEY, {})


def mark_running_functions() -> bool:
    """Marks the node of each torch.autograd.Function whose forward runs here; False where one cannot be marked."""
    everywhere = True
    for metadata in _torch_private.metadata_of_running_functions():
        if metadata is None:
            everywhere = False
        else:
            _mark(metadata)
    return everywhere


def asked_by_a_marked_function() -> bool:
    """So it was made before the region that it recomputes."""
    metadata = _torch_private.metadata_of_current_function()
    return metadata is not None and _METADATA_KEY in metadata
