"""What a CUDA device would make the host wait for: at arming at most once, in layers and recompute never.

Against a device that is not there (stand_in_device.py), with real values, so results are compared to the oracle too.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from cases import PACKINGS, packing, random_packing
from torch.utils.checkpoint import checkpoint

import packed_sdpa
from aten_stand_ins import stand_ins
from oracle import check_against_oracle, random_inputs, with_gradients
from packed_sdpa import GraphLayout, LayoutTensors, PackedLayout, graph_layout, mask_audit, packages, packed
from packed_sdpa._library import ops
from packed_sdpa.armed import ArmedDocuments
from packed_sdpa.documents import find_documents
from packed_sdpa.flash_attn_package import FlashAttnPackage
from packed_sdpa.te import TransformerEngine
from stand_in_device import DEVICE, OnDevice, stand_in_device

ONE_COPY = ["aten._to_copy.default to the host"]
BACKENDS = [
    ("flash", torch.bfloat16), ("flash", torch.float16), ("efficient", torch.float32), ("per_document", torch.float32),
    ("per_document", torch.bfloat16),
]  # fmt: skip
backends = pytest.mark.parametrize("backend,dtype", BACKENDS, ids=[f"{n}-{str(d)[6:]}" for n, d in BACKENDS])


@pytest.fixture
def device():
    with stand_ins("CPU", "CUDA") as calls, stand_in_device() as waits:
        waits.kernels = calls
        yield waits


def held(tensor):
    return tensor.held if isinstance(tensor, OnDevice) else tensor


def assert_same_tensors(got: LayoutTensors, right: LayoutTensors) -> None:
    for name, one, other in zip(LayoutTensors._fields, got, right, strict=True):
        one, other = held(one), held(other)
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other), name


def attention(query, key, value, *, layout, dropout_p=0.0, **options):
    """Differentiable attention of host tensors, computed on the device by the operators themselves."""
    tensors = layout.tensors(DEVICE)
    settings = (True, -1, -1, query.shape[-1] ** -0.5, dropout_p, options["backend"])

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *operands):
            operands = [OnDevice(t) for t in operands]
            out, lse, state = ops.varlen_attention_forward(*operands, *tensors, *settings)
            ctx.save_for_backward(*(tensor.held for tensor in (*operands, out, lse, state)))
            return out.held

        @staticmethod
        def backward(ctx, grad_out):
            saved = [OnDevice(tensor) for tensor in (grad_out, *ctx.saved_tensors)]
            gradients = ops.varlen_attention_backward(*saved, *tensors, *settings)
            return tuple(gradient.held for gradient in gradients)

    return Attention.apply(query, key, value)


# --- arming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKINGS)
def test_documents_found_on_the_device_are_those_of_the_host(device, name):
    ids = packing(name)
    right = PackedLayout.from_doc_ids(ids)
    sent = LayoutTensors(*ops.layout_to_device(list(right.tensors()), *right_sizes(right), torch.device("cpu")))
    device.take()
    got = PackedLayout.from_doc_ids(OnDevice(ids))
    assert device.take() == ONE_COPY
    assert_same_tensors(got.tensors(), right.tensors())
    assert_same_tensors(got.tensors(DEVICE), sent)
    assert all(tensor.device == DEVICE for tensor in got.tensors(DEVICE)[:-1])
    assert device.take() == []


def right_sizes(layout: PackedLayout) -> tuple[int, int, int]:
    return layout.batch, layout.rows_q, layout.rows_k


@pytest.mark.parametrize("seed", range(20))
def test_random_documents_found_on_the_device(device, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = random_packing(generator, 1 + seed % 4, 20 + 13 * seed)
    for given in (ids, ids.int(), ids.t().contiguous().t(), ids[:1].expand(3, -1), ids[0]):
        right = PackedLayout.from_doc_ids(given)
        got = PackedLayout.from_doc_ids(OnDevice(given))
        assert_same_tensors(got.tensors(), right.tensors())
        assert (got.batch, got.rows_q, got.rows_k) == (right.batch, right.rows_q, right.rows_k)
    offset, rows = seed, 15
    right = PackedLayout.from_doc_ids(ids, offset, rows)
    assert_same_tensors(PackedLayout.from_doc_ids(OnDevice(ids), offset, rows).tensors(), right.tensors())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint64])
def test_dtypes_of_ids_on_the_device(device, dtype):
    ids = packing("padding_inside_and_tail").clamp_max(1 if dtype == torch.bool else 9).to(dtype)
    if dtype == torch.uint64:
        ids = torch.tensor([[2**64 - 1, 2**64 - 1, 0, 3, 3, 0, 0, 0]], dtype=dtype)
    right = PackedLayout.from_doc_ids(ids)
    assert_same_tensors(PackedLayout.from_doc_ids(OnDevice(ids)).tensors(), right.tensors())


def test_offsets_of_documents_side_by_side_never_leave_the_device(device):
    ids = torch.tensor([[4] * 5 + [9] * 3, [2] * 7 + [0]])
    layout = PackedLayout.from_doc_ids(OnDevice(ids))
    tensors = layout.tensors(DEVICE)
    assert sum(tensor.numel() for tensor in device.uploads) == 0
    assert tensors.cu_seqlens_q.held.tolist() == tensors.cu_seqlens_k.held.tolist() == [0, 5, 8, 15]


def test_ids_may_be_overwritten_after_arming(device):
    ids = torch.tensor([[1, 1, 2, 2]])
    on_device = OnDevice(ids.clone())
    layout, armed = PackedLayout.from_doc_ids(on_device), ArmedDocuments(on_device)
    on_device.held.zero_()
    assert layout.tensors(DEVICE).cu_seqlens_q.held.tolist() == [0, 2, 4]
    assert torch.equal(armed.doc_ids, ids)


def test_more_runs_than_the_first_copy_takes(device):
    """70,000 documents of one token: the second copy is said in from_doc_ids."""
    ids = torch.arange(1, 70_001).view(1, -1)
    layout = PackedLayout.from_doc_ids(OnDevice(ids))
    assert device.take() == 2 * ONE_COPY
    assert torch.equal(layout.tensors(DEVICE).cu_seqlens_q.held, torch.arange(70_001, dtype=torch.int32))
    assert_same_tensors(layout.tensors(), PackedLayout.from_doc_ids(ids).tensors())


@pytest.mark.parametrize(
    "ids,error,message",
    [
        (torch.tensor([[1, -3, 2]]), ValueError, "doc_ids must not be negative, got -3; use 0 for padding"),
        (torch.ones(1, 3), TypeError, r"doc_ids must have an integer dtype \(or bool\), got Float"),
        (torch.ones(1, 1, 3, dtype=torch.int64), ValueError, r"doc_ids must be \[B, S\] or \[S\], got shape"),
    ],
)
def test_errors_are_those_of_the_host(device, ids, error, message):
    for given in (ids, OnDevice(ids)):
        with pytest.raises(error, match=message):
            PackedLayout.from_doc_ids(given)
        with pytest.raises(error, match=message):
            packed_sdpa.arm(given)
    with pytest.raises(ValueError, match=r"row_offset must be in \[0, 2\], got 5"):
        PackedLayout.from_doc_ids(OnDevice(torch.tensor([[1, 1]])), 5)


@pytest.mark.parametrize("shape", [(1, 0), (0, 5), (2, 0)])
def test_no_tokens(device, shape):
    layout = PackedLayout.from_doc_ids(OnDevice(torch.zeros(shape, dtype=torch.int64)))
    assert layout.num_documents == 0
    assert layout.tensors(DEVICE).cu_seqlens_q.held.tolist() == [0]


@pytest.mark.parametrize("name", ["tile_plus_one", "short_then_long_batch", "interleaved", "padding_between_singles"])
def test_arming_waits_once(device, name):
    ids = packing(name)
    armed = ArmedDocuments(OnDevice(ids))
    assert device.take() == ONE_COPY
    assert torch.equal(armed.doc_ids, ids)
    armed.layout.tensors(DEVICE)
    assert device.take() == []
    packed.enable_cp1_packed_varlen(OnDevice(ids), "flash")
    assert device.take() == ONE_COPY
    packed.disable_cp1_packed_varlen()


def test_lengths_of_the_collator_cost_no_wait(device):
    for layout in (
        PackedLayout.from_seqlens([5, 3, 4], total=16),
        PackedLayout.from_cu_seqlens(torch.tensor([0, 5, 8]), torch.tensor([0, 5, 8]), 8, 8),
        PackedLayout.from_doc_ids(packing("interleaved")),
        PackedLayout.from_position_ids(torch.tensor([[0, 1, 2, 0, 1, 0]])),
    ):
        layout.tensors(DEVICE)
    assert device.take() == []


def test_positions_on_the_device(device):
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    layout = PackedLayout.from_position_ids(OnDevice(positions))
    assert device.take() == ONE_COPY
    assert_same_tensors(layout.tensors(), PackedLayout.from_position_ids(positions).tensors())
    assert layout.tensors(DEVICE).cu_seqlens_q.held.tolist() == [0, 3, 5, 6, 7, 12]


ARGUMENTS = {
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 0, 1, 2, 3]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8]),
    "input_ids": torch.zeros(2, 8, dtype=torch.int64),
    "doc_ids": torch.tensor([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 2, 2, 2, 2]], dtype=torch.int16),
    "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32),
}
RIGHT = [[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 2, 2, 2, 2]]


def boundaries(ids):
    return (ids[:, 1:] != ids[:, :-1]).tolist(), (ids == 0).tolist()


@pytest.mark.parametrize(
    "names",
    [
        ("position_ids",),
        ("position_ids", "attention_mask"),
        ("position_ids", "attention_mask", "doc_ids", "seq_idx"),
        ("attention_mask", "seq_idx"),
    ],
)
def test_sources_of_documents_come_in_one_copy(device, names):
    arguments = {name: OnDevice(ARGUMENTS[name]) for name in (*names, "input_ids")}
    found = find_documents(arguments)
    assert device.take() == ONE_COPY
    right = torch.tensor(RIGHT) if "attention_mask" in names or "doc_ids" in names else found.doc_ids
    assert boundaries(found.doc_ids) == boundaries(right)
    on_host = find_documents({name: ARGUMENTS[name] for name in (*names, "input_ids")})
    assert torch.equal(found.doc_ids, on_host.doc_ids) and found.source == on_host.source


def test_indexed_and_float_masks_and_told_documents_come_in_one_copy(device):
    indexed = {"attention_mask": OnDevice(torch.tensor(RIGHT)), "input_ids": OnDevice(ARGUMENTS["input_ids"])}
    assert find_documents(indexed).doc_ids.tolist() == RIGHT
    assert device.take() == ONE_COPY
    mask = OnDevice(ARGUMENTS["attention_mask"].double())
    told = OnDevice(torch.tensor([[7, 7, 7, 8, 8, 9, 9, 9], [1] * 4 + [2] * 4], dtype=torch.uint8))
    found = find_documents({"attention_mask": mask, "input_ids": indexed["input_ids"]}, told)
    assert device.take() == ONE_COPY
    assert boundaries(found.doc_ids) == boundaries(torch.tensor(RIGHT))
    with pytest.raises(TypeError, match="attention_mask numbers documents"):
        find_documents({"attention_mask": OnDevice(torch.tensor(RIGHT).float())})
    dense = OnDevice(torch.ones(2, 1, 8, 8, dtype=torch.bool))
    assert find_documents({"attention_mask": dense}) is None
    device.take()
    find_documents({"attention_mask": dense, "doc_ids": OnDevice(torch.tensor(RIGHT))})
    assert device.take() == ONE_COPY, "a mask of S x S is not read"


def test_an_attached_forward_waits_once(device):
    class Attention(torch.nn.Module):
        def forward(self, x):
            return x

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = Attention()
            self.seen = []

        def forward(self, input_ids, position_ids=None, attention_mask=None):
            self.seen.append(attention_mask)
            return self.self_attn(torch.zeros(1))

    model = Model()
    handle = packed_sdpa.attach(model, route="hooks")
    arguments = {name: OnDevice(ARGUMENTS[name]) for name in ("input_ids", "position_ids")}
    for mask in (OnDevice(ARGUMENTS["attention_mask"]), OnDevice(torch.tensor(RIGHT))):
        device.take()
        with pytest.warns(UserWarning, match="self_attn") if not model.seen else contextlib.nullcontext():
            model(**arguments, attention_mask=mask)
        assert device.take() == ONE_COPY
    assert isinstance(model.seen[0], OnDevice), "the model still gets its own tensor"
    assert model.seen[1] is None, "an indexed mask is not passed on"
    handle.detach()


# --- layers and recompute -------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("name", ["tile_plus_one", "short_then_long_batch", "interleaved", "one_row_all_padding"])
def test_layers_and_recompute_wait_for_nothing(device, name, backend, dtype):
    ids = packing(name)
    layout = PackedLayout.from_doc_ids(OnDevice(ids))
    device.take()
    layers = 3

    def step(query, key, value):
        for _ in range(layers):
            query = checkpoint(
                functools.partial(attention, layout=layout, backend=backend), query, key, value, use_reentrant=False
            )
        return query

    inputs = random_inputs(ids, dtype)
    with_gradients(step, inputs, torch.randn_like(inputs[0]), dtype)
    assert device.take() == []
    if backend != "per_document":
        made = getattr(device.kernels, f"{backend}_forward")
        assert len(made) == 2 * layers, "each forward and its recompute"


@backends
def test_values_on_the_device(device, backend, dtype):
    for name in ("tile_plus_one", "short_then_long_batch", "interleaved", "padding_between_singles"):
        ids = packing(name)
        layout = PackedLayout.from_doc_ids(OnDevice(ids))
        check_against_oracle(
            functools.partial(attention, layout=layout, backend=backend), random_inputs(ids, dtype), ids
        )


def test_explain_and_auto_on_the_device(device):
    ids = packing("tile")
    layout = PackedLayout.from_doc_ids(OnDevice(ids))
    device.take()
    for dtype, options, chosen in (
        (torch.bfloat16, {}, "flash"),
        (torch.float32, {}, "efficient"),
        (torch.float64, {}, "per_document"),
        (torch.bfloat16, {"head_dim": 512}, "efficient"),
        (torch.bfloat16, {"head_dim": 192, "value_dim": 128}, "efficient"),
    ):
        operands = [OnDevice(t) for t in random_inputs(ids, dtype, **options)]
        assert packed_sdpa.explain(*operands, layout).chosen == chosen
    assert device.take() == []


@pytest.mark.parametrize("backend,dtype", BACKENDS[:3])
def test_graph_layout_waits_once_a_refill(device, backend, dtype, monkeypatch):
    class Operators:
        def __getattr__(self, name):
            return getattr(ops, name)

        def storage_use_count(self, tensor):
            return ops.storage_use_count(tensor.held) // 2 if isinstance(tensor, OnDevice) else 1

    monkeypatch.setattr(graph_layout, "ops", Operators())  # each tensor of the device is one of the host too
    layout = GraphLayout(2, 12, max_documents=24, max_seqlen=8, device="cpu")
    layout._buffer, layout._none = OnDevice(layout._buffer), OnDevice(layout._none)
    ids = torch.tensor([[1] * 8 + [2] * 4, [0, 0, 3, 3, 0, 4, 4, 4, 4, 4, 0, 0]])
    device.take()
    layout.refill(OnDevice(ids))
    assert device.take() == ONE_COPY
    layout.refill(ids)
    assert device.take() == []
    check_against_oracle(functools.partial(attention, layout=layout, backend=backend), random_inputs(ids, dtype), ids)
    assert device.take() == []


@pytest.mark.parametrize("make", [TransformerEngine, FlashAttnPackage], ids=["te", "flash_attn"])
@pytest.mark.parametrize("name", ["tile_plus_one", "short_then_long_batch", "interleaved", "padding_head"])
def test_packages_wait_for_nothing(device, name, make, monkeypatch):
    """Up to the package's own door: what it is handed is there, and right."""
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    backend, handed = make(), []

    def attend(call, rows):
        handed.append(rows)
        return OnDevice(rows.query.held.clone())

    monkeypatch.setattr(backend, "attend", attend)
    ids = packing(name)
    inputs = random_inputs(ids, torch.bfloat16)
    layout = PackedLayout.from_doc_ids(OnDevice(ids))
    device.take()
    call = packages.PackageCall(*map(OnDevice, inputs), layout.tensors(DEVICE), True, (-1, -1), 0.25, 0.0, False)
    assert backend.unsupported_reasons(call) == []
    out = backend.attention(call)
    assert device.take() == []
    (rows,) = handed
    real = (ids != 0)[:, None, :, None]
    assert torch.equal(out.held, inputs[0].masked_fill(~real, 0.0))
    assert rows.cu_seqlens_q.held.dtype == torch.int32
    lengths = [count for row in ids for count in row[row != 0].unique(return_counts=True)[1].tolist()]
    assert sorted(rows.cu_seqlens_q.held.diff().tolist()) == sorted(lengths)
    assert rows.max_seqlen_q == rows.max_seqlen_k == max(lengths)


