"""Every case on every backend and device that is there.

A backend that cannot take a case must say so: then the case is that an order for it raises with these reasons. On a
machine without CUDA its half skips; PACKED_SDPA_REQUIRE=cuda turns that skip into a failure.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from cases import PACKINGS, packing, random_packing

import packed_sdpa
from oracle import check_against_oracle, dense_attention, random_inputs, uniform_probe, with_gradients
from packed_sdpa import PackedLayout, package_registry, packed_attention
from required import need

# The dense reference is an oracle itself, slow on purpose; test_reference below checks it against the other one. That
# the CUDA backends refuse the CPU is tested beside their stand-ins.
CUDA_NAMES = [name for name in packed_sdpa.available_backends() if name not in ("cpu", "reference")]
PAIRS = [("cpu", "cpu"), ("cpu", "per_document"), *(("cuda", name) for name in CUDA_NAMES)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Pair:
    """A backend on a device: runs calls, or proves that they are refused."""

    def __init__(self, device: str, name: str) -> None:
        self.device = torch.device(device)
        self.name = name
        self.gives_lse = name not in package_registry.BACKENDS

    def reasons(self, query, key, value, layout, **options) -> tuple[str, ...]:
        options.pop("scale", None)
        reports = packed_sdpa.explain(query, key, value, layout, backend=self.name, **options)
        return next(report.reasons for report in reports if report.name == self.name)

    def attention(self, query, key, value, layout, **options):
        """packed_attention on this pair's device; its out (and lse) come back to the host."""
        on_device = [tensor.to(self.device) for tensor in (query, key, value)]
        result = packed_attention(*on_device, layout, backend=self.name, **options)
        return tuple(part.cpu() for part in result) if isinstance(result, tuple) else result.cpu()

    def refuses(self, query, key, value, layout, **options) -> bool:
        """True when it cannot take this call, after proof that an order for it says why."""
        on_device = [tensor.detach().to(self.device) for tensor in (query, key, value)]
        reasons = self.reasons(*on_device, layout, **options)
        if not reasons:
            return False
        with pytest.raises(RuntimeError) as error:
            packed_attention(*on_device, layout, backend=self.name, **options)
        for reason in reasons:
            assert reason in str(error.value)
        return True


@pytest.fixture(params=PAIRS, ids=[f"{device}-{name}" for device, name in PAIRS])
def pair(request):
    device, name = request.param
    if device == "cpu":
        yield Pair(device, name)
        return
    need("cuda")
    # Equality to the bit is promised on CUDA in deterministic mode; it also fills memory that torch hands out with NaN.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield Pair(device, name)
    finally:
        torch.use_deterministic_algorithms(False)


def check(pair: Pair, ids, inputs, repro="", row_offset=0, **options):
    """Forward and backward against the oracle, unless the backend says why not."""
    layout = PackedLayout.from_doc_ids(ids, row_offset, inputs[0].shape[2])
    if pair.refuses(*inputs, layout, **options):
        return
    if inputs[0].numel() == 0:
        assert pair.attention(*inputs, layout, **options).numel() == 0
        return
    function = functools.partial(pair.attention, layout=layout, **options)
    if layout.total_q == 0:
        assert torch.equal(function(*inputs), torch.zeros_like(function(*inputs)))
        return
    if inputs[0].dtype != torch.float64:
        check_against_oracle(function, inputs, ids, None, repro, row_offset=row_offset, **options)
        return
    # The oracle is float64 itself, so its own rounding counts as much as ours.
    oracle = functools.partial(dense_attention, ids=ids, row_offset=row_offset, **options)
    grad_out = torch.randn(*inputs[0].shape[:-1], inputs[2].shape[-1], dtype=torch.float64)
    actual = with_gradients(function, inputs, grad_out, torch.float64)
    for got, right in zip(actual, with_gradients(oracle, inputs, grad_out, torch.float64), strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-13 * (1 + float(right.abs().max())), msg=repro or None)


@dtypes
@pytest.mark.parametrize("name", [name for name in PACKINGS if name != "all_padding"])  # which has its own test
def test_packing(pair, name, dtype):
    ids = packing(name)
    check(pair, ids, random_inputs(ids, dtype))


