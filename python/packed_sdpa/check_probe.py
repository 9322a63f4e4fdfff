"""Runs of a model in which the embeddings of some tokens are others, for ``check_isolation``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from packed_sdpa.attachment import attachment_of
from packed_sdpa.documents import ENCODER_KEYWORDS, OWN_KEYWORDS, Documents
from packed_sdpa.forward_parameters import forward_parameters

_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Probe:
    """Runs the model with its token embeddings (or float inputs) within reach.

    dtype: of copies of its parameters, buffers and float inputs that it is run with; None: as it is, without copies.
    """

    def __init__(
        self, model: nn.Module, batch: Mapping[str, Any], documents: Documents, dtype: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.batch = dict(batch)
        self.dtype = dtype
        self.copies: dict[str, Tensor] = {}
        if dtype is not None:
            self.batch = {n: v.to(dtype) if is_floating(v) else v for n, v in self.batch.items()}
            tensors = (*model.named_parameters(), *model.named_buffers())
            self.copies = {n: v.detach().to(dtype) for n, v in tensors if is_floating(v)}
        self.shape = documents.shape
        parameters = forward_parameters(model)
        if not parameters.takes_any and attachment_of(model) is None:
            self.batch = {n: v for n, v in self.batch.items() if n not in OWN_KEYWORDS or n in parameters.names}
        self.positions = "position_ids" in parameters.names
        self.float_input = next(
            (n for n, v in self.batch.items() if n not in ENCODER_KEYWORDS and is_floating(v) and self.fits(v)), None
        )

    def fits(self, tensor: Tensor) -> bool:
        """Whether it holds rows of the batch's tokens, ``[B, S, ...]``."""
        return tensor.dim() >= 3 and tuple(tensor.shape[:2]) == self.shape

    def run(
        self,
        change: Callable[[Tensor], Tensor] | None = None,
        arguments: dict[str, Any] | None = None,
        grad: bool = False,
    ) -> Tensor:
        """Outputs ``[B, S, ...]``. ``change`` is applied to the embeddings."""
        arguments = dict(self.batch if arguments is None else arguments)
        handles = []
        if change is not None and self.float_input is not None:
            arguments[self.float_input] = change(arguments[self.float_input])
        elif change is not None:
            changed = change
            rows = next((v.shape for v in arguments.values() if isinstance(v, Tensor) and v.dim() == 2), None)
            state = {"done": False}

            def embed(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
                if state["done"] or not isinstance(output, Tensor) or output.shape[:2] != rows:
                    return None
                state["done"] = True
                return changed(output)

            tables = [module for module in self.model.modules() if isinstance(module, nn.Embedding)]
            handles = [module.register_forward_hook(embed) for module in tables]
        try:
            with torch.set_grad_enabled(grad):
                return _output_tensor(self._call(arguments), self.shape if arguments is self.batch else None)
        finally:
            for handle in handles:
                handle.remove()

    def _call(self, arguments: dict[str, Any]) -> Any:
        if self.dtype is None:
            return self.model(**arguments)
        with contextlib.ExitStack() as stack:
            for kind in self._cast_on():
                stack.enter_context(torch.autocast(kind, enabled=False))
            return torch.func.functional_call(self.model, self.copies, (), arguments)

    def _cast_on(self) -> set[str]:
        """The kinds of device on which autocast is in force."""
        kinds = {tensor.device.type for tensor in (*self.model.parameters(), *tensors_in(self.batch))}
        return {k for k in kinds if torch.amp.is_autocast_available(k) and torch.is_autocast_enabled(k)}

    def rounds_to(self, output: Tensor) -> torch.dtype:
        """The coarsest dtype among those of the output, the parameters and autocast."""
        dtypes = {output.dtype, *(torch.get_autocast_dtype(kind) for kind in self._cast_on())}
        dtypes |= {parameter.dtype for parameter in self.model.parameters() if is_floating(parameter)}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _FLOATING


def _output_tensor(output: Any, shape: tuple[int, int] | None) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    first = output if isinstance(output, Tensor) else next((v for v in tensors_in(output) if v.dim() >= 3), None)
    if first is None:
        raise ValueError(f"model: its output {type(output).__name__} holds no tensor [B, S, ...] to check")
    return first


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in a tensor, dict, list or tuple, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)


def changing(rows: Tensor, by: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Other embeddings in these flat rows, the same in all others, bit for bit."""

    def change(embeddings: Tensor) -> Tensor:
        flat = embeddings.detach().clone().flatten(0, 1)
        places = rows.to(flat.device)
        noise = torch.linspace(-by, by, flat.shape[-1], device=flat.device).to(flat.dtype)
        flat[places] = noise - flat[places]
        return flat.view(embeddings.shape)

    return change


def others_of(rows: Tensor, documents: Documents) -> Tensor:
    """Flat rows of all tokens outside the document; padding left out."""
    other = documents.doc_ids.flatten() != 0
    other[rows] = False
    return other.nonzero().squeeze(1)
