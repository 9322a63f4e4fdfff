"""A recompute in backward reads the documents of its own forward: CASES 28-32, 46, and the kinds around them."""

from __future__ import annotations

import functools
import gc
import random
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from packed_models import (  # noqa: F401
    ALL_KINDS,
    Model,
    OwnCheckpoint,
    assert_gradients,
    dense_mask,
    gradients_with_tanh,
    loss_of_layers,
    one_torch_thread,
    saved_tensor_hooks,
)
from packed_sdpa._library import ops
from packed_sdpa.armed import ArmedDocuments
from packed_sdpa.hooks import (
    forward_scope,
    hook_attention,
    in_forward_scope,
    keep_documents,
    new_attachment,
    run_scoped,
)
from packed_sdpa.packed import (
    _PACKED_STATE,
    attach_cp1_packed_varlen_hooks,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
)
from packed_sdpa.records import ModuleRecord

FORWARD = torch.ops.packed_sdpa.varlen_attention_forward.default
ROWS = 8
SPLITS = [
    torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]]),
    torch.tensor([[1, 2, 2, 2, 2, 3, 3, 0]]),
    torch.tensor([[7, 7, 7, 7, 7, 7, 1, 1]]),
    torch.tensor([[0, 1, 2, 1, 1, 3, 3, 3]]),
    None,  # unarmed
]
WITHOUT_PADDING = [SPLITS[0], SPLITS[2]]
CHECKPOINTED = [kind for kind in ALL_KINDS if kind != "none"]


@pytest.fixture(autouse=True)
def disarmed():
    disable_cp1_packed_varlen()
    yield
    disable_cp1_packed_varlen()


def arm(doc_ids):
    if doc_ids is None:
        disable_cp1_packed_varlen()
    else:
        enable_cp1_packed_varlen(doc_ids, "flash")


def hooked(kind, seed=0, num_layers=2):
    model = Model(kind, seed=seed, num_layers=num_layers)
    attach_cp1_packed_varlen_hooks(model)
    return model


