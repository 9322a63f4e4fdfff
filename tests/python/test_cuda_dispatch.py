"""The CUDA backends on the CPU, against stand-ins for torch's operators: what they are handed, what is made of it."""

from __future__ import annotations

import pytest
import torch
from cases import PACKINGS, packing, random_packing

import packed_sdpa
from aten_stand_ins import stand_ins
from oracle import check_against_oracle, random_inputs, with_gradients
from packed_sdpa import GraphLayout, LayoutTensors, PackedLayout, packed_attention
from packed_sdpa._library import ops
from packed_sdpa.functional import attention_on_tensors

BACKENDS = [("flash", torch.bfloat16), ("flash", torch.float16), ("efficient", torch.float32)]
backends = pytest.mark.parametrize("backend,dtype", BACKENDS, ids=[f"{n}-{str(d)[6:]}" for n, d in BACKENDS])
FORMS = ("host", "device")
forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def calls():
    with stand_ins() as record:
        yield record


def tensors_of(layout: PackedLayout, form: str) -> LayoutTensors:
    """The host's form, or that for kernels on a device: padding told as documents."""
    if form == "host":
        return layout.tensors()
    moved = ops.layout_to_device(
        list(layout.tensors()), layout.batch, layout.rows_q, layout.rows_k, torch.device("cpu")
    )
    return LayoutTensors(*moved)


def function_of(layout: PackedLayout, form: str, backend: str, **options):
    tensors = tensors_of(layout, form)
    return lambda q, k, v: attention_on_tensors(q, k, v, tensors, backend=backend, **options)[0]


def in_model_order(inputs):
    """[B, S, H, D] storage, as models hand it over."""
    return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs)


def test_without_stand_ins_the_cpu_has_no_such_kernels():
    ids = packing("tile")
    inputs = random_inputs(ids, torch.bfloat16)
    layout = PackedLayout.from_doc_ids(ids)
    for name, op in (("flash", "_flash_attention_forward"), ("efficient", "_efficient_attention_forward")):
        with pytest.raises(RuntimeError, match=f"this torch has no aten::{op} for cpu"):
            packed_attention(*inputs, layout, backend=name)


@forms
@backends
@pytest.mark.parametrize("name", [name for name in PACKINGS if name != "all_padding"])
def test_packing(calls, name, backend, dtype, form):
    ids = packing(name)
    layout = PackedLayout.from_doc_ids(ids)
    check_against_oracle(function_of(layout, form, backend), random_inputs(ids, dtype), ids)


@backends
@pytest.mark.parametrize("seed", range(6))
def test_random_packing(calls, seed, backend, dtype):
    generator = torch.Generator().manual_seed(seed)
    ids = random_packing(generator, 1 + seed % 3, 30 + 31 * seed)
    layout = PackedLayout.from_doc_ids(ids)
    inputs = random_inputs(ids, dtype, *((1, 1), (4, 2), (6, 2))[seed % 3], seed=seed)
    for form in FORMS:
        check_against_oracle(function_of(layout, form, backend), inputs, ids, repro=f"seed {seed} {form}")


@forms
@backends
def test_padding_is_exact_whatever_memory_holds(calls, backend, dtype, form):
    ids = torch.tensor([[0, 0, 1, 1, 0, 2, 2, 2, 0, 0], [3, 3, 3, 0, 0, 0, 4, 4, 4, 4]])
    layout = PackedLayout.from_doc_ids(ids)
    padding = (ids == 0)[:, None, :, None]
    inputs = random_inputs(ids, dtype)
    grad_out = torch.randn_like(inputs[0])
    function = function_of(layout, form, backend)
    clean = with_gradients(function, inputs, grad_out, dtype)
    dirty = with_gradients(
        function, [t.masked_fill(padding, torch.nan) for t in inputs], grad_out.masked_fill(padding, torch.nan), dtype
    )
    for got, right in zip(dirty, clean, strict=True):
        assert torch.equal(got, right)
        assert torch.equal(got.masked_select(padding), torch.zeros_like(got.masked_select(padding)))
    lse = attention_on_tensors(*inputs, tensors_of(layout, form), backend=backend)[1]
    assert torch.equal(torch.isneginf(lse), (ids == 0)[:, None].expand_as(lse))


