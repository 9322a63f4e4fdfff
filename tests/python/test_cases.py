"""The small inputs with hand-written answers, and the kinds around them, forward and backward."""

from __future__ import annotations

import pytest
import torch
from cases import PACKINGS, packing, random_packing
from hypothesis import given, settings
from hypothesis import strategies as st

import packed_sdpa
from oracle import check_against_oracle, random_inputs, uniform_probe
from packed_sdpa import PackedLayout, packed_attention, varlen_attention

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

UNIFORM = [
    ("case_1", [1, 1, 1, 0, 2, 2, 0, 0], -1, [0, 0.5, 1, 0, 4, 4.5, 0, 0]),
    ("case_2", [0, 0, 1, 1, 2], -1, [0, 0, 2, 2.5, 4]),
    ("case_3", [1, 0, 2, 0, 3], -1, [0, 0, 2, 0, 4]),
    ("case_6", [1, 1, 2, 1, 1], -1, [0, 0.5, 2, 4 / 3, 2]),
    ("case_7_big", [2**40, 2**40, 5], -1, [0, 0.5, 2]),
    ("case_7_unsorted", [7, 7, 3, 3, 9], -1, [0, 0.5, 2, 2.5, 4]),
    ("case_16", [1, 1, 1, 1, 1, 1], 2, [0, 0.5, 1, 2, 3, 4]),
    ("case_17", [1, 1, 1, 2, 2, 2], 1, [0, 0.5, 1.5, 3, 3.5, 4.5]),
    ("case_17a_comes_back", [1, 1, 2, 1, 1], 1, [0, 0.5, 2, 3, 3.5]),
    ("case_17a_gap", [1, 0, 1, 1], 1, [0, 0, 2, 2.5]),
    ("rule_window_counts_rows", [1, 1, 2, 1, 1], 0, [0, 1, 2, 3, 4]),
]


@dtypes
@pytest.mark.parametrize("ids,left,right", [case[1:] for case in UNIFORM], ids=[case[0] for case in UNIFORM])
def test_uniform_probe(ids, left, right, dtype):
    ids = torch.tensor(ids)
    out = packed_attention(*uniform_probe(ids, dtype, heads=3), PackedLayout.from_doc_ids(ids), window_size=(left, -1))
    expected = torch.tensor(right, dtype=torch.float64).view(1, 1, -1, 1).expand(out.shape)
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_case_4_equal_ids_of_two_rows_are_two_documents():
    ids = torch.tensor([[1, 2], [2, 2]])
    layout = PackedLayout.from_doc_ids(ids)
    assert layout.num_documents == 3
    out = packed_attention(*uniform_probe(ids), layout)[:, 0, :, 0]
    assert out.tolist() == [[0, 1], [0, 0.5]]


def test_case_5_each_row_by_its_own_split():
    ids = packing("rows_split_differently")
    out = packed_attention(*uniform_probe(ids), PackedLayout.from_doc_ids(ids))[:, 0, :, 0]
    assert out.tolist() == [[0, 0.5, 1, 1.5, 2], [0, 0.5, 2, 2.5, 3], [0, 0.5, 2, 2.5, 3]]


@dtypes
def test_case_9_single_token_documents(dtype):
    ids = torch.tensor([1, 2, 3, 4])
    query, key, value = (tensor.requires_grad_() for tensor in random_inputs(ids, dtype, 9, 3))
    out = packed_attention(query, key, value, PackedLayout.from_doc_ids(ids))
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    assert torch.equal(out, value.repeat_interleave(3, 1))
    rounding = 16 * torch.finfo(dtype).eps
    assert query.grad.abs().max() <= rounding
    assert key.grad.abs().max() <= rounding
    expected = grad_out.double().view(1, 3, 3, 4, -1).sum(2)
    torch.testing.assert_close(value.grad.double(), expected, rtol=rounding, atol=rounding)


@dtypes
def test_case_10_all_padding(dtype):
    ids = packing("all_padding")
    tensors = [torch.ones(2, 4, 4, 256, dtype=dtype, requires_grad=True) for _ in range(3)]
    out, lse = packed_attention(*tensors, PackedLayout.from_doc_ids(ids), return_lse=True)
    out.backward(torch.full_like(out, torch.nan))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    for tensor in tensors:
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@dtypes
def test_case_11_and_27_padding_full_of_nan(dtype):
    ids = torch.tensor([1] * 4 + [0] * 2 + [2] * 5 + [0] * 3 + [3] * 2)
    clean = random_inputs(ids, dtype)
    padding = ids == 0
    for bad in (torch.nan, torch.inf, -torch.inf):
        dirty = [tensor.clone() for tensor in clean]
        for tensor in dirty:
            tensor[:, :, padding] = bad
        grad_out = torch.randn(1, 4, ids.numel(), 16).to(dtype)
        dirty_grad = grad_out.clone()
        dirty_grad[:, :, padding] = bad
        layout = PackedLayout.from_doc_ids(ids)
        leaves = [[tensor.requires_grad_() for tensor in tensors] for tensors in (clean, dirty)]
        outs = [packed_attention(*tensors, layout) for tensors in leaves]
        grads = [
            torch.autograd.grad(out, tensors, grad)
            for out, tensors, grad in zip(outs, leaves, (grad_out, dirty_grad), strict=True)
        ]
        for ours, theirs in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(theirs[:, :, padding], torch.zeros_like(theirs[:, :, padding]))


