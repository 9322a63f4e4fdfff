"""A CUDA device that is not there: tensors with memory of the host that say they are on ``cuda:0``.

While :func:`stand_in_device` is entered, every operator on such a tensor, or that makes one, runs on the host's memory,
and what a real device would make the host wait for is recorded: reading a value, copying to the host, copying from
memory of the host that is not page-locked, sizes that depend on values. Our own kernels for CUDA run as they are.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)

READS = {
    aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default,
    aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.bincount.default, aten.repeat_interleave.Tensor,
}  # fmt: skip


class OnDevice(Tensor):
    """Memory of ``held``, on ``cuda:0`` as far as anyone can see."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor):
        tensor = Tensor._make_subclass(cls, held, False, dispatch_device=True, device_for_backend_keys=DEVICE)
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:
            return DEVICE
        raise AssertionError(f"{function} on a tensor of the stand-in device, outside of stand_in_device()")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Python's bindings of some methods look for the real device; their operators do not."""
        if function is Tensor.new_zeros:
            return OnDevice(torch.zeros(args[1:], dtype=args[0].dtype, device="cpu", **(kwargs or {})))
        if function is Tensor.__getitem__ and not any(isinstance(t, Tensor) for t in tree_leaves(args[1])):
            return OnDevice(args[0].held[args[1]])
        if function in (Tensor.copy_, Tensor.contiguous):
            return getattr(aten, function.__name__)(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def __repr__(self):
        return f"OnDevice({self.held})"


@dataclass
class Waits(TorchDispatchMode):
    """``seen``: what the host would have waited for, in order; ``uploads``: copies to the device."""

    seen: list[str] = field(default_factory=list)
    uploads: list[Tensor] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()
        self._pinned: list[Tensor] = []

    def take(self) -> list[str]:
        taken, self.seen = self.seen, []
        return taken

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(tensor is pinned for pinned in self._pinned)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.ops.prim.device.default:
            return DEVICE
        if function.namespace == "packed_sdpa":
            return self._ours(function, args, kwargs)
        if function in (aten.is_pinned.default, aten._pin_memory.default, aten.pin_memory.default):
            tensor = args[0]
            if function is aten.is_pinned.default:
                return self.is_pinned(tensor)
            self._pinned.append(tensor.clone())
            return self._pinned[-1]
        given = [t for t in _tensors(args, kwargs) if isinstance(t, OnDevice)]
        wanted = kwargs.get("device")
        to_device = wanted is not None and torch.device(wanted).type == "cuda"
        to_host = wanted is not None and torch.device(wanted).type == "cpu"
        if given and (function in READS or (function is aten.index.Tensor and _has_bool(args[1]))):
            self.seen.append(str(function))
        if given and to_host and not kwargs.get("non_blocking", False):  # else its memory is page-locked
            self.seen.append(f"{function} to the host")
        if function is aten._to_copy.default and to_device and not given:
            self._sent(args[0], kwargs.get("non_blocking", False), str(function))
        if function is aten.copy_.default:
            target, source = args[:2]
            if isinstance(source, OnDevice) and not isinstance(target, OnDevice):
                self.seen.append(f"{function} to the host")
            elif isinstance(target, OnDevice) and not isinstance(source, OnDevice):
                self._sent(source, args[2] if len(args) > 2 else kwargs.get("non_blocking", False), str(function))
        elif given and not to_host and not to_device:
            for tensor in _tensors(args, kwargs):
                assert isinstance(tensor, OnDevice) or tensor.dim() == 0 or function in _TAKE_BOTH, (
                    f"{function}: a tensor {list(tensor.shape)} of the host among those of the device"
                )
        if to_device or to_host:
            kwargs["device"] = torch.device("cpu")
        held = tree_map_only(OnDevice, lambda t: t.held, (args, kwargs))
        result = function(*held[0], **held[1])
        if function._schema.name.endswith("_") and not function._schema.name.endswith("__"):  # in place
            return args[0]
        on_device = to_device or (bool(given) and not to_host)
        return tree_map_only(Tensor, lambda t: OnDevice(t), result) if on_device else result

    def _sent(self, source: Tensor, non_blocking: bool, name: str) -> None:
        self.uploads.append(source)
        if source.numel() > 0 and not (non_blocking and self.is_pinned(source)):
            self.seen.append(f"{name} to the device from memory that is not page-locked")

    def _ours(self, function, args, kwargs):
        on_device = any(isinstance(t, OnDevice) for t in _tensors(args, kwargs))
        key = torch._C.DispatchKey.CUDA if on_device else torch._C.DispatchKey.CPU
        with self:
            if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
                return function.decompose(*args, **kwargs)
            return function.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


_TAKE_BOTH: set = {aten.index.Tensor, aten.index_put_.default}


def _tensors(args, kwargs) -> list[Tensor]:
    return [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]


def _has_bool(indices) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@contextlib.contextmanager
def stand_in_device():
    with Waits() as waits:
        yield waits
