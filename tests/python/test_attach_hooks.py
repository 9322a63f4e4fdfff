"""attach on the hooks route: models of the user's own that call scaled_dot_product_attention."""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import packed_models
import packed_sdpa
from packed_sdpa import armed, guard, mask_audit, packed
from packed_sdpa.armed import ArmedDocuments

STOCK = F.scaled_dot_product_attention
EXACT = 1e-12
LENGTHS = (4, 1, 6, 5)


class Attention(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.add_module(name, Attention())
        self.name = name

    def forward(self, x):
        return x + self.get_submodule(self.name)(x)


class Decoder(nn.Module):
    """Takes tokens and, by any keyword, documents."""

    def __init__(self, name="self_attn", layers=2, use_reentrant=None):
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.layers = nn.ModuleList(Layer(name) for _ in range(layers))
        self.use_reentrant = use_reentrant

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Scriptable(nn.Module):
    """As little as attach hooks, in words that TorchScript knows."""

    class SelfAttention(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    def __init__(self):
        super().__init__()
        self.self_attn = Scriptable.SelfAttention()

    def forward(self, x):
        return self.self_attn(x)


@pytest.mark.parametrize("whole", [True, False])
def test_scripted_attention_is_refused_by_name(whole):
    model = torch.jit.script(Scriptable())
    if not whole:
        inner, model = model, Scriptable()
        model.add_module("part", inner)
    for hook in (packed_sdpa.attach, packed.attach_cp1_packed_varlen_hooks):
        with pytest.raises(
            TypeError, match=r"scripted module \((SelfAttention|Scriptable)\).*that it was scripted from"
        ):
            hook(model)
    if not whole:
        assert not guard.arounds_of(model) and not guard.arounds_of(model.self_attn)


def test_an_attached_model_is_not_scripted_but_its_copy_is():
    x = torch.randn(1, 2, 4, 8)
    for attach in (packed_sdpa.attach, packed.attach_cp1_packed_varlen_hooks):
        model = Scriptable()
        attach(model)
        with pytest.raises(TypeError, match=r"attached or hooked by packed_sdpa.*script copy\.deepcopy\(model\)"):
            torch.jit.script(model)
        scripted = torch.jit.script(copy.deepcopy(model))
        torch.testing.assert_close(scripted(x), F.scaled_dot_product_attention(x, x, x))


@pytest.fixture
def model():
    return Decoder().double()


def batch(lengths=LENGTHS, seed=0):
    tokens = torch.randint(0, 31, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.cat([torch.arange(n) for n in lengths])[None]


def alone(model, tokens, lengths=LENGTHS):
    return torch.cat([model(part) for part in tokens.split(lengths, 1)], 1)


def gradient(model, out):
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    return torch.autograd.grad(loss, list(model.parameters()))


def close(one, two):
    return all(float((a - b).abs().max()) < EXACT for a, b in zip(one, two, strict=True))


def test_documents_from_arguments(model):
    tokens, positions = batch()
    expected = alone(model, tokens)
    ids = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None]
    with packed_sdpa.attach(model, strict=True) as handle:
        assert handle.route == "hooks"
        for arguments in ((tokens, positions), (tokens,)):
            extra = {} if len(arguments) == 2 else {"doc_ids": ids}
            assert close([model(*arguments, **extra)], [expected])
        assert not close([model(tokens)], [expected])  # unpacked again: arming ended by itself
        report = packed_sdpa.report(model)
        assert (report.taken, report.passed, report.layouts_built) == (4, 2, 2)
        assert F.scaled_dot_product_attention is STOCK
        assert close([model.forward(tokens, positions)], [expected])
    assert F.scaled_dot_product_attention is STOCK


@pytest.mark.parametrize("name", ["attn", "attention", "self_attention", "mixer"])
def test_case_39_other_names(name):
    """Case 39."""
    model = Decoder(name).double()
    tokens, positions = batch()
    with pytest.raises(ValueError, match=rf"layers\.0\.{name} \(Attention\).*name them with match="):
        packed_sdpa.attach(model)
    assert type(model) is Decoder
    expected = alone(model, tokens)
    for match in (name, f"layers.*.{name}", [name], lambda where, module: isinstance(module, Attention)):
        with packed_sdpa.attach(model, match=match, strict=True):
            assert close([model(tokens, positions)], [expected])


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_recompute_reads_its_own_forward(use_reentrant, order):
    """Cases 28 to 30: forwards of the same length in flight, an unpacked one between them, backward from a thread."""
    model = Decoder(use_reentrant=use_reentrant).double()
    splits = [LENGTHS, (8, 8), (16,)]
    stock = copy.deepcopy(model)
    stock.use_reentrant = None
    expected = [gradient(stock, alone(stock, batch(s, i)[0], s)) for i, s in enumerate(splits)]
    with packed_sdpa.attach(model, strict=True):
        outs = [model(*batch(s, i)) for i, s in enumerate(splits)]
        with torch.no_grad():
            model(batch()[0])
        got = {}
        for index in order:
            thread = threading.Thread(target=lambda i=index: got.update({i: backward(model, outs[i])}))
            thread.start()
            thread.join()
    for index in order:
        assert close(got[index], expected[index])


def backward(model, out):
    """Reentrant checkpoints take no autograd.grad."""
    copies = dict(model.named_parameters())
    before = {name: p.grad for name, p in copies.items()}
    for p in copies.values():
        p.grad = None
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    grads = [p.grad for p in copies.values()]
    for name, p in copies.items():
        p.grad = before[name]
    return grads


def test_disabled_and_armed(model):
    tokens, _ = batch()
    stock, expected = model(tokens), alone(model, tokens)
    ids = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))
    packed_sdpa.arm(ids)
    try:
        with packed_sdpa.attach(model, documents=None, strict=True) as handle:
            assert close([model(tokens)], [expected])
            handle.enabled = False
            assert torch.equal(model(tokens), stock)
            handle.enabled = True
            assert close([model(tokens)], [expected])
    finally:
        packed_sdpa.disarm()
    with packed_sdpa.attach(model, documents=None):
        assert torch.equal(model(tokens), stock)