# --- masks of a hooked model ---------------------------------------------------------------------------------------


class Event:
    """Of a device that has done nothing yet."""

    has_passed = False
    waited_for = 0

    def __init__(self, device):
        assert device == DEVICE

    def query(self):
        return type(self).has_passed

    def synchronize(self):
        type(self).waited_for += not self.has_passed


@pytest.fixture
def event(monkeypatch):
    class ThisEvent(Event):
        pass

    monkeypatch.setattr(mask_audit, "recorded_event", ThisEvent)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)  # which Python's bindings call, operators do not
    return ThisEvent


AUDITED = ArmedDocuments(torch.tensor([[1] * 40 + [2] * 20]))
KINDS_OF_MASK = {
    "bool": lambda seen: seen,
    "additive": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, float("-inf")),
}


def dense(kind, change=None):
    seen = torch.ones(1, 1, 60, 60, dtype=torch.bool).tril()
    if change == "prefix":
        seen[..., :40, :40] = True
    mask = KINDS_OF_MASK[kind](seen)
    if change == "bias":
        mask -= torch.arange(60) / 10
    elif change == "nan":
        mask[..., 0] = float("nan")
    return OnDevice(mask)


@pytest.mark.parametrize("kind", KINDS_OF_MASK)
def test_a_mask_that_was_seen_before_is_not_waited_for(device, event, kind):
    audit = mask_audit.DenseMaskAudit("error", set())
    audit(AUDITED, (-1, -1), dense(kind), False)
    assert device.take(), "all of it, once"
    for _ in range(100):  # more looks than are ever under way
        audit(AUDITED, (-1, -1), dense(kind), False)
    event.has_passed = True
    for _ in range(100):
        audit(AUDITED, (-1, -1), dense(kind), False)
    audit.finish()
    assert device.take() == []


