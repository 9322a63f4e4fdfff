"""attach on the interface route: where documents enter, what goes on to the model, and how it ends."""

import copy
import io
import pickle
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

import packed_sdpa
from hf_models import ARCHITECTURES, LENGTHS, difference, each_alone, gradients, packed_batch, worst
from packed_sdpa.packed import attach_cp1_packed_varlen_hooks

EXACT = 1e-12


@pytest.fixture
def llama():
    return ARCHITECTURES["llama"].make().train()


@pytest.fixture
def batch():
    return packed_batch()


def doc_ids(lengths=LENGTHS):
    return torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))[None]


def taken(model):
    return packed_sdpa.report(model).taken


# ---- documents of a forward


def test_every_source_reaches_the_layers(llama, batch):
    expected = each_alone(llama, batch)
    ids = doc_ids()
    sources = [
        {"doc_ids": ids},
        {"_packed_seq_ids": ids},
        {"seq_idx": ids - 1},
        {"cu_seq_lens_q": torch.tensor([0, *LENGTHS]).cumsum(0), "max_length_q": 9, "max_length_k": 9},
        {"attention_mask": ids},
        {},
    ]
    with packed_sdpa.attach(llama, strict=True):
        for source in sources:
            assert difference(llama(**batch, **source).logits, expected) < EXACT
        assert difference(llama(batch["input_ids"], ids, batch["position_ids"]).logits, expected) < EXACT  # by place
        assert taken(llama) == 7 * 2


def test_padding_of_a_2d_mask(llama, batch):
    expected = each_alone(llama, batch)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :5] = 0  # the first document is padding
    with packed_sdpa.attach(llama, strict=True):
        logits = llama(**batch, attention_mask=mask).logits
    assert difference(logits[:, 5:], expected[:, 5:]) < EXACT


