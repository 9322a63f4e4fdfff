"""Which outer forwards ran in the region of a reentrant checkpoint: noted on its node, and read when it recomputes.

What a checkpoint keeps of a forward are the forward's arguments. Whether the model was attached then, and to which
documents, is no argument; so a model that was detached, or attached anew, before the recompute would run otherwise.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from packed_sdpa import _torch_private
from packed_sdpa._library import ops
from packed_sdpa.armed import ArmedDocuments

_NOTES_KEY = "packed_sdpa_forwards"

OTHER_DOCUMENTS = (
    "packed_sdpa: a forward that is recomputed found other documents than it ran under; was its doc_ids buffer "
    "overwritten, its handle switched on or off, or its model attached anew? Leave the model as it is until backward "
    "has run"
)


class ForwardNote:
    """One outer forward. ``documents`` None: it ran unpacked."""

    __slots__ = ("__weakref__", "_module", "documents")

    def __init__(self, module: nn.Module, documents: ArmedDocuments | None) -> None:
        self._module = weakref.ref(module)
        self.documents = documents

    def is_of(self, module: nn.Module) -> bool:
        """Of this module, or one that it is a part of, or one that is a part of it."""
        noted = self._module()
        if noted is None:
            return False
        return noted is module or any(
            part is inner for part, whole in ((noted, module), (module, noted)) for inner in whole.modules()
        )

    def ran_under(self, documents: ArmedDocuments | None) -> bool:
        mine, other = (0 if value is None else value.id for value in (self.documents, documents))
        return ops.same_documents(mine, other)


def note_forward(module: nn.Module, documents: ArmedDocuments | None) -> tuple[ForwardNote | None, bool]:
    """Notes an outer forward on every torch.autograd.Function in whose forward it begins.

    Returns the note, None when it begins in none, and whether all of them can be noted on.
    """
    note, everywhere = None, True
    for metadata in _torch_private.metadata_of_running_functions():
        note = note or ForwardNote(module, documents)
        if metadata is None:
            everywhere = False
        else:
            metadata.setdefault(_NOTES_KEY, []).append(note)
    return note, everywhere


def notes_for(module: nn.Module) -> list[ForwardNote]:
    """In a recompute that a torch.autograd.Function asks for: the forwards of this module that ran in its own."""
    metadata: dict[str, Any] | None = _torch_private.metadata_of_current_function()
    return [] if metadata is None else [note for note in metadata.get(_NOTES_KEY, ()) if note.is_of(module)]


def check_repeat(module: nn.Module, documents: ArmedDocuments | None) -> None:
    """RuntimeError when an outer forward within a backward is given other documents than the one that it repeats."""
    notes = notes_for(module)
    if notes and not any(note.ran_under(documents) for note in notes):
        raise RuntimeError(OTHER_DOCUMENTS)
