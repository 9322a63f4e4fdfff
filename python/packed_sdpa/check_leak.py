"""The first layer that leaks, for ``check_isolation``: by what goes into and comes out of each module."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packed_sdpa.attachment import Attachment, why_no_call
from packed_sdpa.check_probe import Probe, changing, others_of, tensors_in
from packed_sdpa.documents import Documents
from packed_sdpa.model_survey import leaking_layers, looks_like_attention


@dataclass(frozen=True)
class Leak:
    """The first module whose output on one document changes with another document while its inputs do not."""

    module: str
    reason: str


def first_leak(probe: Probe, probed: list[Tensor], documents: Documents, attachment: Attachment | None) -> Leak | None:
    module = first_to_leak(probe, probed, documents)
    if module is None:
        return None
    return Leak(_name_of(module, probe.model) or type(module).__name__, _reason(module, probe.model, attachment))


def first_to_leak(probe: Probe, probed: list[Tensor], documents: Documents) -> nn.Module | None:
    names = {module: name for name, module in probe.model.named_modules()}
    for rows in probed:
        other = others_of(rows, documents)
        with _fingerprints(probe, names) as before:
            probe.run(lambda embeddings: embeddings)
        with _fingerprints(probe, names) as after:
            probe.run(changing(rows))
        for call, (inputs, outputs) in before.items():
            if call not in after:  # an expert that has no token once the document is another
                continue
            inputs_after, outputs_after = after[call]
            if _same(inputs, inputs_after, other) and not _same(outputs, outputs_after, other):
                return call[0]
    return None


def _name_of(module: nn.Module, model: nn.Module) -> str:
    return next(name for name, other in model.named_modules() if other is module)


def is_attention(module: nn.Module, model: nn.Module, attachment: Attachment | None) -> bool:
    is_attached = attachment is not None and module in attachment.ledger.records
    return is_attached or looks_like_attention(_name_of(module, model), module)


# By module and the number of its call; in the order in which calls end.
Fingerprints = dict[tuple[nn.Module, int], tuple[list[Tensor], list[Tensor]]]


@contextlib.contextmanager
def _fingerprints(probe: Probe, names: Mapping[nn.Module, str]) -> Iterator[Fingerprints]:
    """One number a token of each input and output of each call of a module."""
    calls: Fingerprints = {}
    counts: Counter[nn.Module] = Counter()

    def take(value: Any) -> list[Tensor]:
        return [_fingerprint(t) for t in tensors_in(value) if t.is_floating_point() and probe.fits(t)]

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        plain = output if isinstance(output, (Tensor, tuple, list, dict)) else getattr(output, "__dict__", ())
        calls[module, counts[module]] = (take((args, kwargs)), take(plain))
        counts[module] += 1

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in names]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _fingerprint(tensor: Tensor) -> Tensor:
    values = tensor.detach().flatten(2).double()
    return (values * torch.linspace(1, 2, values.shape[-1], device=values.device)).sum(-1).flatten().cpu()


def _same(before: list[Tensor], after: list[Tensor], rows: Tensor) -> bool:
    return len(before) == len(after) and all(
        torch.allclose(one[rows], two[rows], rtol=1e-9, atol=1e-12, equal_nan=True)
        for one, two in zip(before, after, strict=True)
    )


def _reason(module: nn.Module, model: nn.Module, attachment: Attachment | None) -> str:
    name = _name_of(module, model)
    kind = type(module).__name__
    if any(leaking == name or name.startswith(leaking + ".") for leaking in leaking_layers(model)):
        return f"{kind} mixes tokens without attention (state space, convolution or linear attention)"
    if attachment is None:
        return f"{kind} ran stock attention: the model is not attached"
    record = attachment.ledger.records.get(module)
    if record is not None and record.taken == 0:
        return f"{kind} was not taken: {record.last_passed or why_no_call(module)}"
    if record is not None:
        return f"{kind} computes something across tokens beside its packed attention"
    if looks_like_attention(name, module):
        return f"{kind} is attention that attach did not find; name it with match="
    return f"{kind} mixes tokens in a way of its own"
