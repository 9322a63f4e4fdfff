"""Detached, or attached anew, between a forward and its recompute: right, or it raises."""

from __future__ import annotations

import gc
import itertools
import re

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint

import packed_sdpa
from packed_models import (  # noqa: F401
    Model,
    SelfAttention,
    assert_gradients,
    non_reentrant,
    one_torch_thread,
    reentrant,
)
from test_recompute import SPLITS, OwnTanh, SetupContextCheckpoint, batch, disarmed, expected_gradients  # noqa: F401


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


# What is said of a recompute whose model was detached, or attached otherwise, since its forward.
TOLD = (
    r"^packed_sdpa: .*(in backward after the model was detached|found other documents than it ran under"
    r"|while it was not attached|between two attachments|ran before this attention was hooked|ran no hooked attention)"
    r"|^documents and doc_ids disagree about the documents"
)


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
    except (RuntimeError, ValueError) as error:
        # CheckpointError is torch's own: other tensors were saved.
        assert isinstance(error, CheckpointError) or re.match(TOLD, str(error)), error
        assert then is None or route != then[0] or not right(before, then[1], is_reentrant)
        assert then is None or route != then[0] or not right(before, then[1], is_reentrant)
    else:
        assert worst(found, expected) < 1e-5  # positions go on, in float32
    handle.detach()
    del logits
    gc.collect()
    for module in model.modules():
        assert not hasattr(module, "_packed_sdpa_arounds")


@pytest.mark.parametrize("earlier", [0, 1, 100])
@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_a_forward_before_an_attachment_that_reads_its_arguments(route, is_reentrant, earlier):
    """Its recompute is given the documents that nobody read then. ``earlier`` attachments were off again by then."""
    pytest.importorskip("transformers")
    from hf_models import ARCHITECTURES, gradients, worst

    model = ARCHITECTURES["llama"].make().train()
    x = torch.randn(1, sum(LENGTHS), model.config.hidden_size, dtype=torch.float64).requires_grad_()
    causal = torch.ones(sum(LENGTHS), sum(LENGTHS), dtype=torch.bool).tril()[None, None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]

    def forward(x):
        return model(inputs_embeds=x, position_ids=positions, attention_mask=causal, use_cache=False).logits

    def run():
        return checkpoint(forward, x, use_reentrant=is_reentrant)

    def attach():
        return packed_sdpa.attach(model, route=route)

    unpacked = gradients(model, forward(x))
    with attach():
        packed = gradients(model, forward(x))
    assert worst(packed, unpacked) > 1e-3
    for _ in range(earlier):
        stock = run()
        with attach():
            under = run()
    if earlier:
        with attach():  # the documents are its arguments, so it may be recomputed under another attachment
            assert worst(gradients(model, under), packed) < 1e-9
    else:
        stock = run()
    with attach():
        with pytest.raises(RuntimeError, match=r"ran while it was not attached is recomp|found other documents than"):
            stock.square().sum().backward()
    stock = run()
    assert worst(gradients(model, stock), unpacked) < 1e-9


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("told", ["armed before", "armed after", "function"])
@pytest.mark.parametrize("wrap", [reentrant, without_context, non_reentrant])
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_a_forward_before_an_attachment(route, wrap, told, later):
    """``later``: another forward, packed, runs between attach and the backward of the first."""
    case = Whole(route)
    documents = case.documents[0]
    expected = case.expected()
    if told == "armed before":
        packed_sdpa.arm(documents)
    loss = case.loss(wrap)
    if told == "armed after":
        packed_sdpa.arm(documents)
    packed_sdpa.attach(case.model, route=route, documents=(lambda *_, **__: documents) if told == "function" else None)
    if later:
        case.loss(wrap)
    try:
        case.assert_gradients(loss, expected)
    except RuntimeError as error:  # CheckpointError is torch's own: other tensors were saved
        assert isinstance(error, CheckpointError) or re.match(TOLD_BEFORE, str(error)), error


