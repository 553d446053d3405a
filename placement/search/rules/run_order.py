"""The rule of a run: its device locks, and the period of a long run. It is `placement.schedule` in integers, compiled.

Of the nodes that wait for devices, the earliest in the graph goes first (the earlier iteration, then the earlier node).
A later node may pass it only if they share no resource. An iteration begins when all iterations up to the
`in_flight`-th before it have ended. Zero-length nodes are contracted.

A plan's time is the period of a long run. Its bound holds for any order of the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

import numpy as np

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.search.bound.bound import present
from prefect_rlhf.placement.search.bound.exclusion import in_reach, occupied
from prefect_rlhf.placement.search.bound.orders import order_bound
from prefect_rlhf.placement.search.bound.period import period_bound
from prefect_rlhf.placement.search.bound.scratch import Crowd, Scratch, empty_crowd
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.partial.fullest import fill_crowd
from prefect_rlhf.placement.search.problem import Problem
from prefect_rlhf.placement.search.tables.dependencies import num_dependencies
from prefect_rlhf.placement.search.tables.rule import Rule
from prefect_rlhf.placement.search.tables.tables import CALL, Tables

LEAST_ITERATIONS = 6  # needed to detect a period
STUCK = 1 << 50  # microseconds: the period of a plan whose nodes wait for each other


@inner
def period(r: RunOrder, t: Tables, option: Ints, relation: Ints, us: Ints, overlap: Ints) -> int:
    """Microseconds between the ends of consecutive iterations, once they repeat."""
    fill_crowd(t, option, relation, overlap, us, r.crowd)
    prepare(t, us, overlap, r)
    num_iterations = t.iterations - max(1, min(r.in_flight - 1, (t.iterations - 1) // 4))  # in the others it drains
    now = over = num_ready = num_running = 0
    num_ended = 0
    for run in range(len(r.missing)):
        if r.missing[run] == 0:
            num_ready, num_ended = arrive(t, us, r, run, num_ready, num_ended)
    while True:
        over, num_ready = settle(t, us, r, now, over, num_ready, num_ended)
        if over >= num_iterations:
            return steady_us(r.over_at, num_iterations)
        num_ready, num_running = begin_those_that_may(t, r, now, num_ready, num_running)
        if num_running == 0:
            return STUCK
        now = first_end(us, r, num_running, t.num_nodes)
        num_running, num_ended = end_those_that_do(us, r, now, num_running, t.num_nodes)


@inner
def prepare(t: Tables, us: Ints, overlap: Ints, r: RunOrder) -> None:
    """Write how many events each run waits for, and which resources each node uses and blocks."""
    for node in range(t.num_nodes):
        r.own[node] = occupied(t, node, r.crowd.late[0])
        r.reach[node] = in_reach(t, r.own[node], overlap)
    fill_visits(t, overlap, r.crowd, r)
    for iteration in range(t.iterations):
        r.left[iteration] = t.num_nodes
        for node in range(t.num_nodes):
            run = iteration * t.num_nodes + node
            r.missing[run] = r.num_dependencies[run] + (1 if iteration >= r.in_flight else 0)
    for edge in range(len(r.without)):
        if us[r.without[edge, 3]] == 0:
            for iteration in range(max(0, r.without[edge, 2]), min(t.iterations, t.iterations + r.without[edge, 2])):
                r.missing[iteration * t.num_nodes + r.without[edge, 1]] += 1


@inner
def fill_visits(t: Tables, overlap: Ints, crowd: Crowd, r: RunOrder) -> None:
    """Add resources that keep visits apart from each other and from calls that leave no room; bit 2 C + c is call
    c's.
    """
    for call in range(t.num_calls):
        members = t.visit_nodes[call] if crowd.apart[call] else 0
        while members:
            r.own[lowest(members)] |= 1 << 2 * t.num_calls + call
            r.reach[lowest(members)] |= (overlap[call] & crowd.apart[call]) << 2 * t.num_calls
            members &= members - 1
    for call in range(t.num_calls):
        if crowd.beside[call]:
            r.own[t.node_of[call]] |= 1 << 2 * t.num_calls + call
            r.reach[t.node_of[call]] |= crowd.beside[call] << 2 * t.num_calls
        others = crowd.beside[call]
        while others:
            members = t.visit_nodes[lowest(others)]
            others &= others - 1
            while members:
                r.reach[lowest(members)] |= 1 << 2 * t.num_calls + call
                members &= members - 1


@inner
def arrive(t: Tables, us: Ints, r: RunOrder, run: int, num_ready: int, num_ended: int) -> tuple[int, int]:
    """Let a run without remaining dependencies wait for its devices; a run that takes no time ends at once."""
    node = run % t.num_nodes
    if us[node] == 0 and t.node_kind[node] != CALL:
        r.ended[num_ended] = run
        return num_ready, num_ended + 1
    at = num_ready
    while at > 0 and r.ready[at - 1] > run:
        r.ready[at] = r.ready[at - 1]
        at -= 1
    r.ready[at] = run
    return num_ready + 1, num_ended


@inner
def settle(t: Tables, us: Ints, r: RunOrder, now: int, over: int, num_ready: int, num_ended: int) -> tuple[int, int]:
    """Move on all runs that waited for runs that have ended. Returns the numbers of finished iterations and ready
    runs.
    """
    while num_ended or (over < t.iterations and r.left[over] == 0):
        if num_ended == 0:
            r.over_at[over] = now
            begun = over + r.in_flight
            over += 1
            if begun < t.iterations:
                for run in range(begun * t.num_nodes, (begun + 1) * t.num_nodes):
                    num_ready, num_ended = awaited_ended(t, us, r, run, num_ready, num_ended)
            continue
        num_ended -= 1
        run = r.ended[num_ended]
        node, iteration = run % t.num_nodes, run // t.num_nodes
        r.left[iteration] -= 1
        for edge in range(t.edge_start[node], t.edge_start[node + 1]):
            if iteration + t.edge_lag[edge] < t.iterations:
                follower = run - node + t.edge_lag[edge] * t.num_nodes + t.edge_target[edge]
                num_ready, num_ended = awaited_ended(t, us, r, follower, num_ready, num_ended)
        for edge in range(len(r.without)):
            later = iteration + r.without[edge, 2]
            if r.without[edge, 0] == node and us[r.without[edge, 3]] == 0 and 0 <= later < t.iterations:
                follower = later * t.num_nodes + r.without[edge, 1]
                num_ready, num_ended = awaited_ended(t, us, r, follower, num_ready, num_ended)
    return over, num_ready


@inner
def awaited_ended(t: Tables, us: Ints, r: RunOrder, run: int, num_ready: int, num_ended: int) -> tuple[int, int]:
    """Decrease the number of events that a run awaits."""
    r.missing[run] -= 1
    return arrive(t, us, r, run, num_ready, num_ended) if r.missing[run] == 0 else (num_ready, num_ended)


@inner
def begin_those_that_may(t: Tables, r: RunOrder, now: int, num_ready: int, num_running: int) -> tuple[int, int]:
    """Begin the ready runs that have free resources not claimed by an earlier waiting run."""
    busy = kept = 0
    for index in range(num_running):
        busy |= r.reach[r.running[index] % t.num_nodes]
    for index in range(num_ready):
        run = r.ready[index]
        node = run % t.num_nodes
        if r.own[node] & busy == 0:
            r.starts[run] = now
            r.running[num_running] = run
            num_running += 1
        else:
            r.ready[kept] = run
            kept += 1
        busy |= r.reach[node]
    return kept, num_running


@inner
def first_end(us: Ints, r: RunOrder, num_running: int, num_nodes: int) -> int:
    """When the next running node ends."""
    first = r.starts[r.running[0]] + us[r.running[0] % num_nodes]
    for index in range(1, num_running):
        first = min(first, r.starts[r.running[index]] + us[r.running[index] % num_nodes])
    return first


@inner
def end_those_that_do(us: Ints, r: RunOrder, now: int, num_running: int, num_nodes: int) -> tuple[int, int]:
    """Move the runs that end now to `ended`."""
    kept = num_ended = 0
    for index in range(num_running):
        run = r.running[index]
        if r.starts[run] + us[run % num_nodes] <= now:
            r.ended[num_ended] = run
            num_ended += 1
        else:
            r.running[kept] = run
            kept += 1
    return kept, num_ended


@inner
def steady_us(over_at: Ints, num_iterations: int) -> int:
    """Microseconds per iteration, counted as in `schedule.steady_seconds` without the first iteration; rounded up."""
    last, num_gaps = num_iterations - 1, num_iterations - 2
    half = num_gaps // 2
    length = num_gaps - half
    for period in range(half, 0, -1):
        alike = True
        for index in range(half, num_gaps):
            one = over_at[index + 2] - over_at[index + 1]
            alike = alike and one == over_at[index + 2 - period] - over_at[index + 1 - period]
        if alike:
            length = period
    return (over_at[last] - over_at[last - length] + length - 1) // length


@inner
def bound_of_period(
    r: RunOrder, t: Tables, option: Ints, relation: Ints, us: Ints, overlap: Ints, s: Scratch, enough: int
) -> int:
    """Microseconds that no period is below."""
    nodes = present(us)
    best = period_bound(t, us, s, nodes, enough)
    return best if best >= enough else order_bound(t, us, overlap, s, nodes, best, enough)


@inner
def as_bound(bound: int, us: int) -> int:
    """The bound, because with another order of its nodes a plan might take only as long."""
    return bound


@final
@dataclass(frozen=True, slots=True, eq=False)
class RunOrder(Rule):
    """The rule. A run is a node in an iteration; its number is iteration * V + node."""

    in_flight: int  # iterations
    num_dependencies: Ints  # [runs]
    without: Ints  # [E, 4]: source, target and lag of each edge that only holds without a move, and that move
    # scratch of a schedule
    starts: Ints  # [runs]: microseconds
    missing: Ints  # [runs]: events that it awaits
    ready: Ints  # [runs]
    ended: Ints  # [runs]: runs that have just ended
    running: Ints  # [runs]
    own: Ints  # [V]: used by a node: resources, and visits to devices
    reach: Ints  # [V]: blocked while a node runs
    left: Ints  # [iterations]: runs of each that have not ended
    over_at: Ints  # [iterations]: microseconds
    crowd: Crowd

    schedule = staticmethod(period)
    bound = staticmethod(bound_of_period)
    least_in_any_order = staticmethod(as_bound)

    @classmethod
    def of(cls, problem: Problem, iterations: int) -> Self:
        if iterations < LEAST_ITERATIONS:
            raise InvalidInput("iterations", iterations, f"{LEAST_ITERATIONS} or more")
        position = {node.name: index for index, node in enumerate(problem.nodes)}
        without = [
            (position[e.source], position[e.target], e.lag, position[e.without]) for e in problem.edges if e.without
        ]
        starts, missing, ready, ended, running = np.zeros((5, iterations * len(position)), dtype=np.int64)
        own, reach = np.zeros((2, len(position)), dtype=np.int64)
        left, over_at = np.zeros((2, iterations), dtype=np.int64)
        return cls(
            in_flight=problem.in_flight,
            num_dependencies=num_dependencies(problem, iterations),
            without=np.array(without, dtype=np.int64).reshape(-1, 4),
            starts=starts,
            missing=missing,
            ready=ready,
            ended=ended,
            running=running,
            own=own,
            reach=reach,
            left=left,
            over_at=over_at,
            crowd=empty_crowd(len(problem.calls)),
        )
