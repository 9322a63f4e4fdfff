"""Masks that mean more than the rule, towers that are none of ours, and models with two sides."""

import contextlib
import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers

import packed_sdpa
from hf_models import _SMALL, ARCHITECTURES, LENGTHS, difference, each_alone, packed_batch

EXACT = 1e-12


def make(model, config, **changes):
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**_SMALL, **changes})
    made._attn_implementation = changes.get("_attn_implementation", "eager")
    return getattr(transformers, model)(made).double().eval()


def check(model, batch, **options):
    expected = each_alone(copy.deepcopy(model), batch)
    with packed_sdpa.attach(model, **options) as handle:
        logits = model(**batch).logits
        report = packed_sdpa.report(handle)
    assert difference(logits, expected) < 1e-6
    return report


# ---- chunked attention, image blocks, prefixes


@pytest.mark.parametrize("chunk", [2, 4, 64])
def test_case_41_chunked_attention_is_honoured(chunk):
    """Case 41: chunks are counted from each document's first token, as when it runs alone."""
    model = ARCHITECTURES["llama4"].make(attention_chunk_size=chunk).eval()
    for use_cache in (True, False):
        batch = packed_batch(rows=2)
        expected = each_alone(copy.deepcopy(model), batch)
        with packed_sdpa.attach(model, strict=True):
            assert difference(model(**batch, use_cache=use_cache).logits, expected) < 1e-6


def test_chunks_of_documents_with_padding_between():
    from packed_sdpa.documents import from_doc_ids

    pieces = from_doc_ids(torch.tensor([[7, 7, 7, 0, 2, 2, 7, 7], [0, 3, 3, 3, 3, 3, 0, 0]])).in_chunks(2)
    first, second = pieces.doc_ids.tolist()
    assert [len(set(first[at : at + 2])) for at in (0, 4, 6)] == [1, 1, 1] and first[3] == 0
    assert len({first[0], first[2], first[4], first[6]}) == 4  # a document's rows behind a gap are a later piece
    assert second[0] == second[6] == second[7] == 0
    assert [second[i] == second[i + 1] for i in range(1, 5)] == [True, False, True, False]


def test_a_dense_mask_that_sees_across_chunks():
    """Stock hands the caller's own mask to the layers with chunks too, so they see all of a document."""
    model = ARCHITECTURES["llama4"].make(attention_chunk_size=4).eval()
    batch = packed_batch()
    ids = torch.repeat_interleave(torch.arange(1, len(LENGTHS) + 1), torch.tensor(LENGTHS))
    same = (ids[:, None] == ids) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    with packed_sdpa.attach(model, strict=True):
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match=r"was given dense: .* in chunks of"):
            model(**batch, doc_ids=ids[None], attention_mask=same[None, None])
    model = ARCHITECTURES["llama4"].make(attention_chunk_size=64).eval()  # no document is as long
    expected = each_alone(copy.deepcopy(model), batch)
    with packed_sdpa.attach(model, strict=True):
        logits = model(**batch, doc_ids=ids[None], attention_mask=same[None, None]).logits
        assert difference(logits, expected) < 1e-6


SHARED = [0, 1, 2, 3, 4, 5, 6, 3, 4, 5]  # two answers to one question: the second sees the question, not the first


def tree_mask():
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    mask[7:, 3:7] = False
    return mask[None, None]


