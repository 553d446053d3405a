"""Translation of foreign errors into ours: only this file knows the error classes of torch, vLLM and safetensors.

Classes are named, not imported, so that a mapping of vLLM's errors does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from prefect_rlhf.errors.blame import described
from prefect_rlhf.errors.errors import (
    CollectiveFailed,
    EngineFailed,
    InvalidInput,
    OutOfDeviceMemory,
    RankFailed,
    RlhfError,
)

Fault = Callable[[str], RlhfError]


def bad_checkpoint(reason: str) -> InvalidInput:
    """Return the error for an unreadable safetensors file."""
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
"""Foreign class -> our error; a subclass is found through its base, the most specific class first."""

PHRASES: Mapping[str, Fault] = MappingProxyType(
    {
        "gloo/": CollectiveFailed,  # gloo reports a closed or silent peer as a RuntimeError with a source path
        "can't allocate memory": OutOfDeviceMemory,  # torch's CPU allocator
        "CUDA Error: out of memory": OutOfDeviceMemory,  # vLLM's allocator of engines that sleep
        "Free memory on device": OutOfDeviceMemory,  # vLLM, before it builds an engine
        "No available memory for the cache blocks": OutOfDeviceMemory,  # vLLM
        "ALLOC_FAILED": OutOfDeviceMemory,  # cuBLAS and cuDNN
        "NCCL": CollectiveFailed,
        "ncclUnhandledCudaError": CollectiveFailed,
        "EngineCore": EngineFailed,
    }
)
"""Text in a plain RuntimeError, or in a plain ValueError as vLLM raises them -> our error."""


def as_ours(error: Exception) -> RlhfError:
    """Return `error` if it is ours, else our error with its type, first line and place in a person's file.

    >>> as_ours(MemoryError("no room\\nfor it"))
    OutOfDeviceMemory('MemoryError: no room')
    """
    if isinstance(error, RlhfError):
        return error
    return _fault(error)(described(error))


def class_name(kind: type) -> str:
    """Return `module.Class`, the form of the keys of FAULTS."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _fault(error: Exception) -> Fault:
    for kind in type(error).__mro__:
        if class_name(kind) in FAULTS:
            return FAULTS[class_name(kind)]
    if isinstance(error, RuntimeError | ValueError):
        return next((fault for phrase, fault in PHRASES.items() if phrase in str(error)), RankFailed)
    return RankFailed