@dtypes
def test_case_27_nan_stays_in_its_document(dtype):
    ids = torch.tensor([1] * 40 + [2] * 30 + [3] * 70 + [2] * 4)
    clean = random_inputs(ids, dtype)
    layout = PackedLayout.from_doc_ids(ids)
    for which in range(3):
        dirty = [tensor.clone() for tensor in clean]
        dirty[which][:, :, ids == 2] = torch.nan
        results = []
        for tensors in (clean, dirty):
            leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
            out = packed_attention(*leaves, layout)
            results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours[:, :, ids != 2], theirs[:, :, ids != 2])


def test_case_12_padding_costs_no_document():
    layout = PackedLayout.from_doc_ids(torch.tensor([1] * 5 + [0] * 1019))
    assert (layout.num_documents, layout.max_seqlen_q, layout.total_q) == (1, 5, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_13_many_documents(dtype):
    count = 70_000
    layout = PackedLayout.from_doc_ids(torch.arange(1, count + 1))
    query, key, value = (torch.randn(1, 1, count, 8).to(dtype).requires_grad_() for _ in range(3))
    out = packed_attention(query, key, value, layout)
    assert torch.equal(out, value)
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(value.grad, torch.ones_like(value))


def test_case_14_id_dtypes_and_a_reused_buffer():
    ids = torch.tensor([1, 1, 1, 0, 2, 2])
    query, key, value = random_inputs(ids, torch.float32)
    right = packed_attention(query, key, value, PackedLayout.from_doc_ids(ids))
    strided = torch.stack([ids, -ids], 1)[:, 0]
    for other in (ids.int(), ids.short(), ids.to(torch.uint8), ids.to(torch.int8), strided, ids[None]):
        layout = PackedLayout.from_doc_ids(other)
        other.fill_(1)
        assert torch.equal(packed_attention(query, key, value, layout), right)
    boolean = PackedLayout.from_doc_ids(torch.tensor([True, True, False, True]))
    assert (boolean.num_documents, boolean.total_q) == (1, 3)
    with pytest.raises(ValueError, match=r"doc_ids must not be negative, got -3; use 0 for padding"):
        PackedLayout.from_doc_ids(torch.tensor([1, -3]))
    with pytest.raises(TypeError, match=r"doc_ids must have an integer dtype \(or bool\), got Float"):
        PackedLayout.from_doc_ids(torch.tensor([1.0, 2.0]))


def test_case_15_layout_is_linear():
    layout = PackedLayout.from_doc_ids(torch.arange(131_072) // 131 + 1)
    assert layout.num_documents == 1001
    assert sum(tensor.numel() for tensor in layout.tensors()) <= 4 * 131_072


def test_case_18_query_rows_at_an_offset():
    ids = torch.ones(8, dtype=torch.int64)
    query, key, value = uniform_probe(ids, rows=slice(4, 8))
    out = packed_attention(query, key, value, PackedLayout.from_doc_ids(ids, row_offset=4))
    assert out[0, 0, :, 0].tolist() == [2, 2.5, 3, 3.5]
    out = packed_attention(query[:, :, :2], key, value, PackedLayout.from_doc_ids(ids, row_offset=4, rows=2))
    assert out[0, 0, :, 0].tolist() == [2, 2.5]


@dtypes
@pytest.mark.parametrize(
    "head_dim,value_dim",
    [(16, 16), (64, 64), (80, 80), (96, 64), (128, 128), (192, 128), (256, 256), (512, 512), (59, 59), (1, 1), (7, 33)],
)
def test_case_19_head_dims(head_dim, value_dim, dtype):
    ids = packing("short_then_long_batch")[:1]
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype, 2, 1, head_dim, value_dim)
    check_against_oracle(lambda q, k, v: packed_attention(q, k, v, layout), inputs, ids)


@dtypes
@pytest.mark.parametrize("scale", [None, 1.0, 0.05, 0.0, -0.3])
def test_case_21_scale(scale, dtype):
    ids = packing("tile_plus_one")
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype)
    check_against_oracle(lambda q, k, v: packed_attention(q, k, v, layout, scale=scale), inputs, ids, scale=scale)


