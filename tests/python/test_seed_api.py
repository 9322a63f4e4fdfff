"""`_packed_varlen_sdpa` called by itself, and `_cp_blockdiag_varlen`."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from packed_models import STOCK, dense_mask, plain_attention
from packed_sdpa import packed
from packed_sdpa.kernels import _cp_blockdiag_varlen
from packed_sdpa.packed import (
    _PACKED_STATE,
    _packed_varlen_sdpa,
    attach_cp1_packed_varlen_hooks,
    disable_cp1_packed_varlen,
    enable_cp1_packed_varlen,
)

IDS = torch.tensor([[1, 1, 1, 2, 2, 0, 3, 3]])
ROWS = IDS.shape[1]


@pytest.fixture(autouse=True)
def disarmed():
    disable_cp1_packed_varlen()
    yield
    disable_cp1_packed_varlen()


def qkv(heads=4, kv_heads=4, batch=1, rows=ROWS, dim=8, dtype=torch.float64):
    return tuple(torch.randn(batch, count, rows, dim, dtype=dtype) for count in (heads, kv_heads, kv_heads))


def expected(query, key, value, ids=IDS, scale=None):
    heads = max(query.shape[1], key.shape[1], value.shape[1])
    query, key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (query, key, value))
    if scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    return plain_attention(query, key, value, dense_mask(ids, query.shape[2]))


def same_failure(call, *args, **kwargs):
    """The armed replacement refuses what stock refuses, in stock's words."""
    with pytest.raises(Exception) as stock:
        STOCK(*args, **kwargs)
    with pytest.raises(type(stock.value)) as ours:
        call(*args, **kwargs)
    assert str(ours.value) == str(stock.value)


def test_signature_is_that_of_the_seed():
    parameters = inspect.signature(_packed_varlen_sdpa).parameters
    assert list(parameters) == [
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
        "scale",
        "enable_gqa",
        "kwargs",
    ]
    defaults = [entry.default for entry in parameters.values()][3:8]
    assert defaults == [None, 0.0, False, None, False]


def test_unarmed_is_stock_with_the_arguments_it_got():
    query, key, value = qkv()
    mask = torch.rand(ROWS, ROWS) > 0.3
    assert torch.equal(_packed_varlen_sdpa(query, key, value), STOCK(query, key, value))
    assert torch.equal(
        _packed_varlen_sdpa(query, key, value, attn_mask=mask, scale=0.3, unknown=1),
        STOCK(query, key, value, attn_mask=mask, scale=0.3),
    )
    causal = STOCK(query, key, value, is_causal=True)
    assert torch.equal(_packed_varlen_sdpa(query, key, value, None, 0.0, True), causal)


def test_armed_is_causal_within_each_document_whatever_the_call_says():
    query, key, value = qkv()
    enable_cp1_packed_varlen(IDS, "flash")
    right = expected(query, key, value)
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool)
    for out in (
        _packed_varlen_sdpa(query, key, value),
        _packed_varlen_sdpa(query, key, value, is_causal=True),
        _packed_varlen_sdpa(query, key, value, mask, unknown_keyword=1),
    ):
        torch.testing.assert_close(out, right)
    assert (out[:, :, 5] == 0).all()  # padding


@pytest.mark.parametrize("backend", ["flash", "te", "Flash-Attn", "transformer_engine"])
def test_either_backend_runs_on_cpu(backend):
    enable_cp1_packed_varlen(IDS[0], backend)
    query, key, value = qkv()
    torch.testing.assert_close(_packed_varlen_sdpa(query, key, value), expected(query, key, value))


def test_rows_of_a_batch_have_their_own_documents():
    ids = torch.tensor([[1, 1, 2, 2], [5, 5, 5, 0]])
    enable_cp1_packed_varlen(ids, "flash")
    query, key, value = qkv(batch=2, rows=4)
    torch.testing.assert_close(_packed_varlen_sdpa(query, key, value), expected(query, key, value, ids))


@pytest.mark.parametrize(
    ("ids", "shape", "reason"),
    [
        (IDS, {"batch": 2}, packed.OTHER_BATCH),
        (torch.cat((IDS, IDS)), {"batch": 1}, packed.OTHER_BATCH),
        (IDS, {"rows": 5}, packed.OTHER_LENGTH),
    ],
)
def test_case_47_other_shapes_are_passed_through(ids, shape, reason):
    enable_cp1_packed_varlen(ids, "flash")
    query, key, value = qkv(**shape)
    assert torch.equal(_packed_varlen_sdpa(query, key, value, is_causal=True), STOCK(query, key, value, is_causal=True))
    documents = _PACKED_STATE.get()
    assert packed._mismatch(documents, query, key, value) == reason