def test_one_layout_per_forward(batch):
    """Case 46 (the layout part): two mask kinds and all layers share it."""
    model = ARCHITECTURES["gemma3"].make(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    with packed_sdpa.attach(model) as handle:
        model(**batch).logits.sum().backward()
        report = packed_sdpa.report(handle)
    assert report.taken == 8 and report.layouts_built == 1


def test_disagreement_raises_before_the_model_runs(llama, batch):
    with packed_sdpa.attach(llama) as handle:
        with pytest.raises(ValueError, match="doc_ids and position_ids disagree"):
            llama(**batch, doc_ids=torch.ones_like(batch["input_ids"]).cumsum(1))
        with pytest.raises(ValueError, match=r"doc_ids has shape \[3\] but the forward has tokens"):
            llama(**batch, doc_ids=torch.ones(3).long())
        report = packed_sdpa.report(handle)
        assert report.taken == report.passed == 0


def test_documents_function(llama, batch):
    expected = each_alone(llama, batch)
    calls = []

    def documents(input_ids=None, position_ids=None, **_):
        calls.append(input_ids)
        return doc_ids() if position_ids is not None else None

    with packed_sdpa.attach(llama, documents=documents, strict=True):
        assert difference(llama(**batch).logits, expected) < EXACT
        llama(input_ids=batch["input_ids"])
        assert len(calls) == 2 and taken(llama) == 2
        calls.clear()
    with packed_sdpa.attach(llama, documents=lambda **_: None):
        llama(**batch)  # unpacked, whatever its arguments tell
        assert taken(llama) == 0


class ValueHead(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.head = nn.Linear(32, 1).double()

    def forward(self, batch):
        hidden = self.model.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).last_hidden_state
        return self.head(hidden)


@pytest.mark.parametrize("attach_to", ["head", "model", "inner"])
def test_case_47d_inner_model_called_by_a_value_head(llama, batch, attach_to):
    """Case 47d: the documents are found by the outermost forward that is given them."""
    head = ValueHead(llama)
    expected = head.head(
        torch.cat([llama.model(part).last_hidden_state for part in batch["input_ids"].split(LENGTHS, 1)], 1)
    )
    root = {"head": head, "model": llama, "inner": llama.model}[attach_to]
    with packed_sdpa.attach(root, strict=True) as handle:
        assert difference(head(batch), expected) < EXACT
        assert packed_sdpa.report(handle).layouts_built == 1


def test_forward_called_directly(llama, batch):
    expected = each_alone(llama, batch)
    with packed_sdpa.attach(llama, strict=True):
        assert difference(llama.forward(**batch).logits, expected) < EXACT
        assert difference(llama.model.forward(**batch).last_hidden_state, llama.model(**batch).last_hidden_state) == 0


class NamesItsDocuments(nn.Module):
    """A model of the user's own that declares doc_ids and takes nothing else."""

    def __init__(self, model):
        super().__init__()
        self.inner = model
        self.got = None

    def forward(self, input_ids, position_ids=None, doc_ids=None):
        self.got = doc_ids
        return self.inner(input_ids=input_ids, position_ids=position_ids)


def test_keywords_that_the_model_does_not_accept_are_taken_out(llama, batch):
    expected = each_alone(llama, batch)
    model = NamesItsDocuments(llama)
    with packed_sdpa.attach(model, strict=True):
        out = model(**batch, doc_ids=doc_ids(), seq_idx=doc_ids() - 1, max_length_q=9)
        assert difference(out.logits, expected) < EXACT and model.got is not None
        with pytest.raises(TypeError, match="is_casual"):
            model(**batch, is_casual=True)


def test_indexed_mask_is_not_passed_on(llama, batch):
    seen = []
    llama.model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    with packed_sdpa.attach(llama):
        llama(**batch, attention_mask=doc_ids())
        llama(**batch, attention_mask=torch.ones_like(doc_ids()))
    assert seen[0] is None and seen[1] is not None


# ---- masks of the caller


def test_case_42_no_mask_ones_and_dense_block_mask_are_equal(llama, batch):
    """Case 42."""
    dense = packed_sdpa.PackedLayout.from_doc_ids(doc_ids()).materialize_mask()[:, None]
    additive = torch.zeros(dense.shape, dtype=torch.float64).masked_fill(~dense, torch.finfo(torch.float64).min)
    with packed_sdpa.attach(llama, strict=True):
        logits = [
            llama(**batch, attention_mask=mask).logits for mask in (None, torch.ones_like(doc_ids()), dense, additive)
        ]
    assert all(torch.equal(logits[0], other) for other in logits[1:])


def test_dense_mask_that_means_something_else_is_refused(llama, batch):
    """Case 41: a block of document 1 that sees both ways, and an additive bias."""
    dense = packed_sdpa.PackedLayout.from_doc_ids(doc_ids()).materialize_mask()[:, None]
    both_ways = dense.clone()
    both_ways[..., 0, 2] = True
    bias = torch.zeros(dense.shape, dtype=torch.float64).masked_fill(~dense, -torch.inf)
    bias[..., 3, 1] = 0.5
    with packed_sdpa.attach(llama) as handle:
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match="lets row 0 see row 2 of the same document"):
            llama(**batch, attention_mask=both_ways)
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match="a bias such as ALiBi"):
            llama(**batch, attention_mask=bias)
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match="attention_mask is a dict"):
            llama(**batch, attention_mask={"full_attention": dense})
        assert taken(llama) == 0
        handle.detach()
    with packed_sdpa.attach(llama, on_mask="warn"):
        with pytest.warns(UserWarning, match="the packed rule runs instead"):
            warned = llama(**batch, attention_mask=both_ways).logits
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llama(**batch, attention_mask=both_ways)  # once per cause
    with packed_sdpa.attach(llama, on_mask="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(llama(**batch, attention_mask=both_ways).logits, warned)


# ---- caches and generation


def test_packed_prefill_into_an_empty_cache_then_decode(batch):
    """The cache holds what each document alone put there; decoding goes on as stock does."""
    for name in ("llama", "mistral"):
        model = ARCHITECTURES[name].make().eval()
        expected = each_alone(model, batch)
        with packed_sdpa.attach(model, strict=True) as handle:
            out = model(**batch, use_cache=True)
            assert difference(out.logits, expected) < EXACT
            ids = batch["input_ids"][:, :1]
            model(input_ids=ids, position_ids=torch.tensor([[LENGTHS[-1]]]), past_key_values=out.past_key_values)
            reasons = packed_sdpa.report(handle).reasons
        assert reasons == {"no documents in this forward": 2}


def test_packed_prefill_into_a_static_cache(llama, batch):
    from transformers import StaticCache

    llama.eval()
    expected = each_alone(llama, batch)
    with packed_sdpa.attach(llama, strict=True):
        cache = StaticCache(config=llama.config, max_cache_len=40)
        logits = llama(**batch, past_key_values=cache).logits
    assert difference(logits, expected) < EXACT


def test_documents_beside_cached_tokens_are_not_silent(llama, batch):
    """Case 47: keys are longer than the documents."""
    llama.eval()
    with packed_sdpa.attach(llama) as handle:
        cache = llama(input_ids=batch["input_ids"][:, :4], use_cache=True).past_key_values
        with pytest.warns(UserWarning, match=r"model\.layers\.0\.self_attn .*29 key rows for 25 query rows"):
            llama(**batch, past_key_values=cache)
        assert "tokens of an earlier forward are cached" in str(packed_sdpa.report(handle).reasons)
    with packed_sdpa.attach(llama, strict=True):
        cache = llama(input_ids=batch["input_ids"][:, :4], use_cache=True).past_key_values
        with pytest.raises(packed_sdpa.NotTakenError, match="29 key rows"):
            llama(**batch, past_key_values=cache)


# ---- arm and disarm


def test_arm_by_hand(llama, batch):
    expected = each_alone(llama, batch)
    buffer = doc_ids()
    with packed_sdpa.attach(llama, documents=None, strict=True) as handle:
        packed_sdpa.arm(buffer)
        try:
            buffer.fill_(1)
            assert difference(llama(**batch).logits, expected) < EXACT
        finally:
            packed_sdpa.disarm()
        llama(input_ids=batch["input_ids"])
        assert packed_sdpa.report(handle).taken == 2


def test_armed_ids_of_another_shape_pass_through_with_a_warning(llama, batch):
    """Case 47: [S] ids while the batch has 2 rows, and ids of 2 rows for a batch of one."""
    two = {name: value.expand(2, -1) for name, value in batch.items()}
    try:
        for ids, arguments in ((doc_ids()[0], two), (doc_ids().expand(2, -1), batch)):
            packed_sdpa.arm(ids)
            stock = llama(input_ids=arguments["input_ids"]).logits
            with packed_sdpa.attach(llama, documents=None):
                with pytest.warns(UserWarning, match=r"is not the documents' B"):
                    assert torch.equal(llama(input_ids=arguments["input_ids"]).logits, stock)
                assert taken(llama) == 0
            with packed_sdpa.attach(llama, documents=None, strict=True):
                with pytest.raises(packed_sdpa.NotTakenError, match="strict=True"):
                    llama(input_ids=arguments["input_ids"])
    finally:
        packed_sdpa.disarm()


def test_armed_and_found_documents_must_agree(llama, batch):
    packed_sdpa.arm(torch.ones(sum(LENGTHS)).long())
    try:
        with (
            packed_sdpa.attach(llama),
            pytest.raises(ValueError, match=r"position_ids and the armed doc_ids"),
        ):
            llama(**batch)
    finally:
        packed_sdpa.disarm()


# Of five tokens. Positions say where documents begin; what is armed says which they are, and what is padding.
ARMED_AND_POSITIONS = [([1, 1, 2, 1, 1], [0, 1, 0, 2, 3]), ([1, 1, 0, 1, 2], [0, 1, 2, 3, 0])]


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("armed,positions", ARMED_AND_POSITIONS)
def test_armed_documents_beside_positions(llama, armed, positions, checkpointing):
    """Also in a recompute of the whole forward, when they are armed no more."""
    tokens = packed_batch(lengths=(5,))["input_ids"]
    position_ids = torch.tensor([positions])

    def forward(weight):
        return llama(input_ids=tokens, position_ids=position_ids, use_cache=False).logits * weight

    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    expected = torch.zeros(1, 5, llama.config.vocab_size, dtype=torch.float64)
    real = [i for i, document in enumerate(armed) if document]
    for document in set(armed) - {0}:
        rows = [i for i in real if armed[i] == document]
        one = torch.ones(1, len(rows), dtype=torch.long)  # else Transformers cuts it where positions jump
        alone = llama(input_ids=tokens[:, rows], position_ids=position_ids[:, rows], attention_mask=one)
        expected[:, rows] = alone.logits.detach()
    with packed_sdpa.attach(llama, strict=True):
        packed_sdpa.arm(torch.tensor([armed]))
        logits = forward(weight) if checkpointing is None else checkpoint(forward, weight, use_reentrant=checkpointing)
        right = gradients(llama, forward(weight)[:, real])
        packed_sdpa.disarm()
        assert difference(logits[:, real], expected[:, real]) < 1e-6
        assert worst(gradients(llama, logits[:, real]), right) < EXACT


def test_armed_documents_that_the_model_s_own_mask_of_positions_cuts(llama):
    """On the hooks route Transformers has cut the document by then, in a mask of its own."""
    armed, positions = ARMED_AND_POSITIONS[0]
    with packed_sdpa.attach(llama, route="hooks"):
        packed_sdpa.arm(torch.tensor([armed]))
        try:
            with pytest.raises(
                packed_sdpa.MaskNotHonouredError, match="does not let row 3 see row 0 of the same docum"
            ):
                tokens = packed_batch(lengths=(5,))["input_ids"]
                llama(input_ids=tokens, position_ids=torch.tensor([positions]), use_cache=False)
        finally:
            packed_sdpa.disarm()


@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_armed_documents_beside_a_padding_mask(llama, batch, route):
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 0] = 0
    ids = doc_ids()
    try:
        for on_mask in ("error", "warn", "ignore"):
            with packed_sdpa.attach(llama, documents=None, route=route, on_mask=on_mask):
                packed_sdpa.arm(ids)
                right = llama(input_ids=batch["input_ids"]).logits
                if on_mask == "error":
                    with pytest.raises(
                        packed_sdpa.MaskNotHonouredError, match="calls token 0 of row 0 padding, but the"
                    ):
                        llama(input_ids=batch["input_ids"], attention_mask=mask)
                    packed_sdpa.arm(ids.masked_fill(mask == 0, 0))
                    llama(input_ids=batch["input_ids"], attention_mask=mask)
                elif on_mask == "warn":
                    with pytest.warns(UserWarning, match="calls token 0 of row 0 padding"):
                        llama(input_ids=batch["input_ids"], attention_mask=mask)
                else:
                    found = llama(input_ids=batch["input_ids"], attention_mask=mask).logits
                    assert route == "hooks" or torch.equal(found, right)
        llama.set_attn_implementation("packed_sdpa")
        packed_sdpa.arm(ids)
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match="calls token 0 of row 0 padding, but the armed"):
            llama(input_ids=batch["input_ids"], attention_mask=mask)
    finally:
        packed_sdpa.disarm()


