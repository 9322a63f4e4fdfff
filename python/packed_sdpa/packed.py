"""The seed API: hooks that put packed attention in the place of SDPA, driven by armed document ids."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packed_sdpa import _torch_private, interception
from packed_sdpa.armed import NEVER_HOOKED, ArmedDocuments, documents_of_call, keep_for_functions, keep_for_recompute
from packed_sdpa.choice import choice_of
from packed_sdpa.functional import attention_on_tensors
from packed_sdpa.hooks import hook_self_attention
from packed_sdpa.interception import Frame
from packed_sdpa.state import _PACKED_STATE, configured_attn_backend, dispatcher_preference

__all__ = [
    "_PACKED_STATE",
    "_packed_varlen_sdpa",
    "attach_cp1_packed_varlen_hooks",
    "cp1_packed_varlen_backend",
    "disable_cp1_packed_varlen",
    "enable_cp1_packed_varlen",
]

BREAKS_AT_THE_CALL = (
    "_packed_varlen_sdpa finds the armed documents when it runs, so the graph breaks there; compile without "
    "fullgraph=True, or call packed_attention(..., layout)"
)

# Why a call was passed through to stock.
NOT_CAUSAL = "the module says is_causal = False"
UNARMED = "no documents are armed"
NOT_4D = "query, key and value are not all plain 4-D tensors [B, H, S, D]"
OTHER_BATCH = "the batch size of query, key or value is not that of the armed doc_ids"
OTHER_LENGTH = "the length of query, key or value is not that of the armed doc_ids"
REFUSED = "scaled_dot_product_attention itself refuses these operands"


def enable_cp1_packed_varlen(doc_ids: Tensor, backend: str) -> None:
    """Arms document ids until the next arming or disarming, recompute in backward included.

    doc_ids: integer or bool ``[1, S]``, ``[S]`` or ``[B, S]``, copied; 0 is padding. backend: ``"flash"`` or ``"te"``,
    a preference among the CUDA kernels; CPU tensors use the CPU kernel. Raises ValueError or TypeError, before
    anything changes.
    """
    _PACKED_STATE.set(ArmedDocuments(doc_ids, dispatcher_preference(backend)))


def disable_cp1_packed_varlen() -> None:
    """Disarms; called before the next outer forward."""
    _PACKED_STATE.set(None)


def cp1_packed_varlen_backend() -> str | None:
    """The configured backend, ``"flash"`` or ``"te"``; None when configured ``"dense"``, which means: do not arm."""
    backend = configured_attn_backend()
    return None if backend == "dense" else backend


def attach_cp1_packed_varlen_hooks(model: nn.Module) -> None:
    """Hooks every module whose qualified name ends with ``self_attn``, the inner one of checkpoint-wrapped modules.

    While such a module runs, and only in that thread, ``F.scaled_dot_product_attention`` is `_packed_varlen_sdpa`.
    Calling it again changes nothing. A model without such a module: a warning.
    """
    hook_self_attention(model)


def _packed_varlen_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **kwargs: Any,
) -> Tensor:
    """``F.scaled_dot_product_attention``, but causal within each armed document.

    query ``[B, Hq, S, D]``, key ``[B, Hkv, S, D]``, value ``[B, Hkv, S, Dv]`` -> ``[B, Hq, S, Dv]``. Intervenes when B
    and S of all three are those of the armed doc_ids; attn_mask and is_causal are not used then. Every other call goes
    to what ``F.scaled_dot_product_attention`` is outside of hooked modules, with the arguments it got but ``kwargs``.
    """
    if torch.compiler.is_dynamo_compiling():
        return _untraced(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    frame = interception.current_frame()
    if frame is not None:
        interception.check_greenlet(frame.greenlet)
        frame.calls += 1
    documents: ArmedDocuments | None = None
    reason = _reason_without_documents(frame, query, key, value)
    if reason is None:
        hook = None if frame is None else frame.hook
        documents = documents_of_call((), NEVER_HOOKED) if hook is None else hook.documents()
        reason = UNARMED if documents is None else _mismatch(documents, query, key, value)
    if reason is None:
        matched = _match_heads(query, key, value, enable_gqa)
        if matched is None or not _one_kind(query, key, value):
            reason = REFUSED
    if reason is None and frame is not None and frame.hook.audit is not None:
        assert documents is not None
        reason = frame.hook.audit(documents, frame.hook.window(), attn_mask, is_causal)
    if reason is not None:
        output = _pass_through(
            frame, reason, documents, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        if documents is not None:
            _keep(frame, output, documents)
        return output

    assert documents is not None and matched is not None
    window = (-1, -1) if frame is None else frame.hook.window()
    output, _ = attention_on_tensors(
        *matched,
        documents.layout.tensors(query.device),
        window_size=window,
        scale=scale,
        dropout_p=dropout_p,
        backend=documents.backend,
    )
    _keep(frame, output, documents)
    if frame is not None:
        choice = choice_of(documents, *matched, is_causal=True, window_size=window, dropout_p=dropout_p)
        frame.hook.record.count_taken(choice, window)
    return output


def _keep(frame: Frame | None, output: Tensor, documents: ArmedDocuments) -> None:
    kept = keep_for_recompute(output, documents)
    if frame is not None:
        frame.hook.may_repeat(documents, kept)


@_torch_private.untraced(BREAKS_AT_THE_CALL)
def _untraced(*args: Any) -> Tensor:
    return _this_function(*args)


_this_function = _packed_varlen_sdpa  # by another name: who called it is not known here (called_as_sdpa)


def _packed_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``aten::_native_multi_head_attention`` within a hooked module: self-attention of ``[B, S, E]``, without grad."""
    if not need_weights and not query.is_nested and query is key and key is value:
        heads = F.linear(query, qkv_weight, qkv_bias).unflatten(-1, (3, num_head, -1)).permute(2, 0, 3, 1, 4)
        frame = interception.current_frame()
        assert frame is not None
        interception.check_greenlet(frame.greenlet)
        causal = frame.hook.is_causal()
        documents = frame.hook.documents() if causal else None
        reason = NOT_CAUSAL if not causal else UNARMED if documents is None else _mismatch(documents, *heads)
        if reason is None:
            out = _packed_varlen_sdpa(heads[0], heads[1], heads[2], _visible(mask, mask_type))
            return F.linear(out.transpose(1, 2).flatten(-2), proj_weight, proj_bias), None
        frame.calls += 1
        _count_passed(frame, reason, documents, *heads)
        if documents is not None:
            frame.hook.may_repeat(documents, keep_for_functions(documents))
    return interception.without_catching(
        _torch_private.NATIVE_MULTI_HEAD_ATTENTION,
        *(query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask),
        *(need_weights, average_attn_weights, mask_type),
    )


