"""The model of the demo and of the benchmark's training steps: a small Llama, or the user's own, local files only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from packed_sdpa.errors import InputError, import_extra

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Grouped-query heads of 64; small enough that sixteen steps of 4,096 tokens with a dense mask take about a minute on
# two cores, large enough that attention is most of them.
SMALL_LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_config(model: str | Path | None, vocab_size: int, seq_len: int) -> Any:
    """A transformers config. model: None for the small Llama (of ``vocab_size`` and ``seq_len`` positions), a config
    file or a folder with a config.json, which say both themselves."""
    transformers = import_extra("transformers", "demo")
    if model is None:
        config = transformers.LlamaConfig(vocab_size=vocab_size, max_position_embeddings=seq_len, **SMALL_LLAMA)
        # The defaults of LlamaConfig are ids of another vocabulary.
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    else:
        path = Path(model)
        if not path.exists():
            raise InputError(f"--model {path} does not exist; pass a config.json or a folder that holds one")
        if path.is_dir() and not (path / "config.json").exists():
            raise InputError(f"--model {path} holds no config.json; pass a folder written by save_pretrained")
        from huggingface_hub.errors import StrictDataclassError  # how configs say that their numbers do not fit

        try:
            config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, StrictDataclassError) as error:
            raise InputError(f"--model {path}: its config cannot be read ({_one_line(error)})") from error
    config.use_cache = False
    return config


def check_model(config: Any, model: str | Path | None) -> None:
    """Raises InputError when no causal language model on SDPA can be made of a config. Allocates nothing."""
    with torch.device("meta"):
        _from_config(config, torch.float32, model)


def build_model(config: Any, model: str | Path | None, dtype: torch.dtype, seed: int) -> nn.Module:
    """The model in training mode with activation checkpointing on: the folder's weights, else random by ``seed``."""
    torch.manual_seed(seed)
    if model is not None and _has_weights(Path(model)):
        transformers = import_extra("transformers", "demo")
        try:
            net = transformers.AutoModelForCausalLM.from_pretrained(
                str(model), config=config, local_files_only=True, attn_implementation="sdpa", dtype=dtype
            )
        except (OSError, ValueError) as error:
            raise InputError(f"--model {model}: its weights cannot be loaded ({_one_line(error)})") from error
    else:
        net = _from_config(config, dtype, model)
    net.train()
    net.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return net


def _from_config(config: Any, dtype: torch.dtype, model: str | Path | None) -> Any:
    transformers = import_extra("transformers", "demo")
    try:
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    except (ValueError, RuntimeError, ZeroDivisionError) as error:  # such as a negative size of a weight
        raise InputError(
            f"--model {model}: no causal language model on SDPA can be made of its config ({_one_line(error)})"
        ) from error


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(True for pattern in ("*.safetensors", "*.bin") for _ in folder.glob(pattern))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
