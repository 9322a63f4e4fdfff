"""The thread-shared armed state, and the configuration of the packed path."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from packed_sdpa.armed import ARMED_IN_CONTEXT, ArmedDocuments, documents_with
from packed_sdpa.functional import available_backends


class _Token:
    """What `_ThreadSharedVar.set` returns: undoes that one set, once, in the thread that called it."""

    __slots__ = ("_core", "_variable", "context_before")

    def __init__(self, core: Any, variable: _ThreadSharedVar) -> None:
        self._core = core
        self._variable = variable
        self.context_before: int | None = None

    def __del__(self) -> None:
        self._core = None
        self._variable._drop_released()


class _ThreadSharedVar:
    """A variable that every thread sees: one that set a value itself sees its own, one that never did the latest.

    ``get()`` is None when nothing is set. The slots live in C++; a value that no slot and no token refers to is freed.
    """

    _is_armed_state = False

    def __init__(self) -> None:
        self._values: dict[int, object] = {}
        self._handles = itertools.count(1)
        self._variable = torch.classes.packed_sdpa.SharedVariable(self._is_armed_state)

    def get(self) -> Any:
        while True:
            handle = self._variable.get()
            if handle == 0:
                return None
            if handle < 0:  # documents that were armed in C++
                value: object = documents_with(-handle)
            else:
                value = self._values.get(handle)
            if value is not None:  # else another thread has set another one since
                return value

    def set(self, value: Any) -> _Token:
        handle = 0 if value is None else next(self._handles)
        if value is not None:
            self._values[handle] = value
        token = _Token(self._variable.set(handle, self._documents_id(value)), self)
        self._drop_released()
        return token

    def reset(self, token: _Token) -> None:
        """Puts back what was there before the ``set`` that returned ``token``.

        Raises ValueError for another variable's token or another thread's, RuntimeError for one that was used before.
        """
        if not isinstance(token, _Token):
            raise TypeError(f"token must be what set() returned, got {type(token).__name__}")
        if token._variable is not self:
            raise ValueError("token was made by another variable; give the one that this variable's set() returned")
        self._variable.reset(token._core)
        self._drop_released()

    def _documents_id(self, value: object) -> int:
        return 0

    def _drop_released(self) -> None:
        for handle in self._variable.take_released():
            self._values.pop(handle, None)


class _ArmedState(_ThreadSharedVar):
    """The one armed state of the process, shared with C++. Values: ArmedDocuments, (doc_ids, backend), or None."""

    _is_armed_state = True

    def set(self, value: Any) -> _Token:
        if isinstance(value, (tuple, list)) and len(value) == 2:
            value = ArmedDocuments(value[0], dispatcher_preference(value[1]))
        if value is not None and not isinstance(value, ArmedDocuments):
            raise TypeError(
                f"the armed state holds ArmedDocuments, (doc_ids, backend) or None, got {type(value).__name__}; "
                "arm with enable_cp1_packed_varlen(doc_ids, backend)"
            )
        token = super().set(value)
        token.context_before = ARMED_IN_CONTEXT.get()
        ARMED_IN_CONTEXT.set(self._documents_id(value))
        return token

    def reset(self, token: _Token) -> None:
        super().reset(token)
        ARMED_IN_CONTEXT.set(token.context_before)

    def _documents_id(self, value: object) -> int:
        return value.id if isinstance(value, ArmedDocuments) else 0


_PACKED_STATE = _ArmedState()


_DEFAULT_NAMES = ("", "auto", "default")
_ATTN_BACKENDS = {
    "flash": ("flash", "fa", "fa2", "fa3", "flash_attn", "flash_attention", "flash_attn_2", "flash_attention_2"),
    "te": ("te", "transformer_engine", "transformerengine"),
    "dense": ("dense", "sdpa", "dense_sdpa"),
}
_KV_EXCHANGES = {
    "all_gather": ("all_gather", "allgather"),
    "halo": ("halo",),
    "all_to_all": ("all_to_all", "alltoall"),
}


def _normalize(argument: str, value: object, names: dict[str, tuple[str, ...]], default: str) -> str:
    if value is None:
        return default
    if isinstance(value, str):
        spelled = value.strip().lower().replace("-", "_").replace(" ", "_")
        if spelled in _DEFAULT_NAMES:
            return default
        for name, synonyms in names.items():
            if spelled in synonyms:
                return name
    raise ValueError(
        f"{argument} must be one of {', '.join(names)} (None, '', 'auto', 'default': {default}), got {value!r}; "
        "give one of these names"
    )


def normalize_attn_backend(attn_backend: str | None) -> str:
    """``"flash"`` (default), ``"te"`` or ``"dense"``, from any of their usual spellings. ValueError for others."""
    return _normalize("attn_backend", attn_backend, _ATTN_BACKENDS, "flash")


def normalize_kv_exchange(kv_exchange: str | None) -> str:
    """``"all_gather"`` (default), ``"halo"`` or ``"all_to_all"``. ValueError for others."""
    return _normalize("kv_exchange", kv_exchange, _KV_EXCHANGES, "all_gather")


_UNCHANGED: Any = object()


class _Configuration:
    attn_backend = "flash"
    kv_exchange = "all_gather"


_configuration = _Configuration()


def configure_cp_varlen(attn_backend: str | None = _UNCHANGED, kv_exchange: str | None = _UNCHANGED) -> None:
    """Sets what models ask for by ``cp1_packed_varlen_backend()``; an argument that is not given stays as it is.

    attn_backend: ``flash``, ``te``, or ``dense`` (= models do not arm). kv_exchange: how context-parallel ranks
    exchange keys and values. None, ``""``, ``"auto"`` and ``"default"`` mean the default. ValueError for other names.
    """
    backend = _configuration.attn_backend if attn_backend is _UNCHANGED else normalize_attn_backend(attn_backend)
    exchange = _configuration.kv_exchange if kv_exchange is _UNCHANGED else normalize_kv_exchange(kv_exchange)
    _configuration.attn_backend = backend
    _configuration.kv_exchange = exchange


def configured_attn_backend() -> str:
    return _configuration.attn_backend


def configured_kv_exchange() -> str:
    return _configuration.kv_exchange


def dispatcher_preference(backend: str | None) -> str:
    """The dispatcher's ``auto:NAME`` for a preference of the seed API (``flash``, ``te``); ValueError for others."""
    name = _normalize("backend", backend, _ATTN_BACKENDS, "flash")
    if name == "dense":
        raise ValueError(f"backend must be flash or te, got {backend!r}; to run dense, do not arm")
    return f"auto:{name}" if name in available_backends() else "auto"