def test_armed_ids_of_another_shape(model):
    """Case 47."""
    tokens, _ = batch()
    two = tokens.expand(2, -1)
    packed_sdpa.arm(torch.ones(16).long())
    try:
        with packed_sdpa.attach(model, documents=None):
            with pytest.warns(UserWarning, match=r"layers\.0\.self_attn .* batch size"):
                model(two)
        with packed_sdpa.attach(model, documents=None, strict=True), pytest.raises(packed_sdpa.NotTakenError):
            model(two)
    finally:
        packed_sdpa.disarm()


def test_a_detached_handle(model):
    handle = packed_sdpa.attach(model)
    handle.detach()
    handle.detach()
    assert repr(handle) == "packed_sdpa handle (detached)" and not handle.enabled
    with pytest.raises(RuntimeError, match="this handle is detached; attach the model again"):
        _ = handle.route
    with pytest.raises(RuntimeError, match="this handle is detached; attach the model again"):
        handle.enabled = True


def test_copies_and_pickles(model):
    """Case 43: plain classes, no hooks, not packed by the original's attachment."""
    tokens, positions = batch()
    stock = model(tokens, positions)
    with packed_sdpa.attach(model):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other) is Decoder and type(other.layers[0].self_attn) is Attention
            assert not other.layers[0].self_attn._forward_hooks and not other.layers[0].self_attn._forward_pre_hooks
            assert torch.equal(other(tokens, positions), stock)
        assert b"packed_sdpa" not in pickle.dumps(model)
    assert type(model) is Decoder and type(model.layers[0].self_attn) is Attention
    assert not model.layers[0].self_attn._forward_hooks


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupts(model, error):
    """Case 34."""
    tokens, positions = batch()
    expected = alone(model, tokens)

    def stop(*_):
        raise error

    with packed_sdpa.attach(model, strict=True):
        hook = model.layers[1].self_attn.out.register_forward_hook(stop)
        with pytest.raises(error):
            model(tokens, positions)
        hook.remove()
        assert F.scaled_dot_product_attention is STOCK
        assert close([model(tokens, positions)], [expected])
        assert not close([model(tokens)], [expected])


