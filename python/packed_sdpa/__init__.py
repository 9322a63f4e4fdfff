"""Exact, fast attention for packed sequences."""

from packed_sdpa._library import CMAKE_PREFIX_PATH as cmake_prefix_path
from packed_sdpa.functional import available_backends, explain, packed_attention, varlen_attention
from packed_sdpa.layout import LayoutTensors, PackedLayout

__version__ = "0.1.0"

__all__ = [
    "LayoutTensors",
    "PackedLayout",
    "available_backends",
    "cmake_prefix_path",
    "explain",
    "packed_attention",
    "varlen_attention",
]
