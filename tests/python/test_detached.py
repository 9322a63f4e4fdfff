"""Detached, or attached anew, between a forward and its recompute: right, or it raises."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import packed_sdpa
from packed_models import (  # noqa: F401
    Model,
    SelfAttention,
    assert_gradients,
    non_reentrant,
    one_torch_thread,
    reentrant,
)
from test_recompute import SPLITS, SetupContextCheckpoint, batch, disarmed, expected_gradients  # noqa: F401


class Function:
    """What SetupContextCheckpoint takes for a module."""

    def __init__(self, run):
        self.run = run

    def __call__(self, x):
        return self.run(x)


def without_context(run, x):
    return SetupContextCheckpoint.apply(Function(run), x)


def _inside(wrap):
    return lambda layer, x: without_context(lambda y: wrap(layer, y), x)


def _around(wrap):
    return lambda layer, x: wrap(lambda y: without_context(layer, y), x)


WITHOUT_CONTEXT = {
    "alone": without_context,
    "reentrant inside": _inside(reentrant),
    "non-reentrant inside": _inside(non_reentrant),
    "itself inside": _inside(without_context),
    "reentrant around": _around(reentrant),
    "non-reentrant around": _around(non_reentrant),
}


# In torch 2.11 a checkpoint in whose recompute we raise leaves a generator that fails when it is collected: it pops
# saved-tensor hooks that are gone.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object _checkpoint_without:pytest.PytestUnraisableExceptionWarning"
    if torch.__version__.startswith("2.11.")
    else "error::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("later", [0, 16])
@pytest.mark.parametrize("then", ["attached", "detached", "armed anew", "other documents"])
@pytest.mark.parametrize("way", WITHOUT_CONTEXT)
def test_layers_in_a_function_without_a_context(way, then, later):
    """Of its documents the last 16 are kept; an older one's recompute raises, and is never run by stock."""
    model = Model()
    forward = (batch(1), SPLITS[0])
    expected = expected_gradients(model, [forward])

    def run(x):
        x = model.embed(x)
        for layer in model.plain_layers:
            x = WITHOUT_CONTEXT[way](layer, x)
        return x.square().sum()

    handle = packed_sdpa.attach(model, documents=None)
    packed_sdpa.arm(SPLITS[0])
    loss = run(forward[0])
    for index in range(later):
        packed_sdpa.arm(SPLITS[1 + index % 2])
        run(batch(3))
    packed_sdpa.disarm()
    if then != "attached":
        handle.detach()
        plain = model(batch(4))
        reference = model.reference(batch(4), None)
        torch.testing.assert_close(plain, reference)
    if then == "armed anew":
        packed_sdpa.attach(model, documents=None)
        packed_sdpa.arm(SPLITS[2])
        run(batch(5))
    elif then == "other documents":
        packed_sdpa.attach(model, documents=lambda x: SPLITS[2])
        model(batch(5))
    gc.collect()
    if later == 16 and way != "reentrant around":  # whose node keeps them
        with pytest.raises(RuntimeError, match="the documents of the forward that is recomputed are gone"):
            loss.backward()
    else:
        loss.backward()
        assert_gradients(model.gradients(), expected, f"{way} {then}")


# A whole forward that is recomputed.

LENGTHS = (5, 1, 9, 3, 7)
OTHER = (*LENGTHS[1:], LENGTHS[0])  # as many documents
FOUND = {"armed": None, "arguments": "auto", "function": lambda **_: ids_of(LENGTHS)}
THEN = {"armed": None, "arguments": "auto", "function": lambda **_: ids_of(OTHER)}


def ids_of(lengths):
    return torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))[None]


def right(before, then, is_reentrant):
    """The new attachment finds the documents again: by the arguments, or by the node that was made under them."""
    return before == then == "arguments" or (before == then == "armed" and is_reentrant)


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("then", [None, *itertools.product(("interface", "hooks"), THEN)])
@pytest.mark.parametrize("before", FOUND)
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_a_whole_forward(route, before, then, is_reentrant):
    pytest.importorskip("transformers")
    from hf_models import ARCHITECTURES, gradients, worst

    model = ARCHITECTURES["llama"].make().train()
    x = torch.randn(1, sum(LENGTHS), model.config.hidden_size, dtype=torch.float64).requires_grad_()

    def forward(x):
        keywords = {"doc_ids": ids_of(LENGTHS)} if before == "arguments" else {}
        return model(inputs_embeds=x, use_cache=False, **keywords).logits

    def run(x):
        return checkpoint(forward, x, use_reentrant=is_reentrant)

    parts = [model(inputs_embeds=part, use_cache=False).logits for part in x.split(LENGTHS, 1)]
    expected = gradients(model, torch.cat(parts, 1))
    handle = packed_sdpa.attach(model, route=route, documents=FOUND[before])
    if before == "armed":
        packed_sdpa.arm(ids_of(LENGTHS))
    logits = run(x)
    packed_sdpa.disarm()
    handle.detach()
    if then is not None:
        handle = packed_sdpa.attach(model, route=then[0], documents=THEN[then[1]])
        if then[1] == "armed":
            packed_sdpa.arm(ids_of(OTHER))
    gc.collect()
    try:
        found = gradients(model, logits)
    except (RuntimeError, ValueError):  # among them torch's own CheckpointError: other tensors were saved
        assert then is None or route != then[0] or not right(before, then[1], is_reentrant)
    else:
        assert worst(found, expected) < 1e-5  # positions go on, in float32
    handle.detach()
    del logits
    gc.collect()
    for module in model.modules():
        assert not hasattr(module, "_packed_sdpa_arounds")


