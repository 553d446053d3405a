"""Foreign errors become ours: this file alone knows how torch, vLLM and safetensors name their failures.

Classes are named, not imported, so that naming vLLM's costs nothing where vLLM is not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from prefect_rlhf.placement.blame import described
from prefect_rlhf.placement.errors import (
    CollectiveFailed,
    EngineFailed,
    InvalidInput,
    OutOfDeviceMemory,
    RankFailed,
    RlhfError,
)

Fault = Callable[[str], RlhfError]


def bad_checkpoint(reason: str) -> InvalidInput:
    """A safetensors file that does not read."""
    return InvalidInput("checkpoint", reason, "complete safetensors files")


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "builtins.MemoryError": OutOfDeviceMemory,
        "torch.OutOfMemoryError": OutOfDeviceMemory,
        "torch.AcceleratorError": EngineFailed,
        "torch.FatalError": EngineFailed,
        "torch.jit.Error": EngineFailed,
        "torch.cuda.CudaError": EngineFailed,
        "torch.cuda.DeferredCudaCallError": EngineFailed,
        "torch.distributed.DistError": CollectiveFailed,
        "vllm.exceptions.VLLMError": EngineFailed,
        "safetensors._safetensors_rust.SafetensorError": bad_checkpoint,
    }
)
"""Class -> ours; a subclass is found through its base, the most specific class first."""

PHRASES: Mapping[str, Fault] = MappingProxyType(
    {
        "gloo/": CollectiveFailed,  # a peer's closed connection or silence is a plain RuntimeError with a source path
        "can't allocate memory": OutOfDeviceMemory,  # torch's CPU allocator
        "EngineCore": EngineFailed,
    }
)
"""What a plain RuntimeError must say to mean more than its class does."""


def as_ours(error: Exception) -> RlhfError:
    """Return `error` itself when it is ours, else our name for it; the reason is its type, first line and own place.

    >>> as_ours(MemoryError("no room\\nfor it"))
    OutOfDeviceMemory('MemoryError: no room')
    """
    if isinstance(error, RlhfError):
        return error
    return _fault(error)(described(error))


def class_name(kind: type) -> str:
    """Return `module.Class`, as FAULTS has it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _fault(error: Exception) -> Fault:
    for kind in type(error).__mro__:
        if class_name(kind) in FAULTS:
            return FAULTS[class_name(kind)]
    if isinstance(error, RuntimeError):
        return next((fault for phrase, fault in PHRASES.items() if phrase in str(error)), RankFailed)
    return RankFailed
