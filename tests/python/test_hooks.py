"""The swap is live only while a hooked forward runs, only in its thread, and never leaks: CASES 33-37, 43."""

from __future__ import annotations

import _imp
import _thread
import contextlib
import copy
import functools
import io
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import packed_sdpa
from packed_models import STOCK, Model, SelfAttention, dense_mask, one_torch_thread, plain_attention  # noqa: F401
from packed_sdpa import _torch_private, interception, packed
from packed_sdpa.hooks import hook_attention, hooks_of
from packed_sdpa.packed import (
    _packed_varlen_sdpa,
    attach_cp1_packed_varlen_hooks,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
)
from packed_sdpa.records import ModuleRecord

IDS = torch.tensor([[1, 1, 1, 2, 2, 2, 3, 3]])
ROWS = IDS.shape[1]


def left_behind():
    return [
        what
        for what, is_there in {
            "attribute": F.scaled_dot_product_attention is not STOCK,
            "frames": interception.height() > 0,
            "threads inside": interception._inside,
            "swapped": interception._is_swapped,
            "dispatch key": _torch_private.is_catching(),
            "flags": interception._thread.outside or interception._thread.by_name,
        }.items()
        if is_there
    ]


def nothing_is_left():
    return not left_behind()


@pytest.fixture(autouse=True)
def clean():
    disable_cp1_packed_varlen()
    assert nothing_is_left(), left_behind()
    yield
    disable_cp1_packed_varlen()
    assert nothing_is_left(), left_behind()


@contextlib.contextmanager
def threads_that_switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Attention(nn.Module):
    """Heads are given; ``call`` is how it gets at SDPA."""

    def __init__(self, call=None):
        super().__init__()
        self.call = call or (lambda *args, **kwargs: F.scaled_dot_product_attention(*args, **kwargs))
        self.before = lambda: None

    def forward(self, x):
        self.before()
        return self.call(x, x, x)