@pytest.mark.parametrize("route", ["hooks", "interface"])
def test_nothing_keeps_a_dropped_model_alive(route):
    if route == "interface":
        pytest.importorskip("transformers")
        from hf_models import ARCHITECTURES

        model = ARCHITECTURES["llama"].make()
    else:
        model = Decoder().double()
    tokens, positions = batch()
    packed_sdpa.attach(model, route=route)
    model(tokens, position_ids=positions)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize("route", ["hooks", "interface"])
def test_documents_die_with_their_graph(route, use_reentrant):
    """Nothing is kept after backward: documents that are alive are counted, of three forwards in flight."""
    if route == "interface":
        pytest.importorskip("transformers")
        from hf_models import ARCHITECTURES

        model = ARCHITECTURES["llama"].make().train()
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    else:
        model = Decoder(use_reentrant=use_reentrant).double()
    gc.collect()
    before = set(armed._alive)
    with packed_sdpa.attach(model, route=route, strict=True):
        losses = []
        for seed in range(3):
            tokens, positions = batch(seed=seed)
            out = model(tokens, position_ids=positions)
            losses.append((out if isinstance(out, torch.Tensor) else out.logits).sum())
            del out
        gc.collect()
        needed = route == "hooks" or use_reentrant is not None  # else layouts in saved tensors are all there is
        assert len(set(armed._alive) - before) == (3 if needed else 0)
        while losses:
            losses.pop().backward()
            gc.collect()
            assert len(set(armed._alive) - before) == (len(losses) if needed else 0)


def small(kind):
    """(model, x, its documents, gradients of the sum of squares by the dense mask)"""
    model = packed_models.Model(kind)
    ids = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3]])
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    model.reference(x, ids).square().sum().backward()
    expected = model.gradients()
    model.zero_grad()
    return model, x, ids, expected


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", packed_models.ALL_KINDS)
def test_detached_between_a_forward_and_its_backward(kind, again):
    """The recompute is packed as its forward was; every other forward is stock, and in the end nothing is left."""
    model, x, ids, expected = small(kind)
    plain = model(x).detach()
    with packed_sdpa.attach(model, documents=lambda x: ids):
        loss = model(x).square().sum()
    with torch.no_grad():
        assert torch.equal(model(x), plain)
    assert F.scaled_dot_product_attention is STOCK
    handle = packed_sdpa.attach(model, documents=lambda x: torch.ones(1, 8, dtype=torch.int64)) if again else None
    if again:
        assert close([model(x)], [plain])
    loss.backward()
    packed_models.assert_gradients(model.gradients(), expected, kind)
    del loss
    gc.collect()
    if again:
        handle.detach()
    attention = model.plain_layers[0].self_attn
    assert type(attention) is packed_models.SelfAttention and not attention._forward_hooks
    assert set(vars(attention)) == set(vars(packed_models.SelfAttention()))


@pytest.mark.parametrize("armed_by_hand", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_detached_before_a_whole_forward_is_recomputed(use_reentrant, armed_by_hand):
    """Nothing finds its documents any more in the recompute: what was armed is known, else it is right or raises."""
    model, x, ids, expected = small("none")
    with packed_sdpa.attach(model, documents=None if armed_by_hand else lambda x: ids):
        if armed_by_hand:
            packed_sdpa.arm(ids)
        loss = checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant).square().sum()
        packed_sdpa.disarm()
    if use_reentrant and not armed_by_hand:
        with pytest.raises(RuntimeError, match=r"layers.0.self_attn is recomputed .*after the model was detached"):
            loss.backward()
    else:
        loss.backward()
        packed_models.assert_gradients(model.gradients(), expected, "whole forward")


