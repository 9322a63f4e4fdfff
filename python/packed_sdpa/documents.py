"""Finds the documents of a forward call in the arguments that packing tools give it.

Foreign spellings (``cu_seq_lens_q``, ``seq_idx``, ``_packed_seq_ids``) end here: everything behind this file speaks of
``doc_ids`` ``[B, S]``, in which 0 is padding.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packed_sdpa.armed import ArmedDocuments
from packed_sdpa.layout import PackedLayout
from packed_sdpa.numbering import numbered

OWN_KEYWORDS = ("doc_ids", "_packed_seq_ids")
"""Keywords that only tell documents: no model computes with them unless it declares them."""

FOREIGN_KEYWORDS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Keywords of other packing tools; models that take ``**kwargs`` get them, others would raise."""

SOURCE_KEYWORDS = (*OWN_KEYWORDS, "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "attention_mask", "position_ids")
"""Where documents are looked for, in this order."""

ENCODER_KEYWORDS = ("encoder_hidden_states", "cross_attention_states")
"""Arguments of a decoder that its tokens look at, all of them whatever their document."""


@dataclass(frozen=True)
class Documents:
    """The documents of one forward: made once, read by every layer."""

    armed: ArmedDocuments
    source: str  # the argument that told, for messages
    boundaries_only: bool = False  # it cannot say that a document comes back
    positions: Tensor | None = field(default=None, compare=False, repr=False)  # [B, S], of position_ids that told
    _chunks: dict[int, Documents] = field(default_factory=dict, compare=False, repr=False)

    def in_chunks(self, size: int) -> Documents:
        """Each document cut into pieces of ``size`` rows, counted from its first row (chunked attention). Made once."""
        if size not in self._chunks:
            rows = torch.arange(self.doc_ids.shape[1], device="cpu").expand_as(self.doc_ids)
            order = torch.arange(self.doc_ids.shape[0], device="cpu").unsqueeze(1).expand_as(self.doc_ids)
            document, count = numbered(order.flatten(), self.doc_ids.flatten())
            first = torch.full((count,), self.doc_ids.shape[1], dtype=torch.int64, device="cpu")
            first.scatter_reduce_(0, document, rows.flatten(), "amin")
            piece = (rows.flatten() - first[document]) // size
            ids = (numbered(document, piece)[0].view_as(self.doc_ids) + 1).masked_fill(self.doc_ids == 0, 0)
            self._chunks[size] = from_doc_ids(ids, self.source, self.backend)
        return self._chunks[size]

    @property
    def doc_ids(self) -> Tensor:
        """int64 ``[B, S]`` on the host, 0 = padding."""
        return self.armed.doc_ids

    @property
    def layout(self) -> PackedLayout:
        return self.armed.layout

    @property
    def backend(self) -> str:
        return self.armed.backend

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)"""
        return self.armed.batch, self.armed.rows


@dataclass(frozen=True)
class _Claim:
    """What one argument says about the documents. ``boundaries_only``: it cannot say that a document comes back.
    positions: those of ``position_ids`` ``[B, S]``."""

    name: str
    ids: Tensor  # int64 [B, S], host, 0 = padding
    boundaries_only: bool = False
    positions: Tensor | None = None


def from_doc_ids(doc_ids: Tensor, source: str = "doc_ids", backend: str = "auto") -> Documents:
    """doc_ids: integer or bool ``[B, S]`` or ``[S]``, any device. Raises as :class:`ArmedDocuments`."""
    return Documents(ArmedDocuments(doc_ids, backend), source)


_TOLD = "documents="  # no parameter's name


def sources_on_host(arguments: Mapping[str, Any], told: Any = None) -> tuple[dict[str, Any], Any]:
    """``arguments`` and ``told`` with what :func:`find_documents` reads copied to the host, in one copy a device.

    Read one by one, each of them would make the host wait for its device once more.
    """
    host = dict(arguments)
    read = {name: host[name] for name in SOURCE_KEYWORDS if _is_read(name, host.get(name))}
    if _is_read("documents", told):
        read[_TOLD] = told
    for device in {tensor.device for tensor in read.values()}:
        there = {name: tensor.detach() for name, tensor in read.items() if tensor.device == device}
        copied = torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in there.values()]).cpu()
        parts = copied.split([tensor.numel() * tensor.element_size() for tensor in there.values()])
        for (name, tensor), part in zip(there.items(), parts, strict=True):
            host[name] = part.clone().view(tensor.dtype).view(tensor.shape)  # a copy starts where its dtype may
    return host, host.pop(_TOLD, told)


def _is_read(name: str, value: Any) -> bool:
    """A plain tensor of a device whose values tell documents: ids or lengths, never an S x S mask."""
    return (
        isinstance(value, Tensor)
        and not hasattr(value, "__tensor_flatten__")  # as DTensor, which is read its own way
        and value.device.type not in ("cpu", "meta")
        and value.layout == torch.strided
        and not value.is_nested
        and 1 <= value.dim() <= (3 if name == "position_ids" else 2)
    )


def find_documents(
    arguments: Mapping[str, Any], told: Any = None, told_by: str = "documents", backend: str = "auto"
) -> Documents | None:
    """The documents that ``arguments`` (by parameter name) tell, or None when none of them tells any.

    told: what the caller's ``documents=`` gave, doc_ids ``[B, S]`` / ``[S]`` or a :class:`PackedLayout`; it is
    looked at first. backend: as in :func:`packed_sdpa.packed_attention`. Zeros of a 2-D ``attention_mask`` are padding.

    Raises ValueError for a source of the wrong shape, and when two sources disagree.
    """
    if "block_table" in arguments and arguments.get("cache") is not None:
        return None  # Transformers' continuous batching: its offsets are those of a paged cache
    arguments, told = sources_on_host(arguments, told)
    shape = _batch_shape(arguments)
    padding_mask = _padding_mask(arguments, shape)
    read_with = None if _is_additive(arguments.get("attention_mask")) else padding_mask
    claims = [] if told is None else [_told_claim(told, told_by, shape)]
    for name in SOURCE_KEYWORDS:
        value = arguments.get(name)
        if value is None or (name == "position_ids" and _has_mask_of_a_cache(arguments, shape)):
            continue
        claim = _READERS[name](name, value, shape, read_with)
        if claim is not None:
            claims.append(claim)
    if not claims:
        return None
    at = next((index for index, claim in enumerate(claims) if not claim.boundaries_only), 0)
    first = claims[at]
    ids = first.ids
    if padding_mask is not None:
        ids = ids.masked_fill(~_fitting(arguments["attention_mask"], padding_mask, ids), 0)
    chosen = _Claim(first.name, ids, first.boundaries_only, first.positions)
    for other in claims[:at]:
        _check_agreement(other, chosen)
    for other in claims[at + 1 :]:
        _check_agreement(chosen, other)
    return Documents(ArmedDocuments(ids, backend), first.name, first.boundaries_only, first.positions)


def _batch_shape(arguments: Mapping[str, Any]) -> tuple[int, int] | None:
    """(B, S) of the forward's tokens, where they can be seen."""
    for name in ("input_ids", "inputs_embeds"):
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value.shape[0], value.shape[1]
    return None