@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_a_mask_of_a_tree(route):
    """It joins what positions cut: the model's mask means other documents, and is not overridden in silence."""
    model = ARCHITECTURES["llama"].make().eval()
    tokens = packed_batch((10,))["input_ids"]
    arguments = {"input_ids": tokens, "position_ids": torch.tensor([SHARED]), "use_cache": False}
    stock = model(**arguments, attention_mask=tree_mask()).logits
    alone = model(input_ids=tokens[:, [0, 1, 2, 7, 8, 9]]).logits
    assert difference(stock[:, 7:], alone[:, 3:]) < 1e-6
    with packed_sdpa.attach(model, route=route):
        with pytest.raises(
            packed_sdpa.MaskNotHonouredError, match="lets some tokens see another document and hides oth"
        ):
            model(**arguments, attention_mask=tree_mask())
        whole = torch.ones(1, 1, 10, 10, dtype=torch.bool).tril()  # a causal mask says nothing of documents
        model(**arguments, attention_mask=whole)
    with packed_sdpa.attach(model, route=route, documents=None):
        assert torch.equal(model(**arguments, attention_mask=tree_mask()).logits, stock)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_the_caller_s_own_mask_where_documents_do_not_fit(route, cached):
    """Tokens are cached, or ids of another shape are armed: passed through as it is."""
    model = ARCHITECTURES["llama"].make().eval()
    tokens = packed_batch((9,))["input_ids"]
    mask = torch.rand(1, 1, 4, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    positions = torch.tensor([[4, 5, 5, 6]])

    def run():
        if not cached:
            square = mask[..., :4] | torch.eye(4, dtype=torch.bool)
            return model(input_ids=tokens[:, :4], attention_mask=square, use_cache=False).logits
        past = model(input_ids=tokens[:, :5], use_cache=True).past_key_values
        return model(input_ids=tokens[:, 5:], attention_mask=mask, position_ids=positions, past_key_values=past).logits

    stock = run()
    with packed_sdpa.attach(model, route=route, documents="auto" if cached else None):
        if not cached:
            packed_sdpa.arm(torch.ones(2, 7).long())
        try:
            with (
                pytest.warns(UserWarning, match="without packed attention") if not cached else contextlib.nullcontext()
            ):
                assert torch.equal(run(), stock)
        finally:
            packed_sdpa.disarm()


@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_generation_from_padded_prompts(route, name, cache_implementation):
    model = ARCHITECTURES[name].make().eval()
    prompt = packed_batch((9,), rows=3)["input_ids"]
    mask = torch.ones_like(prompt)
    mask[0, :4], mask[1, :1] = 0, 0
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache_implementation, "pad_token_id": 0}
    options |= {"attention_mask": mask, "disable_compile": True, "eos_token_id": None}
    stock = model.generate(prompt, **options)
    with packed_sdpa.attach(model, route=route, strict=True):
        assert torch.equal(model.generate(prompt, **options), stock)


def with_cross_attention(name):
    torch.manual_seed(0)
    small = {"vocab_size": 64, "attn_implementation": "sdpa", "add_cross_attention": True}
    small |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **small)
        return transformers.GPT2LMHeadModel(config).double().eval()
    kind = {"bert": ("BertConfig", "BertLMHeadModel"), "roberta": ("RobertaConfig", "RobertaForCausalLM")}[name]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = getattr(transformers, kind[0])(is_decoder=True, max_position_embeddings=64, **sizes, **small)
    return getattr(transformers, kind[1])(config).double().eval()


ATTENTIONS = ("GPT2Attention", "SelfAttention", "CrossAttention")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("encoder_rows", [5, 8, 13])
@pytest.mark.parametrize("name", ["gpt2", "bert", "roberta"])
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_cross_attention_sees_the_whole_encoder(route, name, encoder_rows, masked):
    model = with_cross_attention(name)
    batch = packed_batch((3, 5))
    encoder = {"encoder_hidden_states": torch.randn(1, encoder_rows, 32, dtype=torch.float64)}
    if masked:
        encoder["encoder_attention_mask"] = (torch.arange(encoder_rows)[None] > 0).long()
    parts = [model(input_ids=part, use_cache=False, **encoder).logits for part in batch["input_ids"].split([3, 5], 1)]
    match = None if route == "interface" else lambda _, module: type(module).__name__.endswith(ATTENTIONS)
    with packed_sdpa.attach(model, route=route, match=match, strict=True) as handle:
        logits = model(**batch, use_cache=False, **encoder).logits
        report = packed_sdpa.report(handle)
        assert packed_sdpa.check_isolation(model, {**batch, **encoder}).ok
    assert report.taken == 2
    if name != "roberta":  # whose positions begin behind its padding id
        assert difference(logits, torch.cat(parts, 1)) < 1e-6