def test_detach_without_a_graph_leaves_nothing():
    model, x, ids, _ = small("none")
    with packed_sdpa.attach(model, documents=lambda x: ids), torch.no_grad():
        model(x)
    assert type(model.plain_layers[0].self_attn) is packed_models.SelfAttention


class Streaming(packed_models.Model):
    def forward(self, x):
        x = self.embed(x)
        for layer in self.plain_layers:
            x = layer(x)
            yield x


class InThreads(packed_models.Model):
    """Runs the layers from ``first`` on in a thread of their own."""

    first = 0

    def forward(self, x):
        x = self.embed(x)
        for index, layer in enumerate(self.plain_layers):
            if index >= self.first:
                with ThreadPoolExecutor(1) as pool:
                    x = pool.submit(layer, x).result()
            else:
                x = layer(x)
        return x


def test_a_forward_that_runs_its_layers_later_is_not_silent():
    _, x, ids, _ = small("none")
    model = Streaming()
    expected = model.reference(x, ids)
    with packed_sdpa.attach(model, documents=lambda x: ids):
        with pytest.warns(UserWarning, match=r"every attention module of Streaming .*none had run when the forward"):
            list(model(x))
        packed_sdpa.arm(ids)
        assert close(list(model(x))[-1:], [expected])  # what the message says
        packed_sdpa.disarm()
    with packed_sdpa.attach(model, documents=lambda x: ids, strict=True), pytest.raises(packed_sdpa.NotTakenError):
        list(model(x))


@pytest.mark.parametrize("first", [0, 1])
def test_layers_in_threads_of_their_own_are_not_silent(first):
    _, x, ids, _ = small("none")
    model = InThreads()
    model.first = first
    expected = model.reference(x, ids)
    with packed_sdpa.attach(model, documents=lambda x: ids):
        with pytest.warns(UserWarning, match=rf"layers.{first}.self_attn .*runs in a thread that began no forward"):
            model(x)
        packed_sdpa.arm(ids)
        assert close([model(x)], [expected])
        packed_sdpa.disarm()
    with (
        packed_sdpa.attach(model, documents=lambda x: ids, strict=True),
        pytest.raises(
            packed_sdpa.NotTakenError, match=rf"layers.{first}.self_attn .*in a thread that began no forward"
        ),
    ):
        model(x)
    assert F.scaled_dot_product_attention is STOCK


