"""Imported by a rank, or by the process that forks it, before all else: check its calls of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from prefect_rlhf.engines.gang.processes import rank_process
from tests.support.nccl_rules.rules import Exempt, Rules

COLLECTIVES = tuple(
    name
    for name in vars(dist.ProcessGroup)
    if name.startswith(("all", "_all", "reduce", "_reduce", "broadcast", "gather", "scatter"))
)
OF_HOSTS = (
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
"""Functions of torch.distributed whose tensors are on the host."""

exempt = Exempt()


@cache
def rules_of(world: dist.ProcessGroup) -> Rules:
    """Return this rank's rules in a world."""
    return Rules()


def rules() -> Rules:
    """Return this rank's rules in the present world."""
    return rules_of(distributed_c10d._get_default_group())


def checked_collective(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a group that is checked."""

    @wraps(original)
    def method(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        if group.size() > 1 and not exempt.now:
            rules().collective(group, name)
        return original(group, *args, **options)

    return method


def checked_message(original: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Return `send` or `recv` of a group, which is checked outside of a batch."""

    @wraps(original)
    def method(group: dist.ProcessGroup, tensors: Any, peer: int, tag: int) -> Any:
        if not exempt.now:
            check(rules(), group, dist.get_global_rank(group, peer))
        return original(group, tensors, peer, tag)

    return method


def exempted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose calls are exempt."""

    @wraps(original)
    def function(*args: Any, **options: Any) -> Any:
        with exempt.calls():
            return original(*args, **options)

    return function


def checked_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `batch_isend_irecv`, which is checked as a whole."""

    @wraps(original)
    def function(operations: list[dist.P2POp]) -> Any:
        if not exempt.now:
            group = operations[0].group or distributed_c10d._get_default_group()
            rules().batch(group, [operation.peer for operation in operations])
        with exempt.calls():
            return original(operations)

    return function


def open_communicators(of_rank: Iterable[dist.ProcessGroup]) -> None:
    """Do what GPU ranks do, on the host."""
    for group in of_rank:
        dist.all_reduce(torch.zeros(1), group=group)


for each in COLLECTIVES:
    setattr(dist.ProcessGroup, each, checked_collective(each, getattr(dist.ProcessGroup, each)))
dist.ProcessGroup.send = checked_message(dist.ProcessGroup.send, Rules.send)
dist.ProcessGroup.recv = checked_message(dist.ProcessGroup.recv, Rules.receive)
for each in OF_HOSTS:
    function = exempted(getattr(dist, each))
    setattr(dist, each, function)
    setattr(distributed_c10d, each, function)
dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = checked_batch(dist.batch_isend_irecv)
rank_process.open_communicators = open_communicators
