"""A tiny transformer that calls SDPA, every way to checkpoint it, and its oracle: the dense equality mask."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

STOCK = F.scaled_dot_product_attention


def dense_mask(doc_ids: Tensor | None, rows: int, window: int | None = None) -> Tensor:
    """Bool [B, 1, S, S]; None: plain causal."""
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    if window is not None:
        causal &= ~torch.ones(rows, rows, dtype=torch.bool).tril(-window)
    if doc_ids is None:
        return causal.expand(1, 1, rows, rows)
    ids = doc_ids.reshape(-1, rows)
    return ((ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] != 0) & causal)[:, None]


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Written out, so that nothing can intercept it. Rows that see nothing are 0."""
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    rows = torch.where(mask, scores, float("-inf")).softmax(-1)
    return torch.where(mask, rows, 0.0) @ value


class SelfAttention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, dtype=torch.float64)
        self.out = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if mask is None:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            out = plain_attention(query, key, value, mask)
        return self.out(out.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=torch.float64)
        self.self_attn = SelfAttention(width)
        self.mlp = nn.Sequential(nn.Linear(width, width, dtype=torch.float64), nn.Tanh())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.norm(x), mask)
        return x + self.mlp(x)


class OwnCheckpoint(torch.autograd.Function):
    """A recompute scheme of somebody's own."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def _select_products(_context, op, *_args, **_kwargs):
    if op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_selective = functools.partial(create_selective_checkpoint_contexts, _select_products)


def _pairs(layers, x, outer, inner):
    for first in range(0, len(layers), 2):
        pair = layers[first : first + 2]
        x = outer(functools.partial(_each, inner, pair), x)
    return x


def reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


def non_reentrant(function, x):
    return checkpoint(function, x, use_reentrant=False)


def saved_tensor_hooks(function, x, tanh=torch.tanh):
    """Hand-made: the output is dropped and made again when backward asks for it."""
    held = x.detach()

    def unpack(_):
        with torch.no_grad():
            return function(held).tanh()

    out = function(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, unpack):
        return tanh(out)


def _each(wrap, layers, x):
    for layer in layers:
        x = wrap(layer, x)
    return x


def _part(wrap, layers, x):
    for layer in layers:
        x = x + wrap(layer.self_attn, layer.norm(x))
        x = x + layer.mlp(x)
    return x


def _early_stop_off(layers, x):
    with set_checkpoint_early_stop(False):
        return _each(non_reentrant, layers, x)


KINDS = {
    "none": lambda layers, x: _each(lambda layer, y: layer(y), layers, x),
    "reentrant": functools.partial(_each, reentrant),
    "non_reentrant": functools.partial(_each, non_reentrant),
    "part_reentrant": functools.partial(_part, reentrant),
    "part_non_reentrant": functools.partial(_part, non_reentrant),
    "nested_rr": lambda layers, x: _pairs(layers, x, reentrant, reentrant),
    "nested_rn": lambda layers, x: _pairs(layers, x, reentrant, non_reentrant),
    "nested_nr": lambda layers, x: _pairs(layers, x, non_reentrant, reentrant),
    "nested_nn": lambda layers, x: _pairs(layers, x, non_reentrant, non_reentrant),
    "sequential_r": lambda layers, x: checkpoint_sequential(list(layers), 2, x, use_reentrant=True),
    "sequential_n": lambda layers, x: checkpoint_sequential(list(layers), 2, x, use_reentrant=False),
    "own_function": functools.partial(_each, OwnCheckpoint.apply),
    "selective": functools.partial(
        _each, lambda layer, y: checkpoint(layer, y, use_reentrant=False, context_fn=_selective)
    ),
    "early_stop_off": _early_stop_off,
}
WRAPPERS = {"wrapper_r": CheckpointImpl.REENTRANT, "wrapper_n": CheckpointImpl.NO_REENTRANT}
ALL_KINDS = (*KINDS, *WRAPPERS)


class Model(nn.Module):
    """Layers, checkpointed in one of ALL_KINDS. With ``documents_of`` it arms by itself, as models of the seed do."""

    def __init__(self, kind: str = "none", num_layers: int = 2, width: int = 16, seed: int = 0) -> None:
        super().__init__()
        self.kind = kind
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Linear(width, width, dtype=torch.float64)
            self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.plain_layers = list(self.layers)
        if kind in WRAPPERS:
            for index, layer in enumerate(self.layers):
                self.layers[index] = checkpoint_wrapper(layer, checkpoint_impl=WRAPPERS[kind])

    def forward(self, x: Tensor) -> Tensor:
        run = KINDS.get(self.kind, KINDS["none"])
        return run(self.layers, self.embed(x))

    def reference(self, x: Tensor, doc_ids: Tensor | None) -> Tensor:
        mask = dense_mask(doc_ids, x.shape[1])
        x = self.embed(x)
        for layer in self.plain_layers:
            x = layer(x, mask)
        return x

    def gradients(self) -> list[Tensor | None]:
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters()]


def loss_of_layers(model: Model, x: Tensor, run) -> Tensor:
    """``run(layer, x)`` for each layer, in its turn."""
    x = model.embed(x)
    for layer in model.plain_layers:
        x = run(layer, x)
    return x.square().sum()


def gradients_with_tanh(model: Model, x: Tensor, doc_ids: Tensor) -> list[Tensor | None]:
    """Of the oracle's layers, each followed by a tanh: what `saved_tensor_hooks` computes."""
    mask = dense_mask(doc_ids, x.shape[1])
    loss_of_layers(model, x, lambda layer, y: layer(y, mask).tanh()).backward()
    gradients = model.gradients()
    model.zero_grad()
    return gradients


def assert_gradients(got, expected, what: str) -> None:
    for index, (left, right) in enumerate(zip(got, expected, strict=True)):
        assert (left is None) == (right is None), f"{what}: gradient {index}"
        if left is not None:
            error = (left - right).abs().max().item()
            bound = 1e-11 * max(1.0, right.abs().max().item())
            assert error <= bound, f"{what}: gradient {index} is off by {error:.3g}, allowed {bound:.3g}"


@pytest.fixture(autouse=True)
def one_torch_thread():
    """These models are so small that a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def stock_everywhere():
    """Afterwards, and before, nothing is patched."""
    assert F.scaled_dot_product_attention is STOCK
    yield
    assert F.scaled_dot_product_attention is STOCK
