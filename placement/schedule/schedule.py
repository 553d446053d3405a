"""List scheduling: when each node of an augmented graph would run, given how long each takes, by one of two rules.

`graph_order` is what a run's device locks do: of the nodes that wait for devices, the earliest in the graph goes first,
and a later one may pass only where they share nothing. `ready_first` is ReaL's algorithm 1 (arXiv:2406.14088, appendix
C): the node that was ready first is placed next, behind whatever was placed on its devices before.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.node import BEHIND, Node
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.mesh import Device

Rule = Literal["graph_order", "ready_first"]

_SAME_SECONDS = 1e-9  # relative: two periods that differ by less are one


@dataclass(frozen=True, slots=True)
class Job:
    """A node as the rules know it: bits of the resources it occupies, its time, positions of the jobs it awaits."""

    resources: int
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """A node with the seconds, from the start of the run, at which it starts and ends."""

    node: Node
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every node's slot, in the order of the graph. `num_steps` is that of the augmented graph."""

    slots: tuple[Slot, ...]
    num_steps: int

    @property
    def makespan_seconds(self) -> float:
        """Seconds from the start of the first node to the end of the last."""
        return max((slot.end for slot in self.slots), default=0.0)

    @property
    def seconds_per_step(self) -> float:
        """Seconds by which the end of a step moves from step to step, once that repeats: the steady state.

        First and last step are left out where more than three were scheduled, since the run fills and drains there.
        """
        return steady_seconds(self.step_ends())

    @property
    def busy_seconds(self) -> dict[Device, float]:
        """Seconds that each device computes or moves tensors between devices; its host link is not counted."""
        busy: dict[Device, float] = defaultdict(float)
        for slot in self.slots:
            for device in sorted(device for device, what in slot.node.occupies if what == "compute"):
                busy[device] += slot.seconds
        return dict(busy)

    def step_ends(self) -> tuple[float, ...]:
        """Return when the last node of each step ends; evaluation and export after the last step do not count.

        Nor does what is written behind the next steps.
        """
        ends: dict[int, float] = defaultdict(float)
        for slot in self.slots:
            if slot.node.step < self.num_steps and slot.node.kind not in BEHIND:
                ends[slot.node.step] = max(ends[slot.node.step], slot.end)
        return tuple(ends[step] for step in sorted(ends))

    def seconds_of(self) -> dict[str, float]:
        """Return each node's seconds by id."""
        return {slot.node.id: slot.seconds for slot in self.slots}


def schedule(
    augmented: AugmentedGraph, seconds: Mapping[str, float] | Callable[[Node], float], rule: Rule = "graph_order"
) -> Schedule:
    """Place every node in time; `seconds` by node id, or asked of each node. Raises InvalidInput where one is missing.

    Nodes that share a device exclude each other; an offload or reload occupies its devices' host links instead, and a
    commit their ways to disk.
    """
    jobs = _jobs(augmented.nodes, seconds)
    placed = zip(augmented.nodes, jobs, list_schedule(jobs, rule), strict=True)
    slots = (Slot(node, start, start + job.seconds) for node, job, start in placed)
    return Schedule(tuple(slots), augmented.num_steps)


def list_schedule(jobs: Sequence[Job], rule: Rule = "graph_order") -> list[float]:
    """Return the start times of jobs, which are in a topological order.

    >>> first, other, second = Job(0b01, 2.0), Job(0b10, 3.0), Job(0b11, 1.0, after=(0,))
    >>> list_schedule([first, other, second])
    [0.0, 0.0, 3.0]
    """
    return _start_in_graph_order(jobs) if rule == "graph_order" else _start_ready_first(jobs)


def critical_path_seconds(jobs: Sequence[Job]) -> float:
    """Return the length of the longest chain of jobs that wait for each other: no schedule is shorter."""
    ends: list[float] = []
    for job in jobs:
        ends.append(max((ends[before] for before in job.after), default=0.0) + job.seconds)
    return max(ends, default=0.0)


