"""The backends that are Python packages, by name. Nothing of theirs is imported here."""

from __future__ import annotations

from packed_sdpa.flash_attn_package import FlashAttnPackage
from packed_sdpa.packages import PackageBackend
from packed_sdpa.te import TransformerEngine

AUTO_PREFIX = "auto:"
BACKENDS: dict[str, PackageBackend] = {backend.name: backend for backend in (TransformerEngine(), FlashAttnPackage())}


def named(backend: str) -> PackageBackend | None:
    """The package backend that ``NAME`` or ``auto:NAME`` means, if it is one."""
    return BACKENDS.get(backend.removeprefix(AUTO_PREFIX))
