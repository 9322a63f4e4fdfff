"""Inputs on which a CUDA dispatch goes wrong, against the stand-ins for torch's operators, values by the oracle."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import packing
from torch.utils.checkpoint import checkpoint

import packed_sdpa
from aten_stand_ins import stand_ins
from oracle import check_against_oracle, random_inputs, with_gradients
from packed_sdpa import LayoutTensors, PackedLayout, packed_attention
from packed_sdpa._library import ops
from packed_sdpa.functional import attention_on_tensors

BACKENDS = [("flash", torch.bfloat16), ("efficient", torch.float32), ("per_document", torch.float32)]
backends = pytest.mark.parametrize("backend,dtype", BACKENDS, ids=[name for name, _ in BACKENDS])
PADDED = torch.tensor(
    [[0, 0, 1, 1, 1, 0, 2, 2], [3, 0, 0, 0, 0, 0, 0, 3], [0] * 8, [4, 4, 4, 5, 5, 5, 6, 0], [7] * 8]
)  # padding in other places of each row; in row 1 a document with a gap
UNGAPPED = PADDED.clone()
UNGAPPED[1, 7] = 9


@pytest.fixture(autouse=True)
def calls():
    with stand_ins() as record:
        yield record


def forms_of(layout: PackedLayout):
    """The host's tensors, and those for kernels on a device."""
    sizes = layout.batch, layout.rows_q, layout.rows_k
    yield layout.tensors()
    yield LayoutTensors(*ops.layout_to_device(list(layout.tensors()), *sizes, torch.device("cpu")))


def functions(layout: PackedLayout, backend: str, **options):
    for tensors in forms_of(layout):
        yield lambda q, k, v, tensors=tensors: attention_on_tensors(q, k, v, tensors, backend=backend, **options)[0]


@backends
@pytest.mark.parametrize("window_size", [(-1, -1), (2, 0)], ids=str)
@pytest.mark.parametrize("ids", [PADDED, UNGAPPED], ids=["gap", "no_gap"])
def test_padding_in_other_places_of_each_row(backend, dtype, ids, window_size):
    if backend != "per_document" and ids is PADDED and window_size != (-1, -1):
        with pytest.raises(RuntimeError, match="a window counts rows"):
            packed_attention(
                *random_inputs(ids, dtype), PackedLayout.from_doc_ids(ids), backend=backend, window_size=window_size
            )
        return
    for function in functions(PackedLayout.from_doc_ids(ids), backend, window_size=window_size):
        check_against_oracle(function, random_inputs(ids, dtype), ids, window_size=window_size)


def attend_by_segments(query, key, value, cu_q, cu_k):
    """[1, H, T, D] by definition: bottom-right causal, documents one by one."""
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=query.dtype)
    groups = query.shape[1] // key.shape[1]
    for begin_q, end_q, begin_k, end_k in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        q, k, v = query[:, :, begin_q:end_q], key[:, :, begin_k:end_k], value[:, :, begin_k:end_k]
        seen = torch.arange(end_q - begin_q)[:, None] + (end_k - begin_k) - (end_q - begin_q)
        seen = seen >= torch.arange(end_k - begin_k)
        some = seen.any(1)
        if not bool(some.any()):
            continue
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        scores = (q[:, :, some] @ k.transpose(2, 3) * query.shape[3] ** -0.5).masked_fill(~seen[some], -torch.inf)
        rows = torch.arange(begin_q, end_q)[some]
        out = out.index_copy(2, rows, scores.softmax(-1) @ v)
    return out


@backends
def test_separate_offsets_with_documents_of_no_rows(backend, dtype):
    cu_q = [0, 0, 3, 3, 7, 8, 8, 12]
    cu_k = [0, 4, 4, 4, 6, 15, 15, 19]  # no queries, no keys, neither, fewer keys, more keys, neither, equal
    total_q, total_k = 14, 21
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(1, heads, rows, 16, generator=generator, dtype=torch.float64).to(dtype)
        for heads, rows in ((4, total_q), (2, total_k), (2, total_k))
    ]
    grad_out = torch.randn(1, 4, total_q, 16, generator=generator, dtype=torch.float64).to(dtype)
    layout = PackedLayout.from_cu_seqlens(torch.tensor(cu_q), torch.tensor(cu_k), total_q, total_k)
    right = with_gradients(
        functools.partial(attend_by_segments, cu_q=cu_q, cu_k=cu_k), tuple(inputs), grad_out, torch.float64
    )
    for function in functions(layout, backend):
        got = with_gradients(function, tuple(inputs), grad_out, dtype)
        blind_q, blind_k = ((right[part] == 0).all(3).all(1)[0] for part in (0, 3))
        assert blind_q.sum() == 3 + 2 + 2 and blind_k.sum() == 4 + 2, "of no pair, and padding"
        for one, other, blind in zip(got, right, (blind_q, blind_q, blind_k, blind_k), strict=True):
            tolerance = 0.03 if dtype == torch.bfloat16 else 2e-6
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
            assert torch.equal(one[:, :, blind], torch.zeros_like(one[:, :, blind]))


@pytest.mark.parametrize("head_dim,value_dim", [(40, 40), (96, 96), (192, 192), (256, 256), (512, 512), (192, 128)])
@backends
def test_head_dims(backend, dtype, head_dim, value_dim):
    ids = packing("padding_inside_and_tail")
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype, head_dim=head_dim, value_dim=value_dim)
    if backend == "flash" and (head_dim > 256 or head_dim != value_dim):
        with pytest.raises(RuntimeError, match=r"its head dim ends at 256|query and value must have one head dim"):
            packed_attention(*inputs, layout, backend="flash")
        return
    for function in functions(layout, backend):
        check_against_oracle(function, inputs, ids)


