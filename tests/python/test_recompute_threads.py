"""A recompute in a thread that follows what another one arms: it tells its own forward's documents, or raises."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from packed_models import (  # noqa: F401
    ALL_KINDS,
    assert_gradients,
    dense_mask,
    gradients_with_tanh,
    loss_of_layers,
    one_torch_thread,
    saved_tensor_hooks,
)
from packed_sdpa.packed import disable_cp1_packed_varlen
from test_recompute import (
    SPLITS,
    OwnTanh,
    SetupContextCheckpoint,
    arm,
    batch,
    disarmed,  # noqa: F401
    expected_gradients,
    hooked,
)


@pytest.fixture
def worker():
    """``worker(function)``: its result, run in a thread that never arms."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()


@pytest.mark.parametrize("tanh", ["operator", "function"])
@pytest.mark.parametrize("later", [0, 1, 4])
@pytest.mark.parametrize("another_forward", [False, True])
@pytest.mark.parametrize("backward_here", [False, True])
def test_a_saved_tensor_that_is_made_again(worker, tanh, later, another_forward, backward_here):
    """Its node is the last of the region. Where a later forward ran under other documents, it may as well be the first
    of that one's, by a reentrant checkpoint."""

    model, x = hooked("none"), batch(1)
    expected = gradients_with_tanh(model, x, SPLITS[0])
    arm(SPLITS[0])
    made_again = functools.partial(saved_tensor_hooks, tanh=torch.tanh if tanh == "operator" else OwnTanh.apply)
    loss = worker(lambda: loss_of_layers(model, x, made_again))
    arm(SPLITS[later])
    if another_forward:
        worker(lambda: model(batch(2)))
    backward = loss.backward if backward_here else functools.partial(worker, loss.backward)
    if another_forward and later != 0:
        with pytest.raises(RuntimeError, match=r"cannot (tell whether|be told).* Arm .* in the thread that runs"):
            backward()
    else:
        backward()
        assert_gradients(model.gradients(), expected, f"{tanh} {later}")


REGIONS_OF_FUNCTIONS = [kind for kind in ALL_KINDS if kind.endswith(("reentrant", "_r", "_rr", "_nr", "function"))]


@pytest.mark.parametrize("first", [None, SPLITS[2]])
@pytest.mark.parametrize("kind", [kind for kind in REGIONS_OF_FUNCTIONS if "non" not in kind])
def test_reentrant_checkpoints_in_a_following_thread(worker, kind, first):
    """Their node's own forward ran the attention, so the next call is theirs, whatever was armed before it."""
    model = hooked(kind)
    forwards = [(batch(1), SPLITS[0]), (batch(2), None), (batch(3), SPLITS[1])]
    expected = expected_gradients(model, forwards)
    arm(first)
    worker(lambda: model(batch(9)))
    losses = []
    for x, doc_ids in forwards:
        arm(doc_ids)
        losses.append(worker(lambda x=x: model(x).square().sum()))
    for loss in losses:
        worker(loss.backward)
    assert_gradients(model.gradients(), expected, kind)


def test_a_function_without_a_context_in_a_following_thread(worker):
    """Nothing of it is known while it runs, so its node may as well be the last of the forward before."""
    model = hooked("none", num_layers=1)
    x = batch(1).requires_grad_()
    arm(SPLITS[0])
    worker(lambda: model(batch(2)))
    arm(SPLITS[1])
    loss = worker(lambda: SetupContextCheckpoint.apply(model, x).square().sum())
    with pytest.raises(
        RuntimeError, match=r"before the region .* or at its end.* Arm .* in the thread that runs the l"
    ):
        loss.backward()

    def armed_there():
        arm(SPLITS[1])
        return SetupContextCheckpoint.apply(model, x).square().sum()

    expected = expected_gradients(model, [(x, SPLITS[1])])
    loss = worker(armed_there)
    disable_cp1_packed_varlen()
    loss.backward()
    assert_gradients(model.gradients(), expected, "the cure")
