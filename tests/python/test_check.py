"""check_isolation, and report."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import packed_sdpa
from aten_stand_ins import stand_ins
from hf_models import ARCHITECTURES, LENGTHS, packed_batch
from packed_sdpa import package_registry
from packed_sdpa.packages import PackageBackend


@pytest.fixture
def model():
    return ARCHITECTURES["llama"].make(dtype=torch.float32).train()


def test_attached_model_is_isolated(model):
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    with packed_sdpa.attach(model, strict=True):
        result = packed_sdpa.check_isolation(model, packed_batch(rows=2))
    assert result.ok and result.leak is None and result.documents == 2 * len(LENGTHS)
    assert [row.check for row in result.rows] == ["changed document", "gradient", "document alone"]
    assert result.rows[0].value == result.rows[1].value == 0.0
    assert "isolated" in str(result) and "LEAK" not in str(result)
    assert model.training and before == {name: parameter.grad for name, parameter in model.named_parameters()}


def test_equal_ids_of_any_size_in_other_rows_are_other_documents(model):
    rows = packed_batch(rows=3)["input_ids"]
    ids = torch.full_like(rows, 2**63 - 1)
    ids[:, 5:] = 5
    with packed_sdpa.attach(model):
        result = packed_sdpa.check_isolation(model, {"input_ids": rows, "doc_ids": ids})
    assert result.ok and result.documents == 6


def test_stock_model_leaks_and_says_where(model):
    result = packed_sdpa.check_isolation(model, packed_batch())  # use_cache makes Transformers forget the packing
    assert not result.ok and [row.ok for row in result.rows] == [False, False, False]
    assert result.leak.module == "model.layers.0.self_attn" and "not attached" in result.leak.reason
    assert "NOT isolated" in str(result) and "first leak" in str(result)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt2", "mixtral", "bert"])
def test_other_models(name):
    model = ARCHITECTURES[name].make(dtype=torch.float32)
    with packed_sdpa.attach(model):
        result = packed_sdpa.check_isolation(model, packed_batch(), max_documents=2)
    assert result.ok, str(result)


def test_eager_layer_is_named(model):
    attention = model.model.layers[1].self_attn

    def forward(hidden_states, **_):
        q = attention.q_proj(hidden_states)
        return (q @ q.transpose(1, 2)).softmax(-1) @ q, None

    attention.forward = forward
    with packed_sdpa.attach(model, strict=True) as handle, pytest.warns(UserWarning, match=r"layers\.1\.self_attn"):
        result = packed_sdpa.check_isolation(model, packed_batch())
        assert not result.ok and result.leak.module == "model.layers.1.self_attn"
        assert "was not taken: it made no call" in result.leak.reason
        with pytest.raises(packed_sdpa.NotTakenError):  # strict again
            model(**packed_batch())
        assert handle.enabled


def test_convolution_layer_is_named():
    import transformers

    from hf_models import _SMALL

    config = transformers.Lfm2Config(**_SMALL, layer_types=["full_attention", "conv"])
    model = transformers.Lfm2ForCausalLM(config)
    with pytest.warns(UserWarning, match="convolution"), packed_sdpa.attach(model):
        result = packed_sdpa.check_isolation(model, packed_batch())
    assert not result.ok and result.leak.module.startswith("model.layers.1.conv")
    assert "mixes tokens without attention" in result.leak.reason


class Block(nn.Module):
    def __init__(self, hooked):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.hooked = hooked

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleDict({"self_attn": Block(True)})
        self.second = nn.ModuleDict({"cross_attention": Block(False)})

    def forward(self, x):
        return self.second["cross_attention"](self.first["self_attn"](x))


def test_a_model_of_the_users_own_with_an_unhooked_name():
    model = Plain()
    batch = {"x": torch.randn(1, 6, 8), "doc_ids": torch.tensor([[1, 1, 2, 2, 2, 0]])}
    with packed_sdpa.attach(model):
        result = packed_sdpa.check_isolation(model, batch)
        assert result.leak.module == "second.cross_attention" and "name it with match=" in result.leak.reason
    with packed_sdpa.attach(model, match=["self_attn", "cross_attention"]):
        assert packed_sdpa.check_isolation(model, batch).ok


def test_armed_documents_and_documents_function(model):
    ids = torch.repeat_interleave(torch.arange(1, 6), torch.tensor(LENGTHS))[None]
    tokens = {"input_ids": packed_batch()["input_ids"]}
    packed_sdpa.arm(ids)
    try:
        with packed_sdpa.attach(model, documents=None):
            assert packed_sdpa.check_isolation(model, tokens).ok
    finally:
        packed_sdpa.disarm()
    with packed_sdpa.attach(model, documents=lambda input_ids, **_: ids):
        assert packed_sdpa.check_isolation(model, tokens).ok


class Exploding(Plain):
    """A factor that is 1 for long documents alone, and NaN or infinite for a row of several."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return super().forward(x) * (self.factor if x.shape[1] == 6 else 1.0)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_documents", [1, 8])
