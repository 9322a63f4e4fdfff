"""What the command line tells its user in one line."""

from __future__ import annotations

import importlib
from types import ModuleType


class InputError(ValueError):
    """Something the user passed cannot be used; the message names the argument, the value and the cure."""


class WorkerError(RuntimeError):
    """A process that was started for a measurement ended without a result; the message says its last words."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Imports an optional dependency. Raises MissingExtraError with the ``pip install`` line that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{error.name} is not installed; run `pip install 'packed-sdpa[{extra}]'`", name=error.name
        ) from error
