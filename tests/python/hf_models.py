"""Tiny random Transformers models, one entry per architecture, and a packed batch for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

VOCAB = 61
LENGTHS = (5, 1, 9, 3, 7)  # documents of one row; longer than the windows below
WINDOW = 4

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Architecture:
    """``hooks``: its attention modules are named self_attn; else ``match`` names them. ``interface``: it is on
    Transformers' attention interface. ``causal``: else every token sees its whole document."""

    model: str
    config: str
    changes: dict
    hooks: bool = True
    interface: bool = True
    causal: bool = True
    match: str = ""

    def make(self, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: object) -> torch.nn.Module:
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**_SMALL, **self.changes, **changes})
        config._attn_implementation = "sdpa"
        config._experts_implementation = "eager"  # the grouped kernel has no float64
        model: Callable = getattr(transformers, self.model)
        return model(config).to(dtype)


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW, "head_dim": 8}),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", {"sliding_window": WINDOW}),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        },
        hooks=False,
        match="attn",
    ),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", {}, hooks=False, match="attention"),
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", {"head_dim": 16}),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "Olmo2Config", {}),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        {"sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "granite": Architecture("GraniteForCausalLM", "GraniteConfig", {"attention_multiplier": 0.2}),
    "phi": Architecture("PhiForCausalLM", "PhiConfig", {}),
    "stablelm": Architecture("StableLmForCausalLM", "StableLmConfig", {}),
    "glm4": Architecture("Glm4ForCausalLM", "Glm4Config", {"head_dim": 8}),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "opt": Architecture("OPTForCausalLM", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "falcon": Architecture(
        "FalconForCausalLM",
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        hooks=False,
        match="self_attention",
        interface=False,
    ),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 48,
            "attn_temperature_tuning": False,
        },
        hooks=False,  # the hooks route refuses its chunks
    ),
    "gpt_bigcode": Architecture(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
        hooks=False,
        match="attn",
    ),
    "exaone4": Architecture(
        "Exaone4ForCausalLM",
        "Exaone4Config",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "modernbert": Architecture(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        hooks=False,
        causal=False,
    ),
    "bert": Architecture(
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        hooks=False,
        causal=False,
    ),
}

FIRST_EIGHT = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "gpt_neox")


def packed_batch(lengths: tuple[int, ...] = LENGTHS, rows: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """input_ids and position_ids [rows, sum(lengths)]; row b has the lengths rotated by b."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB, (rows, sum(lengths)), generator=generator)
    positions = [torch.cat([torch.arange(n) for n in rotated(lengths, row)]) for row in range(rows)]
    return {"input_ids": input_ids, "position_ids": torch.stack(positions)}


def rotated(lengths: tuple[int, ...], by: int) -> tuple[int, ...]:
    return lengths[by:] + lengths[:by]


def each_alone(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], lengths: tuple[int, ...] = LENGTHS
) -> torch.Tensor:
    """Logits [B, S, V] of every document run by itself, put back in its place."""
    rows = []
    for row, ids in enumerate(batch["input_ids"]):
        outs = [model(input_ids=part[None]).logits for part in ids.split(list(rotated(lengths, row)))]
        rows.append(torch.cat(outs, dim=1))
    return torch.cat(rows)


def gradients(model: torch.nn.Module, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a loss that weighs every logit differently; leaves the model's own at None."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    (logits * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def worst(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(difference(one[name], two[name]) for name in one)


def difference(one: torch.Tensor, two: torch.Tensor) -> float:
    """Largest difference, as a part of the largest value of the second."""
    return float((one - two).detach().abs().max() / two.detach().abs().max().clamp_min(1e-3))