def test_outputs_that_are_not_finite_prove_nothing(factor, max_documents):
    model = Exploding(factor)
    batch = {"x": torch.randn(1, 6, 8), "doc_ids": torch.tensor([[1, 1, 2, 2, 2, 2]])}
    with packed_sdpa.attach(model, match=["self_attn", "cross_attention"]):
        result = packed_sdpa.check_isolation(model, batch, max_documents=max_documents)
    assert not result.ok and not result.rows[0].ok and not result.rows[2].ok
    assert "NOT FINITE" in str(result) and "not finite, so nothing can be told" in str(result)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_changed_document_that_makes_others_nan_is_a_leak(bad):
    class Contagious(Plain):
        def forward(self, x):
            out = super().forward(x)
            return out if torch.equal(x, batch["x"]) or x.shape[1] != 6 else out * bad

    batch = {"x": torch.randn(1, 6, 8), "doc_ids": torch.tensor([[1, 1, 2, 2, 2, 2]])}
    model = Contagious()
    with packed_sdpa.attach(model, match=["self_attn", "cross_attention"]):
        result = packed_sdpa.check_isolation(model, batch)
    assert [row.ok for row in result.rows] == [False, True, True] and "output at token" in result.rows[0].detail


# ---- a leak without a gradient, rounding, and models that do not repeat themselves

IDS_6 = torch.tensor([[1, 1, 2, 2, 3, 3]])
ATTENTION = ["self_attn", "cross_attention"]


def checked(model, x, **options):
    with packed_sdpa.attach(model, match=ATTENTION):
        return packed_sdpa.check_isolation(model, {"x": x, "doc_ids": IDS_6}, **options)


class Winner(Plain):
    """The largest feature of all tokens together decides a factor for each token: no gradient goes through that."""

    def __init__(self, size, how):
        super().__init__()
        self.factors = nn.Parameter(1 + size * torch.arange(8.0))
        self.how = how

    def forward(self, x):
        mean = x.mean((0, 1))
        chosen = self.factors[mean.argmax()] if self.how == "argmax" else 1 + (self.factors[1] - 1) * mean[0].detach()
        return super().forward(x) * chosen


@pytest.mark.parametrize(
    "dtype,size,how",
    [
        (torch.bfloat16, 2**-7, "argmax"),
        (torch.bfloat16, 2**-7, "detach"),
        (torch.bfloat16, 0.03, "detach"),
        (torch.float16, 2e-3, "argmax"),
        (torch.float16, 2e-3, "detach"),
        (torch.float32, 1e-6, "argmax"),
    ],
)
def test_a_leak_without_a_gradient_is_found_within_rounding(dtype, size, how):
    model, x = Winner(size, how).to(dtype), torch.randn(1, 6, 8).to(dtype)
    result = checked(model, x)
    row = result.rows[0]
    assert [r.ok for r in result.rows[:2]] == [False, True], str(result)
    # What is reported is the change that the factor makes, in float64: no more than the largest output times the
    # widest step of the factor, and no less than a hundredth of it.
    largest = float(model(x).detach().double().abs().max())
    assert largest * size / 100 < row.value < largest * size * 8 and row.allowed < row.value
    assert "changed: output at token" in row.detail and "in float64" in row.detail
    assert largest * 64 * torch.finfo(dtype).eps > row.value  # else rounding would not have been thought of