class Holder(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.self_attn = attention

    def forward(self, x):
        return self.self_attn(x)


def hooked(attention):
    model = Holder(attention)
    attach_cp1_packed_varlen_hooks(model)
    return model


def operand(rows=ROWS):
    return torch.randn(1, 2, rows, 4, dtype=torch.float64)


def packed_result(x):
    return plain_attention(x, x, x, dense_mask(IDS, x.shape[2]))


def record_of(model):
    return hooks_of(model.self_attn)[0].record


captured = F.scaled_dot_product_attention
WAYS = {
    "attribute": lambda *args: torch.nn.functional.scaled_dot_product_attention(*args),
    "by-name import (CASE 36)": scaled_dot_product_attention,
    "captured": captured,
    "partial": functools.partial(captured),
    "torch._C._nn": lambda *args: torch._C._nn.scaled_dot_product_attention(*args),
    "torch.ops.aten": lambda *args: torch.ops.aten.scaled_dot_product_attention(*args),
    "torch.ops.aten.default": lambda *args: torch.ops.aten.scaled_dot_product_attention.default(*args),
}


@pytest.mark.parametrize("way", WAYS)
def test_case_36_every_way_to_call_it_is_taken_once(way):
    model = hooked(Attention(WAYS[way]))
    enable_cp1_packed_varlen(IDS, "flash")
    x = operand()
    torch.testing.assert_close(model(x), packed_result(x))
    assert (record_of(model).taken, record_of(model).calls) == (1, 1)
    torch.testing.assert_close(model.self_attn.forward(x), packed_result(x))  # not through __call__
    assert record_of(model).taken == 2
    disable_cp1_packed_varlen()
    assert torch.equal(model(x), STOCK(x, x, x))
    assert (record_of(model).taken, dict(record_of(model).passed)) == (2, {packed.UNARMED: 1})


def test_inside_the_attribute_is_the_packed_function():
    model = hooked(Attention())
    seen = []
    model.self_attn.before = lambda: seen.append(F.scaled_dot_product_attention)
    model(operand())
    assert seen == [_packed_varlen_sdpa]


def test_the_hook_pair_is_real_and_there_once():
    model = hooked(Attention())
    attach_cp1_packed_varlen_hooks(model)
    attach_cp1_packed_varlen_hooks(model)
    attention = model.self_attn
    assert len(attention._forward_pre_hooks) == len(attention._forward_hooks) == 1
    assert len(attention._forward_hooks_always_called) == 1
    assert attach_cp1_packed_varlen_hooks(model) is None


def test_modules_whose_names_only_contain_it_are_left_alone():
    model = nn.ModuleDict({"self_attn_norm": nn.Identity(), "cross_self_attn": Attention(), "attn": Attention()})
    attach_cp1_packed_varlen_hooks(model)
    assert [name for name, module in model.named_modules() if hooks_of(module)] == ["cross_self_attn"]


@pytest.mark.parametrize("wrap", ["layer", "self_attn", "both"])
def test_checkpoint_wrapped_models_are_hooked_on_the_inner_module(wrap):
    model = nn.ModuleDict({"layer": Holder(Attention())})
    if wrap in ("self_attn", "both"):
        model.layer.self_attn = checkpoint_wrapper(model.layer.self_attn)
    if wrap in ("layer", "both"):
        model["layer"] = checkpoint_wrapper(model["layer"])
    attach_cp1_packed_varlen_hooks(model)
    assert [type(module).__name__ for module in model.modules() if hooks_of(module)] == ["Attention"]
    enable_cp1_packed_varlen(IDS, "flash")
    x = operand().requires_grad_()
    out = model["layer"](x)
    torch.testing.assert_close(out, packed_result(x))
    disable_cp1_packed_varlen()
    (got,) = torch.autograd.grad(out.square().sum(), x)
    (right,) = torch.autograd.grad(packed_result(x).square().sum(), x)
    torch.testing.assert_close(got, right)


class ExpectedError(Exception):
    pass


@pytest.mark.parametrize("error", [ExpectedError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("direct", [False, True])
def test_case_34_what_raises_leaves_nothing(error, direct):
    model = hooked(Attention())

    def fail():
        raise error

    model.self_attn.before = fail
    with pytest.raises(error):
        (model.self_attn.forward if direct else model)(operand())
    assert nothing_is_left(), left_behind()
    model.self_attn.before = lambda: None
    enable_cp1_packed_varlen(IDS, "flash")
    x = operand()
    torch.testing.assert_close(model(x), packed_result(x))


@pytest.mark.parametrize("error", [ExpectedError, KeyboardInterrupt])
@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_other_hooks_that_raise_leave_nothing(register, error):
    def fail(*_):
        raise error

    for prepend in (False, True):
        model = hooked(Attention())
        getattr(model.self_attn, register)(fail, prepend=prepend)
        with pytest.raises(error):
            model(operand())
        assert nothing_is_left()


def test_case_34_checkpoint_with_early_stop():
    model = hooked(Attention())
    enable_cp1_packed_varlen(IDS, "flash")
    x = operand().requires_grad_()
    checkpoint(model.self_attn, x, use_reentrant=False).square().sum().backward()
    assert nothing_is_left(), left_behind()
    (right,) = torch.autograd.grad(packed_result(x).square().sum(), x)
    torch.testing.assert_close(x.grad, right)


def test_case_34_nested_self_attn():
    inner = hooked(Attention())
    outer = hooked(inner)
    seen = []
    inner.self_attn.before = lambda: seen.append(interception.height())
    enable_cp1_packed_varlen(IDS, "flash")
    x = operand()
    torch.testing.assert_close(outer(x), packed_result(x))
    assert seen == [2]
    assert nothing_is_left(), left_behind()


def test_unhook_leaves_the_module_as_it_was_found():
    attention = Attention()
    before = dict(attention.__dict__)
    unhook = hook_attention(attention, ModuleRecord("x"))
    assert type(attention) is not Attention and isinstance(attention, Attention)
    unhook()
    assert type(attention) is Attention
    assert attention.__dict__ == before
    unhook()


def test_two_hookings_of_one_module_are_taken_apart_in_any_order():
    for order in ((0, 1), (1, 0)):
        attention = Attention()
        unhooks = [hook_attention(attention, ModuleRecord(name)) for name in "ab"]
        enable_cp1_packed_varlen(IDS, "flash")
        x = operand()
        torch.testing.assert_close(attention(x), packed_result(x))
        unhooks[order[0]]()
        torch.testing.assert_close(attention(x), packed_result(x))
        unhooks[order[1]]()
        assert torch.equal(attention(x), STOCK(x, x, x))
        assert type(attention) is Attention


def test_case_35_a_patch_of_somebody_else_after_attach():
    model = hooked(Attention())
    calls = []

    def theirs(*args, **kwargs):
        calls.append(1)
        return STOCK(*args, **kwargs)

    x = operand()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", theirs)
        model(x)  # unarmed: passed through to theirs
        assert (F.scaled_dot_product_attention, len(calls)) == (theirs, 1)
        enable_cp1_packed_varlen(IDS, "flash")
        torch.testing.assert_close(model(x), packed_result(x))
        assert (F.scaled_dot_product_attention, len(calls)) == (theirs, 1)
        for hook in hooks_of(model.self_attn):
            hook.unhook()
        assert F.scaled_dot_product_attention is theirs
        model(x)
        assert len(calls) == 2


def test_case_35_a_patch_during_a_hooked_forward_stays():
    model = hooked(Attention())
    wrapped = []

    def patch_now():
        original = F.scaled_dot_product_attention

        def theirs(*args, **kwargs):
            wrapped.append(1)
            return original(*args, **kwargs)

        F.scaled_dot_product_attention = theirs

    model.self_attn.before = patch_now
    x = operand()
    try:
        torch.testing.assert_close(model(x), STOCK(x, x, x))
        assert len(wrapped) == 1
        model.self_attn.before = lambda: None
        torch.testing.assert_close(model(x), STOCK(x, x, x))
        assert F.scaled_dot_product_attention is not _packed_varlen_sdpa
    finally:
        F.scaled_dot_product_attention = STOCK


class Wrapper:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("wrap", [lambda f: lambda *args, **kwargs: f(*args, **kwargs), Wrapper], ids=["code", "class"])
def test_case_35_a_patch_that_found_ours_and_stays_is_stock_elsewhere(wrap):
    """A library that patches lazily, in a first forward; while armed a vision tower of the same shape calls it."""
    model = hooked(Attention())
    enable_cp1_packed_varlen(IDS, "flash")

    calls = []

    def patch_now():
        original = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = wrap(lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1])
        model.self_attn.before = lambda: None

    model.self_attn.before = patch_now
    x = operand()
    try:
        for _ in range(2):
            torch.testing.assert_close(model(x), packed_result(x))
            calls.clear()
            torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), STOCK(x, x, x))
            assert len(calls) == 1
    finally:
        disable_cp1_packed_varlen()
        F.scaled_dot_product_attention = STOCK


