"""``check_isolation``: proves on the user's own model and batch that no document sees another."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from packed_sdpa.arming import documents_armed_by_hand
from packed_sdpa.attachment import Attachment, attachment_of
from packed_sdpa.check_leak import Leak, first_leak, first_to_leak, is_attention
from packed_sdpa.check_probe import Probe, changing, others_of, tensors_in
from packed_sdpa.documents import (
    ENCODER_KEYWORDS,
    FOREIGN_KEYWORDS,
    SOURCE_KEYWORDS,
    Documents,
    find_documents,
    found_or_armed,
)
from packed_sdpa.numbering import numbered
from packed_sdpa.tables import as_text

if TYPE_CHECKING:
    from rich.table import Table

_ALONE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_ROUNDING = 64  # times epsilon: what another order of summation may change (experts see other groups of rows)
_ISLANDS = 8  # times epsilon of float32: the same in float64, of a model that rounds to float32 here and there
_REPEATS = 2  # runs of the unchanged batch that are compared with the first
_UNREPEATED = 4  # times the largest difference of those: what a model that does not repeat itself may change
_NOT_IN_WIDER = (RuntimeError, TypeError, ValueError)  # a kernel without it, a cast in the model, no memory
_OF_ENCODERS = (*ENCODER_KEYWORDS, "encoder_attention_mask", "cross_attention_mask")  # whole for each document


@dataclass(frozen=True)
class CheckRow:
    """One check: ``value`` is the largest value found (0 is perfect), ``allowed`` the largest that passes. Infinite or
    NaN values never pass: they prove nothing."""

    check: str
    ok: bool
    value: float
    allowed: float
    detail: str


@dataclass(frozen=True)
class IsolationResult:
    """What :func:`check_isolation` returns; ``print`` it for a table. ``ok`` is False when a document sees another."""

    rows: tuple[CheckRow, ...]
    documents: int
    leak: Leak | None

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def table(self) -> Table:
        from rich.table import Table

        verdict = "isolated" if self.ok else "NOT isolated"
        table = Table(title=f"{self.documents} documents: {verdict}", title_justify="left")
        for heading in ("check", "result", "largest", "allowed", "what"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            finite = math.isfinite(row.value) and math.isfinite(row.allowed)
            result = "ok" if row.ok else "LEAK" if finite else "NOT FINITE"
            table.add_row(row.check, result, f"{row.value:.3g}", f"{row.allowed:.3g}", row.detail)
        if self.leak is not None:
            table.add_row("first leak", "LEAK", "", "", f"{self.leak.module}: {self.leak.reason}")
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return as_text(self.table())


def check_isolation(model: nn.Module, batch: Mapping[str, Any], *, max_documents: int = 8) -> IsolationResult:
    """Runs the model on the batch, as it is (attached or not), and looks for influence between documents.

    batch: arguments of the model's forward, among them ``input_ids`` ``[B, S]`` or ``inputs_embeds`` / another float
    tensor ``[B, S, ...]``, and a source of documents (see :func:`packed_sdpa.attach`) or armed ones.
    max_documents: how many documents are probed, spread over the batch; each costs three forwards and one backward.

    Checks, in evaluation mode: a changed document leaves the other documents' outputs as they are, bit for bit; the
    gradient from a document's outputs into the other documents' embeddings is exactly 0; a document's outputs are those
    of the stock model on this document alone (as near as that model's own rounding: where they differ by more than is
    usual, twice what it is off from float64 there). On a leak the first layer that leaks is named, with its reason.
    Parameters' gradients, the training mode and the counters' meaning are left alone.

    Bits of others may change without a leak: experts multiply other groups of rows, whose products may be summed in
    another order, and a model need not repeat itself on the same batch. So where bits change, but by no more than
    rounding in the model's dtype or 4 times what two more runs of the unchanged batch differ from the first, the same
    is computed again in float64, with copies of the parameters (4 times the memory of a bfloat16 model's, one more
    forward for each such document, and three more). There rounding all but vanishes and a leak keeps its size: what
    is left may be 8 times epsilon of float32 (1e-6) of the largest output, as models round to float32 here and there.
    Where float64 cannot be computed float32 is taken for a half type, with 64 times its epsilon (8e-6). Where that
    cannot be either, a half type's change is reported as a leak, since nothing tells it from one, and that of float32
    passes up to 64 times epsilon. A change that begins in an attention module, which multiplies the same shapes
    whatever a document holds, is a leak of any size. What is not told: a leak within rounding that begins elsewhere and
    is not there in float64.

    Raises ValueError when the batch tells no documents, or fewer than two.
    """
    if not isinstance(max_documents, int) or max_documents < 1:
        raise ValueError(f"max_documents must be at least 1, got {max_documents!r}")
    attachment = attachment_of(model)
    documents = _documents(model, batch, attachment)
    places = _places(documents)
    if len(places) < 2:
        raise ValueError(
            f"batch: {documents.source} tells {len(places)} document; isolation needs at least two in the batch"
        )
    step = -(-len(places) // max_documents)
    probed = places[::step]
    probe = Probe(model, batch, documents)
    with _evaluating(model, attachment), torch.random.fork_rng(devices=[]):
        base = probe.run()
        perturbed, judge = _perturbed(probe, base, probed, documents, attachment)
        rows = [
            perturbed,
            _gradients(probe, probed, documents),
            _alone(probe, base, probed, documents, attachment),
        ]
        leak = None if all(row.ok for row in rows[:2]) else first_leak(judge, probed, documents, attachment)
    return IsolationResult(tuple(rows), len(places), leak)


def _documents(model: nn.Module, batch: Mapping[str, Any], attachment: Attachment | None) -> Documents:
    arguments = dict(batch)
    told = None
    if attachment is not None and callable(attachment.documents):
        told = attachment.documents(**arguments)
    look = attachment is None or attachment.documents is not None
    documents = found_or_armed(find_documents(arguments, told) if look else None, documents_armed_by_hand())
    if documents is None:
        raise ValueError(
            f"batch tells no documents: give {', '.join(SOURCE_KEYWORDS)} (position_ids that restart), or arm them; "
            f"got {', '.join(arguments) or 'nothing'}"
        )
    return documents


def _places(documents: Documents) -> list[Tensor]:
    """For each document the flat rows ``b * S + i`` of its tokens."""
    ids = documents.doc_ids
    place = ids.flatten().nonzero().squeeze(1)
    number, count = numbered(place // ids.shape[1], ids.flatten()[place])
    return [place[number == n] for n in range(count)]


@contextlib.contextmanager
def _evaluating(model: nn.Module, attachment: Attachment | None) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    strict = attachment is not None and attachment.strict
    try:
        model.eval()
        if attachment is not None:
            attachment.strict = False  # a layer that is not taken is what is looked for here
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        if attachment is not None:
            attachment.strict = strict


def _row(check: str, value: float, allowed: float, detail: str) -> CheckRow:
    if not math.isfinite(allowed):
        detail = "the model's outputs on this batch are not finite, so nothing can be told"
    finite = math.isfinite(value) and math.isfinite(allowed)
    return CheckRow(check, finite and value <= allowed, value, allowed, detail)


class _Change(NamedTuple):
    """The largest change of the other documents' outputs when one document is changed. ``at``: its flat row."""

    value: float
    rows: Tensor
    at: int


