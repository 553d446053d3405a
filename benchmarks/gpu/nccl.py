"""NCCL between several GPUs: the first message of a world, and the bytes of communicators."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu.step import YES, Constant, Expected, Found, Machine, Step
from prefect_rlhf.placement.memory.bytes import MIB
from prefect_rlhf.placement.memory.overhead import GROUP_BYTES, PAIR_BYTES, REDUCE_BUFFER_BYTES

LIMIT = timedelta(seconds=40)


def first_messages(machine: Machine) -> Found:
    """A pair of a world exchanges tensors: after a sum over the whole world, and as the first use of the world."""
    found = machine.found
    for name, function in (("after_a_sum", _pair_after_a_sum), ("as_the_first_use", _pair_first)):
        try:
            found[f"pair_{name}"] = min(_in_world(machine.num_gpus, function)) == 1
        except Exception as error:  # noqa: BLE001  a hang that NCCL ends is a finding
            found[f"pair_{name}"], found[f"pair_{name}_error"] = False, str(error).splitlines()[-1][:200]
    return found


def communicator_bytes(machine: Machine) -> Found:
    """Memory that the driver counts before and after a communicator of two GPUs, and of all."""
    pair, group = zip(*_in_world(machine.num_gpus, _communicators), strict=True)
    found = {"pair": max(pair), "group": max(group)}
    return {f"{name}_bytes": value for name, value in found.items()} | {f"{n}_mib": v / MIB for n, v in found.items()}


def reduce_buffers(machine: Machine) -> Found:
    """Memory that vLLM's own buffers for sums over two ranks take, besides NCCL's."""
    taken = max(_in_world(2, _reduce_buffers))
    return {"reduce_buffer_bytes": taken, "reduce_buffer_mib": taken / MIB}


def rank_orders(machine: Machine) -> Found:
    """Groups whose ranks are not in ascending order, as plans make them: a sum and a gather over 0, 2, 1, 3."""
    return {"orders_right": min(_in_world(min(4, machine.num_gpus), _unordered)) == 1}


def _pair_first(rank: int) -> list[float]:
    return [_exchange(rank)]


def _pair_after_a_sum(rank: int) -> list[float]:
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    return [_exchange(rank)]


def _exchange(rank: int) -> float:
    """Send from rank 0 to rank 1 in a batch; return 1 if the numbers arrive."""
    sent, received = torch.arange(1 << 20, device="cuda"), torch.zeros(1 << 20, dtype=torch.long, device="cuda")
    if rank > 1:
        return 1
    message = dist.P2POp(dist.isend, sent, 1) if rank == 0 else dist.P2POp(dist.irecv, received, 0)
    for work in dist.batch_isend_irecv([message]):
        work.wait()
    torch.cuda.synchronize()
    return float(rank == 0 or torch.equal(received, sent))


def _communicators(rank: int) -> list[float]:
    kept, found = torch.zeros(1, device="cuda"), []
    dist.all_reduce(kept)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size() - 1, 2)]
    whole = dist.new_group()
    for groups in (pairs, [whole]):
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        for group in groups:
            if rank in dist.get_process_group_ranks(group):
                dist.all_reduce(kept, group=group)
                dist.all_reduce(torch.zeros(1 << 24, device="cuda"), group=group)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        found.append(float(max(0, before - torch.cuda.mem_get_info()[0])))
    return found


def _reduce_buffers(rank: int) -> list[float]:
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from vllm.distributed.device_communicators.symm_mem import SymmMemCommunicator

    dist.all_reduce(torch.zeros(1, device="cuda"))
    device, on_host = torch.device("cuda", rank), dist.new_group(backend="gloo")
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    kept = CustomAllreduce(on_host, device), SymmMemCommunicator(dist.group.WORLD, device)
    torch.cuda.synchronize()
    taken = float(max(0, before - torch.cuda.mem_get_info()[0]))
    del kept
    return [taken]


def _unordered(rank: int) -> list[float]:
    order = [0, 2, 1, 3][: dist.get_world_size()] if dist.get_world_size() > 2 else [1, 0]
    group = dist.new_group(order, sort_ranks=False)
    mine = torch.full((4,), float(rank), device="cuda")
    parts = [torch.zeros(4, device="cuda") for _ in order]
    dist.all_gather(parts, mine, group=group)
    return [float([int(part[0]) for part in parts] == order)]


def _in_world(size: int, function: Callable[[int], list[float]]) -> list[Any]:
    """Run a function on each rank of a world of NCCL; return what each returns, a number alone without its list."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (size, folder, function), nprocs=size)
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(size)]
    return [each[0] if len(each) == 1 else each for each in found]


def _rank(rank: int, size: int, folder: str, function: Callable[[int], list[float]]) -> None:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=LIMIT)
    torch.save(function(rank), Path(folder) / f"{rank}.pt")
    dist.barrier()


_SEVERAL = frozenset({"hardware", "several"})
STEPS_OF_NCCL = (
    Step("first_messages", 0, 180, first_messages, {"pair_after_a_sum": YES}, needs=_SEVERAL, findings="A1"),
    Step("rank_orders", 0, 90, rank_orders, {"orders_right": YES}, needs=_SEVERAL, findings="A3"),
    Step(
        "communicator_bytes",
        0,
        120,
        communicator_bytes,
        {"pair_mib": Expected(50, 544), "group_mib": Expected(50, 688)},
        needs=_SEVERAL,
        findings="A9, D2",
        constants=(
            Constant("PAIR_BYTES", "placement/memory/overhead.py", PAIR_BYTES, "pair_bytes"),
            Constant("GROUP_BYTES", "placement/memory/overhead.py", GROUP_BYTES, "group_bytes"),
        ),
    ),
    Step(
        "reduce_buffers",
        0,
        120,
        reduce_buffers,
        {"reduce_buffer_mib": Expected(24, REDUCE_BUFFER_BYTES / MIB)},
        needs=_SEVERAL | {"vllm"},
        findings="D6",
        constants=(
            Constant("REDUCE_BUFFER_BYTES", "placement/memory/overhead.py", REDUCE_BUFFER_BYTES, "reduce_buffer_bytes"),
        ),
    ),
)