@pytest.mark.parametrize("armed", [True, False])
def test_case_35_patches_upon_patches_that_found_ours(armed):
    model = hooked(Attention())
    calls = []

    def patch_by(name):
        original = F.scaled_dot_product_attention

        def theirs(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        F.scaled_dot_product_attention = theirs

    x = operand()
    if armed:
        enable_cp1_packed_varlen(IDS, "flash")
    try:
        for name in "abc":
            model.self_attn.before = lambda name=name: patch_by(name)
            model(x)
        model.self_attn.before = lambda: None
        for _ in range(2):
            calls.clear()
            torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), STOCK(x, x, x))
            assert calls == ["c", "b", "a"]
            calls.clear()
            torch.testing.assert_close(model(x), packed_result(x) if armed else STOCK(x, x, x))
            assert calls == ([] if armed else ["c", "b", "a"])
    finally:
        disable_cp1_packed_varlen()
        F.scaled_dot_product_attention = STOCK


def test_case_33_two_hooked_threads_and_a_bystander():
    rounds = 200
    failures = []
    running = threading.Event()
    running.set()
    ids = [IDS, torch.tensor([[1, 2, 2, 2, 2, 2, 2, 2]])]

    def train(index):
        model = hooked(Attention())
        x = operand()
        right = plain_attention(x, x, x, dense_mask(ids[index], ROWS))
        for _ in range(rounds):
            enable_cp1_packed_varlen(ids[index], "flash")
            if not torch.allclose(model(x), right):
                failures.append(f"thread {index}")

    def bystander():
        x = operand()
        right = STOCK(x, x, x)
        while running.is_set():
            if not torch.equal(F.scaled_dot_product_attention(x, x, x), right):
                failures.append("bystander")
            if not torch.equal(scaled_dot_product_attention(x, x, x), right):
                failures.append("bystander by name")

    with threads_that_switch_often():
        trainers = [threading.Thread(target=train, args=(index,)) for index in range(2)]
        third = threading.Thread(target=bystander)
        for thread in (*trainers, third):
            thread.start()
        for thread in trainers:
            thread.join()
        running.clear()
        third.join()
    assert not failures, failures[:5]