class Experts(Plain):
    """Each token goes to one of two experts, whose product is summed in another order for another count of tokens.

    widest: the widest dtype that they take.
    """

    def __init__(self, widest=torch.float64):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 8, 8))
        self.widest = widest

    def forward(self, x):
        hidden = super().forward(x)
        rows = hidden.flatten(0, 1)
        if torch.finfo(rows.dtype).eps < torch.finfo(self.widest).eps:
            raise RuntimeError(f"no kernel for {rows.dtype}")
        chosen = (rows[:, 0] > 0).long()
        out = torch.zeros_like(rows)
        for expert in range(2):
            mine = rows[chosen == expert]
            step = 1 + mine.shape[0] % 3
            total = torch.zeros_like(mine)
            for begin in range(0, 8, step):
                part = slice(begin, begin + step)
                total = total + mine[:, part] @ self.experts[expert, part]
            out[chosen == expert] = total
        return hidden + out.view_as(hidden)


def bits_that_change(model, x):
    """Of documents 2 and 3 when document 1 is changed."""
    other = x.clone()
    other[:, :2] = torch.linspace(-1, 1, 8).to(x.dtype) - other[:, :2]
    with packed_sdpa.attach(model, match=ATTENTION), torch.no_grad():
        before, after = (model(y, doc_ids=IDS_6) for y in (x, other))
    return int((before[:, 2:] != after[:, 2:]).sum())


class TakesIds:
    def forward(self, x, doc_ids=None):
        return super().forward(x)


class ExpertsWithIds(TakesIds, Experts):
    pass


@pytest.mark.parametrize(
    "dtype,widest,judged",
    [
        (torch.bfloat16, torch.float64, "float64"),
        (torch.float16, torch.float64, "float64"),
        (torch.float32, torch.float64, "float64"),
        (torch.bfloat16, torch.float32, "float32"),
    ],
)
def test_products_summed_in_another_order_are_no_leak(dtype, widest, judged):
    model, x = ExpertsWithIds(widest).to(dtype), torch.randn(1, 6, 8).to(dtype)
    assert bits_that_change(model, x) > 0
    result = checked(model, x)
    assert result.ok and result.leak is None, str(result)
    row = result.rows[0]
    assert row.detail.startswith("rounding: ") and f" in {judged}" in row.detail
    assert row.value < (1e-12 if judged == "float64" else 1e-5) and row.allowed < 1e-3


@pytest.mark.parametrize("dtype,ok", [(torch.bfloat16, False), (torch.float32, True), (torch.float64, True)])
def test_rounding_that_cannot_be_computed_wider(dtype, ok):
    model, x = ExpertsWithIds(dtype).to(dtype), torch.randn(1, 6, 8).to(dtype)
    assert bits_that_change(model, x) > 0
    row = checked(model, x).rows[0]
    assert row.ok == ok and row.value > 0.0
    if dtype == torch.float64:
        assert "wider" not in row.detail  # there is none
    else:
        assert "does not run in a wider dtype to tell (float64: RuntimeError: no kernel for torch.float64" in row.detail


def test_a_leak_beside_rounding_is_found_and_its_layer_named():
    class Both(Experts):
        def __init__(self):
            super().__init__()
            self.mixing = nn.Module()
            self.mixing.forward = lambda x: x * (1 + 2**-6 * x.mean((0, 1))[0].detach())

        def forward(self, x):
            return self.mixing(super().forward(x))

    result = checked(Both().bfloat16(), torch.randn(1, 6, 8).bfloat16())
    assert not result.rows[0].ok and result.leak.module == "mixing", str(result)


