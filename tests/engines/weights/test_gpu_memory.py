"""The memory of a GPU as a rank reports it, and the limit of torch's share; a test sets the allocator's numbers."""

import pytest

from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.engines.weights.memory import gpu_memory
from tests.support.pretend_gpu import pretend_gpu
from tests.support.pretend_gpu.cuda import TOTAL_BYTES, Allocator

GIB = 1 << 30


@pytest.fixture
def memory():
    with pretend_gpu() as gpu:
        gpu.memory = Allocator(10 * GIB, 30 * GIB, 40 * GIB, 50 * GIB, TOTAL_BYTES - 33 * GIB)
        yield gpu.memory


def test_the_most_that_the_driver_counted_follows_from_what_torch_has_given_back(memory):
    """33 GiB are used now, 30 of them by torch. At its most torch had 50, so 53 were used."""
    found = gpu_memory()
    assert found._asdict() == {
        "allocated_bytes": 40 * GIB,
        "reserved_bytes": 50 * GIB,
        "used_bytes": 53 * GIB,
        "free_bytes": TOTAL_BYTES - 33 * GIB,
    }


def test_each_report_counts_since_the_last(memory):
    rank = Rank(0, 1)
    assert rank._report(0.0).gpu.allocated_bytes == 40 * GIB
    later = rank._report(0.0).gpu
    assert (later.allocated_bytes, later.reserved_bytes, later.used_bytes) == (10 * GIB, 30 * GIB, 33 * GIB)


def test_without_a_gpu_a_report_has_no_gpu():
    assert Rank(0, 1)._report(0.0).gpu is None


@pytest.mark.parametrize(("limit", "share"), [(60 * GIB, 0.75), (2 * TOTAL_BYTES, 1.0)])
def test_torch_is_limited_to_a_share_of_all_bytes_of_the_gpu(memory, limit, share):
    Rank(0, 1).limit_torch(limit)
    assert memory.limit == share
