"""The interface route: attention and mask functions in Transformers' registries, under the name ``packed_sdpa``.

The mask function gives each layer the documents in the place of its mask, so a checkpoint's recompute, a compiled layer
or a pipeline split replays them with the call; no S x S mask is built. The attention function takes the key and value
heads as they are. A call without documents is Transformers' own ``sdpa``, mask and attention.

Everything private of Transformers that this package touches is in this file.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from packed_sdpa import _torch_private
from packed_sdpa.armed import NEVER_HOOKED, ArmedDocuments, documents_of_call, keep_documents, keep_for_functions
from packed_sdpa.arming import ARMED_BY_HAND, documents_armed_by_hand, refuse_documents_in_tracer
from packed_sdpa.choice import choice_of
from packed_sdpa.documents import ENCODER_KEYWORDS, Documents, from_doc_ids, padding_with_a_document
from packed_sdpa.functional import attention_on_tensors
from packed_sdpa.guard import arounds_of
from packed_sdpa.layout import LayoutTensors
from packed_sdpa.mask_audit import (
    MaskNotHonouredError,
    MaskRule,
    describe_pair,
    differing_pair,
    raise_or_warn,
)
from packed_sdpa.scope import ForwardScope, Ledger, current_scope

IMPLEMENTATION = "packed_sdpa"

_REFUSED_KEYWORDS = {
    "softcap": "logit soft-capping",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "head_mask": "a head mask",
    "alibi": "ALiBi",
    "position_bias": "a position bias",
    "attention_bias": "an attention bias",
    "relative_position_bias": "a relative position bias",
}


_NO_MASK = (
    "the documents in the place of an attention mask: a layer of this model computes attention itself, or makes a mask "
    "of the mask, not through Transformers' attention interface; use packed_sdpa.attach(model, route='hooks'), or "
    "detach"
)


class DocumentMask(NamedTuple):
    """What a layer is given in the place of its attention mask."""

    layout: LayoutTensors
    is_causal: bool
    window_size: tuple[int, int]
    documents: ArmedDocuments
    ledger: Ledger | None  # None: a model that uses the name without attach, whose calls nobody can read
    unattached: tuple[Tensor | None] | None = None  # the mask of a layer that has our name but is not attached

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"packed_sdpa: {name!r} was asked of {_NO_MASK}" if hasattr(Tensor, name) else name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _torch_private.in_backward():  # detached since the forward
            raise RuntimeError(
                f"packed_sdpa: {getattr(func, '__name__', func)} was given the documents in the place of an attention "
                "mask when a forward was recomputed in backward: the model was detached before; detach after backward"
            )
        raise RuntimeError(  # a TypeError of an operator would lose its text
            f"packed_sdpa: {getattr(func, '__name__', func)} was given {_NO_MASK}"
        )


class SwitchedImplementation(str):
    """The name ``packed_sdpa`` in a config; copies and pickles come out as the name that it replaced."""

    before: str | None  # what the config had; another attached model's name where models share one
    is_undone: bool

    def __new__(cls, before: str | None) -> SwitchedImplementation:
        name = super().__new__(cls, IMPLEMENTATION)
        name.before = before
        name.is_undone = False
        return name

    @property
    def original(self) -> str:
        before = self.before
        return before.original if isinstance(before, SwitchedImplementation) else before or "sdpa"

    def __reduce__(self) -> tuple:
        return str, (str(self.original),)

    def __deepcopy__(self, memo: dict) -> str:
        return str(self.original)


def register_hf_attention() -> str:
    """Registers attention and mask functions with Transformers; returns the name for ``attn_implementation``.

    Idempotent. ``attach`` calls it. A model loaded with ``attn_implementation="packed_sdpa"`` and not attached packs
    where Transformers itself finds documents (restarting position_ids, no cache) or where ``arm`` told them.

    Raises ImportError without transformers, RuntimeError when its mask functions no longer mean what we take them for.
    """
    masking, modeling, _ = _transformers()
    _check_mask_functions(masking)
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, document_mask)
    modeling.ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, document_attention)
    return IMPLEMENTATION


def _transformers() -> tuple[Any, Any, Any]:
    try:
        from transformers import masking_utils, modeling_utils
        from transformers.integrations import sdpa_attention
    except ImportError as error:
        raise ImportError(
            "packed_sdpa: the interface route needs transformers >= 5.20 (pip install 'packed-sdpa[hf]'), or use "
            f"attach(model, route='hooks'): {error}"
        ) from error
    return masking_utils, modeling_utils, sdpa_attention


# ---- The mask function -------------------------------------------------------------------------------------------


BREAKS_AT_MASKS = (
    "packed_sdpa finds the documents of the running forward where the model makes its masks; compile the layers with "
    "fullgraph=True, or the whole model without it"
)


@_torch_private.untraced(BREAKS_AT_MASKS)
def document_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> DocumentMask | Tensor | None:
    """Transformers' mask interface: the forward's documents, or what ``sdpa`` would get when there are none.

    Documents are those of the running attached forward. They are given out only for a whole packed sequence: B and S
    are theirs and no earlier tokens are cached.
    """
    masking, _, _ = _transformers()
    mask_function = mask_function if mask_function is not None else masking.causal_mask_function
    scope = current_scope()
    device = torch.device(device)
    if scope is None:
        _refuse_tracers(mask_function)
        documents = _documents_outside_attach(mask_function, attention_mask)
    else:
        documents = scope.documents
    whole = (
        documents is not None
        and documents.shape == (batch_size, q_length)
        and kv_offset == 0
        and kv_length >= q_length
        and int(q_offset) == 0
    )
    stock = functools.partial(
        masking.sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **kwargs,
    )
    if documents is None or not whole:
        return stock() if scope is None or scope.dense_mask is None else scope.dense_mask
    unattached = None
    if scope is None and isinstance(implementation(kwargs.get("config")), SwitchedImplementation):
        unattached = (stock(),)  # the config may be another model's too, for which nothing was armed
    rule, others = _read_mask_function(mask_function)
    if scope is not None and scope.sees_encoder and not rule.is_causal:
        return stock()
    whole_documents = documents
    if rule.chunk_size:
        documents = documents.in_chunks(rule.chunk_size)
    _audit(masking, scope, documents, rule, others, mask_function, device, kwargs)
    if scope is not None and scope.dense_mask is not None:
        _audit_dense_mask(scope, scope.dense_mask.to(device), whole_documents, documents, rule)
    tensors = documents.layout.tensors(device)
    if scope is not None:
        scope.gave_masks = True
    ledger = None if scope is None else scope.ledger
    return DocumentMask(tensors, rule.is_causal, rule.window_size, documents.armed, ledger, unattached)


def _refuse_tracers(mask_function: Callable) -> None:
    """A graph is recorded of a model that uses our name without ``attach``: raises when there may be documents."""
    tracer = _torch_private.tracer()
    if tracer is None:
        return
    if tracer == _torch_private.JIT_TRACE:
        raise RuntimeError(
            f"packed_sdpa: a model with attn_implementation={IMPLEMENTATION!r} is run by {tracer}, which cannot call "
            "the operators that find documents; trace it with attn_implementation='sdpa'"
        )
    told = ["position_ids"] if any(_kind(part) == _PACKED for part in _parts(mask_function)) else []
    refuse_documents_in_tracer(f"a model with attn_implementation={IMPLEMENTATION!r}", told, tracer)


_PACKED = "packed_sequence_mask_function"


def _documents_outside_attach(mask_function: Callable, attention_mask: Tensor | None) -> Documents | None:
    """Documents that Transformers itself found, for a model that uses our name without ``attach``."""
    for part in _parts(mask_function):
        if _kind(part) == _PACKED:
            ids = _closure(part)["packed_sequence_mask"] + 1
            if attention_mask is not None:
                ids = ids.masked_fill(attention_mask == 0, 0)
            return from_doc_ids(ids, "position_ids")
    if torch.compiler.is_compiling():
        return documents_armed_by_hand()
    armed = documents_of_call((), NEVER_HOOKED)  # in a recompute of the whole forward those that it ran under
    if armed is None:
        return None
    if not torch.is_grad_enabled():
        keep_for_functions(armed)
    documents = Documents(armed, ARMED_BY_HAND)
    wrong = padding_with_a_document(attention_mask, documents)
    if wrong is not None:
        raise MaskNotHonouredError(wrong)
    return documents


def _audit(
    masking: Any,
    scope: ForwardScope | None,
    documents: Documents,
    rule: MaskRule,
    others: list[str],
    function: Callable,
    device: torch.device,
    kwargs: dict,
) -> None:
    """What the model's mask has beyond the rule (``others``) is evaluated inside documents, and refused by name."""
    on_mask = scope.on_mask if scope is not None else "error"
    warned = scope.ledger.warned if scope is not None else set()
    model = type(kwargs["config"]).__name__ if "config" in kwargs else "the model"
    if others and on_mask != "ignore":

        def visible(rows: slice) -> Tensor:
            return masking.sdpa_mask(
                batch_size=documents.shape[0],
                q_length=rows.stop - rows.start,
                kv_length=documents.shape[1],
                q_offset=rows.start,
                mask_function=function,
                allow_is_causal_skip=False,
                use_vmap=kwargs.get("use_vmap", False),
                device=device,
            )

        pair = differing_pair(documents.doc_ids, rule, visible, device)
        if pair is not None:
            named = " and ".join(others)
            raise_or_warn(on_mask, f"{model} has {named}: {describe_pair(pair, rule)}", warned)


