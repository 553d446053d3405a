"""ReaL's list scheduling of all iterations (arXiv:2406.14088, algorithm 1), and durations and resources, compiled.

The ready node with the smallest ready time goes first (ties: earlier iteration, then earlier node); it starts when it
is ready and the last node placed on any overlapping mesh has ended. Zero-length nodes are contracted: their successors
inherit their predecessors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.tables.tables import CALL, COMPUTE, GRAPH_ORDER, LINK, UNDECIDED, Tables


@dataclass(frozen=True, slots=True, eq=False)
class Agenda(Record):
    """Scratch arrays for a schedule. A run is a node in an iteration; its number is iteration * V + node."""

    starts: Ints  # [runs]: the schedule, microseconds
    missing: Ints  # [runs]: dependencies that have not ended
    ready_at: Ints  # [runs]
    ready: Ints  # [runs]
    free_at: Ints  # [2 C]
    ended: Ints  # [runs]: runs that have just ended
    own: Ints  # [V]: used by a node: resources, and visits to devices
    reach: Ints  # [V]: blocked while a node runs
    running: Ints  # [runs]
    left: Ints  # [iterations]: runs of each that have not ended
    over_at: Ints  # [iterations]: microseconds
    crowded: Ints  # [C]: see `fill_crowded`


def agenda_for(t: Tables) -> Agenda:
    """Allocate arrays of the right sizes."""
    starts, missing, ready_at, ready, ended = np.zeros((5, t.iterations * t.num_nodes), dtype=np.int64)
    left, over_at = np.zeros((2, t.iterations), dtype=np.int64)
    own, reach = np.zeros((2, t.num_nodes), dtype=np.int64)
    running, free_at = np.zeros(t.num_nodes * t.iterations, dtype=np.int64), np.zeros(2 * t.num_calls, dtype=np.int64)
    crowded = np.zeros(t.num_calls, dtype=np.int64)
    return Agenda(starts, missing, ready_at, ready, free_at, ended, own, reach, running, left, over_at, crowded)


@inner
def fill_durations(t: Tables, option: Ints, relation: Ints, least_us: Ints, us: Ints) -> None:
    """Write each node's duration in microseconds: the smallest possible if the plan is undecided.

    `least_us` are the durations of the undecided calls.
    """
    for node in range(t.num_nodes):
        a, b = option[t.first[node]], option[t.second[node]]
        if t.node_kind[node] == CALL:
            us[node] = t.cost[t.cost_start[node] + a] if a >= 0 else least_us[t.first[node]]
        elif t.node_kind[node] == LINK:
            us[node] = t.cost[t.cost_start[node] + a] if a >= 0 else t.least_cost[node]
        elif t.node_kind[node] == COMPUTE:
            us[node] = t.least_cost[node]
        elif a >= 0 and b >= 0:
            us[node] = pair_duration(t, node, a, b, relation[t.first[node], t.second[node]])
        elif a >= 0:
            us[node] = t.least_by_first[t.row_start[node] + a]
        elif b >= 0:
            us[node] = t.least_by_second[t.column_start[node] + b]
        else:
            us[node] = t.least_cost[node]


@inner
def pair_duration(t: Tables, node: int, a: int, b: int, relation: int) -> int:
    """Microseconds of a pair node whose calls have options a and b."""
    row, column = t.row[t.row_start[node] + a], t.column[t.column_start[node] + b]
    at = t.cost_start[node] + row * t.cost_columns[node] + column
    if t.cost_layers[node] == 1:
        return t.cost[at]
    layer = (t.cost_start[node + 1] - t.cost_start[node]) // 3
    if relation != UNDECIDED:
        return t.cost[at + relation * layer]
    return min(t.cost[at], t.cost[at + layer], t.cost[at + 2 * layer])


@inner
def surely_absent(t: Tables, option: Ints, relation: Ints, us: Ints) -> int:
    """The moves that take no time, however the plan is completed; under `graph_order` no bound needs them."""
    absent = 0
    if t.rule == GRAPH_ORDER:
        return absent
    for node in range(t.num_nodes):
        first, second = t.first[node], t.second[node]
        decided = t.cost_layers[node] == 1 or relation[first, second] != UNDECIDED
        decided = decided and is_option(t, option, first) and is_option(t, option, second)
        if decided and us[node] == 0 and t.node_kind[node] != CALL:
            absent |= 1 << node
    return absent


@inner
def is_option(t: Tables, option: Ints, call: int) -> bool:
    """Whether a single option of a call is decided, not only a group of options."""
    return 0 <= option[call] < t.group_start[call] - t.option_start[call]


@inner
def makespan_ready_first(t: Tables, us: Ints, overlap: Ints, agenda: Agenda) -> int:
    """The makespan in microseconds. Writes the start of each run into `agenda.starts`."""
    num_nodes = t.num_nodes
    runs = t.iterations * num_nodes
    starts, missing, ready_at = agenda.starts, agenda.missing, agenda.ready_at
    ready, free_at = agenda.ready, agenda.free_at
    for resource in range(2 * t.num_calls):
        free_at[resource] = 0
    num_ready = 0
    for run in range(runs):
        ready_at[run] = 0
        missing[run] = t.num_dependencies[run]
        if missing[run] == 0:
            ready[num_ready] = run
            num_ready += 1
    makespan = 0
    while num_ready:
        at = first_ready(ready, ready_at, num_ready, us, t.node_kind)
        run = ready[at]
        num_ready -= 1
        ready[at] = ready[num_ready]
        node = run % num_nodes
        start = ready_at[run]
        end = start
        if us[node] > 0 or t.node_kind[node] == CALL:
            start, end = occupy(t.resources[node], in_reach(t, t.resources[node], overlap), free_at, start, us[node])
        starts[run] = start
        makespan = max(makespan, end)
        for edge in range(t.edge_start[node], t.edge_start[node + 1]):
            follower = run - node + t.edge_lag[edge] * num_nodes + t.edge_target[edge]
            if follower < runs:
                ready_at[follower] = max(ready_at[follower], end)
                missing[follower] -= 1
                if missing[follower] == 0:
                    ready[num_ready] = follower
                    num_ready += 1
    return makespan


@inner
def first_ready(ready: Ints, ready_at: Ints, num_ready: int, us: Ints, node_kind: Ints) -> int:
    """The place in `ready` of the next run: an absent run, else the run that became ready first."""
    best = 0
    for index in range(num_ready):
        run = ready[index]
        node = run % len(us)
        if us[node] == 0 and node_kind[node] != CALL:
            return index
        earlier = ready_at[run] - ready_at[ready[best]]
        if earlier < 0 or (earlier == 0 and run < ready[best]):
            best = index
    return best


@inner
def in_reach(t: Tables, resources: int, overlap: Ints) -> int:
    """All resources that may not be in use while `resources` are. `overlap[c]`: calls on meshes that overlap c's."""
    reached = 0
    while resources:
        bit = lowest(resources)
        resources &= resources - 1
        reached |= overlap[bit] if bit < t.num_calls else overlap[bit - t.num_calls] << t.num_calls
    return reached


@inner
def occupy(resources: int, reached: int, free_at: Ints, ready_at: int, us: int) -> tuple[int, int]:
    """Start and end of a node on `resources`; no other node may use the `reached` resources meanwhile."""
    start = ready_at
    while resources:
        start = max(start, free_at[lowest(resources)])
        resources &= resources - 1
    end = start + us
    while reached:
        free_at[lowest(reached)] = max(free_at[lowest(reached)], end)
        reached &= reached - 1
    return start, end
