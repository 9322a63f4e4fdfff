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
import torch.utils.checkpoint

import packed_sdpa
from packed_models import Model, assert_gradients, one_torch_thread, stock_everywhere  # noqa: F401
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
    """In the middle of another forward, of another model or of the same one."""
    model = attached(0)
    other = model if same else attached(1)
    out = []

    def handle(*_):
        model.between = Stopping.between
        out.append(other(WORK[1][0]) if way == "call" else other.forward(WORK[1][0]))

    model.between = lambda: os.kill(os.getpid(), signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert_right(model, model(WORK[0][0]), 0)
        assert_right(other, out[0], 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    model.between = Stopping.between
    for index in (0, 1):
        assert_right(model, model(WORK[index][0]), index)


class Looped(Model):
    """A forward that calls itself, as recycling models and those that dispatch on a mode do."""

    def forward(self, x, doc_ids=None, others=(), way="call"):
        x = Model.forward(self, x)
        again = self if way == "call" else self.forward
        return again(x, others[0], others[1:], way) if others else x

    def right(self, x, *documents):
        for doc_ids in documents:
            x = self.reference(x, doc_ids)
        return x


@pytest.mark.parametrize("way", ["call", "forward"])
@pytest.mark.parametrize("documents", ["arguments", "callable", "armed"])
@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_a_forward_that_calls_itself(way, documents, use_reentrant):
    """Each forward has the documents that it is told, also when all of it is recomputed (where another's node may ask
    for it, it raises if they are others')."""
    model, plain = Looped(), Looped()
    handed = (SPLITS[0], SPLITS[0], SPLITS[0] if documents == "armed" or use_reentrant is False else SPLITS[2])
    if documents == "armed":
        packed_sdpa.arm(handed[0])
    told = {
        "arguments": "auto",
        "armed": None,
        "callable": lambda x, doc_ids, others, way: doc_ids,
    }
    packed_sdpa.attach(model, documents=told[documents])

    def run(x):
        arguments = (x, handed[0], handed[1:], way)
        if use_reentrant is None:
            return model(*arguments)
        return torch.utils.checkpoint.checkpoint(model, *arguments, use_reentrant=use_reentrant)

    x, same = (WORK[0][0].clone().requires_grad_() for _ in range(2))
    out, right = run(x), plain.right(same, *handed)
    torch.testing.assert_close(out, right, rtol=0, atol=1e-11)
    out.square().sum().backward()
    right.square().sum().backward()
    torch.testing.assert_close(x.grad, same.grad, rtol=0, atol=1e-11)
    assert_gradients(model.gradients(), plain.gradients(), way)


def test_a_forward_that_calls_itself_without_the_documents():
    model = Looped()
    packed_sdpa.attach(model)
    with pytest.raises(RuntimeError, match=r"Looped began in the middle of another one, .* hand its documents on, or"):
        model(WORK[0][0], SPLITS[0], (None,))
    with torch.no_grad():
        out = model(WORK[0][0], None, (None, SPLITS[2]))  # the other way round is right
    torch.testing.assert_close(out, model.right(WORK[0][0], None, None, SPLITS[2]))


def test_a_forward_in_the_middle_of_another_that_is_to_run_unpacked():
    model = attached()
    handle, out = packed_sdpa.attach(model, documents=documents_of), []

    def evaluate():
        model.between = Stopping.between
        handle.enabled = False
        out.append(model(WORK[1][0]))
        handle.enabled = True

    model.between = evaluate
    assert_right(model, model(WORK[0][0]), 0)
    torch.testing.assert_close(out[0], model.reference(WORK[1][0], None))


class Told(Model):
    def forward(self, inputs_embeds, doc_ids=None, position_ids=None):
        return super().forward(inputs_embeds)


class Telling(torch.nn.Module):
    """Finds the documents of its model's forwards by itself."""

    def __init__(self):
        super().__init__()
        self.model = Told()
        self.before, self.behind = (torch.nn.Linear(16, 16, dtype=torch.float64) for _ in range(2))

    def forward(self, x, *documents):
        return sum(self.behind(self.model(inputs_embeds=self.before(x), doc_ids=doc_ids)) for doc_ids in documents)

    def right(self, x, *documents):
        return sum(self.behind(self.model.reference(self.before(x), doc_ids)) for doc_ids in documents)


@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_a_wrapper_that_tells_its_model_the_documents(use_reentrant):
    model = Telling()
    packed_sdpa.attach(model, strict=True)
    x, same = (WORK[0][0].clone().requires_grad_() for _ in range(2))
    for documents in ((SPLITS[0], SPLITS[2]), (SPLITS[1],)):
        if use_reentrant is None:
            out = model(x, *documents)
        else:
            out = torch.utils.checkpoint.checkpoint(model, x, *documents, use_reentrant=use_reentrant)
        right = model.right(same, *documents)
        torch.testing.assert_close(out, right, rtol=0, atol=1e-11)
        out.square().sum().backward()
        right.square().sum().backward()
    torch.testing.assert_close(x.grad, same.grad, rtol=0, atol=1e-11)


def test_a_packed_forward_in_the_middle_of_one_whose_positions_tell_no_documents():
    model, out = Told(), []
    packed_sdpa.attach(model)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])  # of SPLITS[0]
    x = WORK[0][0]

    def evaluate(*_):
        hook.remove()
        out.append(model(x, position_ids=positions))

    hook = model.embed.register_forward_hook(evaluate)
    torch.testing.assert_close(model(x, position_ids=torch.arange(8)[None]), model.reference(x, None))
    torch.testing.assert_close(out[0], model.reference(x, SPLITS[0]))


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