def steady_seconds(ends: Sequence[float]) -> float:
    """Return seconds per step from when the steps end.

    They are the mean of the shortest pattern of differences that repeats over the second half of the steps; where none
    does, of that half.

    >>> steady_seconds([5.0, 8.0, 11.0, 14.0, 20.0]), steady_seconds([5.0, 6.0, 9.0, 10.0, 13.0, 14.0, 30.0])
    (3.0, 2.0)
    """
    middle = ends[1:-1] if len(ends) > 3 else ends
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
    """Return, by node id, how much longer a node could take, as long as the order of nodes on each device stays.

    A node's latest end is the latest start of whatever waits for it, or comes after it on one of its devices.
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


def _jobs(nodes: Sequence[Node], seconds: Mapping[str, float] | Callable[[Node], float]) -> list[Job]:
    bits: dict[Hashable, int] = {}
    masks: dict[Hashable, int] = {}  # nodes of different steps occupy the same
    position = {node.id: index for index, node in enumerate(nodes)}
    jobs = []
    for node in nodes:
        where = node.resources, node.meshes
        if where not in masks:
            masks[where] = sum(1 << bits.setdefault(resource, len(bits)) for resource in node.occupies)
        node_seconds = seconds(node) if callable(seconds) else seconds.get(node.id)
        if node_seconds is None or not 0.0 <= node_seconds < float("inf"):
            expected = "a finite number of seconds, 0 or more, for every node"
            raise InvalidInput(f"seconds of node {node.id}", node_seconds, expected)
        jobs.append(Job(masks[where], node_seconds, tuple(position[name] for name in node.depends_on)))
    return jobs


class _Waiting:
    """Counts down what each job still waits for."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._left = [len(set(job.after)) for job in jobs]
        self._followers: list[list[int]] = [[] for _ in jobs]
        for index, job in enumerate(jobs):
            for before in set(job.after):
                self._followers[before].append(index)

    def ready(self) -> Iterator[int]:
        """Yield the jobs that wait for none."""
        yield from (index for index, left in enumerate(self._left) if left == 0)

    def ended(self, job: int) -> Iterator[int]:
        """Yield the jobs that only waited for this one still."""
        for follower in self._followers[job]:
            self._left[follower] -= 1
            if self._left[follower] == 0:
                yield follower


def _start_in_graph_order(jobs: Sequence[Job]) -> list[float]:
    starts = [0.0] * len(jobs)
    waiting = _Waiting(jobs)
    queue = sorted(waiting.ready())
    running: list[tuple[float, int]] = []
    busy, now = 0, 0.0
    while queue or running:
        for index in (begun := _may_start(queue, jobs, busy)):
            starts[index] = now
            busy |= jobs[index].resources
            heapq.heappush(running, (now + jobs[index].seconds, index))
        queue = [index for index in queue if index not in begun]
        now = running[0][0]
        while running and running[0][0] <= now:
            _, index = heapq.heappop(running)
            busy &= ~jobs[index].resources
            queue.extend(waiting.ended(index))
        queue.sort()
    return starts


def _may_start(queue: Iterable[int], jobs: Sequence[Job], busy: int) -> set[int]:
    """The queued jobs whose resources are free and wanted by no earlier one that waits."""
    begun = set()
    for index in queue:
        if not jobs[index].resources & busy:
            begun.add(index)
        busy |= jobs[index].resources  # taken now, or kept for it
    return begun


def _start_ready_first(jobs: Sequence[Job]) -> list[float]:
    starts = [0.0] * len(jobs)
    ready_at = [0.0] * len(jobs)
    waiting = _Waiting(jobs)
    queue = [(0.0, index) for index in waiting.ready()]
    free_at: dict[int, float] = defaultdict(float)
    while queue:
        ready, index = heapq.heappop(queue)
        bits = list(_bits(jobs[index].resources))
        starts[index] = max([ready, *(free_at[bit] for bit in bits)])
        end = starts[index] + jobs[index].seconds
        free_at.update(dict.fromkeys(bits, end))
        for follower in waiting.ended(index):
            ready_at[follower] = max((starts[job] + jobs[job].seconds for job in jobs[follower].after), default=0.0)
            heapq.heappush(queue, (ready_at[follower], follower))
    return starts


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low
        mask ^= low