@forms
@backends
def test_all_padding_calls_no_kernel(calls, backend, dtype, form):
    ids = packing("all_padding")
    inputs = [t.requires_grad_() for t in random_inputs(ids, dtype)]
    out, lse = attention_on_tensors(*inputs, tensors_of(PackedLayout.from_doc_ids(ids), form), backend=backend)
    out.backward(torch.full_like(out, torch.nan))
    assert torch.equal(out, torch.zeros_like(out)) and torch.isneginf(lse).all()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in inputs)
    assert not calls.flash_forward and not calls.efficient_forward


@pytest.mark.parametrize("ids", [packing("rows_split_differently"), torch.tensor([[1, 1, 0, 2, 2, 2, 0, 0]] * 3)])
def test_flash_is_handed_views(calls, ids):
    inputs = in_model_order(random_inputs(ids, torch.bfloat16))
    layout = PackedLayout.from_doc_ids(ids)
    leaves = [t.requires_grad_() for t in inputs]
    out, lse = attention_on_tensors(*leaves, tensors_of(layout, "device"), backend="flash")
    (handed,) = calls.flash_forward
    for name, tensor in zip(("query", "key", "value"), inputs, strict=True):
        assert handed[name].data_ptr() == tensor.data_ptr()
        assert handed[name].shape == (ids.numel(), tensor.shape[1], tensor.shape[3])
    assert handed["key"].shape[1] == 2, "grouped keys are not expanded"
    assert out.transpose(1, 2).is_contiguous() and out.shape == inputs[0].shape
    assert lse.shape == inputs[0].shape[:3] and lse.is_contiguous()
    grad_out = torch.randn_like(out.transpose(1, 2)).transpose(1, 2)
    out.backward(grad_out)
    (back,) = calls.flash_backward
    assert back["grad_out"].data_ptr() == grad_out.data_ptr()
    assert back["out"].data_ptr() == out.data_ptr()
    assert back["query"].data_ptr() == inputs[0].data_ptr()


def test_flash_of_one_row_is_handed_views_of_any_layout(calls):
    ids = packing("tile_plus_one")
    inputs = random_inputs(ids, torch.bfloat16)
    packed_attention(*inputs, PackedLayout.from_doc_ids(ids), backend="flash")
    assert [calls.flash_forward[0][n].data_ptr() for n in ("query", "key", "value")] == [t.data_ptr() for t in inputs]


@pytest.mark.parametrize(
    "is_causal,window_size,handed",
    [
        (True, (-1, -1), (None, None)),
        (True, (-1, 0), (None, None)),
        (True, (3, -1), (3, 0)),
        (True, (0, 0), (0, 0)),
        (False, (-1, -1), (None, None)),
        (False, (2, 1), (2, 1)),
        (False, (-1, 3), (-1, 3)),
    ],
)
def test_flash_window_arguments(calls, is_causal, window_size, handed):
    ids = packing("tile")
    options = {"is_causal": is_causal, "window_size": window_size}
    layout = PackedLayout.from_doc_ids(ids)
    check_against_oracle(
        function_of(layout, "host", "flash", **options), random_inputs(ids, torch.bfloat16), ids, **options
    )
    for call in (calls.flash_forward[0], calls.flash_backward[0]):
        assert (call["window_size_left"], call["window_size_right"]) == handed
        assert call["is_causal"] is is_causal


@forms
@pytest.mark.parametrize(
    "window_size,handed", [((0, 0), 1), ((3, -1), 4), ((31, 0), 32), ((2**30, 0), 129), ((2**62, 0), None)]
)
def test_efficient_window_argument(calls, window_size, handed, form):
    """It counts the row itself, and is never longer than a document."""
    ids = packing("tile_plus_one")
    layout = PackedLayout.from_doc_ids(ids)
    check_against_oracle(
        function_of(layout, form, "efficient", window_size=window_size),
        random_inputs(ids, torch.float32),
        ids,
        window_size=window_size,
    )
    for call in (calls.efficient_forward[0], calls.efficient_backward[0]):
        assert call["window_size"] == handed and call["custom_mask_type"] == 2


