"""ReaL's rule (arXiv:2406.14088, algorithm 1): the node that was ready first is placed next; compiled.

The ready node with the smallest ready time goes first (ties: earlier iteration, then earlier node). It starts when it
is ready and the last node placed on any overlapping mesh has ended. Zero-length nodes are contracted: their successors
inherit their predecessors. A plan's time is the makespan of all iterations. For closed problems.

The order is a part of the problem, so nodes also exclude each other if the rule certainly starts one of them first on
shared devices (`precedence`). For the makespan M of N iterations (*) of `exclusive_work` is used three times:

1. all iterations together, if K's nodes exclude each other in any two iterations:
   M >= head + N * (*) + tail; head and tail are the shortest times before the first and after the last of K and A.
2. a cycle through the iterations, and 3. the nodes after it in the last iteration: see `cycles`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.search.bound.bound import present
from prefect_rlhf.placement.search.bound.exclusion import in_reach
from prefect_rlhf.placement.search.bound.exclusive_work import heaviest_work, rounded_up
from prefect_rlhf.placement.search.bound.scratch import ALL_ITERATIONS, Scratch
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.partial.complete import empty_complete_plan, evaluate
from prefect_rlhf.placement.search.problem import LinkNode, Plan, Problem
from prefect_rlhf.placement.search.rules.cycles import Cycles, cycle_bound, cycles_for
from prefect_rlhf.placement.search.rules.precedence import exclude_always_in_order, fill_order
from prefect_rlhf.placement.search.tables.dependencies import num_dependencies
from prefect_rlhf.placement.search.tables.rule import Rule
from prefect_rlhf.placement.search.tables.tables import CALL, UNDECIDED, Tables, build_tables


@inner
def surely_absent(t: Tables, option: Ints, relation: Ints, us: Ints) -> int:
    """The moves that take no time in any completion of the plan."""
    absent = 0
    for node in range(t.num_nodes):
        first, second = t.first[node], t.second[node]
        decided = t.cost_layers[node] == 1 or relation[first, second] != UNDECIDED
        decided = decided and is_option(t, option, first) and is_option(t, option, second)
        if decided and us[node] == 0 and t.node_kind[node] != CALL:
            absent |= 1 << node
    return absent


@inner
def is_option(t: Tables, option: Ints, call: int) -> bool:
    """Whether a call's single option is decided, not just a group of options."""
    return 0 <= option[call] < t.group_start[call] - t.option_start[call]


@inner
def makespan(r: ReadyFirst, t: Tables, option: Ints, relation: Ints, us: Ints, overlap: Ints) -> int:
    """The makespan of all iterations in microseconds."""
    num_nodes = t.num_nodes
    runs = t.iterations * num_nodes
    missing, ready_at, ready, free_at = r.missing, r.ready_at, r.ready, r.free_at
    for resource in range(2 * t.num_calls):
        free_at[resource] = 0
    num_ready = 0
    for run in range(runs):
        ready_at[run] = 0
        missing[run] = r.num_dependencies[run]
        if missing[run] == 0:
            ready[num_ready] = run
            num_ready += 1
    latest = 0
    while num_ready:
        at = first_ready(ready, ready_at, num_ready, us, t.node_kind)
        run = ready[at]
        num_ready -= 1
        ready[at] = ready[num_ready]
        node = run % num_nodes
        end = ready_at[run]
        if us[node] > 0 or t.node_kind[node] == CALL:
            end = occupy(t.resources[node], in_reach(t, t.resources[node], overlap), free_at, end, us[node])
        latest = max(latest, end)
        for edge in range(t.edge_start[node], t.edge_start[node + 1]):
            follower = run - node + t.edge_lag[edge] * num_nodes + t.edge_target[edge]
            if follower < runs:
                ready_at[follower] = max(ready_at[follower], end)
                missing[follower] -= 1
                if missing[follower] == 0:
                    ready[num_ready] = follower
                    num_ready += 1
    return latest


@inner
def first_ready(ready: Ints, ready_at: Ints, num_ready: int, us: Ints, node_kind: Ints) -> int:
    """The place in `ready` of the next run: an absent run, or else the run that became ready first."""
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
def occupy(resources: int, reached: int, free_at: Ints, ready_at: int, us: int) -> int:
    """When a node on `resources` ends; meanwhile no other node may use the `reached` resources."""
    start = ready_at
    while resources:
        start = max(start, free_at[lowest(resources)])
        resources &= resources - 1
    end = start + us
    while reached:
        free_at[lowest(reached)] = max(free_at[lowest(reached)], end)
        reached &= reached - 1
    return end


