"""Torch and Megatron as on a machine with a single GPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers
from torch._C._distributed_c10d import HashStore
from torch.overrides import TorchFunctionMode

from tests.support.pretend_gpu.counts import Counts
from tests.support.pretend_gpu.tensor import DEVICE, GpuMode, GpuTensor, Operation

TOTAL_BYTES = 80 << 30


@dataclass
class Allocator:
    """Numbers of torch's allocator and of the driver; a test sets them."""

    allocated: int = 0
    reserved: int = 0
    most_allocated: int = 0
    most_reserved: int = 0
    free: int = TOTAL_BYTES
    limit: float = 1.0

    def reset(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def set_limit(self, share: float) -> None:
        assert isinstance(share, float) and 0 <= share <= 1  # torch refuses others
        self.limit = share


@dataclass
class PretendGpu:
    """A pretend GPU and its counters."""

    waits: Counts = field(default_factory=Counts)
    operations: Counts = field(default_factory=Counts)
    emptied_caches: int = 0
    registered: dict[int, int] = field(default_factory=dict)
    """Bytes of pinned host memory, by address."""
    memory: Allocator = field(default_factory=Allocator)


@contextmanager
def pretend_gpu() -> Iterator[PretendGpu]:
    """Let torch report a GPU, and this thread make tensors on it. What `cpu_shim` replaced is as it was."""
    gpu = PretendGpu()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with ExitStack() as stack:
        for name, value in _cuda(gpu).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for module in (schedules, optimizer, clip_grads, utils):
            stack.enter_context(patch.object(module, "torch", torch))
        # An optimizer of torch's build for CUDA would ask the driver for its stream; the build for CPU says None too.
        stack.enter_context(patch.object(torch.accelerator, "current_accelerator", lambda *_, **__: None))
        stack.enter_context(patch.object(torch.Tensor, "cuda", torch._C.TensorBase.cuda))
        stack.enter_context(patch.object(layers, "torch", _TorchByNumber()))
        stack.enter_context(patch.object(layers, "_grad_accum_fusion_available", False))
        stack.enter_context(patch.object(torch.nn.Module, "_apply", _with_new_parameters(torch.nn.Module._apply)))
        stack.enter_context(patch.multiple(Operation, waits=gpu.waits, operations=gpu.operations))
        stack.enter_context(_tensors_are_lifted_first())
        stack.enter_context(patch.object(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", _groups_on_gpu()))
        stack.enter_context(_Devices())
        stack.enter_context(GpuMode())
        yield gpu


class Stream:
    """A stream; all run in the order of the calls."""

    def __init__(self, gpu: PretendGpu) -> None:
        self._gpu, self.device = gpu, DEVICE

    def synchronize(self) -> None:
        self._gpu.waits.count("synchronize")

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...


class Event:
    """An event, which has happened once it is recorded."""

    def __init__(self, gpu: PretendGpu) -> None:
        self._gpu = gpu

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None:
        self._gpu.waits.count("synchronize")


class _Devices(TorchFunctionMode):
    """Reads `device=0` and `device="cuda"` as `cuda:0`: torch built without CUDA cannot."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (device := kwargs.get("device")) is not None and _is_gpu(device):
            kwargs["device"] = DEVICE
        if func is torch.Tensor.to and len(args) > 1:
            if isinstance(args[1], GpuTensor):
                args = (args[0], DEVICE, args[1].dtype)
            elif isinstance(args[1], (str, torch.device)) and _is_gpu(args[1]):
                args = (args[0], DEVICE, *args[2:])
        if func is torch._C.TensorBase.cuda:
            return args[0].to(DEVICE)
        return func(*args, **kwargs)


class _TorchByNumber:
    """Torch for Megatron's layers, whose backward says `device=0` when no mode of Python functions is active."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.empty(*size, device=DEVICE if isinstance(device, int) else device, **options)


def _is_gpu(device: object) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")


def _groups_on_gpu() -> Any:
    """Let optimizers group parameters by the device that Python sees."""
    original = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        found = original(lists, with_indices)
        on_gpu = any(isinstance(each, GpuTensor) for each in lists[0])
        return {(DEVICE, dtype): of for (_, dtype), of in found.items()} if on_gpu else found

    return staticmethod(grouped)


def _cuda(gpu: PretendGpu) -> dict[str, Any]:
    """Return the functions of torch.cuda."""
    stream = Stream(gpu)

    def empty_cache() -> None:
        gpu.emptied_caches += 1

    def register(address: int, num_bytes: int, flags: int) -> int:
        gpu.registered[address] = num_bytes
        return 0

    def unregister(address: int) -> int:
        del gpu.registered[address]
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    return {
        "cudart": lambda: runtime,
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: gpu.waits.count("synchronize"),
        "empty_cache": empty_cache,
        "Stream": lambda device=None: Stream(gpu),
        "Event": lambda **_: Event(gpu),
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="pretend GPU", total_memory=TOTAL_BYTES, major=9, minor=0, multi_processor_count=132
        ),
        "get_device_name": lambda device=None: "pretend GPU",
        "mem_get_info": lambda device=None: (gpu.memory.free, TOTAL_BYTES),
        "memory_reserved": lambda device=None: gpu.memory.reserved,
        "max_memory_allocated": lambda device=None: gpu.memory.most_allocated,
        "max_memory_reserved": lambda device=None: gpu.memory.most_reserved,
        "reset_peak_memory_stats": lambda device=None: gpu.memory.reset(),
        "set_per_process_memory_fraction": lambda share, device=None: gpu.memory.set_limit(share),
    }


@contextmanager
def _tensors_are_lifted_first() -> Iterator[None]:
    """Let `torch.tensor(..., device="cuda")` make its tensor on the host and copy it, so that modes see the copy."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def _with_new_parameters(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Let `Module.to` replace parameters that it moves, with their attributes: their class changes."""

    def wrapped(module: torch.nn.Module, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, GpuTensor):
                moved = function(parameter.detach())
                if isinstance(moved, GpuTensor):
                    module._parameters[name] = torch.nn.Parameter(moved, parameter.requires_grad)
                    module._parameters[name].__dict__.update(parameter.__dict__)
        return apply(module, function, *args, **options)

    return wrapped
