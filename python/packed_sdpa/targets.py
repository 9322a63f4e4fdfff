"""Whether what a command is to write can be written, asked before the work begins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from packed_sdpa.errors import InputError


def check_folder(flag: str, folder: Path, files: Iterable[str] = ()) -> None:
    """Raises InputError when the folder, or these files in it, could not be written. Leaves nothing behind."""
    try:
        _check_place(flag, folder, folder)
        for name in files:
            _check_existing_file(flag, folder / name)
    except OSError as error:
        raise InputError(f"{flag} {folder} cannot be written into ({error}); pass another folder") from error


def check_file(flag: str, file: Path) -> None:
    """Raises InputError when the file could not be written. Leaves nothing behind."""
    try:
        _check_existing_file(flag, file)
        _check_place(flag, file, file.parent)
    except OSError as error:
        raise InputError(f"{flag} {file} cannot be written ({error}); pass another file") from error


def _check_place(flag: str, target: Path, folder: Path) -> None:
    """The nearest folder that is there must take new files."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        shown = there if folder.is_absolute() else Path(os.path.relpath(there))
        raise InputError(f"{flag} {target}: {shown} is a file; pass a folder to write into")
    with tempfile.TemporaryFile(dir=there):
        pass


def _check_existing_file(flag: str, file: Path) -> None:
    if file.is_dir():
        raise InputError(f"{flag} {file} is a folder; pass a file to write")
    if file.exists():
        with file.open("ab"):
            pass
