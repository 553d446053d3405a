"""A gang of a single rank in the controller's own process, for one device or for a debugger."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Generic, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from prefect_rlhf.engines.gang.calls_in_flight import CallsInFlight
from prefect_rlhf.engines.gang.failures import raise_first_failure
from prefect_rlhf.engines.gang.processes.messages import Request
from prefect_rlhf.engines.gang.processes.rank_process import reply_to
from prefect_rlhf.engines.gang.protocol import AnyRank, Arguments, Result
from prefect_rlhf.errors.errors import RankLost, RankSilent
from prefect_rlhf.placement.augmented.resources import Resource
from prefect_rlhf.placement.devices.mesh import Backend


@final
class InProcessGang(Generic[AnyRank]):
    """A world of one rank. It checks deadlines after calls, because a call in the caller's own thread cannot be
    interrupted.
    """

    def __init__(
        self,
        rank_factory: Callable[[int, int], AnyRank],
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
        self._target: AnyRank | None = rank_factory(0, 1)

    def call(
        self,
        method: Callable[[AnyRank, *Arguments], Result],
        arguments: Mapping[int, tuple[*Arguments]],
        *,
        doing: str,
        deadline_seconds: float,
        resource: Resource = "compute",
    ) -> dict[int, Result]:
        """See `Gang.call`. Raises RankSilent for a call past its deadline, but only after the call has returned."""
        with self._in_flight.noted(arguments, resource, doing):
            target = self._target
            if target is None:
                raise RankLost(f"no rank is left for {doing}: the gang was closed")
            torch.set_num_threads(self._num_threads)  # a setting per thread, and any thread may call
            began = time.monotonic()
            replies = {rank: reply_to(Request(method.__name__, values), target) for rank, values in arguments.items()}
        if self._target is None:  # an error from a destroyed world does not explain the end
            raise RankLost(f"rank 0 was ended in {doing}: the gang was closed")
        raise_first_failure(replies, doing)
        if time.monotonic() - began > deadline_seconds:
            self.close()
            raise RankSilent(f"rank 0 did not answer within {deadline_seconds:g} s to {doing}")
        return {rank: replies[rank].value for rank in arguments}

    def close(self) -> None:
        """Drop the rank's object; destroy the world if this gang created it. Idempotent."""
        self._target = None
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_world = False
