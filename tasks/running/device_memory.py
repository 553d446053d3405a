"""Checks that the gang's GPUs have the memory that the cluster declares, and that it is free; limits torch's share."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prefect_rlhf.engines.gang.protocol import Gang
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.errors.errors import InvalidInput, OutOfDeviceMemory
from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.memory.bytes import usable_bytes
from prefect_rlhf.placement.memory.overhead import torch_limits
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.tasks.running.training_run import TrainingRun

FREE_WAIT_SECONDS = 60.0
"""After a run was killed, its GPU is free only once the driver has unpinned the host memory, which can take this long.
A restart would otherwise fail on the memory of its own predecessor."""
POLL_SECONDS = 1.0


def check_device_memory(
    lease: Lease, gang: Gang[Rank], deadline_seconds: float, wait_seconds: float = FREE_WAIT_SECONDS
) -> None:
    """Check the GPUs of a gang before models are built.

    Raises InvalidInput for a GPU with less memory than its cluster declares, and OutOfDeviceMemory, with the processes
    that hold it, for a GPU whose memory is not free after `wait_seconds`. Without GPUs, the cluster itself defines a
    rank's memory, so no value can be compared.
    """
    if lease.kind == "cpu":
        return
    ranks: dict[int, tuple[()]] = dict.fromkeys(range(gang.size), ())
    declared = [lease.cluster.whole_memory_bytes(device.node) for device in lease.devices]
    for_plans = [lease.cluster.memory_bytes(device.node) for device in lease.devices]

    def memory() -> dict[int, tuple[int, int]]:
        return gang.call(Rank.device_memory, ranks, doing="report device memory", deadline_seconds=deadline_seconds)

    for rank, (total, _) in memory().items():
        if total < declared[rank]:
            right = f"at most the {total / GIB:.1f} GiB that {lease.devices[rank]} has"
            raise InvalidInput("device_memory_gib", f"{declared[rank] / GIB:g}", right)
    deadline = time.monotonic() + wait_seconds
    needed = [usable_bytes(num_bytes, lease.kind) for num_bytes in for_plans]
    while short := {rank: free for rank, (_, free) in memory().items() if free < needed[rank]}:
        if time.monotonic() >= deadline:
            rank, free = next(iter(short.items()))
            held = gang.call(
                Rank.device_holders, {rank: ()}, doing="list processes", deadline_seconds=deadline_seconds
            )[rank]
            raise OutOfDeviceMemory(
                f"{lease.devices[rank]} has {free / GIB:.1f} GiB free, and plans may use {needed[rank] / GIB:.1f}; "
                f"its processes: {held or 'the driver lists no process'}"
            )
        time.sleep(POLL_SECONDS)


def limit_torch(run: TrainingRun, gang: Gang[Rank], later: Sequence[ExecutionPlan] = ()) -> None:
    """Limit the memory that torch may reserve on each GPU to the plan's share for it, before models are built.

    Torch cannot lift a limit. So with `later` plans a GPU gets the largest limit of all plans, or no limit if any plan
    sets no limit for it.
    """
    limits = [torch_limits(run.graph, plan, run.lease.kind) for plan in (run.plan, *later)]
    limited = set.intersection(*map(set, limits))
    arguments = {run.rank(device): (max(each[device] for each in limits),) for device in sorted(limited)}
    if arguments:
        gang.call(Rank.limit_torch, arguments, doing="limit torch's memory", deadline_seconds=run.call_deadline_seconds)