def gemma3_with_images():
    text = {**_SMALL, "vocab_size": 80, "head_dim": 8, "sliding_window": 64}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    }
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=70,
        boi_token_index=71,
        eoi_token_index=72,
    )
    return transformers.Gemma3ForConditionalGeneration(config).double().eval()


def test_case_41_image_blocks_are_refused_by_name():
    """Case 41: image tokens that see each other both ways. Text alone is packed."""
    model = gemma3_with_images()
    ids = torch.randint(3, 60, (1, 20))
    ids[0, 2], ids[0, 3:7], ids[0, 7] = 71, 70, 72
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    image = {"pixel_values": torch.randn(1, 3, 16, 16).double(), "token_type_ids": (ids == 70).long()}
    with packed_sdpa.attach(model, strict=True) as handle:
        model(input_ids=ids[:, 8:], position_ids=torch.cat([torch.arange(4), torch.arange(8)])[None])
        taken = packed_sdpa.report(handle).taken
        assert taken == 2
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match=r"image blocks.*lets row 3 see row 4") as error:
            model(input_ids=ids, position_ids=positions, **image)
        assert "Gemma3" in str(error.value) and "on_mask=" in str(error.value)
        model(input_ids=ids, **image)  # without documents as stock
        assert packed_sdpa.report(handle).taken == taken


def test_hooks_route_refuses_chunks_and_biases():
    model = ARCHITECTURES["llama4"].make().eval()
    with packed_sdpa.attach(model, route="hooks"):
        with pytest.raises(
            packed_sdpa.MaskNotHonouredError, match="attn_mask: the model's mask does not let row 4 see row 0"
        ):
            model(**packed_batch((25,), rows=1), doc_ids=torch.ones(25).long(), use_cache=False)


class BiasedAttention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.bias = bias
        self.q_proj = nn.Linear(8, 8).double()

    def forward(self, x):
        q = self.q_proj(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(
            q, q, q, attn_mask=self.bias, is_causal=self.bias is None
        ).squeeze(1)


class Small(nn.Module):
    def __init__(self, bias=None):
        super().__init__()
        self.self_attn = BiasedAttention(bias)

    def forward(self, x):
        return self.self_attn(x)


def test_case_41_additive_bias_on_the_hooks_route():
    """Case 41: an additive bias is refused; a causal additive mask is the rule."""
    causal = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)
    ids = torch.tensor([[1, 1, 1, 2, 2, 2]])
    x = torch.randn(1, 6, 8).double()
    plain, masked, biased = Small(), Small(causal), Small(causal + torch.arange(6) * 0.1)
    for model in (masked, biased):
        model.load_state_dict(plain.state_dict())
    with packed_sdpa.attach(plain), packed_sdpa.attach(masked), packed_sdpa.attach(biased):
        expected = torch.cat([plain(x[:, :3]), plain(x[:, 3:])], 1)
        assert difference(plain(x, doc_ids=ids), expected) < EXACT
        assert difference(masked(x, doc_ids=ids), expected) < EXACT
        with pytest.raises(packed_sdpa.MaskNotHonouredError, match="a bias such as ALiBi"):
            biased(x, doc_ids=ids)
        biased(x)  # unpacked: as stock


# ---- what sdpa does not have


def test_softcap_and_sinks_are_refused_by_name():
    gemma2 = make("Gemma2ForCausalLM", "Gemma2Config", head_dim=8)
    with pytest.raises(ValueError, match=r"Gemma2\w+ does not support sdpa .*attn_logit_softcapping=50"):
        packed_sdpa.attach(gemma2)
    oss = make(
        "GptOssForCausalLM",
        "GptOssConfig",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
    )
    with pytest.raises(ValueError, match=r"GptOss\w+ does not support sdpa .*attention sinks"):
        packed_sdpa.attach(oss)
    assert gemma2.config._attn_implementation == oss.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["softcap", "s_aux", "head_mask", "alibi", "position_bias"])