def _changes(probe: Probe, base: Tensor, probed: list[Tensor], documents: Documents) -> list[_Change]:
    """Of those documents that change a bit of the others' outputs."""
    changes = []
    for rows in probed:
        other = others_of(rows, documents).to(base.device)
        changed = probe.run(changing(rows))
        difference = (changed.flatten(0, 1)[other] - base.flatten(0, 1)[other]).abs().flatten(1).amax(1)
        value = float(difference.max())
        if value != 0.0:
            changes.append(_Change(value, rows, int(other[int(difference.argmax())])))
    return changes


def _largest(changes: list[_Change]) -> _Change:
    return max(changes, key=lambda change: change.value if math.isfinite(change.value) else math.inf)


def _unrepeated(probe: Probe, base: Tensor, documents: Documents) -> float:
    """The largest difference of tokens' outputs between runs of the unchanged batch."""
    tokens = (documents.doc_ids.flatten() != 0).nonzero().squeeze(1).to(base.device)
    first = base.flatten(0, 1)[tokens]
    return max(float((probe.run().flatten(0, 1)[tokens] - first).abs().max()) for _ in range(_REPEATS))


def _perturbed(
    probe: Probe, base: Tensor, probed: list[Tensor], documents: Documents, attachment: Attachment | None
) -> tuple[CheckRow, Probe]:
    """And the probe that told, for the search of the layer."""
    check = "changed document"
    size = float(base.abs().max())
    changes = _changes(probe, base, probed, documents)
    if not changes or not math.isfinite(size):
        allowed = 0.0 if math.isfinite(size) else size
        detail = "each probed document changed: the others' outputs are the same, bit for bit"
        return _row(check, _largest(changes).value if changes else 0.0, allowed, detail), probe
    worst = _largest(changes)
    unrepeated = _unrepeated(probe, base, documents)
    note = ""
    if unrepeated > 0.0:
        note = f"; the model does not repeat itself bit for bit (the same batch differs by {unrepeated:.2g})"
    allowed = _UNREPEATED * unrepeated
    dtype = probe.rounds_to(base)
    rounding = _ROUNDING * torch.finfo(dtype).eps * size
    if not worst.value <= max(rounding, allowed):
        return _row(check, worst.value, allowed, _where(worst, documents) + note), probe

    suspects = [change.rows for change in changes]
    module = first_to_leak(probe, suspects, documents) if unrepeated == 0.0 else None
    if module is not None and is_attention(module, probe.model, attachment):
        return _row(check, worst.value, 0.0, _where(worst, documents) + ", from an attention module on"), probe

    # It may be rounding. In a wider dtype rounding all but vanishes; a leak keeps its size.
    problems = []
    for wider, share in _wider(dtype):
        judge, told = _in_wider(probe, wider, suspects, documents)
        if isinstance(told, str):
            problems.append(f"{_dtype_name(wider)}: {told}")
            continue
        value, size, unrepeated, widest = told
        allowed = max(share * size, _UNREPEATED * unrepeated)
        if value <= allowed:
            detail = f"rounding: others' outputs change by up to {worst.value:.2g} in {_dtype_name(dtype)}"
            if note:
                detail = detail.removeprefix("rounding: ")
        else:
            assert widest is not None
            detail = _where(widest, documents)
        return _row(check, value, allowed, f"{detail}, by {value:.2g} in {_dtype_name(wider)}{note}"), judge
    if dtype in (torch.float32, torch.float64):
        allowed = max(allowed, rounding)
    detail = _where(worst, documents) + note
    if problems:
        detail += f"; it may be rounding, but the model does not run in a wider dtype to tell ({'; '.join(problems)})"
    return _row(check, worst.value, allowed, detail), probe