def _padding_mask(arguments: Mapping[str, Any], shape: tuple[int, int] | None) -> Tensor | None:
    """Bool [B, S] on the host, True for real tokens, from a 2-D attention mask; one row stands for every row. Of one
    that begins with cached tokens the last columns are those of this forward."""
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    real = mask.detach().cpu() != 0
    if shape is not None and real.shape[1] > shape[1]:
        real = real[:, real.shape[1] - shape[1] :]
    return real.expand(shape) if shape is not None and real.shape == (1, shape[1]) else real


def _has_mask_of_a_cache(arguments: Mapping[str, Any], shape: tuple[int, int] | None) -> bool:
    """Whether the caller made the masks, of more keys than tokens or one for each kind of layer, as generation with a
    static cache does. Positions that restart are then those of padding, for all that can be told."""
    mask = arguments.get("attention_mask")
    masks = mask.values() if isinstance(mask, Mapping) else [mask]
    return shape is not None and any(
        isinstance(entry, Tensor) and entry.dim() == 4 and entry.shape[-1] > shape[1] for entry in masks
    )


def _is_additive(mask: Any) -> bool:
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.is_floating_point() or mask.is_meta:
        return False
    return mask.numel() > 0 and float(mask.min()) < 0


def _fitting(mask: Tensor, real: Tensor, ids: Tensor) -> Tensor:
    """``real`` in the shape of the documents."""
    if _is_additive(mask):
        raise TypeError(
            f"attention_mask {list(mask.shape)} is additive (its smallest value is {float(mask.min()):g}); pass 1 for "
            "real tokens and 0 for padding"
        )
    if real.shape not in (ids.shape, (1, ids.shape[1])):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} but the documents are of tokens [B, S] = {list(ids.shape)}; "
            "give it one value per token of this batch, or none"
        )
    return real.expand(ids.shape)


