"""torch.func, forward-mode and second derivatives: right, or refused by name before anything changes."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn

import packed_sdpa
from oracle import dense_attention, random_inputs
from packed_models import STOCK, Model
from packed_sdpa import PackedLayout, packed_attention, varlen_attention
from packed_sdpa.hooks import hooks_of
from packed_sdpa.packed import (
    _PACKED_STATE,
    _packed_varlen_sdpa,
    attach_cp1_packed_varlen_hooks,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
)

IDS = torch.tensor([[1, 1, 1, 2, 2, 0, 3, 3]])
LAYOUT = PackedLayout.from_doc_ids(IDS)
INSTEAD = r"use loss\.backward\(\) or torch\.autograd\.grad"


@pytest.fixture(autouse=True)
def disarmed():
    disable_cp1_packed_varlen()
    yield
    disable_cp1_packed_varlen()


OPERANDS = random_inputs(IDS, torch.float64, heads=2, kv_heads=2, head_dim=4)


def operands():
    return tuple(operand.clone() for operand in OPERANDS)


def by_packed_attention(query):
    _, key, value = operands()
    return packed_attention(query, key, value, LAYOUT)


def by_varlen_attention(query):
    _, key, value = (part[0].transpose(0, 1) for part in operands())
    offsets = torch.tensor([0, 3, 5, 8])
    with torch._C._DisableFuncTorch():  # offsets are read outside of the transform
        layout = PackedLayout.from_cu_seqlens(offsets, offsets, 8, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedLayout, "from_cu_seqlens", staticmethod(lambda *_: layout))
        return varlen_attention(query[0].transpose(0, 1), key, value, offsets, offsets)


def dual(function, query):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(query, torch.ones_like(query)))


FUNC = {
    "grad": lambda function, query: torch.func.grad(lambda q: function(q).sum())(query),
    "vjp": lambda function, query: torch.func.vjp(function, query),
    "jvp": lambda function, query: torch.func.jvp(function, (query,), (query,)),
    "jacrev": lambda function, query: torch.func.jacrev(function)(query),
    "jacfwd": lambda function, query: torch.func.jacfwd(function)(query),
    "hessian": lambda function, query: torch.func.hessian(lambda q: function(q).sum())(query),
    "vmap of grad": lambda function, query: torch.func.vmap(torch.func.grad(lambda q: function(q).sum()))(query[None]),
}
FORWARD_MODE = {
    "dual": dual,
    "dual with a graph": lambda function, query: dual(function, query.requires_grad_()),
    "functional.jacobian": lambda function, query: torch.autograd.functional.jacobian(
        function, query, strategy="forward-mode", vectorize=True
    ),
}


@pytest.mark.parametrize("transform", FUNC)
@pytest.mark.parametrize("function", [by_packed_attention, by_varlen_attention])
def test_differentiating_transforms_are_refused(function, transform):
    with pytest.raises(
        NotImplementedError, match=rf"varlen_attention does not support torch\.func transforms that diff.*{INSTEAD}"
    ):
        FUNC[transform](function, operands()[0])


@pytest.mark.parametrize("transform", FORWARD_MODE)
@pytest.mark.parametrize("function", [by_packed_attention, by_varlen_attention])
def test_forward_mode_is_refused(function, transform):
    with pytest.raises(NotImplementedError, match=rf"varlen_attention does not support forward-mode .*{INSTEAD}"):
        FORWARD_MODE[transform](function, operands()[0])


@pytest.mark.parametrize("function", [by_packed_attention, by_varlen_attention])
def test_second_derivatives_are_refused(function):
    query = operands()[0].requires_grad_()
    (gradient,) = torch.autograd.grad(function(query).square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of varlen_attention is not supported; call back"):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match="second derivative of varlen_attention is not supported"):
        torch.autograd.functional.hessian(lambda q: function(q).square().sum(), query.detach())


def test_forward_mode_over_backward_is_refused():
    query = operands()[0].requires_grad_()
    out = by_packed_attention(query)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="the gradient of varlen_attention does not support forward-mode"),
    ):
        torch.autograd.grad(out, query, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_vmap_is_a_loop():
    queries = torch.stack([operands()[0], operands()[0].flip(2)]).requires_grad_()
    _, key, value = operands()
    out = torch.func.vmap(by_packed_attention)(queries)
    expected = torch.stack([dense_attention(query, key, value, IDS) for query in queries])
    torch.testing.assert_close(out, expected)
    got = torch.autograd.grad(out.square().sum(), queries)
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), queries))


def test_batched_gradients():
    """vmap over the backward pass alone."""
    query, key, value = operands()
    got = torch.autograd.functional.jacobian(by_packed_attention, query, vectorize=True)
    expected = torch.autograd.functional.jacobian(lambda q: dense_attention(q, key, value, IDS), query)
    torch.testing.assert_close(got, expected)


def test_ids_are_read_outside_of_transforms():
    query = operands()[0]
    cannot = r"doc_ids cannot be read within a torch\.func transform .*make the layout, or arm, outside of it"
    with pytest.raises(NotImplementedError, match=cannot):
        torch.func.grad(lambda q: (PackedLayout.from_doc_ids(IDS), q.sum())[1])(query)
    with pytest.raises(NotImplementedError, match="seqlens cannot be read within a torch"):
        torch.func.grad(lambda q: (PackedLayout.from_seqlens(torch.tensor([8])), q.sum())[1])(query)
    for name in ("doc_ids", "position_ids"):
        make = getattr(PackedLayout, f"from_{name}")
        with pytest.raises(NotImplementedError, match=rf"layout_from_{name} cannot read ids that torch\.func\.vmap"):
            torch.func.vmap(lambda ids, make=make: (make(ids), ids)[1])(IDS[None])
    packed_sdpa.arm(IDS)
    before = _PACKED_STATE.get()
    for armed in (packed_sdpa.arm, lambda ids: enable_cp1_packed_varlen(ids, "flash")):
        with pytest.raises(NotImplementedError, match=cannot):
            torch.func.vmap(lambda ids, armed=armed: (armed(ids), ids)[1])(IDS[None])
    assert _PACKED_STATE.get() is before


ALL_FUNC = {**FUNC, "vmap": lambda function, query: torch.func.vmap(function)(query[None])}
SEED = r"scaled_dot_product_attention was called with armed documents within a torch\.func transform .*" + INSTEAD


@pytest.mark.parametrize("transform", ALL_FUNC)
def test_the_armed_seed_function_refuses_transforms(transform):
    query, key, value = operands()

    def function(q):
        return _packed_varlen_sdpa(q, key, value, is_causal=True)

    def stock(q):
        return STOCK(q, key, value, is_causal=True)

    if transform in ("grad", "jacrev", "vmap"):  # unarmed: stock, which takes these
        got = ALL_FUNC[transform](function, query)
        torch.testing.assert_close(got, ALL_FUNC[transform](stock, query))
    enable_cp1_packed_varlen(IDS, "flash")
    with pytest.raises(NotImplementedError, match=SEED):
        ALL_FUNC[transform](function, query)


def test_the_armed_seed_function_refuses_forward_mode_and_second_derivatives():
    query, key, value = operands()
    enable_cp1_packed_varlen(IDS, "flash")
    with pytest.raises(NotImplementedError, match="varlen_attention does not support forward-mode"):
        dual(lambda q: _packed_varlen_sdpa(q, key, value), query)
    query.requires_grad_()
    out = _packed_varlen_sdpa(query, key, value)
    (gradient,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of varlen_attention is not supported"):
        gradient.sum().backward()


def test_a_seed_model_under_transforms():
    model = Model("none")
    attach_cp1_packed_varlen_hooks(model)
    parameters = dict(model.named_parameters())
    x = torch.randn(1, IDS.shape[1], 16, dtype=torch.float64)

    def loss(changed):
        return torch.func.functional_call(model, changed, (x,)).square().sum()

    unarmed = torch.func.grad(loss)(parameters)
    torch.testing.assert_close(list(unarmed.values()), list(torch.autograd.grad(loss(parameters), parameters.values())))
    enable_cp1_packed_varlen(IDS, "flash")
    records = [hook.record for module in model.modules() for hook in hooks_of(module)]
    before = [(record.taken, record.calls) for record in records]
    with pytest.raises(NotImplementedError, match=SEED):
        torch.func.grad(loss)(parameters)
    assert [record.taken for record in records] == [taken for taken, _ in before]
    assert F.scaled_dot_product_attention is STOCK


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 16, dtype=torch.float64)
        self.body = Model("none", num_layers=1)

    def forward(self, input_ids, position_ids=None):
        return self.body(self.embed(input_ids))


def models():
    yield "hooks", Tokens()
    try:
        from hf_models import ARCHITECTURES
    except ImportError:
        return
    yield "interface", ARCHITECTURES["llama"].make()


@pytest.mark.parametrize("route", ["hooks", "interface"])
def test_an_attached_model_under_transforms(route):
    model = dict(models()).get(route)
    if model is None:
        pytest.skip("transformers is not installed")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    plain = torch.arange(6)[None]

    def loss(changed, positions):
        out = torch.func.functional_call(model, changed, (), {"input_ids": tokens, "position_ids": positions})
        return (out if isinstance(out, torch.Tensor) else out.logits).square().mean()

    def refused(match, call):
        with pytest.raises(NotImplementedError, match=match):
            call()

    unpacked = torch.func.grad(loss)(parameters, plain)
    with packed_sdpa.attach(model, route=route):
        torch.testing.assert_close(torch.func.grad(loss)(parameters, plain), unpacked)  # no documents: as if never so
        has_documents = rf"the forward of an attached {type(model).__name__} has documents within a torch\.func"
        refused(has_documents, lambda: torch.func.grad(loss)(parameters, packed))
        refused(has_documents, lambda: torch.func.jvp(lambda p: loss(p, packed), (parameters,), (parameters,)))
        many = {name: parameter[None] for name, parameter in parameters.items()}
        refused(has_documents, lambda: torch.func.vmap(loss, in_dims=(0, None))(many, packed))
        by_vmap = r"has arguments that vmap runs over \(position_ids\) within a torch\.func transform"
        refused(by_vmap, lambda: torch.func.vmap(loss, in_dims=(None, 0))(parameters, packed[None]))
        packed_sdpa.arm(torch.tensor([1, 1, 1, 2, 2, 2]))
        refused(has_documents, lambda: torch.func.grad(loss)(parameters, plain))
        packed_sdpa.disarm()

        def with_tangents():
            return loss({n: forward_ad.make_dual(p, torch.ones_like(p)) for n, p in parameters.items()}, packed)

        with forward_ad.dual_level():
            refused("varlen_attention does not support forward-mode", with_tangents)
        leaves = {name: parameter.clone().requires_grad_() for name, parameter in parameters.items()}
        gradients = torch.autograd.grad(loss(leaves, packed), list(leaves.values()), create_graph=True)
        refused("second derivative of varlen_attention", lambda: sum(g.sum() for g in gradients).backward())


def test_dropout_under_vmap_is_refused():
    layout = packed_sdpa.PackedLayout.from_seqlens([3, 2])
    queries = torch.randn(2, 1, 2, 5, 8)

    def dropped(query):
        return packed_sdpa.packed_attention(query, query, query, layout, dropout_p=0.5)

    for randomness in ("error", "same", "different"):
        with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.5 under a torch\.func transform"):
            torch.func.vmap(dropped, randomness=randomness)(queries)