@forms
@pytest.mark.parametrize("name", ["padding_inside_and_tail", "short_then_long_batch", "rows_split_differently"])
def test_efficient_window_beside_padding(calls, name, form):
    ids = packing(name)
    layout = PackedLayout.from_doc_ids(ids)
    for window_size in ((0, 0), (2, 0), (40, 0)):
        check_against_oracle(
            function_of(layout, form, "efficient", window_size=window_size),
            random_inputs(ids, torch.float32),
            ids,
            window_size=window_size,
        )


def test_efficient_refuses_windows_that_its_backward_would_misplace(calls):
    ids = torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="it takes windows of documents with as many queries as keys only"):
        packed_attention(
            *random_inputs(ids, torch.float32, rows=4), PackedLayout.from_doc_ids(ids, 4), backend="efficient",
            window_size=(1, 0),
        )  # fmt: skip
    ids = packing("gaps_across_tiles")
    with pytest.raises(RuntimeError, match="a window counts rows, and a document here has other rows between its own"):
        packed_attention(
            *random_inputs(ids, torch.float32), PackedLayout.from_doc_ids(ids), backend="efficient", window_size=(1, 0)
        )


def test_flash_arguments(calls):
    ids = packing("padding_inside_and_tail")
    inputs = random_inputs(ids, torch.bfloat16)
    packed_attention(*inputs, PackedLayout.from_doc_ids(ids), backend="flash", scale=0.25)
    (call,) = calls.flash_forward
    assert call["scale"] == 0.25 and call["dropout_p"] == 0.0
    assert call["max_q"] == call["max_k"] == 3
    assert call["cum_seq_q"].tolist() == [0, 3, 5], "the host's form is gathered"
    attention_on_tensors(*inputs, tensors_of(PackedLayout.from_doc_ids(ids), "device"), backend="flash", scale=0.25)
    call = calls.flash_forward[1]
    assert call["cum_seq_q"].tolist() == [0, 3, 4, 4, 6], "padding between documents is a document without keys"
    assert call["cum_seq_k"].tolist() == [0, 3, 3, 4, 6], "... and one without queries; padding behind all is neither"
    assert call["query"].shape[0] == 8


@forms
def test_flash_dropout_state_travels_to_backward(calls, form):
    ids = packing("short_then_long_batch")
    inputs = [t.requires_grad_() for t in random_inputs(ids, torch.bfloat16)]
    tensors = tensors_of(PackedLayout.from_doc_ids(ids), form)
    before = torch.get_rng_state()
    out, _ = attention_on_tensors(*inputs, tensors, backend="flash", dropout_p=0.3)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    (forward,), (backward,) = calls.flash_forward, calls.flash_backward
    assert forward["dropout_p"] == backward["dropout_p"] == 0.3
    assert not torch.equal(before, torch.get_rng_state())
    pairing = (out.double() * grad_out.double()).sum()
    value_pairing = (inputs[2].grad.double() * inputs[2].double()).sum()
    torch.testing.assert_close(value_pairing, pairing, rtol=0.02, atol=0.5)


@pytest.mark.parametrize("head_dim", [1, 12, 59, 256])
def test_head_dims_are_padded_to_what_the_kernel_takes(calls, head_dim):
    ids = packing("padding_inside_and_tail")
    inputs = random_inputs(ids, torch.bfloat16, head_dim=head_dim)
    check_against_oracle(function_of(PackedLayout.from_doc_ids(ids), "device", "flash"), inputs, ids)
    assert calls.flash_forward[0]["query"].shape[2] % 8 == 0
    inputs = random_inputs(ids, torch.float32, head_dim=head_dim, value_dim=head_dim + 3)
    check_against_oracle(function_of(PackedLayout.from_doc_ids(ids), "device", "efficient"), inputs, ids)