@pytest.mark.parametrize("name", ["interleaved", "padding_inside_and_tail", "rows_split_differently"])
def test_reference(name):
    ids = packing(name)
    for dtype in DTYPES:
        check(Pair("cpu", "reference"), ids, random_inputs(ids, dtype), window_size=(2, 0))


@pytest.mark.parametrize("window_size", [(0, -1), (1, -1), (3, 0), (200, 0)], ids=str)
@pytest.mark.parametrize("name", ["one_document", "tile_plus_one", "gaps_across_tiles", "padding_inside_document"])
def test_window(pair, name, window_size):
    ids = packing(name)
    for dtype in DTYPES:
        check(pair, ids, random_inputs(ids, dtype), window_size=window_size)


@pytest.mark.parametrize("window_size", [(-1, -1), (2, 1), (-1, 3)], ids=str)
@pytest.mark.parametrize("name", ["tile_plus_one", "padding_inside_and_tail", "interleaved"])
def test_whole_document(pair, name, window_size):
    ids = packing(name)
    for dtype in DTYPES:
        check(pair, ids, random_inputs(ids, dtype), is_causal=False, window_size=window_size)


@pytest.mark.parametrize("row_offset,rows", [(4, 4), (0, 3), (3, 3), (7, 1), (0, 0)])
@pytest.mark.parametrize("ids", [[1] * 8, [1, 1, 1, 2, 2, 2, 3, 3], [1, 0, 1, 2, 2, 1, 1, 0]], ids=str)
def test_query_rows_at_an_offset(pair, ids, row_offset, rows):
    ids = torch.tensor([ids])
    for dtype in DTYPES:
        check(pair, ids, random_inputs(ids, dtype, rows=rows), row_offset=row_offset)
        check(pair, ids, random_inputs(ids, dtype, rows=rows), row_offset=row_offset, window_size=(1, 0))


@pytest.mark.parametrize("head_dim,value_dim", [(d, d) for d in (1, 59, 64, 96, 256, 512)] + [(192, 128), (96, 64)])
def test_head_dims(pair, head_dim, value_dim):
    ids = packing("padding_inside_and_tail")
    for dtype in DTYPES:
        check(pair, ids, random_inputs(ids, dtype, head_dim=head_dim, value_dim=value_dim))


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (4, 1), (4, 4), (9, 3)])
@pytest.mark.parametrize("name", ["rows_split_differently", "single_token_documents"])
def test_head_groups(pair, name, heads, kv_heads):
    ids = packing(name)
    for dtype in DTYPES:
        check(pair, ids, random_inputs(ids, dtype, heads, kv_heads))


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_scale(pair, scale):
    ids = packing("tile")
    for dtype in DTYPES:
        check(pair, ids, random_inputs(ids, dtype), scale=scale)


def _fused(ids, dtype):
    """q, k, v as transposed views of one [B, S, 3, H, D] buffer."""
    batch, size = ids.shape
    buffer = torch.randn(batch, size, 3, 4, 16, dtype=torch.float64).to(dtype)
    return tuple(buffer[:, :, part].transpose(1, 2) for part in range(3))


def _expanded(ids, dtype):
    """k and v of one head, expanded over heads with stride 0."""
    query, key, value = random_inputs(ids, dtype, 4, 1)
    return query, key.expand(-1, 4, -1, -1), value.expand(-1, 4, -1, -1)


def _every_second(ids, dtype):
    """The last dim in steps of two."""
    return tuple(tensor[..., ::2] for tensor in random_inputs(ids, dtype, head_dim=32))


def _projected(ids, dtype):
    """[B, S, H, D] storage, as models hand it over."""
    return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in random_inputs(ids, dtype))


