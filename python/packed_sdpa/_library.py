"""Loads the compiled library, once, and says what is wrong when it cannot be."""

from __future__ import annotations

import importlib.metadata
import pathlib

import torch

_LIBRARY_NAME = "libpacked_sdpa.so"


def _library_path() -> pathlib.Path:
    """The library beside this package; an editable install keeps it in site-packages."""
    beside = pathlib.Path(__file__).parent / "lib" / _LIBRARY_NAME
    if beside.exists():
        return beside
    try:
        files = importlib.metadata.files("packed-sdpa") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == _LIBRARY_NAME:
            return pathlib.Path(str(file.locate()))
    raise ImportError(
        f"packed_sdpa: {_LIBRARY_NAME} is not installed (looked at {beside} and in the package's file list); "
        "run `make build` in the source folder, or install the wheel"
    )


def _release(version: str) -> str:
    return version.split("+")[0]


def _load() -> pathlib.Path:
    path = _library_path()
    built_with = (path.parent / "torch_version.txt").read_text().strip()
    if _release(built_with) != _release(torch.__version__):
        raise ImportError(
            f"packed_sdpa was built with torch {_release(built_with)} but torch {_release(torch.__version__)} is "
            "installed; rebuild with `pip install --no-build-isolation .`, or install the torch it was built with"
        )
    torch.ops.load_library(str(path))
    return path


LIBRARY_PATH = _load()
# For C++ programs: cmake -DCMAKE_PREFIX_PATH="$(python -c 'import packed_sdpa; print(packed_sdpa.cmake_prefix_path)')"
cmake_prefix_path = str(LIBRARY_PATH.parent.parent)
ops = torch.ops.packed_sdpa
