"""Every private torch name that this package uses, in one place; tests/python/test_torch_private.py tries each.

Written against torch 2.11 to 2.14. Names are looked up once, at import. Where one is missing the package still imports,
and what needs the name raises TorchChangedError when it is used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

NO_GRAPH_TASK = -1
JIT_TRACE = "torch.jit.trace"
TESTED_WITH = "2.11.0, 2.13.0 and 2.14.1"
# Where torch.nn.Module keeps its forward hooks, by number.
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
# By which names wrappers (activation checkpoints, FSDP, torch.compile) hold their module.
COMPILED_MODULE = "_orig_mod"
MODULE_WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", COMPILED_MODULE)


class TorchChangedError(RuntimeError):
    """This torch does not have a private name that something needs; the message names it and the cure."""

    def __init__(self, name: str, purpose: str) -> None:
        super().__init__(
            f"packed_sdpa: torch {torch.__version__} has no {name}, by which packed_sdpa {purpose}; install a torch "
            f"that it was tested with ({TESTED_WITH}), or a packed_sdpa that knows this one"
        )


def _at(path: str) -> Any:
    """What stands at a path below torch; None: nothing."""
    value: Any = torch
    for part in path.split(".")[1:]:
        value = getattr(value, part, None)
    return value


def _missing(*paths: str) -> str | None:
    return next((path for path in paths if _at(path) is None), None)


def memory_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """The tensor whose memory it is, itself or the one it is a view of, and how often that was changed in place; None:
    made in inference mode, where nobody counts."""
    owner = tensor if tensor._base is None else tensor._base
    return owner, None if tensor.is_inference() else tensor._version


def _names(purpose: str, *paths: str) -> Any:
    """What stands at each path; where one is missing, for each of them a function that raises."""
    missing = _missing(*paths)
    if missing is None:
        return [_at(path) for path in paths]

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise TorchChangedError(missing, purpose)

    return [refuse] * len(paths)


(_transforms_active,) = _names("sees torch.func transforms", "torch._C._are_functorch_transforms_active")


def in_func_transform() -> bool:
    """A torch.func transform (vmap, grad, jvp, ...) runs in this thread."""
    return _transforms_active()


(_jit_tracing_state,) = _names("sees torch.jit.trace", "torch._C._get_tracing_state")
_dispatch_mode, _PROXY = _names(
    "sees make_fx and torch.export", "torch._C._get_dispatch_mode", "torch._C._TorchDispatchModeKey.PROXY"
)


def tracer() -> str | None:
    """What records the operators that run now, to play them back without this Python code; None: nothing does.

    torch.compile is no such thing: it leaves out what is marked as not to be traced.
    """
    if _jit_tracing_state() is not None:
        return JIT_TRACE
    if torch.compiler.is_exporting():
        return "torch.export"
    if _dispatch_mode(_PROXY) is not None:
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
                (skip_code,) = _names("keeps its hooks out of torch.compile", "torch._dynamo.eval_frame.skip_code")
                skip_code(run.__code__)  # type: ignore[attr-defined]
                disabled = torch.compiler.disable(function, reason=reason)
            return disabled(*args, **kwargs)

        # What torch.compiler.disable puts on its functions: a call in a graph that is traced breaks it.
        run._torchdynamo_disable = True  # type: ignore[attr-defined]
        run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return run

    return decorate


TRACES_STR_SUBCLASSES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


@untraced(
    "packed_sdpa: torch.compile(fullgraph=True) of an attached Transformers layer needs torch 2.13 (2.11 cannot trace "
    "the attention's name in the config); compile it without fullgraph=True, or install torch 2.13"
)
def _break_graph() -> None:
    pass


def break_graph_unless_names_are_traced() -> None:
    """Before torch 2.13 torch.compile cannot trace a config whose attention's name is a subclass of str.

    Without fullgraph=True the layer then goes on behind the break; with it the error says why.
    """
    if not TRACES_STR_SUBCLASSES:
        _break_graph()


_is_wrapped, _is_batched, _unwrapped = _names(
    "reads arguments of torch.func transforms",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.is_batchedtensor",
    "torch._C._functorch.get_unwrapped",
)


def without_func_wrapper(value: Any) -> Any:
    """What a differentiating transform has wrapped; None for a tensor that vmap runs over."""
    while isinstance(value, torch.Tensor) and _is_wrapped(value):
        if _is_batched(value):
            return None
        value = _unwrapped(value)
    return value


# Within it, tensors are made and read as outside of every torch.func transform.
without_func_transforms: Callable[[], Any]
(without_func_transforms,) = _names("reads arguments of torch.func transforms", "torch._C._DisableFuncTorch")

_graph_task: Callable[[], int]
(_graph_task,) = _names("finds the documents of a recompute", "torch._C._current_graph_task_id")


def current_graph_task() -> int:
    """Number of the backward that runs in this thread, -1 outside of one. Deeper backwards have greater numbers."""
    return _graph_task()


def in_backward() -> bool:
    """This thread runs a backward: what runs in it is a recompute, or a fresh forward from a hook."""
    return current_graph_task() != NO_GRAPH_TASK


_SEES_RECOMPUTES = "sees a recompute outside of backward"
_CHECKPOINT = "torch.utils.checkpoint"
_RECOMPUTATION = "_recomputation_hook"
_top_hooks, _ = _names(
    _SEES_RECOMPUTES, "torch._C._autograd._top_saved_tensors_default_hooks", f"{_CHECKPOINT}.{_RECOMPUTATION}"
)


def in_recomputation_hook() -> bool:
    """The newest saved-tensor hooks of this thread are those of a non-reentrant checkpoint's recompute."""
    hooks = _top_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", None) != _CHECKPOINT:
        return False
    name = getattr(hooks[0], "__qualname__", "")
    if _RECOMPUTATION in name:
        return True
    if "_checkpoint_hook" in name:
        return False
    raise TorchChangedError(f"{_CHECKPOINT}.{_RECOMPUTATION} for {name}", _SEES_RECOMPUTES)


