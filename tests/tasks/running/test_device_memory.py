"""A plan that was certified for more memory than its GPUs have is refused before anything is built."""

import pytest

from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.tasks.running.device_memory import check_device_memory

GIB = 1 << 30
MIXED = ClusterShape("mixed", 2, 1, 32 * GIB, node_memory_bytes=(80 * GIB, 32 * GIB))


class Answers:
    """A gang whose ranks have so much memory."""

    def __init__(self, *sizes: float) -> None:
        self.size, self._sizes = len(sizes), sizes

    def call(self, method, arguments, *, doing, deadline_seconds):
        assert method is Rank.device_memory_bytes
        return {rank: int(self._sizes[rank] * GIB) for rank in arguments}


def lease(kind):
    return Lease("mesh", "1", MIXED, MIXED.whole, MIXED.whole.devices(), kind)


def test_gpus_that_have_what_their_names_say_are_taken():
    """An A100 of 80 GB has 79.15 GiB, a V100 of 32 GB 31.7."""
    check_device_memory(lease("cuda"), Answers(79.15, 31.7), 1.0)


def test_the_first_gpu_with_less_is_named():
    with pytest.raises(InvalidInput) as caught:
        check_device_memory(lease("cuda"), Answers(79.15, 15.8), 1.0)
    assert str(caught.value) == "device_memory_gib: got '32', expected at most the 15.8 GiB that n1:0 has"


def test_without_gpus_nothing_is_asked():
    check_device_memory(lease("cpu"), Answers(), 1.0)