def padding_with_a_document(mask: Any, documents: Documents) -> str | None:
    """What is wrong where a 2-D ``attention_mask`` of these tokens calls one padding that is in a document, which was
    not told by the forward's arguments; else None."""
    real = _padding_mask({"attention_mask": mask}, documents.shape)
    if real is None or tuple(real.shape) != documents.shape:  # a cache's, too
        return None
    wrong = (~_fitting(mask, real, documents.doc_ids) & (documents.doc_ids != 0)).nonzero()
    if not wrong.numel():
        return None
    row, column = wrong[0].tolist()
    return (
        f"attention_mask calls token {column} of row {row} padding, but {documents.source} has it in document "
        f"{int(documents.doc_ids[row, column])}; give padding the id 0 there"
    )


def _host_ids(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(value).__name__}; pass torch.as_tensor(...)")
    if value.is_floating_point() or value.is_complex():
        raise TypeError(f"{name} must hold integers, got dtype {value.dtype}; convert it with .to(torch.int64)")
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device, where it has no values; give a tensor with data")
    return value.detach().to("cpu", torch.int64)


def _rows(name: str, ids: Tensor, shape: tuple[int, int] | None) -> Tensor:
    """ids [B, S] or [S] as [B, S]; must fit the tokens of the forward."""
    if ids.dim() not in (1, 2):
        raise ValueError(f"{name} must be [B, S] or [S], got shape {list(ids.shape)}")
    rows = ids if ids.dim() == 2 else ids.unsqueeze(0)
    if shape is not None and tuple(rows.shape) != shape:
        raise ValueError(
            f"{name} has shape {list(ids.shape)} but the forward has tokens [B, S] = {list(shape)}; "
            f"give one id per token of this batch"
        )
    return rows


def _told_claim(told: Any, name: str, shape: tuple[int, int] | None) -> _Claim:
    if isinstance(told, PackedLayout):
        return _Claim(name, _rows(name, _layout_ids(told), shape))
    ids = _rows(name, _host_ids(name, told), shape)
    return _Claim(name, _not_negative(name, ids))


def _layout_ids(layout: PackedLayout) -> Tensor:
    """doc_ids [B, S] of a layout whose queries are its keys."""
    tensors = layout.tensors()
    if layout.rows_q != layout.rows_k or tensors.diagonal_offsets.numel():
        raise ValueError(
            f"documents gave a layout of {layout.rows_q} query rows over {layout.rows_k} key rows; a model's forward "
            "needs one in which every row is both: PackedLayout.from_doc_ids(ids) without row_offset"
        )
    lengths = tensors.cu_seqlens_k.diff().to(torch.int64)
    numbers = torch.repeat_interleave(torch.arange(1, lengths.numel() + 1, device="cpu"), lengths)
    ids = torch.zeros(layout.batch * layout.rows_k, dtype=torch.int64, device="cpu")
    places = (
        tensors.token_index_k.to(torch.int64)
        if tensors.token_index_k.numel()
        else torch.arange(numbers.numel(), device="cpu")
    )
    ids[places] = numbers
    return ids.view(layout.batch, layout.rows_k)


def _not_negative(name: str, ids: Tensor) -> Tensor:
    if ids.numel() and int(ids.min()) < 0:
        raise ValueError(
            f"{name} must not be negative, got {int(ids.min())}; use 0 for padding and 1, 2, ... for documents"
        )
    return ids


def _read_doc_ids(name: str, value: Any, shape: tuple[int, int] | None, _: Tensor | None) -> _Claim:
    return _Claim(name, _not_negative(name, _rows(name, _host_ids(name, value), shape)))


def _read_seq_idx(name: str, value: Any, shape: tuple[int, int] | None, _: Tensor | None) -> _Claim:
    """0-based; -1 is padding."""
    ids = _rows(name, _host_ids(name, value), shape)
    if ids.numel() and int(ids.min()) < -1:
        raise ValueError(
            f"{name} must be 0, 1, ... for documents and -1 for padding, got {int(ids.min())}; use -1 for padding"
        )
    return _Claim(name, ids + 1)