_CATCHES = "catches attention calls of hooked modules"
_SDPA = "torch._C._nn.scaled_dot_product_attention"
_FUSED = "torch._native_multi_head_attention"
STOCK_SDPA: Callable[..., torch.Tensor]
(STOCK_SDPA,) = _names(_CATCHES, _SDPA)
NATIVE_MULTI_HEAD_ATTENTION: Callable[..., Any]
(NATIVE_MULTI_HEAD_ATTENTION,) = _names(_CATCHES, _FUSED)

# A dispatch key that nobody else uses, off unless a thread turns it on. torch keeps it for tests of its own; with the
# fallthrough below every operator but the ones that we catch skips it at no cost.
_KEY_NAME = "TESTING_ONLY_GenericMode"
_PARSE = "torch._C._dispatch_key_parse"
_INCLUDE = "torch._C._dispatch_tls_set_dispatch_key_included"
_IS_INCLUDED = "torch._C._dispatch_tls_is_dispatch_key_included"
_FALLTHROUGH = "torch.library.fallthrough_kernel"
_libraries: list[torch.library.Library] = []


def _missing_for_catching() -> str | None:
    """All of it is there or nothing is caught: documents would leak through the calls that are not seen."""
    missing = _missing(_SDPA, _FUSED, _PARSE, _INCLUDE, _IS_INCLUDED, _FALLTHROUGH)
    if missing is None:
        try:
            _at(_PARSE)(_KEY_NAME)
        except RuntimeError:
            return f"dispatch key {_KEY_NAME}"
    return missing


_NOT_CAUGHT_FOR = _missing_for_catching()
if _NOT_CAUGHT_FOR is None:
    _KEY, _include, _is_included = _at(_PARSE)(_KEY_NAME), _at(_INCLUDE), _at(_IS_INCLUDED)
else:
    _KEY = None

    def _include(key: object, on: bool) -> None:
        if on:
            raise TorchChangedError(str(_NOT_CAUGHT_FOR), _CATCHES)

    def _is_included(key: object) -> bool:
        return False