@backends
def test_operands_that_kernels_cannot_load_are_copied(calls, backend, dtype):
    ids = packing("tile")
    layout = PackedLayout.from_doc_ids(ids)
    wide = random_inputs(ids, dtype, head_dim=32)
    for inputs in ([t[..., ::2] for t in wide], [t[..., 1:17] for t in wide], [t[:, :1].expand_as(t) for t in wide]):
        check_against_oracle(function_of(layout, "host", backend), tuple(inputs), ids)


@pytest.mark.parametrize("row_offset,rows", [(0, 3), (2, 3), (4, 4), (5, 2)])
@backends
def test_query_rows_in_the_middle(calls, row_offset, rows, backend, dtype):
    """Keys behind a document's last query become a document without queries."""
    for ids in ([1] * 8, [1, 1, 1, 2, 2, 2, 3, 3], [1, 1, 0, 1, 2, 2, 0, 2]):
        ids = torch.tensor([ids])
        layout = PackedLayout.from_doc_ids(ids, row_offset, rows)
        inputs = random_inputs(ids, dtype, rows=rows)
        for form in FORMS:
            check_against_oracle(function_of(layout, form, backend), inputs, ids, row_offset=row_offset)


@backends
def test_rows_that_see_no_key(calls, backend, dtype):
    query, key, value = (torch.randn(1, 2, n, 16).to(dtype).requires_grad_() for n in (7, 5, 5))
    layout = PackedLayout.from_cu_seqlens(torch.tensor([0, 5, 7, 7]), torch.tensor([0, 3, 3, 5]))
    out, lse = packed_attention(query, key, value, layout, backend=backend, return_lse=True)
    out.backward(torch.ones_like(out))
    blind = [0, 1, 5, 6]
    assert torch.equal(out[:, :, blind], torch.zeros(1, 2, 4, 16, dtype=dtype))
    assert torch.isneginf(lse[:, :, blind]).all() and torch.isfinite(lse[:, :, 2:5]).all()
    assert torch.equal(query.grad[:, :, blind], torch.zeros(1, 2, 4, 16, dtype=dtype))
    assert torch.equal(key.grad[:, :, 3:], torch.zeros(1, 2, 2, 16, dtype=dtype))
    assert all(torch.isfinite(t.grad).all() for t in (query, key, value))


@backends
def test_more_documents_than_one_call_takes(calls, backend, dtype):
    count = 5_000
    ids = torch.arange(1, count + 1).view(1, -1)
    inputs = random_inputs(ids, dtype, 2, 1, head_dim=8)
    out = packed_attention(*inputs, PackedLayout.from_doc_ids(ids), backend=backend)
    assert torch.equal(out, inputs[2].expand_as(out))
    made = calls.flash_forward or calls.efficient_forward
    assert len(made) > 1
    name = "cum_seq_q" if backend == "flash" else "cu_seqlens_q"
    assert sum(call[name].numel() - 1 for call in made) == count


def test_chunks_agree_with_the_oracle(calls):
    """1,500 documents of 1 to 3 tokens: more than flash's backward memory lets into one call."""
    lengths = torch.arange(1500) % 3 + 1
    ids = (torch.arange(1500) + 1).repeat_interleave(lengths).view(1, -1)
    inputs = random_inputs(ids, torch.bfloat16, 2, 1, head_dim=8)
    layout = PackedLayout.from_doc_ids(ids)
    out = with_gradients(function_of(layout, "host", "flash"), inputs, torch.ones_like(inputs[0]), torch.bfloat16)
    right = with_gradients(function_of(layout, "host", "cpu"), inputs, torch.ones_like(inputs[0]), torch.bfloat16)
    assert len(calls.flash_forward) == len(calls.flash_backward) == 2
    for got, expected in zip(out, right, strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=0.03, atol=0.03)
    with pytest.raises(RuntimeError, match="dropout has one random state a call"):
        packed_attention(*inputs, layout, backend="flash", dropout_p=0.1)


