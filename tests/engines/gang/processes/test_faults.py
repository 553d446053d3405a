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
def test_every_library_error_maps_to_one_of_ours(name):
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


def of_nccl(what, detail, reason):
    """An error of NCCL as torch's NCCLUtils.hpp writes it."""
    where = "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94"
    text = f"NCCL error in: {where}, {what}, NCCL version 2.29.7\n{detail}\nLast error:\n{reason}\n"
    return torch.distributed.DistBackendError(text)


INFO = "(run with NCCL_DEBUG=INFO for details)"
ABORTED = (
    "NCCL communicator was aborted on rank 1.  Original reason for failure was: [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=60000) ran for 60001 "
    "milliseconds before timing out."
)
SETTING_UP = (
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: wait timeout after 300000ms, keys: /default_pg/0//cuda//0\nException raised from"
)
OF_NCCL = {
    "memory of a communicator": (
        of_nccl(
            f"unhandled cuda error {INFO}",
            "ncclUnhandledCudaError: Call to CUDA function failed.",
            "Cuda failure 2 'out of memory'",
        ),
        OutOfDeviceMemory,
        "Cuda failure 2 'out of memory'",
    ),
    "another failure of CUDA": (
        of_nccl(
            f"unhandled cuda error {INFO}",
            "ncclUnhandledCudaError: Call to CUDA function failed.",
            "Cuda failure 700 'an illegal memory access was encountered'",
        ),
        CollectiveFailed,
        "an illegal memory access",
    ),
    "small shared memory": (
        of_nccl(
            f"unhandled system error {INFO}",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
            "Error: failed to extend /dev/shm/nccl-OSeTSv to 33030532 bytes, error: No space left on device (28)",
        ),
        CollectiveFailed,
        "/dev/shm/nccl-OSeTSv to 33030532 bytes, error: No space left",
    ),
    "a rank that ended": (
        of_nccl(
            f"remote process exited or there was a network error {INFO}",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            "socketProgress: Connection closed by remote peer 10.0.0.2<43211>",
        ),
        CollectiveFailed,
        "closed by remote peer 10.0.0.2",
    ),
    "two ranks on a GPU": (
        of_nccl(
            "invalid usage (run with NCCL_DEBUG=WARN for details)",
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
        ),
        CollectiveFailed,
        "rank 1 and rank 0 both on CUDA device 1b000",
    ),
    "the watchdog": (torch.distributed.DistBackendError(ABORTED), CollectiveFailed, "OpType=ALLREDUCE"),
    "a rank that is not there": (torch.distributed.DistBackendError(SETTING_UP), CollectiveFailed, "from [0] via"),
    "torch's limit": (
        torch.distributed.DistBackendError("NCCL timeout in: /pytorch/NCCLUtils.cpp:117"),
        CollectiveFailed,
        "NCCL timeout",
    ),
    "vLLM's communicator": (
        RuntimeError(f"NCCL error: unhandled cuda error {INFO}"),
        CollectiveFailed,
        "unhandled cuda",
    ),
    "a full GPU under a kernel": (
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        OutOfDeviceMemory,
        "CUDA error: out of memory",
    ),
    "a kernel": (
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"),
        EngineFailed,
        "an illegal memory access",
    ),
}


@pytest.mark.parametrize("name", OF_NCCL)
def test_an_error_of_nccl_is_named_with_its_own_reason(name):
    error, expected, reason = OF_NCCL[name]
    ours = as_ours(error)
    assert type(ours) is expected
    assert reason in str(ours) and "\n" not in str(ours)


def test_our_own_errors_stay():
    """What is ours already is not wrapped."""
    error = StaleWeights("v2")
    assert as_ours(error) is error