def test_a_thread_that_reads_while_another_rearms_gets_documents_of_one_arming():
    running = threading.Event()
    running.set()
    x = operand()
    ids = [IDS, torch.tensor([[1, 2, 2, 2, 2, 2, 2, 2]])]
    right = [plain_attention(x, x, x, dense_mask(one, ROWS)) for one in ids]
    enable_cp1_packed_varlen(ids[0], "flash")
    failures = []

    def read():
        model = hooked(Attention())
        while running.is_set():
            for out in (model(x), called_by_its_own_name(x)):
                if not any(torch.allclose(out, one) for one in right):
                    failures.append(out)

    reader = threading.Thread(target=read)
    with threads_that_switch_often():
        reader.start()
        for step in range(3000):
            enable_cp1_packed_varlen(ids[step % 2], "flash")
        running.clear()
        reader.join()
    assert not failures, failures[:2]


def call_late(x, forward_has_ended):
    """SDPA is read first, then the operands are evaluated."""
    return F.scaled_dot_product_attention(forward_has_ended(x), x, x)


def call_late_by_keywords(x, forward_has_ended):
    # fmt: off
    return torch.nn.functional.scaled_dot_product_attention(
        key=x, value=x, query=
        forward_has_ended(x),
    )
    # fmt: on


def call_late_by_a_variable(x, forward_has_ended):
    sdpa = F.scaled_dot_product_attention
    forward_has_ended(x)
    return sdpa(x, x, x)


def call_late_by_a_local_import(x, forward_has_ended):
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    forward_has_ended(x)
    return sdpa(x, x, x)


def call_late_by_a_partial(x, forward_has_ended):
    return functools.partial(F.scaled_dot_product_attention, forward_has_ended(x))(x, value=x)


def call_late_by_unpacking(x, forward_has_ended):
    return F.scaled_dot_product_attention(*(forward_has_ended(x),), **{"key": x, "value": x})


@pytest.mark.parametrize(
    "call",
    [
        call_late,
        call_late_by_keywords,
        call_late_by_a_variable,
        call_late_by_a_local_import,
        call_late_by_a_partial,
        call_late_by_unpacking,
    ],
)
def test_case_33_a_bystander_that_calls_what_it_read_during_a_hooked_forward_gets_stock(call):
    model = hooked(Attention())
    inside, was_read, over, called = (threading.Event() for _ in range(4))
    outputs = []
    x = operand()

    def before():
        inside.set()
        assert was_read.wait(10)

    def train():
        enable_cp1_packed_varlen(IDS, "flash")
        model(operand())
        enable_cp1_packed_varlen(IDS, "flash")  # in force when the bystander calls
        over.set()
        assert called.wait(10)

    def forward_has_ended(x):
        assert is_swapped()
        was_read.set()
        assert over.wait(10)
        return x

    def bystander():
        assert inside.wait(10)
        outputs.append(call(x, forward_has_ended))
        called.set()

    model.self_attn.before = before
    threads = [threading.Thread(target=train), threading.Thread(target=bystander)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(outputs[0], STOCK(x, x, x))


def test_a_swap_by_the_users_own_hand_is_no_bystanders_and_is_left_as_it_is(monkeypatch):
    x = operand()
    packed_output = plain_attention(x, x, x, dense_mask(IDS, ROWS))
    model = hooked(Attention())
    enable_cp1_packed_varlen(IDS, "flash")
    model(x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", _packed_varlen_sdpa)
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), packed_output)
    torch.testing.assert_close(model(x), packed_output)
    assert is_swapped()
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), packed_output)