def _audit_dense_mask(
    scope: ForwardScope, mask: Tensor, documents: Documents, pieces: Documents, rule: MaskRule
) -> None:
    """The caller's own mask, which stock gives to every layer as it is."""
    assert scope.ledger.mask_audit is not None
    scope.ledger.mask_audit.look(
        "attention_mask was given dense",
        documents.armed,
        rule,
        mask,
        pieces=None if pieces is documents else pieces.armed,
        sampled_on_host=False,
    )


def _kind(function: Callable) -> str:
    """Name of the function of ``masking_utils`` that made this mask function; another's qualified name as it is."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return f"{getattr(function, '__module__', '')}.{name}"
    return name.split(".")[0]


def _closure(function: Callable) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)


def _parts(function: Callable) -> Iterator[Callable]:
    """The mask functions that a combination is made of, itself included."""
    yield function
    if _kind(function) in ("and_masks", "remap_positions_for_packed_sequence"):
        inside = _closure(function)
        for part in inside.get("mask_functions", ()) or (inside.get("mask_function"),):
            if part is not None:
                yield from _parts(part)


_NAMES = {
    "blockwise_overlay": "blocks of tokens that see each other both ways (images)",
    "or_masks": "an extra mask that lets see more (image blocks, prefixes)",
}


def _read_mask_function(function: Callable) -> tuple[MaskRule, list[str]]:
    """(the rule that the known parts make, names of the parts that the rule does not have)."""
    is_causal, left, right, chunk = False, -1, -1, 0
    others: list[str] = []
    for part in _parts(function):
        kind = _kind(part)
        if kind == "causal_mask_function":
            is_causal = True
        elif kind == "sliding_window_overlay":
            left = _narrower(left, _closure(part)["sliding_window"] - 1)
        elif kind == "sliding_window_bidirectional_overlay":
            left = _narrower(left, _closure(part)["sliding_window"])
            right = _narrower(right, _closure(part)["sliding_window"])
        elif kind == "chunked_overlay":
            chunk = _closure(part)["chunk_size"]
        elif kind == "or_masks":
            others.append(_NAMES[kind])
            inner = [_read_mask_function(part) for part in _closure(part)["mask_functions"]]
            is_causal |= any(rule.is_causal for rule, _ in inner)
            left = next((rule.window_size[0] for rule, _ in inner if rule.window_size[0] >= 0), left)
            chunk = next((rule.chunk_size for rule, _ in inner if rule.chunk_size), chunk)
        elif kind not in _TRANSPARENT:
            others.append(_NAMES.get(kind, f"a mask function {kind}"))
    return MaskRule(is_causal, (left, 0 if is_causal and left >= 0 else right), chunk), others


_TRANSPARENT = {
    "and_masks",
    "bidirectional_mask_function",
    "packed_sequence_mask_function",
    "padding_mask_function",
    "remap_positions_for_packed_sequence",
}


def _narrower(one: int, two: int) -> int:
    return two if one < 0 else min(one, two)


def _check_mask_functions(masking: Any) -> None:
    """The mask functions that are recognized by name must mean the rule that we take them for."""
    size, window = 7, 3
    places = torch.arange(size, device="cpu")
    rows, columns = places[:, None], places[None, :]
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    ids = torch.zeros(1, size, dtype=torch.int64, device="cpu")
    for function, expected in (
        (masking.causal_mask_function, MaskRule(True)),
        (masking.sliding_window_causal_mask_function(window), MaskRule(True, (window - 1, 0))),
        (masking.chunked_causal_mask_function(window, ids[0, :1]), MaskRule(True, chunk_size=window)),
        (masking.bidirectional_mask_function, MaskRule(False)),
        (masking.sliding_window_bidirectional_mask_function(window), MaskRule(False, (window, window))),
        (masking.remap_positions_for_packed_sequence(masking.causal_mask_function, ids), MaskRule(True)),
    ):
        rule, others = _read_mask_function(function)
        same = rule == expected and not others
        if same and _kind(function) != "remap_positions_for_packed_sequence":
            seen = function(zero, zero, rows, columns).expand(size, size)
            left, right = rule.window_size
            want = (columns <= rows) | (not rule.is_causal)
            if left >= 0:
                want = want & (rows - columns <= left)
            if right >= 0:
                want = want & (columns - rows <= right)
            if rule.chunk_size:
                want = want & (columns // rule.chunk_size == rows // rule.chunk_size)
            same = bool((seen == want).all())
        if not same:
            raise RuntimeError(
                f"packed_sdpa: transformers' mask function {_kind(function)} does not mean {expected} in this version; "
                "install transformers 5.20 to 5.24, or use attach(model, route='hooks')"
            )


# ---- The attention function --------------------------------------------------------------------------------------


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DocumentMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface. query ``[B, Hq, S, D]``, key, value ``[B, Hkv, S, D]`` -> ``[B, S, Hq, Dv]``.

    With a :class:`DocumentMask` the packed kernel; else Transformers' ``sdpa``. Raises NotImplementedError for what the
    kernel does not have (soft-capping, sinks, head masks, biases).
    """
    if isinstance(attention_mask, DocumentMask) and attention_mask.unattached is not None and not _is_attached(module):
        (attention_mask,) = attention_mask.unattached
    if not isinstance(attention_mask, DocumentMask):
        if not torch.compiler.is_compiling():
            _count_passed(module, query, key)
        _, _, sdpa = _transformers()
        return sdpa.sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if is_cross_attention(module):
        raise RuntimeError(
            f"packed_sdpa: {type(module).__name__} looks at an encoder's tokens, and was handed the documents as its "
            f"mask; give the encoder's output to the model as one of {', '.join(ENCODER_KEYWORDS)}, or use "
            "attach(model, route='hooks')"
        )
    for name, what in _REFUSED_KEYWORDS.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"packed_sdpa: {type(module).__name__} uses {what} ({name}), which the packed kernel does not have; "
                "run it without packing (detach), or with attn_implementation='eager'"
            )
    rows = query.shape[2]
    if key.shape[2] > rows:  # an empty static cache: rows behind the first S are not filled yet
        key, value = key[:, :, :rows], value[:, :, :rows]
    out, _ = attention_on_tensors(
        query,
        key,
        value,
        attention_mask.layout,
        is_causal=attention_mask.is_causal,
        window_size=attention_mask.window_size,
        scale=scaling,
        dropout_p=dropout,
        backend=attention_mask.documents.backend,
    )
    if not torch.compiler.is_compiling():
        if attention_mask.ledger is None:  # no outer forward that would
            keep_documents(out, attention_mask.documents)
        _count_taken(module, query, key, value, attention_mask, dropout)
    return out.transpose(1, 2), None