class MultiheadDecoder(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.self_attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.self_attn(x, x, x, attn_mask=mask, need_weights=self.need_weights)[0]


@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention_that_needs_weights(training):
    """Honoured without weights, refused by name with them: those are computed by hand."""
    model = MultiheadDecoder(need_weights=False).double().train(training)
    tokens, positions = batch()
    with torch.set_grad_enabled(training):
        expected = alone(model, tokens)
        with packed_sdpa.attach(model, strict=True):
            assert close([model(tokens, positions)], [expected])
        model.need_weights = True
        named = r"self_attn \(MultiheadAttention\) ran .* without packed attention: .*need_weights=True; pass False"
        with packed_sdpa.attach(model, strict=True), pytest.raises(packed_sdpa.NotTakenError, match=named):
            model(tokens, positions)
        with packed_sdpa.attach(model), pytest.warns(UserWarning, match=named):
            assert not close([model(tokens, positions)], [expected])


class MaskedMultihead(nn.Module):
    def __init__(self, attn_mask=None, padding=None):
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.self_attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.masks = {"attn_mask": attn_mask, "key_padding_mask": padding}

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)
        return self.self_attn(x, x, x, need_weights=False, **self.masks)[0]


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_masks_of_multihead_attention(training, as_float):
    """Also of its fused operator in evaluation: honoured, refused, or as stock; never dropped."""
    size = sum(LENGTHS)
    hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
    padding = torch.zeros(1, size, dtype=torch.bool)
    padding[0, -2:] = True
    model = MaskedMultihead().double().train(training)
    tokens, positions = batch()
    real = torch.ones(1, size, dtype=torch.int64)
    real[0, -2:] = 0

    def masks(attn_mask, key_padding_mask):
        for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if as_float and mask is not None:
                mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, float("-inf"))
            model.masks[name] = mask

    with torch.set_grad_enabled(training):
        parts = []
        for part, keys in zip(tokens.split(LENGTHS, 1), padding.split(LENGTHS, 1), strict=True):
            masks(hidden[: part.shape[1], : part.shape[1]], keys)
            parts.append(model(part))
        expected = torch.cat(parts, 1)
        stock = {}
        for name, pair in {"both": (hidden, padding), "padding": (None, padding), "none": (None, None)}.items():
            masks(*pair)
            stock[name] = model(tokens)
        with packed_sdpa.attach(model):
            masks(hidden, padding)
            assert close([model(tokens)], [stock["both"]])
            ids = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None] * real
            assert close([model(tokens, doc_ids=ids)[:, :-2]], [expected[:, :-2]])
            masks(hidden, None)
            assert close([model(tokens, positions)[:, :-2]], [expected[:, :-2]])
            masks(None, padding)
            with pytest.raises(packed_sdpa.MaskNotHonouredError, match=r"attn_mask: .* lets row 0 see row 1"):
                model(tokens, doc_ids=ids)
            assert close([model(tokens)], [stock["padding"]])
            masks(None, None)  # no mask and not causal: as stock
            with pytest.warns(UserWarning, match=r"self_attn .*the call is not causal: is_causal=False and no mask"):
                assert close([model(tokens, positions)], [stock["none"]])


class PrefixAttention(Attention):
    """Tokens of a prefix see each other both ways, as in prefix language models."""

    mask = None

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2).flatten(2))


