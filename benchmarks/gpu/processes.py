"""A gang of a single rank on a GPU: its start, its errors, and the memory that it leaves behind when it is killed."""

from __future__ import annotations

import os
import signal
import time
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.step import YES, Expected, Found, Machine, Step
from prefect_rlhf.placement.devices.mesh import Backend


class Holder:
    """A rank that takes memory, or fails to."""

    def __init__(self, rank: int, size: int) -> None:
        self._held: list[Any] = []

    def nothing(self) -> None:
        """Do nothing."""

    def hold(self, device_gib: int, pinned_gib: int) -> int:
        """Fill memory of the device and pinned memory of the host; return the process."""
        self._held += [torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(device_gib)]
        self._held += [torch.zeros(pinned_gib << 30, dtype=torch.uint8, pin_memory=True)] if pinned_gib else []
        torch.cuda.synchronize()
        return os.getpid()

    def workspace(self) -> None:
        """Ask cuBLAS for a workspace when no memory is left."""
        free, _ = torch.cuda.mem_get_info()
        self._held.append(torch.empty(max(1, free - (1 << 20)), dtype=torch.uint8, device="cuda"))
        square = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
        (square @ square).sum().item()


def gang_of_one(machine: Machine) -> Found:
    """Seconds of a start, the classes of two errors, and seconds until the memory of a killed rank is free."""
    from prefect_rlhf.engines.gang.local import LocalGang
    from prefect_rlhf.engines.gang.processes.messages import GangSettings
    from prefect_rlhf.errors.errors import RlhfError

    found = machine.found

    def started() -> LocalGang[Holder]:
        return LocalGang(GangSettings(1, Holder, "cuda", preload=()))

    def call(gang: LocalGang[Holder], method: Any, *arguments: Any) -> Any:
        return gang.call(method, {0: arguments}, doing="hold", deadline_seconds=120)[0]

    began = time.monotonic()
    gang = started()
    call(gang, Holder.hold, 1, 0)
    found["start_seconds"] = time.monotonic() - began
    for name, method, arguments in (("too_much", Holder.hold, (1000, 0)), ("no_workspace", Holder.workspace, ())):
        try:
            call(gang, method, *arguments)
            found[f"{name}_error"] = "no error"
        except RlhfError as error:
            found[f"{name}_error"] = type(error).__name__
        found[f"{name}_is_named"] = found[f"{name}_error"] == "OutOfDeviceMemory"
    gang.close()
    free_before = _free_gib()
    gang = started()
    process = call(gang, Holder.hold, int(free_before * 0.8), 30)
    os.kill(process, signal.SIGKILL)
    killed = time.monotonic()
    while _free_gib() < free_before - 1 and time.monotonic() - killed < 60:
        time.sleep(0.1)
    found["seconds_until_free"] = time.monotonic() - killed
    gang.close()
    return found


def empty_call_seconds(device: Backend, calls: int = 200) -> float:
    """Return the median seconds of a call that does nothing, on a rank in a process of its own."""
    from prefect_rlhf.engines.gang.local import LocalGang
    from prefect_rlhf.engines.gang.processes.messages import GangSettings

    measured = []
    gang = LocalGang(GangSettings(1, Holder, device, preload=()))
    try:
        for _ in range(calls):
            began = time.perf_counter()
            gang.call(Holder.nothing, {0: ()}, doing="nothing", deadline_seconds=60)
            measured.append(time.perf_counter() - began)
    finally:
        gang.close()
    return median(measured)


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


STEPS_OF_PROCESSES = (
    Step(
        "gang_of_one",
        6,
        240,
        gang_of_one,
        {
            "start_seconds": Expected(2, 20),
            "too_much_is_named": YES,
            "no_workspace_is_named": YES,
            "seconds_until_free": Expected(0, 5),
        },
        needs=frozenset({"hardware"}),
        findings="A11, N10",
    ),
)
