"""The general kernel entry of the seed API."""

from __future__ import annotations

from torch import Tensor

from packed_sdpa.functional import packed_attention
from packed_sdpa.layout import PackedLayout
from packed_sdpa.state import dispatcher_preference


def _cp_blockdiag_varlen(
    query: Tensor,
    key_full: Tensor,
    value_full: Tensor,
    doc_ids: Tensor,
    row_offset: int,
    scale: float | None,
    backend: str,
    *,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention within each document, for the rows ``row_offset .. row_offset + L`` of the sequence.

    query ``[B, Hq, L, D]``, key_full ``[B, Hkv, S, D]`` and value_full ``[B, Hkv, S, Dv]`` (all rows), doc_ids
    ``[B, S]`` or ``[S]`` -> ``[B, Hq, L, Dv]``. scale: None is ``D ** -0.5``. backend: ``"flash"`` or ``"te"``.
    """
    preference = dispatcher_preference(backend)
    if query.dim() != 4:
        raise ValueError(f"query must be 4-D [B, H, L, D], got shape {list(query.shape)}")
    layout = PackedLayout.from_doc_ids(doc_ids, row_offset, query.shape[2])
    return packed_attention(query, key_full, value_full, layout, scale=scale, dropout_p=dropout_p, backend=preference)