@pytest.mark.parametrize("make", [_fused, _expanded, _every_second, _projected])
@pytest.mark.parametrize("name", ["rows_split_differently", "short_then_long_batch", "padding_inside_and_tail"])
def test_strides(pair, name, make):
    ids = packing(name)
    for dtype in DTYPES:
        inputs = make(ids, dtype)
        before = [tensor.clone() for tensor in inputs]
        layout = PackedLayout.from_doc_ids(ids)
        if pair.refuses(*inputs, layout):
            continue
        grad_out = torch.ones((), dtype=dtype).expand(*inputs[0].shape[:-1], inputs[2].shape[-1])

        def run(*tensors, layout=layout):
            leaves = [tensor.to(pair.device).detach().requires_grad_() for tensor in tensors]
            out = packed_attention(*leaves, layout, backend=pair.name)
            return out, torch.autograd.grad(out, leaves, grad_out.to(pair.device))  # noqa: B023

        out, gradients = run(*inputs)
        plain_out, plain_gradients = run(*(tensor.contiguous() for tensor in inputs))
        assert torch.equal(out, plain_out)
        for got, right in zip(gradients, plain_gradients, strict=True):
            assert torch.equal(got, right)
        for tensor, copy in zip(inputs, before, strict=True):
            assert torch.equal(tensor, copy)


@dtypes
def test_all_padding(pair, dtype):
    ids = packing("all_padding")
    layout = PackedLayout.from_doc_ids(ids)
    tensors = [torch.ones(2, 4, 4, 256, dtype=dtype, requires_grad=True) for _ in range(3)]
    if pair.refuses(*tensors, layout):
        return
    out = pair.attention(*tensors, layout)
    out.backward(torch.full_like(out, torch.nan))
    assert torch.equal(out, torch.zeros_like(out))
    if pair.gives_lse:
        lse = pair.attention(*tensors, layout, return_lse=True)[1]
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    for tensor in tensors:
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@dtypes
@pytest.mark.parametrize(
    "name", ["padding_inside_and_tail", "padding_head", "padding_between_singles", "one_row_all_padding", "interleaved"]
)
def test_padding_is_never_read(pair, name, dtype):
    ids = packing(name)
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype)
    if pair.refuses(*inputs, layout):
        return
    grad_out = torch.randn_like(inputs[0])
    padding = (ids == 0)[:, None, :, None]
    function = functools.partial(pair.attention, layout=layout)
    clean = with_gradients(function, inputs, grad_out, dtype)
    for poison in (torch.nan, torch.inf):
        dirty = with_gradients(
            function, [t.masked_fill(padding, poison) for t in inputs], grad_out.masked_fill(padding, poison), dtype
        )
        for got, right in zip(dirty, clean, strict=True):
            assert torch.equal(got, right)
            assert torch.equal(got.masked_select(padding), torch.zeros_like(got.masked_select(padding)))
    if not pair.gives_lse:
        return
    lse = pair.attention(*inputs, layout, return_lse=True)[1]
    assert torch.equal(torch.isneginf(lse), (ids == 0)[:, None].expand_as(lse))


@dtypes
@pytest.mark.parametrize("name", ["tile_plus_one", "interleaved", "long_and_many_short"])
def test_no_document_sees_another(pair, name, dtype):
    ids = packing(name)
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype)
    if pair.refuses(*inputs, layout):
        return
    function = functools.partial(pair.attention, layout=layout)
    grad_out = torch.randn_like(inputs[0])
    before = with_gradients(function, inputs, grad_out, dtype)
    changed = (ids == 2)[:, None, :, None]
    for poison in (3.0, torch.nan, torch.inf):
        after = with_gradients(function, [t.masked_fill(changed, poison) for t in inputs], grad_out, dtype)
        for got, right in zip(after, before, strict=True):
            assert torch.equal(got.masked_select(~changed), right.masked_select(~changed))
    only_first = with_gradients(function, inputs, grad_out.masked_fill(changed, 0.0), dtype)
    for got in only_first[1:]:
        assert torch.equal(got.masked_select(changed), torch.zeros_like(got.masked_select(changed)))


@dtypes
def test_lse(pair, dtype):
    ids = packing("padding_inside_and_tail")
    layout = PackedLayout.from_doc_ids(ids)
    query, key, value = random_inputs(ids, dtype)
    if not pair.gives_lse or pair.refuses(query, key, value, layout):
        return
    out, lse = pair.attention(query, key, value, layout, return_lse=True)
    scores = query.double() @ key.double().repeat_interleave(2, 1).transpose(2, 3) * query.shape[-1] ** -0.5
    seen = layout.materialize_mask()[:, None]
    right = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(lse.double(), right, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6)
    assert not lse.requires_grad
    assert out.dtype == dtype