def catch_operators(kernels: dict[str, Callable[..., Any]]) -> None:
    """In threads that turned catching on, these are called for the operators of that name in ``aten``."""
    if _NOT_CAUGHT_FOR is not None:
        return  # set_catching says why
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
    aten = torch.library.Library("aten", "IMPL")
    for name, kernel in kernels.items():
        aten.impl(name, kernel, _KEY_NAME)
    _libraries.extend((everything, aten))


def set_catching(on: bool) -> None:
    _include(_KEY, on)


def is_catching() -> bool:
    return _is_included(_KEY)


_KEEPS = "keeps documents until their backward"


def node_metadata(tensor: torch.Tensor) -> dict[str, Any] | None:
    """A dictionary that lives as long as the autograd node which made the tensor; None when there is none."""
    node = tensor.grad_fn
    return None if node is None else _metadata_of(node)


def _metadata_of(node: Any) -> dict[str, Any]:
    try:
        return node.metadata
    except AttributeError:
        raise TorchChangedError("torch.autograd.graph.Node.metadata", _KEEPS) from None


_forward_grad_enabled, _current_node, _Context = _names(
    _KEEPS, "torch._C._is_fwd_grad_enabled", "torch._C._current_autograd_node", "torch._C._FunctionBase"
)
# Before torch 2.14 a forward is called by this Python code; None: by C++, which leaves no frame.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def metadata_of_running_functions() -> Iterator[dict[str, Any] | None]:
    """As :func:`node_metadata`, of each torch.autograd.Function whose forward runs in this thread, innermost first.

    A forward's context is the node itself, made before the forward runs. None: one or more forwards that are not given
    their context (beside a ``setup_context``).
    """
    # Only a Function's forward and the inference mode turn forward-mode differentiation off.
    if _forward_grad_enabled() or torch.is_inference_mode_enabled():
        return
    found: list[Any] = []
    for context in _contexts_below_apply() if _APPLY is not None else _contexts_of_known_forwards():
        if all(other is not context for other in found):
            found.append(context)
    for context in found or [None]:
        yield None if context is None else _metadata_of(context)


# Both read f_locals of frames of forwards alone: it is a copy that lives as long as its frame, the training loop's too.


def _contexts_below_apply() -> Iterator[Any]:
    """What apply calls is the forward."""
    called: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY and called is not None:
            yield _function_context(called.f_locals.values())
        called, frame = frame, frame.f_back


def _contexts_of_known_forwards() -> Iterator[Any]:
    """Where apply leaves no frame, a forward is told by its code.

    A decorated one has its decorator's, which may stand around anything, a backward too. Without a context in it, it is
    none of a class whose forwards are given theirs.
    """
    codes: dict[CodeType, bool] = {}  # whether a forward of that code may be without its context
    for function in _subclasses(torch.autograd.Function):
        code = _code_of(function.forward)
        if code is not None:
            without = function.setup_context is not torch.autograd.Function.setup_context
            codes[code] = codes.get(code, False) or without
    in_backward_of = _current_node()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            context = _function_context(frame.f_locals.values())
            if context is None:
                if codes[frame.f_code]:
                    yield None
            elif context is not in_backward_of:
                yield context
        frame = frame.f_back


def _subclasses(of: Any) -> Iterator[Any]:
    subclass: Any
    for subclass in of.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _code_of(function: Any) -> CodeType | None:
    """Of the first frame that a call of it makes; None: it is not Python."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def _function_context(values: Any) -> Any:
    for value in values:
        if isinstance(value, tuple) and value:
            value = value[0]  # of a decorated forward(*args)
        if isinstance(value, _Context):
            return value
    return None


def metadata_of_current_function() -> dict[str, Any] | None:
    """As :func:`node_metadata`, of the torch.autograd.Function that is evaluated in this thread's backward, if any."""
    node = _current_node()
    return _metadata_of(node) if isinstance(node, _Context) else None