TOLD_BEFORE = r"^packed_sdpa: .*(while it was not attached|ran no hooked attention|cannot tell whether)"


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
    """Which may be asked for a recompute still, of a forward that ran while the model was attached; these ran later."""
    model = Model(kind)
    x = batch(1).requires_grad_()
    expected = expected_gradients(model, [(x, None)])
    with packed_sdpa.attach(model, documents=lambda x: SPLITS[0]):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
    packed = model.gradients()
    model.zero_grad()
    x.grad = None
    model(x).square().sum().backward()
    assert_gradients(model.gradients(), expected, "unpacked")
    model.zero_grad()
    loss.backward()
    assert_gradients(model.gradients(), packed, "packed")


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


# What stays where it cannot be told until when a recompute may come.


class Whole:
    """A model in a checkpoint that is not given its context: the layers of one in each, or all of it in one."""

    def __init__(self, route):
        self.route = route
        if route == "hooks":
            self.model = Model(num_layers=1)
            self.x = batch(1)
            self.documents = (SPLITS[0], SPLITS[2])
        else:
            pytest.importorskip("transformers")
            from hf_models import ARCHITECTURES

            self.model = ARCHITECTURES["llama"].make().train()
            self.x = torch.randn(1, sum(LENGTHS), self.model.config.hidden_size, dtype=torch.float64)
            self.documents = (ids_of(LENGTHS), ids_of(OTHER))
        self.x.requires_grad_()

    def forward(self, x):
        return self.model(x) if self.route == "hooks" else self.model(inputs_embeds=x, use_cache=False).logits

    def attach(self, which=0):
        return packed_sdpa.attach(self.model, documents=lambda *_, **__: self.documents[which], route=self.route)

    def loss(self, wrap=without_context):
        return wrap(self.forward, self.x).square().sum()

    def gradients(self, loss):
        self.model.zero_grad()
        self.x.grad = None
        loss.backward()
        return [self.x.grad, *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]

    def expected(self, which=None):
        if which is None:
            return self.gradients(self.forward(self.x).square().sum())
        with self.attach(which):
            return self.gradients(self.forward(self.x).square().sum())

    def assert_gradients(self, loss, expected):
        for got, right in zip(self.gradients(loss), expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)

    def lingering(self):
        from packed_sdpa.guard import arounds_of

        return max(len(arounds_of(module)) for module in self.model.modules())

    def raises(self):
        return pytest.raises(RuntimeError, match="is recomputed in backward after the model was detached")


AFTER = {
    "plain": lambda run, x: run(x),
    "without a context": without_context,
    "two of them": lambda run, x: without_context(lambda y: without_context(run, y), x),
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "non-reentrant around": lambda run, x: non_reentrant(lambda y: without_context(run, y).tanh(), x),
    "reentrant around": lambda run, x: reentrant(lambda y: without_context(run, y), x),
}


@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_what_stays_does_not_pile_up(route):
    case = Whole(route)
    expected = case.expected(0), case.expected(1)
    for index in range(300):
        with case.attach(index % 2):
            loss = case.loss()
            if index % 50 < 2:
                case.assert_gradients(loss, expected[index % 2])
        assert case.lingering() == 1
    with case.raises():
        case.gradients(loss)
    old = case.attach(0)
    case.loss()
    old.detach()
    assert case.lingering() == 1


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_stock_training_after_what_stays(route, after):
    """A forward after the detach is recomputed by stock; one before it never is."""
    case = Whole(route)
    expected = case.expected()
    stock = case.loss(AFTER[after])
    expected_after = case.gradients(stock)
    for _ in range(2):
        with case.attach():
            before = case.loss()
            case.gradients(case.loss())
        for _ in range(2):
            case.assert_gradients(case.loss(AFTER[after]), expected_after)
            case.assert_gradients(case.loss(), expected)
        late = case.loss(AFTER[after])
        with case.raises():
            case.gradients(before)
        case.assert_gradients(late, expected_after)


@pytest.mark.parametrize("around", ["non-reentrant around", "reentrant around"])
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_a_region_with_one_that_stays_within(route, around):
    """Whichever node of the region asks for the recompute, it is not run by stock in silence."""
    case = Whole(route)
    with case.attach():
        expected = case.gradients(case.loss(AFTER[around]))
        loss = case.loss(AFTER[around])
    case.gradients(case.loss(AFTER[around]))
    try:
        got = case.gradients(loss)
    except RuntimeError as error:
        assert "packed_sdpa: " in str(error)
    else:
        assert route == "hooks"
        for value, right in zip(got, expected, strict=True):
            torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tanh", [torch.tanh, OwnTanh.apply], ids=["operator", "function"])