def _where(change: _Change, documents: Documents) -> str:
    places = (_name(change.rows, documents), _name_flat(change.at, documents))
    return "document at token {} changed: output at token {} differs".format(*places)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wider(dtype: torch.dtype) -> list[tuple[torch.dtype, float]]:
    """In which dtypes rounding to this one is told from a leak, and which share of the largest output it may be."""
    eps = torch.finfo(torch.float32).eps
    wider = [(torch.float64, _ISLANDS * eps), (torch.float32, _ROUNDING * eps)]
    return wider[: {torch.float64: 0, torch.float32: 1}.get(dtype, 2)]


class _Told(NamedTuple):
    value: float  # largest change
    size: float  # largest output
    unrepeated: float
    widest: _Change | None


def _in_wider(
    probe: Probe, dtype: torch.dtype, probed: list[Tensor], documents: Documents
) -> tuple[Probe, _Told | str]:
    """What the check finds in that dtype, or why it cannot be run there."""
    try:
        judge = Probe(probe.model, probe.batch, documents, dtype)
        base = judge.run()
        size = float(base.abs().max())
        if torch.finfo(base.dtype).eps > torch.finfo(torch.float32).eps:
            return probe, f"its outputs are {_dtype_name(base.dtype)} all the same"
        if not math.isfinite(size):
            return probe, "its outputs are not finite"
        changes = _changes(judge, base, probed, documents)
        unrepeated = _unrepeated(judge, base, documents)
    except _NOT_IN_WIDER as error:
        return probe, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    widest = _largest(changes) if changes else None
    return judge, _Told(0.0 if widest is None else widest.value, size, unrepeated, widest)