def _visible(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """The fused operator's mask, true or not 0 where a key is hidden, as SDPA's. mask_type 1: of keys, ``[B, S]``."""
    if mask is None:
        return None
    visible = ~mask.bool()
    return visible[:, None, None] if mask_type == 1 else visible


interception.install(_packed_varlen_sdpa, _packed_multi_head_attention)


def _reason_without_documents(frame: Frame | None, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why this call is not ours whatever is armed."""
    if frame is None:
        if interception.called_as_sdpa(sys._getframe(2)):
            return UNARMED
    elif not frame.hook.is_causal():
        return NOT_CAUSAL
    for operand in (query, key, value):
        if operand.dim() != 4 or operand.is_nested:
            return NOT_4D
    return None


def _mismatch(documents: ArmedDocuments, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    batch, rows = documents.batch, documents.rows
    for operand in (query, key, value):
        if operand.shape[0] != batch:
            return OTHER_BATCH
        if operand.shape[2] != rows:
            return OTHER_LENGTH
    return None


def _match_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """Operands with the head counts that the kernels take; None where stock refuses them."""
    heads = (query.shape[1], key.shape[1], value.shape[1])
    if heads[0] == heads[1] == heads[2]:
        return query, key, value
    if enable_gqa:
        if 0 in heads or heads[0] % heads[1] or heads[0] % heads[2]:
            return None
        if heads[1] != heads[2]:
            key, value = (part.repeat_interleave(heads[0] // part.shape[1], 1) for part in (key, value))
        return query, key, value
    most = max(heads)
    if any(count not in (1, most) for count in heads):
        return None
    if heads[0] != most:
        query = query.expand(-1, most, -1, -1)
    if heads[1] != heads[2]:
        key, value = (part.expand(-1, most, -1, -1) for part in (key, value))
    return query, key, value


def _one_kind(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if query.device != key.device or query.device != value.device:
        return False
    if query.dtype == key.dtype == value.dtype:
        return query.dtype in _DTYPES
    device = query.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


def _pass_through(
    frame: Frame | None,
    reason: str,
    documents: ArmedDocuments | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> Tensor:
    attn_mask, dropout_p, is_causal, scale, enable_gqa = rest
    if frame is not None:
        _count_passed(frame, reason, documents, query, key, value)
    output = interception.call_outside(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if reason == REFUSED:  # stock took what it has no mask for
        raise TypeError(
            "query, key and value must be float32, float64, bfloat16 or float16, of one dtype and on one device, to be "
            f"packed; got {_kinds(query, key, value)}; convert them, or disarm"
        )
    return output


def _count_passed(
    frame: Frame, reason: str, documents: ArmedDocuments | None, query: Tensor, key: Tensor, value: Tensor
) -> None:
    frame.hook.record.count_passed(reason)
    if documents is not None:
        frame.hook.passed_while_armed(reason, _sizes(documents, query, key, value))


def _kinds(*operands: Tensor) -> str:
    return ", ".join(f"{operand.dtype} {list(operand.shape)} on {operand.device}" for operand in operands)


def _sizes(documents: ArmedDocuments, query: Tensor, key: Tensor, value: Tensor) -> str:
    return (
        f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}, "
        f"doc_ids [{documents.batch}, {documents.rows}]"
    )
