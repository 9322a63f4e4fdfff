"""Says clearly when a torch release changed a private name that `_torch_private` uses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
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


def test_the_metadata_of_functions_whose_forward_runs():
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

    class WithoutContext(Function):
        forward = staticmethod(lambda x, inner: Function.forward(None, x, inner))
        setup_context = staticmethod(lambda ctx, inputs, output: None)

    x = torch.ones(2, requires_grad=True)
    assert list(_torch_private.metadata_of_running_functions()) == []
    for outer, inner, found, number in (
        (Function, None, [True], 0),
        (Decorated, None, [True], 0),
        (Function, Decorated, [True, True], 1),
        (WithoutContext, None, [False], None),
        (Function, WithoutContext, [False, True], 1),
    ):
        seen.clear()
        y = outer.apply(x, inner)
        assert seen == found, CHANGED + "torch.autograd.Function.apply calls forward"
        metadata = _torch_private.node_metadata(y)
        assert metadata.get("packed_sdpa_test") == number, CHANGED + "a forward's context is its node"
    assert list(_torch_private.metadata_of_running_functions()) == []


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