def _gradients(probe: Probe, probed: list[Tensor], documents: Documents) -> CheckRow:
    worst, detail = 0.0, "each probed document: the gradient into the others' embeddings is exactly 0"
    for rows in probed:
        leaf: list[Tensor] = []

        def catch(embeddings: Tensor, leaf: list[Tensor] = leaf) -> Tensor:
            leaf.append(embeddings.detach().clone().requires_grad_())
            return leaf[0]

        output = probe.run(catch, grad=True)
        if not leaf:
            raise ValueError(
                "model: no nn.Embedding was called with the batch's tokens, and the batch has no float input"
            )
        own = output.flatten(0, 1)[rows.to(output.device)]
        weights = torch.linspace(-1, 1, own.numel(), device=own.device).view_as(own).to(own.dtype)
        (gradient,) = torch.autograd.grad((own * weights).sum(), leaf[0])
        other = others_of(rows, documents).to(gradient.device)
        into = gradient.flatten(0, 1)[other].abs().flatten(1).amax(1)
        value = float(into.max())
        if value > worst or not math.isfinite(value):
            worst = value
            at = int(other[int(into.argmax())])
            detail = f"outputs at token {_name(rows, documents)} have a gradient into token {_name_flat(at, documents)}"
    return _row("gradient", worst, 0.0, detail)


def _alone(
    probe: Probe, base: Tensor, probed: list[Tensor], documents: Documents, attachment: Attachment | None
) -> CheckRow:
    scale = float(base.abs().max())
    allowed = _ALONE_TOLERANCE.get(base.dtype, 1e-3) * scale
    worst, detail = 0.0, "each probed document equals the stock model on this document alone"
    enabled = attachment is not None and attachment.enabled
    try:
        if attachment is not None:
            attachment.enabled = False
        alone = [probe.run(arguments=_arguments_alone(probe, rows)).flatten(0, 1) for rows in probed]
        for rows, output in zip(probed, alone, strict=True):
            value = float((output - base.flatten(0, 1)[rows.to(base.device)]).abs().max())
            if value > worst or not math.isfinite(value):
                worst, detail = value, f"largest difference to the document alone: document of {rows.numel()} tokens"
        if math.isfinite(worst) and worst > allowed:  # as experts that are chosen by close scores make it
            rounding = _rounding_alone(probe, probed, alone, documents)
            if rounding > 0.0:
                allowed = max(allowed, 2 * rounding)  # two results, each off by so much
                detail += f"; rounding puts the stock model itself off by {rounding:.2g} on a document alone"
    finally:
        if attachment is not None:
            attachment.enabled = enabled
    return _row("document alone", worst, allowed, detail)


def _rounding_alone(probe: Probe, probed: list[Tensor], alone: list[Tensor], documents: Documents) -> float:
    """How far outputs on documents alone are from those in a wider dtype, at most; 0 where none can be computed."""
    for wider, _ in _wider(probe.rounds_to(alone[0])):
        try:
            judge = Probe(probe.model, probe.batch, documents, wider)
            exact = [judge.run(arguments=_arguments_alone(judge, rows)).flatten(0, 1) for rows in probed]
        except _NOT_IN_WIDER:
            continue
        difference = max(float((one - two).abs().max()) for one, two in zip(alone, exact, strict=True))
        return difference if math.isfinite(difference) else 0.0
    return 0.0


def _arguments_alone(probe: Probe, rows: Tensor) -> dict[str, Any]:
    """The batch cut to one document: tensors that hold something per token; what tells documents is left out."""
    arguments: dict[str, Any] = {}
    size = probe.shape[1]
    row, columns = int(rows[0]) // size, rows % size
    for name, value in probe.batch.items():
        if name in (*SOURCE_KEYWORDS, *FOREIGN_KEYWORDS) and name != "position_ids":
            continue
        if isinstance(value, Tensor) and name in _OF_ENCODERS:
            value = value[row : row + 1]
        elif isinstance(value, Tensor) and value.dim() >= 2 and tuple(value.shape[:2]) == probe.shape:
            value = value[row : row + 1, columns.to(value.device)]
        elif name == "position_ids" and isinstance(value, Tensor):
            batch_axis = value.dim() - 2
            if batch_axis >= 0 and value.shape[batch_axis] > 1:
                value = value.narrow(batch_axis, row, 1)
            value = value[..., columns.to(value.device)]
        arguments[name] = value
    if probe.positions and "position_ids" not in arguments:
        arguments["position_ids"] = columns.unsqueeze(0).to(next(iter(tensors_in(arguments))).device)
    return arguments


def _name(rows: Tensor, documents: Documents) -> str:
    return _name_flat(int(rows[0]), documents)


def _name_flat(place: int, documents: Documents) -> str:
    row, column = divmod(place, documents.shape[1])
    return f"{column}" if documents.shape[0] == 1 else f"({row}, {column})"