@pytest.mark.parametrize("then", [None, lambda **_: ids_of(OTHER)])
def test_what_a_recompute_after_detach_says(then):
    pytest.importorskip("transformers")
    from hf_models import ARCHITECTURES

    model = ARCHITECTURES["llama"].make().train()
    x = torch.randn(1, sum(LENGTHS), model.config.hidden_size, dtype=torch.float64).requires_grad_()

    def forward(x):
        return model(inputs_embeds=x, use_cache=False).logits

    with packed_sdpa.attach(model, documents=FOUND["function"]):
        loss = reentrant(forward, x).sum()
        first = reentrant(forward, x).sum()
        without = without_context(forward, x).sum()
        first.backward()  # attached as it was
    if then is None:
        assert torch.equal(forward(x), reentrant(forward, x))  # stock, recompute included
        reentrant(forward, x).sum().backward()
        with pytest.raises(RuntimeError, match=r"of LlamaForCausalLM is recomputed .* detached.*; detach after backwa"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"of LlamaForCausalLM is recomputed .* detached.*; detach after backwa"):
            without.backward()
        return
    with packed_sdpa.attach(model, documents=then):
        with pytest.raises(
            RuntimeError, match=r"other documents than it ran under; .* attached anew\? Leave the model"
        ):
            loss.backward()


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
def test_training_goes_on_unpacked_beside_an_old_loss(kind):
    """Which may be asked for a recompute still: that is said, and is over with the loss."""
    model = Model(kind)
    x = batch(1).requires_grad_()
    expected = expected_gradients(model, [(x, None)])
    with packed_sdpa.attach(model, documents=lambda x: SPLITS[0]):
        loss = model(x).square().sum()
        loss.backward()
    with pytest.raises(RuntimeError, match=r"after the model was detached.*; detach after backward, and let go of "):
        model(x).square().sum().backward()
    del loss
    gc.collect()
    model.zero_grad()
    model(x).square().sum().backward()
    assert_gradients(model.gradients(), expected, "unpacked")


def test_unpacked_between_attachments():
    """A forward that ran unpacked is recomputed unpacked, or raises."""
    model = Model()
    x = batch(1).requires_grad_()
    with packed_sdpa.attach(model, documents=lambda x: None):
        loss = reentrant(model, x).square().sum()
    expected = expected_gradients(model, [(x, None)])
    with packed_sdpa.attach(model, documents=lambda x: SPLITS[0]):
        with pytest.raises(RuntimeError, match="found other documents than it ran under"):
            loss.backward()
    loss = reentrant(model, x).square().sum()
    loss.backward()
    assert_gradients(model.gradients(), expected, "unpacked")


@pytest.mark.parametrize("later", [LENGTHS, OTHER, None])
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_model_that_only_has_the_name(is_reentrant, later):
    """Not attached, its documents armed by hand: a recompute of its whole forward finds those that it ran under."""
    pytest.importorskip("transformers")
    from hf_models import ARCHITECTURES, gradients, worst

    model = ARCHITECTURES["llama"].make().train()
    x = torch.randn(1, sum(LENGTHS), model.config.hidden_size, dtype=torch.float64).requires_grad_()

    def forward(x):
        return model(inputs_embeds=x, use_cache=False).logits

    expected = gradients(model, torch.cat([forward(part) for part in x.split(LENGTHS, 1)], 1))
    packed_sdpa.register_hf_attention()
    model.set_attn_implementation("packed_sdpa")
    packed_sdpa.arm(ids_of(LENGTHS))
    logits = checkpoint(forward, x, use_reentrant=is_reentrant)
    packed_sdpa.disarm()
    if later is not None:
        packed_sdpa.arm(ids_of(later))
    forward(x)
    assert worst(gradients(model, logits), expected) < 1e-5  # positions go on, in float32
