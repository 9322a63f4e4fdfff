"""Checkpointed regions that arm or attach by themselves, and saved-tensor hooks around checkpoints."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import packed_sdpa
from packed_models import (  # noqa: F401
    ALL_KINDS,
    KINDS,
    Model,
    assert_gradients,
    one_torch_thread,
)
from packed_sdpa.packed import disable_cp1_packed_varlen
from test_recompute import SPLITS, batch, disarmed, expected_gradients, hooked, run_forward  # noqa: F401

FORWARDS = [(1, SPLITS[0]), (2, SPLITS[1])]


def forwards():
    return [(batch(seed).requires_grad_(), doc_ids) for seed, doc_ids in FORWARDS]


def backward(losses, order):
    for loss in losses if order == "AB" else reversed(losses):
        loss.backward()


@pytest.mark.parametrize("order", ["AB", "BA"])
@pytest.mark.parametrize("before", ["nothing", "unarmed", "other documents"])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_region_that_arms_by_itself_around_checkpointed_layers(kind, use_reentrant, before, order):
    model = hooked(kind)
    work = forwards()
    expected = expected_gradients(model, work)
    losses = []
    for x, doc_ids in work:
        if before != "nothing":
            run_forward(model, batch(3), None if before == "unarmed" else SPLITS[2])
        region = functools.partial(run_forward, model, doc_ids=doc_ids)
        losses.append(checkpoint(region, x, use_reentrant=use_reentrant))
    disable_cp1_packed_varlen()
    backward(losses, order)
    assert_gradients(model.gradients(), expected, f"{kind} {before} {order}")


@pytest.mark.parametrize("order", ["AB", "BA"])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_region_that_attaches_by_itself_around_checkpointed_layers(kind, use_reentrant, order):
    """The layers' checkpoints recompute when the region's attachment is gone again."""
    model = Model(kind)
    work = forwards()
    expected = expected_gradients(model, work)

    def region(x, doc_ids):
        with packed_sdpa.attach(model, documents=lambda x: doc_ids):
            return model(x).square().sum()

    losses = [
        checkpoint(functools.partial(region, doc_ids=doc_ids), x, use_reentrant=use_reentrant) for x, doc_ids in work
    ]
    backward(losses, order)
    assert_gradients(model.gradients(), expected, f"{kind} {order}")


@pytest.mark.parametrize("order", ["AB", "BA"])
@pytest.mark.parametrize("around", ["forward", "forward and backward", "backward"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_save_on_cpu_around_checkpoints(kind, around, order):
    model = hooked(kind)
    work = forwards()
    expected = expected_gradients(model, work)
    save_on_cpu, nothing = torch.autograd.graph.save_on_cpu, contextlib.nullcontext
    with save_on_cpu() if around == "forward and backward" else nothing():
        with save_on_cpu() if around == "forward" else nothing():
            losses = [run_forward(model, *forward) for forward in work]
        with save_on_cpu() if around == "backward" else nothing():
            backward(losses, order)
    assert_gradients(model.gradients(), expected, f"{kind} {around} {order}")