@dtypes
def test_case_22_strides(dtype):
    ids = packing("short_then_long_batch")
    layout = PackedLayout.from_doc_ids(ids)
    batch, size = ids.shape
    fused = torch.randn(batch, size, 8 * 16).to(dtype)
    query, key, value = (part.view(batch, size, -1, 16).transpose(1, 2) for part in fused.split((64, 32, 32), -1))
    shared = torch.randn(batch, 1, size, 16).to(dtype).expand(batch, 2, size, 16)
    every_second = torch.randn(batch, 2, size, 32).to(dtype)[..., ::2]
    for operands in ((query, key, value), (query, shared, shared), (query, every_second, value)):
        kept = [tensor.clone() for tensor in operands]
        results = []
        for tensors in (operands, [tensor.contiguous() for tensor in operands]):
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            out = packed_attention(*leaves, layout)
            results.append([out, *torch.autograd.grad(out.sum(), leaves)])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)
        for before, after in zip(kept, operands, strict=True):
            assert torch.equal(before, after)
    assert packed_attention(query, key, value, layout).transpose(1, 2).is_contiguous()


@dtypes
@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": (5, -1)}, {"is_causal": False}, {"is_causal": False, "window_size": (3, 2)}],
    ids=["causal", "window", "whole", "both_sides"],
)
def test_case_23_every_packing(name, options, dtype):
    ids = packing(name)
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype)
    actual = check_against_oracle(lambda q, k, v: packed_attention(q, k, v, layout, **options), inputs, ids, **options)
    padding = (ids == 0)[:, None, :, None]
    for tensor in actual:
        assert torch.equal(tensor * padding, torch.zeros_like(tensor))


@dtypes
def test_case_23_row_offsets(dtype):
    ids = packing("gaps_across_tiles")
    for row_offset, rows in ((0, 100), (60, 50), (111, None), (200, 10), (0, 0)):
        layout = PackedLayout.from_doc_ids(ids, row_offset=row_offset, rows=rows)
        for options in ({}, {"is_causal": False}, {"window_size": (45, -1)}):
            inputs = random_inputs(ids, dtype, rows=layout.rows_q)
            check_against_oracle(
                lambda q, k, v, layout=layout, options=options: packed_attention(q, k, v, layout, **options),
                inputs,
                ids,
                row_offset=row_offset,
                **options,
            )


def test_case_23_lse():
    ids = packing("short_then_long_batch")
    query, key, value = random_inputs(ids, torch.float32, 2, 2)
    _, lse = packed_attention(query, key, value, PackedLayout.from_doc_ids(ids), return_lse=True)
    seen = packed_sdpa.PackedLayout.from_doc_ids(ids).materialize_mask()[:, None]
    scores = (query.double() @ key.double().transpose(2, 3) / 4).masked_fill(~seen, -torch.inf)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert not lse.requires_grad


@dtypes
def test_case_24_dropout_is_replayed_from_the_random_state(dtype):
    ids = packing("tile_plus_one")
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype)
    state = torch.get_rng_state()
    first = packed_attention(*inputs, layout, dropout_p=0.5)
    other = packed_attention(*inputs, layout, dropout_p=0.5)
    torch.set_rng_state(state)
    assert torch.equal(packed_attention(*inputs, layout, dropout_p=0.5), first)
    assert not torch.equal(first, other)
    before = torch.get_rng_state()
    packed_attention(*inputs, layout, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_case_24_dropout_keeps_the_mean_and_its_gradient_is_that_of_the_same_mask():
    ids = torch.ones(256, dtype=torch.int64)
    layout = PackedLayout.from_doc_ids(ids)
    query, key, _ = uniform_probe(ids, torch.float64, heads=2)
    # v = identity: out is the matrix of kept and rescaled weights.
    value = torch.eye(256, dtype=torch.float64).expand(1, 2, 256, 256).clone().requires_grad_()
    state = torch.get_rng_state()
    weights = packed_attention(query, key, value, layout, is_causal=False, dropout_p=0.25)
    kept = weights > 0
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 256 / 0.75))
    share = float(kept.double().mean())
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / kept.numel()) ** 0.5
    grad_out = torch.randn_like(weights)
    weights.backward(grad_out)
    torch.testing.assert_close(value.grad, weights.detach().transpose(2, 3) @ grad_out)
    # Query and key gradients against finite differences of the same draw.
    small = [tensor.requires_grad_() for tensor in random_inputs(ids[:12], torch.float64, 2, 1, 4)]
    short = PackedLayout.from_doc_ids(ids[:12])

    def replayed(*tensors):
        torch.set_rng_state(state)
        return packed_attention(*tensors, short, dropout_p=0.4)

    assert torch.autograd.gradcheck(replayed, small)


