"""HybridFlow's transfer protocols (its table 3) as examples: each is what our rows do under certain placements.

There a protocol is a pair of functions, distribute and collect, that is chosen for each method. Here rows go to the
devices that need them from those that hold them, and the placements alone make the pattern. In all examples prompts
are answered on one device of another node and the results are wanted on a second one there; what is looked at is what
devices of the mesh in between receive (distribute) and send (collect). All rows are equally long, so halves are halves.
"""

from collections import defaultdict

import pytest

from prefect_rlhf.placement.devices.mesh import ClusterShape, Device
from prefect_rlhf.placement.devices.strategy import Coordinate
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.rows.moves import row_transfers
from prefect_rlhf.placement.rows.partition import RowIndices
from tests.support.strategies import GIB, on, ppo

CLUSTER = ClusterShape("two_nodes", 2, 8, 8 * GIB)
ALL: RowIndices = tuple(range(8))
OUTSIDE, AWAY = on("n1:0", "python"), on("n1:0", "megatron")
LENGTHS = {"actor_generate": (5,) * 8}
Pattern = dict[Coordinate, RowIndices]


def plan_of(**placements: Placement) -> ExecutionPlan:
    """PPO with every call on the other node but those told."""
    every = {call.name: OUTSIDE if call.kind == "compute" else AWAY for call in ppo()}
    every["advantages"] = on("n1:1", "python")
    return ExecutionPlan("example", CLUSTER, tuple((every | placements).items()))


def distributed(name: str, placement: Placement, key: str = "tokens") -> Pattern:
    """Which rows of what was generated elsewhere each coordinate of the call receives."""
    found: dict[Device, list[int]] = defaultdict(list)
    for move in row_transfers(ppo(), plan_of(**{name: placement}), name, told=LENGTHS):
        if key in move.keys:
            found[move.target] += move.rows
    return by_coordinate(placement, found)


def collected(name: str, placement: Placement) -> Pattern:
    """Which rows each coordinate of the call sends to where all results are wanted."""
    found: dict[Device, list[int]] = defaultdict(list)
    for move in row_transfers(ppo(), plan_of(**{name: placement}), "advantages", told=LENGTHS):
        if move.producer == name and move.source in placement.devices:
            found[move.source] += move.rows
    return by_coordinate(placement, found)


def by_coordinate(placement: Placement, rows: dict[Device, list[int]]) -> Pattern:
    at = dict(zip(placement.devices, placement.strategy.coordinates(), strict=True))
    return {at[device]: tuple(sorted(found)) for device, found in rows.items()}


def halves(dp: int) -> RowIndices:
    return ALL[4 * dp : 4 * dp + 4]


def test_one_to_all():
    """Broadcast to all ranks: one replica, whose every rank needs everything. All have the result, one sends it."""
    placement = on("n0:0-3", "megatron", tp=4)
    assert distributed("ref_inference", placement) == dict.fromkeys(placement.strategy.coordinates(), ALL)
    rows = collected("actor_generate", on("n0:0-3", "vllm", tp=4))
    assert sorted(row for sent in rows.values() for row in sent) == list(ALL), "each row once, from any that has it"
    assert len(rows) == 4


def test_3d_proto():
    """Split over dp and broadcast within the replica; collected from the last stage's tp rank 0 of each replica."""
    placement = on("n0:0-7", "megatron", dp=2, tp=2, pp=2)
    every = placement.strategy.coordinates()
    assert distributed("ref_inference", placement) == {at: halves(at.dp) for at in every}
    ends = [at for at in every if (at.pp, at.tp) == (1, 0)]
    assert collected("ref_inference", placement) == {at: halves(at.dp) for at in ends}


def test_3d_proto_sends_a_stage_only_the_keys_it_uses():
    """Where HybridFlow broadcasts to all stages, the middle ones of a longer pipeline get no tokens."""
    placement = on("n0:0-7", "megatron", dp=2, pp=4)
    used = [at for at in placement.strategy.coordinates() if at.pp in (0, 3)]
    assert distributed("ref_inference", placement) == {at: halves(at.dp) for at in used}
    prompts = distributed("ref_inference", placement, "prompt_length")
    assert prompts == {at: halves(at.dp) for at in used if at.pp == 3}


def test_3d_all_micro_dp():
    """The hybrid engine: trained as 1-4-2, the same eight devices generate as 1-2-2-2, four replicas of two.

    Each micro replica has a quarter of the rows; every row is collected once, from its micro replica.
    """
    placement = on("n0:0-7", "vllm", dp=4, tp=2)
    rows = collected("actor_generate", placement)
    for replica in range(4):
        quarter = [row for at, sent in rows.items() if at.dp == replica for row in sent]
        assert sorted(quarter) == list(ALL[2 * replica : 2 * replica + 2])
    train = on("n0:0-7", "megatron", dp=2, tp=4)
    plan = plan_of(actor_generate=placement, actor_train_step=train)
    moved = [m for m in row_transfers(ppo(), plan, "actor_train_step", told=LENGTHS) if "tokens" in m.keys]
    lacking = dict.fromkeys(train.devices, 2)  # a replica of four ranks: half of its rows are in each pair
    assert {device: sum(len(m.rows) for m in moved if m.target == device) for device in train.devices} == lacking


def test_3d_pp_only():
    """Broadcast along a pipeline that generates, since each stage samples alike; each stage then has the result."""
    placement = on("n0:0-3", "megatron", pp=4)
    rows = collected("actor_generate", placement)
    assert {at.pp for at in rows} == {0, 1, 2, 3}
    assert sorted(row for sent in rows.values() for row in sent) == list(ALL)


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_dp_proto(dp):
    """Split over all ranks; collected from each and put together."""
    placement = on(f"n0:0-{dp - 1}", "megatron", dp=dp)
    parts = {at: ALL[at.dp * 8 // dp : (at.dp + 1) * 8 // dp] for at in placement.strategy.coordinates()}
    assert distributed("ref_inference", placement) == parts
    assert collected("ref_inference", placement) == parts


def test_all_to_all():
    """Nothing is distributed, since every rank reads a dataset's rows for itself; collected from all."""
    placement = on("n0:0-7", "vllm", dp=8)
    assert not distributed("actor_generate", placement)
    assert collected("actor_generate", placement) == {at: (at.dp,) for at in placement.strategy.coordinates()}