def test_a_patch_that_is_undone_after_the_forward_leaves_nobody_packed():
    model = hooked(Attention())
    x = operand()
    enable_cp1_packed_varlen(IDS, "flash")
    undo = []

    def patch():
        original = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = lambda *args, **kwargs: original(*args, **kwargs)
        undo.append(original)

    model.self_attn.before = patch
    torch.testing.assert_close(model(x), plain_attention(x, x, x, dense_mask(IDS, ROWS)))
    F.scaled_dot_product_attention = undo[0]  # the packed function, now outside of every hooked forward
    try:
        assert is_swapped()
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), STOCK(x, x, x))
        model.self_attn.before = lambda: None
        model(x)
        assert nothing_is_left()
    finally:
        F.scaled_dot_product_attention = STOCK


def called_by_its_own_name(x):
    return _packed_varlen_sdpa(x, x, x)


def is_swapped():
    return F.scaled_dot_product_attention is _packed_varlen_sdpa


def test_a_thread_that_armed_but_is_outside_of_hooked_modules_gets_stock():
    model = hooked(Attention())
    inside, go_on = threading.Event(), threading.Event()

    def wait():
        inside.set()
        go_on.wait(10)

    model.self_attn.before = wait
    thread = threading.Thread(target=model, args=(operand(),))
    thread.start()
    inside.wait(10)
    try:
        enable_cp1_packed_varlen(IDS, "flash")
        x = operand()
        assert is_swapped()
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), STOCK(x, x, x))
        torch.testing.assert_close(called_by_its_own_name(x), packed_result(x))
    finally:
        go_on.set()
        thread.join()


def test_case_37_eval_and_generate_are_untouched():
    model = hooked(Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)))
    enable_cp1_packed_varlen(IDS, "flash")
    x = operand()
    torch.testing.assert_close(model(x), packed_result(x))
    disable_cp1_packed_varlen()
    with torch.no_grad():
        assert torch.equal(model.eval()(x), STOCK(x, x, x, is_causal=True))
    keys = operand(9)
    model.self_attn.call = lambda q, k, v: F.scaled_dot_product_attention(q, keys, keys)
    enable_cp1_packed_varlen(IDS, "flash")
    with pytest.warns(UserWarning, match="passed through to stock while documents are armed: the length"):
        out = model(x[:, :, :1])
    assert torch.equal(out, STOCK(x[:, :, :1], keys, keys))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once a reason
        model(x[:, :, :1])


def test_modules_that_say_they_are_not_causal():
    model = hooked(Attention())
    model.self_attn.is_causal = False
    enable_cp1_packed_varlen(IDS, "flash")
    x = operand()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(x), STOCK(x, x, x))
    assert dict(record_of(model).passed) == {packed.NOT_CAUSAL: 1}


@pytest.mark.parametrize(("width", "window"), [(2, (1, 0)), (None, (-1, -1)), (100, (99, 0))])
def test_case_40_sliding_window_of_the_module(width, window):
    model = hooked(Attention())
    model.self_attn.sliding_window = width
    enable_cp1_packed_varlen(IDS, "flash")
    x = operand()
    right = plain_attention(x, x, x, dense_mask(IDS, ROWS, width))
    torch.testing.assert_close(model(x), right)
    assert record_of(model).windows == {window: 1}


