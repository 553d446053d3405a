"""A gang of one rank in the controller's own process: one device, or a debugger, needs no other process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from prefect_rlhf.engines.gang.calls_in_flight import CallsInFlight
from prefect_rlhf.engines.gang.failures import raise_first_failure
from prefect_rlhf.engines.gang.messages import Request
from prefect_rlhf.engines.gang.rank_process import reply_to
from prefect_rlhf.placement.augmented.node import Resource
from prefect_rlhf.placement.errors import RankLost, RankSilent
from prefect_rlhf.placement.mesh import Backend


@final
class InProcessGang:
    """A world of one. Its deadlines are checked when calls return: nothing can stop them in the caller's own thread."""

    def __init__(
        self,
        rank_factory: Callable[[int, int], object],
        *,
        device: Backend = "cpu",
        environment: Mapping[str, str] | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.size = 1
        self._in_flight = CallsInFlight()
        os.environ.update(environment or {})
        self._num_threads = num_threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(self._num_threads)
        self._owns_world = not dist.is_initialized()
        if self._owns_world:
            backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        self._target: object | None = rank_factory(0, 1)

    def call(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        *,
        doing: str,
        deadline_seconds: float,
        resource: Resource = "compute",
    ) -> dict[int, Any]:
        """See `Gang.call`; past the deadline it raises RankSilent, late but all the same."""
        with self._in_flight.noted(arguments, resource, doing):
            target = self._target
            if target is None:
                raise RankLost(f"no rank is left for {doing}: the gang was closed")
            torch.set_num_threads(self._num_threads)  # it is kept for each thread, and any thread may call
            began = time.monotonic()
            replies = {rank: reply_to(Request(method, values), target) for rank, values in arguments.items()}
        if self._target is None:  # what the call raised in a world that is gone says nothing
            raise RankLost(f"rank 0 was ended in {doing}: the gang was closed")
        raise_first_failure(replies, doing)
        if time.monotonic() - began > deadline_seconds:
            self.close()
            raise RankSilent(f"rank 0 gave no answer within {deadline_seconds:g} s to {doing}")
        return {rank: replies[rank].value for rank in arguments}

    def close(self) -> None:
        """Forget the rank's object; leave the world if this gang made it. Idempotent."""
        self._target = None
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_world = False
