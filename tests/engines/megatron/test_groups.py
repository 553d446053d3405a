"""Process groups against the example of ReaL's implementation notes: two calls on a mesh of 2 x 8 GPUs."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import prefect_rlhf.engines.megatron.groups as groups_module
from prefect_rlhf.engines.megatron.groups import build_groups
from prefect_rlhf.placement.devices.strategy import Strategy

made, opened = {}, {}
groups_module.open_communicators = lambda of_rank: opened.setdefault(key, []).append(
    [dist.get_process_group_ranks(group) for group in of_rank]
)
cases = {
    "1": (range(8, 16), Strategy(2, 2, 2)),
    "2": (range(16), Strategy(4, 4, 1)),
    "3": ((0, 2, 1, 3, 12, 8), Strategy(1, 2, 3)),
    "4": ((7, 2, 5, 0), Strategy(1, 1, 4)),
}
for name, (ranks, strategy) in cases.items():
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
        key = f"{name}/{rank}"
        groups = build_groups(tuple(ranks), strategy, rank)
        for axis in ("tp", "dp", "pp", "mesh"):
            made.setdefault(name + axis, []).append(dist.get_process_group_ranks(getattr(groups, axis)))
        again = build_groups(tuple(ranks), strategy, rank)
        made.setdefault("again", []).append([again.mesh is groups.mesh, again.dp is groups.dp, again.tp is groups.tp])
        dist.destroy_process_group()
    key = None
json.dump([made, opened], sys.stdout)
"""


@pytest.fixture(scope="module")
def output():
    """What the script found. Torch's fake backend lets a single process be every rank."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    printed = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=True).stdout
    return json.loads(printed)


@pytest.fixture
def made(output):
    """For each call and axis the groups that its ranks made."""
    return {key: {tuple(group) for group in groups} for key, groups in output[0].items()}


EXPECTED = {
    "1pp": {(8, 12), (9, 13), (10, 14), (11, 15)},
    "1tp": {(8, 9), (10, 11), (12, 13), (14, 15)},
    "1dp": {(8, 10), (9, 11), (12, 14), (13, 15)},
    "1mesh": {tuple(range(8, 16))},
    "2tp": {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)},
    "2dp": {(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)},
    "2mesh": {tuple(range(16))},
    "2pp": {(rank,) for rank in range(16)},  # the notes name one group of all ranks: a slip, for pp is 1
}


@pytest.mark.slow
@pytest.mark.parametrize("group", EXPECTED)
def test_groups_match_reals_notes(made, group):
    """Call 1 has dp 2, tp 2, pp 2 on the second node, call 2 dp 4, tp 4 on both."""
    assert made[group] == EXPECTED[group]


@pytest.mark.slow
def test_a_second_instance_on_the_same_ranks_makes_no_group(made):
    """A group holds a communicator and, with gloo, a thread: a rank has one for the same members."""
    assert made["again"] == {(True, True, True)}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1", "2", "3", "4"])
def test_all_members_open_the_communicators_of_their_groups_in_orders_that_end(output, case):
    """NCCL's first use of a group waits for all its members: here each rank's list is worked off as they would."""
    waiting = {
        int(key.partition("/")[2]): [tuple(group) for group in first]
        for key, (first, *_) in output[1].items()
        if key.startswith(f"{case}/")
    }
    assert waiting and all(waiting.values())
    while any(waiting.values()):
        ready = [
            group
            for groups in waiting.values()
            for group in groups[:1]
            if all(waiting[m][:1] == [group] for m in group)
        ]
        assert ready, f"every rank waits: {waiting}"
        for member in ready[0]:
            waiting[member].pop(0)
