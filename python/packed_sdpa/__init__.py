"""Exact, fast attention for packed sequences."""

from packed_sdpa.functional import available_backends, explain, packed_attention, varlen_attention
from packed_sdpa.graph_layout import GraphLayout
from packed_sdpa.layout import LayoutTensors, PackedLayout

__version__ = "0.1.0"

__all__ = [
    "GraphLayout",
    "LayoutTensors",
    "PackedLayout",
    "available_backends",
    "explain",
    "packed_attention",
    "varlen_attention",
]
