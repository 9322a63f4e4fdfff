"""Documents armed by hand."""

from __future__ import annotations

import threading

from torch import Tensor

from packed_sdpa.documents import Documents, from_doc_ids

_LOCK = threading.Lock()
_ARMED: list[Documents] = []


def arm(doc_ids: Tensor) -> None:
    """Arms documents for every attached forward until :func:`disarm`.

    doc_ids: integer or bool ``[B, S]`` or ``[S]``, any device, copied; 0 is padding. A forward whose tokens have
    another shape is passed through, counted with its reason and warned about.

    Raises ValueError (shape, negative ids) or TypeError (float ids), and then arms nothing.
    """
    documents = from_doc_ids(doc_ids, "the doc_ids given to arm()")
    with _LOCK:
        _ARMED[:] = [documents]


def disarm() -> None:
    """Ends what :func:`arm` began; harmless when nothing is armed."""
    with _LOCK:
        _ARMED.clear()


def armed_documents() -> Documents | None:
    with _LOCK:
        return _ARMED[0] if _ARMED else None
