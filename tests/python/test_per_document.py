"""The last resort: its memory and its place in the list."""

from __future__ import annotations

import pytest
import torch

import packed_sdpa
from oracle import random_inputs
from packed_sdpa import PackedLayout, packed_attention


def largest_allocation(function) -> int:
    """Bytes of the largest single tensor that function() allocates."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return max(event.self_cpu_memory_usage for event in profile.events())


def test_no_tensor_of_queries_times_keys():
    size = 4096
    ids = torch.ones(1, size, dtype=torch.int64)
    layout = PackedLayout.from_doc_ids(ids)
    query, key, value = (t.requires_grad_() for t in random_inputs(ids, torch.float32, 2, 1, head_dim=8))

    def step():
        packed_attention(query, key, value, layout, backend="per_document").sum().backward()

    assert largest_allocation(step) < size * size * 2  # of one head's scores it would be 4 bytes each


def test_last_of_those_that_auto_takes():
    names = packed_sdpa.available_backends()
    assert names[-2:] == ["per_document", "reference"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_query_blocks_of_one_document_agree_with_the_whole(dtype):
    """A document too long for one step is computed in blocks of query rows."""
    size = 1500
    ids = torch.ones(1, size, dtype=torch.int64)
    query, key, value = random_inputs(ids, dtype, 4, 2, head_dim=16)
    out = packed_attention(query, key, value, PackedLayout.from_doc_ids(ids), backend="per_document")
    right = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), right, rtol=0, atol=32 * torch.finfo(dtype).eps)