@pytest.mark.parametrize("documents", [None, lambda *_, **__: None])
def test_an_indexed_mask_that_tells_nothing_goes_on_as_it_is(llama, batch, documents):
    mask = doc_ids().clone()
    mask[0, :3] = 0
    stock = llama(input_ids=batch["input_ids"], attention_mask=mask).logits
    assert not torch.equal(stock, llama(input_ids=batch["input_ids"]).logits)
    with packed_sdpa.attach(llama, documents=documents):
        assert torch.equal(llama(input_ids=batch["input_ids"], attention_mask=mask).logits, stock)


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (torch.tensor([1.0]), TypeError),
        (torch.tensor([-1]), ValueError),
        ([1, 2], TypeError),
        (torch.ones(1, 1, 2).long(), ValueError),
    ],
)
def test_arm_refuses_and_arms_nothing(ids, error):
    from packed_sdpa.state import _PACKED_STATE

    with pytest.raises(error, match="doc_ids"):
        packed_sdpa.arm(ids)
    assert _PACKED_STATE.get() is None


# ---- how it ends


def state_of(model):
    return {name: (type(m), set(m.__dict__)) for name, m in model.named_modules()}


def test_detach_leaves_the_model_as_found(llama, batch):
    before, implementation = state_of(llama), llama.config._attn_implementation
    handle = packed_sdpa.attach(llama)
    llama(**batch)
    handle.detach()
    handle.detach()
    assert state_of(llama) == before and llama.config._attn_implementation == implementation == "sdpa"
    assert type(llama.config._attn_implementation) is str
    with pytest.raises(ValueError, match="not attached"):
        packed_sdpa.report(llama)
    with pytest.raises(RuntimeError, match="detached"):
        handle.enabled = True


