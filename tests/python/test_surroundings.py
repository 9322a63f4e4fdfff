"""What runs between, inside or beside forwards: asyncio, greenlets, signal handlers, finalizers, processes, pools."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import packed_sdpa
from packed_models import Model, one_torch_thread, stock_everywhere  # noqa: F401
from packed_sdpa.packed import attach_cp1_packed_varlen_hooks
from test_recompute import SPLITS, batch, disarmed  # noqa: F401

WORK = [(batch(1), SPLITS[0]), (batch(2), SPLITS[2])]
OTHERS_WERE_ARMED = r"since this asyncio task \(or greenlet.* arm right before the forward, .* as arguments"


class Stopping(Model):
    """Calls ``between`` after each layer."""

    between = staticmethod(lambda: None)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            self.between()
        return x


def documents_of(x):
    return next(doc_ids for each, doc_ids in WORK if each is x)


def attached(seed=0):
    model = Stopping(seed=seed)
    packed_sdpa.attach(model, documents=documents_of)
    return model


def seed_hooked(seed=0):
    model = Stopping(seed=seed)
    attach_cp1_packed_varlen_hooks(model)
    return model


def assert_right(model, out, index):
    torch.testing.assert_close(out, model.reference(*WORK[index]), rtol=0, atol=1e-11)


def gather(*coroutines):
    async def all_of_them():
        return await asyncio.gather(*coroutines)

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("rest", ["sleep", "thread"])
def test_asyncio_tasks(rest):
    """Arming is the thread's: a task that another one armed after is told, in the event loop's thread and in others."""
    armed, told = seed_hooked(), attached()

    async def run(model, index, arms, waits):
        if arms:
            packed_sdpa.arm(WORK[index][1])
        if waits:
            begun.append(index)
            if len(begun) == 2:
                both.set()
        if waits and rest == "sleep":
            while not both.is_set():
                await asyncio.sleep(0)
        if waits and rest == "thread":
            return await asyncio.to_thread(lambda: (both.wait(60), model(WORK[index][0]))[1])
        return model(WORK[index][0])

    begun, both = [], threading.Event()

    with pytest.raises(RuntimeError, match=OTHERS_WERE_ARMED):
        gather(*(run(armed, index, arms=True, waits=True) for index in (0, 1)))
    for model, arms, waits in ((armed, True, False), (told, False, True)):  # both cures
        packed_sdpa.disarm()
        begun, both = [], threading.Event()
        for index, out in enumerate(gather(*(run(model, index, arms, waits) for index in (0, 1)))):
            assert_right(model, out, index)


def test_a_task_that_arms_and_one_that_disarms():
    model = seed_hooked()

    async def evaluate():
        packed_sdpa.disarm()
        disarmed_again.set()

    async def train():
        packed_sdpa.arm(SPLITS[0])
        await disarmed_again.wait()
        return model(WORK[0][0])

    disarmed_again = asyncio.Event()

    with pytest.raises(RuntimeError, match=OTHERS_WERE_ARMED):
        gather(train(), evaluate())


def test_set_and_reset_in_a_task():
    """A task's own set and reset leave what its parent armed."""
    from packed_sdpa.packed import _PACKED_STATE

    model = seed_hooked()

    async def evaluate():
        token = _PACKED_STATE.set(None)
        out = model(WORK[0][0])
        _PACKED_STATE.reset(token)
        return out

    packed_sdpa.arm(SPLITS[0])
    gather(evaluate())
    assert_right(model, model(WORK[0][0]), 0)


@pytest.mark.parametrize("make", [attached, seed_hooked])
@pytest.mark.parametrize("two_models", [False, True])
def test_greenlets_that_interleave_forwards(make, two_models):
    greenlet = pytest.importorskip("greenlet")
    models = [make(0), make(1)] if two_models else [make(0)] * 2
    main = greenlet.getcurrent()

    def run(index):
        if make is seed_hooked:
            packed_sdpa.arm(WORK[index][1])
        return models[index](WORK[index][0])

    for index in (0, 1):  # one after the other
        assert_right(models[index], greenlet.greenlet(run).switch(index), index)
    for model in models:
        model.between = main.switch
    first = greenlet.greenlet(run)
    first.switch(0)
    if make is seed_hooked:
        second = greenlet.greenlet(run)
        second.switch(1)
        with pytest.raises(RuntimeError, match=OTHERS_WERE_ARMED):
            first.switch()
        for model in models:
            model.between = Stopping.between
        assert_right(models[1], second.switch(), 1)
    else:
        with pytest.raises(RuntimeError, match="another greenlet of this thread was left in the middle"):
            greenlet.greenlet(run).switch(1)
        while not first.dead:
            out = first.switch()
        assert_right(models[0], out, 0)


def test_greenlets_within_a_hooked_attention():
    greenlet = pytest.importorskip("greenlet")
    model, other = seed_hooked(0), seed_hooked(1)
    main = greenlet.getcurrent()
    attention = model.plain_layers[0].self_attn
    attention.qkv.register_forward_hook(lambda *_: (main.switch(), None)[1])
    with stock_everywhere():
        packed_sdpa.arm(SPLITS[0])
        first = greenlet.greenlet(model.forward)
        first.switch(WORK[0][0])
        query = torch.randn(1, 2, 8, 8, dtype=torch.float64)
        for call in (
            lambda: other(WORK[1][0]),
            lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query),
        ):
            with pytest.raises(RuntimeError, match="another greenlet of this thread was left in the middle"):
                call()
        out = first.switch()
        assert_right(model, out, 0)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("way", ["call", "forward"])
