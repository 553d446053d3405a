"""When each node of an augmented graph starts, given its duration: the order that a run's device locks produce.

Of the nodes that wait for devices, the earliest in the graph goes first, and a later node may pass an earlier node only
if they share no device. A step begins when all but the last few steps before it have ended, because a run submits no
more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.node import BEHIND, Node
from prefect_rlhf.placement.augmented.work import Compute, ModelCall
from prefect_rlhf.placement.cost.contention import Demand, times_longer
from prefect_rlhf.placement.devices.blocks import blocks_of
from prefect_rlhf.placement.schedule.list_schedule import Job, TimesLonger, job_spans

STEPS_IN_FLIGHT = 4
"""The most steps that a run submits ahead: two groups of two. Even nodes that never wait for weights get no further
ahead."""

_SAME_SECONDS = 1e-9  # relative: periods that differ by less are equal


@dataclass(frozen=True, slots=True)
class Slot:
    """A node with its start and its end, in seconds from the start of the run."""

    node: Node
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every node's slot, in the order of the graph. `num_steps` is the number of steps of the augmented graph."""

    slots: tuple[Slot, ...]
    num_steps: int

    @property
    def makespan_seconds(self) -> float:
        """Seconds from the start of the first node to the end of the last."""
        return max((slot.end for slot in self.slots), default=0.0)

    @property
    def seconds_per_step(self) -> float:
        """Seconds between the ends of consecutive steps in the steady state, when steps repeat.

        If there are enough steps, the first and the last steps are left out, because the run fills and drains there.
        """
        return steady_seconds(tuple(accumulate(self.step_ends(), max)), STEPS_IN_FLIGHT - 1)

    def step_ends(self) -> tuple[float, ...]:
        """Return when the last node of each step ends; the evaluation before training is not a step.

        Files that are written during later steps, or after the last step, do not count.
        """
        ends: dict[int, float] = defaultdict(float)
        for slot in self.slots:
            if slot.node.step > 0 and slot.node.kind not in BEHIND:
                ends[slot.node.step] = max(ends[slot.node.step], slot.end)
        return tuple(ends[step] for step in sorted(ends))

    def of_call(self, call: str) -> tuple[Slot, ...]:
        """Return the slots of a call's own task runs, without transfers to it: several per step if it has parts."""
        runs = (slot for slot in self.slots if isinstance(slot.node.work, ModelCall | Compute))
        return tuple(slot for slot in runs if slot.node.call and slot.node.call.name == call)

    def call_seconds(self, call: str) -> float:
        """Return the call's time over all its parts in seconds, in the step in which it takes longest."""
        seconds: dict[int, float] = defaultdict(float)
        for slot in self.of_call(call):
            seconds[slot.node.step] += slot.seconds
        return max(seconds.values())


def schedule(
    augmented: AugmentedGraph,
    seconds: Mapping[str, float] | Callable[[Node], float],
    demand: Callable[[Node], Demand] | None = None,
) -> Schedule:
    """Place every node in time. `seconds` are by node id, or a function of it. Raises InvalidInput for a missing node.

    Nodes that share a device exclude each other; an offload or reload occupies its devices' host links instead, and a
    commit their paths to disk. With `demand`, `seconds` assume that no other node runs, and nodes on disjoint devices
    of a host slow each other.
    """
    jobs = _jobs(augmented.nodes, seconds)
    longer = None if demand is None else _times_longer([demand(node) for node in augmented.nodes])
    spans = job_spans(_as_submitted(augmented.nodes, jobs), longer)
    placed = zip(augmented.nodes, spans[: len(jobs)], strict=True)
    return Schedule(tuple(Slot(node, span.start, span.end) for node, span in placed), augmented.num_steps)