def test_enabled_is_an_ab_switch(llama, batch):
    stock = llama(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    with packed_sdpa.attach(llama) as handle:
        handle.enabled = False
        assert torch.equal(llama(**batch).logits, stock) and taken(llama) == 0
        handle.enabled = True
        llama(**batch)
        assert taken(llama) == 2
        with pytest.raises(TypeError, match="enabled must be True or False, got 'no'"):
            handle.enabled = "no"


@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_a_disabled_handle_hides_armed_documents(llama, batch, route):
    stock = llama(input_ids=batch["input_ids"]).logits
    packed_sdpa.arm(doc_ids())
    try:
        with packed_sdpa.attach(llama, route=route, documents=None) as handle:
            packed = llama(input_ids=batch["input_ids"], use_cache=False).logits
            assert difference(packed, stock) > 1e-3
            handle.enabled = False
            counted = packed_sdpa.report(handle).passed
            assert torch.equal(llama(input_ids=batch["input_ids"]).logits, stock)
            if route == "interface":
                assert packed_sdpa.report(handle).passed == counted
            handle.enabled = True
            assert torch.equal(llama(input_ids=batch["input_ids"], use_cache=False).logits, packed)
    finally:
        packed_sdpa.disarm()


def test_attach_twice(llama, batch):
    first = packed_sdpa.attach(llama)
    second = packed_sdpa.attach(llama)
    llama(**batch)
    assert taken(llama) == 2  # not four
    first.detach()
    llama(**batch)
    assert taken(llama) == 4
    second.detach()
    assert type(llama.config._attn_implementation) is str
    with packed_sdpa.attach(llama):
        with pytest.raises(ValueError, match="strict=True: the model is attached already with strict=False; detach"):
            packed_sdpa.attach(llama, strict=True)
        for other in ({"match": "self_attn"}, {"route": "hooks"}, {"documents": None}, {"on_mask": "warn"}):
            ((name, value),) = other.items()
            with pytest.raises(
                ValueError, match=f"{name}={value!r}: the model is attached already with {name}=.*; detach"
            ):
                packed_sdpa.attach(llama, **other)
        packed_sdpa.attach(llama, route="interface").detach()  # what auto came to
        with pytest.raises(ValueError, match="a part of this"):
            packed_sdpa.attach(ValueHead(llama))
        with pytest.raises(ValueError, match="a part of this"):
            packed_sdpa.attach(llama.model)


def test_attach_twice_with_a_route_and_a_match(llama):
    with packed_sdpa.attach(llama, route="hooks", match="self_attn"):
        packed_sdpa.attach(llama, route="hooks", match=["self_attn"]).detach()  # the same
        with pytest.raises(ValueError, match="route='auto': the model is attached already with route='hooks'; detach"):
            packed_sdpa.attach(llama, match="self_attn")
        for match in (None, "attn"):
            with pytest.raises(ValueError, match=f"match={match!r}: the model is attached already with match='self_at"):
                packed_sdpa.attach(llama, route="hooks", match=match)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_interrupted_forward_leaves_nothing_behind(llama, batch, error):
    from packed_sdpa.scope import current_scope

    def raising(*_):
        raise error("stop")

    with packed_sdpa.attach(llama, strict=True):
        hook = llama.model.layers[1].mlp.register_forward_hook(raising)
        with pytest.raises(error):
            llama(**batch)
        hook.remove()
        assert current_scope() is None
        assert torch.equal(llama(input_ids=batch["input_ids"]).logits, copy.deepcopy(llama)(batch["input_ids"]).logits)


def test_case_43_copies_and_pickles_are_plain(llama, batch):
    """Case 43."""
    stock = llama(**batch, use_cache=True).logits  # leaks, as stock does
    keys = list(llama.state_dict())
    plain = type(llama), type(llama.model), type(llama.model.layers[0].self_attn)
    with packed_sdpa.attach(llama):
        saved = io.BytesIO()
        torch.save(llama, saved)
        saved.seek(0)
        copies = [copy.deepcopy(llama), pickle.loads(pickle.dumps(llama)), torch.load(saved, weights_only=False)]
        assert b"packed_sdpa" not in pickle.dumps(llama)
        assert list(llama.state_dict()) == keys
        for other in copies:
            assert (type(other), type(other.model), type(other.model.layers[0].self_attn)) == plain
            assert other.config._attn_implementation == "sdpa"
            assert torch.equal(other(**batch, use_cache=True).logits, stock)
        assert taken(llama) == 0
        llama(**batch)
        assert taken(llama) == 2


def test_save_pretrained_says_nothing_of_us(llama, tmp_path):
    with packed_sdpa.attach(llama):
        llama.save_pretrained(tmp_path)
    assert "packed_sdpa" not in (tmp_path / "config.json").read_text()


def test_two_models_in_two_threads(batch):
    """Each its own documents; a third model, not attached, stays stock."""
    models = [ARCHITECTURES["llama"].make(seed=seed) for seed in range(3)]
    other = packed_batch(tuple(reversed(LENGTHS)))
    batches = [batch, other, batch]
    expected = [each_alone(models[0], batch), each_alone(models[1], other, tuple(reversed(LENGTHS)))]
    expected.append(models[2](**batch, use_cache=True).logits)
    wrong: list[int] = []

    def run(index):
        for _ in range(10):
            if difference(models[index](**batches[index], use_cache=True).logits, expected[index]) > EXACT:
                wrong.append(index)

    with packed_sdpa.attach(models[0], strict=True), packed_sdpa.attach(models[1], strict=True):
        threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_recompute_reads_its_own_forward(llama, batch, reentrant, order):
    """Case 28 and 32 on the interface route: the documents are an argument that the checkpoint replays."""
    lengths = [LENGTHS, (9, 9, 7)]
    batches = [packed_batch(split, seed=seed) for seed, split in enumerate(lengths)]
    expected = [gradients(llama, each_alone(llama, b, split)) for b, split in zip(batches, lengths, strict=True)]
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with packed_sdpa.attach(llama, strict=True):
        logits = [llama(**b).logits for b in batches]
        with torch.no_grad():
            llama(input_ids=batch["input_ids"])
        got = {}
        for index in order:
            thread = threading.Thread(target=lambda i=index: got.update({i: gradients(llama, logits[i])}))
            thread.start()
            thread.join()
    for index in (0, 1):
        assert worst(got[index], expected[index]) < EXACT * 100


@pytest.mark.parametrize("route", ["interface", "hooks"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("after", ["other documents", "nothing", "disabled"])
def test_a_whole_forward_that_is_recomputed_after_another_arming(llama, batch, route, reentrant, after):
    """Armed documents are no argument of the forward: it finds those under which it ran, or raises."""
    embeddings = llama.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()

    def forward(x, lengths=LENGTHS):
        positions = packed_batch(lengths)["position_ids"]
        return llama(inputs_embeds=x, position_ids=positions, use_cache=False).logits

    parts = [forward(part, (part.shape[1],)) for part in embeddings.split(list(LENGTHS), 1)]
    expected = gradients(llama, torch.cat(parts, 1))
    with packed_sdpa.attach(llama, route=route, documents=None) as handle:
        packed_sdpa.arm(doc_ids())
        logits = checkpoint(forward, embeddings, use_reentrant=reentrant)
        packed_sdpa.disarm()
        if after == "other documents":
            packed_sdpa.arm(doc_ids((9, 16)))
            forward(embeddings, (9, 16))
        handle.enabled = after != "disabled"
        try:
            if after == "disabled":
                with pytest.raises(RuntimeError, match=r"found other documents .* its handle switched on or off"):
                    gradients(llama, logits)
            else:
                assert worst(gradients(llama, logits), expected) < EXACT * 100
        finally:
            packed_sdpa.disarm()


@pytest.mark.parametrize("reentrant", [True, False])
def test_detached_before_a_recompute_is_refused(llama, batch, reentrant):
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with packed_sdpa.attach(llama):
        loss = llama(**batch).logits.sum()
    with pytest.raises(RuntimeError, match=r"the model was detached before; detach after backward"):
        loss.backward()


def test_a_model_with_the_config_of_an_attached_one(llama, batch):
    """It has our name in its config, but is not attached: what is armed is not meant for it, unless it is hooked."""
    other = type(llama)(llama.config).double()
    tokens = {"input_ids": batch["input_ids"]}
    stock = other(**tokens).logits
    alone = each_alone(other, batch)
    with packed_sdpa.attach(llama, documents=None):
        assert torch.equal(other(**tokens).logits, stock)
        packed_sdpa.arm(doc_ids())
        try:
            assert torch.equal(other(**tokens).logits, stock)
            assert torch.equal(copy.deepcopy(other)(**tokens).logits, stock)
            attach_cp1_packed_varlen_hooks(other)
            assert difference(other(**tokens).logits, alone) < 1e-6  # positions go on, in float32
        finally:
            packed_sdpa.disarm()


# ---- bad input


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer_attn = nn.Linear(4, 4)

    def forward(self, x):
        return self.mixer_attn(x)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"route": "fast"}, ValueError, "route must be one of auto, interface, hooks, got 'fast'"),
        ({"on_mask": "raise"}, ValueError, "on_mask must be one of error, warn, ignore, got 'raise'"),
        ({"strict": 1}, TypeError, "strict must be True or False, got 1"),
        ({"documents": "position_ids"}, ValueError, "documents must be 'auto', None or a function"),
        ({"documents": torch.ones(1, 4)}, ValueError, r"got a tensor of shape \[1, 4\]; give ids of one batch with"),
        ({"match": 3}, TypeError, "match must be a name suffix, a glob"),
        ({"match": []}, TypeError, "match must be"),
        ({"match": "attn"}, ValueError, r"match selects none .* model\.layers\.0\.self_attn \(LlamaAttention\)"),
        (
            {"match": "layers.0.self_attn"},
            ValueError,
            "match selects 1 of 2 attention modules, but the interface route",
        ),
        ({"is_casual": True}, TypeError, "is_casual"),
    ],
)
def test_bad_arguments_change_nothing(llama, options, error, text):
    before = state_of(llama)
    with pytest.raises(error, match=text):
        packed_sdpa.attach(llama, **options)
    assert state_of(llama) == before and llama.config._attn_implementation == "sdpa"


