"""Every private torch name that this package uses, in one place; tests/python/test_torch_private.py tries each.

Written against torch 2.11 to 2.14.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

NO_GRAPH_TASK = -1
JIT_TRACE = "torch.jit.trace"


def in_func_transform() -> bool:
    """A torch.func transform (vmap, grad, jvp, ...) runs in this thread."""
    return torch._C._are_functorch_transforms_active()


def tracer() -> str | None:
    """What records the operators that run now, to play them back without this Python code; None: nothing does.

    torch.compile is no such thing: it leaves out what is marked as not to be traced.
    """
    if torch._C._get_tracing_state() is not None:
        return JIT_TRACE
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return "make_fx"
    return None


def untraced(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator, as torch.compiler.disable: but it imports torch._dynamo (seconds) only when somebody else has."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        disabled: Callable[..., Any] | None = None

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if "torch._dynamo" not in sys.modules:  # so nothing is compiled
                return function(*args, **kwargs)
            if disabled is None:
                # The mark below is looked at where a caller is traced; a frame of its own is told by its code.
                torch._dynamo.eval_frame.skip_code(run.__code__)  # type: ignore[attr-defined]
                disabled = torch.compiler.disable(function, reason=reason)
            return disabled(*args, **kwargs)

        # What torch.compiler.disable puts on its functions: a call in a graph that is traced breaks it.
        run._torchdynamo_disable = True  # type: ignore[attr-defined]
        run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return run

    return decorate


def without_func_wrapper(value: Any) -> Any:
    """What a differentiating transform has wrapped; None for a tensor that vmap runs over."""
    while isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        if torch._C._functorch.is_batchedtensor(value):
            return None
        value = torch._C._functorch.get_unwrapped(value)
    return value


# Within it, tensors are made and read as outside of every torch.func transform.
without_func_transforms: Callable[[], Any] = torch._C._DisableFuncTorch


def current_graph_task() -> int:
    """Number of the backward that runs in this thread, -1 outside of one. Deeper backwards have greater numbers."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    return current_graph_task() != NO_GRAPH_TASK


def in_recomputation_hook() -> bool:
    """The newest saved-tensor hooks of this thread are those of a non-reentrant checkpoint's recompute."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    pack = hooks[0]
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint" and "_recomputation_hook" in getattr(
        pack, "__qualname__", ""
    )


# A dispatch key that nobody else uses, off unless a thread turns it on. torch keeps it for tests of its own; with the
# fallthrough below every operator but the one that we catch skips it at no cost.
_KEY_NAME = "TESTING_ONLY_GenericMode"
_KEY = torch._C._dispatch_key_parse(_KEY_NAME)
_libraries: list[torch.library.Library] = []


def catch_operators(kernels: dict[str, Callable[..., Any]]) -> None:
    """In threads that turned catching on, these are called for the operators of that name in ``aten``."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
    aten = torch.library.Library("aten", "IMPL")
    for name, kernel in kernels.items():
        aten.impl(name, kernel, _KEY_NAME)
    _libraries.extend((everything, aten))


def set_catching(on: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, on)


def is_catching() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_included(_KEY)


STOCK_SDPA: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention
NATIVE_MULTI_HEAD_ATTENTION: Callable[..., Any] = torch._native_multi_head_attention


def node_metadata(tensor: torch.Tensor) -> dict[str, Any] | None:
    """A dictionary that lives as long as the autograd node which made the tensor; None when there is none."""
    node = tensor.grad_fn
    return None if node is None else node.metadata  # type: ignore[return-value]


_FUNCTION_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def metadata_of_running_functions() -> Iterator[dict[str, Any] | None]:
    """As :func:`node_metadata`, of each torch.autograd.Function whose forward runs in this thread, innermost first.

    A forward's context is the node itself, made before the forward runs. None: a forward that is not given its context
    (one beside a ``setup_context``).
    """
    callee = None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTION_APPLY and callee is not None:
            context = _function_context(callee.f_locals.values())
            yield None if context is None else context.metadata
        callee, frame = frame, frame.f_back  # type: ignore[assignment]


def _function_context(values: Any) -> Any:
    for value in values:
        if isinstance(value, torch._C._FunctionBase):
            return value
        if isinstance(value, tuple) and value and isinstance(value[0], torch._C._FunctionBase):
            return value[0]  # of a decorated forward(*args)
    return None