def is_cross_attention(module: nn.Module) -> bool:
    """Its keys come from an encoder."""
    name = type(module).__name__.lower().replace("_", "")
    return getattr(module, "is_cross_attention", False) is True or "crossattention" in name


def _is_attached(module: nn.Module) -> bool:
    return any(getattr(around, "attachment", None) is not None for around in arounds_of(module))


def _count_taken(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: DocumentMask, dropout: float
) -> None:
    if mask.ledger is None:
        return
    if module not in mask.ledger.records and not _is_attached(module):
        _warn_of_stranger(module, mask.ledger)
    choice = choice_of(
        mask.documents,
        query,
        key,
        value,
        is_causal=mask.is_causal,
        window_size=mask.window_size,
        dropout_p=dropout,
    )
    mask.ledger.record(module).count_taken(choice, mask.window_size)


def _warn_of_stranger(module: nn.Module, ledger: Ledger) -> None:
    """Another model that shares the attached one's config has our name too, and was called within its forward."""
    message = (
        f"{type(module).__name__} was not there when attach was called, and ran in a packed forward: it is packed like "
        "the model's own; give another model a config of its own (copy.deepcopy), or attach after adding a layer"
    )
    if message not in ledger.warned:
        ledger.warned.add(message)
        warnings.warn(f"packed_sdpa: {message}", UserWarning, stacklevel=2)