def test_a_model_without_attention_names_what_it_has():
    with pytest.raises(
        ValueError, match=r"Plain has no attention modules .* mixer_attn \(Linear\); name them with match="
    ):
        packed_sdpa.attach(Plain())
    with pytest.raises(ValueError, match="it has no attention-like modules either"):
        packed_sdpa.attach(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="not on Transformers' attention interface, so use route='hooks'"):
        packed_sdpa.attach(Plain(), route="interface")
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        packed_sdpa.attach("llama")


def test_a_failing_attach_is_undone(llama, monkeypatch):
    module = sys.modules["packed_sdpa.attachment"]
    before = state_of(llama)
    calls = []
    real = module.add_around

    def failing(target, around):
        calls.append(target)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(target, around)

    monkeypatch.setattr(module, "add_around", failing)
    with pytest.raises(KeyboardInterrupt):
        packed_sdpa.attach(llama)
    monkeypatch.undo()
    assert len(calls) == 3 and state_of(llama) == before and llama.config._attn_implementation == "sdpa"
    packed_sdpa.attach(llama).detach()


@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_detach_within_a_forward_is_refused(llama, batch, route):
    expected = each_alone(llama, batch)
    handle = packed_sdpa.attach(llama, route=route, strict=True)

    def detach(*_):
        with pytest.raises(RuntimeError, match=r"detach\(\) was called while a forward of this model runs"):
            handle.detach()

    hook = llama.model.layers[0].register_forward_hook(detach)
    assert difference(llama(**batch).logits, expected) < EXACT
    hook.remove()
    handle.detach()
    assert type(llama.model.layers[0].self_attn).__name__ == "LlamaAttention"


