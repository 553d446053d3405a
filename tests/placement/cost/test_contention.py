"""Devices that share a host slow each other: by what was measured, never the other way, and nobody else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.cost.contention import Demand, SlowDown, times_longer
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.times.profile import Profile
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.schedule.estimate import estimate, estimate_with, predict
from tests.placement.cost.times.test_profile import PROFILE, SIZES
from tests.support.strategies import ppo

HALF_A_CORE = ((1, 2, 4), (1.0, 1.25, 2.5))
"""Of four devices on two cores: alone, two of them and all of them."""
WORKS = (("inference", "megatron"), ("train_step", "megatron"), ("generate", "vllm"), ("move", "megatron"))
FOUR_WAYS = tuple(replace(one, tp=4) for one in PROFILE.measurements if one.tp == 2)
IN_MEGATRON = PROFILE.measurements + FOUR_WAYS
IN_VLLM = tuple(replace(one, engine="vllm") for one in IN_MEGATRON)
SHARED = replace(
    PROFILE,
    num_devices=4,
    call_seconds=(),
    measurements=IN_MEGATRON + IN_VLLM,
    slow_downs=tuple(SlowDown(*work, *HALF_A_CORE, 2.5) for work in WORKS),
)
NODE = Hardware(DATASHEETS["h100"], 4)
ALL_BUSY, KNOWN = (CostSources((NODE,), (profile,)) for profile in (replace(SHARED, slow_downs=()), SHARED))
CALL = CallWork("inference", 16, Workload.fixed(300, 500))
SECONDS = st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3)


def cost(sources: CostSources, devices: int, strategy: Strategy, micro_batches: int = 1):
    mesh = DeviceMesh(0, 1, 0, devices)
    return sources.call_cost(CALL, Execution(strategy, 1, devices, micro_batches), SIZES, mesh)


@pytest.mark.parametrize(("devices", "factor"), [(1, 1.0), (2, 1.25), (4, 2.5)])
def test_a_calls_devices_contend_with_each_other(devices, factor):
    """A profile's times are those of all four at once."""
    alone = cost(ALL_BUSY, devices, Strategy(devices)).total / 2.5
    assert cost(KNOWN, devices, Strategy(devices)).total == pytest.approx(alone * factor)


def test_a_call_takes_as_long_as_its_last_device():
    """A profile's times are means; where the last is later than those, a call ends with it."""
    late = tuple(replace(one, profiled=2.0) for one in SHARED.slow_downs)
    known = CostSources((NODE,), (replace(SHARED, slow_downs=late),))
    assert cost(known, 4, Strategy(4)).total == pytest.approx(1.25 * cost(ALL_BUSY, 4, Strategy(4)).total)


def test_a_stage_that_waits_for_another_leaves_it_the_processor():
    """Of four stages with one micro-batch one works at a time; they differ by the head of the last."""
    pipeline = cost(KNOWN, 4, Strategy(pp=4))
    assert pipeline.total == pytest.approx(cost(ALL_BUSY, 4, Strategy(pp=4)).total / 2.5, rel=0.05)


@given(SECONDS, st.floats(0, 6), st.floats(0, 6))
def test_more_busy_devices_never_make_anything_faster(seconds, first, second):
    """Whatever noise was measured; so what a call takes by itself is the least that it takes."""
    slow_down = SlowDown("train_step", "megatron", (1, 2, 4), tuple(seconds), 1.0)
    fewer, more = (slow_down.factor(busy) for busy in sorted((first, second)))
    assert slow_down.factor(0) == slow_down.factor(1) == 1.0
    assert fewer <= more
    demands = [Demand({0: first}, 1.0, slow_down), Demand({0: second}, 0.5, slow_down)]
    assert min(times_longer(demands)) >= 1.0


def test_only_work_on_the_same_host_slows_a_call():
    slow_down = SlowDown("inference", "megatron", *HALF_A_CORE, 2.5)
    here, there, waits = Demand({0: 2.0}, 1.0, slow_down), Demand({1: 2.0}, 1.0, slow_down), Demand({0: 2.0}, 0.0)
    assert times_longer([here, there, waits]) == [1.0, 1.0, 1.0]
    assert times_longer([here, here]) == [2.0, 2.0]
    half = replace(here, share=0.5)
    assert times_longer([here, half]) == pytest.approx([slow_down.factor(3) / 1.25, 1.5])


GRAPH = ppo()
CLUSTER = ClusterShape("shared", 1, 4, 80 << 30)
SPLIT = preset("split", GRAPH, CLUSTER, CLUSTER.whole)


def test_calls_side_by_side_slow_each_other_in_the_estimate_and_in_the_prediction():
    """By themselves they take half of what all four busy devices do; together on the host as long as those."""
    workload = Workload.fixed(64, 64)
    small = replace(SHARED, shape=GRAPH.model("actor").shape)
    sources = CostSources((NODE,), (small,))
    costs = NodeCosts(GRAPH, SPLIT, workload, sources)
    alone = estimate_with(GRAPH, SPLIT, costs.seconds)
    together = estimate(GRAPH, SPLIT, workload, sources)
    assert together.seconds > alone.seconds
    slots = {slot.node.id: slot for slot in together.schedule.slots}
    train = slots["critic_train_step@3"]
    assert train.seconds == pytest.approx(2 * costs.seconds(train.node), rel=0.01)
    predicted = predict(augment(GRAPH, SPLIT, 4), workload, sources)
    assert predicted.worked_seconds("critic_train_step@3") == pytest.approx(train.seconds, rel=0.01)


def test_a_move_takes_no_less_than_its_bound_counts():
    """The links that bounds are made of are those of a device alone."""
    assert KNOWN.links((CLUSTER.whole,)).device == pytest.approx(2.5 * ALL_BUSY.links((CLUSTER.whole,)).device)


def test_slow_downs_survive_json_and_nonsense_is_refused():
    assert Profile.from_json(SHARED.to_json()) == SHARED
    with pytest.raises(InvalidInput) as error:
        Profile.from_json(SHARED.to_json().replace("1.25", "-1.25", 1))
    assert "slow_downs" in str(error.value) and "greater than 0" in str(error.value)


def test_no_plan_on_a_shared_host_is_below_the_bound_of_its_search():
    """The search counts what calls do not do to each other; presets and the plan that is found are slowed by it."""
    small = replace(SHARED, shape=GRAPH.model("actor").shape)
    site = Site(CLUSTER, CLUSTER.whole, CostSources((NODE,), (small,)))
    found = plan_graph(Question(GRAPH, site, Workload.fixed(64, 64)), budget_seconds=0.5)
    assert found.lower_bound_seconds <= found.seconds * (1 + 1e-9)
    timed = [preset.estimate.seconds for preset in found.presets if preset.estimate]
    assert timed and min(timed) >= found.lower_bound_seconds