def test_keys_longer_than_the_ids_are_passed_through():
    enable_cp1_packed_varlen(IDS, "flash")
    query = qkv()[0]
    _, key, value = qkv(rows=ROWS + 1)
    assert torch.equal(_packed_varlen_sdpa(query, key, value), STOCK(query, key, value))
    single = query[:, :, :1]
    assert torch.equal(_packed_varlen_sdpa(single, key, value), STOCK(single, key, value))


def test_three_dimensions_are_passed_through():
    enable_cp1_packed_varlen(IDS, "flash")
    query, key, value = (part[0] for part in qkv())
    assert torch.equal(_packed_varlen_sdpa(query, key, value), STOCK(query, key, value))


@pytest.mark.parametrize("enable_gqa", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 1), (4, 4), (6, 4), (2, 4), (1, 4)])
def test_case_20_heads_as_stock_takes_and_refuses_them(heads, kv_heads, enable_gqa):
    query, key, value = qkv(heads, kv_heads)
    enable_cp1_packed_varlen(IDS, "flash")
    try:
        STOCK(query, key, value, enable_gqa=enable_gqa)
    except RuntimeError:
        same_failure(_packed_varlen_sdpa, query, key, value, enable_gqa=enable_gqa)
    else:
        out = _packed_varlen_sdpa(query, key, value, enable_gqa=enable_gqa)
        torch.testing.assert_close(out, expected(query, key, value))


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_all_head_counts_as_stock_takes_and_refuses_them(enable_gqa):
    enable_cp1_packed_varlen(IDS, "flash")
    taken = 0
    for heads in itertools.product((1, 2, 3, 4), repeat=3):
        query, key, value = (torch.randn(1, count, ROWS, 8, dtype=torch.float64) for count in heads)
        try:
            stock = STOCK(query, key, value, enable_gqa=enable_gqa)
        except RuntimeError:
            same_failure(_packed_varlen_sdpa, query, key, value, enable_gqa=enable_gqa)
            continue
        taken += 1
        out = _packed_varlen_sdpa(query, key, value, enable_gqa=enable_gqa)
        assert out.shape == stock.shape, heads
        torch.testing.assert_close(out, expected(query, key, value), msg=lambda text, heads=heads: f"{heads}: {text}")
    assert taken == (18 if enable_gqa else 22)  # as counted in tests/cpp/state_test.cpp


def test_value_heads_that_differ_from_key_heads():
    query = qkv(4)[0]
    key, value = qkv(4, 1)[1], qkv(4, 4)[2]
    enable_cp1_packed_varlen(IDS, "flash")
    torch.testing.assert_close(_packed_varlen_sdpa(query, key, value), expected(query, key, value))
    query, key, value = qkv(8)[0], qkv(8, 2)[1], qkv(8, 4)[2]
    out = _packed_varlen_sdpa(query, key, value, enable_gqa=True)
    torch.testing.assert_close(out, expected(query, key, value))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64])
def test_case_48_dtypes_that_stock_refuses(dtype):
    query, key, value = (part.to(dtype) for part in qkv(dtype=torch.float32))
    enable_cp1_packed_varlen(IDS, "flash")
    same_failure(_packed_varlen_sdpa, query, key, value)


def test_case_48_mixed_dtypes():
    query, key, value = qkv()
    enable_cp1_packed_varlen(IDS, "flash")
    same_failure(_packed_varlen_sdpa, query, key.float(), value)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5, float("nan")])
def test_bad_dropout(dropout_p):
    enable_cp1_packed_varlen(IDS, "flash")
    with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\), got"):
        _packed_varlen_sdpa(*qkv(), dropout_p=dropout_p)


@pytest.mark.parametrize("value", ["0.5", [0.5], torch.ones(2), 1j])
def test_scale_and_dropout_of_another_type(value):
    enable_cp1_packed_varlen(IDS, "flash")
    cure = "multiply query by it" if isinstance(value, torch.Tensor) else "convert it with float"
    with pytest.raises(TypeError, match=rf"scale must be a number, or None for D \*\* -0\.5, got .*; {cure}"):
        _packed_varlen_sdpa(*qkv(), scale=value)
    with pytest.raises(TypeError, match=r"dropout_p must be a number in \[0, 1\), got .*; convert it with float"):
        _packed_varlen_sdpa(*qkv(), dropout_p=value)
    with pytest.raises(TypeError, match=r"dropout_p must be a number in \[0, 1\), got None"):
        _packed_varlen_sdpa(*qkv(), dropout_p=None)


def test_a_scale_whose_gradient_would_be_lost():
    enable_cp1_packed_varlen(IDS, "flash")
    query, key, value = qkv()
    scale = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(TypeError, match=r"scale must be a number.*requires_grad=True.*; multiply query by it instead"):
        _packed_varlen_sdpa(query, key, value, scale=scale)
    for taken in (scale.detach(), torch.tensor(0.5).numpy()[()], 0.5):  # as stock
        out = _packed_varlen_sdpa(query, key, value, scale=taken)
        torch.testing.assert_close(out, expected(query, key, value, scale=0.5))