def test_a_leak_of_a_kernel_that_float64_does_not_have():
    class Broken(Block):
        def forward(self, x):
            out = super().forward(x)
            return out + x.mean((0, 1)).detach() / 64 if x.dtype == torch.bfloat16 else out

    model = Plain()
    model.second["cross_attention"] = Broken(False)
    result = checked(model.bfloat16(), torch.randn(1, 6, 8).bfloat16())
    row = result.rows[0]
    assert not row.ok and row.value > row.allowed == 0.0 and "from an attention module on" in row.detail
    assert result.leak.module == "second.cross_attention"


def test_parameters_are_as_before_a_check_in_float64():
    model = Experts().bfloat16()
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    assert "in float64" in checked(model, torch.randn(1, 6, 8).bfloat16()).rows[0].detail
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
        assert parameter.dtype == torch.bfloat16 and parameter.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_left_out_of_the_check_in_float64(dtype):
    model = Experts()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        row = checked(model, torch.randn(1, 6, 8)).rows[0]
    assert row.ok and f"in {str(dtype)[6:]}, by" in row.detail and row.value < 1e-12


class Noisy(Plain):
    def __init__(self, noise, leak):
        super().__init__()
        self.noise = noise
        self.leak = leak

    def forward(self, x):
        return super().forward(x) + self.noise * torch.randn_like(x) + self.leak * x.mean((0, 1)).detach().square()


@pytest.mark.parametrize(
    "noise,leak,ok", [(1e-3, 0.0, True), (1e-7, 0.0, True), (1e-3, 1.0, False), (1e-7, 1e-5, False)]
)
def test_a_model_that_does_not_repeat_itself(noise, leak, ok):
    result = checked(Noisy(noise, leak), torch.randn(1, 6, 8))
    row = result.rows[0]
    assert row.ok == ok, str(result)
    assert "the model does not repeat itself bit for bit (the same batch differs by" in row.detail
    assert "rounding" not in row.detail
    assert (row.allowed > row.value) == ok and row.allowed < 100 * noise + 1e-5


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_mixture_of_experts_of_transformers_in_bfloat16(implementation):
    model = ARCHITECTURES["mixtral"].make(dtype=torch.bfloat16)
    model.config._experts_implementation = implementation
    with packed_sdpa.attach(model):
        result = packed_sdpa.check_isolation(model, packed_batch())
    assert result.ok, str(result)


