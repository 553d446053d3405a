"""Foreign errors become ours."""

import inspect

import pytest
import safetensors
import torch
import torch.distributed
import vllm.exceptions
import vllm.v1.engine.exceptions

from prefect_rlhf.engines.gang.processes.faults import FAULTS, as_ours, class_name
from prefect_rlhf.errors.errors import (
    CollectiveFailed,
    EngineFailed,
    InvalidInput,
    OutOfDeviceMemory,
    RankFailed,
    StaleWeights,
)

pytestmark = pytest.mark.quick


def exceptions_of(*modules):
    found = {}
    for module in modules:
        for kind in vars(module).values():
            if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ != "builtins":
                found[class_name(kind)] = kind
    return found


FOREIGN = exceptions_of(torch, torch.cuda, torch.distributed, vllm.exceptions, vllm.v1.engine.exceptions, safetensors)


def test_the_libraries_define_errors():
    """The enumeration below enumerates something."""
    assert len(FOREIGN) >= 15


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_every_error_of_the_libraries_has_one_of_ours(name):
    """An error class that torch, vLLM or safetensors add must be given a name here."""
    assert any(class_name(base) in FAULTS for base in FOREIGN[name].__mro__), f"{name} is not in FAULTS"


def test_every_name_in_the_map_exists():
    """No entry outlives the class it names."""
    assert set(FAULTS) - {"builtins.MemoryError"} <= set(FOREIGN)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OutOfDeviceMemory),
        (RuntimeError("NCCL communicator was aborted on rank 1."), CollectiveFailed),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OutOfDeviceMemory),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
            OutOfDeviceMemory,
        ),
        (RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62"), OutOfDeviceMemory),
        (ValueError("Free memory on device cuda:0 (0.4/79.1 GiB) on startup is less than desired"), OutOfDeviceMemory),
        (ValueError("No available memory for the cache blocks. Try increasing"), OutOfDeviceMemory),
        (ValueError("too many values to unpack"), RankFailed),
        (torch.distributed.DistBackendError("NCCL error"), CollectiveFailed),
        (torch.distributed.DistStoreError("timeout"), CollectiveFailed),
        (
            RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
            CollectiveFailed,
        ),
        (vllm.v1.engine.exceptions.EngineDeadError(), EngineFailed),
        (safetensors.SafetensorError("HeaderTooLarge"), InvalidInput),
        (RuntimeError("shapes differ"), RankFailed),
        (KeyError("x"), RankFailed),
    ],
)
def test_errors_are_named(error, expected):
    """The most specific of our names, with the foreign type and first line as the reason."""
    ours = as_ours(error)
    assert type(ours) is expected
    assert type(error).__name__ in str(ours) or expected is InvalidInput
    assert "\n" not in str(ours)


def test_our_own_errors_stay():
    """What is ours already is not wrapped."""
    error = StaleWeights("v2")
    assert as_ours(error) is error
