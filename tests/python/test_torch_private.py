"""Says clearly when a torch release changed a private name that `_torch_private` uses."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from packed_sdpa import _torch_private, packed
from packed_sdpa._library import ops

CHANGED = f"torch {torch.__version__} changed something that packed_sdpa/_torch_private.py relies on: "


def test_graph_task_number():
    x = torch.ones(2, requires_grad=True)
    seen = []
    y = x * 2
    y.register_hook(lambda grad: seen.append(_torch_private.current_graph_task()))
    assert _torch_private.current_graph_task() == _torch_private.NO_GRAPH_TASK, CHANGED + "_current_graph_task_id"
    y.sum().backward()
    y = x * 2
    y.register_hook(lambda grad: seen.append(_torch_private.current_graph_task()))
    y.sum().backward()
    assert 0 <= seen[0] < seen[1], CHANGED + "graph task numbers must ascend"


def test_the_recomputation_hook_is_recognized():
    seen = []

    def region(x):
        seen.append(_torch_private.in_recomputation_hook())
        return x.tanh()

    x = torch.ones(2, requires_grad=True)
    assert not _torch_private.in_recomputation_hook()
    with torch.autograd.graph.save_on_cpu():
        assert not _torch_private.in_recomputation_hook()
    checkpoint(region, x, use_reentrant=False).sum().backward()
    assert seen == [False, True], CHANGED + "the name of torch.utils.checkpoint._recomputation_hook"


def test_other_hooks_of_checkpoints_are_refused():
    def pack(x):
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert not _torch_private.in_recomputation_hook()
    pack.__module__ = "torch.utils.checkpoint"
    why = r"torch 2\S+ has no torch.utils.checkpoint._recomputation_hook for test_other.*pack, .* install a torch that"
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, pack),
        pytest.raises(_torch_private.TorchChangedError, match=why),
    ):
        _torch_private.in_recomputation_hook()


def test_the_dispatch_key():
    x = torch.randn(1, 1, 3, 4)
    assert packed  # its import registers the key's kernels
    assert not _torch_private.is_catching()
    _torch_private.set_catching(True)
    try:
        assert _torch_private.is_catching(), CHANGED + "_dispatch_tls_set_dispatch_key_included"
        (x + x).sum()  # every other operator skips the key
        out = F.scaled_dot_product_attention(x, x, x)  # outside of hooked modules: passed on
    finally:
        _torch_private.set_catching(False)
    assert torch.equal(out, F.scaled_dot_product_attention(x, x, x)), CHANGED + "dispatch keys"


def test_metadata_lives_with_the_node():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    metadata = _torch_private.node_metadata(y)
    assert metadata is not None, CHANGED + "Node.metadata"
    metadata["packed_sdpa_test"] = 1
    assert _torch_private.node_metadata(y) == {"packed_sdpa_test": 1}, CHANGED + "Node.metadata"
    assert _torch_private.node_metadata(x) is None


@pytest.fixture(params=["as this torch does", "leaves no frame"])
def apply_calls_forwards(request, monkeypatch):
    """torch.autograd.Function.apply is Python before torch 2.14; from there on it is C++, and both are the same."""
    if request.param == "leaves no frame":
        monkeypatch.setattr(_torch_private, "_APPLY", None)


def test_the_metadata_of_functions_whose_forward_runs(apply_calls_forwards):
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, inner):
            if inner is not None:
                return inner.apply(x, None)
            for metadata in _torch_private.metadata_of_running_functions():
                if metadata is not None:
                    metadata["packed_sdpa_test"] = len(seen)
                seen.append(metadata is not None)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    class Decorated(Function):
        forward = staticmethod(torch.amp.custom_fwd(Function.forward, device_type="cpu"))

    class Partial(Function):
        forward = staticmethod(functools.partial(Function.forward))

    class WithoutContext(Function):
        forward = staticmethod(lambda x, inner: Function.forward(None, x, inner))
        setup_context = staticmethod(lambda ctx, inputs, output: None)

    x = torch.ones(2, requires_grad=True)
    assert list(_torch_private.metadata_of_running_functions()) == []
    for outer, inner, found, number in (
        (Function, None, [True], 0),
        (Decorated, None, [True], 0),
        (Partial, None, [True], 0),
        (Function, Decorated, [True, True], 1),
        (Function, Function, [True, True], 1),
        (WithoutContext, None, [False], None),
        (Function, WithoutContext, [False, True], 1),
    ):
        seen.clear()
        y = outer.apply(x, inner)
        assert seen == found, CHANGED + "forwards get their context, with forward-mode differentiation off"
        metadata = _torch_private.node_metadata(y)
        assert metadata.get("packed_sdpa_test") == number, CHANGED + "a forward's context is its node"
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert list(_torch_private.metadata_of_running_functions()) == []


@pytest.mark.parametrize("boxed", [False, True])
def test_a_function_whose_backward_runs_is_not_one_whose_forward_runs(boxed, apply_calls_forwards):
    """A forward without a context within a backward with one, as of a checkpoint within a recompute."""
    seen = []

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(x):
            seen.extend(_torch_private.metadata_of_running_functions())
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Outer(torch.autograd.Function):
        boxed_grads_call = boxed  # torch 2.14

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grads):
            grad = grads[0] if isinstance(grads, list) else grads
            assert list(_torch_private.metadata_of_running_functions()) == []
            with torch.enable_grad():
                Inner.apply(torch.ones(2, requires_grad=True))
            return grad * 2

    Outer.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [None], CHANGED + "how a forward is told from a backward"


def test_a_decorator_of_a_forward_may_stand_around_others(apply_calls_forwards):
    """Around what calls an apply, and around the backward in which one is called."""
    seen = []

    class Inner(torch.autograd.Function):
        @staticmethod
        @torch.enable_grad()
        def forward(ctx, x):
            metadata = list(_torch_private.metadata_of_running_functions())
            metadata[0]["packed_sdpa_test"] = 1
            seen.append(len(metadata))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.enable_grad()
        def backward(ctx, grad):
            assert "packed_sdpa_test" in _torch_private.node_metadata(Inner.apply(torch.ones(2, requires_grad=True)))
            assert "packed_sdpa_test" not in ctx.metadata
            return grad * 2

    @torch.enable_grad()
    def evaluation():
        return Outer.apply(Inner.apply(torch.ones(2, requires_grad=True)))

    evaluation().sum().backward()
    assert seen == [1, 1]


def test_modules_keep_their_hooks_where_we_look():
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    kept = [name for name, value in vars(module).items() if "forward" in name and isinstance(value, dict) and value]
    assert sorted(kept) == sorted(_torch_private.MODULE_HOOKS), CHANGED + "hooks of torch.nn.Module"


def test_whose_memory_a_tensor_is_and_how_often_it_was_changed():
    tensor = torch.zeros(4)
    owner, version = _torch_private.memory_of(tensor[1:][:2])
    assert owner is tensor and _torch_private.memory_of(tensor) == (tensor, version), CHANGED + "Tensor._base"
    tensor[0] = 1
    assert _torch_private.memory_of(tensor[1:])[1] == version + 1, CHANGED + "Tensor._version"
    with torch.inference_mode():
        assert _torch_private.memory_of(torch.zeros(4))[1] is None


def test_wrappers_hold_their_module_by_the_names_we_know():
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
    from torch.distributed.fsdp import _common_utils

    wrapped = torch.compile(nn.Linear(2, 2), backend="eager")
    names = (checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE, _common_utils.FSDP_WRAPPED_MODULE)
    assert names == _torch_private.MODULE_WRAPPERS[:2], CHANGED + "names of wrappers"
    assert isinstance(getattr(wrapped, _torch_private.COMPILED_MODULE), nn.Linear), CHANGED + "names of wrappers"


def test_sequence_numbers_count_nodes():
    """What the timeline stands on: public in C++, but not promised."""
    x = torch.ones(2, requires_grad=True)
    thread, first = ops.this_place()
    y = x * 2
    z = y * 3
    assert ops.this_place() == (thread, first + 2), CHANGED + "one autograd sequence number a node"
    assert (y.grad_fn._sequence_nr(), z.grad_fn._sequence_nr()) == (first, first + 1), CHANGED + "sequence numbers"
    assert z.grad_fn.name() == "MulBackward0", CHANGED + "operators' nodes have a number at the end of their name"


def test_a_python_function_is_made_before_its_forward_runs():
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(ops.this_place()[1])
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    y = Twice.apply(torch.ones(2, requires_grad=True))
    assert y.grad_fn._sequence_nr() == seen[0] - 1, CHANGED + "when a Python function's node is made"
    assert y.grad_fn.name() == "TwiceBackward", CHANGED + "names of Python functions' nodes"


def test_tracers_are_told_apart():
    seen = []

    def function(x):
        seen.append(_torch_private.tracer())
        return x * 2

    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    x = torch.ones(2)
    function(x)
    assert seen == [None]
    for name, trace in {
        "make_fx": lambda: make_fx(function)(x),
        "torch.export": lambda: torch.export.export(Module(), (x,), strict=False),
        "torch.jit.trace": lambda: torch.jit.trace(function, (x,), check_trace=False),
    }.items():
        seen.clear()
        trace()
        assert set(seen) == {name}, CHANGED + f"how {name} is told"
    seen.clear()
    function(x)
    assert seen == [None]


def test_func_transforms_are_told_and_taken_off():
    seen = []

    def function(x, ids):
        seen.append(_torch_private.in_func_transform())
        seen.append(_torch_private.without_func_wrapper(ids))
        with _torch_private.without_func_transforms():
            seen.append(type(torch.arange(3) + 1))
        return x.sum()

    x, ids = torch.ones(2), torch.ones(2, 3)
    function(x, ids)
    assert seen[0] is False and seen[1] is ids, CHANGED + "_are_functorch_transforms_active"
    seen.clear()
    torch.func.grad(lambda x: function(x, x))(x)
    assert seen[0] is True and seen[1] is x, CHANGED + "get_unwrapped"
    assert seen[2] is torch.Tensor, CHANGED + "_DisableFuncTorch"
    seen.clear()
    torch.func.vmap(lambda ids: function(x, ids))(ids)
    assert seen[:2] == [True, None], CHANGED + "is_batchedtensor"


def test_what_is_marked_is_not_traced():
    import torch._dynamo

    seen = []

    @_torch_private.untraced("the reason that is told")
    def function(x):
        seen.append(torch.compiler.is_dynamo_compiling())
        return x * len(seen)

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x + 1) + 1, backend="eager")
    x = torch.ones(2)
    assert [compiled(x).tolist() for _ in range(3)] == [[3, 3], [5, 5], [7, 7]], CHANGED + "torch.compiler.disable"
    assert seen == [False, False, False]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the reason that is told"):
        torch.compile(lambda x: function(x + 1), backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


def test_importing_the_package_imports_no_dynamo():
    asked = "import sys, packed_sdpa; print('torch._dynamo' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert answer == "False\n"


# ---- a torch that has one of the names no longer


def without(monkeypatch, *paths: str) -> ModuleType:
    """`_torch_private`, as it comes out where torch lacks these names."""
    spec = importlib.util.spec_from_file_location("torch_private_without", _torch_private.__file__)
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        for path in paths:
            *parents, name = path.split(".")[1:]
            patch.delattr(functools.reduce(getattr, parents, torch), name)
        spec.loader.exec_module(module)
    return module


def transforms(private):
    assert private.in_func_transform() is False


def tracers(private):
    assert private.tracer() is None


def unwrapping(private):
    x = torch.ones(2)
    assert private.without_func_wrapper(x) is x


def leaving_transforms(private):
    with private.without_func_transforms():
        pass


def graph_tasks(private):
    assert private.current_graph_task() == private.NO_GRAPH_TASK


def recomputes(private):
    assert private.in_recomputation_hook() is False


def catching(private):
    private.set_catching(True)
    assert private.is_catching()
    private.set_catching(False)


def keeping(private):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            (metadata,) = private.metadata_of_running_functions()
            metadata["packed_sdpa_test"] = 1
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert private.metadata_of_current_function()["packed_sdpa_test"] == 1
            return grad

    out = Function.apply(torch.ones(2, requires_grad=True))
    assert private.node_metadata(out)["packed_sdpa_test"] == 1
    out.sum().backward()
    assert private.metadata_of_current_function() is None


NEEDED_FOR = {
    "torch._C._are_functorch_transforms_active": transforms,
    "torch._C._get_tracing_state": tracers,
    "torch._C._get_dispatch_mode": tracers,
    "torch._C._TorchDispatchModeKey": tracers,
    "torch._C._functorch.is_functorch_wrapped_tensor": unwrapping,
    "torch._C._functorch.is_batchedtensor": unwrapping,
    "torch._C._functorch.get_unwrapped": unwrapping,
    "torch._C._DisableFuncTorch": leaving_transforms,
    "torch._C._current_graph_task_id": graph_tasks,
    "torch._C._autograd._top_saved_tensors_default_hooks": recomputes,
    "torch.utils.checkpoint._recomputation_hook": recomputes,
    "torch._C._dispatch_key_parse": catching,
    "torch._C._dispatch_tls_set_dispatch_key_included": catching,
    "torch._C._dispatch_tls_is_dispatch_key_included": catching,
    "torch.library.fallthrough_kernel": catching,
    "torch._C._nn.scaled_dot_product_attention": catching,
    "torch._native_multi_head_attention": catching,
    "torch._C._is_fwd_grad_enabled": keeping,
    "torch._C._current_autograd_node": keeping,
    "torch._C._FunctionBase": keeping,
}


def told(name: str) -> str:
    """The whole message."""
    return (
        rf"^packed_sdpa: torch {re.escape(torch.__version__)} has no {re.escape(name)}[\w.]*, "
        r"by which packed_sdpa [^;]+; install a torch that it was tested with \(2\.[^;]*\), "
        r"or a packed_sdpa that knows this one$"
    )


@pytest.mark.parametrize("name", NEEDED_FOR)
def test_a_missing_name_is_told_where_it_is_needed_and_nowhere_else(monkeypatch, name):
    private = without(monkeypatch, name)
    needs_it = NEEDED_FOR[name]
    with pytest.raises(private.TorchChangedError, match=told(name)):
        needs_it(private)
    for other in dict.fromkeys(NEEDED_FOR.values()):
        if other is not needs_it:
            other(private)
    if needs_it is catching:  # what cannot be turned on is off, and can be left
        private.catch_operators({})
        assert private.is_catching() is False
        private.set_catching(False)
    for function in (private.STOCK_SDPA, private.NATIVE_MULTI_HEAD_ATTENTION):
        assert callable(function)


def test_a_dispatch_key_that_is_gone_is_told(monkeypatch):
    def parse(name):
        raise RuntimeError(f"could not parse dispatch key: {name}")

    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_dispatch_key_parse", parse)
        private = without(monkeypatch)
    with pytest.raises(private.TorchChangedError, match=told("dispatch key TESTING_ONLY_GenericMode")):
        catching(private)


def test_missing_metadata_is_told():
    with pytest.raises(_torch_private.TorchChangedError, match=told("torch.autograd.graph.Node.metadata")):
        _torch_private.node_metadata(SimpleNamespace(grad_fn=object()))


def test_a_missing_skip_code_is_told(monkeypatch):
    import torch._dynamo

    monkeypatch.delattr(torch._dynamo.eval_frame, "skip_code")
    with pytest.raises(_torch_private.TorchChangedError, match=told("torch._dynamo.eval_frame.skip_code")):
        _torch_private.untraced("for the test")(abs)(-1)


WITHOUT = """
import functools, sys
import torch

