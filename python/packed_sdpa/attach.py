"""``attach``: packed attention for a whole model, with the documents found in each forward's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from packed_sdpa.attachment import Attachment, attachment_of
from packed_sdpa.mask_audit import ON_MASK
from packed_sdpa.match import Match, matcher, parts_of
from packed_sdpa.model_survey import few, survey
from packed_sdpa.scope import scope_of

ROUTES = ("auto", "interface", "hooks")


class Handle:
    """What :func:`attach` returns; also a context manager that detaches at its end.

    ``enabled = False`` lets the model run as if it were not attached, for an A/B; ``True`` goes on.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment: Attachment | None = attachment
        attachment.handles += 1

    def _attached(self) -> Attachment:
        if self._attachment is None:
            raise RuntimeError("packed_sdpa: this handle is detached; attach the model again")
        return self._attachment

    @property
    def attached(self) -> bool:
        return self._attachment is not None

    @property
    def route(self) -> str:
        """``interface``, ``hooks``, or ``interface+hooks``."""
        return self._attached().route

    @property
    def enabled(self) -> bool:
        return self._attachment is not None and self._attachment.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"enabled must be True or False, got {value!r}")
        self._attached().enabled = value

    def detach(self) -> None:
        """Leaves the model as attach found it (with the last handle on it). A second detach does nothing.

        Raises RuntimeError inside a forward of the model, which must end as it began.
        """
        if self._attachment is not None and scope_of(self._attachment.ledger) is not None:
            raise RuntimeError(
                "detach() was called while a forward of this model runs; call it when the forward is over, or set "
                "handle.enabled = False, which the next forward follows"
            )
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.handles -= 1
            if attachment.handles == 0:
                attachment.undo()
                attachment.mask_audit.finish()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        if self._attachment is None:
            return "packed_sdpa handle (detached)"
        records = self._attachment.ledger.records
        return f"packed_sdpa handle ({self.route}, {len(records)} attention modules, enabled={self.enabled})"


def attach(
    model: nn.Module,
    *,
    route: str = "auto",
    documents: Any = "auto",
    match: Match | None = None,
    strict: bool = False,
    on_mask: str = "error",
) -> Handle:
    """Makes every forward of ``model`` packed attention over the documents found in its arguments.

    model: any ``nn.Module``; PEFT, DDP, FSDP and ``torch.compile`` wrappers are looked through.
    route: ``interface`` (Transformers' attention interface: no S x S mask is built, key and value heads are not
        repeated), ``hooks`` (models that call ``scaled_dot_product_attention``), ``auto`` (the interface where there is
        one).
    documents: ``"auto"`` looks, in this order, at the keywords ``doc_ids``, ``_packed_seq_ids``, ``seq_idx``,
        ``cu_seq_lens_q``, an indexed ``attention_mask`` (2-D, max > 1) and ``position_ids`` that restart (are not one
        further than the token before); offsets and positions, which cannot say that a document comes back, tell only
        what the others, and ids armed by hand, leave open. Zeros of a 2-D ``attention_mask`` are padding. A callable
        gets the forward's arguments and returns doc_ids ``[B, S]``, a PackedLayout, or None (unpacked). None: only
        what :func:`packed_sdpa.arm` was given. A forward without documents runs as if the model were not attached.
    match: which modules are attention, for models whose names the hooks route does not know: a suffix of the qualified
        name, a glob, a list of them, or a function of name and module.
    strict: raise :class:`NotTakenError`, instead of a warning, when an attention module ran in a packed forward without
        packed attention.
    on_mask: what happens when the model's mask forbids or allows something inside a document that the packed rule does
        not: ``error``, ``warn`` or ``ignore``.

    Returns a :class:`Handle`; a second attach with the same options returns one more handle on the same attachment.

    Raises ValueError or TypeError for an argument that cannot be honoured, and for a model without attention modules;
    the model is then unchanged.
    """
    _check_arguments(model, route, documents, match, strict, on_mask)
    there = attachment_of(model)
    if there is not None:
        return _attach_again(model, there, route, documents, match, strict, on_mask)
    found = survey(model, route, matcher(match))
    attachment = Attachment(model, found, documents, strict, on_mask, route, match)
    attachment.apply()
    for name, kind in found.of_another_kind.items():
        warnings.warn(
            f"packed_sdpa: {name} asks for {kind!r} attention by a config of its own; it is switched to packed "
            "attention like the others",
            UserWarning,
            stacklevel=2,
        )
    if found.leaking:
        warnings.warn(
            f"packed_sdpa: {few(found.leaking)}: state-space, convolution or linear-attention layers mix tokens "
            "without attention, so documents leak into each other there",
            UserWarning,
            stacklevel=2,
        )
    return Handle(attachment)


def _attach_again(
    model: nn.Module, there: Attachment, route: str, documents: Any, match: Match | None, strict: bool, on_mask: str
) -> Handle:
    if there.model() is not model:
        raise ValueError(
            f"model: a part of this {type(model).__name__} (or the model around it) is attached already; detach that "
            "handle first"
        )
    same_route = route in (there.asked_route, there.route)
    for name, value, before, same in (
        ("route", route, there.asked_route, same_route),
        ("documents", documents, there.documents, documents == there.documents),
        ("match", match, there.match, parts_of(match) == parts_of(there.match)),
        ("strict", strict, there.strict, strict == there.strict),
        ("on_mask", on_mask, there.on_mask, on_mask == there.on_mask),
    ):
        if not same:
            raise ValueError(
                f"{name}={value!r}: the model is attached already with {name}={before!r}; detach that handle first"
            )
    return Handle(there)


def _check_arguments(model: Any, route: Any, documents: Any, match: Any, strict: Any, on_mask: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if route not in ROUTES:
        raise ValueError(f"route must be one of {', '.join(ROUTES)}, got {route!r}")
    if not (documents is None or (isinstance(documents, str) and documents == "auto") or callable(documents)):
        shown = f"a tensor of shape {list(documents.shape)}" if isinstance(documents, Tensor) else repr(documents)
        raise ValueError(
            f"documents must be 'auto', None or a function of the forward's arguments, got {shown}; give ids of one "
            "batch with packed_sdpa.arm(doc_ids), or pass doc_ids= to the model"
        )
    if on_mask not in ON_MASK:
        raise ValueError(f"on_mask must be one of {', '.join(ON_MASK)}, got {on_mask!r}")
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False, got {strict!r}")
    parts = [match] if isinstance(match, str) or callable(match) else match
    if match is not None and not (
        callable(match) or (isinstance(parts, Sequence) and parts and all(isinstance(part, str) for part in parts))
    ):
        raise TypeError(f"match must be a name suffix, a glob, a list of them or a function, got {match!r}")