def test_out_lies_in_memory_as_the_query(pair):
    ids = packing("rows_split_differently")
    layout = PackedLayout.from_doc_ids(ids)
    for dtype in DTYPES:
        contiguous = [t.to(pair.device) for t in random_inputs(ids, dtype)]
        projected = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in contiguous]
        if pair.refuses(*contiguous, layout):
            continue
        assert packed_attention(*contiguous, layout, backend=pair.name).is_contiguous()
        assert packed_attention(*projected, layout, backend=pair.name).transpose(1, 2).is_contiguous()


@dtypes
def test_dropout_is_drawn_once_a_call(pair, dtype):
    ids = packing("long_and_many_short")
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype)
    grad_out = torch.randn_like(inputs[0])
    if pair.refuses(*inputs, layout, dropout_p=0.5):
        return
    function = functools.partial(pair.attention, layout=layout, dropout_p=0.5)

    def seeded(seed):
        torch.manual_seed(seed)
        return with_gradients(function, inputs, grad_out, dtype)

    first, again, other = seeded(1), seeded(1), seeded(2)
    assert torch.equal(first[0], again[0])
    for got, right in zip(first, again, strict=True):
        assert torch.equal(got, right)
    assert not torch.equal(first[0], other[0])
    # out is linear in value, and value's gradient is that of the very out that was returned.
    pairing = (first[0].double() * grad_out.double()).sum()
    torch.testing.assert_close(
        (first[3].double() * inputs[2].double()).sum(), pairing, rtol=0.0, atol=40 * torch.finfo(dtype).eps * 400
    )


def test_dropout_keeps_the_mean_and_the_share(pair):
    ids = torch.ones(1, 64, dtype=torch.int64)
    layout = PackedLayout.from_doc_ids(ids)
    dtype = torch.float32 if pair.name in ("cpu", "per_document", "reference") else torch.bfloat16
    query = torch.zeros(1, 2, 64, 64, dtype=dtype)
    value = torch.eye(64, dtype=dtype).expand(1, 2, 64, 64).contiguous()
    if pair.refuses(query, query, value, layout, dropout_p=0.25):
        return
    weights = pair.attention(query, query, value, layout, dropout_p=0.25).double()  # dropped weights themselves
    seen = torch.ones(64, 64).tril().bool().expand(1, 2, 64, 64)
    share = (weights[seen] != 0).double().mean()
    assert abs(share - 0.75) < 0.03
    expected = 1.0 / (0.75 * torch.arange(1, 65).double()).view(1, 1, 64, 1).expand_as(weights)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], expected[kept], rtol=2e-2, atol=1e-4)


def test_dropout_gradient_in_float64(pair):
    ids = packing("interleaved")
    layout = PackedLayout.from_doc_ids(ids)
    inputs = [t.requires_grad_() for t in random_inputs(ids, torch.float64, head_dim=4)]
    if pair.refuses(*inputs, layout, dropout_p=0.4):
        return

    def function(query, key, value):
        torch.manual_seed(3)
        return pair.attention(query, key, value, layout, dropout_p=0.4)

    assert torch.autograd.gradcheck(function, inputs)


def test_no_dropout_draws_no_random_number(pair):
    ids = packing("one_document")
    inputs = random_inputs(ids, torch.bfloat16)
    layout = PackedLayout.from_doc_ids(ids)
    if pair.refuses(*inputs, layout):
        return
    host = torch.get_rng_state()
    device = torch.cuda.get_rng_state() if pair.device.type == "cuda" else None
    pair.attention(*inputs, layout)
    assert torch.equal(torch.get_rng_state(), host)
    assert device is None or torch.equal(torch.cuda.get_rng_state(), device)


