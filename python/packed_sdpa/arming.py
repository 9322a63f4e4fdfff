"""Documents armed by hand: the same state that the seed API arms."""

from __future__ import annotations

from torch import Tensor

from packed_sdpa.armed import UNSUPPORTED_TRACER, ArmedDocuments
from packed_sdpa.documents import Documents
from packed_sdpa.state import _PACKED_STATE

ARMED_BY_HAND = "the armed doc_ids"  # where documents come from, in messages


def arm(doc_ids: Tensor) -> None:
    """Arms documents for every attached or hooked forward until :func:`disarm`.

    doc_ids: integer or bool ``[B, S]`` or ``[S]``, any device, copied; 0 is padding. A forward whose tokens have
    another shape is passed through, counted with its reason and warned about. Other threads see it too, unless they
    armed something themselves.

    Raises ValueError (shape, negative ids) or TypeError (float ids), and then arms nothing.
    """
    _PACKED_STATE.set(ArmedDocuments(doc_ids))


def disarm() -> None:
    """Ends what :func:`arm` began; harmless when nothing is armed."""
    _PACKED_STATE.set(None)


def refuse_documents_in_tracer(what: str, told: list[str], tracer: str) -> None:
    """RuntimeError when a graph is recorded and something tells documents (``told``: its names), or some are armed."""
    if documents_armed_by_hand() is not None:
        told = [*told, ARMED_BY_HAND]
    if told:
        raise RuntimeError(
            f"packed_sdpa: {what} may have documents ({', '.join(told)}) in {tracer}, {UNSUPPORTED_TRACER}"
        )


def documents_armed_by_hand() -> Documents | None:
    armed = _PACKED_STATE.get()
    return Documents(armed, ARMED_BY_HAND) if isinstance(armed, ArmedDocuments) else None