@inner
def fill_heads_and_tails(t: Tables, us: Ints, head: Ints, tail: Ints) -> None:
    """Write the critical path to each node within its iteration, and the critical path after its end."""
    for node in range(t.num_nodes):
        head[node] = tail[node] = 0
    for node in range(t.num_nodes):
        for edge in range(t.edge_start[node], t.edge_start[node + 1]):
            if t.edge_lag[edge] == 0:
                head[t.edge_target[edge]] = max(head[t.edge_target[edge]], head[node] + us[node])
    for node in range(t.num_nodes - 1, -1, -1):
        for edge in range(t.edge_start[node], t.edge_start[node + 1]):
            if t.edge_lag[edge] == 0:
                tail[node] = max(tail[node], tail[t.edge_target[edge]] + us[t.edge_target[edge]])


@inner
def least_over(values: Ints, members: int) -> int:
    """The smallest of the members' values; 0 without members."""
    if members == 0:
        return 0
    least = values[lowest(members)]
    while members:
        least = min(least, values[lowest(members)])
        members &= members - 1
    return least


@inner
def bound_of_makespan(
    r: ReadyFirst, t: Tables, option: Ints, relation: Ints, us: Ints, overlap: Ints, s: Scratch, enough: int
) -> int:
    """Microseconds that no makespan is below; in `s.binding` K and A of the last iteration follow those of a cycle."""
    nodes = present(us)
    fill_heads_and_tails(t, us, r.cycles.head, r.tail)
    fill_order(s.conflict, nodes, surely_absent(t, option, relation, us), r.cycles.order)
    best = number = 0
    lag = t.anchor_lag[0]
    while best < enough and number < len(t.anchor):
        best = max(best, cycle_bound(r.cycles, t, us, s, nodes, number, lag, best))
        if lag > 1:
            lag = 1
        else:
            number += 1
            lag = t.anchor_lag[number] if number < len(t.anchor) else 0
    return best if best >= enough else max(best, all_iterations_bound(r, t, us, s, nodes, best))


@inner
def all_iterations_bound(r: ReadyFirst, t: Tables, us: Ints, s: Scratch, nodes: int, best: int) -> int:
    """Term 1. Writes the binding nodes if the bound is above `best`."""
    exclude_always_in_order(t, s.conflict, r.cycles.order, s.adjacent)
    work, kept, fitting = heaviest_work(us, s.area, s, nodes, t.num_devices)
    ends = least_over(r.cycles.head, kept | fitting) + least_over(r.tail, kept | fitting)
    value = ends + rounded_up(t.iterations * work, t.num_devices)
    if value > best:
        s.binding[0], s.binding[1], s.binding[2], s.binding[3], s.binding[4] = ALL_ITERATIONS, kept, fitting, 0, 0
    return value


@inner
def as_planned(bound: int, us: int) -> int:
    """The time itself, because the rule allows no other order."""
    return us


@final
@dataclass(frozen=True, slots=True, eq=False)
class ReadyFirst(Rule):
    """The rule. A run is a node in an iteration; its number is iteration * V + node."""

    num_dependencies: Ints  # [runs]
    cycles: Cycles
    tail: Ints  # [V]: microseconds after the end of a node within its iteration; scratch, as all below
    missing: Ints  # [runs]: dependencies that have not ended
    ready_at: Ints  # [runs]
    ready: Ints  # [runs]
    free_at: Ints  # [2 C]

    schedule = staticmethod(makespan)
    bound = staticmethod(bound_of_makespan)
    least_in_any_order = staticmethod(as_planned)

    @classmethod
    def of(cls, problem: Problem, iterations: int) -> Self:
        for node in problem.nodes:
            if isinstance(node, LinkNode):
                raise InvalidInput("nodes", node.name, "no offload and no reload, by ReaL's rule")
        for edge in problem.edges:
            if edge.without is not None:
                raise InvalidInput("edges", f"without {edge.without}", "edges of every plan, by ReaL's rule")
        missing, ready_at, ready = np.zeros((3, iterations * len(problem.nodes)), dtype=np.int64)
        return cls(
            num_dependencies=num_dependencies(problem, iterations),
            cycles=cycles_for(problem, iterations),
            tail=np.zeros(len(problem.nodes), dtype=np.int64),
            missing=missing,
            ready_at=ready_at,
            ready=ready,
            free_at=np.zeros(2 * len(problem.calls), dtype=np.int64),
        )


def period_seconds(problem: Problem, plan: Plan) -> float:
    """The iteration time in seconds once the pipeline is full, measured over the second half of many iterations."""
    half, makespans = 4 * problem.iterations, []
    tables = build_tables(problem, ReadyFirst)
    complete = empty_complete_plan(tables)
    complete.option[:] = [plan[call.name].option for call in problem.calls]
    complete.mesh[:] = [plan[call.name].mesh for call in problem.calls]
    for iterations in (half, 2 * half):
        longer = replace(tables, iterations=iterations, rule=ReadyFirst.of(problem, iterations))
        makespans.append(int(evaluate(longer, complete)))
    return (makespans[1] - makespans[0]) * 1e-6 / half
