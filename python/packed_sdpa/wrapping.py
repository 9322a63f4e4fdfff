"""Runs a function around a module's forward, by a subclass of the module's own class.

Hooks cannot restore on KeyboardInterrupt and an instance attribute ``forward`` makes copies and pickles need this
package; a subclass that overrides ``__call__`` and ``forward`` does neither. Copies and pickles come out as the plain
class.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Around = Callable[[nn.Module, Callable[..., Any], tuple, dict], Any]
"""``around(module, proceed, args, kwargs)`` returns the forward's result, usually ``proceed(*args, **kwargs)``."""

_KEY = "_packed_sdpa_around"


class Wrapped:
    """Mixin that marks the subclasses made here."""


@functools.cache
def _subclass(base: Any) -> Any:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        around = getattr(self, _KEY, None)
        if around is None:
            return super(cls, self).__call__(*args, **kwargs)
        return around(self, super(cls, self).__call__, args, kwargs)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        around = getattr(self, _KEY, None)
        if around is None:
            return super(cls, self).forward(*args, **kwargs)
        return around(self, super(cls, self).forward, args, kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        return _plain(self, cls, super(cls, self).__reduce_ex__(protocol))

    namespace = {
        "__call__": __call__,
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    metaclass: Any = type(base)
    cls: Any = metaclass(base.__name__, (base, Wrapped), namespace)
    return cls


def _plain(module: nn.Module, cls: type, reduced: Any) -> Any:
    """A pickle recipe without our class and without what we keep on the instance."""
    if not isinstance(reduced, tuple):
        return reduced
    make, args, *rest = reduced
    if type(module) is cls:
        base = cls.__bases__[0]
        if args == (cls,):  # the usual recipe, copyreg.__newobj__, may only name the object's own class
            make, args = copyreg._reconstructor, (base, object, None)  # type: ignore[attr-defined]
        args = tuple(base if arg is cls else arg for arg in args)
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: value for name, value in rest[0].items() if name != _KEY}
    return (make, args, *rest)


def wrap(module: nn.Module, around: Around) -> Callable[[], None]:
    """Puts ``around`` about every forward of this module; returns what takes it off again. One at a time."""
    if is_wrapped(module):
        raise RuntimeError(f"packed_sdpa: {type(module).__name__} is wrapped already")
    base: Any = type(module)
    cls = _subclass(base)
    module.__dict__[_KEY] = around
    module.__class__ = cls

    def unwrap() -> None:
        module.__dict__.pop(_KEY, None)
        if type(module) is cls:  # else something (FSDP2) made a subclass of ours, in which we are now a plain pass
            module.__class__ = base

    return unwrap


def is_wrapped(module: nn.Module) -> bool:
    return _KEY in module.__dict__