def test_documents_of_a_wrong_type_are_named(llama):
    with pytest.raises((TypeError, ValueError), match="documents"):
        packed_sdpa.attach(llama, documents=torch.ones(3))


@pytest.mark.parametrize(
    ("keyword", "meant"), [("is_casual", "is_causal"), ("docs_ids", "doc_ids"), ("cu_seqlens_q", "cu_seq_lens_q")]
)
def test_a_misspelt_keyword_is_not_swallowed(llama, batch, keyword, meant):
    with (
        packed_sdpa.attach(llama),
        pytest.raises(TypeError, match=f"unexpected keyword {keyword} .*did you mean {meant}"),
    ):
        llama(**batch, **{keyword: True})


def test_other_keywords_go_on(llama, batch):
    with packed_sdpa.attach(llama):
        llama(**batch, labels=batch["input_ids"], num_items_in_batch=3, output_attentions=False, logits_to_keep=0)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_models_that_share_a_config_are_detached_in_any_order(llama, order):
    models = [llama, type(llama)(llama.config), type(llama)(llama.config)]
    handles = [packed_sdpa.attach(model) for model in models]
    assert (
        llama.config._attn_implementation == "packed_sdpa"
        and copy.deepcopy(llama.config)._attn_implementation == "sdpa"
    )
    for place in order:
        handles[place].detach()
    assert llama.config._attn_implementation == "sdpa" and type(llama.config._attn_implementation) is str


def test_a_layer_that_makes_a_mask_of_the_mask_is_told_the_route():
    from packed_sdpa.hf import DocumentMask

    mask = DocumentMask(None, True, (-1, -1), None, None)
    with pytest.raises(AttributeError, match=r"'ndim' was asked of the documents in the place .* route='hooks'"):
        mask.ndim  # noqa: B018
    assert not hasattr(mask, "shape") and not hasattr(mask, "nothing_of_a_tensor")


def test_offsets_of_a_paged_cache_are_no_documents(batch):
    from packed_sdpa.documents import find_documents

    assert find_documents(batch) is not None
    offsets = {"cu_seq_lens_q": torch.tensor([0, 3]), "cu_seq_lens_k": {}}
    assert find_documents({**batch, **offsets, "cache": object(), "block_table": None}) is None


def test_another_model_of_the_same_config_within_a_packed_forward_is_told_of(llama, batch):
    teacher = type(llama)(llama.config)
    llama.model.layers[0].register_forward_pre_hook(
        lambda *_: teacher(input_ids=batch["input_ids"], use_cache=False) and None
    )
    with packed_sdpa.attach(llama), pytest.warns(UserWarning, match="LlamaAttention was not there when attach"):
        llama(**batch)