def _stride_two(tensor):
    return torch.stack([tensor, tensor.flip(-1)], -1)[..., 0]


def _heads_expanded(tensor):
    return tensor[:, :1].expand_as(tensor)


def _rows_expanded(tensor):
    return tensor[:, :, :1].expand_as(tensor)


def _batch_expanded(tensor):
    return tensor[:1].expand_as(tensor)


def _misaligned(tensor):
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return flat[1:].view(tensor.shape).copy_(tensor)


@backends
@pytest.mark.parametrize("make", [_stride_two, _heads_expanded, _rows_expanded, _batch_expanded, _misaligned])
def test_strides(backend, dtype, make):
    inputs = tuple(make(tensor) for tensor in random_inputs(UNGAPPED, dtype))
    before = [tensor.clone() for tensor in inputs]
    for function in functions(PackedLayout.from_doc_ids(UNGAPPED), backend):
        dense = check_against_oracle(function, inputs, UNGAPPED)
        grad_out = torch.ones((), dtype=dtype).expand(inputs[0].shape)
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        gradients = torch.autograd.grad(function(*leaves), leaves, grad_out)
        contiguous = with_gradients(function, tuple(t.contiguous() for t in inputs), torch.ones_like(dense[0]), dtype)
        for got, right in zip(gradients, contiguous[1:], strict=True):
            assert torch.equal(got, right)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))


@backends
@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_gradients_of_some_inputs_alone(backend, dtype, wanted):
    inputs = random_inputs(UNGAPPED, dtype)
    for function in functions(PackedLayout.from_doc_ids(UNGAPPED), backend):
        whole = with_gradients(function, inputs, torch.ones_like(inputs[0]), dtype)[1:]
        leaves = [
            tensor.detach().clone().requires_grad_(bool(want)) for tensor, want in zip(inputs, wanted, strict=True)
        ]
        function(*leaves).sum().backward()
        for leaf, right, want in zip(leaves, whole, wanted, strict=True):
            assert torch.equal(leaf.grad, right) if want else leaf.grad is None


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend,dtype", [BACKENDS[0], BACKENDS[2]], ids=["flash", "per_document"])
def test_dropout_is_the_same_in_recompute(backend, dtype, use_reentrant, calls):
    inputs = random_inputs(UNGAPPED, dtype)
    grad_out = torch.randn_like(inputs[0])
    for function in functions(PackedLayout.from_doc_ids(UNGAPPED), backend, dropout_p=0.4):

        def run(wrap, function=function):
            torch.manual_seed(5)
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            out = wrap(function)(*leaves)
            out.backward(grad_out)
            return [out.detach(), *(leaf.grad for leaf in leaves)]

        plain = run(lambda f: f)
        again = run(lambda f: lambda *a: checkpoint(f, *a, use_reentrant=use_reentrant, preserve_rng_state=True))
        for got, right in zip(again, plain, strict=True):
            assert torch.equal(got, right)
    if backend == "flash":
        assert all(call["rng_state"].shape == (2,) for call in calls.flash_backward)


@backends
def test_autocast(backend, dtype):
    """float32 parameters, computed in bfloat16: what flash takes."""
    inputs = random_inputs(UNGAPPED, torch.float32)
    layout = PackedLayout.from_doc_ids(UNGAPPED)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        reports = packed_sdpa.explain(*leaves, layout, backend="flash")
        assert not next(report for report in reports if report.name == "flash").reasons
        out = packed_attention(*leaves, layout, backend=backend)
    assert out.dtype == torch.bfloat16
    out.backward(torch.ones_like(out))
    half = with_gradients(
        functools.partial(packed_attention, layout=layout, backend=backend),
        tuple(t.bfloat16() for t in inputs),
        torch.ones_like(out),
        torch.bfloat16,
    )
    assert torch.equal(out, half[0])
    for leaf, right in zip(leaves, half[1:], strict=True):
        assert leaf.grad.dtype == torch.float32 and torch.equal(leaf.grad, right.float())


@backends
def test_deterministic_mode(backend, dtype):
    """It fills what torch hands out with NaN: no row may keep any."""
    torch.use_deterministic_algorithms(True)
    try:
        for ids in (UNGAPPED, PADDED):
            for function in functions(PackedLayout.from_doc_ids(ids), backend):
                got = check_against_oracle(function, random_inputs(ids, dtype), ids)
                assert all(bool(torch.isfinite(tensor).all()) for tensor in got)
    finally:
        torch.use_deterministic_algorithms(False)


@backends
@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (1, 0)])
def test_no_rows(backend, dtype, shape, calls):
    ids = torch.zeros(shape, dtype=torch.int64)
    layout = PackedLayout.from_doc_ids(ids)
    batch, size = shape
    leaves = [torch.randn(batch, heads, size, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    for function in functions(layout, backend):
        out = function(*leaves)
        assert out.shape == leaves[0].shape
        out.sum().backward()
        assert all(leaf.grad.shape == leaf.shape for leaf in leaves)
    assert not calls.flash_forward and not calls.efficient_forward


@backends
def test_one_query_a_document_with_grouped_heads(backend, dtype, calls):
    """max_q 1 would be taken for decoding by the real flash kernel."""
    ids = torch.tensor([[1, 2, 3, 4, 0, 5]])
    for function in functions(PackedLayout.from_doc_ids(ids), backend):
        got = check_against_oracle(function, random_inputs(ids, dtype, 8, 2), ids)
        assert torch.equal(got[0][:, :, 4], torch.zeros_like(got[0][:, :, 4]))
    assert all(call["max_q"] == 2 for call in calls.flash_forward)
