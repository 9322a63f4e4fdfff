"""Which backend takes an attention call, asked once per documents and kind of call."""

from __future__ import annotations

import torch
from torch import Tensor

from packed_sdpa import package_registry
from packed_sdpa.armed import ArmedDocuments
from packed_sdpa.functional import BackendReports, explain_on_tensors
from packed_sdpa.records import Choice


def choice_of(
    documents: ArmedDocuments,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    window_size: tuple[int, int],
    dropout_p: float,
) -> Choice:
    """Of a call over these documents that was taken."""
    kind = (
        query.device,
        _autocast_dtype(query.device),
        query.dtype,
        key.dtype,
        value.dtype,
        query.shape[1],
        key.shape[1],
        query.shape[3],
        value.shape[3],
        is_causal,
        window_size,
        dropout_p > 0,
        torch.are_deterministic_algorithms_enabled(),
    )
    choice = documents.choices.get(kind)
    if choice is None:
        reports = explain_on_tensors(
            query,
            key,
            value,
            documents.layout.tensors(query.device),
            is_causal=is_causal,
            window_size=window_size,
            dropout_p=dropout_p,
            backend=documents.backend,
        )
        choice = documents.choices[kind] = _choice(reports, documents.backend)
    return choice


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which operands there are cast; None where they are not."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def _choice(reports: BackendReports, asked: str) -> Choice:
    chosen = reports.chosen
    assert chosen is not None, "the call was taken"
    preferred = asked.removeprefix(package_registry.AUTO_PREFIX)
    if preferred == asked or preferred == chosen:
        return Choice(chosen)
    reasons = next(report.reasons for report in reports if report.name == preferred)
    return Choice(chosen, f"{preferred}: {'; '.join(reasons)}")