@dtypes
def test_case_25_bit_equal(dtype):
    ids = packing("long_and_many_short")
    layout = PackedLayout.from_doc_ids(ids)
    results = []
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    try:
        for run in range(10):
            torch.set_num_threads(1 + run % 2)
            leaves = [tensor.requires_grad_() for tensor in random_inputs(ids, dtype)]
            out = packed_attention(*leaves, layout)
            results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            assert torch.equal(ours, theirs)


def test_case_26_autocast():
    ids = packing("tile_plus_one")
    layout = PackedLayout.from_doc_ids(ids)
    query, key, value = random_inputs(ids, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = packed_attention(query, key, value, layout)
        stock = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert out.dtype == stock.dtype == torch.bfloat16
    assert torch.equal(out, packed_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), layout))


@dtypes
def test_perturbing_a_document_changes_no_bit_of_another(dtype):
    ids = packing("long_and_many_short")
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype)
    for document in (1, 7, 59):
        mine = ids[0] == document
        changed = [tensor.clone() for tensor in inputs]
        for tensor in changed:
            tensor[:, :, mine] = torch.randn_like(tensor[:, :, mine])
        results = []
        for tensors in (inputs, changed):
            leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
            out = packed_attention(*leaves, layout)
            results.append([out, *torch.autograd.grad(out[:, :, ~mine].square().sum(), leaves)])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours[:, :, ~mine], theirs[:, :, ~mine])
        for gradient in results[0][1:]:
            assert torch.equal(gradient[:, :, mine], torch.zeros_like(gradient[:, :, mine]))


@dtypes
def test_a_document_does_not_depend_on_where_it_stands(dtype):
    """The same document behind other neighbours, at another row of another batch: the same bits."""
    alone = torch.ones(97, dtype=torch.int64)
    inputs = random_inputs(alone, dtype)
    right = packed_attention(*inputs, PackedLayout.from_doc_ids(alone))
    ids = torch.tensor([[5] * 13 + [1] * 97 + [6] * 30, [0] * 40 + [8] * 3 + [1] * 97])
    packed = [torch.randn(2, tensor.shape[1], 140, 16).to(dtype) for tensor in inputs]
    for target, tensor in zip(packed, inputs, strict=True):
        target[0, :, 13:110] = tensor[0]
        target[1, :, 43:140] = tensor[0]
    out = packed_attention(*packed, PackedLayout.from_doc_ids(ids))
    assert torch.equal(out[0, :, 13:110], right[0])
    assert torch.equal(out[1, :, 43:140], right[0])


@pytest.mark.parametrize("is_causal", [True, False])
def test_varlen_attention_with_other_query_and_key_counts(is_causal):
    cu_q, cu_k = torch.tensor([0, 3, 3, 10, 15]), torch.tensor([0, 5, 9, 16, 18])
    query, key, value = torch.randn(15, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 6)
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    out, lse = varlen_attention(*leaves, cu_q, cu_k, is_causal=is_causal, return_lse=True)
    assert out.shape == (15, 4, 6) and lse.shape == (4, 15)
    parts = []
    for document in range(4):
        q = leaves[0][cu_q[document] : cu_q[document + 1]].transpose(0, 1)
        k, v = (t[cu_k[document] : cu_k[document + 1]].transpose(0, 1).repeat_interleave(2, 0) for t in leaves[1:])
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        if is_causal:
            mask = mask.tril(k.shape[1] - q.shape[1])
        weights = (q @ k.transpose(1, 2) * 8**-0.5).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
        parts.append((weights @ v).transpose(0, 1))
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected)
    grad_out = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, grad_out), torch.autograd.grad(expected, leaves, grad_out), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_gradcheck():
    ids = packing("interleaved")
    for options in ({}, {"window_size": (2, -1)}, {"is_causal": False}):
        layout = PackedLayout.from_doc_ids(ids)
        leaves = [tensor.requires_grad_() for tensor in random_inputs(ids, torch.float64, 2, 1, 4, 3)]
        assert torch.autograd.gradcheck(
            lambda q, k, v, options=options, layout=layout: packed_attention(q, k, v, layout, **options), leaves
        )


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    size=st.integers(1, 150),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1)]),
    dims=st.sampled_from([(8, 8), (16, 5), (33, 64)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    is_causal=st.booleans(),
    left=st.integers(-1, 40),
)
def test_random_packings(seed, batch, size, heads, dims, dtype, is_causal, left):
    ids = random_packing(torch.Generator().manual_seed(seed), batch, size)
    layout = PackedLayout.from_doc_ids(ids)
    options = {"is_causal": is_causal, "window_size": (left, -1)}
    inputs = random_inputs(ids, dtype, *heads, *dims, seed=seed)
    repro = f"seed={seed} batch={batch} size={size} heads={heads} dims={dims} dtype={dtype} {options}"
    check_against_oracle(
        lambda q, k, v: packed_attention(q, k, v, layout, **options), inputs, ids, repro=repro, **options
    )