def _read_cu_seq_lens(name: str, value: Any, shape: tuple[int, int] | None, mask: Tensor | None) -> _Claim:
    """Offsets [N + 1] into the flattened rows; what they leave out at the end is padding."""
    offsets = _host_ids(name, value)
    if offsets.dim() != 1 or offsets.numel() < 2:
        raise ValueError(f"{name} must be offsets [N + 1], got shape {list(offsets.shape)}")
    batch, size = shape or (tuple(mask.shape) if mask is not None else (1, int(offsets[-1])))
    total = batch * size
    lengths = offsets.diff()
    if int(offsets[0]) != 0 or int(lengths.min()) < 0 or int(offsets[-1]) > total:
        raise ValueError(
            f"{name} must start at 0, not decrease and end at most at the {total} tokens of the forward, "
            f"got {_shortened(offsets)}"
        )
    ids = torch.zeros(total, dtype=torch.int64, device="cpu")
    numbers = torch.arange(1, lengths.numel() + 1, device="cpu")
    ids[: int(offsets[-1])] = torch.repeat_interleave(numbers, lengths)
    rows = ids.view(batch, size)
    if batch > 1:
        crossing = (rows[1:, 0] == rows[:-1, -1]) & (rows[1:, 0] != 0)
        if bool(crossing.any()):
            raise ValueError(
                f"{name} has a document that crosses the end of a row of {size} tokens: {_shortened(offsets)}"
            )
    return _Claim(name, rows, boundaries_only=True)


def _read_attention_mask(name: str, value: Any, shape: tuple[int, int] | None, _: Tensor | None) -> _Claim | None:
    """An indexed mask: 0 padding, 1, 2, ... the documents. A mask of zeros and ones tells none."""
    if isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point() and not value.is_meta:
        if value.numel() > 0 and float(value.max()) > 1:
            raise TypeError(
                f"{name} numbers documents (its largest value is {float(value.max()):g}) but has dtype {value.dtype}; "
                "convert it with .to(torch.int64)"
            )
        return None
    if not is_indexed_mask(value):
        return None
    return _Claim(name, _not_negative(name, _rows(name, _host_ids(name, value), shape)))


