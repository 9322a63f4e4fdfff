"""torch.compile and tracers: never a graph that keeps the documents of the batch that it was made with."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import packed_sdpa
from oracle import dense_attention, random_inputs
from packed_models import STOCK, Model, assert_gradients
from packed_sdpa import _torch_private
from packed_sdpa.packed import (
    _packed_varlen_sdpa,
    attach_cp1_packed_varlen_hooks,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
)

SPLITS = [
    torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]]),
    torch.tensor([[1, 2, 2, 2, 2, 3, 3, 0]]),
    None,  # unarmed
    torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]),
    torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]]),
]


@pytest.fixture(autouse=True)
def as_found():
    torch._dynamo.reset()
    disable_cp1_packed_varlen()
    yield
    disable_cp1_packed_varlen()
    torch._dynamo.reset()


def arm(doc_ids):
    if doc_ids is None:
        disable_cp1_packed_varlen()
    else:
        enable_cp1_packed_varlen(doc_ids, "flash")


def batch(seed):
    return torch.randn(1, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_model(model, run):
    """Outputs and gradients of other documents, with one compiled model."""
    for seed, doc_ids in enumerate(SPLITS):
        x = batch(seed)
        model.zero_grad()
        expected = model.reference(x, doc_ids)
        expected.square().sum().backward()
        right = model.gradients()
        model.zero_grad()
        arm(doc_ids)
        out = run(x)
        disable_cp1_packed_varlen()
        out.square().sum().backward()
        torch.testing.assert_close(out, expected)
        assert_gradients(model.gradients(), right, f"documents {seed}")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["none", "non_reentrant", "reentrant"])
def test_a_hooked_seed_model_breaks_the_graph_and_stays_right(kind, backend):
    model = Model(kind)
    attach_cp1_packed_varlen_hooks(model)
    check_model(model, torch.compile(model, backend=backend))
    assert F.scaled_dot_product_attention is STOCK


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["layer", "self_attn", "wrapped self_attn"])
def test_a_part_that_is_compiled_before_or_after_it_is_hooked(what, when):
    model = Model("none")
    if when == "after":
        attach_cp1_packed_varlen_hooks(model)
    for layer in model.layers:
        if what == "wrapped self_attn":
            layer.self_attn = torch.compile(layer.self_attn, backend="aot_eager")
        else:
            (layer if what == "layer" else layer.self_attn).compile(backend="aot_eager")
    if when == "before":
        attach_cp1_packed_varlen_hooks(model)
    check_model(model, model)
    assert F.scaled_dot_product_attention is STOCK


def test_a_hooked_seed_model_in_one_graph_is_refused():
    model = Model("none")
    attach_cp1_packed_varlen_hooks(model)
    enable_cp1_packed_varlen(SPLITS[0], "flash")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"finds the documents of a hooked attention module"):
        compiled(batch(0))
    assert F.scaled_dot_product_attention is STOCK


def test_the_seed_function_in_a_compiled_function():
    query, key, value = random_inputs(SPLITS[0], torch.float64)

    def function(q):
        return _packed_varlen_sdpa(q * 2, key, value, enable_gqa=True, is_causal=True) * 3

    compiled = torch.compile(function, backend="aot_eager")
    for doc_ids in SPLITS:
        ours, theirs = (query.clone().requires_grad_() for _ in range(2))
        arm(doc_ids)
        out = compiled(ours)
        disable_cp1_packed_varlen()
        ids = torch.ones(1, 8) if doc_ids is None else doc_ids
        right = dense_attention(theirs * 2, key, value, ids) * 3
        torch.testing.assert_close(out, right)
        got = torch.autograd.grad(out.square().sum(), ours)
        torch.testing.assert_close(got, torch.autograd.grad(right.square().sum(), theirs))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_packed_varlen_sdpa finds the armed documents"):
        torch.compile(function, backend="eager", fullgraph=True)(query)


# ---- tracers: they would keep the documents of one batch


TRACERS = {
    "make_fx": lambda function, x: make_fx(function)(x),
    "torch.export": lambda function, x: torch.export.export(
        function if isinstance(function, torch.nn.Module) else Calls(function), (x,)
    ),
    "torch.jit.trace": lambda function, x: torch.jit.trace(function, (x,), check_trace=False),
}


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def by_the_seed_function(x):
    return _packed_varlen_sdpa(x, x, x)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("what", ["function", "model"])
def test_tracers_are_refused_while_documents_are_armed(what, tracer):
    if what == "function":
        function, x = by_the_seed_function, torch.randn(1, 2, 8, 4, dtype=torch.float64)
    else:
        function, x = Model("none"), batch(0)
        attach_cp1_packed_varlen_hooks(function)
    if tracer != "torch.jit.trace":
        traced = TRACERS[tracer](function, x)  # unarmed: stock
        traced = traced.module() if tracer == "torch.export" else traced
        torch.testing.assert_close(traced(x), function(x))
    enable_cp1_packed_varlen(SPLITS[0], "flash")
    why = "whose graph would keep these documents .*; trace the model"
    if tracer == "torch.jit.trace":
        why = r"which cannot call the operators that find documents; trace copy\.deepcopy\(model\)"
    with pytest.raises(RuntimeError, match=rf"{tracer}, {why}"):
        TRACERS[tracer](function, x)
    assert F.scaled_dot_product_attention is STOCK


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize("route", ["hooks", "interface"])
def test_tracers_are_refused_for_an_attached_model_that_may_have_documents(route):
    pytest.importorskip("transformers")
    from hf_models import ARCHITECTURES, packed_batch

    model = ARCHITECTURES["llama"].make(num_hidden_layers=1).eval()
    arguments = {**packed_batch(), "use_cache": False}
    stock = model(**arguments).logits
    refused = r"an attached LlamaForCausalLM may have documents \(position_ids\) in torch\.export, whose graph would"
    with packed_sdpa.attach(model, route=route), pytest.raises(RuntimeError, match=refused):
        torch.export.export(model, (), arguments, strict=False)
    assert torch.equal(model(**arguments).logits, stock)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize("armed", [False, True])
def test_jit_trace_of_an_attached_model_says_what_to_trace(armed):
    model, x = Model("none"), batch(0)
    stock = model(x)
    with packed_sdpa.attach(model, documents=None):
        if armed:
            packed_sdpa.arm(SPLITS[0])
        with pytest.raises(
            RuntimeError, match=r"torch\.jit\.trace, which cannot call .*; trace copy\.deepcopy\(model\)"
        ):
            torch.jit.trace(model, (x,), check_trace=False)
        packed_sdpa.disarm()
        traced = torch.jit.trace(copy.deepcopy(model), (x,), check_trace=False)
    torch.testing.assert_close(traced(x), stock)


def test_the_name_alone_is_not_exported_with_documents():
    """A Transformers model that uses our attention by its name, without attach."""
    pytest.importorskip("transformers")
    from hf_models import ARCHITECTURES, packed_batch
    from packed_sdpa import hf

    hf.register_hf_attention()
    model = ARCHITECTURES["llama"].make(num_hidden_layers=1).eval()
    model.set_attn_implementation(hf.IMPLEMENTATION)
    tokens = packed_batch()["input_ids"]

    def logits(ids):
        return model(input_ids=ids, use_cache=False).logits

    packed_sdpa.arm(torch.ones_like(tokens))
    with pytest.raises(RuntimeError, match=r"may have documents \(.*the armed doc_ids\) in torch\.export, whose graph"):
        TRACERS["torch.export"](logits, tokens)


def test_our_own_frames_are_no_frames_of_dynamo():
    """All functions that are kept from being traced share one wrapper, which would overflow dynamo's cache."""
    model = Model("none")
    with packed_sdpa.attach(model):
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            compiled(batch(0), doc_ids=SPLITS[0])
    wrapper = _torch_private.untraced("for the test")(abs)
    assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(wrapper.__code__)


