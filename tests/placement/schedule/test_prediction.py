"""A run's prediction: of the graph that runs, node by node; what nobody knows is left out, never free by accident."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.preview import MOST_STEPS, distant_nodes, preview
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.moves import DISK_BYTES_PER_SECOND
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sizes import copied_bytes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.models.weights import num_parameters
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.schedule.estimate import estimate, predict, without_evaluation
from prefect_rlhf.placement.schedule.schedule import schedule
from prefect_rlhf.tasks.reporting.pictures.plan import schedule_bars
from tests.support.strategies import TWO_DEVICES, ppo

GRAPH, WORKLOAD = ppo(evaluate_every=2), Workload.fixed(64, 64)
PLAN = preset("split", GRAPH, TWO_DEVICES, TWO_DEVICES.whole)
HARDWARE = (Hardware(DATASHEETS["h100"], 2),)
ADDED = 0.125
SOURCES = CostSources(HARDWARE, orchestration_seconds=ADDED)
AUGMENTED = augment(GRAPH, PLAN, 6, checkpoint_every=3)
PREDICTED = predict(AUGMENTED, WORKLOAD, SOURCES)


def test_every_node_of_the_run_is_scheduled_evaluation_checkpoints_and_exports_too():
    assert [slot.node for slot in PREDICTED.schedule.slots] == list(AUGMENTED)


def test_a_run_that_only_its_end_is_left_of_has_no_speed():
    rest = predict(augment(GRAPH, PLAN, 6, finished=6, checkpoint_every=3), WORKLOAD, SOURCES)
    assert rest.schedule.slots and rest.work is None and not rest.speeds


def test_work_without_known_times_is_not_predicted():
    """Of all else the seconds are more than none."""
    unknown = {node.kind for node in AUGMENTED if PREDICTED.worked_seconds(node.id) is None}
    assert unknown == {"compute", "export"}
    calls = [node.id for node in AUGMENTED if node.kind in ("generate", "inference", "train_step")]
    assert all(PREDICTED.worked_seconds(id) > 0 for id in calls)


def test_a_task_run_takes_controller_overhead_plus_rank_work():
    for slot in PREDICTED.schedule.slots:
        worked = PREDICTED.worked_seconds(slot.node.id) or 0.0
        assert slot.seconds == pytest.approx(worked + ADDED)


def test_controller_overhead_counts_when_plans_are_compared():
    """Each node on the longest chain of a step costs it once more."""
    without, with_it = (estimate(GRAPH, PLAN, WORKLOAD, CostSources(HARDWARE, (), added)) for added in (0.0, ADDED))
    nodes = len(without.schedule.slots) / without.schedule.num_steps
    assert 4 * ADDED <= with_it.seconds - without.seconds <= nodes * ADDED


def test_a_calls_time_shows_the_controllers_share():
    node = next(node for node in AUGMENTED if node.kind == "train_step")
    cost = NodeCosts(GRAPH, PLAN, WORKLOAD, SOURCES).cost(node)
    assert cost.orchestration == ADDED
    assert cost.worked == pytest.approx(cost.total - ADDED)


def test_a_checkpoint_costs_a_copy_and_is_written_during_later_steps():
    """The schedule has it so: after the copy the next steps go on, and a step ends without its commit."""
    slots = {slot.node.id: slot for slot in PREDICTED.schedule.slots}
    copy, commit = slots["checkpoint.actor@3"], slots["commit@3"]
    state = 12 * num_parameters(GRAPH.model("actor"))
    assert copy.seconds - ADDED == pytest.approx(state / HARDWARE[0].links().host, rel=0.1)
    written = max(copied_bytes(GRAPH, PLAN).values())
    assert commit.seconds - ADDED == pytest.approx(written / DISK_BYTES_PER_SECOND)
    assert slots["actor_generate@4"].start < commit.end and commit.seconds > copy.seconds
    slow = schedule(AUGMENTED, lambda node: 100.0 if node.kind == "commit" else slots[node.id].seconds)
    late = {slot.node.id: slot for slot in slow.slots}
    assert slow.step_ends()[:5] == PREDICTED.schedule.step_ends()[:5], "no step waits for the disk before the next copy"
    assert late["checkpoint.actor@6"].start >= late["commit@3"].end, "which does wait"


@pytest.mark.parametrize("finished", [0, 777_777])
def test_a_long_run_is_predicted_from_its_first_steps(finished):
    """A node of any step, also of an evaluation and a checkpoint far away, and the steps that repeat."""
    graph = ppo(staleness=1, evaluate_every=1000)
    plan = preset("split", graph, TWO_DEVICES, TWO_DEVICES.whole)
    first = preview(graph, plan, 1_000_000, finished, checkpoint_every=5000)
    assert len({node.step for node in first}) <= MOST_STEPS + 1
    long = predict(first, WORKLOAD, SOURCES, distant_nodes(first, 5000))
    trained = predict(augment(*without_evaluation(graph, plan), 20), WORKLOAD, SOURCES)
    assert long.seconds_per_step == pytest.approx(trained.seconds_per_step, rel=0.01)
    whole = augment(graph, plan, 12, 0, 6)
    short = predict(whole, WORKLOAD, SOURCES)
    for node in whole:
        later = f"{node.id.rpartition('@')[0]}@900001"
        if node.kind != "export":
            assert long.worked_seconds(later) == short.worked_seconds(node.id), node.id


@pytest.mark.parametrize("every", [1, 3, 50])
@pytest.mark.parametrize("finished", range(7))
def test_a_run_that_goes_on_from_anywhere_is_predicted(finished, every):
    """Also after its last step, where no checkpoint is to come."""
    rest = preview(GRAPH, PLAN, 6, finished, checkpoint_every=every)
    distant = distant_nodes(rest, every)
    assert all(finished <= node.step <= 6 for node in distant)
    predicted = predict(rest, WORKLOAD, SOURCES, distant)
    assert [slot.node for slot in predicted.schedule.slots] == list(rest)


def test_a_short_run_is_predicted_whole():
    assert preview(GRAPH, PLAN, 6, checkpoint_every=3) == AUGMENTED


def test_the_timeline_of_a_run_that_goes_on_begins_where_it_does():
    resumed = predict(augment(GRAPH, PLAN, 6, finished=4), WORKLOAD, SOURCES)
    assert len(schedule_bars(resumed.schedule, 1)) == len(list(augment(GRAPH, PLAN, 6, finished=4).of_step(5)))


def test_unknown_devices_are_named():
    with pytest.raises(InvalidInput, match=r"mesh: got 'n0:"):
        predict(AUGMENTED, WORKLOAD, CostSources(()))