@dtypes
def test_same_call_twice(pair, dtype):
    ids = packing("long_and_many_short")
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype)
    if pair.refuses(*inputs, layout):
        return
    grad_out = torch.randn_like(inputs[0])
    function = functools.partial(pair.attention, layout=layout)
    first = with_gradients(function, inputs, grad_out, dtype)
    for _ in range(9):
        for got, right in zip(with_gradients(function, inputs, grad_out, dtype), first, strict=True):
            assert torch.equal(got, right)


def test_70000_single_token_documents(pair):
    ids = torch.arange(1, 70_001).view(1, -1)
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, torch.bfloat16, 2, 1, head_dim=8)
    if pair.refuses(*inputs, layout):
        return
    out, *gradients = with_gradients(
        functools.partial(pair.attention, layout=layout), inputs, torch.ones_like(inputs[0]), torch.bfloat16
    )
    assert torch.equal(out, inputs[2].expand_as(out))
    assert torch.equal(gradients[2], torch.full_like(gradients[2], 2.0))


def test_uniform_probe_of_a_comeback(pair):
    ids = torch.tensor([[1, 1, 2, 1, 1]])
    layout = PackedLayout.from_doc_ids(ids)
    for dtype in DTYPES:
        inputs = uniform_probe(ids, dtype)
        if pair.refuses(*inputs, layout):
            continue
        out = pair.attention(*inputs, layout)[0, 0, :, 0].double()
        right = torch.tensor([0, 0.5, 2, 4 / 3, 2], dtype=torch.float64)
        torch.testing.assert_close(out, right, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("seed", range(8))
def test_random_packing(pair, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = random_packing(generator, 1 + seed % 3, 40 + 37 * seed)
    dtype = DTYPES[seed % 4]
    heads, kv_heads = ((1, 1), (4, 2), (6, 2))[seed % 3]
    window_size = (seed - 1, 0) if seed % 4 == 3 else (-1, -1)
    repro = f"repro: pytest {__file__} -k 'test_random_packing and {pair.device}-{pair.name}-{seed}'"
    check(pair, ids, random_inputs(ids, dtype, heads, kv_heads, seed=seed), repro, window_size=window_size)


def test_rows_of_one_offset_equal_those_of_the_whole(pair):
    """Bottom-right by hand: rows 4..7 of one document of 8."""
    ids = torch.ones(1, 8, dtype=torch.int64)
    inputs = uniform_probe(ids, torch.float32, rows=slice(4, 8))
    layout = PackedLayout.from_doc_ids(ids, 4)
    if pair.refuses(*inputs, layout):
        return
    out = pair.attention(*inputs, layout)[0, 0, :, 0]
    torch.testing.assert_close(out, torch.tensor([2, 2.5, 3, 3.5]))
    torch.testing.assert_close(out, dense_attention(*inputs, ids, row_offset=4)[0, 0, :, 0])


def test_more_queries_than_keys(pair):
    """Rows that see no key: out 0, lse -inf, and nothing flows back through them."""
    query, key, value = (torch.randn(n, 2, 16, dtype=torch.float32) for n in (5, 3, 3))
    options = {"backend": pair.name}
    layout = PackedLayout.from_cu_seqlens(torch.tensor([0, 5]), torch.tensor([0, 3]))
    as_batch = [t.transpose(0, 1)[None] for t in (query, key, value)]
    if not pair.gives_lse or pair.refuses(*as_batch, layout):
        return
    leaves = [t.to(pair.device).requires_grad_() for t in (query, key, value)]
    out, lse = packed_sdpa.varlen_attention(
        *leaves, torch.tensor([0, 5]), torch.tensor([0, 3]), return_lse=True, **options
    )
    out.sum().backward()
    assert torch.equal(out[:2].cpu(), torch.zeros(2, 2, 16))
    assert torch.equal(lse[:, :2].cpu(), torch.full((2, 2), -torch.inf))
    assert torch.equal(leaves[0].grad[:2].cpu(), torch.zeros(2, 2, 16))
    right = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (query[2:], key, value)), is_causal=True
    )
    torch.testing.assert_close(out[2:].cpu(), right.transpose(0, 1))
    assert all(bool(torch.isfinite(leaf.grad).all()) for leaf in leaves)
