"""One attached model: what is around its outer forwards and its attention modules."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from packed_sdpa import _torch_private, hf
from packed_sdpa import packed as _installs_what_hooked_modules_call  # noqa: F401
from packed_sdpa._torch_private import JIT_TRACE
from packed_sdpa.armed import (
    NEVER_HOOKED,
    UNSUPPORTED_JIT_TRACE,
    UNSUPPORTED_TRANSFORM,
    ArmedDocuments,
    documents_of_call,
    keep_documents,
    keep_for_functions,
)
from packed_sdpa.arming import ARMED_BY_HAND, documents_armed_by_hand, refuse_documents_in_tracer
from packed_sdpa.documents import (
    ENCODER_KEYWORDS,
    FOREIGN_KEYWORDS,
    OWN_KEYWORDS,
    SOURCE_KEYWORDS,
    Documents,
    check_keywords,
    find_documents,
    found_or_armed,
    is_indexed_mask,
    padding_with_a_document,
    sources_on_host,
)
from packed_sdpa.forward_parameters import forward_parameters
from packed_sdpa.guard import add_around, arounds_of, remove_around
from packed_sdpa.hooks import BREAKS_AT_ATTENTION, forward_scope, hook_attention, new_attachment, run_scoped
from packed_sdpa.interception import check_greenlet
from packed_sdpa.mask_audit import DenseMaskAudit, raise_or_warn
from packed_sdpa.match import Match
from packed_sdpa.model_survey import Survey
from packed_sdpa.records import ModuleRecord
from packed_sdpa.repeats import Lingering, check_repeat, note_forward, notes_for
from packed_sdpa.scope import ForwardScope, Ledger, is_within_itself, leave_module, pop_scope, push_scope, scope_of

BREAKS_AT_OUTER = (
    "packed_sdpa reads the documents of each forward outside of the graph; compile the layers with fullgraph=True, or "
    "the whole model without it"
)

IN_ANOTHER_THREAD = (
    "it runs in a thread that began no forward of the model, while another thread's has documents; run it in that "
    "forward's thread, or arm the documents (packed_sdpa.arm)"
)
RAN_NONE = (
    "none had run when the forward returned, with documents (a generator, or layers run by other threads?); attach the "
    "part that runs them, or arm the documents (packed_sdpa.arm) until they have run"
)


def _documents_armed_here() -> Documents | None:
    """Those armed by hand; in a recompute those under which its forward ran."""
    armed = documents_of_call((), NEVER_HOOKED)
    return None if armed is None else Documents(armed, ARMED_BY_HAND)


class NotTakenError(RuntimeError):
    """strict=True: an attention module ran in a packed forward and none of its calls was taken."""


class Attachment:
    """What ``attach`` did to one model. ``handles`` counts the handles on it that are not detached."""

    def __init__(
        self,
        model: nn.Module,
        found: Survey,
        documents: Any,
        strict: bool,
        on_mask: str,
        asked_route: str = "auto",
        match: Match | None = None,
    ) -> None:
        self.model = weakref.ref(model)
        self.found = found
        self.route = found.route
        self.asked_route = asked_route  # one of ROUTES; route is what came of it
        self.match = match
        self.documents = documents
        self.strict = strict
        self.on_mask = on_mask
        self.enabled = True
        self.handles = 0
        self.ledger = Ledger()
        self.number = new_attachment()
        self.mask_audit = self.ledger.mask_audit = DenseMaskAudit(on_mask, self.ledger.warned)
        self._undo: list[Callable[[], None]] = []
        self._outer: list[tuple[nn.Module, _AroundOuter]] = []
        self.lingering = Lingering()  # notes of packed forwards are what may ask for it
        self._run_scoped = torch.compiler.disable(run_scoped, recursive=False, reason=BREAKS_AT_OUTER)
        self._parameters = {module: forward_parameters(module) for module in found.outer}
        for name, module in (*found.interface, *found.hooks):
            self.ledger.records[module] = ModuleRecord(name)

    def apply(self) -> None:
        """Changes the model; when anything fails, or is interrupted, the model is as it was before."""
        done = False
        try:
            if self.found.interface:
                hf.register_hf_attention()
            for config in self.found.configs:
                self._undo.append(hf.switch_implementation(config))
            outer = torch.compiler.disable(self._outer_forward, recursive=False, reason=BREAKS_AT_OUTER)
            for module in self.found.outer:
                around = _AroundOuter(module, self, outer)
                self._outer.append((module, around))
                add_around(module, around)
            for _, module in self.found.interface:
                self._put_around(module, _AroundAttention(module, self))
            for _, module in self.found.hooks:
                self._put_around(module, _AroundHooked(module, self))
                window = hf.window_of(module)
                hook = hook_attention(
                    module,
                    self.ledger.records[module],
                    attachment=self.number,
                    window_size=window,
                    audit=functools.partial(self.mask_audit, kinds=set()),
                )
                self._undo.append(hook)
            done = True
        finally:
            if not done:
                self.undo()

    def _put_around(self, module: nn.Module, around: _AroundAttention) -> None:
        self._undo.append(lambda: remove_around(module, around))
        add_around(module, around)

    def undo(self) -> None:
        """Takes everything off the model; what is around its outer forwards goes with the last graph that may repeat
        one, since the interface leaves nothing in the layers that could tell."""
        while self._undo:
            self._undo.pop()()
        self.lingering.end(self._remove_outer)
        if not self.lingering.stays:
            return
        for module, mine in self._outer:
            for around in arounds_of(module):
                if isinstance(around, _AroundOuter) and around is not mine:
                    self._stand_for(around.attachment, module)

    def _stand_for(self, other: Attachment, module: nn.Module) -> None:
        """An attachment that ended before and stays: its part around one outer module goes."""
        if other.lingering.has_ended and other.lingering.stays:
            self.lingering.take_over(other.lingering)
            other._remove_outer(module)

    def _remove_outer(self, only: nn.Module | None = None) -> None:
        for module, around in list(self._outer):
            if only is None or module is only:
                self._outer.remove((module, around))
                remove_around(module, around)
                self.lingering.is_off(module)

    # ---- around the outer forward

    def _outer_forward(
        self, module: nn.Module, way: str, proceed: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """``way``: by which of its two methods the module runs, ``__call__`` (within which is ``forward``)."""
        if self.enabled:
            prepared = self._prepare(module, way, args, kwargs)
            if prepared is None:
                try:
                    return proceed(*args, **kwargs)
                finally:
                    leave_module(self.ledger)
            scope, args, kwargs = prepared
        else:  # a scope without documents hides those that are armed by hand; its ledger is read by nobody
            scope = ForwardScope(Ledger(), None, frozenset(), self.on_mask, None)
        scope.inside.append((module, way))
        documents = scope.documents
        armed = None if documents is None else documents.armed
        noted = self._noted(armed)
        try:
            try:
                push_scope(scope)
                self._enter(noted, scope, module)
                result = self._run(armed, proceed, args, kwargs)
            finally:
                self._leave(noted, scope)
        finally:
            self._leave(noted, scope)  # once more, should an interrupt have cut the first one short
        if documents is not None:
            if noted is not None:
                self._keep(result, documents)
            self._check_taken(scope)
        return result

    @_torch_private.untraced(BREAKS_AT_OUTER)
    def _noted(self, armed: ArmedDocuments | None) -> forward_scope | None:
        """The note of which forward ran under which documents; the hooks route makes its own (`run_scoped`)."""
        if self.found.hooks or _torch_private.tracer() is not None or _torch_private.in_func_transform():
            return None
        return forward_scope(armed, self.number)

    @_torch_private.untraced(BREAKS_AT_OUTER)
    def _enter(self, noted: forward_scope | None, scope: ForwardScope, module: nn.Module) -> None:
        armed = None
        if scope.documents is not None:
            scope.ledger.packed.add(scope)
            armed = scope.documents.armed
        are_arguments = self.enabled and self._are_arguments(scope.documents)
        if _torch_private.in_backward():
            check_repeat(module, armed)
            if armed is not None:
                self._refuse_to_begin(module)
        if not torch.is_grad_enabled() and not _torch_private.in_func_transform():
            self._note(module, armed)
        if noted is None:
            return
        noted.__enter__()
        if _torch_private.in_backward() and not are_arguments:
            # Raises when they are not those of the forward.
            documents_of_call((self.number,), self.lingering.first.began)

    def _refuse_to_begin(self, module: nn.Module) -> None:
        """In a backward, with documents: raises when the forward that is recomputed ran while nothing was attached."""
        if all(entry.ran_outside_all(module) for entry in _lingering_on(module)):
            raise RuntimeError(
                f"packed_sdpa: a forward of {type(module).__name__} that ran while it was not attached is "
                "recomputed in backward while it is; detach, or attach only after that backward"
            )

    def _note(self, module: nn.Module, documents: ArmedDocuments | None) -> None:
        note, everywhere = note_forward(module, documents)
        if note is not None and documents is not None and self.found.interface:
            self.lingering.add(note)
            if not everywhere:
                self.lingering.cannot_follow()

    @_torch_private.untraced(BREAKS_AT_OUTER)
    def refuse_to_repeat(self, module: nn.Module) -> None:
        """Detached: raises when a packed forward of this module is recomputed, which would run unpacked."""
        if attachment_of(module) is not None:
            return
        if not torch.is_grad_enabled():
            note_forward(module, None)
            self.lingering.leaves_alone()
        if not _torch_private.in_backward():
            return
        notes = notes_for(module)
        if any(self.lingering.may_ask(note) for note in notes) or (
            self.lingering.stays and not notes and not self.lingering.ran_outside()
        ):
            raise RuntimeError(
                f"packed_sdpa: a forward of {type(module).__name__} is recomputed in backward after the model was "
                "detached, and it would not find the documents under which it ran; detach after backward"
            )

    def _are_arguments(self, documents: Documents | None) -> bool:
        """They came with the forward's arguments, so a recompute of the whole forward is given them again."""
        return not callable(self.documents) and (documents is None or documents.source != ARMED_BY_HAND)

    @_torch_private.untraced(BREAKS_AT_OUTER)
    def _keep(self, output: Any, documents: Documents) -> None:
        """Keeps documents for a recompute of the whole forward."""
        if not self._are_arguments(documents):
            keep_documents(output, documents.armed)
        if not torch.is_grad_enabled():
            keep_for_functions(documents.armed)

    @_torch_private.untraced(BREAKS_AT_OUTER)
    def _leave(self, noted: forward_scope | None, scope: ForwardScope) -> None:
        pop_scope(scope)
        scope.ledger.packed.discard(scope)
        if noted is not None:
            noted.__exit__()

    @_torch_private.untraced(BREAKS_AT_OUTER)
    def _prepare(
        self, module: nn.Module, way: str, args: tuple, kwargs: dict
    ) -> tuple[ForwardScope, tuple, dict] | None:
        """The scope of an outer forward, and the arguments that go on; None within one that counts already."""
        parameters = self._parameters[module]
        check_keywords(kwargs, parameters.names)
        arguments = parameters.by_name(args, kwargs)
        seen = frozenset(name for name in SOURCE_KEYWORDS if arguments.get(name) is not None)
        running = scope_of(self.ledger)
        begins_anew = running is not None and is_within_itself(self.ledger, module, way)
        if running is not None:
            check_greenlet(running.greenlet)
            if not begins_anew and (running.documents is not None or seen <= running.seen):
                running.inside.append((module, way))
                return None
        documents, arguments = self._find(arguments, args, kwargs, outermost=running is None or begins_anew)
        if begins_anew and documents is None and running is not None and running.documents is not None:
            raise RuntimeError(
                f"packed_sdpa: a forward of {type(module).__name__} began in the middle of another one, in the same "
                "thread (in a forward that calls itself, a hook, a signal handler or a __del__?), and tells no "
                "documents, while that one has some; hand its documents on, or, if it is to run unpacked, set "
                "handle.enabled = False around it"
            )
        kwargs = {name: value for name, value in kwargs.items() if self._goes_on(module, name)}
        if documents is None and (_torch_private.in_func_transform() or _torch_private.tracer() is not None):
            return ForwardScope(self.ledger, None, seen, self.on_mask, None), args, kwargs  # no values can be read
        dense_mask = None
        mask = arguments.get("attention_mask")
        fits = documents is not None and isinstance(mask, Tensor) and tuple(mask.shape) == documents.shape
        if fits and is_indexed_mask(mask):
            args, kwargs = parameters.replaced(args, kwargs, "attention_mask", None)
        elif documents is not None and self.found.interface and mask is not None:
            dense_mask = self._dense_mask(mask)
            if dense_mask is not None:
                args, kwargs = parameters.replaced(args, kwargs, "attention_mask", None)
        scope = ForwardScope(self.ledger, documents, seen, self.on_mask, dense_mask)
        scope.sees_encoder = any(arguments.get(name) is not None for name in ENCODER_KEYWORDS)
        return scope, args, kwargs

    def _run(self, armed: ArmedDocuments | None, proceed: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if not self.found.hooks:
            return proceed(*args, **kwargs)
        if _torch_private.tracer() == JIT_TRACE:
            self._refuse_jit_trace()
        run = run_scoped if torch.compiler.is_exporting() else self._run_scoped
        return run(armed, self.number, proceed, args, kwargs)

    def _find(
        self, arguments: dict[str, Any], args: tuple, kwargs: dict, outermost: bool
    ) -> tuple[Documents | None, dict[str, Any]]:
        """The documents, and the arguments with those on the host that had to be read."""
        tracer = _torch_private.tracer()
        if tracer == JIT_TRACE:
            self._refuse_jit_trace()
        if _torch_private.in_func_transform():
            return self._none_in_a_transform(arguments), arguments
        if tracer is not None:
            return self._none_in_a_tracer(arguments, tracer), arguments
        told = None
        if callable(self.documents):
            told = self.documents(*args, **kwargs) if outermost else None
            if told is None:
                return None, arguments
        if self.documents is not None:
            arguments, told = sources_on_host(arguments, told)
        armed = found = None
        if self.documents is None:
            armed = _documents_armed_here()
        elif _torch_private.in_backward():  # a recompute: its arguments are those of its forward, what is armed is not
            found = find_documents(arguments, told)
            if found is None or found.boundaries_only:
                armed = _documents_armed_here()
        else:
            armed = _documents_armed_here()
            found = find_documents(arguments, told, backend="auto" if armed is None else armed.backend)
        documents = found_or_armed(found, armed)
        if documents is not None and documents is armed:
            wrong = padding_with_a_document(arguments.get("attention_mask"), documents)
            if wrong is not None:
                raise_or_warn(self.on_mask, wrong, self.ledger.warned)
        if documents is not None:
            if self.found.encoder_decoder:
                raise ValueError(
                    f"{documents.source} tells documents, but {self.found.encoder_decoder} is an encoder-decoder "
                    "model, in which one set of documents cannot describe both sides; attach its encoder or decoder"
                )
            if documents is not armed:
                self.ledger.layouts_built += 1
        return documents, arguments

    def _refuse_jit_trace(self) -> NoReturn:
        name = type(self.model()).__name__
        raise RuntimeError(f"packed_sdpa: an attached {name} is run by {JIT_TRACE}, {UNSUPPORTED_JIT_TRACE}")

    def _none_in_a_tracer(self, arguments: dict[str, Any], tracer: str) -> Documents | None:
        """A graph is recorded: raises when there may be documents, whose values a tracer does not show."""
        told = [name for name in SOURCE_KEYWORDS if arguments.get(name) is not None] if self.documents else []
        if callable(self.documents):
            told = ["documents="]
        refuse_documents_in_tracer(f"the forward of an attached {type(self.model()).__name__}", told, tracer)
        return None

    def _none_in_a_transform(self, arguments: dict[str, Any]) -> Documents | None:
        """Within a torch.func transform: raises when there are, or may be, documents."""
        sources = {name: value for name, value in arguments.items() if value is not None}
        plain = {name: _torch_private.without_func_wrapper(value) for name, value in sources.items()}
        looked_at = SOURCE_KEYWORDS if self.documents is not None else ()
        unreadable = [name for name in looked_at if name in sources and plain[name] is None]
        with _torch_private.without_func_transforms():
            found = None if unreadable or self.documents is None else find_documents(plain)
        if unreadable or callable(self.documents) or found is not None or documents_armed_by_hand() is not None:
            why = f"arguments that vmap runs over ({', '.join(unreadable)})" if unreadable else "documents"
            raise NotImplementedError(
                f"packed_sdpa: the forward of an attached {type(self.model()).__name__} has {why} within a torch.func "
                f"transform (vmap, grad, jvp, ...), {UNSUPPORTED_TRANSFORM}"
            )
        return None

    def _goes_on(self, module: nn.Module, name: str) -> bool:
        """Whether a keyword is passed on. Only the keywords of packing tools are ever taken out."""
        own = name in OWN_KEYWORDS
        if not own and name not in FOREIGN_KEYWORDS:
            return True
        parameters = self._parameters[module]
        if name in parameters.names:
            return True
        if not parameters.takes_any:
            return False
        inner = [self._parameters[other] for other in self.found.outer if other is not module]
        if own:
            return any(name in other.names for other in inner)
        return all(other.takes_any or name in other.names for other in inner)

    def _dense_mask(self, mask: Any) -> Tensor | None:
        """The caller's own dense mask, which is audited instead of passed on; None for a 2-D mask."""
        if isinstance(mask, Tensor):
            return mask if mask.dim() > 2 else None
        raise_or_warn(
            self.on_mask,
            f"attention_mask is a {type(mask).__name__} beside documents, and cannot be compared with them; pass a "
            "2-D or 4-D tensor, or none",
            self.ledger.warned,
        )
        return None

    # ---- around an attention module

    def saw_attention(self, module: nn.Module) -> None:
        """An attention module begins to run."""
        scope = scope_of(self.ledger)
        if scope is not None and module not in scope.ran:
            record = self.ledger.record(module)
            scope.ran[module] = (record.taken, record.calls)
        elif scope is None and self.ledger.packed and not _torch_private.in_backward():
            if documents_armed_by_hand() is None:
                self._not_taken(self.ledger.record(module).name, type(module).__name__, IN_ANOTHER_THREAD)

    @_torch_private.untraced(BREAKS_AT_OUTER)
    def _check_taken(self, scope: ForwardScope) -> None:
        for module, (taken, calls) in scope.ran.items():
            record = self.ledger.record(module)
            if record.taken > taken or hf.is_cross_attention(module):
                continue
            reason = record.last_passed if record.calls > calls else why_no_call(module)
            self._not_taken(record.name, type(module).__name__, reason)
        if not (scope.ran or scope.gave_masks or self.ledger.taken() > scope.taken_before):
            name = type(self.model()).__name__
            self._not_taken(f"every attention module of {name}", name, RAN_NONE)

    def _not_taken(self, name: str, kind: str, reason: str) -> None:
        message = f"{name} ({kind}) ran in a packed forward without packed attention: {reason}"
        if self.strict:
            raise NotTakenError(f"packed_sdpa: {message}; documents leak into each other there (strict=True)")
        cause = f"{name}: {reason}"
        if cause not in self.ledger.warned:
            self.ledger.warned.add(cause)
            warnings.warn(f"packed_sdpa: {message}", UserWarning, stacklevel=5)


class _AroundOuter:
    """Around a forward in which documents are looked for."""

    hook_ids: tuple[int, ...] = ()

    def __init__(self, module: nn.Module, attachment: Attachment, run: Callable[..., Any]) -> None:
        self._module = module
        self.attachment = attachment
        self._run = run

    def around_call(self, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        return self._around("__call__", call, args, kwargs)

    def around_forward(self, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        return self._around("forward", call, args, kwargs)

    def _around(self, way: str, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if self.attachment.lingering.has_ended:
            self.attachment.refuse_to_repeat(self._module)
            return call(*args, **kwargs)
        run = self._run
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            run = self.attachment._outer_forward  # which says why not; export itself refuses a disabled function
        return run(self._module, way, call, args, kwargs)


def _lingering_on(module: nn.Module) -> list[Lingering]:
    """Of every attachment around this outer module, ended or not."""
    return [around.attachment.lingering for around in arounds_of(module) if isinstance(around, _AroundOuter)]


class _AroundAttention:
    """Around an attention module: notes that it ran."""

    hook_ids: tuple[int, ...] = ()

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        self._module = module
        self.attachment = attachment

    def around_call(self, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _torch_private.break_graph_unless_names_are_traced()
        elif not torch.compiler.is_compiling():
            self.attachment.saw_attention(self._module)
        return call(*args, **kwargs)

    around_forward = around_call


class _AroundHooked(_AroundAttention):
    """Around the hooks of a hooked attention module too. Which documents are in force is known when the module runs,
    not when it is traced, so a compiled graph breaks here and goes on behind the module."""

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        super().__init__(module, attachment)
        self._run = torch.compiler.disable(super().around_call, reason=BREAKS_AT_ATTENTION)

    def around_call(self, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        return self._run(call, args, kwargs)

    around_forward = around_call


def why_no_call(attention: nn.Module) -> str:
    """Of a module that ran without an attention call that we saw."""
    if isinstance(attention, nn.MultiheadAttention):
        return "nn.MultiheadAttention computes attention by hand when it is called with need_weights=True; pass False"
    return "it made no call that packed_sdpa saw (eager attention, or a function of its own)"


def attachment_of(model: nn.Module) -> Attachment | None:
    """The attachment of a model, or of the model that it wraps or is part of."""
    arounds = (around for module in model.modules() for around in arounds_of(module))
    attachments = (a.attachment for a in arounds if isinstance(a, (_AroundOuter, _AroundAttention)))
    return next((attachment for attachment in attachments if not attachment.lingering.has_ended), None)