def _count_passed(module: nn.Module, query: Tensor, key: Tensor) -> None:
    scope = current_scope()
    if scope is None:
        return
    documents = scope.documents
    if documents is None:
        reason = "no documents in this forward"
    elif is_cross_attention(module):
        reason = "it looks at an encoder's tokens, all of them whatever their document"
    elif (query.shape[0], query.shape[2]) != documents.shape:
        reason = (
            f"query of B {query.shape[0]}, S {query.shape[2]} is not the documents' B {documents.shape[0]}, "
            f"S {documents.shape[1]}"
        )
    elif key.shape[2] != query.shape[2]:
        reason = f"{key.shape[2]} key rows for {query.shape[2]} query rows: tokens of an earlier forward are cached"
    else:
        reason = "the model gave this layer no mask of the interface"
    scope.ledger.record(module).count_passed(reason)


# ---- What attach asks about a model ------------------------------------------------------------------------------


def is_hf_model(module: nn.Module) -> bool:
    """Whether the module is a Transformers model. Never imports transformers by itself."""
    return any(
        base.__module__ == "transformers.modeling_utils" and base.__name__ == "PreTrainedModel"
        for base in type(module).__mro__
    )


def uses_interface(module: nn.Module) -> bool:
    """Whether the module's own forward calls the attention function of Transformers' interface."""
    if isinstance(module, torch.jit.ScriptModule):  # no forward of Python's
        return False
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def takes_tokens(model: nn.Module) -> bool:
    """Whether a Transformers model is one over text: its main input is input_ids (a vision tower's is not)."""
    return getattr(model, "main_input_name", "input_ids") == "input_ids"


