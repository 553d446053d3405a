"""GPUs with less memory than a plan was certified for, or with too little free, are refused before models are built."""

from pathlib import Path

import pytest

from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.errors.errors import InvalidInput, OutOfDeviceMemory
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device
from prefect_rlhf.placement.memory.overhead import torch_limits
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.tasks.running import device_memory
from prefect_rlhf.tasks.running.device_memory import check_device_memory, limit_torch
from prefect_rlhf.tasks.running.training_run import TrainingRun
from tests.support.strategies import dpo, placed, ppo
from tests.tasks.small_tokenizer import alone

GIB = 1 << 30
MIXED = ClusterShape("mixed", 2, 1, 31 * GIB, node_memory_bytes=(79 * GIB, 31 * GIB))


class Answers:
    """A gang whose ranks have so much memory; `free` are the shares that are free, call by call."""

    def __init__(self, *sizes: float, free=(1.0,)) -> None:
        self.size, self._sizes, self._free = len(sizes), sizes, list(free)

    def call(self, method, arguments, *, doing, deadline_seconds):
        if method is Rank.device_holders:
            return dict.fromkeys(arguments, "pid 4711 python 60000 MiB")
        assert method is Rank.device_memory
        share = self._free.pop(0) if self._free[1:] else self._free[0]
        return {rank: (int(self._sizes[rank] * GIB), int(self._sizes[rank] * share * GIB)) for rank in arguments}


def lease(kind):
    return Lease("mesh", "1", MIXED, MIXED.whole, MIXED.whole.devices(), kind)


def test_gpus_with_their_datasheets_memory_are_accepted():
    """An A100 of 80 GB has 79.15 GiB, a V100 of 32 GB 31.7."""
    check_device_memory(lease("cuda"), Answers(79.15, 31.7), 1.0)


@pytest.mark.parametrize("has", [15.8, 30.99])
def test_the_first_gpu_with_less_is_named(has):
    with pytest.raises(InvalidInput) as caught:
        check_device_memory(lease("cuda"), Answers(79.15, has), 1.0)
    assert str(caught.value) == f"device_memory_gib: got '31', expected at most the {has:.1f} GiB that n1:0 has"


def test_a_run_waits_for_the_memory_of_its_predecessor(monkeypatch):
    monkeypatch.setattr(device_memory, "POLL_SECONDS", 0.0)
    gang = Answers(79.15, 31.7, free=(1.0, 0.2, 0.5, 0.99))
    check_device_memory(lease("cuda"), gang, 1.0)
    assert gang._free == [0.99]


def test_a_full_gpu_is_named_with_the_process_that_fills_it(monkeypatch):
    monkeypatch.setattr(device_memory, "POLL_SECONDS", 0.0)
    with pytest.raises(OutOfDeviceMemory) as caught:
        check_device_memory(lease("cuda"), Answers(79.15, 31.7, free=(0.1,)), 1.0, wait_seconds=0.01)
    assert str(caught.value) == (
        "n0:0 has 7.9 GiB free, and plans may use 74.9; its processes: pid 4711 python 60000 MiB"
    )


def test_without_gpus_no_memory_is_checked():
    check_device_memory(lease("cpu"), Answers(), 1.0)


def test_each_rank_of_a_plan_limits_torch_before_models_are_built():
    asked = []

    class Gang:
        def call(self, method, arguments, *, doing, deadline_seconds):
            asked.append((method, arguments))

    shape = ClusterShape("two", 1, 2, 80 * GIB)
    plan = preset("flattening", dpo(), shape, shape.whole)
    for kind in ("cpu", "cuda"):
        held = Lease("mesh", "1", shape, shape.whole, shape.whole.devices(), kind)
        limit_torch(TrainingRun(dpo(), plan, 1, held, {}, alone(), Path(), 0, 8, 1.0), Gang())
    ((method, arguments),) = asked
    limits = torch_limits(dpo(), plan, "cuda")
    assert method is Rank.limit_torch
    assert arguments == {0: (limits[Device(0, 0)],), 1: (limits[Device(0, 1)],)}


def test_with_later_plans_torch_has_the_largest_limit_or_none():
    """A plan with an engine that sleeps sets no limit, and a limit could not be lifted."""
    asked = []

    class Gang:
        def call(self, method, arguments, *, doing, deadline_seconds):
            asked.append(arguments)

    shape = ClusterShape("two", 1, 2, 80 * GIB)
    held = Lease("mesh", "1", shape, shape.whole, shape.whole.devices(), "cuda")
    first, narrow = (preset("flattening", ppo(), shape, shape.whole), preset("split", ppo(), shape, shape.whole))
    asleep = placed(first, "actor_generate", offload="all")
    run = TrainingRun(ppo(), first, 1, held, {}, alone(), Path(), 0, 8, 1.0)
    limit_torch(run, Gang(), [narrow])
    limits = [torch_limits(ppo(), plan, "cuda") for plan in (first, narrow)]
    assert asked == [{rank: (max(each[Device(0, rank)] for each in limits),) for rank in (0, 1)}]
    limit_torch(run, Gang(), [asleep])
    assert len(asked) == 1