def batch(seed):
    return torch.randn(1, ROWS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected_gradients(model, forwards):
    """Of the sum of the losses: [(x, doc_ids)]."""
    model.zero_grad()
    for x, doc_ids in forwards:
        model.reference(x, doc_ids).square().sum().backward()
    gradients = model.gradients()
    model.zero_grad()
    return gradients


def run_forward(model, x, doc_ids):
    arm(doc_ids)
    return model(x).square().sum()


@pytest.mark.parametrize("order", ["AB", "BA", "A+B"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_case_28_two_forwards_in_flight(kind, order):
    model = hooked(kind)
    forwards = [(batch(1), SPLITS[0]), (batch(2), SPLITS[1])]
    expected = expected_gradients(model, forwards)
    losses = [run_forward(model, *forward) for forward in forwards]
    if order == "A+B":
        sum(losses).backward()
    else:
        for loss in losses if order == "AB" else reversed(losses):
            loss.backward()
    assert_gradients(model.gradients(), expected, f"{kind} {order}")


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_case_29_four_forwards_then_four_backwards(kind):
    model = hooked(kind)
    forwards = [(batch(seed), SPLITS[seed]) for seed in range(4)]
    expected = expected_gradients(model, forwards)
    for loss in [run_forward(model, *forward) for forward in forwards]:
        loss.backward()
    assert_gradients(model.gradients(), expected, kind)


@pytest.mark.parametrize("between", ["disarm", "unarmed eval", "unarmed training forward", "other ids"])
@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_case_30_what_happens_between_forward_and_backward(kind, between):
    model = hooked(kind)
    forward = (batch(1), SPLITS[0])
    expected = expected_gradients(model, [forward])
    loss = run_forward(model, *forward)
    if between == "other ids":
        arm(SPLITS[1])
    else:
        disable_cp1_packed_varlen()
    if between == "unarmed eval":
        with torch.no_grad():
            model.eval()(batch(3))
        model.train()
    if between == "unarmed training forward":
        model(batch(3))
    loss.backward()
    assert_gradients(model.gradients(), expected, f"{kind} {between}")


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_case_31_policy_and_reference_model(kind):
    policy, reference = hooked(kind, seed=1), hooked(kind, seed=2)
    work = [(policy, batch(1), SPLITS[0]), (reference, batch(2), SPLITS[1]), (policy, batch(3), SPLITS[2])]
    expected = {
        model: expected_gradients(model, [(x, ids) for owner, x, ids in work if owner is model])
        for model in (policy, reference)
    }
    losses = [run_forward(model, x, ids) for model, x, ids in work]
    sum(losses).backward()
    for model, gradients in expected.items():
        assert_gradients(model.gradients(), gradients, kind)


def in_thread(function):
    failure = []

    def run():
        try:
            function()
        except (RuntimeError, AssertionError) as error:  # handed to the test's own thread
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_case_32_backward_in_another_thread(kind):
    model = hooked(kind)
    forwards = [(batch(1), SPLITS[0]), (batch(2), SPLITS[1])]
    expected = expected_gradients(model, forwards)
    losses = [run_forward(model, *forward) for forward in forwards]
    for loss in losses:
        in_thread(loss.backward)
    assert_gradients(model.gradients(), expected, kind)


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_forward_in_one_thread_backward_in_main(kind):
    model = hooked(kind)
    forwards = [(batch(1), SPLITS[0]), (batch(2), SPLITS[1])]
    expected = expected_gradients(model, forwards)
    losses = []
    for forward in forwards:
        in_thread(lambda forward=forward: losses.append(run_forward(model, *forward)))
    arm(SPLITS[3])
    for loss in losses:
        loss.backward()
    assert_gradients(model.gradients(), expected, kind)


def test_equal_sequence_numbers_in_two_threads():
    """Counters are per thread: the same number in two threads is not the same forward."""
    model = hooked("non_reentrant")
    forwards = [(batch(1), SPLITS[0]), (batch(2), SPLITS[1])]
    expected = expected_gradients(model, forwards)
    losses = {}

    def work(index):
        losses[index] = run_forward(model, *forwards[index])

    for index in range(2):
        in_thread(lambda index=index: work(index))
    (losses[1] + losses[0]).backward()
    assert_gradients(model.gradients(), expected, "two threads")


def test_concurrent_backwards_of_one_threads_forwards():
    for kind in ("reentrant", "non_reentrant", "nested_rr", "nested_rn"):
        for _ in range(5):
            models = [hooked(kind, seed=seed) for seed in range(2)]
            forwards = [(batch(1), SPLITS[0]), (batch(2), SPLITS[1])]
            expected = [expected_gradients(model, [forward]) for model, forward in zip(models, forwards, strict=True)]
            losses = [run_forward(model, *forward) for model, forward in zip(models, forwards, strict=True)]
            failures = []

            def run(loss, failures=failures):
                try:
                    loss.backward()
                except RuntimeError as error:  # shown below
                    failures.append(error)

            threads = [threading.Thread(target=run, args=(loss,)) for loss in losses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures, failures
            for model, gradients in zip(models, expected, strict=True):
                assert_gradients(model.gradients(), gradients, kind)


def random_schedule(seed, steps=12):
    """Forwards of two models under random documents, pending losses backwarded in random order and grouping."""
    choose = random.Random(seed)
    kinds = [choose.choice(ALL_KINDS) for _ in range(2)]
    models = [hooked(kind, seed=index, num_layers=choose.choice((2, 4))) for index, kind in enumerate(kinds)]
    done = [[], []]
    pending = []
    what = f"random_schedule({seed}): kinds {kinds}"
    for step in range(steps):
        action = choose.random()
        if action < 0.55 or not pending:
            index = choose.randrange(2)
            forward = (batch(100 * seed + step), choose.choice(SPLITS))
            if choose.random() < 0.15:
                holder = []
                in_thread(lambda i=index, f=forward, h=holder: h.append(run_forward(models[i], *f)))
                loss = holder[0]
            else:
                loss = run_forward(models[index], *forward)
            done[index].append(forward)
            pending.append(loss)
        elif action < 0.65:
            with torch.no_grad():
                run_forward(choose.choice(models), batch(step), choose.choice(SPLITS))
        elif action < 0.7:
            run_forward(choose.choice(models), batch(step), choose.choice(SPLITS))  # thrown away
        else:
            count = choose.choice((1, 1, 2))
            chosen = [pending.pop(choose.randrange(len(pending))) for _ in range(min(count, len(pending)))]
            total = sum(chosen)
            if choose.random() < 0.2:
                in_thread(total.backward)
            else:
                total.backward()
    choose.shuffle(pending)
    for loss in pending:
        loss.backward()
    got = [model.gradients() for model in models]
    for index, model in enumerate(models):
        if done[index]:
            assert_gradients(got[index], expected_gradients(model, done[index]), what)


class Launches(TorchDispatchMode):
    """Counts the runs of our forward kernel: what a checkpoint answers from its cache does not come down to here."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is FORWARD
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("policy", "launches"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)]
)
def test_case_45_selective_policy_on_our_op(policy, launches):
    def choose(_context, op, *_args, **_kwargs):
        return policy if op is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    model = Model(num_layers=1)
    attach_cp1_packed_varlen_hooks(model)
    x = batch(1).requires_grad_()
    expected = torch.autograd.grad(model.reference(x, SPLITS[0]).square().sum(), [x, *model.parameters()])
    enable_cp1_packed_varlen(SPLITS[0], "flash")
    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    with Launches() as seen:
        out = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        disable_cp1_packed_varlen()
        found = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    assert seen.count == launches
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed):
    random_schedule(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 200))
def test_many_random_schedules(first):
    for seed in range(first, first + 200):
        random_schedule(seed)


# Outer forwards of attached models.


def scoped_forward(model, attachment, x, doc_ids):
    documents = None if doc_ids is None else ArmedDocuments(doc_ids)
    with forward_scope(documents, attachment):
        out = model(x)
    keep_documents(out, documents)
    return out.square().sum()


def attached(kind, seed=0, num_layers=2):
    model = Model(kind, seed=seed, num_layers=num_layers)
    attachment = new_attachment()
    for name, layer in zip("abcd", model.plain_layers, strict=False):
        hook_attention(layer.self_attn, ModuleRecord(name), attachment=attachment)
    return model, attachment


@pytest.mark.parametrize("order", ["AB", "BA", "A+B"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_scopes_with_two_forwards_in_flight(kind, order):
    model, attachment = attached(kind)
    forwards = [(batch(1), SPLITS[0]), (batch(2), None), (batch(3), SPLITS[1])]
    expected = expected_gradients(model, forwards)
    losses = [scoped_forward(model, attachment, *forward) for forward in forwards]
    if order == "A+B":
        sum(losses).backward()
    else:
        for loss in losses if order == "AB" else reversed(losses):
            loss.backward()
    assert_gradients(model.gradients(), expected, f"{kind} {order}")


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["none", "reentrant", "non_reentrant", "nested_rn"])
def test_a_whole_attached_forward_is_recomputed(kind, use_reentrant):
    model, attachment = attached(kind)
    forwards = [(batch(1).requires_grad_(), SPLITS[0]), (batch(2).requires_grad_(), SPLITS[1])]
    expected = expected_gradients(model, forwards)
    losses = [
        checkpoint(lambda x, ids=ids: scoped_forward(model, attachment, x, ids), x, use_reentrant=use_reentrant)
        for x, ids in forwards
    ]
    for loss in losses:
        loss.backward()
    assert_gradients(model.gradients(), expected, kind)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_region_that_arms_by_itself(use_reentrant):
    """Models of the seed arm in their own forward; here that forward is checkpointed as a whole."""
    model = hooked("none")
    forwards = [(batch(1).requires_grad_(), SPLITS[0]), (batch(2).requires_grad_(), SPLITS[1])]
    expected = expected_gradients(model, forwards)
    losses = [
        checkpoint(lambda x, ids=ids: run_forward(model, x, ids), x, use_reentrant=use_reentrant) for x, ids in forwards
    ]
    disable_cp1_packed_varlen()
    for loss in losses:
        loss.backward()
    assert_gradients(model.gradients(), expected, "arms by itself")


def test_a_scope_wins_over_the_armed_state_and_leaves_it():
    model, attachment = attached("non_reentrant")
    enable_cp1_packed_varlen(SPLITS[2], "flash")
    forward = (batch(1), SPLITS[0])
    expected = expected_gradients(model, [forward])
    scoped_forward(model, attachment, *forward).backward()
    assert_gradients(model.gradients(), expected, "scope")
    assert _PACKED_STATE.get().doc_ids.tolist() == SPLITS[2].tolist()


@pytest.mark.parametrize("within", SPLITS)
def test_a_scope_within_another_of_its_attachment(within):
    model, attachment = attached("reentrant")
    forwards = [(batch(1), SPLITS[0]), (batch(2), within), (batch(3), SPLITS[0])]
    expected = expected_gradients(model, forwards)
    outer = ArmedDocuments(SPLITS[0])
    with forward_scope(outer, attachment):
        assert in_forward_scope(attachment)
        losses = [model(batch(1)).square().sum(), scoped_forward(model, attachment, batch(2), within)]
        losses.append(model(batch(3)).square().sum())
    assert not in_forward_scope(attachment)
    for loss in losses:
        keep_documents(loss, outer)
        loss.backward()
    assert_gradients(model.gradients(), expected, "within another")


def test_nested_attachments_have_their_own_documents():
    """A model within a model, both attached: the newest hooking's scope counts, where there is one."""
    model, inner = attached("non_reentrant")
    outer = new_attachment()
    for layer in model.plain_layers:
        hook_attention(layer.self_attn, ModuleRecord("again"), attachment=outer)
    forwards = [(batch(1), SPLITS[0]), (batch(2), SPLITS[1])]
    expected = expected_gradients(model, forwards)
    losses = [
        scoped_forward(model, attachment, *forward)
        for attachment, forward in zip((inner, outer), forwards, strict=True)
    ]
    for loss in losses:
        loss.backward()
    assert_gradients(model.gradients(), expected, "nested attachments")


def test_run_scoped_keeps_the_documents_and_ends_by_any_exception():
    model, attachment = attached("reentrant")
    forward = (batch(1), SPLITS[0])
    expected = expected_gradients(model, [forward])
    out = run_scoped(ArmedDocuments(SPLITS[0]), attachment, model, (forward[0],), {})
    for error in (ValueError, KeyboardInterrupt):

        def fail(error=error):
            raise error

        with pytest.raises(error):
            run_scoped(None, attachment, fail, (), {})
        assert not in_forward_scope(attachment)
    out.square().sum().backward()
    assert_gradients(model.gradients(), expected, "run_scoped")


# Where it cannot be told, it raises.


def test_hooked_between_forward_and_backward():
    for kind in ("reentrant", "non_reentrant"):
        model = Model(kind)
        enable_cp1_packed_varlen(SPLITS[0], "flash")
        loss = model(batch(1)).sum()
        attach_cp1_packed_varlen_hooks(model)
        with pytest.raises(RuntimeError, match=r"ran before this attention was hooked.*keep the hooks attached"):
            loss.backward()


def test_a_fresh_forward_in_a_tensor_hook_while_others_are_armed():
    model, other = hooked("non_reentrant"), hooked("none", seed=1)
    out = []
    loss = run_forward(model, batch(1), SPLITS[0])
    model_output = loss * 1.0
    model_output.register_hook(lambda grad: out.append(run_forward(other, batch(2), SPLITS[1])))
    with pytest.raises(RuntimeError, match="documents were armed within this backward that differ"):
        model_output.backward()


def test_a_recompute_outside_of_backward():
    model = hooked("non_reentrant")
    enable_cp1_packed_varlen(SPLITS[0], "flash")
    out = model(batch(1))
    disable_cp1_packed_varlen()
    tanh = out.grad_fn.next_functions[1][0]
    with pytest.raises(RuntimeError, match="recomputed outside of a backward"):
        _ = tanh._saved_result


def test_an_overwritten_buffer_of_a_recomputed_scope():
    model, attachment = attached("none")
    ids = SPLITS[0].clone()
    loss = checkpoint(
        lambda x: scoped_forward(model, attachment, x, ids), batch(1).requires_grad_(), use_reentrant=False
    )
    ids.copy_(SPLITS[2])  # as many documents, other ones
    with pytest.raises(RuntimeError, match="found other documents than it ran under; was its doc_ids buffer"):
        loss.backward()


def test_any_number_of_reentrant_forwards_in_flight():
    model = hooked("reentrant", num_layers=1)
    forwards = [(batch(seed), SPLITS[seed % 3]) for seed in range(70)]
    expected = expected_gradients(model, forwards)
    losses = [run_forward(model, *forward) for forward in forwards]
    disable_cp1_packed_varlen()
    for loss in losses:
        loss.backward()
    assert_gradients(model.gradients(), expected, "70 in flight")


# What is kept alive.


class SetupContextCheckpoint(OwnCheckpoint):
    """A recompute scheme whose forward is not given its context, so nothing of it can be found while it runs."""

    @staticmethod
    def forward(module, x):
        with torch.no_grad():
            return module(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.module = inputs[0]
        ctx.save_for_backward(inputs[1])


class DecoratedCheckpoint(OwnCheckpoint):
    forward = staticmethod(torch.amp.custom_fwd(OwnCheckpoint.forward, device_type="cpu"))


def alive(references):
    gc.collect()
    return sum(reference() is not None for reference in references)


def alive_in_cpp(numbers):
    """Documents whose C++ part is alive, whoever keeps it."""
    return sum(ops.find_documents(number) is not None for number in numbers)


class Seen:
    """Weak references to what was in force, in Python and in C++."""

    def __init__(self):
        self.references = []
        self.numbers = []

    def add(self, documents):
        self.references.append(weakref.ref(documents))
        self.numbers.append(documents.id)

    @property
    def alive(self):
        gc.collect()
        return alive(self.references), alive_in_cpp(self.numbers)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_nothing_is_kept_alive_after_backward(kind):
    model = hooked(kind)
    seen = Seen()
    losses = []
    for seed in range(3):
        losses.append(run_forward(model, batch(seed), SPLITS[seed]))
        seen.add(_PACKED_STATE.get())
    disable_cp1_packed_varlen()
    assert seen.alive == (3, 3)  # by their graphs
    while losses:
        losses.pop().backward()
        assert seen.alive == (len(losses), len(losses))
    assert ops.state_statistics()[2:4] == [0, 0]  # redirects, scopes


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_nothing_is_kept_alive_after_the_backward_of_an_attached_forward(kind):
    model, attachment = attached(kind)
    seen = Seen()
    losses = []
    for seed in range(3):
        documents = ArmedDocuments(SPLITS[seed])
        seen.add(documents)
        losses.append(run_scoped(documents, attachment, model, (batch(seed),), {}).square().sum())
        del documents
    assert seen.alive == (3, 3)
    while losses:
        backward = losses.pop().backward
        in_thread(backward)
        del backward
        assert seen.alive == (len(losses), len(losses))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("in_scope", [False, True])
def test_nothing_is_kept_alive_by_a_forward_that_was_recomputed_as_a_whole(use_reentrant, in_scope):
    """What the recompute itself armed, or ran under, ends with the backward: also when no call of ours follows it."""
    model, attachment = attached("none") if in_scope else (hooked("none"), 0)
    seen = Seen()

    def forward(x):
        documents = ArmedDocuments(SPLITS[0])
        seen.add(documents)
        if in_scope:
            return run_scoped(documents, attachment, model, (x,), {}).square().sum()
        _PACKED_STATE.set(documents)
        return model(x).square().sum()

    loss = checkpoint(forward, batch(1).requires_grad_(), use_reentrant=use_reentrant)
    loss.backward()
    disable_cp1_packed_varlen()
    assert len(seen.numbers) == 2
    del loss
    assert seen.alive == (0, 0)


class OwnTanh(torch.autograd.Function):
    """An activation written in Python, as those of kernel libraries are."""

    @staticmethod
    def forward(ctx, x):
        out = x.tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


@pytest.mark.parametrize("later", [0, 1, 4])
def test_a_python_function_whose_saved_tensor_is_made_again(later):
    """Its node is the last of the region, not the first: right with one arming, else it raises, never a later one's."""
    model = hooked("none")
    x = batch(1)
    expected = gradients_with_tanh(model, x, SPLITS[0])
    arm(SPLITS[0])
    loss = loss_of_layers(model, x, functools.partial(saved_tensor_hooks, tanh=OwnTanh.apply))  # by a node of Python's
    arm(SPLITS[later])
    model(batch(2))
    if later == 0:
        loss.backward()
        assert_gradients(model.gradients(), expected, "made again")
    else:
        with pytest.raises(RuntimeError, match=r"before the region that is recomputed, or at its end.*Arm \(or call"):
            loss.backward()


@pytest.mark.parametrize("first", SPLITS[:2] + SPLITS[4:])
@pytest.mark.parametrize("kind", ["none", "reentrant", "nested_rr", "own_function"])
def test_a_reentrant_region_that_arms_by_itself(kind, first):
    """Its node comes before its own arming, behind a forward under other documents."""
    model = hooked(kind)
    forwards = [(batch(1), SPLITS[2]), (batch(2), SPLITS[3])]
    expected = expected_gradients(model, forwards)
    losses = []
    for x, doc_ids in forwards:
        run_forward(model, batch(3), first)
        x = x.requires_grad_()
        region = functools.partial(run_forward, model, doc_ids=doc_ids)
        losses.append(checkpoint(region, x, use_reentrant=True))
    for loss in losses:
        loss.backward()
    assert_gradients(model.gradients(), expected, kind)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_an_evaluation_keeps_nothing(kind):
    model = hooked(kind)
    seen = Seen()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            run_forward(model, batch(1), SPLITS[0])
        seen.add(_PACKED_STATE.get())
    disable_cp1_packed_varlen()
    assert seen.alive == (0, 0)


@pytest.mark.parametrize("kind", ["reentrant", "nested_rr", "nested_rn", "nested_nr", "own_function"])
def test_a_graph_that_is_kept_keeps_its_documents(kind):
    """retain_graph, and a graph whose parts get backwards of their own."""
    model = hooked(kind, num_layers=2)
    forward = (batch(1), SPLITS[0])
    expected = expected_gradients(model, [forward, forward])
    loss = run_forward(model, *forward)
    disable_cp1_packed_varlen()
    loss.backward(retain_graph=True)
    gc.collect()
    loss.backward()
    assert_gradients(model.gradients(), expected, kind)


@pytest.mark.parametrize("checkpointed", [OwnCheckpoint.apply, DecoratedCheckpoint.apply], ids=["own", "decorated"])
def test_own_functions_keep_their_documents(checkpointed):
    model = hooked("none", num_layers=1)
    forward = (batch(1).requires_grad_(), SPLITS[0])
    expected = expected_gradients(model, [forward])
    arm(SPLITS[0])
    seen = Seen()
    seen.add(_PACKED_STATE.get())
    loss = checkpointed(model, forward[0]).square().sum()
    disable_cp1_packed_varlen()
    assert seen.alive == (1, 1)
    loss.backward()
    assert_gradients(model.gradients(), expected, "own function")
    del loss
    assert seen.alive == (0, 0)


@pytest.mark.parametrize("later", [15, 16])
def test_a_function_without_a_context_has_the_last_16_documents(later):
    """The bound of the one ring that there is."""
    model = hooked("none", num_layers=1)
    forward = (batch(1).requires_grad_(), SPLITS[0])
    expected = expected_gradients(model, [forward])
    seen = Seen()
    losses = []
    for index in range(1 + later):
        arm(SPLITS[index % 2])
        seen.add(_PACKED_STATE.get())
        losses.append(SetupContextCheckpoint.apply(model, forward[0]).square().sum())
    disable_cp1_packed_varlen()
    gc.collect()
    assert alive_in_cpp(seen.numbers) == 16
    if later == 15:
        losses[0].backward()
        assert_gradients(model.gradients(), expected, "setup_context")
    else:
        with pytest.raises(
            RuntimeError, match=r"are gone: .*with setup_context.*16 later ones.* Run that backward before"
        ):
            losses[0].backward()


def test_a_used_document_is_not_the_oldest_of_the_last_16():
    """What counts is the latest forward, not the first."""
    model = hooked("none", num_layers=1)
    forward = (batch(1).requires_grad_(), SPLITS[0])
    expected = expected_gradients(model, [forward])

    def run():
        return SetupContextCheckpoint.apply(model, forward[0]).square().sum()

    first = ArmedDocuments(SPLITS[0])
    _PACKED_STATE.set(first)
    run()
    for _ in range(15):
        arm(SPLITS[2])
        run()
    _PACKED_STATE.set(first)
    loss = run()
    del first
    for _ in range(15):
        arm(SPLITS[2])
        run()
    disable_cp1_packed_varlen()
    gc.collect()
    loss.backward()
    assert_gradients(model.gradients(), expected, "used twice")


def test_a_failed_backward_leaves_no_redirect():
    model = hooked("nested_rn")
    loss = run_forward(model, batch(1), SPLITS[0])

    def fail(_):
        raise ValueError("stop here")

    handle = model.layers[0].mlp[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="stop here"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    forwards = [(batch(2), SPLITS[1]), (batch(3), SPLITS[2])]
    expected = expected_gradients(model, forwards)
    for loss in [run_forward(model, *forward) for forward in forwards]:
        loss.backward()
    assert_gradients(model.gradients(), expected, "after a failure")


# Hugging Face's own checkpointing.


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_case_28_llama_with_gradient_checkpointing(use_reentrant):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).double().train()
    attach_cp1_packed_varlen_hooks(model)
    tokens = [torch.randint(32, (1, ROWS)) for _ in range(2)]

    def losses():
        for ids, doc_ids in zip(tokens, WITHOUT_PADDING, strict=True):
            arm(doc_ids)
            yield model(input_ids=ids).logits.square().mean()

    model.zero_grad()
    sum(losses()).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    sum(model_documents_alone(model, tokens)).backward()
    assert_gradients([parameter.grad for parameter in model.parameters()], expected, "each document alone")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for order in ((0, 1), (1, 0)):
        model.zero_grad()
        pending = list(losses())
        for index in order:
            pending[index].backward()
        assert_gradients([parameter.grad for parameter in model.parameters()], expected, f"order {order}")


def model_documents_alone(model, tokens):
    """The same loss, from each document's own forward, unarmed."""
    disable_cp1_packed_varlen()
    for ids, doc_ids in zip(tokens, WITHOUT_PADDING, strict=True):
        logits = []
        for document in doc_ids[0].unique_consecutive().tolist():
            rows = doc_ids[0] == document
            logits.append(model(input_ids=ids[:, rows], position_ids=rows.nonzero().T).logits)
        yield torch.cat(logits, 1).square().mean()