def test_a_node_behind_a_region_that_ran_before_the_detach(tanh):
    """It was made after the end, the forward that it makes again was not."""
    case = Whole("hooks")
    with case.attach():
        case.loss()
        out = case.forward(case.x)
    held = case.x.detach()

    def unpack(_):
        with torch.no_grad():
            return case.forward(held).tanh()

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, unpack):
        loss = tanh(out).sum()
    with case.raises():
        loss.backward()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("wrap", AFTER)
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_a_forward_between_two_attachments(route, wrap, before):
    """Or before the first; with documents armed by hand all the while, and another model's attention run under them."""
    case = Whole(route)
    case.documents = (None, None)
    other = Model(num_layers=1)
    packed_sdpa.attach(other, documents=None)
    packed_sdpa.arm(SPLITS[0] if route == "hooks" else ids_of(LENGTHS))
    expected = case.expected()
    if not before:
        with packed_sdpa.attach(case.model, documents=None, route=route):
            case.loss()
    between = case.loss(AFTER[wrap])
    expected_between = case.gradients(case.loss(AFTER[wrap]))
    with packed_sdpa.attach(case.model, documents=None, route=route):
        if wrap == "plain":
            case.assert_gradients(between, expected_between)
        else:
            with pytest.raises(RuntimeError, match=TOLD):
                case.gradients(between)
    case.assert_gradients(case.loss(), expected)


@pytest.mark.parametrize("told", ["AB", "BA", "AA", "BB"])
def test_the_forwards_of_one_region_are_repeated_in_their_order(told):
    model = Model(num_layers=1)
    x = batch(1).requires_grad_()
    documents = {"A": SPLITS[0], "B": SPLITS[2]}

    def region(x):
        return model(x) + 2 * model(x)

    def attached(order):
        left = iter(order)
        return packed_sdpa.attach(model, documents=lambda x: documents[next(left)])

    (model.reference(x, SPLITS[0]) + 2 * model.reference(x, SPLITS[2])).square().sum().backward()
    expected = model.gradients()
    model.zero_grad()
    with attached("AB"):
        loss = reentrant(region, x).square().sum()
    with attached(told):
        if told == "AB":
            loss.backward()
            assert_gradients(model.gradients(), expected, "in order")
        else:
            with pytest.raises(RuntimeError, match="other documents than it ran under"):
                loss.backward()


class Partly(torch.autograd.Function):
    """Runs two forwards, and recomputes the second alone, or both twice."""

    @staticmethod
    def forward(ctx, run, x, times):
        ctx.run, ctx.times = run, times
        ctx.save_for_backward(x)
        return run(x).detach() + run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            for _ in range(ctx.times):
                out = ctx.run(x) if ctx.times == 1 else ctx.run(x).detach() + ctx.run(x)
        torch.autograd.backward(out, grad)
        return None, x.grad, None


@pytest.mark.parametrize("times", [1, 2])
def test_a_function_that_repeats_a_part_or_all_of_it_twice(times):
    case = Whole("interface")
    parts = []
    for which in (0, 1):
        with case.attach(which):
            parts.append(case.forward(case.x))
    expected = case.gradients((parts[0].detach() + parts[1]).square().sum())
    order = iter(())

    def run(x):
        return case.model(inputs_embeds=x, use_cache=False, doc_ids=case.documents[next(order)]).logits

    with packed_sdpa.attach(case.model, route="interface"):
        order = iter([0, 1, *([1] if times == 1 else [0, 1] * 2)])
        case.assert_gradients(Partly.apply(run, case.x, times).square().sum(), expected)
        for swapped in ([1, 0], [0, 0], [1, 1], [0, 1, 1, 0]):
            order = iter([0, 1, *swapped])
            loss = Partly.apply(run, case.x, 2).sum()
            with pytest.raises(RuntimeError, match="found other documents than it ran under"):
                loss.backward()