def test_efficient_keeps_its_lse_small(calls):
    """One long and many short documents: lse is [documents, heads, longest], so they go in chunks."""
    ids = torch.cat([torch.ones(3000, dtype=torch.int64), torch.arange(2, 1002)]).view(1, -1)
    inputs = random_inputs(ids, torch.float32, 1, 1, head_dim=8)
    out = packed_attention(*inputs, PackedLayout.from_doc_ids(ids), backend="efficient")
    assert len(calls.efficient_forward) > 1
    for call in calls.efficient_forward:
        assert (call["cu_seqlens_q"].numel() - 1) * call["max_seqlen_q"] <= 8 * 65_536
    right = packed_attention(*inputs, PackedLayout.from_doc_ids(ids), backend="cpu")
    torch.testing.assert_close(out, right, rtol=0, atol=2e-6)


@backends
def test_meta_kernels_tell_the_strides_of_real_ones(calls, backend, dtype):
    for name in ("rows_split_differently", "padding_inside_and_tail", "gaps_across_tiles"):
        ids = packing(name)
        tensors = PackedLayout.from_doc_ids(ids).tensors()
        plain = random_inputs(ids, dtype)
        for inputs in (plain, in_model_order(plain), tuple(t[:, :1] for t in plain)):
            leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in inputs]
            out, lse = attention_on_tensors(*leaves, tensors, backend=backend)
            gradients = torch.autograd.grad(out.sum(), leaves)
            meta = [t.to("meta") for t in leaves]
            settings = (True, -1, -1, 0.25, 0.0, backend)
            meta_layout = [t.to("meta") for t in tensors]
            fake = ops.varlen_attention_forward(*meta, *meta_layout, *settings)
            for got, told in ((out, fake[0]), (lse, fake[1])):
                assert got.shape == told.shape and got.stride() == told.stride()
            told_gradients = ops.varlen_attention_backward(fake[0], *meta, *fake, *meta_layout, *settings)
            for got, told in zip(gradients, told_gradients, strict=True):
                assert got.shape == told.shape and got.stride() == told.stride()


@forms
@backends
def test_nothing_is_read_on_the_host_after_arming(calls, backend, dtype, form):
    """No .item(), no data-dependent size: what would make a CUDA device wait."""
    ids = packing("short_then_long_batch")
    leaves = [t.requires_grad_() for t in random_inputs(ids, dtype)]
    tensors = tensors_of(PackedLayout.from_doc_ids(ids), form)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out, _ = attention_on_tensors(*leaves, tensors, backend=backend)
        out.backward(torch.ones_like(out))
    seen = {event.key for event in profile.key_averages()}
    assert f"aten::_{backend}_attention_forward" in seen and f"aten::_{backend}_attention_backward" in seen
    for event in profile.events():
        parents, parent = [], event.cpu_parent
        while parent is not None:
            parents.append(parent.name)
            parent = parent.cpu_parent
        if not any("_attention_forward" in p and p.startswith("aten") for p in parents) and not any(
            "_attention_backward" in p and p.startswith("aten") for p in parents
        ):
            assert event.name not in ("aten::item", "aten::_local_scalar_dense", "aten::nonzero"), parents


def test_auto_on_the_cpu_still_takes_the_cpu_kernels(calls):
    ids = packing("tile")
    reports = packed_sdpa.explain(*random_inputs(ids, torch.bfloat16), PackedLayout.from_doc_ids(ids))
    assert reports.chosen == "cpu"
    assert [report.name for report in reports] == packed_sdpa.available_backends()
    assert not next(report for report in reports if report.name == "flash").reasons


