"""Every architecture: logits and gradients of the packed row equal each document alone in the stock model."""

import copy
import pathlib
import warnings

import pytest
import torch

pytest.importorskip("transformers")

import models_table
import packed_sdpa
from hf_models import ARCHITECTURES, FIRST_EIGHT, LENGTHS, difference, each_alone, gradients, packed_batch, worst

TOLERANCE = 2e-6  # of the largest value: some models normalize in float32 whatever their type


def checkpoint_layers(model, reentrant):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name that Transformers before 5.24 has too
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def check_equal_alone(model, batch, **options):
    stock = copy.deepcopy(model)
    expected = each_alone(stock, batch)
    expected_gradients = gradients(stock, expected)
    with packed_sdpa.attach(model, strict=True, **options) as handle:
        logits = model(**batch).logits
        got_gradients = gradients(model, logits)
        report = packed_sdpa.report(handle)
    assert difference(logits, expected) < TOLERANCE
    assert worst(got_gradients, expected_gradients) < TOLERANCE
    return report


def named(wanted, fast=FIRST_EIGHT):
    """Names as parameters; those that are not in ``fast`` belong to the slow tier."""
    names = [name for name, architecture in ARCHITECTURES.items() if wanted(architecture)]
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


INTERFACE = named(
    lambda architecture: architecture.interface, fast=(*FIRST_EIGHT, "cohere2", "gpt_bigcode", "bert", "llama4")
)
INTERFACE_CHECKPOINTED = named(lambda architecture: architecture.interface)
HOOKED = named(lambda architecture: architecture.hooks)


@pytest.mark.parametrize("name", INTERFACE)
def test_interface_equals_each_document_alone(name):
    model = ARCHITECTURES[name].make().train()
    report = check_equal_alone(model, packed_batch(rows=2), route="interface")
    assert report.passed == 0 and report.taken == len(report.modules) and report.layouts_built == 1


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", INTERFACE_CHECKPOINTED)
def test_interface_with_gradient_checkpointing(name, reentrant):
    model = ARCHITECTURES[name].make().train()
    checkpoint_layers(model, reentrant)
    report = check_equal_alone(model, packed_batch(), route="interface")
    assert report.taken == 2 * len(report.modules)  # forward and recompute


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_equal_each_document_alone(name):
    model = ARCHITECTURES[name].make().train()
    report = check_equal_alone(model, packed_batch(rows=2), route="hooks")
    assert report.passed == 0 and report.taken == len(report.modules) and report.layouts_built == 1


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_with_gradient_checkpointing(name, reentrant):
    model = ARCHITECTURES[name].make().train()
    checkpoint_layers(model, reentrant)
    report = check_equal_alone(model, packed_batch(), route="hooks")
    assert report.taken == 2 * len(report.modules)


@pytest.mark.parametrize("name", [name for name, architecture in ARCHITECTURES.items() if architecture.match])
def test_hooks_by_match(name):
    """Case 39."""
    match = ARCHITECTURES[name].match
    model = ARCHITECTURES[name].make().train()
    with pytest.raises(ValueError, match=r"attention-like modules it has: .*(attn|attention) \("):
        packed_sdpa.attach(model, route="hooks")
    check_equal_alone(model, packed_batch(), route="hooks", match=match)


@pytest.mark.parametrize("name", FIRST_EIGHT)
def test_float32(name):
    model = ARCHITECTURES[name].make(dtype=torch.float32).eval()
    batch = packed_batch()
    expected = each_alone(model, batch)
    with packed_sdpa.attach(model):
        logits = model(**batch).logits
    assert difference(logits, expected) < 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("training", [True, False])
def test_case_47c_default_use_cache_is_isolated(name, training):
    """Case 47c: stock Transformers forgets packing when use_cache made a cache."""
    model = ARCHITECTURES[name].make().train(training)
    batch = packed_batch()
    expected = each_alone(model, batch)
    assert difference(model(**batch, use_cache=True).logits, expected) > 1e-3  # the leak of stock
    with packed_sdpa.attach(model, strict=True):
        assert difference(model(**batch).logits, expected) < TOLERANCE
        assert difference(model(**batch, use_cache=True).logits, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen2"])
def test_windows_are_in_the_report(name):
    model = ARCHITECTURES[name].make()
    with packed_sdpa.attach(model) as handle:
        model(**packed_batch())
        windows = [module.windows for module in packed_sdpa.report(handle).modules]
    expected = {
        "llama": [{(-1, -1): 1}, {(-1, -1): 1}],
        "mistral": [{(3, 0): 1}, {(3, 0): 1}],
        "gemma3": [{(3, 0): 1}, {(-1, -1): 1}],
        "qwen2": [{(-1, -1): 1}, {(3, 0): 1}],
    }
    assert windows == expected[name]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
def test_unpacked_forward_is_stock(name):
    model = ARCHITECTURES[name].make().eval()
    ids = packed_batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    stock = [model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits]
    generated = model.generate(ids[:, :6], max_new_tokens=5, do_sample=False)
    static = model.generate(ids[:, :6], max_new_tokens=5, do_sample=False, cache_implementation="static")
    with packed_sdpa.attach(model, strict=True) as handle:
        assert torch.equal(model(input_ids=ids).logits, stock[0])
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, stock[1])
        assert torch.equal(model.generate(ids[:, :6], max_new_tokens=5, do_sample=False), generated)
        again = model.generate(ids[:, :6], max_new_tokens=5, do_sample=False, cache_implementation="static")
        assert torch.equal(again, static)
        report = packed_sdpa.report(handle)
    assert report.taken == 0 and set(report.reasons) == {"no documents in this forward"}


def test_lengths_cross_the_windows():
    assert max(LENGTHS) > 2 * 4 and min(LENGTHS) == 1


def test_support_table_is_current():
    """docs/models.md says what is tested here; python tests/python/models_table.py > docs/models.md"""
    written = pathlib.Path(__file__).parents[2] / "docs" / "models.md"
    assert written.read_text() == models_table.table()
