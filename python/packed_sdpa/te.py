"""TransformerEngine's DotProductAttention on packed rows (``qkv_format="thd"``), each document causal by itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from packed_sdpa.packages import PackageBackend, PackageCall, RealRows


@functools.lru_cache(maxsize=64)
def _attention_module(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    mask_type: str,
    window_size: tuple[int, int],
    deterministic: bool,
) -> Any:
    """The module for a shape. It has no parameters and keeps nothing of a call.

    deterministic: of torch, now; the module reads it when it is made, and stays so.
    """
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        num_attention_heads=num_heads,
        kv_channels=head_dim,
        num_gqa_groups=num_kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type=mask_type,
        window_size=window_size,
        softmax_scale=scale,
    )


class TransformerEngine(PackageBackend):
    name = "te"
    package = "transformer_engine"

    def unsupported_reasons(self, call: PackageCall) -> list[str]:
        reasons = super().unsupported_reasons(call)
        if call.dropout_p > 0.0:
            reasons.append(f"it is used without dropout only (dropout_p {call.dropout_p})")
        return reasons

    def attend(self, call: PackageCall, rows: RealRows) -> Tensor:
        # Bottom-right aligned as ours; where counts are equal it is the same as plain causal.
        mask_type = "padding_causal_bottom_right" if call.is_causal else "padding"
        left, right = call.window_size
        module = _attention_module(
            call.query.shape[1],
            call.key.shape[1],
            call.query.shape[-1],
            call.scale,
            mask_type,
            (left, 0 if call.is_causal else right),
            torch.are_deterministic_algorithms_enabled(),
        )
        out = module(
            rows.query,
            rows.key,
            rows.value,
            qkv_format="thd",
            attn_mask_type=mask_type,
            cu_seqlens_q=rows.cu_seqlens_q,
            cu_seqlens_kv=rows.cu_seqlens_k,
            max_seqlen_q=rows.max_seqlen_q,
            max_seqlen_kv=rows.max_seqlen_k,
        )
        return out.view(rows.query.shape)