def test_refused_keywords_of_the_interface(name):
    from packed_sdpa.documents import from_doc_ids
    from packed_sdpa.hf import DocumentMask, document_attention
    from packed_sdpa.scope import Ledger

    documents = from_doc_ids(torch.tensor([[1, 1, 2]]))
    mask = DocumentMask(documents.layout.tensors(), True, (-1, -1), documents.armed, Ledger())
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(
        NotImplementedError, match=rf"Identity uses .* \({name}\), which the packed kernel does not have"
    ):
        document_attention(nn.Identity(), q, q, q, mask, **{name: torch.ones(1)})


def test_case_47a_eager_models_and_eager_layers_are_switched():
    """Case 47a on the interface: a layer with a config of its own is switched as well, and put back."""
    model = make("LlamaForCausalLM", "LlamaConfig")
    own = copy.deepcopy(model.config)
    own._attn_implementation = "sdpa"
    model.model.layers[1].self_attn.config = own
    with pytest.warns(
        UserWarning, match=r"model\.layers\.1\.self_attn asks for 'sdpa' attention by a config of its own"
    ):
        report = check(model, packed_batch(), strict=True)
    assert report.taken == 2
    assert (model.config._attn_implementation, own._attn_implementation) == ("eager", "sdpa")


def eager_layer(model, index, adds_mask):
    """Makes one layer compute its attention itself."""
    attention = model.model.layers[index].self_attn

    def forward(hidden_states, attention_mask=None, **_):
        q = attention.q_proj(hidden_states)
        scores = q @ q.transpose(1, 2)
        return (scores + attention_mask if adds_mask else scores).softmax(-1) @ q, None

    attention.forward = forward


@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_case_47a_one_layer_that_computes_attention_itself(route):
    """Case 47a: warned by name, once; strict raises."""
    model = ARCHITECTURES["llama"].make().eval()
    eager_layer(model, 1, adds_mask=False)
    with packed_sdpa.attach(model, route=route) as handle:
        with pytest.warns(
            UserWarning, match=r"model\.layers\.1\.self_attn \(LlamaAttention\) ran .* made no call"
        ) as caught:
            model(**packed_batch())
            model(**packed_batch())
        assert len([w for w in caught if "layers.1" in str(w.message)]) == 1
        taken = {module.name: module.taken for module in packed_sdpa.report(handle).modules}
        assert taken == {"model.layers.0.self_attn": 2, "model.layers.1.self_attn": 0}
    with packed_sdpa.attach(model, route=route, strict=True):
        with pytest.raises(packed_sdpa.NotTakenError, match=r"model\.layers\.1\.self_attn"):
            model(**packed_batch())


def test_a_layer_that_adds_the_mask_itself_is_told_what_it_got():
    model = ARCHITECTURES["llama"].make().eval()
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, attention_mask=None, **_: (hidden_states + attention_mask, None)
    with packed_sdpa.attach(model):
        with pytest.raises(RuntimeError, match="was given the documents in the place of an attention mask"):
            model(**packed_batch(), use_cache=False)


# ---- towers and two sides


def llava():
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=20, patch_size=4
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**_SMALL), image_token_id=60, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config).double().eval()


@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_case_38_vision_tower_is_stock(route):
    """Case 38: bidirectional attention in `self_attn` modules, here over 25 patches."""
    model = llava()
    pixels = torch.randn(1, 3, 20, 20).double()
    ids = torch.randint(3, 59, (1, 35))
    ids[0, 2:27] = 60
    positions = torch.cat([torch.arange(30), torch.arange(5)])[None]
    expected = torch.cat(
        [model(input_ids=ids[:, :30], pixel_values=pixels).logits, model(input_ids=ids[:, 30:]).logits], 1
    )
    features = model.model.vision_tower(pixels).last_hidden_state
    with packed_sdpa.attach(model, route=route, strict=True) as handle:
        assert model.model.vision_tower.config._attn_implementation == "sdpa"
        assert difference(model(input_ids=ids, pixel_values=pixels, position_ids=positions).logits, expected) < EXACT
        assert torch.equal(model.model.vision_tower(pixels).last_hidden_state, features)
        names = [module.name for module in packed_sdpa.report(handle).modules]
    assert names == [f"model.language_model.layers.{layer}.self_attn" for layer in (0, 1)]


