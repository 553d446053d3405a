"""The GPUs of this machine, as the driver lists them: which of them a process sees, and whether a run can use them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prefect_rlhf.errors.errors import InvalidInput

TOOL = "nvidia-smi"
COLUMNS = ("index", "uuid", "name", "mig.mode.current", "memory.total", "memory.free", "driver_version")
CAPABILITY = "compute_cap"  # tools of drivers before 510 refuse the whole query for it
QUERY = (TOOL, f"--query-gpu={','.join((*COLUMNS, CAPABILITY))}", "--format=csv,noheader,nounits")
OLD_QUERY = (TOOL, f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits")
QUERY_LIMIT_SECONDS = 60
VISIBLE = "CUDA_VISIBLE_DEVICES"
PCI_ORDER: Mapping[str, str] = MappingProxyType({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
"""GPUs are numbered as in the driver's list; CUDA's own default, the fastest first, may differ."""
LEAST_DRIVER = 580
"""torch 2.13 and vLLM 0.32 are builds for CUDA 13, whose release notes state this driver."""
LEAST_CAPABILITY = 8.0
"""Older GPUs have no bfloat16, and torch no flash attention for them."""
USABLE_SHARE = 0.985
"""How much of the memory that the driver lists plans count with. CUDA keeps up to 1.3%: it reports 79.1 GiB of
an H100's 79.6."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU from the driver's list. `number` is its place in PCI bus order."""

    number: int
    uuid: str
    name: str
    is_divided: bool  # into MIG slices
    memory_bytes: int
    free_bytes: int
    driver: str
    capability: float | None = None  # None: the tool did not say

    @property
    def plan_bytes(self) -> int:
        """The memory that plans may count on.

        >>> round(Gpu.parse("0, GPU-5d, NVIDIA H100, Disabled, 81559, 81000, 580.95.05").plan_bytes / (1 << 30), 2)
        78.45
        """
        return int(self.memory_bytes * USABLE_SHARE)

    @classmethod
    def parse(cls, row: str) -> Gpu:
        """Read a row of QUERY. Raises ValueError for anything else.

        >>> Gpu.parse("0, GPU-5d, NVIDIA H200, Disabled, 143771, 143000, 580.95.05").memory_bytes >> 30
        140
        >>> Gpu.parse("0, GPU-5d, Tesla T4, Disabled, 15360, 15000, 580.95.05, 7.5").capability
        7.5
        """
        number, uuid, name, mig, memory, free, driver, *more = (cell.strip() for cell in row.split(","))
        capability = float(*more) if more else None
        return cls(int(number), uuid, name, mig == "Enabled", int(memory) * MIB, int(free) * MIB, driver, capability)


def listed_gpus(field: str = "kind", otherwise: str = "node_kinds that do") -> tuple[Gpu, ...]:
    """Return all GPUs of this machine, as the driver's tool lists them.

    Raises InvalidInput for `field` if no GPU responds. If the tool is missing, the error offers `otherwise` as an
    alternative.
    """
    if shutil.which(TOOL) is None:
        raise InvalidInput(field, "cuda", f"a machine with {TOOL}, which names its GPUs, or {otherwise}")
    try:
        answer = _asked(QUERY)
        if answer.returncode and CAPABILITY in answer.stdout + answer.stderr:
            answer = _asked(OLD_QUERY)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"did not respond within {QUERY_LIMIT_SECONDS} s" if not isinstance(error, OSError) else str(error)
        raise InvalidInput(field, "cuda", f"a GPU; {TOOL}: {reason}") from error
    try:
        found = tuple(Gpu.parse(row) for row in answer.stdout.splitlines())
    except ValueError:
        found = ()
    if answer.returncode or not found:
        raise InvalidInput(field, "cuda", f"a GPU; {TOOL} reports: {(answer.stdout + answer.stderr).strip()[:200]}")
    return found


def _asked(query: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(query, capture_output=True, text=True, check=False, timeout=QUERY_LIMIT_SECONDS)


def visible_gpus(
    field: str = "kind", otherwise: str = "node_kinds that do", environment: Mapping[str, str] = os.environ
) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order; without it, all.

    As in CUDA, the list ends at the first entry that names no GPU. Raises the errors of `listed_gpus`.
    """
    every = listed_gpus(field, otherwise)
    return every if VISIBLE not in environment else _of_list(every, environment[VISIBLE].split(","))


def _of_list(every: Sequence[Gpu], entries: Sequence[str]) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    for entry in entries:
        named = [gpu for gpu in every if entry and (entry == str(gpu.number) or gpu.uuid.startswith(entry))]
        if len(named) != 1:
            break
        found += named
    return tuple(found)


def only_gpus(numbers: Sequence[int], own: str | None) -> dict[str, str]:
    """Return variables that show a process only the GPUs at `numbers` of its parent's list, in their order.

    `own` is the parent's CUDA_VISIBLE_DEVICES; None if it sees all GPUs. Raises InvalidInput for a number beyond the
    list.

    >>> only_gpus([0, 2], "4,5,6,7")["CUDA_VISIBLE_DEVICES"]
    '4,6'
    """
    entries = None if own is None else [entry.strip() for entry in own.split(",") if entry.strip()]
    if entries is not None and max(numbers, default=-1) >= len(entries):
        raise InvalidInput(VISIBLE, own, f"at least {max(numbers) + 1} GPUs, which the lease has")
    chosen = [str(number) if entries is None else entries[number] for number in numbers]
    return {VISIBLE: ",".join(chosen), **PCI_ORDER}


def check_gpus(seen: Sequence[Gpu], numbers: Sequence[int], field: str = "devices") -> None:
    """Raise InvalidInput if a gang cannot run on the GPUs at `numbers` in the list of this process."""
    if max(numbers, default=-1) >= len(seen):
        expected = f"at most {len(seen)}, the number of GPUs that {VISIBLE} leaves to this process"
        raise InvalidInput(field, max(numbers) + 1, expected)
    used = [seen[number] for number in numbers]
    for gpu in used:
        if gpu.is_divided:
            whole = f"whole GPUs, since NCCL does not join slices: nvidia-smi -i {gpu.number} -mig 0"
            raise InvalidInput("kind", f"cuda: GPU {gpu.number} has MIG enabled", whole)
        if gpu.name != used[0].name:
            names = f"cuda: GPU {used[0].number} is {used[0].name}, GPU {gpu.number} is {gpu.name}"
            raise InvalidInput("kind", names, f"GPUs of a single kind; select them with {VISIBLE}")
        if int(gpu.driver.partition(".")[0]) < LEAST_DRIVER:
            raise InvalidInput("driver", gpu.driver, f"{LEAST_DRIVER} or newer, which builds for CUDA 13 require")
        if gpu.capability is not None and gpu.capability < LEAST_CAPABILITY:
            seen_one = f"cuda: GPU {gpu.number} is {gpu.name}, of compute capability {gpu.capability:g}"
            raise InvalidInput(
                "kind", seen_one, f"{LEAST_CAPABILITY:g} or newer, such as A100 or L40S: it has no bfloat16"
            )
