"""Compares the mask that a model means with the rule, inside documents, in chunks of rows."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packed_sdpa import _torch_private
from packed_sdpa.armed import ArmedDocuments
from packed_sdpa.numbering import numbered

_ROWS_INSIDE = 128
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


NO_REACH = (-1, 1 << 62)
Pair = tuple[int, int, int, bool]  # (b, i, j, seen by the model's mask)


def differing_pair(
    doc_ids: Tensor,
    rule: MaskRule,
    visible: Callable[[slice], Tensor],
    device: torch.device,
    rows: slice | None = None,
    pieces: Tensor | None = None,
    reach: list[int] | None = None,
) -> Pair | None:
    """First (b, i, j, seen by the model's mask) inside a document where mask and rule differ, or None.

    reach: ``NO_REACH``; becomes how far back, at most, the mask lets tokens see another document where the rule for one
    document would, and how far back, at least, it hides any there.
    doc_ids: ``[B, S]``. rows: which to look at; None all, in chunks.
    visible: n rows -> bool ``[B or 1, H or 1, n, S]``, True where the model's mask lets see.
    pieces: ``[B, S]``, the parts of documents that see each other; None: whole documents.
    """
    ids = doc_ids.to(device)
    pieces = None if pieces is None else pieces.to(device)
    batch, size = ids.shape
    step = max(1, _CHUNK_ELEMENTS // max(1, batch * size))
    parts = [slice(row, min(size, row + step), 1) for row in range(0, size, step)] if rows is None else [rows]
    for part in parts:
        found, shape = _compare(ids, rule, visible(part), part, pieces)
        values = found.cpu().tolist()
        pair = _pair(values, shape, part)
        if pair is not None:
            return pair
        if reach is not None:
            reach[:] = [max(reach[0], values[3]), min(reach[1], values[4])]
    return None


def _compare(
    ids: Tensor, rule: MaskRule, seen: Tensor, rows: slice, pieces: Tensor | None = None
) -> tuple[Tensor, torch.Size]:
    """int64 ``[5]``: whether mask and rule differ, where first, whether the mask lets see there, and the two of
    ``reach``; and the shape ``[B, H, n, S]`` in which that place counts. pieces, reach: as in :func:`differing_pair`.
    Reads nothing."""
    keys = torch.arange(ids.shape[1], device=ids.device)
    queries = keys[rows, None]
    left, right = rule.window_size
    want = torch.ones(queries.shape[0], ids.shape[1], dtype=torch.bool, device=ids.device)
    if rule.is_causal:
        want &= keys <= queries
    if left >= 0:
        want &= queries - keys <= left
    if right >= 0 and not rule.is_causal:
        want &= keys - queries <= right
    if pieces is not None:
        want = want & (pieces[:, None, rows, None] == pieces[:, None, None, :])
    are_tokens = (ids[:, rows, None] != 0) & (ids[:, None, :] != 0)
    are_one = ids[:, rows, None] == ids[:, None, :]
    differs = (seen != want) & (are_one & are_tokens)[:, None]
    if differs.numel() == 0:
        return torch.tensor([0, 0, 0, *NO_REACH], device=ids.device), differs.shape
    between = want & (are_tokens & (are_one != are_tokens))[:, None]
    place = differs.flatten().view(torch.uint8).argmax()
    distance = (queries - keys).abs()
    seen_there, hidden_there = ((between & part).flatten(0, 1).any(0) for part in (seen, seen.logical_not()))
    reach = [distance.where(seen_there, NO_REACH[0]).amax(), distance.where(hidden_there, NO_REACH[1]).amin()]
    found = [differs.any(), place, seen.expand_as(differs).take(place), *reach]
    return torch.stack([value.long() for value in found]), differs.shape


def differs_inside(
    doc_ids: Tensor, rule: MaskRule, look: Callable[[slice, slice], Tensor], pieces: Tensor | None = None
) -> bool:
    """Whether mask and rule differ anywhere inside a document. As :func:`differing_pair`, but it does not say where and
    looks at no columns before or behind the documents of a few rows: O(S * (longest document)).

    look: rows and columns -> bool, True where the model's mask lets see. All on the host.
    """
    batch, size = doc_ids.shape
    if doc_ids.numel() == 0:
        return False
    keys = torch.arange(size, device="cpu")
    row = torch.arange(batch, device="cpu")[:, None].expand_as(doc_ids)
    document, count = numbered(row.flatten(), doc_ids.flatten())
    column = keys.expand_as(doc_ids).flatten()
    first, last = (
        torch.zeros(count, dtype=torch.int64, device="cpu")
        .scatter_reduce_(0, document, column, kind, include_self=False)[document]
        .view_as(doc_ids)
        for kind in ("amin", "amax")
    )
    padding = doc_ids == 0
    begins = first.masked_fill(padding, size).amin(0).tolist()
    ends = last.masked_fill(padding, -1).amax(0).tolist()
    left, right = (min(side, size) for side in rule.window_size)
    keys, number = keys.int(), document.view_as(doc_ids).int()  # half of what is read for each pair
    for begin in range(0, size, _ROWS_INSIDE):
        rows = slice(begin, min(size, begin + _ROWS_INSIDE), 1)
        columns = slice(min(begins[rows]), max(ends[rows]) + 1)
        if columns.start >= columns.stop:
            continue
        queries, near = keys[rows, None], keys[columns]
        want = near <= queries if rule.is_causal else near >= 0
        if left >= 0:
            want = want & (near >= queries - left)
        if right >= 0 and not rule.is_causal:
            want = want & (near <= queries + right)
        if pieces is not None:
            want = want & (pieces[:, None, rows, None] == pieces[:, None, None, columns])
        inside = (number[:, rows, None] == number[:, None, columns]) & ~padding[:, rows, None]
        if bool(((look(rows, columns) != want) & inside[:, None]).any()):
            return True
    return False


def _means_others(reach: Sequence[int]) -> bool:
    """A window that is no part of the rule hides far pairs and lets near ones see each other; this mask does not."""
    return reach[0] >= reach[1]


def _pair(found: list[int], shape: torch.Size, rows: slice) -> Pair | None:
    differs, place, seen = found[:3]
    if not differs:
        return None
    _, heads, count, size = shape
    row, j = divmod(place, size)
    return row // count // heads, rows.start + row % count * rows.step, j, bool(seen)


class DenseMask:
    """A dense mask ``[(B or 1, (H or 1,)) S or 1, S or 1]``: bool, or additive with 0 (see) and a large negative (not).

    Raises :class:`MaskNotHonouredError` for another shape, and for one that is learned, though it may still be zero.
    """

    def __init__(self, mask: Tensor, size: int) -> None:
        dense = mask if mask.dim() == 4 else mask.unsqueeze(1) if mask.dim() == 3 else mask[None, None]
        if mask.dim() not in (2, 3, 4) or any(length not in (1, size) for length in dense.shape[-2:]):
            raise MaskNotHonouredError(
                f"attention_mask has shape {list(mask.shape)} but the documents are of {size} tokens; pass a mask of "
                "those tokens, or none"
            )
        if mask.requires_grad:
            raise MaskNotHonouredError(f"attention_mask requires a gradient, so it is a learned bias; {_TAKES_NO_BIAS}")
        self._dense = dense.detach().expand(-1, -1, size, size)  # a mask of keys alone has one row

    def visible(self, rows: slice, columns: slice = slice(None)) -> Tensor:
        """Raises :class:`MaskNotHonouredError` when an additive mask holds other values: it is a bias."""
        seen, has_bias = self.look(rows, columns)
        if has_bias is not None and bool(has_bias):
            raise MaskNotHonouredError(HAS_BIAS)
        return seen

    def look(self, rows: slice, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """What :meth:`visible` returns, and whether there are other values (None: there cannot be). Reads nothing."""
        part = self._dense[:, :, rows, columns]
        if part.dtype == torch.bool:
            return part, None
        if not part.is_floating_point():
            return part != 0, None
        seen = (part <= -1e4).logical_not()  # NaN is neither
        return seen, ((part != 0) & seen).any()


class _Late:
    """What a look at a mask of a CUDA device found, on its way to the host."""

    def __init__(self, found: Tensor, tell: Callable[[list[int]], None]) -> None:
        self._found = found.to("cpu", non_blocking=True)  # page-locked, so nothing waits for it
        self._event = recorded_event(found.device)
        self._tell = tell

    def has_arrived(self) -> bool:
        return self._event.query()

    def tell(self) -> None:
        self._event.synchronize()
        self._tell(self._found.tolist())


def recorded_event(device: torch.device) -> torch.cuda.Event:
    """Comes to pass when what the device was given by now is done."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class DenseMaskAudit:
    """Looks at dense masks: all of a kind of mask when first seen, later what is inside documents and a sample of the
    rest; on a CUDA device a sample of all.

    ``kinds``: those that one module has shown; what one layer means by its masks says nothing of another's. What a
    sample on a CUDA device shows is told by a later look, or by :meth:`finish`: no forward waits for it.
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
        self._late: list[_Late] = []

    def __call__(
        self,
        documents: ArmedDocuments,
        window_size: tuple[int, int],
        mask: Tensor | None,
        is_causal: bool,
        kinds: set[tuple] | None = None,
    ) -> str | None:
        """Of a hooked call. One with no mask and ``is_causal=False`` is not a decoder's: the reason to pass it through
        is returned."""
        if mask is None:
            return None if is_causal or documents.rows == 1 else NOT_CAUSAL_CALL
        self.look("attn_mask", documents, MaskRule(True, window_size), mask, kinds)
        return None

    def look(
        self,
        name: str,
        documents: ArmedDocuments,
        rule: MaskRule,
        mask: Tensor,
        kinds: set[tuple] | None = None,
        pieces: ArmedDocuments | None = None,
        sampled_on_host: bool = True,
    ) -> None:
        """``name``: of the mask, in what is said of it. pieces: the documents cut by the rule's chunk_size.
        sampled_on_host: what is between documents; else all of each mask of the host."""
        if self._on_mask == "ignore":
            return
        self._tell_what_arrived()
        owner, version = _torch_private.memory_of(mask)
        place = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype)
        # A tensor made in inference mode counts no changes, so it is looked at again each time.
        this = () if version is None else (place, version, documents.id, rule)
        kinds = self._kinds if kinds is None else kinds
        kind = (mask.dtype, mask.device, mask.dim(), rule)
        if this and this == self._latest and self._latest_owner is not None and self._latest_owner() is owner:
            if self._latest_was_whole:
                kinds.add(kind)
            if kind in kinds:
                return
        is_late = kind in kinds and mask.device.type == "cuda"
        is_sampled = is_late or (kind in kinds and sampled_on_host)
        rows = _sample(documents.rows, max(mask.numel(), documents.doc_ids.numel())) if is_sampled else None
        pair = None
        try:
            dense = DenseMask(mask, documents.rows)
            if is_late:
                assert rows is not None
                self._look_late(name, documents, rule, dense, rows, mask.device, pieces)
            else:
                cut = None if pieces is None else pieces.doc_ids
                reach = list(NO_REACH)
                if rows is not None and differs_inside(documents.doc_ids, rule, dense.visible, cut):
                    rows = None  # to say where
                pair = differing_pair(documents.doc_ids, rule, dense.visible, mask.device, rows, cut, reach)
                if pair is None and _means_others(reach):
                    raise MaskNotHonouredError(f"{name}: {MEANS_OTHERS}")
        except MaskNotHonouredError as error:
            raise_or_warn(self._on_mask, str(error), self._warned)
            return
        if pair is not None:
            raise_or_warn(self._on_mask, f"{name}: {describe_pair(pair, rule)}", self._warned)
        kinds.add(kind)
        self._latest, self._latest_owner, self._latest_was_whole = this, weakref.ref(owner), rows is None

    def finish(self) -> None:
        """Waits for what samples found, and warns of it."""
        late, self._late = self._late, []
        self._on_mask, on_mask = "warn", self._on_mask
        try:
            for entry in late:
                entry.tell()
        finally:
            self._on_mask = on_mask

    def _look_late(
        self,
        name: str,
        documents: ArmedDocuments,
        rule: MaskRule,
        dense: DenseMask,
        rows: slice,
        device: torch.device,
        pieces: ArmedDocuments | None,
    ) -> None:
        if len(self._late) >= _MAX_LATE:
            return

        def sent(of: ArmedDocuments) -> Tensor:
            return of.doc_ids.pin_memory().to(device, non_blocking=True)

        seen, has_bias = dense.look(rows)
        found, shape = _compare(sent(documents), rule, seen, rows, None if pieces is None else sent(pieces))
        if has_bias is not None:
            found = torch.cat([found, has_bias.long()[None]])

        def tell(values: list[int]) -> None:
            pair = _pair(values, shape, rows)
            if any(values[5:]):
                raise_or_warn(self._on_mask, f"{OF_EARLIER}: {HAS_BIAS}", self._warned)
            elif pair is not None:
                raise_or_warn(self._on_mask, f"{OF_EARLIER}: {name}: {describe_pair(pair, rule)}", self._warned)
            elif _means_others(values[3:5]):
                raise_or_warn(self._on_mask, f"{OF_EARLIER}: {name}: {MEANS_OTHERS}", self._warned)

        self._late.append(_Late(found, tell))

    def _tell_what_arrived(self) -> None:
        while self._late and self._late[0].has_arrived():
            self._late.pop(0).tell()


NOT_CAUSAL_CALL = "the call is not causal: is_causal=False and no mask"
_TAKES_NO_BIAS = "the packed kernel takes no bias, so run this model without packing"
HAS_BIAS = (
    "attention_mask is additive and holds values other than 0 and minus infinity (a bias such as ALiBi or T5's); "
    f"{_TAKES_NO_BIAS}"
)
MEANS_OTHERS = (
    "the model's mask lets some tokens see another document and hides others from it, so it means other documents than "
    "those that are told; tell doc_ids that agree with it, or run this forward without documents"
)
OF_EARLIER = "in an earlier forward"
_SAMPLED_ROWS = 16
_MAX_SAMPLED_PAIRS = 1 << 24  # unless one row alone is more
_MAX_LATE = 16  # looks under way; while there are as many no others are begun


def _sample(size: int, pairs: int) -> slice:
    """Rows spread over a mask of so many pairs, other ones each time."""
    rows = min(_SAMPLED_ROWS, max(1, size * _MAX_SAMPLED_PAIRS // max(1, pairs)))
    step = max(1, size // rows)
    first = int(torch.randint(step, (1,), generator=_GENERATOR, device="cpu"))
    return slice(first, size, step)


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