def test_case_43_copies_are_plain_and_not_armed():
    model = hooked(nn.MultiheadAttention(8, 2, batch_first=True))
    enable_cp1_packed_varlen(IDS, "flash")
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for copied in (
        copy.deepcopy(model),
        copy.copy(model.self_attn),
        pickle.loads(pickle.dumps(model)),
        torch.load(stored, weights_only=False),
    ):
        attention = getattr(copied, "self_attn", copied)
        assert type(attention) is nn.MultiheadAttention
        assert not attention._forward_hooks and not attention._forward_pre_hooks
        assert not hooks_of(attention)
    assert b"packed_sdpa" not in pickle.dumps(model)
    assert hooks_of(model.self_attn)  # the original is as it was
    assert model.state_dict().keys() == copy.deepcopy(model).state_dict().keys()


def test_other_hooks_survive_in_copies():
    model = hooked(Attention(STOCK))
    model.self_attn.before = int
    model.self_attn.register_forward_hook(_other_hook)
    copied = copy.deepcopy(model)
    assert list(copied.self_attn._forward_hooks.values()) == [_other_hook]


def _other_hook(*_):
    return None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_multihead_attention(training, grad):
    model = hooked(_WithoutWeights(16, 2))
    model.train(training)
    enable_cp1_packed_varlen(IDS, "flash")
    x = torch.randn(1, ROWS, 16)
    attention = model.self_attn.inner
    with torch.set_grad_enabled(grad):
        out = model(x)
        query, key, value = (
            part.unflatten(-1, (2, 8)).transpose(1, 2)
            for part in F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        )
        right = plain_attention(query, key, value, dense_mask(IDS, ROWS))
        right = attention.out_proj(right.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, right)
    assert record_of(model).taken == 1


class _WithoutWeights(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


def test_encoder_layer_in_eval_takes_no_shortcut():
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0).eval()
    attach_cp1_packed_varlen_hooks(layer)
    enable_cp1_packed_varlen(IDS, "flash")
    x = torch.randn(1, ROWS, 16)
    with torch.no_grad():
        out = layer(x)
        changed = x.clone()
        changed[:, 3:6] += 1.0  # document 2
        other = layer(changed)
    assert torch.equal(out[:, :3], other[:, :3]) and torch.equal(out[:, 6:], other[:, 6:])
    assert not torch.equal(out[:, 3:6], other[:, 3:6])


def test_a_hooked_call_that_sees_no_sdpa_is_told():
    model = hooked(nn.MultiheadAttention(16, 2, batch_first=True))
    enable_cp1_packed_varlen(IDS, "flash")
    x = torch.randn(1, ROWS, 16)
    told = r"self_attn ran without calling scaled_dot_product_attention while documents are armed.*need_weights=False\)"
    for training, grad in ((True, True), (False, False)):  # by hand, and by the fused operator
        model.train(training)
        hooks_of(model.self_attn)[0]._warned.clear()
        with pytest.warns(UserWarning, match=told), torch.set_grad_enabled(grad):
            _, weights = model.self_attn(x, x, x)
        assert weights.shape == (1, ROWS, ROWS)
    assert record_of(model).taken == 0


def test_an_instance_forward_of_somebody_else():
    """accelerate and PEFT put a forward on the object itself."""
    attention = Attention()
    original = attention.forward
    attention.forward = lambda x: original(x) * 2
    model = hooked(attention)
    enable_cp1_packed_varlen(IDS, "flash")
    x = operand()
    torch.testing.assert_close(model(x), packed_result(x) * 2)


def test_a_class_that_somebody_puts_on_top():
    """As fully_shard does, before or after."""
    attention = Attention()
    unhook = hook_attention(attention, ModuleRecord("x"))
    attention.__class__ = type("FSDPAttention", (type(attention),), {})
    enable_cp1_packed_varlen(IDS, "flash")
    x = operand()
    torch.testing.assert_close(attention(x), packed_result(x))
    unhook()
    assert torch.equal(attention(x), STOCK(x, x, x))


class Interrupter:
    """Interrupts the main thread, once, after a random while."""

    def __init__(self, seed):
        self.choose = random.Random(seed)
        self.is_live = False

    def on_alarm(self, *_):
        if self.is_live:
            self.is_live = False
            raise KeyboardInterrupt

    def repeat_until_interrupted(self, function):
        try:
            self.is_live = True
            signal.setitimer(signal.ITIMER_REAL, 2e-5 + self.choose.random() * 1e-3)
            while self.is_live:
                function()
        except KeyboardInterrupt:
            pass