@pytest.mark.parametrize(
    "dtype,shape,options,reason",
    [
        (torch.float32, {}, {}, "it takes float16 and bfloat16, not Float"),
        (torch.bfloat16, {"head_dim": 264}, {}, "its head dim ends at 256, not 264"),
        (
            torch.bfloat16,
            {"head_dim": 24, "value_dim": 16},
            {},
            "query and value must have one head dim, not 24 and 16",
        ),
        (torch.bfloat16, {}, {"window_size": (1, 0)}, "a window counts rows, and a document here has other rows"),
    ],
)
def test_flash_says_why_not(calls, dtype, shape, options, reason):
    ids = packing("gaps_across_tiles")
    inputs = random_inputs(ids, dtype, **shape)
    layout = PackedLayout.from_doc_ids(ids)
    with pytest.raises(RuntimeError, match=f"backend 'flash' cannot take this call.*{reason}"):
        packed_attention(*inputs, layout, backend="flash", **options)
    assert not calls.flash_forward


@pytest.mark.parametrize(
    "dtype,options,reason",
    [
        (torch.float64, {}, "it takes float32, float16 and bfloat16, not Double"),
        (torch.float32, {"dropout_p": 0.1}, "its dropout keeps random state on the host"),
        (torch.float32, {"window_size": (1, 2), "is_causal": False}, r"it takes windows with is_causal only \(1, 2\)"),
    ],
)
def test_efficient_says_why_not(calls, dtype, options, reason):
    ids = packing("tile")
    with pytest.raises(RuntimeError, match=f"backend 'efficient' cannot take this call.*{reason}"):
        packed_attention(*random_inputs(ids, dtype), PackedLayout.from_doc_ids(ids), backend="efficient", **options)


def test_whole_documents_of_rows_in_the_middle_are_refused(calls):
    ids = torch.ones(1, 8, dtype=torch.int64)
    layout = PackedLayout.from_doc_ids(ids, 2, 3)
    for backend, dtype in (("flash", torch.bfloat16), ("efficient", torch.float32)):
        with pytest.raises(RuntimeError, match="queries that do not end with their document's keys need is_causal"):
            packed_attention(*random_inputs(ids, dtype, rows=3), layout, backend=backend, is_causal=False)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_kernel_errors_pass_through(calls):
    """No backend catches an error to try another one."""
    ids = packing("tile")
    with torch.library._scoped_library("aten", "IMPL") as library:

        def out_of_memory(*args, **kwargs):
            raise torch.OutOfMemoryError("out of memory")

        library.impl("_flash_attention_forward", out_of_memory, "CPU", allow_override=True)
        with pytest.raises(torch.OutOfMemoryError):
            packed_attention(*random_inputs(ids, torch.bfloat16), PackedLayout.from_doc_ids(ids), backend="auto:flash")


