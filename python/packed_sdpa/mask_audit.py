"""Compares the mask that a model means with the rule, inside documents, in chunks of rows."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from packed_sdpa.armed import ArmedDocuments

_CHUNK_ELEMENTS = 1 << 20  # pairs looked at together: a chunk of rows, never S x S

ON_MASK = ("error", "warn", "ignore")


class MaskNotHonouredError(ValueError):
    """A model's mask forbids or allows something inside a document that the packed rule does not."""


@dataclass(frozen=True)
class MaskRule:
    """What the packed kernel does inside a document: ``window_size`` as in :func:`packed_sdpa.packed_attention`."""

    is_causal: bool
    window_size: tuple[int, int] = (-1, -1)
    chunk_size: int = 0  # > 0: each document is cut into pieces of so many rows, which do not see each other

    def __str__(self) -> str:
        kind = "causal" if self.is_causal else "whole-document"
        kind += f" in chunks of {self.chunk_size}" if self.chunk_size else ""
        return kind if self.window_size == (-1, -1) else f"{kind} with window_size={self.window_size}"


def differing_pair(
    doc_ids: Tensor,
    rule: MaskRule,
    visible: Callable[[int, int], Tensor],
    device: torch.device,
    rows: list[tuple[int, int]] | None = None,
) -> tuple[int, int, int, bool] | None:
    """First (b, i, j, seen by the model's mask) inside a document where mask and rule differ, or None.

    doc_ids: ``[B, S]``. rows: which to look at, ``(begin, end)`` each; None all, in chunks.
    visible: rows ``begin, end`` -> bool ``[B or 1, H or 1, end - begin, S]``, True where the model's mask lets see.
    """
    ids = doc_ids.to(device)
    batch, size = ids.shape
    keys = torch.arange(size, device=device)
    step = max(1, _CHUNK_ELEMENTS // max(1, batch * size))
    left, right = rule.window_size
    for begin, end in rows or [(row, min(size, row + step)) for row in range(0, size, step)]:
        queries = keys[begin:end, None]
        want = torch.ones(end - begin, size, dtype=torch.bool, device=device)
        if rule.is_causal:
            want &= keys <= queries
        if left >= 0:
            want &= queries - keys <= left
        if right >= 0 and not rule.is_causal:
            want &= keys - queries <= right
        inside = (ids[:, begin:end, None] == ids[:, None, :]) & (ids[:, begin:end, None] != 0)
        seen = visible(begin, end)
        differs = ((seen != want) & inside[:, None]).flatten(0, 1)
        if bool(differs.any()):
            flat, i, j = (int(x) for x in differs.nonzero()[0])
            b, h = divmod(flat, seen.shape[1]) if seen.shape[0] > 1 else (flat // seen.shape[1], flat % seen.shape[1])
            return b, begin + i, j, bool(seen[b if seen.shape[0] > 1 else 0, h, i, j])
    return None


def dense_mask_visible(mask: Tensor, size: int) -> Callable[[int, int], Tensor]:
    """Rows of a dense mask ``[(B or 1, (H or 1,)) S or 1, S or 1]``: bool, or additive with 0 (see) and a large
    negative (not).

    Raises :class:`MaskNotHonouredError` when an additive mask holds other values: it is a bias.
    """
    dense = mask if mask.dim() == 4 else mask.unsqueeze(1) if mask.dim() == 3 else mask[None, None]
    if mask.dim() not in (2, 3, 4) or any(length not in (1, size) for length in dense.shape[-2:]):
        raise MaskNotHonouredError(
            f"attention_mask has shape {list(mask.shape)} but the documents are of {size} tokens; pass a mask of those "
            "tokens, or none"
        )
    dense = dense.expand(-1, -1, size, size)  # a mask of keys alone has one row

    def visible(begin: int, end: int) -> Tensor:
        rows = dense[:, :, begin:end]
        if rows.dtype == torch.bool:
            return rows
        if not rows.is_floating_point():
            return rows != 0
        shut = rows <= -1e4
        if bool(((rows != 0) & ~shut).any()):
            raise MaskNotHonouredError(
                "attention_mask is additive and holds values other than 0 and minus infinity (a bias such as ALiBi or "
                "T5's); the packed kernel takes no bias, so run this model without packing"
            )
        return ~shut

    return visible


class DenseMaskAudit:
    """Looks at the masks of hooked attention calls: all rows of a kind of mask when first seen, later a sample.

    A call with no mask and ``is_causal=False`` is not a decoder's: the reason to pass it through is returned.
    ``kinds``: those that one module has shown; what one layer means by its masks says nothing of another's.
    """

    def __init__(self, on_mask: str, warned: set[str]) -> None:
        self._on_mask = on_mask
        self._warned = warned
        self._kinds: set[tuple] = set()  # kinds of masks that were looked at whole
        # The mask that was looked at last: layers share it, or views of it. Its address alone would not tell it from
        # another mask in memory that was used again.
        self._latest_owner: weakref.ref[Tensor] | None = None
        self._latest: tuple = ()
        self._latest_was_whole = False

    def __call__(
        self,
        documents: ArmedDocuments,
        window_size: tuple[int, int],
        mask: Tensor | None,
        is_causal: bool,
        kinds: set[tuple] | None = None,
    ) -> str | None:
        if mask is None:
            return None if is_causal or documents.rows == 1 else NOT_CAUSAL_CALL
        if self._on_mask == "ignore":
            return None
        owner = mask if mask._base is None else mask._base
        place = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype)
        # A tensor made in inference mode counts no changes, so it is looked at again each time.
        this = () if mask.is_inference() else (place, mask._version, documents.id, window_size)
        kinds = self._kinds if kinds is None else kinds
        kind = (mask.dtype, mask.device, mask.dim(), window_size)
        if this and this == self._latest and self._latest_owner is not None and self._latest_owner() is owner:
            if self._latest_was_whole:
                kinds.add(kind)
            return None
        rule = MaskRule(True, window_size)
        ids, rows = documents.doc_ids, None if kind not in kinds else _sample(documents.rows)
        try:
            visible = dense_mask_visible(mask, documents.rows)
            pair = differing_pair(ids, rule, visible, mask.device, rows)
        except MaskNotHonouredError as error:
            raise_or_warn(self._on_mask, str(error), self._warned)
            return None
        if pair is not None:
            raise_or_warn(self._on_mask, f"attn_mask: {describe_pair(pair, rule)}", self._warned)
        kinds.add(kind)
        self._latest, self._latest_owner, self._latest_was_whole = this, weakref.ref(owner), rows is None
        return None


NOT_CAUSAL_CALL = "the call is not causal: is_causal=False and no mask"
_SAMPLED_ROWS = 16


def _sample(size: int) -> list[tuple[int, int]]:
    """Rows ``(begin, end)`` spread over a mask, other ones each time."""
    step = max(1, size // _SAMPLED_ROWS)
    first = int(torch.randint(step, (1,), generator=_GENERATOR, device="cpu"))
    return [(row, row + 1) for row in range(first, size, step)]


_GENERATOR = torch.Generator("cpu")  # not the default one: an audit draws no random number of the training


def raise_or_warn(on_mask: str, message: str, warned: set[str]) -> None:
    """What ``on_mask`` says about a mask that is not honoured; a warning once per message."""
    if on_mask == "error":
        raise MaskNotHonouredError(f"{message}; on_mask='warn' or 'ignore' runs the packed rule instead")
    if on_mask == "warn" and message not in warned:
        warned.add(message)
        warnings.warn(f"packed_sdpa: {message}; the packed rule runs instead", UserWarning, stacklevel=2)


def describe_pair(pair: tuple[int, int, int, bool], rule: MaskRule) -> str:
    b, i, j, seen = pair
    does = "lets" if seen else "does not let"
    return (
        f"the model's mask {does} row {i} see row {j} of the same document (batch row {b}), the packed rule "
        f"({rule}) not so"
    )