def test_a_signal_handler_that_runs_a_forward(same, way):
    """In the middle of another forward: of another model right, of the same one it raises."""
    model = attached(0)
    other = model if same else attached(1)
    out = []

    def handle(*_):
        model.between = Stopping.between
        out.append(other(WORK[1][0]) if way == "call" else other.forward(WORK[1][0]))

    model.between = lambda: os.kill(os.getpid(), signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        if same:
            with pytest.raises(RuntimeError, match="Stopping began in the middle of another one, in the same thread"):
                model(WORK[0][0])
        else:
            assert_right(model, model(WORK[0][0]), 0)
            assert_right(other, out[0], 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    model.between = Stopping.between
    for index in (0, 1):
        assert_right(model, model(WORK[index][0]), index)


def test_a_finalizer_that_runs_a_forward():
    model, other = attached(0), attached(1)
    out = []

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            out.append(other(WORK[1][0]))

    def collect():
        model.between = Stopping.between
        Cycle()
        gc.collect()

    model.between = collect
    assert_right(model, model(WORK[0][0]), 0)
    assert_right(other, out[0], 1)


def test_a_generator_that_is_left_between_two_forwards():
    model = attached()

    def forwards():
        for index in (0, 1):
            yield index, model(WORK[index][0])

    for (index, out), (again, same) in zip(forwards(), forwards(), strict=True):
        assert_right(model, out, index)
        assert_right(model, same, again)


def test_a_thread_pool():
    model = attached()
    with ThreadPoolExecutor(4) as pool:
        for index, out in pool.map(lambda index: (index, model(WORK[index][0])), [0, 1] * 10):
            assert_right(model, out, index)


# Other processes. The child sends back what it computed.


def run_attached(model, results):
    torch.set_num_threads(1)
    results.send(model(WORK[0][0]).detach().tolist())


def run_copy(model, results):
    assert type(model) is Stopping and not model.plain_layers[0].self_attn._forward_hooks
    plain = model(WORK[0][0])
    with packed_sdpa.attach(model, documents=lambda x: SPLITS[0]):
        packed = model(WORK[0][0])
    results.send([plain.tolist(), packed.tolist()])


def in_process(method, target, model):
    context = multiprocessing.get_context(method)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(model, there))
    process.start()
    there.close()  # so that a child that fails ends the pipe
    try:
        has_result = here.poll(60)
    finally:
        process.join(60)
    assert process.exitcode == 0
    assert has_result
    return torch.tensor(here.recv(), dtype=torch.float64)


def fail(model, results):
    raise SystemExit(3)


def test_a_process_that_fails_is_told():
    with pytest.raises(AssertionError, match="3 == 0"):
        in_process("fork", fail, None)


def test_a_forked_process_has_an_attached_model():
    model = attached()
    out = in_process("fork", run_attached, model)
    assert_right(model, out, 0)


def test_a_spawned_process_has_the_plain_model():
    model = attached()
    packed_sdpa.arm(SPLITS[2])  # stays here
    plain, packed = in_process("spawn", run_copy, model)
    torch.testing.assert_close(plain, model.reference(WORK[0][0], None))
    assert_right(model, packed, 0)


def test_torch_multiprocessing_sends_the_plain_model():
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing

    model = attached()
    sent = pickle.loads(ForkingPickler.dumps(model))
    assert type(sent) is Stopping
    assert torch.equal(sent(WORK[0][0]), sent(WORK[1][0])) is False
    torch.testing.assert_close(sent(WORK[0][0]), model.reference(WORK[0][0], None))


class Features(torch.utils.data.Dataset):
    """Runs an attached model, as a data set of features or scores does."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 2

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(WORK[index][0])[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader_workers(workers):
    """In a worker (forked) as here."""
    model = attached()
    for index, out in enumerate(torch.utils.data.DataLoader(Features(model), num_workers=workers)):
        assert_right(model, out, index)


@pytest.mark.parametrize("inside", ["outer", "attention"])
@pytest.mark.parametrize("make", [attached, seed_hooked])
@pytest.mark.parametrize("half", [False, True])
def test_greenlet_is_imported_in_the_middle_of_a_forward(make, inside, half, monkeypatch):
    greenlet = pytest.importorskip("greenlet")
    monkeypatch.delitem(sys.modules, "greenlet")
    model = make()
    module = model if inside == "outer" else model.plain_layers[0].self_attn.qkv
    found = types.ModuleType("greenlet") if half else greenlet
    module.register_forward_pre_hook(lambda *_: sys.modules.update(greenlet=found))
    packed_sdpa.arm(WORK[0][1])
    assert_right(model, model(WORK[0][0]), 0)
    assert sys.modules["greenlet"] is found


def test_a_greenlet_of_a_module_that_was_imported_in_the_middle(monkeypatch):
    """It is not the one that the forward runs in."""
    greenlet = pytest.importorskip("greenlet")
    monkeypatch.delitem(sys.modules, "greenlet")
    model = attached()

    def between():
        model.between = Stopping.between
        sys.modules["greenlet"] = greenlet
        with pytest.raises(RuntimeError, match="another greenlet of this thread was left in the middle"):
            greenlet.greenlet(model).switch(WORK[1][0])

    model.between = between
    assert_right(model, model(WORK[0][0]), 0)
