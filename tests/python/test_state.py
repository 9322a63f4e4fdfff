"""The thread-shared variable, the armed state and the configuration."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from packed_sdpa import state
from packed_sdpa.armed import ArmedDocuments
from packed_sdpa.packed import (
    _PACKED_STATE,
    cp1_packed_varlen_backend,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
)
from packed_sdpa.state import _ThreadSharedVar, configure_cp_varlen, normalize_attn_backend, normalize_kv_exchange


class Value:
    pass


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture(autouse=True)
def as_found():
    disable_cp1_packed_varlen()
    yield
    disable_cp1_packed_varlen()
    configure_cp_varlen(attn_backend=None, kv_exchange=None)


def test_nothing_is_set_at_first():
    assert _ThreadSharedVar().get() is None


def test_every_thread_sees_the_latest_until_it_sets_its_own():
    variable = _ThreadSharedVar()
    variable.set("main")
    assert in_thread(variable.get) == "main"

    def own():
        variable.set("own")
        return variable.get()

    assert in_thread(own) == "own"
    assert variable.get() == "main"  # this thread set a value itself
    variable.set("newer")
    assert in_thread(variable.get) == "newer"


def test_the_latest_may_come_from_a_thread_that_has_ended():
    variable = _ThreadSharedVar()
    in_thread(lambda: variable.set("left behind"))
    assert variable.get() == "left behind"
    token = variable.set("mine")
    assert variable.get() == "mine"
    variable.reset(token)
    assert variable.get() == "left behind"


def test_reset_nests():
    variable = _ThreadSharedVar()
    first = variable.set(1)
    second = variable.set(2)
    third = variable.set(None)
    assert variable.get() is None
    variable.reset(third)
    assert variable.get() == 2
    variable.reset(second)
    assert variable.get() == 1
    variable.reset(first)
    assert variable.get() is None


def test_reset_leaves_what_others_set():
    variable = _ThreadSharedVar()
    token = variable.set("mine")
    in_thread(lambda: variable.set("theirs"))
    variable.reset(token)
    assert variable.get() == "theirs"


def test_wrong_tokens_are_refused_and_change_nothing():
    variable, other = _ThreadSharedVar(), _ThreadSharedVar()
    token = variable.set(1)
    with pytest.raises(ValueError, match="made by another variable"):
        other.reset(token)
    with pytest.raises(TypeError, match="token must be what set\\(\\) returned, got str"):
        variable.reset("token")

    def elsewhere():
        with pytest.raises(ValueError, match="token was made in another thread; reset"):
            variable.reset(token)
        return True

    assert in_thread(elsewhere)
    assert variable.get() == 1
    variable.reset(token)
    with pytest.raises(RuntimeError, match="already been used once"):
        variable.reset(token)
    assert variable.get() is None


def test_values_are_freed_when_no_slot_refers_to_them():
    variable = _ThreadSharedVar()
    value = Value()
    alive = weakref.ref(value)
    token = variable.set(value)
    del value
    assert alive() is not None
    variable.reset(token)
    del token
    gc.collect()
    assert alive() is None


def test_values_of_ended_threads_are_freed():
    variable = _ThreadSharedVar()
    alive = []

    def work():
        value = Value()
        alive.append(weakref.ref(value))
        variable.set(value)

    in_thread(work)
    deadline = time.monotonic() + 5.0
    while alive[0]() is not None and time.monotonic() < deadline:  # join() returns a little before the thread is gone
        variable.set("newer")
    assert alive[0]() is None


def test_many_threads_each_see_their_own():
    variable = _ThreadSharedVar()
    failures = []

    def work(number):
        for round_ in range(200):
            token = variable.set((number, round_))
            if variable.get() != (number, round_):
                failures.append((number, round_))
            if round_ % 2:
                variable.reset(token)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_armed_state_is_a_thread_shared_variable():
    assert isinstance(_PACKED_STATE, _ThreadSharedVar)
    assert _PACKED_STATE.get() is None
    enable_cp1_packed_varlen(torch.tensor([1, 1, 2]), "flash")
    armed = _PACKED_STATE.get()
    doc_ids, _ = armed
    assert doc_ids.tolist() == [[1, 1, 2]]
    assert in_thread(_PACKED_STATE.get) is armed
    token = _PACKED_STATE.set((torch.tensor([[1, 2]]), "te"))
    assert _PACKED_STATE.get().doc_ids.tolist() == [[1, 2]]
    _PACKED_STATE.reset(token)
    assert _PACKED_STATE.get() is armed
    disable_cp1_packed_varlen()
    assert _PACKED_STATE.get() is None
    with pytest.raises(TypeError, match=r"holds ArmedDocuments, \(doc_ids, backend\) or None, got str"):
        _PACKED_STATE.set("flash")


def test_case_14_the_id_buffer_may_be_reused():
    ids = torch.tensor([1, 1, 2])
    enable_cp1_packed_varlen(ids, "flash")
    ids.fill_(5)
    assert _PACKED_STATE.get().doc_ids.tolist() == [[1, 1, 2]]


@pytest.mark.parametrize(
    ("doc_ids", "error", "message"),
    [
        (torch.tensor([1, -2]), ValueError, "doc_ids must not be negative, got -2"),
        (torch.tensor([1.0, 2.0]), TypeError, "doc_ids must have an integer dtype"),
        (torch.ones(1, 2, 3, dtype=torch.int64), ValueError, r"doc_ids must be \[B, S\] or \[S\]"),
        ([1, 1], TypeError, "doc_ids must be an integer tensor"),
        (None, TypeError, "doc_ids must be an integer tensor"),
    ],
)
def test_bad_ids_leave_the_state_as_it_was(doc_ids, error, message):
    enable_cp1_packed_varlen(torch.tensor([1, 1]), "flash")
    before = _PACKED_STATE.get()
    with pytest.raises(error, match=message):
        enable_cp1_packed_varlen(doc_ids, "flash")
    assert _PACKED_STATE.get() is before


@pytest.mark.parametrize("backend", ["flsh", "dense", "cuda", 3])
def test_case_48_unknown_backend_leaves_the_state_as_it_was(backend):
    names = "flash or te" if backend == "dense" else r"one of flash, te, dense \(.*\)"
    cure = "to run dense, do not arm" if backend == "dense" else "give one of these names"
    message = rf"^backend must be {names}, got {backend!r}; {cure}$"
    with pytest.raises(ValueError, match=message):
        enable_cp1_packed_varlen(torch.tensor([1, 1]), backend)
    with pytest.raises(ValueError, match=message):
        _PACKED_STATE.set((torch.tensor([1, 1]), backend))
    assert _PACKED_STATE.get() is None


def test_case_47b_configured_backend():
    assert cp1_packed_varlen_backend() == "flash"
    configure_cp_varlen(attn_backend="dense")
    assert cp1_packed_varlen_backend() is None
    configure_cp_varlen(attn_backend="TE", kv_exchange="halo")
    assert cp1_packed_varlen_backend() == "te"
    assert state.configured_kv_exchange() == "halo"
    configure_cp_varlen(attn_backend=None)
    assert cp1_packed_varlen_backend() == "flash"
    assert state.configured_kv_exchange() == "halo"  # not given: as it was


def test_bad_configuration_changes_nothing():
    with pytest.raises(ValueError, match=r"kv_exchange must be one of all_gather, halo, all_to_all .*, got 'a2a'"):
        configure_cp_varlen(attn_backend="te", kv_exchange="a2a")
    assert cp1_packed_varlen_backend() == "flash"


@pytest.mark.parametrize(
    ("name", "normal"),
    [
        *((name, "flash") for name in (None, "", "auto", "default", "flash", "FLASH", "flash-attn", "fa2", " flash ")),
        *((name, "te") for name in ("te", "TE", "transformer_engine", "transformer-engine")),
        ("dense", "dense"),
    ],
)
def test_backend_synonyms(name, normal):
    assert normalize_attn_backend(name) == normal


@pytest.mark.parametrize("name", ["flashy", "te2", 1, True])
def test_unknown_names(name):
    with pytest.raises(ValueError, match="attn_backend must be one of flash, te, dense"):
        normalize_attn_backend(name)
    with pytest.raises(ValueError, match="kv_exchange must be one of"):
        normalize_kv_exchange(name)


def test_documents_keep_one_layout():
    documents = ArmedDocuments(torch.tensor([[1, 1, 2], [3, 3, 3]]))
    assert documents.layout is documents.layout
    assert (documents.batch, documents.rows, documents.layout.num_documents) == (2, 3, 3)
