"""The torch operators as such: schemas, meta kernels, compile, autocast, refusals, instruction sets."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from cases import packing

import packed_sdpa
from oracle import check_against_oracle, random_inputs
from packed_sdpa import PackedLayout, packed_attention
from packed_sdpa._library import ops
from required import ISAS, need

IDS = packing("short_then_long_batch")


def operands(dtype=torch.float32, requires_grad=True):
    return [tensor.requires_grad_(requires_grad) for tensor in random_inputs(IDS, dtype, 4, 2, 16, 8)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_forward(dtype, dropout_p):
    layout = PackedLayout.from_doc_ids(IDS).tensors()
    # With dropout two runs differ, which the comparison of traced with plain runs cannot allow.
    kinds = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.packed_sdpa.varlen_attention_forward,
        (*operands(dtype), *layout, True, -1, -1, 0.25, dropout_p, "auto"),
        test_utils=kinds if dropout_p else (*kinds, "test_aot_dispatch_dynamic"),
    )


def test_opcheck_backward():
    layout = PackedLayout.from_doc_ids(IDS).tensors()
    query, key, value = operands(requires_grad=False)
    settings = (True, -1, -1, 0.25, 0.0, "auto")
    out, lse, rng_state = ops.varlen_attention_forward(query, key, value, *layout, *settings)
    torch.library.opcheck(
        torch.ops.packed_sdpa.varlen_attention_backward,
        (torch.randn_like(out), query, key, value, out, lse, rng_state, *layout, *settings),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_without_graph_breaks_and_not_again_for_other_documents(backend):
    compilations = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(
        lambda q, k, v, layout: packed_sdpa.functional.attention_on_tensors(q, k, v, layout)[0],
        fullgraph=True,
        backend=compilations,
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        ids = torch.randint(1, 40, (1, 64), generator=generator).sort().values
        layout = PackedLayout.from_doc_ids(ids)
        ours, theirs = ([t.requires_grad_() for t in random_inputs(ids, torch.float32)] for _ in range(2))
        out = compiled(*ours, layout.tensors())
        right = packed_attention(*theirs, layout)
        assert torch.equal(out, right)
        for a, b in zip(torch.autograd.grad(out.sum(), ours), torch.autograd.grad(right.sum(), theirs), strict=True):
            assert torch.equal(a, b)
    assert compilations.frame_count <= 2


def test_meta_kernel_has_the_real_strides():
    layout = PackedLayout.from_doc_ids(IDS)
    for transposed in (False, True):
        real = operands(requires_grad=False)
        if transposed:
            real = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in real]
        meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in real]
        settings = (True, -1, -1, 0.25, 0.0, "auto")
        results = [
            ops.varlen_attention_forward(*tensors, *(t.to(tensors[0].device) for t in layout.tensors()[:5]),
                                         layout.tensors().max_seqlens, *settings)
            for tensors in (real, meta)
        ]  # fmt: skip
        for ours, theirs in zip(*results, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


def test_second_derivatives_are_refused():
    query, key, value = operands(torch.float64)
    out = packed_attention(query, key, value, PackedLayout.from_doc_ids(IDS))
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="the second derivative of varlen_attention is not supported"):
        gradient.sum().backward()


def test_instruction_sets_are_those_that_can_be_required():
    there = ops.available_cpu_isas()
    assert there == [isa for isa in ISAS if isa in there]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_instruction_set(isa, dtype):
    need(isa)
    before = ops.cpu_isa()
    ops.set_cpu_isa(isa)
    try:
        assert ops.cpu_isa() == isa
        layout = PackedLayout.from_doc_ids(IDS)
        inputs = [tensor.detach() for tensor in operands(dtype)]
        check_against_oracle(lambda q, k, v: packed_attention(q, k, v, layout), inputs, IDS, repro=isa)
    finally:
        ops.set_cpu_isa(before)


def test_an_unknown_instruction_set_is_refused():
    before = ops.cpu_isa()
    with pytest.raises(ValueError, match=r"avx9000.*scalar"):
        ops.set_cpu_isa("avx9000")
    assert ops.cpu_isa() == before


def test_work_items_are_timed():
    layout = PackedLayout.from_doc_ids(IDS)
    inputs = operands(requires_grad=False)
    for backward in (False, True):
        seconds, sums, _, _ = ops.cpu_work_items(*inputs, list(layout.tensors()), True, -1, -1, backward, 2)
        assert seconds
        assert min(seconds) > 0
        assert set(sums) == {-1}  # short documents: no turns


def packed_varlen(query, key, value, **options):
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    offsets = torch.tensor([0, query.shape[0]])
    return packed_sdpa.varlen_attention(query, key, value, offsets, offsets, **options)


# ruff: noqa: E501
REFUSALS = [
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, dropout_p=float("nan")), ValueError, r"dropout_p must be in \[0, 1\), got nan"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, dropout_p=-0.1), ValueError, r"dropout_p must be in \[0, 1\), got -0.1"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, window_size=(-2, -1)), ValueError, r"window_size\[0\] must be -1 \(unlimited\) or at least 0, got -2"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, window_size=(1, 2)), ValueError, r"window_size\[1\] must be -1 or 0 when is_causal, got 2"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, scale=float("inf")), ValueError, "scale must be finite, got inf"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, scale="1"), TypeError, r"scale must be a number, or None for D \*\* -0\.5, got '1'; convert it with float"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, dropout_p=None), TypeError, r"dropout_p must be a number in \[0, 1\), got None; convert it with float"),
    (lambda q, k, v, layout: packed_sdpa.explain(q, k, v, layout, dropout_p="0"), TypeError, r"dropout_p must be a number in \[0, 1\), got '0'"),
    (lambda q, k, v, layout: packed_varlen(q, k, v, scale=[1]), TypeError, r"scale must be a number, or None for D \*\* -0\.5, got \[1\]; convert"),
    (lambda q, k, v, layout: packed_varlen(q, k, v, dropout_p="0"), TypeError, r"dropout_p must be a number in \[0, 1\), got '0'; convert"),
    (lambda q, k, v, layout: packed_varlen(q, k, v, window_size=3), TypeError, "window_size must be two ints .*, got 3"),
    (lambda q, k, v, layout: packed_varlen(q, k, v, is_causal=1), TypeError, "is_causal must be True or False, got 1"),
    (lambda q, k, v, layout: packed_varlen(q, k, v, backend=3), TypeError, "backend must be a name such as 'auto', got 3"),
    (lambda q, k, v, layout: packed_attention(q[0], k[0], v[0], layout), ValueError, r"query and key must be 4-D \[B, H, S, D\], got shapes"),
    (lambda q, k, v, layout: ops.enter_scope(0, 0), ValueError, r"attachment must be positive, got 0; take one from new_attachment\(\)"),
    (lambda q, k, v, layout: ops.enter_scope(1, 1 << 60), RuntimeError, "documents 1152921504606846976 are not alive any more"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, backend="nope"), ValueError, "backend must be one of auto, cpu.*got 'nope'"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, is_causal=None), TypeError, "is_causal must be True or False, got None"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, window_size=(1, 2, 3)), TypeError, "window_size must be two ints"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, window_size=3), TypeError, "window_size must be two ints"),
    (lambda q, k, v, layout: packed_attention(q, k, v, layout, backend=None), TypeError, "backend must be a name such as 'auto', got None"),
    (lambda q, k, v, layout: packed_attention(q[:, :0], k, v, layout), ValueError, "must be at least 1, got 0 and 2"),
    (lambda q, k, v, layout: packed_attention(q[..., :0], k[..., :0], v, layout), ValueError, "head_dim must be at least 1"),
    (lambda q, k, v, layout: packed_attention(q, k, v, [1]), TypeError, "layout must be a PackedLayout, got list"),
    (lambda q, k, v, layout: packed_attention(q[:, :3], k, v, layout), ValueError, r"num_heads \(3\) must be a multiple of num_kv_heads \(2\)"),
    (lambda q, k, v, layout: packed_attention(q, k.double(), v, layout), TypeError, "must have one dtype, got Float, Double and Float"),
    (lambda q, k, v, layout: packed_attention(q, k[:1], v[:1], layout), ValueError, "must have one batch size"),
    (lambda q, k, v, layout: packed_attention(q, k, v[:, :1], layout), ValueError, "key and value must have equal numbers of heads, got 2 and 1"),
    (lambda q, k, v, layout: packed_attention(q, k[..., :8], v, layout), ValueError, "query and key must have equal head_dim, got 16 and 8"),
    (lambda q, k, v, layout: packed_attention(q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), layout), TypeError, "query must be float32, float64, bfloat16 or float16, got Float8_e4m3fn"),
    (lambda q, k, v, layout: packed_attention(q, k, v, PackedLayout.from_seqlens([3])), ValueError, "layout is for B 1, 3 query rows and 3 key rows"),
    (lambda q, k, v, layout: packed_sdpa.varlen_attention(q, k, v, torch.tensor([0, 3]), torch.tensor([0, 3])), ValueError, r"query must be 3-D \[T, H, D\]"),
    (lambda q, k, v, layout: packed_sdpa.explain(q, k, v, layout, backend="nope"), ValueError, "backend must be one of auto, cpu"),
    (lambda q, k, v, layout: packed_attention(q, k.to("meta"), v, layout), ValueError, "must be on one device, got cpu, meta and cpu; move them to one"),
    (lambda q, k, v, layout: PackedLayout.from_seqlens(torch.ones(2, 2).long()), ValueError, r"seqlens must be 1-D, got shape \[2, 2\]"),
    (lambda q, k, v, layout: PackedLayout.from_cu_seqlens(torch.ones(2, 2).long(), torch.tensor([0, 2])), ValueError, r"cu_seqlens_q must be 1-D, got shape \[2, 2\]"),
    (lambda q, k, v, layout: PackedLayout.from_cu_seqlens(torch.empty(0).long(), torch.empty(0).long()), ValueError, r"cu_seqlens_q must be 1-D with at least one entry \(the leading 0\), got shape \[0\]"),
    (lambda q, k, v, layout: PackedLayout.from_doc_ids(torch.empty(3, dtype=torch.long, device="meta")), ValueError, "doc_ids is on the meta device, which holds no values"),
]  # fmt: skip


@pytest.mark.parametrize("call,error,message", REFUSALS, ids=[message for _, _, message in REFUSALS])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(*operands(requires_grad=False), PackedLayout.from_doc_ids(IDS))


@pytest.mark.parametrize("ends_with_attention", [True, False])
def test_a_recompute_that_stops_early_at_the_operator_is_freed(ends_with_attention):
    """A checkpoint raises in its hook on saved tensors once all are there: the node must not keep its own output."""
    layout = PackedLayout.from_doc_ids(torch.tensor([1, 1, 1, 2, 2]))
    seen = []

    def region(x, weight):
        query = x * weight
        seen.append(weakref.ref(query))
        out = packed_attention(query, x, x, layout)
        return out if ends_with_attention else out * weight

    weight = torch.ones((), requires_grad=True)
    for _ in range(3):
        out = torch.utils.checkpoint.checkpoint(region, torch.randn(1, 2, 5, 8), weight, use_reentrant=False)
        out.sum().backward()
        del out
    gc.collect()
    assert len(seen) == 6 and all(reference() is None for reference in seen)


def test_an_output_that_is_overwritten_before_backward_is_told():
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    out = packed_attention(query, query, query, PackedLayout.from_seqlens([3, 2]))
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["cpu", "per_document", "reference"])
@pytest.mark.parametrize("ids", [[1, 1, 1, 2, 2, 0], [1, 1, 2, 1, 1, 2], [1] * 40])
def test_windows_beyond_every_row_are_none(backend, ids):
    layout = PackedLayout.from_doc_ids(torch.tensor(ids))
    leaves = [torch.randn(1, 2, len(ids), 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def results(window_size, is_causal):
        out = packed_attention(*leaves, layout, window_size=window_size, is_causal=is_causal, backend=backend)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for is_causal in (False, True):
        expected = results((-1, -1), is_causal)
        for rows in (2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1):
            for window_size in ((rows, -1), (-1, rows), (rows, rows), (rows, 0)):
                if (is_causal and window_size[1] > 0) or (not is_causal and window_size[1] == 0):
                    continue
                assert all(map(torch.equal, results(window_size, is_causal), expected)), window_size
                plain = layout.materialize_mask(is_causal=is_causal)
                assert torch.equal(layout.materialize_mask(is_causal=is_causal, window_size=window_size), plain)


def test_operands_that_are_no_tensors():
    layout = PackedLayout.from_seqlens([3, 2])
    query = torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match="query must be a tensor, got NoneType"):
        packed_attention(None, query, query, layout)
    with pytest.raises(TypeError, match="key must be a tensor, got ndarray"):
        packed_attention(query, query.numpy(), query, layout)