def interrupt_at_random_points(count, seed):
    interrupter = Interrupter(seed)
    model = hooked(_WithoutWeights(16, 2))
    model.eval()
    enable_cp1_packed_varlen(IDS, "flash")
    x = torch.randn(1, ROWS, 16)
    before = signal.signal(signal.SIGALRM, interrupter.on_alarm)
    try:
        for round_ in range(count):
            interrupter.repeat_until_interrupted(lambda: model(x))
            assert not left_behind(), f"round {round_} of seed {seed}"
    finally:
        signal.signal(signal.SIGALRM, before)
        # An interrupt within CPython's own import machinery can leave its lock taken, for later tests to wait for.
        while _imp.lock_held():
            _imp.release_lock()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_interrupts_at_random_points():
    interrupt_at_random_points(300, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_interrupts_at_random_points(seed):
    interrupt_at_random_points(1000, seed)


def test_interrupt_main():
    model = hooked(Attention())
    model.self_attn.before = lambda: (_thread.interrupt_main(), time.sleep(0.05))
    # A test run in the background of a shell ignores SIGINT, and Python then installs no handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            model(operand())
    finally:
        signal.signal(signal.SIGINT, before)
    assert nothing_is_left(), left_behind()


def test_model_of_the_recompute_tests_is_hooked_by_name():
    model = Model("wrapper_r")
    attach_cp1_packed_varlen_hooks(model)
    names = [hook.record.name for module in model.modules() for hook in hooks_of(module)]
    assert names == ["layers.0.self_attn", "layers.1.self_attn"]


class CopiesItself(SelfAttention):
    def __deepcopy__(self, memo):
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made


class Scaled(nn.Module):
    def forward(self, weight):
        return 1.5 * weight


@pytest.mark.parametrize("api", ["seed", "attach"])
@pytest.mark.parametrize("way", ["own __deepcopy__", "parametrized, then hooked", "hooked, then parametrized"])
def test_copies_that_a_class_makes_by_itself_are_not_hooked(way, api):
    model = Holder(SelfAttention())
    model.self_attn.extra = nn.Parameter(torch.ones(2))
    if way == "own __deepcopy__":
        model.self_attn.__class__ = CopiesItself
    if way == "parametrized, then hooked":
        parametrize.register_parametrization(model.self_attn, "extra", Scaled())
    if api == "seed":
        attach_cp1_packed_varlen_hooks(model)
    else:
        packed_sdpa.attach(model, documents=None)
    if way == "hooked, then parametrized":
        parametrize.register_parametrization(model.self_attn, "extra", Scaled())
    x = torch.randn(1, ROWS, 16, dtype=torch.float64)
    twin = copy.deepcopy(copy.deepcopy(model))
    plain = twin(x)
    enable_cp1_packed_varlen(IDS, "flash")
    assert not torch.equal(model(x), plain)
    assert torch.equal(twin(x), plain) and not hooks_of(twin.self_attn)
    attach_cp1_packed_varlen_hooks(twin)  # it can be hooked for itself
    assert torch.equal(twin(x), model(x))


def test_a_child_that_is_forked_while_another_thread_is_inside():
    """Of the threads only the one that forks goes on in the child: nothing of the others' forwards is left there."""
    model = hooked(SelfAttention())
    entered, go = threading.Event(), threading.Event()

    def wait(*_):
        entered.set()
        go.wait(60)

    handle = model.self_attn.qkv.register_forward_pre_hook(wait)
    x = torch.randn(1, ROWS, 16, dtype=torch.float64)
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    assert entered.wait(60)
    assert F.scaled_dot_product_attention is _packed_varlen_sdpa
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        faults = len(left_behind())
        handle.remove()
        model(x)
        os._exit(faults + len(left_behind()))
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    thread.join()
    handle.remove()
