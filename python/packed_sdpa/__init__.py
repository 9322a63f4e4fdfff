"""Exact, fast attention for packed sequences."""

from packed_sdpa.functional import available_backends, explain, packed_attention, varlen_attention
from packed_sdpa.layout import LayoutTensors, PackedLayout
from packed_sdpa.packing import PackedRows, pack

__version__ = "0.1.0"

__all__ = [
    "LayoutTensors",
    "PackedLayout",
    "PackedRows",
    "available_backends",
    "explain",
    "pack",
    "packed_attention",
    "varlen_attention",
]
