"""Exact, fast attention for packed sequences."""

import importlib.metadata

from packed_sdpa._library import cmake_prefix_path
from packed_sdpa.arming import arm, disarm
from packed_sdpa.attach import Handle, attach
from packed_sdpa.attachment import NotTakenError
from packed_sdpa.check import check_isolation
from packed_sdpa.functional import available_backends, explain, packed_attention, varlen_attention
from packed_sdpa.graph_layout import GraphLayout
from packed_sdpa.hf import register_hf_attention
from packed_sdpa.layout import LayoutTensors, PackedLayout
from packed_sdpa.mask_audit import MaskNotHonouredError
from packed_sdpa.packing import PackedRows, pack
from packed_sdpa.report import Report, report

__version__ = importlib.metadata.version("packed-sdpa")

__all__ = [
    "GraphLayout",
    "Handle",
    "LayoutTensors",
    "MaskNotHonouredError",
    "NotTakenError",
    "PackedLayout",
    "PackedRows",
    "Report",
    "arm",
    "attach",
    "available_backends",
    "check_isolation",
    "cmake_prefix_path",
    "disarm",
    "explain",
    "pack",
    "packed_attention",
    "register_hf_attention",
    "report",
    "varlen_attention",
]
