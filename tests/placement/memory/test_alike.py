"""Devices alike: classes and groups in arrays are those that counting device by device finds."""

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.memory.alike import classes, device_numbers, spread_by_replica
from prefect_rlhf.placement.memory.overhead import _groups
from prefect_rlhf.placement.plan import ModelInstance, device_coordinates

SIXTEEN = DeviceMesh(1, 2, 0, 8)


@st.composite
def instances_of_sixteen(draw):
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    dp = 16 // (tp * pp)
    ep = draw(st.sampled_from([ep for ep in (1, 2, 4) if dp % ep == 0]))
    order = tuple(draw(st.permutations(range(16)))) if draw(st.booleans()) else ()
    return ModelInstance("actor", "megatron", SIXTEEN, Strategy(dp, tp, pp, ep), order)


@given(st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=4))
def test_classes_are_the_devices_with_equal_columns(columns):
    first, found = classes([np.array(column) for column in columns], 12)
    rows = list(zip(*columns, strict=True))
    for one in range(12):
        assert rows[first[found[one]]] == rows[one]
        assert first[found[one]] == rows.index(rows[one])


@given(instances_of_sixteen())
def test_a_spread_has_the_value_of_each_devices_replica_and_stage(instance):
    spread = spread_by_replica(instance, 8, range(instance.strategy.dp), lambda replica, stage: (replica, stage))
    found = {(n // 8, n % 8): spread.values[kind] for n, kind in zip(spread.numbers, spread.kinds, strict=True)}
    assert found == {tuple(device): (at.dp, at.pp) for device, at in device_coordinates(instance)}
    assert device_numbers(instance, 8).tolist() == [device.node * 8 + device.index for device in instance.devices]


@given(instances_of_sixteen(), st.booleans(), st.sets(st.sampled_from(["generate", "inference", "train_step"])))
def test_groups_are_the_devices_that_share_all_other_coordinates(instance, sums_embeddings, kinds):
    """The oracle goes device by device, with the axes that the members of a group share."""
    ep, pp = instance.strategy.ep, instance.strategy.pp
    shared = [lambda at: (at.dp, at.pp), lambda at: (at.dp, at.tp)]
    if ep > 1:
        shared.append(lambda at: (at.dp // ep, at.tp, at.pp))
    if "train_step" in kinds:
        shared += [lambda at: (at.tp, at.pp), lambda at: ()]
        if ep > 1:
            shared.append(lambda at: (at.dp % ep, at.tp, at.pp))
    if "generate" in kinds:
        shared.append(lambda at: at.dp)
    expected = set()
    for axis in shared:
        groups = defaultdict(list)
        for device, at in device_coordinates(instance):
            groups[axis(at)].append(device.node * 8 + device.index)
        expected |= {tuple(members) for members in groups.values()}
    pipelines = defaultdict(list)
    for device, at in device_coordinates(instance):
        pipelines[at.dp, at.tp].append(device.node * 8 + device.index)
    for members in pipelines.values():
        expected |= {(members[0], members[-1])} if "train_step" in kinds and sums_embeddings and pp > 1 else set()
        expected |= set(zip(members, members[1:], strict=False)) if "generate" in kinds else set()
    found = [
        tuple(members)
        for groups in _groups(instance, frozenset(kinds), sums_embeddings, 8)
        for members in groups.tolist()
    ]
    assert set(found) == {members for members in expected if len(members) > 1}
