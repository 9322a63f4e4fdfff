# ruff: noqa: E501 - table rows
"""Writes docs/models.md from the architectures that the tests run: `python models_table.py > ../../docs/models.md`."""

from __future__ import annotations

from hf_models import ARCHITECTURES, Architecture

HEAD = """# Transformers models

Every row is a tiny random model in `tests/python/test_hf_models.py` (Transformers 5.24): by each route named here its
logits and gradients on packed rows equal each document run alone in the stock model, with and without gradient
checkpointing of both kinds. This table is written by `tests/python/models_table.py`; a test compares.

| model | interface | hooks | mask that is honoured |
|---|---|---|---|
"""

TAIL = """
The interface route takes every model on Transformers' attention interface, whatever its modules are called; the hooks
route takes modules named `self_attn`, and others by `match=`. Causal models with windows keep them; an encoder sees its
whole document.

Refused, or warned about, by name:

| what | where seen | what happens |
|---|---|---|
| logit soft-capping | Gemma 2 | `attach` raises: only eager computes it |
| attention sinks | GPT-OSS | `attach` raises: only eager computes it |
| ALiBi | Bloom, MPT, Falcon with `alibi=True` | eager only, or `MaskNotHonouredError` (a bias) |
| tokens that see each other both ways inside a document (images, prefixes) | Gemma 3 with images | `MaskNotHonouredError` when such a batch comes; text is packed |
| encoder-decoder | T5, BART | runs as stock; documents in its arguments raise |
| convolution, state-space and linear-attention layers | LFM 2, Bamba, Mamba, Qwen3-Next | `attach` warns: documents leak through them |
| a vision or audio tower | LLaVA, Gemma 3, Qwen2.5-VL | left as it is |
"""


def mask(architecture: Architecture) -> str:
    if not architecture.causal:
        return "whole document" + (", window in every other layer" if "local_attention" in architecture.changes else "")
    if "attention_chunk_size" in architecture.changes:
        return "causal, chunks in some layers"
    if architecture.changes.get("sliding_window") is None:
        return "causal"
    some = "layer_types" in architecture.changes or "max_window_layers" in architecture.changes
    return "causal, sliding window in some layers" if some else "causal, sliding window"


def hooks(architecture: Architecture) -> str:
    if architecture.hooks:
        return "yes"
    if architecture.match:
        return f'with `match="{architecture.match}"`'
    return "no"


def table() -> str:
    rows = [
        f"| {architecture.model} | {'yes' if architecture.interface else 'no'} | {hooks(architecture)} | {mask(architecture)} |\n"
        for architecture in ARCHITECTURES.values()
    ]
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    print(table(), end="")
