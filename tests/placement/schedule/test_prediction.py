"""A run's prediction: of the graph that runs, node by node; what nobody knows is left out, never free by accident."""

import pytest

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.cost.hardware import DATASHEETS, Hardware
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.pictures.plan import schedule_bars
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.schedule.estimate import estimate, predict
from tests.strategies import TWO_DEVICES, ppo

GRAPH, WORKLOAD = ppo(evaluate_every=2), Workload.fixed(64, 64)
PLAN = preset("split", GRAPH, TWO_DEVICES, TWO_DEVICES.whole)
HARDWARE = (Hardware(DATASHEETS["h100"], 2),)
ADDED = 0.125
SOURCES = CostSources(HARDWARE, orchestration_seconds=ADDED)
AUGMENTED = augment(GRAPH, PLAN, 6, checkpoint_every=3)
PREDICTED = predict(AUGMENTED, WORKLOAD, SOURCES)


def test_every_node_of_the_run_is_scheduled_evaluation_checkpoints_and_exports_too():
    assert [slot.node for slot in PREDICTED.schedule.slots] == list(AUGMENTED)


def test_what_no_source_of_times_knows_is_not_predicted():
    """Of all else the seconds are more than none."""
    unknown = {node.kind for node in AUGMENTED if node.id not in PREDICTED.worked_seconds}
    assert unknown == {"compute", "checkpoint", "commit", "export"}
    calls = [node.id for node in AUGMENTED if node.kind in ("generate", "inference", "train_step")]
    assert all(PREDICTED.worked_seconds[id] > 0 for id in calls)


def test_every_task_run_takes_what_the_controller_adds_and_its_ranks_work():
    for slot in PREDICTED.schedule.slots:
        worked = PREDICTED.worked_seconds.get(slot.node.id, 0.0)
        assert slot.seconds == pytest.approx(worked + ADDED)


def test_what_the_controller_adds_counts_when_plans_are_compared():
    """Each node on the longest chain of a step costs it once more."""
    without, with_it = (estimate(GRAPH, PLAN, WORKLOAD, CostSources(HARDWARE, (), added)) for added in (0.0, ADDED))
    nodes = len(without.schedule.slots) / without.schedule.num_steps
    assert 4 * ADDED <= with_it.seconds - without.seconds <= nodes * ADDED


def test_a_call_says_what_of_its_time_is_the_controllers():
    node = next(node for node in AUGMENTED if node.kind == "train_step")
    cost = NodeCosts(GRAPH, PLAN, WORKLOAD, SOURCES).cost(node)
    assert cost.orchestration == ADDED
    assert cost.worked == pytest.approx(cost.total - ADDED)


def test_the_timeline_of_a_run_that_goes_on_begins_where_it_does():
    resumed = predict(augment(GRAPH, PLAN, 6, first_step=4), WORKLOAD, SOURCES)
    assert len(schedule_bars(resumed.schedule, 1)) == len(list(augment(GRAPH, PLAN, 6, first_step=4).of_step(4)))


def test_devices_that_nobody_knows_are_named():
    with pytest.raises(InvalidInput, match=r"mesh: got 'n0:"):
        predict(AUGMENTED, WORKLOAD, CostSources(()))