@pytest.mark.parametrize(
    "kind,change,message",
    [
        (
            "bool",
            "prefix",
            r"attn_mask: the model's mask lets row \d+ see row \d+ of the same document \(batch row 0\)",
        ),
        ("additive", "prefix", r"attn_mask: the model's mask lets row"),
        ("additive", "bias", "attention_mask is additive and holds values other than 0"),
        ("additive", "nan", "attention_mask is additive and holds values other than 0"),
    ],
)
@pytest.mark.parametrize("on_mask", mask_audit.ON_MASK)
def test_a_mask_that_changes_is_told_of_late(device, event, kind, change, message, on_mask):
    warned = set()
    audit = mask_audit.DenseMaskAudit(on_mask, warned)
    audit(AUDITED, (-1, -1), dense(kind), False)
    device.take()
    audit(AUDITED, (-1, -1), dense(kind, change), False)
    audit(AUDITED, (-1, -1), dense(kind), False)
    event.has_passed = True
    message = f"in an earlier forward: {message}"
    told = {
        "error": pytest.raises(packed_sdpa.MaskNotHonouredError, match=f"^{message}"),
        "warn": pytest.warns(UserWarning, match=f"^packed_sdpa: {message}"),
        "ignore": contextlib.nullcontext(),
    }
    with told[on_mask]:
        audit(AUDITED, (-1, -1), dense(kind), False)
    assert device.take() == [] and event.waited_for == 0
    audit(AUDITED, (-1, -1), dense(kind), False)


def test_what_is_under_way_is_told_at_the_end(device, event):
    """As a warning, since nothing is left to be stopped."""
    audit = mask_audit.DenseMaskAudit("error", set())
    for change in (None, "prefix", None):
        audit(AUDITED, (-1, -1), dense("bool", change), False)
    with pytest.warns(UserWarning, match="in an earlier forward: attn_mask: the model's mask lets row"):
        audit.finish()
    assert event.waited_for == 2
    audit.finish()
    assert event.waited_for == 2
