"""Steps of tools/gpu_check that need a process of their own: ``sync`` and ``graph``."""

from __future__ import annotations

import json
import sys
import warnings

import torch
from torch.utils.checkpoint import checkpoint

import packed_sdpa
from packed_sdpa import GraphLayout, PackedLayout, packed_attention

LAYERS = 24


def inputs(batch: int, size: int, dtype: torch.dtype, heads: int = 8, kv_heads: int = 2, head_dim: int = 64):
    """query, key, value as models hold them, on the device."""
    return [
        torch.randn(batch, size, count, head_dim, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def packings() -> dict[str, torch.Tensor]:
    """Without padding, with padding told as documents, with documents that must be gathered."""
    ids = torch.arange(1, 17).repeat_interleave(128).view(2, 1024)
    padded = ids.clone()
    padded[:, 100:140] = 0
    padded[:, 1000:] = 0
    gapped = padded.clone()
    gapped[:, 200:220] = 1
    return {"plain": ids, "padded": padded, "gapped": gapped}


def syncs_of(function) -> int:
    """How often the host waited for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        function()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def check_sync() -> dict:
    """Arming costs at most one wait, none when lengths come from the host; layers and recompute none."""
    report: dict = {}
    for name, ids in packings().items():
        on_device = ids.cuda()
        torch.cuda.synchronize()

        def arm(doc_ids=on_device):
            return PackedLayout.from_doc_ids(doc_ids).tensors("cuda")

        def arm_from_host(doc_ids=ids):
            return PackedLayout.from_doc_ids(doc_ids).tensors("cuda")

        report[f"{name} arming, ids on the device"] = syncs_of(arm)
        report[f"{name} arming, ids on the host"] = syncs_of(arm_from_host)
        for dtype in (torch.bfloat16, torch.float32):
            layout = PackedLayout.from_doc_ids(ids)
            leaves = inputs(2, 1024, dtype)
            chosen = packed_sdpa.explain(*leaves, layout).chosen

            def step(leaves=leaves, layout=layout):
                query = leaves[0]
                for _ in range(LAYERS):
                    query = checkpoint(
                        lambda q, k, v: packed_attention(q, k, v, layout), query, *leaves[1:], use_reentrant=False
                    )
                torch.autograd.grad(query, leaves, torch.ones_like(query))

            step()  # kernels load lazily, which waits
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            step()
            torch.cuda.set_sync_debug_mode("default")
            report[f"{name} {LAYERS} layers by {chosen}, checkpointed"] = 0
    too_many = {name: count for name, count in report.items() if count > (1 if name.endswith("on the device") else 0)}
    assert not too_many, too_many
    return report


def check_graph() -> dict:
    """A captured forward and backward, replayed with other documents, equals the same step run eagerly."""
    size = 1024
    layout = GraphLayout(1, size, max_documents=64, max_seqlen=size, device="cuda")
    leaves = inputs(1, size, torch.bfloat16)
    grad_out = torch.randn(1, size, 8, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def step():
        out = packed_attention(*leaves, layout, backend="flash")
        return out.detach(), *torch.autograd.grad(out, leaves, grad_out)

    generator = torch.Generator().manual_seed(0)

    def documents() -> torch.Tensor:
        cuts = torch.randperm(size - 1, generator=generator)[:9].sort().values + 1
        lengths = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([size]))
        ids = torch.arange(1, 11).repeat_interleave(lengths)
        return ids.masked_fill(ids == 4, 0).view(1, -1)

    layout.refill(documents())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    worst = 0.0
    for _ in range(5):
        ids = documents()
        layout.refill(ids)
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        eager = PackedLayout.from_doc_ids(ids)
        out = packed_attention(*leaves, eager, backend="flash")
        right = (out.detach(), *torch.autograd.grad(out, leaves, grad_out))
        for got, expected in zip(replayed, right, strict=True):
            worst = max(worst, float((got.float() - expected.float()).abs().max()))
    # Backward adds up in no fixed order, so gradients may differ by rounding.
    assert worst < 0.05, worst
    out = packed_attention(*leaves, layout, backend="flash")
    try:
        layout.refill(documents())
    except RuntimeError as error:
        assert "pending" in str(error)
    else:
        raise AssertionError("a refill under a pending backward must raise")
    return {"replays": 5, "worst difference": worst}


if __name__ == "__main__":
    print(json.dumps({"sync": check_sync, "graph": check_graph}[sys.argv[1]](), indent=1))