def test_bidirectional_self_attn_of_the_users_own_is_passed_through():
    """Case 38 for a module that says nothing but is_causal=False in its call, or by its attribute."""
    model = Small()
    x = torch.randn(1, 6, 8).double()
    ids = torch.tensor([[1, 1, 1, 2, 2, 2]])
    model.self_attn.is_causal = False
    stock = model(x)
    with packed_sdpa.attach(model) as handle:
        with pytest.warns(UserWarning, match="is_causal = False"):
            assert torch.equal(model(x, doc_ids=ids), stock)
        assert packed_sdpa.report(handle).taken == 0


@pytest.mark.parametrize(
    ("model", "config", "changes"),
    [
        (
            "BartForConditionalGeneration",
            "BartConfig",
            {
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
            },
        ),
        (
            "T5ForConditionalGeneration",
            "T5Config",
            {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        ),
    ],
)
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_encoder_decoder_is_never_made_causal(model, config, changes, route):
    made = make(model, config, decoder_start_token_id=1, _attn_implementation="sdpa", **changes)
    ids = packed_batch()["input_ids"]
    stock = [made(input_ids=ids, decoder_input_ids=ids[:, :count]).logits for count in (12, 25)]
    try:
        handle = packed_sdpa.attach(made, route=route)
    except ValueError as error:
        assert route == "hooks" and "T5" in str(error)  # its attention is named SelfAttention
        return
    with handle:
        for logits, count in zip(stock, (12, 25), strict=True):
            assert torch.equal(made(input_ids=ids, decoder_input_ids=ids[:, :count]).logits, logits)
        with pytest.raises(ValueError, match=r"is an encoder-decoder model"):
            made(input_ids=ids, decoder_input_ids=ids, attention_mask=torch.arange(1, 26)[None])


def test_text_axis_of_a_vision_language_model():
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 4, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config={**_SMALL, "rope_parameters": rope}, vision_config=vision)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).double().eval()
    batch = packed_batch()
    expected = each_alone(model, batch)
    with packed_sdpa.attach(model, strict=True) as handle:
        for positions in (batch["position_ids"].expand(axes, 1, -1) for axes in (4, 3)):
            assert difference(model(input_ids=batch["input_ids"], position_ids=positions).logits, expected) < EXACT
        assert packed_sdpa.report(handle).taken == 4


# ---- layers that mix tokens without attention


@pytest.mark.parametrize(
    ("model", "config", "changes", "named"),
    [
        ("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": ["conv", "full_attention"]}, r"model\.layers\.0\.conv"),
        (
            "BambaForCausalLM",
            "BambaConfig",
            {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
            r"model\.layers\.0\.mamba",
        ),
    ],
)
def test_state_space_and_convolution_layers_are_warned_about(model, config, changes, named):
    made = make(model, config, **changes)
    with pytest.warns(UserWarning, match=named + ": state-space, convolution or linear-attention layers"):
        packed_sdpa.attach(made).detach()


@pytest.mark.parametrize("name", ["llama", "gpt2", "seed"])
def test_no_warning_for_plain_attention(name, recwarn):
    made = make("SeedOssForCausalLM", "SeedOssConfig", head_dim=8) if name == "seed" else ARCHITECTURES[name].make()
    packed_sdpa.attach(made).detach()
    assert not [w for w in recwarn if "packed_sdpa" in str(w.message)]


def test_the_name_alone_packs_what_transformers_finds():
    """register_hf_attention without attach: restarting position_ids, no cache."""
    assert packed_sdpa.register_hf_attention() == "packed_sdpa"
    model = ARCHITECTURES["mistral"].make().eval()
    batch = packed_batch()
    expected = each_alone(model, batch)
    model.set_attn_implementation("packed_sdpa")
    assert difference(model(**batch, use_cache=False).logits, expected) < EXACT
    packed_sdpa.arm(torch.repeat_interleave(torch.arange(1, 6), torch.tensor(LENGTHS)))
    try:
        assert difference(model(**batch).logits, expected) < EXACT
    finally:
        packed_sdpa.disarm()