def is_encoder_decoder(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def supports_sdpa(model: nn.Module) -> bool:
    return bool(getattr(model, "_supports_sdpa", False))


def implementation(config: Any) -> str | None:
    """The name of the attention implementation that a config asks for."""
    return getattr(config, "_attn_implementation", None)


def why_no_sdpa(model: nn.Module, attention: nn.Module) -> str:
    """What of a model's attention sdpa does not have, as far as its config and its attention module tell."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"it soft-caps its logits, attn_logit_softcapping={config.attn_logit_softcapping}"
    if isinstance(getattr(attention, "sinks", None), Tensor):
        return "it has attention sinks"
    if getattr(config, "alibi", False):
        return "it has ALiBi"
    return "it has attention that only eager computes"


def window_of(attention: nn.Module) -> tuple[int, int] | None:
    """window_size of a Transformers attention module that is hooked; None for another's, whose attributes tell.

    The layer's type in the config comes first: some models set ``sliding_window`` on layers of full attention too.
    """
    config: Any = getattr(attention, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return None
    window = getattr(config, "sliding_window", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(attention, "layer_idx", None)
    if kinds is not None and layer is not None:
        window = window if kinds[layer] == "sliding_attention" else None
    elif hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    return window_of_width(window)


def window_of_width(sliding_window: object) -> tuple[int, int]:
    """window_size of Transformers' ``sliding_window = W``, which counts the row itself; None or 0: no window."""
    return (sliding_window - 1, 0) if isinstance(sliding_window, int) and sliding_window > 0 else (-1, -1)


def switch_implementation(config: Any) -> Callable[[], None]:
    """Sets one config (not its sub-configs) to our name; returns what undoes it."""
    switched = SwitchedImplementation(config._attn_implementation_internal)
    config._attn_implementation_internal = switched

    def undo() -> None:
        switched.is_undone = True
        while True:  # models that share the config may be detached in any order
            now = config._attn_implementation_internal
            if not isinstance(now, SwitchedImplementation) or not now.is_undone:
                return
            config._attn_implementation_internal = now.before

    return undo
