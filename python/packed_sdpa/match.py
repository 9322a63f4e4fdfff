"""Which modules are attention: names, globs or a function of the user's."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

Match = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""Qualified-name suffix (``"attn"``), glob (``"*.h.*.attn"``), several of them, or a function of name and module."""


def parts_of(match: Match | None) -> Any:
    """As a list of patterns, so that one pattern and a list of it are the same; a function as it is."""
    return [match] if isinstance(match, str) else list(match) if isinstance(match, Sequence) else match


def matcher(match: Match | None) -> Callable[[str, nn.Module], bool] | None:
    if match is None or (callable(match) and not isinstance(match, str)):
        return match
    patterns = parts_of(match)

    def matches(name: str, module: nn.Module) -> bool:
        return any(
            fnmatch.fnmatchcase(name, pattern)
            if any(sign in pattern for sign in "*?[")
            else name == pattern or name.endswith("." + pattern)
            for pattern in patterns
        )

    return matches
