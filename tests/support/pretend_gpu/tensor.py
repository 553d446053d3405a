"""Tensors of the pretend GPU: each operation checks devices, counts waits, and runs on the same memory as the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.pretend_gpu.counts import Counts
from tests.support.pretend_gpu.noise import add_noise

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
MASKABLE = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.equal.default,
    aten._local_scalar_dense.default,
}
"""The host needs the result of these, or its size, before it can go on."""


class GpuTensor(Tensor):
    """A tensor of the pretend GPU. Python sees `cuda:0`; to torch's C++ it is a tensor of the CPU with a subclass."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda _: DEVICE)  # type: ignore[assignment]  # an attribute of the base
    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_cpu = property(lambda _: False)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: Tensor) -> GpuTensor:
        return Tensor._make_subclass(cls, plain)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Operation(func, args, kwargs or {}).run()

    def cuda(self, *_: Any, **__: Any) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        """Copy to the host. What was copied has no gradient, as no code of ours needs it."""
        Operation.waits.count("copy to the host")
        with torch.no_grad():
            return plain(self).clone()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert; a device is among the arguments if the tensor moves."""
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*_unlike_tensors(args), **kwargs)
        if device is not None and device.type == "cpu":
            return self.cpu() if dtype is None else self.cpu().to(dtype)
        return self if dtype is None else super().to(dtype)

    def tolist(self) -> Any:
        Operation.waits.count("tolist")
        return plain(self).tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def type(self, *args: Any, **kwargs: Any) -> Any:
        """Name the type, as Megatron asks for it."""
        assert not args and not kwargs, "conversions by type() are not pretended"
        return f"torch.cuda.{super().type().removeprefix('torch.')}"


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU on the memory of a tensor of the pretend GPU."""
    storage = tensor.untyped_storage()
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if tensor.numel() and last * tensor.element_size() > storage.nbytes():
        raise RuntimeError("an illegal memory access: the tensor's storage is emptied")
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class GpuMode(TorchDispatchMode):
    """Makes tensors of the pretend GPU if somebody asks torch for tensors on `cuda`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Operation(func, args, kwargs or {}).run()


@dataclass
class Operation:
    """A call of an operator of torch, with tensors of the pretend GPU among its arguments or as its result."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    of_plain: dict[int, tuple[Tensor, GpuTensor]] = field(default_factory=dict)

    waits: ClassVar = Counts()
    operations: ClassVar = Counts()

    def run(self) -> Any:
        tensors = list(_tensors((self.args, self.kwargs)))
        is_mine = any(isinstance(tensor, GpuTensor) for tensor in tensors)
        named = self.kwargs.get("device")
        if self.kwargs.get("pin_memory"):
            self.kwargs = {**self.kwargs, "pin_memory": False}
        if not is_mine and (named is None or named.type != "cuda"):
            return self.func(*self.args, **self.kwargs)
        if is_mine:
            self._refuse_to_mix(tensors)
        self.operations.count(self.func.__name__)
        self._count_waits()
        args, kwargs = _mapped(self._plain, self.args), {k: _mapped(self._plain, v) for k, v in self.kwargs.items()}
        made = self.func(*args, **kwargs)
        add_noise(self.func, made)
        return _mapped(self._result, made)

    def _refuse_to_mix(self, tensors: list[Tensor]) -> None:
        """Raise if a tensor of the host with an axis meets tensors of the device."""
        if self.func in COPIES:
            return
        if self.func in MASKABLE:  # indices may lie on the host
            tensors = [self.args[0], *(each for each in self.args[2:] if isinstance(each, Tensor))]
            if not isinstance(self.args[0], GpuTensor):
                raise RuntimeError("indices should be on the same device as the indexed tensor (cpu)")
        hosts = [each for each in tensors if not isinstance(each, GpuTensor) and (each.dim() or self._takes_no_scalar)]
        if hosts:
            raise RuntimeError(f"{self.func}: expected all tensors on cuda:0, found one of {hosts[0].shape} on the cpu")

    @property
    def _takes_no_scalar(self) -> bool:
        name = self.func.__name__
        return name.startswith(("cat", "stack", "_fused", "_foreach_norm"))

    def _count_waits(self) -> None:
        name = self.func.__name__.partition(".")[0]
        if self.func in SIZED_BY_VALUES or (self.func is aten.repeat_interleave.Tensor and not self.kwargs):
            self.waits.count(name.strip("_"))
        elif self.func is aten._to_copy.default and not isinstance(self.args[0], GpuTensor):
            self.waits.count("copy to the device")
        elif self.func is aten.copy_.default and len({isinstance(each, GpuTensor) for each in self.args[:2]}) == 2:
            self.waits.count("copy")  # also if it is not to block, since the host's memory may not be pinned
        elif self.func in MASKABLE:
            given = [each for each in self.args[1] if each is not None]
            becomes_fill = self.func is not aten.index.Tensor and self.args[2].dim() == 0
            masks = sum(each.dtype in (torch.bool, torch.uint8) for each in given if not becomes_fill)
            self.waits.count("mask", masks) if masks else None
            hosts = sum(not isinstance(each, GpuTensor) for each in given)
            self.waits.count("index on the host", hosts) if hosts else None

    def _plain(self, value: Any) -> Any:
        """Return an argument for the CPU's kernel."""
        if isinstance(value, torch.device):
            return HOST
        if not isinstance(value, GpuTensor):
            return value
        made = plain(value)
        self.of_plain[id(made)] = made, value
        return made

    def _result(self, made: Any) -> Any:
        if not isinstance(made, Tensor):
            return made
        if id(made) in self.of_plain:
            given = self.of_plain[id(made)][1]
            assert given.shape == made.shape, f"{self.func} changes the shape of a tensor in place"
            return given
        return made if self.func in COPIES and made is self.args[0] else GpuTensor(made)


def _unlike_tensors(args: Any) -> Any:
    """Return the arguments of `Tensor.to` with a tensor's device and dtype in place of the tensor."""
    if args and isinstance(args[0], Tensor):
        return (args[0].device, args[0].dtype, *args[1:])
    return args


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(function, each) for each in value])
    return function(value)