@pytest.mark.parametrize("size,expected", [(20_000, "documents"), (64, "documents")])
def test_padding_goes_as_documents_while_that_is_cheap(size, expected):
    ids = torch.ones(1, size, dtype=torch.int64)
    ids[0, size // 2] = 0
    ids[0, size // 2 + 1 :] = 2
    tensors = tensors_of(PackedLayout.from_doc_ids(ids), "device")
    assert tensors.token_index_q.numel() == 0
    assert tensors.cu_seqlens_q.numel() - 1 == 4


def test_many_short_runs_of_padding_are_gathered():
    ids = torch.arange(1, 2001).repeat_interleave(2).view(1, -1)
    ids[:, 1::2] = 0
    tensors = tensors_of(PackedLayout.from_doc_ids(ids), "device")
    assert tensors.token_index_q.numel() == 2000


def test_mirror_of_the_host():
    ids = packing("gaps_across_tiles")
    tensors = tensors_of(PackedLayout.from_doc_ids(ids), "device")
    count = tensors.cu_seqlens_q.numel()
    assert tensors.max_seqlens.tolist() == [
        *tensors.max_seqlens[:2].tolist(), 1, *tensors.cu_seqlens_q.tolist(), *tensors.cu_seqlens_k.tolist()
    ]  # fmt: skip
    assert tensors.max_seqlens.numel() == 3 + 2 * count


def test_every_backend_takes_the_device_form():
    for name in PACKINGS:
        ids = packing(name)
        inputs = random_inputs(ids, torch.float32)
        layout = PackedLayout.from_doc_ids(ids)
        for backend in ("cpu", "per_document", "reference"):
            host = attention_on_tensors(*inputs, tensors_of(layout, "host"), backend=backend)
            device = attention_on_tensors(*inputs, tensors_of(layout, "device"), backend=backend)
            assert torch.equal(host[0], device[0]) and torch.equal(host[1], device[1]), (name, backend)


@backends
def test_graph_layout(calls, backend, dtype):
    layout = GraphLayout(2, 12, max_documents=24, max_seqlen=8, device="cpu")
    address = layout.tensors().cu_seqlens_q.data_ptr()
    for ids in ([[1] * 8 + [2] * 4, [0, 0, 3, 3, 0, 4, 4, 4, 4, 4, 0, 0]], [[0] * 12, [5] * 6 + [0] + [6] * 5]):
        ids = torch.tensor(ids)
        calls.flash_forward.clear(), calls.flash_backward.clear()  # they hold the layout's tensors
        calls.efficient_forward.clear(), calls.efficient_backward.clear()
        layout.refill(ids)
        assert layout.tensors().cu_seqlens_q.data_ptr() == address
        assert layout.tensors().cu_seqlens_q.numel() == 25
        check_against_oracle(
            lambda q, k, v: packed_attention(q, k, v, layout, backend=backend), random_inputs(ids, dtype), ids
        )


def test_graph_layout_is_not_refilled_under_a_pending_backward(calls):
    ids = torch.tensor([[1, 1, 1, 2, 2, 2]])
    layout = GraphLayout(1, 6, max_documents=4, device="cpu")
    layout.refill(ids)
    leaves = [t.requires_grad_() for t in random_inputs(ids, torch.float32)]
    out = packed_attention(*leaves, layout)
    with pytest.raises(RuntimeError, match="a backward that reads the present documents is pending"):
        layout.refill(ids)
    out.sum().backward()
    layout.refill(torch.tensor([[1, 1, 2, 2, 3, 3]]))
    out = packed_attention(*leaves, layout)
    del out
    layout.refill(ids)
    with torch.no_grad():
        packed_attention(*leaves, layout)
    layout.refill(ids)


@pytest.mark.parametrize(
    "ids,message",
    [
        ([[1, 2, 1, 2, 2, 2]], "an id that comes back after a gap"),
        ([[1, 2, 3, 4, 5, 6]], "doc_ids need 6 documents and stretches of padding, max_documents is 4"),
        ([[1, 1, 1, 1, 1, 2]], "a document of 5 tokens, max_seqlen is 4"),
        ([[1, 1, 1, 2, 2]], r"doc_ids must be \[1, 6\] as this layout, got \[1, 5\]"),
    ],
)
def test_graph_layout_says_what_does_not_fit(ids, message):
    layout = GraphLayout(1, 6, max_documents=4, max_seqlen=4, device="cpu")
    layout.refill(torch.tensor([[1, 1, 1, 2, 2, 2]]))
    before = layout.tensors().cu_seqlens_q.clone()
    with pytest.raises(ValueError, match=message):
        layout.refill(torch.tensor(ids))
    assert torch.equal(layout.tensors().cu_seqlens_q, before)


def test_graph_layout_on_a_device_has_no_offsets_on_the_host():
    layout = GraphLayout(1, 8, max_documents=4, device="meta")
    tensors = [torch.empty(1, 2, 8, 16, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    reports = {report.name: report.reasons for report in packed_sdpa.explain(*tensors, layout)}
    assert "GraphLayout" in reports["per_document"][0]


@pytest.mark.parametrize("rows", [2**31 - 1, 2**32, 2**62])
def test_flash_is_handed_no_window_that_no_row_reaches(rows):
    """Its kernel keeps the counts in a C int, in which 2**32 is 0."""
    operands = torch.randn(3, 1, 2, 14, 16, dtype=torch.bfloat16)
    with stand_ins() as calls:
        packed_attention(*operands, PackedLayout.from_seqlens([5, 9]), window_size=(rows, 0), backend="flash")
    assert calls.flash_forward[-1].get("window_size_left") is None