def test_what_stock_takes_but_cannot_be_packed():
    """Armed, a call that stock took is not handed on as if it had been packed."""
    query, key, value = qkv()
    value = value.float()
    enable_cp1_packed_varlen(IDS, "flash")
    same_failure(_packed_varlen_sdpa, *(part.to("meta") for part in (query, key, value)))
    refused = r"must be float32, .* to be packed; got torch\.float64 \[1, 4, 8, 8\] on cpu.*; convert them, or disarm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed.interception, "call_outside", lambda *args, **kwargs: query)
        with pytest.raises(TypeError, match=refused):
            _packed_varlen_sdpa(query, key, value)


@pytest.mark.parametrize("scale", [None, 1.0, 0.05])
def test_case_21_scale(scale):
    enable_cp1_packed_varlen(IDS, "flash")
    query, key, value = qkv()
    out = _packed_varlen_sdpa(query, key, value, scale=scale)
    torch.testing.assert_close(out, expected(query, key, value, scale=scale))


def test_case_24_dropout_under_a_checkpoint_is_replayed():
    enable_cp1_packed_varlen(IDS, "flash")
    outputs = []

    def attention(query, key, value):
        out = _packed_varlen_sdpa(query, key, value, dropout_p=0.5)
        outputs.append(out.detach().clone())
        return out

    for use_reentrant in (False, True):
        outputs.clear()
        operands = [part.requires_grad_() for part in qkv()]
        with set_checkpoint_early_stop(False):
            checkpoint(attention, *operands, use_reentrant=use_reentrant).sum().backward()
        assert len(outputs) == 2
        assert torch.equal(*outputs)
    before = torch.get_rng_state()
    _packed_varlen_sdpa(*qkv_without_random(), dropout_p=0.0)
    assert torch.equal(before, torch.get_rng_state())


def qkv_without_random():
    return (torch.ones(1, 2, ROWS, 4),) * 3


def test_case_26_autocast():
    enable_cp1_packed_varlen(IDS, "flash")
    query, key, value = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = _packed_varlen_sdpa(query, key.bfloat16(), value)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected(query, key, value), atol=0.05, rtol=0.05)


def test_case_46_one_layout_for_all_layers():
    enable_cp1_packed_varlen(IDS, "flash")
    with torch.profiler.profile() as profile:
        for _ in range(24):
            _packed_varlen_sdpa(*qkv())
    names = {event.key for event in profile.key_averages()}
    assert "packed_sdpa::varlen_attention_forward" in names
    assert not {name for name in names if "layout_from" in name or name == "aten::_local_scalar_dense"}


def test_gradients():
    enable_cp1_packed_varlen(IDS, "flash")
    operands = [part.requires_grad_() for part in qkv()]
    got = torch.autograd.grad(_packed_varlen_sdpa(*operands).square().sum(), operands)
    right = torch.autograd.grad(expected(*operands).square().sum(), operands)
    torch.testing.assert_close(got, right)


def test_general_entry_at_an_offset():
    """CASE 18: rows 4..7 of one document of 8, uniform."""
    query = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    key = torch.zeros(1, 1, 8, 2, dtype=torch.float64)
    value = torch.arange(8.0, dtype=torch.float64).view(1, 1, 8, 1)
    out = _cp_blockdiag_varlen(query, key, value, torch.ones(8, dtype=torch.int64), 4, None, "te")
    assert out.flatten().tolist() == pytest.approx([2, 2.5, 3, 3.5])
    with pytest.raises(ValueError, match=r"^backend must be one of flash, te, dense .*, got 'nope'; give one of these"):
        _cp_blockdiag_varlen(query, key, value, torch.ones(8, dtype=torch.int64), 4, None, "nope")
    with pytest.raises(ValueError, match="rows must be in"):
        _cp_blockdiag_varlen(query, key, value, torch.ones(8, dtype=torch.int64), 6, None, "flash")


def test_general_entry_with_offset_zero_is_the_seed_function():
    query, key, value = qkv()
    enable_cp1_packed_varlen(IDS, "flash")
    out = _cp_blockdiag_varlen(query, key, value, IDS, 0, None, "flash")
    assert torch.equal(out, _packed_varlen_sdpa(query, key, value))


def test_no_module_to_hook_is_a_warning():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="no module of Sequential has a name that ends with 'self_attn'"):
        assert attach_cp1_packed_varlen_hooks(model) is None


def test_nothing_is_patched_outside():
    enable_cp1_packed_varlen(IDS, "flash")
    assert F.scaled_dot_product_attention is STOCK
