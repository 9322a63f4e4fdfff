"""Backends that are Python packages, against stand-in packages with the real ones' signatures."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from cases import packing

import packed_sdpa
from oracle import check_against_oracle, random_inputs
from packed_sdpa import GraphLayout, PackedLayout, package_registry, packed_attention, te
from packed_sdpa.flash_attn_package import FlashAttnPackage
from packed_sdpa.te import TransformerEngine

NAMES = ["te", "flash_attn"]


def _attend(query, key, value, cu_q, cu_k, scale, is_causal, window_size):
    """[T, H, D] varlen attention by torch operations, so that autograd works as in the packages."""
    out = torch.zeros_like(query)
    groups = query.shape[1] // key.shape[1]
    for begin_q, end_q, begin_k, end_k in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        q = query[begin_q:end_q].transpose(0, 1)
        k, v = (t[begin_k:end_k].transpose(0, 1).repeat_interleave(groups, 0) for t in (key, value))
        behind = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        seen = behind >= 0 if is_causal else torch.ones_like(behind, dtype=torch.bool)
        if window_size[0] >= 0:
            seen &= behind <= window_size[0]
        if window_size[1] >= 0:
            seen &= behind >= -window_size[1]
        scores = (q.float() @ k.float().transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        part = (scores.softmax(-1) @ v.float()).transpose(0, 1).to(query.dtype)
        out = torch.cat([out[:begin_q], part, out[end_q:]])
    return out


def _check_offsets(offsets, rows):
    assert offsets.dtype == torch.int32 and offsets[0] == 0 and offsets[-1] == rows
    assert bool((offsets.diff() > 0).all()), "documents without queries or keys are not handed over"


@pytest.fixture
def installed(monkeypatch):
    """Stand-in packages that run on the CPU; the record of their calls."""
    calls = []

    class DotProductAttention(torch.nn.Module):
        def __init__(
            self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.1, qkv_format="sbhd",
            attn_mask_type="causal", window_size=None, sequence_parallel=False, tp_size=1,
            get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type="self", cp_group=None,
            cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None,
        ):  # fmt: skip
            super().__init__()
            self.made_with = dict(locals())
            self.deterministic = torch.are_deterministic_algorithms_enabled()  # read here and not later, as in theirs
            assert qkv_format == "thd" and attention_dropout == 0.0

        def forward(
            self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
            cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
            max_seqlen_kv=None, attn_mask_type=None, window_size=None, checkpoint_core_attention=False,
        ):  # fmt: skip
            calls.append(dict(locals()))
            made = self.made_with
            assert attention_mask is None and qkv_format == "thd" and attn_mask_type == made["attn_mask_type"]
            assert attn_mask_type in ("padding_causal_bottom_right", "padding")
            assert query_layer.shape[1:] == (made["num_attention_heads"], made["kv_channels"])
            assert key_layer.shape[1] == value_layer.shape[1] == made["num_gqa_groups"]
            _check_offsets(cu_seqlens_q, query_layer.shape[0])
            _check_offsets(cu_seqlens_kv, key_layer.shape[0])
            assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_kv == int(cu_seqlens_kv.diff().max())
            out = _attend(
                query_layer, key_layer, value_layer, cu_seqlens_q, cu_seqlens_kv, made["softmax_scale"],
                "causal" in attn_mask_type, made["window_size"],
            )  # fmt: skip
            return out.flatten(1)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        calls.append(dict(locals()))
        assert softcap == 0.0 and alibi_slopes is None and not return_attn_probs and block_table is None
        _check_offsets(cu_seqlens_q, q.shape[0])
        _check_offsets(cu_seqlens_k, k.shape[0])
        return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size)

    engine = types.ModuleType("transformer_engine")
    engine.pytorch = types.ModuleType("transformer_engine.pytorch")
    engine.pytorch.DotProductAttention = DotProductAttention
    flash = types.ModuleType("flash_attn")
    flash.flash_attn_varlen_func = flash_attn_varlen_func
    for module in (engine, engine.pytorch, flash):
        module.__spec__ = types.SimpleNamespace(name=module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(package_registry.BACKENDS, "te", TransformerEngine(device_types=("cpu",)))
    monkeypatch.setitem(package_registry.BACKENDS, "flash_attn", FlashAttnPackage(device_types=("cpu",)))
    te._attention_module.cache_clear()
    yield calls
    te._attention_module.cache_clear()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "ids", ["tile_plus_one", "padding_inside_and_tail", "rows_split_differently", "interleaved", "one_row_all_padding"]
)
def test_against_the_oracle(installed, ids, name):
    ids = packing(ids)
    layout = PackedLayout.from_doc_ids(ids)
    for dtype in (torch.bfloat16, torch.float16):
        check_against_oracle(
            lambda q, k, v: packed_attention(q, k, v, layout, backend=name), random_inputs(ids, dtype), ids
        )
    assert installed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_causal,window_size", [(True, (2, -1)), (True, (2, 0)), (False, (-1, -1)), (False, (2, 1))])
def test_windows(installed, is_causal, window_size, name):
    ids = packing("tile_plus_one")
    options = {"is_causal": is_causal, "window_size": window_size}
    layout = PackedLayout.from_doc_ids(ids)
    check_against_oracle(
        lambda q, k, v: packed_attention(q, k, v, layout, backend=name, scale=0.3, **options),
        random_inputs(ids, torch.bfloat16),
        ids,
        scale=0.3,
        **options,
    )


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_never_read(installed, name):
    ids = packing("padding_inside_and_tail")
    padding = (ids == 0)[:, None, :, None]
    leaves = [t.masked_fill(padding, torch.nan).requires_grad_() for t in random_inputs(ids, torch.bfloat16)]
    out = packed_attention(*leaves, PackedLayout.from_doc_ids(ids), backend=name)
    out.backward(torch.ones_like(out).masked_fill(padding, torch.nan))
    for tensor in (out, *(leaf.grad for leaf in leaves)):
        assert torch.isfinite(tensor).all()
        assert torch.equal(tensor.masked_select(padding), torch.zeros_like(tensor.masked_select(padding)))


@pytest.mark.parametrize("name", NAMES)
def test_all_padding(installed, name):
    ids = packing("all_padding")
    leaves = [torch.full((2, 2, 4, 16), torch.nan, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out = packed_attention(*leaves, PackedLayout.from_doc_ids(ids), backend=name)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in leaves)
    assert not installed


@pytest.mark.parametrize("name,package", [("te", "transformer_engine"), ("flash_attn", "flash_attn")])
def test_absent_package(name, package):
    ids = packing("tile")
    inputs = random_inputs(ids, torch.bfloat16)
    layout = PackedLayout.from_doc_ids(ids)
    with pytest.raises(
        RuntimeError, match=f"backend '{name}' cannot take this call: the package {package} is not inst"
    ):
        packed_attention(*inputs, layout, backend=name)
    wished = packed_attention(*inputs, layout, backend=f"auto:{name}")
    assert torch.equal(wished, packed_attention(*inputs, layout))
    report = next(r for r in packed_sdpa.explain(*inputs, layout) if r.name == name)
    assert report.reasons == (f"the package {package} is not installed", "it runs on cuda, not on cpu")


@pytest.mark.parametrize(
    "dtype,shape,options,reason",
    [
        (torch.float32, {}, {}, "it takes float16 and bfloat16, not float32"),
        (torch.bfloat16, {"head_dim": 59}, {}, "its head dim is a multiple of 8 up to 256, not 59"),
        (
            torch.bfloat16,
            {"head_dim": 24, "value_dim": 16},
            {},
            "query and value must have one head dim, not 24 and 16",
        ),
        (torch.bfloat16, {}, {"dropout_p": 0.5}, r"it is used without dropout only \(dropout_p 0.5\)"),
        (torch.bfloat16, {}, {"return_lse": True}, "it gives no lse"),
        (torch.bfloat16, {}, {"window_size": (1, 0)}, "a window counts rows"),
    ],
)
def test_te_says_why_not(installed, dtype, shape, options, reason):
    ids = packing("gaps_across_tiles")
    with pytest.raises(RuntimeError, match=f"backend 'te' cannot take this call: {reason}"):
        packed_attention(*random_inputs(ids, dtype, **shape), PackedLayout.from_doc_ids(ids), backend="te", **options)
    assert not installed


def test_rows_in_the_middle_are_refused(installed):
    ids = torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="it needs queries that end with their document's keys"):
        packed_attention(
            *random_inputs(ids, torch.bfloat16, rows=3), PackedLayout.from_doc_ids(ids, 2, 3), backend="te"
        )


def test_graph_layout_on_a_device_is_refused():
    layout = GraphLayout(1, 8, max_documents=4, device="meta")
    tensors = [torch.empty(1, 2, 8, 16, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    report = next(r for r in packed_sdpa.explain(*tensors, layout) if r.name == "te")
    assert any("GraphLayout" in reason for reason in report.reasons)


@pytest.mark.parametrize("name", NAMES)
def test_explain_and_auto(installed, name):
    ids = packing("tile")
    inputs = random_inputs(ids, torch.bfloat16)
    layout = PackedLayout.from_doc_ids(ids)
    assert packed_sdpa.explain(*inputs, layout).chosen == "cpu"
    packed_attention(*inputs, layout)
    assert not installed, "auto never takes a package"
    for preference in (name, f"auto:{name}"):
        reports = packed_sdpa.explain(*inputs, layout, backend=preference)
        assert reports.chosen == name
        assert sum(report.chosen for report in reports) == 1
        packed_attention(*inputs, layout, backend=preference)
    assert len(installed) == 2


def test_a_package_error_passes_through(installed, monkeypatch):
    ids = packing("tile")

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        packed_attention(*random_inputs(ids, torch.bfloat16), PackedLayout.from_doc_ids(ids), backend="auto:flash_attn")


def test_one_module_for_all_layers_of_a_shape(installed):
    ids = packing("tile")
    layout = PackedLayout.from_doc_ids(ids)
    for _ in range(3):
        packed_attention(*random_inputs(ids, torch.bfloat16), layout, backend="te")
    assert len({id(call["self"]) for call in installed}) == 1


def test_a_module_is_made_for_the_deterministic_mode(installed):
    ids = packing("tile")
    inputs, layout = random_inputs(ids, torch.bfloat16), PackedLayout.from_doc_ids(ids)
    modes = (False, True, False, True)
    try:
        for mode in modes:
            torch.use_deterministic_algorithms(mode)
            packed_attention(*inputs, layout, backend="te")
    finally:
        torch.use_deterministic_algorithms(False)
    assert tuple(call["self"].deterministic for call in installed) == modes
    assert len({id(call["self"]) for call in installed}) == 2


def test_cpp_knows_the_names():
    ids = packing("tile")
    inputs = random_inputs(ids, torch.bfloat16)
    tensors = PackedLayout.from_doc_ids(ids).tensors()
    with pytest.raises(RuntimeError, match="which only packed_sdpa's Python functions can reach"):
        torch.ops.packed_sdpa.varlen_attention_forward(*inputs, *tensors, True, -1, -1, 0.25, 0.0, "te")