def steady_seconds(ends: Sequence[float], drained: int = 1) -> float:
    """Return seconds per step from the ends of the steps.

    It is the mean of the shortest pattern of differences that repeats over the second half of the steps; without such a
    pattern, the mean of that half. The first step and the last `drained` steps are left out, but no more than a quarter
    of all.

    >>> steady_seconds([5.0, 8.0, 11.0, 14.0, 20.0]), steady_seconds([5.0, 6.0, 9.0, 10.0, 13.0, 14.0, 30.0])
    (3.0, 2.0)
    """
    last = max(1, min(drained, (len(ends) - 1) // 4))
    middle = ends[1:-last] if len(ends) > 3 else ends
    gaps = [after - before for before, after in pairwise(middle)]
    if not gaps:
        return sum(ends)
    half = len(gaps) // 2
    close = _SAME_SECONDS * max(1.0, middle[-1])
    for period in range(1, half + 1):
        if all(abs(gaps[index] - gaps[index - period]) <= close for index in range(half, len(gaps))):
            return sum(gaps[-period:]) / period
    return sum(gaps[half:]) / len(gaps[half:])


def slack_seconds(schedule: Schedule) -> Mapping[str, float]:
    """Return, by node id, by how many seconds a node could take longer without delay, if the order on each device
    stays.

    A node's latest end is the latest start of every node that depends on it or follows it on a device.
    """
    end = schedule.makespan_seconds
    by_dependency: dict[str, float] = defaultdict(lambda: end)
    by_resource: dict[object, float] = defaultdict(lambda: end)
    slack: dict[str, float] = {}
    order = sorted(enumerate(schedule.slots), key=lambda pair: (pair[1].start, pair[1].end, pair[0]), reverse=True)
    for _, slot in order:
        latest = min([by_dependency[slot.node.id], *(by_resource[resource] for resource in slot.node.occupies)])
        slack[slot.node.id] = max(0.0, latest - slot.end)
        start = latest - slot.seconds
        for name in slot.node.depends_on:
            by_dependency[name] = min(by_dependency[name], start)
        for resource in slot.node.occupies:
            by_resource[resource] = min(by_resource[resource], start)
    return slack


def _times_longer(demands: Sequence[Demand]) -> TimesLonger:
    """The slow-down of concurrent nodes; submissions, which follow all nodes, neither cause nor suffer any."""

    def longer(running: Sequence[int]) -> Sequence[float]:
        slowed = times_longer([demands[index] for index in running if index < len(demands)])
        by_node = iter(slowed)
        return [next(by_node) if index < len(demands) else 1.0 for index in running]

    return longer


def _jobs(nodes: Sequence[Node], seconds: Mapping[str, float] | Callable[[Node], float]) -> list[Job]:
    bits: dict[Hashable, int] = {}
    masks: dict[Hashable, int] = {}  # nodes of different steps occupy the same
    position = {node.id: index for index, node in enumerate(nodes)}
    blocks = blocks_of(mesh for node in nodes for mesh in node.meshes)
    jobs = []
    for node in nodes:
        where = node.resources, node.meshes
        if where not in masks:
            there = {(block, each) for mesh in node.meshes for block in blocks[mesh] for each in node.resources}
            masks[where] = sum(1 << bits.setdefault(resource, len(bits)) for resource in there)
        node_seconds = seconds(node) if callable(seconds) else seconds.get(node.id)
        if node_seconds is None or not 0.0 <= node_seconds < float("inf"):
            expected = "a finite number of seconds, 0 or more, for every node"
            raise InvalidInput(f"seconds of node {node.id}", node_seconds, expected)
        jobs.append(Job(masks[where], node_seconds, tuple(position[name] for name in node.depends_on)))
    return jobs


def _as_submitted(nodes: Sequence[Node], jobs: Sequence[Job]) -> list[Job]:
    """The jobs, each after the submission of its step, and behind them the submissions, which take no time.

    What waits for a node of a later step is submitted with that.
    """
    steps: list[int] = []
    for node, job in zip(nodes, jobs, strict=True):
        steps.append(max([node.step, *(steps[before] for before in job.after)]))
    members: dict[int, list[int]] = defaultdict(list)
    for index, (node, step) in enumerate(zip(nodes, steps, strict=True)):
        if node.kind not in BEHIND:
            members[step].append(index)
    later = range(min(steps, default=0) + STEPS_IN_FLIGHT, max(steps, default=0) + 1)
    position = {step: len(jobs) + number for number, step in enumerate(later)}
    waiting = [
        Job(job.resources, job.seconds, (*job.after, position[step])) if step in position else job
        for job, step in zip(jobs, steps, strict=True)
    ]
    before = ((position[step - 1],) if step - 1 in position else () for step in later)
    over = (tuple(members[step - STEPS_IN_FLIGHT]) for step in later)
    return [*waiting, *(Job(0, 0.0, (*own, *earlier)) for own, earlier in zip(over, before, strict=True))]
