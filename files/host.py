"""The requirements of ranks with GPUs on their host: usable GPUs, a C compiler, shared and locked memory."""

import os
import resource
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.gpus import Gpu, check_gpus, visible_gpus

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the folder of shared memory, not a temporary file
LEAST_SHARED_BYTES = 1 << 30
"""Shared memory per node. A container without options has 64 MiB, and NCCL's messages between its GPUs fill that."""


def usable_gpus(numbers: Sequence[int], field: str) -> tuple[Gpu, ...]:
    """Return the GPUs at `numbers` in this process's list, if their ranks can start on this host.

    Raises InvalidInput for the first fault of GPUs, compiler or shared memory; `field` is the field with the numbers.
    """
    seen = visible_gpus()
    check_gpus(seen, numbers, field)
    compiler()
    shared_memory()
    return tuple(seen[number] for number in numbers)


def compiler() -> str:
    """Return the C compiler that Triton builds its launchers with. Raises InvalidInput without a compiler or its
    headers.
    """
    found = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "cc", "clang")), None)
    if found is None:
        raise InvalidInput("compiler", "no gcc, cc or clang", "a C compiler, with which Triton builds its launchers")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        raise InvalidInput("compiler", f"no {header}", "the headers of Python, such as the package python3-dev")
    return f"{found}, with the headers of Python"


def locked_memory() -> str:
    """Return the limit of locked memory, with advice if it is low."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{limit >> 10} KiB; NCCL over InfiniBand requires more: ulimit -l unlimited"


def shared_memory(folder: Path = SHARED_MEMORY) -> str:
    """Return the free shared memory. Raises InvalidInput if its total is too little for ranks with GPUs."""
    try:
        size = shutil.disk_usage(folder)
    except OSError as error:
        raise InvalidInput("shared memory", str(error), f"a folder {folder}") from error
    if size.total < LEAST_SHARED_BYTES:
        seen = f"{size.total >> 20} MiB in {folder}"
        raise InvalidInput(
            "shared memory", seen, f"at least {LEAST_SHARED_BYTES >> 20} MiB; in a container: --ipc=host"
        )
    return f"{size.free / (1 << 30):.1f} GiB free in {folder}"
