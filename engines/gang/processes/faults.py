"""Translates foreign errors into ours; only this file knows the error classes of torch, vLLM and safetensors.

Classes are named, not imported, so that a mapping of vLLM's errors does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
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

FULL_MEMORY = "out of memory"
"""Text of an error of CUDA, of NCCL or of vLLM's allocator, whatever its class."""
LAST_ERROR = "Last error:"
"""The line before NCCL's own reason in an error of torch, whose first line names a file of torch."""


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
        "Free memory on device": OutOfDeviceMemory,  # vLLM, before it builds an engine
        "No available memory for the cache blocks": OutOfDeviceMemory,  # vLLM
        "ALLOC_FAILED": OutOfDeviceMemory,  # cuBLAS and cuDNN
        "NCCL": CollectiveFailed,  # torch, and vLLM's own communicators
        "EngineCore": EngineFailed,
    }
)
"""Text in a plain RuntimeError, or in a plain ValueError as vLLM raises them -> our error."""


def as_ours(error: Exception) -> RlhfError:
    """Return `error` if it is ours, else our error with its type, first line and place in a user's file.

    >>> as_ours(MemoryError("no room\\nfor it"))
    OutOfDeviceMemory('MemoryError: no room')
    """
    if isinstance(error, RlhfError):
        return error
    reason = _reason_of_nccl(error)
    return _fault(error)(described(error) + (f": {reason}" if reason else ""))


def class_name(kind: type) -> str:
    """Return `module.Class`, the form of the keys of FAULTS."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _reason_of_nccl(error: Exception) -> str:
    """Return the line after LAST_ERROR; empty without it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((reason for line, reason in pairwise(lines) if line == LAST_ERROR), "")


def _fault(error: Exception) -> Fault:
    if isinstance(error, RuntimeError) and FULL_MEMORY in str(error):
        return OutOfDeviceMemory
    for kind in type(error).__mro__:
        if class_name(kind) in FAULTS:
            return FAULTS[class_name(kind)]
    if isinstance(error, RuntimeError | ValueError):
        return next((fault for phrase, fault in PHRASES.items() if phrase in str(error)), RankFailed)
    return RankFailed
