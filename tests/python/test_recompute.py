"""A recompute in backward reads the documents of its own forward: CASES 28-32, 46, and the kinds around them."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest
import torch
from packed_models import ALL_KINDS, Model, assert_gradients, one_torch_thread  # noqa: F401

from packed_sdpa._library import ops
from packed_sdpa.armed import ArmedDocuments
from packed_sdpa.hooks import forward_scope, keep_documents, new_attachment
from packed_sdpa.packed import (
    _PACKED_STATE,
    attach_cp1_packed_varlen_hooks,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
)

ROWS = 8
SPLITS = [
    torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]]),
    torch.tensor([[1, 2, 2, 2, 2, 3, 3, 0]]),
    torch.tensor([[7, 7, 7, 7, 7, 7, 1, 1]]),
    torch.tensor([[0, 1, 2, 1, 1, 3, 3, 3]]),
    None,  # unarmed
]
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
        except BaseException as error:  # handed to the test's own thread
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
                except BaseException as error:  # shown below
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


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed):
    random_schedule(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 200))
def test_many_random_schedules(first):
    for seed in range(first, first + 200):
        random_schedule(seed)