taken = []
for path in sys.argv[1:]:
    *parents, name = path.split(".")[1:]
    parent = functools.reduce(getattr, parents, torch)
    taken.append((parent, name, parent.__dict__[name]))
    delattr(parent, name)
import packed_sdpa
from packed_sdpa._torch_private import TorchChangedError

for parent, name, value in taken:  # torch itself needs them
    setattr(parent, name, value)

x = torch.randn(1, 2, 3, 4, requires_grad=True)
doc_ids = torch.tensor([[1, 1, 2]])
packed = packed_sdpa.packed_attention(x, x, x, packed_sdpa.PackedLayout.from_doc_ids(doc_ids))
packed.sum().backward()


class Attention(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()

    def forward(self, x, doc_ids=None):
        return self.self_attn(x)


stock = torch.nn.functional.scaled_dot_product_attention
model = Model()
plain = model(x)
handle = packed_sdpa.attach(model)
for grad in (True, False):
    with torch.set_grad_enabled(grad):
        try:
            assert torch.equal(model(x, doc_ids=doc_ids), packed)
            print("right")
        except TorchChangedError as error:
            print(error)
    assert torch.nn.functional.scaled_dot_product_attention is stock
handle.detach()
assert torch.equal(model(x), plain)
"""


@pytest.mark.parametrize(
    "names, with_grad, without_grad",
    [
        (list(NEEDED_FOR), told("torch._C._get_tracing_state"), told("torch._C._get_tracing_state")),
        (["torch._C._FunctionBase"], "right", told("torch._C._FunctionBase")),
    ],
    ids=["none", "no contexts"],
)
def test_without_names_the_package_imports_and_no_output_is_wrong(names, with_grad, without_grad):
    done = subprocess.run([sys.executable, "-c", WITHOUT, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert re.match(with_grad, first), first
    assert re.match(without_grad, second), second
