"""What a user reads when the compiled library is not there, or belongs to another torch."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from packed_sdpa import _library


def test_the_library_of_this_install_is_found():
    assert _library._library_path() == _library.LIBRARY_PATH
    assert _library._load() == _library.LIBRARY_PATH  # a second time does no harm


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_library_that_is_not_there(is_installed, monkeypatch, tmp_path):
    def files(name):
        if not is_installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return []

    monkeypatch.setattr(importlib.metadata, "files", files)
    monkeypatch.setattr(_library, "__file__", str(tmp_path / "_library.py"))
    with pytest.raises(ImportError, match=r"libpacked_sdpa\.so is not installed \(looked at .*\); run `make build`"):
        _library._library_path()


def test_a_library_that_was_built_with_another_torch(monkeypatch, tmp_path):
    (tmp_path / "torch_version.txt").write_text("2.1.0+cu121\n")
    monkeypatch.setattr(_library, "_library_path", lambda: tmp_path / "libpacked_sdpa.so")
    here = torch.__version__.split("+")[0]
    with pytest.raises(ImportError, match=rf"built with torch 2\.1\.0 but torch {here} is installed; rebuild with"):
        _library._load()


def test_the_part_of_a_version_behind_the_plus_is_no_difference(monkeypatch, tmp_path):
    (tmp_path / "torch_version.txt").write_text(torch.__version__.split("+")[0] + "+elsewhere\n")
    monkeypatch.setattr(_library, "_library_path", lambda: tmp_path / "libpacked_sdpa.so")
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    _library._load()
    assert loaded == [str(tmp_path / "libpacked_sdpa.so")]