def is_indexed_mask(mask: Any) -> bool:
    """A 2-D integer attention mask that numbers the documents."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype == torch.bool or mask.is_floating_point():
        return False
    return mask.numel() > 0 and int(mask.max()) > 1


def _read_position_ids(name: str, value: Any, shape: tuple[int, int] | None, mask: Tensor | None) -> _Claim | None:
    """Position ids that restart. 3-D ids of M-RoPE: the text axis of four, else the places where all axes are 0."""
    if not isinstance(value, Tensor) or value.is_meta:
        return None
    if value.is_floating_point():
        if _read_position_ids(name, value.to(torch.int64), shape, mask) is not None:
            raise TypeError(
                f"{name} restart, so they tell documents, but have dtype {value.dtype}; convert with .to(torch.int64)"
            )
        return None
    positions = value.detach().to("cpu", torch.int64)
    if positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]
    if positions.dim() == 3 and bool((positions == positions[:1]).all()):
        positions = positions[0]
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    if positions.dim() not in (2, 3) or positions.numel() == 0:
        return None
    if shape is not None and positions.shape[-1] == shape[1] and positions.shape[-2] in (1, shape[0]):
        positions = positions.expand(*positions.shape[:-2], *shape)
    elif shape is not None:
        return None  # positions of something else than these tokens, such as a cache's
    rows = positions if positions.dim() == 2 else positions[0]
    real = mask if mask is not None and mask.shape == rows.shape else torch.ones_like(rows, dtype=torch.bool)
    if positions.dim() == 2:
        starts, restarts = _restarts(positions, real)
    else:
        starts = (positions == 0).all(dim=0) & real
        restarts = bool(starts[:, 1:].any())
    if not restarts:
        return None
    numbers = starts.flatten().cumsum(0).view_as(starts) + torch.arange(1, rows.shape[0] + 1, device="cpu").unsqueeze(1)
    told = positions if positions.dim() == 2 else None
    return _Claim(name, numbers.masked_fill(~real, 0), boundaries_only=True, positions=told)


def _restarts(positions: Tensor, real: Tensor) -> tuple[Tensor, bool]:
    """Where a row's next real token is not one further than the real token before it, nor, where positions count
    through padding, as far as it stands behind it."""
    place = real.flatten().nonzero().squeeze(1)
    row = place // positions.shape[1]
    values = positions.flatten()[place]
    same_row = row[1:] == row[:-1]
    further = values[1:] - values[:-1]
    jump = same_row & (further != 1) & (further != place.diff())
    starts = torch.zeros(positions.numel(), dtype=torch.bool, device="cpu")
    starts[place[1:][jump]] = True
    return starts.view_as(positions), bool(jump.any())


_READERS: dict[str, Callable[[str, Any, tuple[int, int] | None, Tensor | None], _Claim | None]] = {
    "doc_ids": _read_doc_ids,
    "_packed_seq_ids": _read_doc_ids,
    "seq_idx": _read_seq_idx,
    "cu_seq_lens_q": _read_cu_seq_lens,
    "cu_seq_lens_k": _read_cu_seq_lens,
    "attention_mask": _read_attention_mask,
    "position_ids": _read_position_ids,
}


_KNOWN_KEYWORDS = (*SOURCE_KEYWORDS, *FOREIGN_KEYWORDS, "is_causal", "sliding_window", "inputs_embeds", "input_ids")


@functools.lru_cache(maxsize=256)
def near_keyword(name: str) -> str | None:
    """The keyword that ``name`` is a slip of the pen for, as ``docs_ids`` for ``doc_ids``; None for any other name."""
    if name in _KNOWN_KEYWORDS:
        return None
    # 0.87: above longer names that mean something else, as decoder_attention_mask (0.78).
    return next(iter(difflib.get_close_matches(name, _KNOWN_KEYWORDS, n=1, cutoff=0.87)), None)


def check_keywords(keywords: Mapping[str, Any], accepted: frozenset[str]) -> None:
    """Raises TypeError for a misspelt keyword, which a model that takes any keyword would swallow."""
    for name, value in keywords.items():
        near = None if name in accepted else near_keyword(name)
        if near is not None:
            given = type(value).__name__ if isinstance(value, Tensor) else repr(value)
            raise TypeError(
                f"unexpected keyword {name} (got {given}), which the model would ignore; did you mean {near}?"
            )


def found_or_armed(found: Documents | None, armed: Documents | None) -> Documents | None:
    """Those that arguments tell; those armed by hand where they tell none, or only where documents begin.

    Raises ValueError, naming both sources, when they tell different documents.
    """
    if found is None or armed is None:
        return armed if found is None else found
    _check_agreement(
        *(_Claim(each.source, each.doc_ids, each.boundaries_only, each.positions) for each in (found, armed))
    )
    return armed if found.boundaries_only else found


def _check_agreement(first: _Claim, other: _Claim) -> None:
    """Both must cut the tokens that are real to both in the same places, and join the same documents."""
    if first.ids.shape != other.ids.shape:
        raise ValueError(
            f"{first.name} tells documents of {list(first.ids.shape)} tokens but {other.name} of "
            f"{list(other.ids.shape)}; pass one of them, or make them agree"
        )
    real = (first.ids != 0) & (other.ids != 0)
    place = real.flatten().nonzero().squeeze(1)
    row = place // first.ids.shape[1]
    one, two = first.ids.flatten()[place], other.ids.flatten()[place]
    same_row = row[1:] == row[:-1]
    differs = same_row & ((one[1:] != one[:-1]) != (two[1:] != two[:-1]))
    for ids, positions in ((one, other.positions), (two, first.positions)):
        # Those of a document that comes back may happen to follow its neighbour's.
        if positions is not None and bool(differs.any()):
            differs &= ~((ids[1:] != ids[:-1]) & _continues(row, ids, positions.flatten()[place])[1:])
    if bool(differs.any()):
        at = int(differs.nonzero()[0])
        _raise_disagreement(first, other, int(place[at]), int(place[at + 1]))
    if first.boundaries_only or other.boundaries_only:
        return
    _, pairs = numbered(row, one, two)
    for ids, name in ((one, first.name), (two, other.name)):
        if numbered(row, ids)[1] != pairs:
            raise ValueError(
                f"{first.name} and {other.name} disagree about the documents: one document of {name} is several of the "
                "other's; pass one of them, or make them agree"
            )


def _continues(row: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
    """Of tokens in their order: whether each is one further than the one before it in the same document."""
    order = numbered(row, ids)[0].argsort(stable=True)
    same = (row[order][1:] == row[order][:-1]) & (ids[order][1:] == ids[order][:-1])
    continues = torch.zeros(row.numel(), dtype=torch.bool, device="cpu")
    continues[order[1:]] = same & (positions[order][1:] == positions[order][:-1] + 1)
    return continues


def _raise_disagreement(first: _Claim, other: _Claim, before: int, at: int) -> None:
    """At a flat place, in which the token before is that at another."""

    def says(claim: _Claim) -> str:
        ids = claim.ids.flatten()
        return f"{claim.name} says that a document {'begins' if ids[at] != ids[before] else 'goes on'}"

    row, column = divmod(at, first.ids.shape[1])
    raise ValueError(
        f"{first.name} and {other.name} disagree about the documents: at row {row}, token {column}, {says(first)} and "
        f"{says(other)}; pass one of them, or make them agree"
    )


def _shortened(offsets: Tensor) -> str:
    values = offsets.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
