"""List scheduling against a simulator that shares no code with it, and what every schedule must keep."""

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.schedule.list_schedule import Job, job_spans
from prefect_rlhf.placement.schedule.schedule import STEPS_IN_FLIGHT, Schedule, schedule, steady_seconds
from tests.support.cases import examples
from tests.support.strategies import TWO_DEVICES, dpo, graphs, plans, ppo

pytestmark = pytest.mark.quick


@st.composite
def job_lists(draw) -> list[Job]:
    """Up to 14 jobs on four resources, some of which take no time, in a topological order."""
    count = draw(st.integers(1, 14))
    return [
        Job(
            draw(st.integers(1, 15)),
            float(draw(st.integers(0, 6))),
            tuple(draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else (),
        )
        for index in range(count)
    ]


def on(job: Job) -> set[int]:
    return {bit for bit in range(4) if job.resources >> bit & 1}


def play_locks(jobs: list[Job]) -> list[int]:
    """Second by second: whoever waits asks, the earliest first; what it cannot get yet, no later one gets."""
    starts: dict[int, int] = {}
    second = 0
    while len(starts) < len(jobs):
        changed = True
        while changed:  # jobs that take no time end within the second
            changed = False
            ended = {i for i, start in starts.items() if start + jobs[i].seconds <= second}
            running = set(starts) - ended
            refused: set[int] = set().union(*(on(jobs[i]) for i in running))
            for index, job in enumerate(jobs):
                if index in starts or not set(job.after) <= ended:
                    continue
                if not on(job) & refused:
                    starts[index] = second
                    changed = True
                refused |= on(job)
        second += 1
    return [starts[index] for index in range(len(jobs))]


def critical_path_seconds(jobs: list[Job]) -> float:
    """Return the length of the longest chain of jobs that wait for each other: no schedule is shorter."""
    ends: list[float] = []
    for job in jobs:
        ends.append(max((ends[before] for before in job.after), default=0.0) + job.seconds)
    return max(ends, default=0.0)


def busy_seconds(made: Schedule) -> dict[Device, float]:
    """Return the seconds that each device computes or moves tensors between devices, without its host link."""
    busy: dict[Device, float] = defaultdict(float)
    for slot in made.slots:
        for device in sorted(device for device, what in slot.node.occupies if what == "compute"):
            busy[device] += slot.seconds
    return busy


@given(job_lists())
@settings(max_examples=examples(200), deadline=None)
def test_the_runs_rule_gives_the_times_that_playing_the_locks_second_by_second_gives(jobs):
    assert [span.start for span in job_spans(jobs)] == play_locks(jobs)


@given(job_lists())
@settings(max_examples=examples(200), deadline=None)
def test_no_schedule_breaks_a_dependency_or_shares_a_resource_or_beats_its_bounds(jobs):
    starts = [span.start for span in job_spans(jobs)]
    ends = [start + job.seconds for start, job in zip(starts, jobs, strict=True)]
    for index, job in enumerate(jobs):
        assert all(ends[before] <= starts[index] for before in job.after)
        for other in range(index):
            apart = ends[index] <= starts[other] or ends[other] <= starts[index]
            assert apart or not on(job) & on(jobs[other])
    loads = [sum(job.seconds for job in jobs if bit in on(job)) for bit in range(4)]
    assert max(ends) >= max(critical_path_seconds(jobs), *loads)


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
def test_an_augmented_graph_is_scheduled_as_it_runs(data):
    """Every dependency holds, no two nodes share what they occupy, and no device is busier than the run is long."""
    graph = data.draw(graphs())
    augmented = augment(graph, data.draw(plans(graph, TWO_DEVICES)), 3)
    seconds = {node.id: float(data.draw(st.integers(0, 4))) for node in augmented}
    made = schedule(augmented, seconds)
    ends = {slot.node.id: slot.end for slot in made.slots}
    assert {slot.node.id: slot.seconds for slot in made.slots} == seconds
    for slot in made.slots:
        assert all(ends[name] <= slot.start for name in slot.node.depends_on)
        for other in made.slots:
            apart = slot.end <= other.start or other.end <= slot.start
            assert other is slot or apart or not slot.node.occupies & other.node.occupies
    assert max(busy_seconds(made).values(), default=0.0) <= made.makespan_seconds


def test_steps_on_a_single_mesh_take_the_sum_of_their_nodes():
    """With every call on all devices nothing overlaps, so the steady state is known without a schedule."""
    graph = ppo()
    augmented = augment(graph, preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole), 8)
    made = schedule(augmented, lambda node: 0.0 if node.kind == "compute" else 2.0)
    middle = sum(2.0 for node in augmented.of_step(5) if node.kind != "compute")
    assert made.seconds_per_step == pytest.approx(middle)


def test_independent_work_runs_no_further_ahead_than_submitted():
    """DPO's reference, which has devices of its own and is fast, infers for at most so many steps as are in flight.

    And a step takes as long as its training: what is done ahead is not counted as done for nothing.
    """
    graph = dpo()
    plan = preset("separation", graph, TWO_DEVICES, TWO_DEVICES.whole)
    assert not plan["ref_inference"].mesh.overlaps(plan["actor_train_step"].mesh)
    augmented = augment(graph, plan, 20)
    seconds = {"train_step": 10.0, "inference": 1.0}
    made = schedule(augmented, lambda node: seconds.get(node.kind, 0.0))
    slots = {slot.node.id: slot for slot in made.slots}
    for step in range(STEPS_IN_FLIGHT + 1, 21):
        assert slots[f"ref_inference@{step}"].start >= slots[f"actor_train_step@{step - STEPS_IN_FLIGHT}"].end
    assert made.seconds_per_step == 10.0


def test_the_steady_state_is_the_period_of_the_middle():
    """The first step is longer, the last shorter, and evaluation in every third step counts with its share."""
    ends = [9.0]
    for step in range(1, 14):
        ends.append(ends[-1] + (7.0 if step % 3 == 0 else 4.0))
    ends.append(ends[-1] + 1.0)
    assert steady_seconds(ends) == 5.0


@pytest.mark.parametrize("value", [None, math.nan, -1.0, math.inf])
def test_a_node_without_a_time_is_named(value):
    graph = ppo()
    augmented = augment(graph, preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole), 1)
    with pytest.raises(InvalidInput, match=r"seconds of node reallocate|seconds of node actor_generate@1"):
        schedule(augmented, lambda node: value)