# ---- a whole Transformers model


def splits(count, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for round_ in range(count):
        cuts = torch.randperm(tokens - 1, generator=generator)[: 1 + round_ % 5].add(1).sort().values.tolist()
        yield tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", ["model", "layer"])
def test_a_compiled_transformers_model(part, backend):
    """20 batches with other splits: logits and gradients of each document alone, at most 2 compilations of a graph."""
    pytest.importorskip("transformers")
    from hf_models import ARCHITECTURES, each_alone, gradients, packed_batch, worst

    model = ARCHITECTURES["llama"].make(num_hidden_layers=1)
    stock = ARCHITECTURES["llama"].make(num_hidden_layers=1)
    stock.load_state_dict(model.state_dict())
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    with packed_sdpa.attach(model, strict=True):
        if part == "layer":
            model.model.layers[0].compile(fullgraph=True, backend=counter)
            run = model
            if not _torch_private.TRACES_STR_SUBCLASSES:
                with pytest.raises(torch._dynamo.exc.Unsupported, match=r"needs torch 2.13 .* without fullgraph=True"):
                    run(**packed_batch(), use_cache=False)
                return
        else:
            run = torch.compile(model, backend=counter)
        graphs = 0
        for round_, lengths in enumerate(splits(20, 30)):
            data = packed_batch(lengths, seed=round_)
            logits = run(**data, use_cache=False).logits
            expected = each_alone(stock, data, lengths)
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
            # Transformers' norms and rotary embeddings are float32; inductor sums them in another order.
            bound = 1e-10 if backend == "aot_eager" else 1e-5
            assert worst(gradients(model, logits), gradients(stock, expected)) < bound
            graphs = graphs or counter.frame_count
    assert 0 < counter.frame_count <= 2 * graphs
    if part == "layer":
        assert graphs == 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_torch_that_cannot_trace_the_name_breaks_the_graph(monkeypatch, fullgraph):
    """Or says why there can be none with fullgraph=True; as before torch 2.13."""
    pytest.importorskip("transformers")
    from hf_models import ARCHITECTURES, each_alone, packed_batch

    monkeypatch.setattr(_torch_private, "TRACES_STR_SUBCLASSES", False)
    model = ARCHITECTURES["llama"].make(num_hidden_layers=1)
    data = packed_batch((3, 4))
    expected = each_alone(model, data, (3, 4))
    model.model.layers[0].compile(fullgraph=fullgraph, backend="aot_eager")
    with packed_sdpa.attach(model, strict=True):
        if fullgraph:
            with pytest.raises(torch._dynamo.exc.Unsupported, match=r"needs torch 2.13 .* without fullgraph=True"):
                model(**data, use_cache=False)
        else:
            logits = model(**data, use_cache=False).logits
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("route", ["hooks", "interface"])
def test_no_code_of_ours_becomes_a_graph_of_its_own(route):
    """What finds documents runs anew each time; only the attention call within a layer is part of a graph."""
    pytest.importorskip("transformers")
    from hf_models import ARCHITECTURES, packed_batch

    begins = []

    def backend(graph, _):
        traces = [node.stack_trace for node in graph.graph.nodes if node.stack_trace]
        begins.extend(trace.strip().split("\n")[0] for trace in traces)
        return graph.forward

    model = ARCHITECTURES["llama"].make(num_hidden_layers=1)
    with packed_sdpa.attach(model, route=route, strict=True):
        compiled = torch.compile(model, backend=backend)
        for seed, lengths in enumerate(((5, 20), (10, 10, 5), (25,))):
            compiled(**packed_batch(lengths, seed=seed), use_cache=False)
    assert begins and not [place for place in begins if "/packed_sdpa/" in place]
