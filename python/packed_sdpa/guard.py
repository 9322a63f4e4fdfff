"""Code around a module's calls that also runs to its end when KeyboardInterrupt comes, which forward hooks do not.

The module's class becomes a subclass of its own, under the same name, whose ``__call__`` and ``forward`` go through the
module's arounds. Copies and pickles of the module come out as the plain class, without arounds and without our hooks.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from packed_sdpa import _torch_private

_KEY = "_packed_sdpa_arounds"
_PLAIN = "_packed_sdpa_plain_class"


class Around(Protocol):
    """What happens around a call. ``call`` is the rest: further arounds and the module's own code."""

    hook_ids: tuple[int, ...]  # forward hooks that belong to it, left out of copies

    def around_call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``module(...)``: hooks run within it."""

    def around_forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``module.forward(...)``, within ``module(...)`` or called directly."""


class _Arounds(tuple):
    """Those of one module, the newest last. They do not go into its copies, by whatever way its class makes them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Arounds:
        return _Arounds()


def refuse_scripted(modules: Iterable[nn.Module]) -> None:
    """Raises TypeError for what TorchScript runs by itself: no forward of Python's is there to be guarded."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"model has a scripted module ({getattr(module, 'original_name', type(module).__name__)}), whose "
                "attention calls cannot be replaced; give the model that it was scripted from"
            )


def add_around(module: nn.Module, around: Around) -> None:
    """The newest around is the innermost."""
    module.__dict__[_KEY] = _Arounds((*module.__dict__.get(_KEY, ()), around))
    if not _is_guarded(type(module)):
        module.__class__ = _guarded_class(type(module))


def remove_around(module: nn.Module, around: Around) -> None:
    left = _Arounds(entry for entry in module.__dict__.get(_KEY, ()) if entry is not around)
    if left:
        module.__dict__[_KEY] = left
        return
    module.__dict__.pop(_KEY, None)
    # A class that somebody else put on top of ours (FSDP2) stays; without arounds ours does nothing.
    if _PLAIN in type(module).__dict__:
        module.__class__ = type(module).__dict__[_PLAIN]


def arounds_of(module: nn.Module) -> tuple[Around, ...]:
    return module.__dict__.get(_KEY, ())


def _is_guarded(cls: type) -> bool:
    return any(_PLAIN in base.__dict__ for base in cls.__mro__)


_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _guarded_class(plain: type) -> type:
    known = _classes.get(plain)
    if known is not None:
        return known

    plain_call = plain.__call__
    plain_forward = plain.forward  # type: ignore[attr-defined]

    @functools.wraps(plain_call)
    def guarded_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(plain_call, self)
        for around in reversed(self.__dict__.get(_KEY, ())):
            call = functools.partial(_call_around, around, call)
        return call(*args, **kwargs)

    @functools.wraps(plain_forward)
    def guarded_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(plain_forward, self)
        for around in reversed(self.__dict__.get(_KEY, ())):
            call = functools.partial(_forward_around, around, call)
        return call(*args, **kwargs)

    def reduce_as_plain(self: nn.Module, protocol: Any) -> Any:
        reduced = super(guarded, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
        if not isinstance(reduced, tuple):
            return reduced
        parts = list(reduced)
        if parts[0] is copyreg.__newobj__ and parts[1] == (guarded,):  # type: ignore[attr-defined]
            parts[:2] = [copyreg._reconstructor, (plain, object, None)]  # type: ignore[attr-defined]
        else:
            parts[1] = tuple(plain if part is guarded else part for part in parts[1])
        if len(parts) > 2 and isinstance(parts[2], dict):
            parts[2] = _without_ours(parts[2])
        return tuple(parts)

    def deepcopy_as_plain(self: nn.Module, memo: dict[int, Any]) -> Any:
        copied = plain.__deepcopy__(self, memo)  # type: ignore[attr-defined]
        if _KEY in getattr(copied, "__dict__", {}) and copied is not self:
            state = _without_ours(copied.__dict__)
            copied.__dict__.clear()
            copied.__dict__.update(state)
            if type(copied) is guarded:
                copied.__class__ = plain
        return copied

    def refuse_to_be_scripted(self: nn.Module) -> NoReturn:
        raise TypeError(
            f"{plain.__name__} is attached or hooked by packed_sdpa, which TorchScript cannot compile; script "
            "copy.deepcopy(model), which comes out without hooks, or detach first"
        )

    namespace: dict[str, Any] = {
        "__call__": guarded_call,
        "forward": guarded_forward,
        "__reduce_ex__": reduce_as_plain,
        "__prepare_scriptable__": refuse_to_be_scripted,  # torch.jit.script asks it first
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        _PLAIN: plain,
    }
    if hasattr(plain, "__deepcopy__"):  # parametrized modules, modules of torch.fx, classes of the user's own
        namespace["__deepcopy__"] = deepcopy_as_plain
    guarded = type(plain)(plain.__name__, (plain,), namespace)
    _classes[plain] = guarded
    return guarded


def _call_around(around: Around, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return around.around_call(call, args, kwargs)


def _forward_around(around: Around, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return around.around_forward(call, args, kwargs)


def _without_ours(state: dict[str, Any]) -> dict[str, Any]:
    arounds = state.get(_KEY)
    if arounds is None:
        return state
    ours = {number for around in arounds for number in around.hook_ids}
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        ours.update(_copied_hooks(state.get(name, {}).items()))
    state = {name: value for name, value in state.items() if name != _KEY}
    for name in _torch_private.MODULE_HOOKS:
        if name in state:
            kept = state[name].copy()
            for number in ours:
                kept.pop(number, None)
            state[name] = kept
    return state


def _copied_hooks(hooks: Iterable[tuple[int, Any]]) -> set[int]:
    """Numbers of the hooks that came with a copy of a module, of an around that did not."""
    return {number for number, hook in hooks if getattr(getattr(hook, "__self__", None), "is_copy", False)}
