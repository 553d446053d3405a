"""Room: what plans keep free of each device unless a person states another share, and a file's plan may fill."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.forms.plan_options import plan_options
from prefect_rlhf.flows.hardware.cluster_spec import parse_cluster, site_of
from prefect_rlhf.placement.devices.mesh import MOST_ROOM, ClusterShape
from prefect_rlhf.placement.memory.bytes import GIB, usable_bytes
from prefect_rlhf.placement.memory.certificate import NEARLY_FULL
from prefect_rlhf.placement.memory.overhead import torch_limits
from prefect_rlhf.placement.memory.processes import ALLOCATOR_SHARES, rank_program_bytes
from prefect_rlhf.placement.memory.room import CARD_ROOM, with_room, without_room
from prefect_rlhf.placement.plan import ExecutionPlan
from tests.support.strategies import dpo, on

CARD = ClusterShape("card", 1, 8, 80 * GIB)


def test_a_plan_keeps_room_of_each_gpu_unless_a_headroom_is_stated():
    kept = with_room(CARD, None, "cuda")
    assert kept.memory_bytes(0) == int(80 * GIB * (1 - CARD_ROOM)) and kept.kept_share == CARD_ROOM
    for stated in (0.0, 0.1, 0.5):
        assert with_room(CARD, stated, "cuda").memory_bytes(0) == int(80 * GIB * (1 - stated))
        assert with_room(kept, stated, "cuda").room == 0


def test_the_plan_of_a_file_may_fill_the_room_but_no_stated_headroom():
    assert without_room(with_room(CARD, None, "cuda")).memory_bytes(0) == 80 * GIB
    assert without_room(with_room(CARD, 0.1, "cuda")).memory_bytes(0) == int(80 * GIB * 0.9)


def test_a_plan_with_room_is_not_nearly_full():
    assert pytest.approx(NEARLY_FULL) == 1 - CARD_ROOM


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("gibibytes", [3, 8, 64])
def test_a_cpu_keeps_room_for_its_process_by_the_numbers_of_a_dry_run(devices, gibibytes):
    """Tensors that fill all that a plan may fill, what allocators keep of them, and programs: all of the device."""
    cluster = with_room(ClusterShape("desk", 1, devices, gibibytes * GIB), None, "cpu")
    tensors = usable_bytes(cluster.memory_bytes(0), "cpu")
    process = tensors * (1 + ALLOCATOR_SHARES[0]) + rank_program_bytes(devices)
    assert cluster.room < MOST_ROOM
    assert process == pytest.approx(gibibytes * GIB, rel=1e-6)


def test_a_small_cpu_device_keeps_at_most_half():
    for mebibytes, room in ((2048, MOST_ROOM), (1000, MOST_ROOM), (64, 0.0)):
        cluster = with_room(ClusterShape("desk", 1, 1, mebibytes << 20), None, "cpu")
        assert cluster.room == room or 0 < cluster.room < room


def test_torch_may_reserve_the_room_and_not_a_stated_headroom():
    placements = tuple((call.name, on("n0:0-7", "megatron", dp=8)) for call in dpo())
    limits = []
    for stated in (0.0, None, 0.1):
        plan = ExecutionPlan("mine", with_room(CARD, stated, "cuda"), placements)
        limits.append(min(torch_limits(dpo(), plan, "cuda").values()))
    assert limits[0] == limits[1] > limits[2]


def test_a_question_and_a_run_keep_the_same_room():
    options = plan_options({"cluster": "1x8:h100"})
    assert options.headroom is None
    assert site_of(parse_cluster("1x8:h100"), headroom=options.headroom).cluster.room == CARD_ROOM


@pytest.mark.parametrize("headroom", ["51%", 0.9, 1])
def test_a_headroom_above_half_is_refused_in_a_line(headroom):
    with pytest.raises(InvalidInput, match=r"^headroom: got .*, expected at most 0\.5$"):
        plan_options({"headroom": headroom})