@pytest.mark.parametrize("seed", [1, 4])
def test_experts_chosen_by_close_scores_in_bfloat16(seed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    positions = torch.cat([torch.arange(n) for n in (40, 30, 50, 8)])[None]
    with packed_sdpa.attach(model):
        tokens = torch.randint(256, positions.shape)
        result = packed_sdpa.check_isolation(model, {"input_ids": tokens, "position_ids": positions})
    assert result.ok, str(result)  # these seeds differ by more than is usual: the stock model's rounding does too


def test_what_is_not_the_stock_models_rounding_is_told_in_bfloat16():
    model = ARCHITECTURES["llama"].make(dtype=torch.bfloat16)
    batch = packed_batch()
    with packed_sdpa.attach(model) as handle:
        size = float(model(**batch).logits.detach().abs().max())
        model.lm_head.register_forward_hook(lambda *call: call[2] + 0.3 * size if handle.enabled else None)
        result = packed_sdpa.check_isolation(model, batch)
    row = result.rows[2]
    assert not row.ok and row.allowed == pytest.approx(0.1 * 1.3 * size, rel=0.1)
    assert "rounding puts the stock model itself off by" in row.detail


class Unattached(nn.Module):
    """Stock attention, then a list of experts of which only those with tokens are called."""

    def __init__(self):
        super().__init__()
        self.mixer = Block(False)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        chosen = x.flatten(0, 1)[:, :4].argmax(-1)
        x = self.mixer(x)
        rows = x.flatten(0, 1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                out[chosen == number] = expert(rows[chosen == number])
        return x + out.view_as(x)


def test_other_experts_for_a_changed_document():
    model = Unattached()
    x = torch.zeros(1, 6, 8)
    x[..., 1] = 5.0  # for expert 1; a changed document is for expert 3
    called = []
    handles = [expert.register_forward_hook(lambda *_, n=n: called.append(n)) for n, expert in enumerate(model.experts)]
    with torch.no_grad():
        model(x)
        assert called == [1]
        called.clear()
        model(torch.cat([torch.linspace(-1, 1, 8) - x[:, :2], x[:, 2:]], 1))
    assert called == [1, 3]
    for handle in handles:
        handle.remove()
    result = packed_sdpa.check_isolation(model, {"x": x, "doc_ids": IDS_6})
    assert not result.ok and result.leak.module == "mixer"
    assert "ran stock attention: the model is not attached" in result.leak.reason


def test_bad_input(model):
    with pytest.raises(ValueError, match=r"batch tells no documents: give doc_ids, .* got input_ids"):
        packed_sdpa.check_isolation(model, {"input_ids": packed_batch()["input_ids"]})
    with pytest.raises(ValueError, match="tells 1 document; isolation needs at least two"):
        packed_sdpa.check_isolation(model, {**packed_batch((5,)), "doc_ids": torch.ones(1, 5).long()})
    with pytest.raises(ValueError, match="max_documents must be at least 1, got 0"):
        packed_sdpa.check_isolation(model, packed_batch(), max_documents=0)


# ---- report


def test_report_counts_and_prints(model):
    with pytest.raises(ValueError, match=r"this LlamaForCausalLM is not attached; call packed_sdpa.attach"):
        packed_sdpa.report(model)
    with packed_sdpa.attach(model) as handle:
        model(**packed_batch())
        model(input_ids=packed_batch()["input_ids"])
        report = packed_sdpa.report(model.model)  # a part of it will do
        text = str(report)
        assert (report.taken, report.passed, report.route, report.layouts_built) == (2, 2, "interface", 1)
        assert report.reasons == {"no documents in this forward": 2} and sum(report.backends.values()) == 2
        assert all(name in text for name in ("model.layers.0.self_attn", "model.layers.1.self_attn", *report.backends))
        report.reset()
        assert packed_sdpa.report(handle).taken == 0 and report.taken == 2


IDS = torch.repeat_interleave(torch.arange(1, len(LENGTHS) + 1), torch.tensor(LENGTHS))[None]
FLASH_ON_CPU = "flash: this torch has no aten::_flash_attention_forward for cpu"


def arm_with(ids, backend):
    from packed_sdpa.armed import ArmedDocuments
    from packed_sdpa.state import _PACKED_STATE

    _PACKED_STATE.set(ArmedDocuments(ids, backend))


@pytest.fixture
def disarmed():
    yield
    packed_sdpa.disarm()


@pytest.mark.parametrize("route", ["hooks", "interface"])
@pytest.mark.parametrize("documents", [None, "auto"])
def test_a_preference_that_was_not_honoured_is_counted_with_its_reason(model, disarmed, route, documents):
    from packed_sdpa.packed import enable_cp1_packed_varlen

    batch = packed_batch()
    enable_cp1_packed_varlen(IDS, "flash")
    with packed_sdpa.attach(model.eval(), route=route, documents=documents, strict=True):
        model(**(batch if documents == "auto" else {"input_ids": batch["input_ids"]}))
        report = packed_sdpa.report(model)
        assert report.taken == 2 and report.not_preferred == {FLASH_ON_CPU: 2}
        assert "why not the preferred backend" in str(report) and "flash: this torch has no" in str(report)
        assert all(module.not_preferred == {FLASH_ON_CPU: 1} for module in report.modules)
        report.reset()
        arm_with(IDS, "auto")
        model(**batch)
        report = packed_sdpa.report(model)
        assert report.taken == 2 and report.not_preferred == {}
        assert "why not the preferred backend" not in str(report)
        arm_with(IDS, "auto:per_document")  # this one can be honoured
        report.reset()
        model(**batch)
        report = packed_sdpa.report(model)
        assert report.backends == {"per_document": 2} and report.not_preferred == {}


@pytest.mark.parametrize("route", ["hooks", "interface"])
def test_the_backend_is_named_per_documents(model, disarmed, route):
    """Calls of one kind over documents that were armed with another backend."""
    batch = packed_batch()
    with packed_sdpa.attach(model.eval(), route=route, documents=None, strict=True):
        for backend in ("cpu", "reference"):
            arm_with(IDS, backend)
            model(input_ids=batch["input_ids"])
        assert packed_sdpa.report(model).backends == {"cpu": 2, "reference": 2}


@pytest.mark.parametrize("route", ["hooks", "interface"])
def test_autocast_calls_are_counted_for_themselves(model, disarmed, route):
    """flash takes bfloat16, so a float32 model under autocast, and no float32."""
    tokens = {"input_ids": packed_batch()["input_ids"]}
    with stand_ins(), packed_sdpa.attach(model.eval(), route=route, documents=None, strict=True), torch.no_grad():
        arm_with(IDS, "auto:flash")
        with torch.autocast("cpu", torch.bfloat16):
            model(**tokens)
        assert packed_sdpa.report(model).backends == {"flash": 2}
        model(**tokens)
        report = packed_sdpa.report(model)
        assert report.backends == {"flash": 2, "cpu": 2}
        assert report.not_preferred == {"flash: it takes float16 and bfloat16, not Float": 2}
        with torch.autocast("cpu", torch.float16):
            model(**tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            model(**tokens)
        assert packed_sdpa.report(model).backends == {"flash": 4, "cpu": 4}


@pytest.mark.parametrize("operand", ["key", "value"])
def test_dtypes_of_key_and_value_are_counted_for_themselves(monkeypatch, operand):
    """A package may judge them before autocast makes them one."""
    from packed_sdpa.armed import ArmedDocuments
    from packed_sdpa.choice import choice_of

    class Package(PackageBackend):
        name, package = "te", "torch"

        def unsupported_reasons(self, call):
            return ["no float16"] if getattr(call, operand).dtype == torch.float16 else []

        def attend(self, call, rows):
            raise AssertionError("nothing is run here")

    monkeypatch.setitem(package_registry.BACKENDS, "te", Package(("cpu",)))
    documents = ArmedDocuments(IDS, "auto:te")
    options = {"is_causal": True, "window_size": (-1, -1), "dropout_p": 0.0}
    operands = {name: torch.zeros(1, 2, IDS.shape[1], 8, dtype=torch.bfloat16) for name in ("query", "key", "value")}
    with torch.autocast("cpu", torch.bfloat16):
        assert choice_of(documents, **operands, **options).backend == "te"
        operands[operand] = operands[operand].half()
        assert choice_of(documents, **operands, **options) == ("cpu", "te: no float16")


def test_chunks_keep_the_backend():
    from packed_sdpa.documents import from_doc_ids

    assert from_doc_ids(torch.ones(1, 5).long(), backend="reference").in_chunks(2).backend == "reference"


def test_copies_do_not_count(model):
    with packed_sdpa.attach(model):
        copy.deepcopy(model)(**packed_batch())
        assert packed_sdpa.report(model).taken == 0


def test_import_without_transformers():
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch, packed_sdpa\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.self_attn = torch.nn.MultiheadAttention(8, 2, batch_first=True)\n"
        "    def forward(self, x): return self.self_attn(x, x, x, need_weights=False)[0]\n"
        "packed_sdpa.attach(M()).detach()\n"
        "try: packed_sdpa.register_hf_attention()\n"
        "except ImportError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "needs transformers" in out and "route='hooks'" in out