def prefix_mask(lengths, prefix, dtype=torch.bool):
    """[S, S]; prefix: how many tokens at the head of each document see each other."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(n) for n in lengths])
    seen = (place[None, :] <= place[:, None]) | (place[None, :] < prefix)
    seen &= ids[:, None] == ids[None, :]
    return seen if dtype is torch.bool else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_prefix_masks(dtype):
    """Case 41: one token of prefix is plain causal and honoured; two of them are refused, and nothing has changed."""
    model = Decoder(layers=1).double()
    model.layers[0].self_attn.__class__ = PrefixAttention
    attention = model.layers[0].self_attn
    tokens, positions = batch()
    attention.mask = prefix_mask(LENGTHS, 1, dtype)
    causal = model(tokens)
    attention.mask = prefix_mask(LENGTHS, 2, dtype)
    with_prefix = model(tokens)
    assert not close([causal], [with_prefix])
    refused = r"attn_mask: the model's mask lets row 0 see row 1 of the same document \(batch row 0\), the packed rule"
    with packed_sdpa.attach(model, strict=True):
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match=rf"{refused}.*on_mask='warn' or 'ignore' runs the"):
            model(tokens, positions)
        assert torch.equal(model(tokens), with_prefix)  # no documents: the mask is stock's
        attention.mask = prefix_mask(LENGTHS, 1, dtype)
        assert close([model(tokens, positions)], [causal])
        attention.mask = prefix_mask(LENGTHS, 2, dtype)
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match=refused):  # a kind of mask that was seen before
            model(tokens, positions)
    with packed_sdpa.attach(model, on_mask="warn"), pytest.warns(UserWarning, match=f"{refused}.*packed rule runs ins"):
        assert close([model(tokens, positions)], [causal])
    with packed_sdpa.attach(model, on_mask="ignore"):
        assert close([model(tokens, positions)], [causal])


@pytest.mark.parametrize("route", ["hooks", "interface"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_prefix_masks_of_a_transformers_model(route, dtype):
    pytest.importorskip("transformers")
    from hf_models import ARCHITECTURES

    model = ARCHITECTURES["llama"].make()
    tokens, positions = batch()
    causal, prefix = (prefix_mask(LENGTHS, length, dtype)[None, None] for length in (1, 2))
    arguments = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    expected = model(**arguments, attention_mask=causal).logits
    with packed_sdpa.attach(model, route=route, strict=True):
        assert close([model(**arguments, attention_mask=causal).logits], [expected])
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match=r"mask.* lets row 0 see row 1 of the same document"):
            model(**arguments, attention_mask=prefix)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_every_layer_shows_its_own_mask(bad, shared):
    """A mask that one layer shows first is looked at whole, whatever the layers before it have shown."""
    lengths = (700, 324)
    model = Decoder(layers=3).double()
    causal = prefix_mask(lengths, 1)
    odd = causal.clone()
    odd[441, 442] = True  # one pair of 500,000
    for index, layer in enumerate(model.layers):
        layer.self_attn.__class__ = PrefixAttention
        layer.self_attn.mask = causal if shared else causal.clone()
        if index == bad:
            layer.self_attn.mask = odd
    tokens, positions = batch(lengths)
    refused = r"attn_mask: the model's mask lets row 441 see row 442 of the same document \(batch row 0\)"
    with packed_sdpa.attach(model), pytest.raises(packed_sdpa.MaskNotHonouredError, match=refused):
        model(tokens, positions)


def test_masks_of_another_size():
    audit = mask_audit.DenseMaskAudit("error", set())
    documents = ArmedDocuments(torch.tensor([[1, 1, 2]]))
    for shape in ((2, 3), (3, 4), (1, 1, 4, 4), (3,), (1, 1, 1, 3, 3)):
        with pytest.raises(
            packed_sdpa.MaskNotHonouredError,
            match=rf"attention_mask has shape \[{', '.join(map(str, shape))}\] but the documents are of 3 tokens; ",
        ):
            audit(documents, (-1, -1), torch.ones(shape, dtype=torch.bool), False)


def test_a_learned_bias_that_is_still_zero():
    audit = mask_audit.DenseMaskAudit("error", set())
    documents = ArmedDocuments(torch.tensor([[1, 1, 2]]))
    bias = torch.zeros(1, 1, 3, 3).masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), float("-inf"))
    audit(documents, (-1, -1), bias, False)
    learned = bias + torch.zeros(3, 3, requires_grad=True)
    with pytest.raises(
        packed_sdpa.MaskNotHonouredError, match="attention_mask requires a gradient, so it is a learned"
    ):
        audit(documents, (-1, -1), learned, False)


def test_masks_that_look_across_documents():
    """A causal mask, also with a window that hides no pair of one document, says nothing of them; any other does."""
    documents = ArmedDocuments(torch.tensor([[1, 1, 1, 2, 2, 2, 3, 3]]))
    row = torch.arange(8)
    causal = row <= row[:, None]
    near = causal & (row[:, None] - row < 3)
    alone = causal & (documents.doc_ids[0] == documents.doc_ids[0][:, None])
    for mask in (causal, near, alone):
        mask_audit.DenseMaskAudit("error", set())(documents, (-1, -1), mask, False)
    shared = alone | (causal & (row < 3))  # all see the first document
    hidden = causal.clone()
    hidden[7, 5] = False
    for mask in (shared, hidden, shared.double().sub(1).mul(1e9)):
        with pytest.raises(
            packed_sdpa.MaskNotHonouredError, match=r"attn_mask: .* lets some tokens see another document"
        ):
            mask_audit.DenseMaskAudit("error", set())(documents, (-1, -1), mask, False)


def test_each_module_s_first_mask_is_looked_at_whole():
    """Though another module has only sampled what is between documents just now."""
    audit = mask_audit.DenseMaskAudit("error", set())
    size = 400
    documents = ArmedDocuments(torch.arange(1, 3).repeat_interleave(200)[None])
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    first, second = set(), set()
    audit(documents, (-1, -1), causal, False, kinds=first)
    odd = causal.clone()
    odd[341, 142] = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_audit, "_sample", lambda size, _: slice(0, size, 20))
        audit(documents, (-1, -1), odd, False, kinds=first)  # which the sample leaves out
    with pytest.raises(packed_sdpa.MaskNotHonouredError, match="lets some tokens see another document"):
        audit(documents, (-1, -1), odd, False, kinds=second)


def test_a_mask_in_reused_memory_is_looked_at_again():
    """Same address, version, shape and documents, but another mask."""
    memory = bytearray(torch.ones(6, 6, dtype=torch.bool).tril().flatten().tolist())
    audit = mask_audit.DenseMaskAudit("error", set())
    documents = ArmedDocuments(torch.tensor([[1, 1, 1, 2, 2, 2]]))
    mask = torch.frombuffer(memory, dtype=torch.bool).view(6, 6)
    looked_at: list[int] = []
    whole = mask_audit.differing_pair

    def count(*arguments):
        looked_at.append(1)
        return whole(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_audit, "differing_pair", count)
        assert audit(documents, (-1, -1), mask, False) is None
        assert audit(documents, (-1, -1), mask, False) is None and len(looked_at) == 1
        assert audit(documents, (-1, -1), mask[:], False) is None and len(looked_at) == 1  # a view: the same memory
        del mask
        other = torch.frombuffer(memory, dtype=torch.bool).view(6, 6)
        assert other._version == 0 and audit(documents, (-1, -1), other, False) is None and len(looked_at) == 2
        with torch.inference_mode():
            uncounted = other.clone()
            assert audit(documents, (-1, -1), uncounted, False) is None
            assert audit(documents, (-1, -1), uncounted, False) is None and len(looked_at) == 4


def test_every_row_inside_documents_is_looked_at_each_time():
    """Masks that follow the data (sparse indexers, prefixes) agree with the rule in one batch and not in the next."""
    audit = mask_audit.DenseMaskAudit("error", set())
    documents = ArmedDocuments(torch.arange(1, 4).repeat_interleave(torch.tensor([10, 300, 90]))[None])
    causal = torch.ones(400, 400, dtype=torch.bool).tril()
    audit(documents, (-1, -1), causal, False)
    for row in range(12, 400, 37):
        hidden = causal.clone()
        hidden[row, row - 1] = False
        refused = rf"attn_mask: the model's mask does not let row {row} see row {row - 1} of the same document"
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match=refused):
            audit(documents, (-1, -1), hidden, False)
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match=refused):
            audit(documents, (-1, -1), hidden.logical_not().double() * -1e9, False)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", [(True, -1, -1), (True, 3, -1), (False, -1, -1), (False, 2, 2**40)])
def test_differences_inside_documents_are_those_of_the_whole_look(rule, seed):
    """Of documents side by side, in turns, and with padding, in one and more rows, heads and pieces."""
    generator = torch.Generator().manual_seed(seed)
    size = 150 + 40 * seed
    ids = torch.randint(0, 4, (1 + seed % 2, size), generator=generator)
    if seed % 3:
        ids = ids.sort(1)[0]
    pieces = None if seed < 4 else (torch.arange(size) // 7).expand_as(ids)
    of = mask_audit.MaskRule(rule[0], rule[1:])
    row = torch.arange(size)
    want = row <= row[:, None] if of.is_causal else torch.ones(size, size, dtype=torch.bool)
    if rule[1] >= 0:
        want = want & (row[:, None] - row <= rule[1])
    seen = want.expand(1, 2, size, size).clone()
    if pieces is not None:
        seen &= pieces[0][:, None] == pieces[0]
    for place in (None, *torch.randint(0, size, (20, 2), generator=generator).tolist()):
        given = seen.clone()
        if place is not None:
            given[0, 1, place[0], place[1]] ^= True
        whole = mask_audit.differing_pair(ids, of, lambda rows, m=given: m[:, :, rows], ids.device, None, pieces)
        found = mask_audit.differs_inside(ids, of, lambda rows, columns, m=given: m[:, :, rows, columns], pieces)
        assert found == (whole is not None), place
