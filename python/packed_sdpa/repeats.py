"""What a recompute is to find as its forward did, though the model was detached, or attached anew, between them.

What a checkpoint keeps of a forward are the forward's arguments. Whether the model was attached then, and to which
documents, is no argument. So what was ended lingers on its module for recomputes (`Lingering`), and which outer
forwards ran in the region of a reentrant checkpoint is noted on its node, and read when it recomputes (`ForwardNote`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from packed_sdpa import _torch_private
from packed_sdpa._library import ops
from packed_sdpa.armed import ArmedDocuments, asked_by_a_marked_function, mark_running_functions

_NOTES_KEY = "packed_sdpa_forwards"
_REPEATS_KEY = "packed_sdpa_repeats"
_NOT, _MAYBE, _YES = range(3)  # whether a node precedes its region

_MAX_PAST = 64  # attachments of a module that are remembered when they are gone

_order = itertools.count()
_recompute = torch.classes.packed_sdpa.Recompute()


class _Span(NamedTuple):
    """From its beginning to its end; places are thread and autograd sequence number."""

    order: int
    began: tuple[int, int]
    ended: tuple[int, int] | None


# When the attachments of a module were on it that are off it now, the latest last.
_past: weakref.WeakKeyDictionary[nn.Module, list[_Span]] = weakref.WeakKeyDictionary()


def _merged(spans: Iterable[_Span]) -> list[_Span]:
    """In their order; one where nothing ran between two."""
    merged: list[_Span] = []
    for span in sorted({span.order: span for span in spans}.values()):  # one may have been taken over more than once
        if merged and merged[-1].ended == span.began:
            merged[-1] = merged[-1]._replace(ended=span.ended)
        else:
            merged.append(span)
    return merged


class Lingering:
    """Since when, and until when, something is on a module; and, once it is ended, how long it stays there for
    backwards, which may recompute a forward that ran under it: until all are gone that may ask for one (`add`), or for
    good, where one cannot be followed (`cannot_follow`)."""

    def __init__(self) -> None:
        self.has_ended = False
        self.stays = False
        self._began_in_backward = bool(_recompute.nodes(False))
        self._spans = [_Span(next(_order), _recompute.place(), None)]
        self._askers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._unmarked_at: tuple[int, int] | None = None
        self._remove: Callable[[], None] | None = None

    @property
    def first(self) -> _Span:
        return self._spans[0]

    def add(self, asker: Any) -> None:
        """A forward under it may be recomputed as long as ``asker`` lives."""
        if asker not in self._askers:
            self._askers.add(asker)
            self._watch(asker)

    def cannot_follow(self) -> None:
        """A forward under it may be recomputed, and nothing tells until when."""
        self.stays = True

    def may_ask(self, asker: Any) -> bool:
        return asker in self._askers

    def end(self, remove: Callable[[], None]) -> None:
        """``remove`` takes it off the module, now or when nothing may ask for it any more."""
        if self.has_ended:
            return
        self.has_ended = True
        self._remove = remove
        self._spans[-1] = self._spans[-1]._replace(ended=_recompute.place())
        for asker in list(self._askers):
            self._watch(asker)
        self._remove_if_unused()

    def take_over(self, earlier: Lingering) -> None:
        """Stands for an ended one too, which its owner then takes off the module: so they do not pile up."""
        self._spans = _merged((*earlier._spans, *self._spans))
        for asker in list(earlier._askers):
            self.add(asker)
        self.stays |= earlier.stays

    def is_off(self, module: nn.Module) -> None:
        """It was taken off the module; until when it was on it is remembered: `ran_outside_all`."""
        _past[module] = _merged((*_past.get(module, ()), *self._spans))[-_MAX_PAST:]

    def _watch(self, asker: Any) -> None:
        if self.has_ended and not self.stays:
            weakref.finalize(asker, self._remove_if_unused).atexit = False

    def _remove_if_unused(self) -> None:
        if self._remove is not None and not self.stays and not list(self._askers):  # its length counts some gone ones
            self._remove()
            self._remove = None

    # ---- ended

    def leaves_alone(self) -> None:
        """A forward that it has nothing to do with begins. Says so where a recompute of it will look: `ran_outside`."""
        if not torch.is_grad_enabled() and not mark_running_functions():
            self._unmarked_at = _recompute.place()

    def ran_outside(self) -> bool:
        """In a backward: the forward that is recomputed ran before it began, or after it ended. What began in a
        backward was begun by a region that is recomputed, whose node came before it."""
        return self._is_outside(self._spans, self._is_of_its_region)

    def ran_outside_all(self, module: nn.Module) -> bool:
        """The same, and under none that is off the module now. A function that ran it under any would be marked."""
        return self._is_outside(
            [*_past.get(module, ()), *self._spans],
            lambda thread, sequence, precedes: precedes != _NOT or _torch_private.in_recomputation_hook(),
        )

    def _is_outside(self, spans: list[_Span], is_of_its_region: Callable[[int, int, int], bool]) -> bool:
        if self._began_in_backward:
            return False
        nodes = _recompute.nodes(asked_by_a_marked_function())
        answers = set()
        for at in range(0, len(nodes), 3):
            thread, sequence, precedes = nodes[at : at + 3]
            ends_count = is_of_its_region(thread, sequence, precedes)
            answers.add(
                all(
                    (thread == span.began[0] and sequence < span.began[1])
                    or (ends_count and span.ended is not None and thread == span.ended[0] and sequence >= span.ended[1])
                    for span in spans
                )
            )
        if len(answers) == 2:
            raise RuntimeError(
                "packed_sdpa: cannot tell whether a forward that is recomputed in backward ran before or after the "
                "model was detached; detach after backward"
            )
        return answers == {True}

    def _is_of_its_region(self, thread: int, sequence: int, precedes: int) -> bool:
        """The node was not made behind its region, by when that had ended under which its forward ran: it is marked, or
        an unmarked region was seen behind it, or it is one of torch's own checkpoint, whose nodes are all within."""
        if precedes == _MAYBE:
            return self._unmarked_at is not None and self._unmarked_at[0] == thread and sequence < self._unmarked_at[1]
        return precedes == _YES or _torch_private.in_recomputation_hook()


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


class _Repeat:
    """One recompute of the forwards that are noted on a node. They come in their order, and some may be left out."""

    def __init__(self, graph_task: int) -> None:
        self.graph_task = graph_task
        self._at = 0  # the note that comes next
        self._is_complete = True

    def takes(self, notes: list[ForwardNote], module: nn.Module, documents: ArmedDocuments | None) -> bool:
        """Whether an outer forward of the module may be the next of them."""
        mine = [index for index, note in enumerate(notes) if note.is_of(module)]
        if not mine:
            return True
        if mine[-1] < self._at and self._is_complete:  # the region is run once more
            self._at = 0
        for index in mine:
            if index >= self._at:
                if notes[index].ran_under(documents):
                    self._at = index + 1
                    return True
                self._is_complete = False
        return False


def check_repeat(module: nn.Module, documents: ArmedDocuments | None) -> None:
    """RuntimeError when an outer forward within a backward is given other documents than the one that it repeats."""
    metadata = _torch_private.metadata_of_current_function()
    if metadata is None or _NOTES_KEY not in metadata:
        return
    graph_task = _torch_private.current_graph_task()
    repeat = metadata.get(_REPEATS_KEY)
    if repeat is None or repeat.graph_task != graph_task:
        repeat = metadata[_REPEATS_KEY] = _Repeat(graph_task)
    if not repeat.takes(metadata[_NOTES_KEY], module, documents):
        _recompute.refuse_other_documents()
