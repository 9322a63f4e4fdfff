"""The flash_attn package's varlen function: for those who have it and ask for it by name."""

from __future__ import annotations

import torch
from torch import Tensor

from packed_sdpa.packages import PackageBackend, PackageCall, RealRows


class FlashAttnPackage(PackageBackend):
    name = "flash_attn"
    package = "flash_attn"

    def attend(self, call: PackageCall, rows: RealRows) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        left, right = call.window_size
        return flash_attn_varlen_func(
            rows.query,
            rows.key,
            rows.value,
            rows.cu_seqlens_q,
            rows.cu_seqlens_k,
            rows.max_seqlen_q,
            rows.max_seqlen_k,
            dropout_p=call.dropout_p,
            softmax_scale=call.scale,
            causal=call.is_causal,
            window_size=(left, 0 if call.is_causal else right),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
