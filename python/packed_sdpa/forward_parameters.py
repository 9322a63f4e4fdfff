"""How a forward names its arguments."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from packed_sdpa import _torch_private


class ForwardParameters:
    """How a forward names its arguments."""

    def __init__(self, positional: list[str], names: frozenset[str], takes_any: bool) -> None:
        self.positional = positional
        self.names = names
        self.takes_any = takes_any  # **kwargs

    def by_name(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        return {**dict(zip(self.positional, args, strict=False)), **kwargs}

    def replaced(self, args: tuple, kwargs: dict, name: str, value: Any) -> tuple[tuple, dict]:
        """The arguments with one of them changed, wherever it was given."""
        if name in kwargs:
            return args, {**kwargs, name: value}
        at = self.positional.index(name)
        return (*args[:at], value, *args[at + 1 :]), kwargs


def forward_parameters(module: nn.Module) -> ForwardParameters:
    """Parameters of a module's forward; for a wrapper that takes ``*args``, positional names of the wrapped module."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    kinds = inspect.Parameter
    positional = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    names = frozenset(p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY))
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    if not positional and any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        inner = getattr(module, "module", None) or getattr(module, _torch_private.COMPILED_MODULE, None)
        if isinstance(inner, nn.Module):
            positional = forward_parameters(inner).positional
    return ForwardParameters(positional, names, takes_any)
