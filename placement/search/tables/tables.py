"""A problem as flat arrays for the compiled inner loops: nodes and calls are numbers, sets of them 64-bit integers.

Words used in the arrays: a *resource* is occupied by nodes; bit c is the devices of call c's mesh, bit `num_calls + c`
the host link of that mesh. A *relation* of two calls is the position of their meshes: DISJOINT, OVERLAP, EQUAL, or
UNDECIDED in a partial plan. Equal meshes have the relation OVERLAP if equality does not change a cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, starts, word
from prefect_rlhf.placement.search.problem import (
    ComputeNode,
    LinkNode,
    PairNode,
    PlannedCall,
    Problem,
    ProblemNode,
    calls_of,
)
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.tables.dependencies import (
    NEVER,
    Direct,
    anchors_of,
    direct_dependencies,
    lags_with_own,
    least_lags,
    loops,
)
from prefect_rlhf.placement.search.tables.groups import groups_of, option_arrays
from prefect_rlhf.placement.search.tables.rule import Rule
from prefect_rlhf.placement.search.tables.widest_cycle import WidestCycle, widest_cycle

UNDECIDED, DISJOINT, OVERLAP, EQUAL = -1, 0, 1, 2
CALL, PAIR, LINK, COMPUTE = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, eq=False)
class Tables(Record):
    """The arrays that the compiled functions read. V nodes, C calls, K mesh classes, A anchors (see `cycles`)."""

    num_calls: int
    num_nodes: int
    num_devices: int
    iterations: int
    rule: Rule
    most_bytes: int  # of the largest device
    # nodes [V]
    node_kind: Ints  # CALL, PAIR, LINK or COMPUTE
    first: Ints  # the call itself; the first call of a pair; the call of a link node; 0 of a computation
    second: Ints  # the second call of a pair, else equal to `first`
    resources: Ints
    node_of: Ints  # [C]: the node that is the call
    nodes_of: Ints  # [2 C]: set of nodes that occupy a resource
    visit_nodes: Ints  # [C]: set of the call and its link nodes
    strangers: Ints  # [C]: set of calls of other roles, whose visits to a device exclude its own
    between: Ints  # [C, C]: for a call and a visitor the calls that may visit between, see `Problem.between`
    cost_start: Ints  # [V + 1]: the start of its durations in `cost`
    cost_columns: Ints  # kinds of options of the second call, for a pair
    cost_layers: Ints  # 3 when durations of a pair depend on the relation, else 1
    cost: Ints
    least_cost: Ints  # over everything, [V]
    least_by_first: Ints  # over options of the second call and relations, at the pair's row_start
    least_by_second: Ints  # over options of the first call and relations, at the pair's column_start
    row: Ints  # of each option of the first call in the pair's costs, at its row_start
    column: Ints  # of each option of the second call, at the pair's column_start
    row_start: Ints
    column_start: Ints
    # the options of all calls consecutively; after a call's own options its groups, see `groups`
    option_start: Ints  # [C + 1]
    group_start: Ints  # [C]: the start of its groups
    member_start: Ints  # [options + 1]: the start of a group in `member`
    member: Ints  # options of the call, the fastest of each group first
    option_cost: Ints
    option_class: Ints
    option_static: Ints
    option_active: Ints  # peak less static
    option_copy: Ints  # number of the copy, or -1; ANY_COPY of a group that has several
    option_shared: Ints  # the most of its static bytes that can lie in a shared copy
    option_fullest: Ints  # of the fullest device while it runs
    option_loaded: Ints  # of every device while its link nodes run
    least_area: Ints  # device-microseconds, [C]
    least_size: Ints  # [C]
    least_in_class: Ints  # [C, K]: microseconds of the fastest option on a class; NEVER if there is no option
    # meshes
    class_size: Ints  # [K]
    class_start: Ints  # [K + 1]
    class_mesh: Ints
    class_by_size: Ints  # [K]
    size_place: Ints  # [K]: the place of each class in `class_by_size`
    mesh_start: Ints
    mesh_stop: Ints
    device_bytes: Ints
    capacity_changes: Ints  # devices with other memory than the device before
    can_lie: Ints  # [relation, K, K]: whether two meshes of these classes can have the relation
    lies_within: Ints  # [K, K]: whether a mesh of the first class lies inside each of the second that it overlaps
    tells_equal: Ints  # [C, C]: whether EQUAL differs from OVERLAP for this pair
    # dependencies
    edge_start: Ints  # [V + 1]
    edge_target: Ints
    edge_lag: Ints
    # orders that hold in every plan, as sets of nodes
    ordered_once: Ints  # [V]: nodes ordered against it within an iteration
    ordered_always: Ints  # [V]: nodes whose every run is ordered against every run of it
    anchor: Ints  # [A]
    anchor_lag: Ints
    anchor_cycle: Ints  # [A]: the anchor and all between it and its next run that must wait for it
    cycle_ordered: Ints  # [A, V]: nodes of the cycle that are ordered against it
    loops: Ints  # [loops, 2]: nodes and iterations of each, see `loops`
    cycle: WidestCycle
    around: Ints  # [2, C, C]: of a call and a later one, or the moves to it, the nodes that never run between


def build_tables(problem: Problem, rule: type[Rule]) -> Tables:
    """Number nodes, calls, options and meshes. The same problem always gives the same arrays."""
    key: Any = rule  # a class can be hashed, which mypy does not see
    return _build_tables(problem, key)


@lru_cache(maxsize=1)  # a local search ranks the neighbours of many plans by the same problem
def _build_tables(problem: Problem, rule: type[Rule]) -> Tables:
    # Numba compiles functions of arrays of numbers well, and functions of Python objects not at all. So everything
    # that the inner loops read is flattened here, once. Lists of different lengths share an array with an array of
    # starts, and sets of at most 62 nodes are bits of a word, which makes union and membership single instructions.
    calls = {call.name: index for index, call in enumerate(problem.calls)}
    groups = {call.name: groups_of(call) for call in problem.calls}
    direct = direct_dependencies(problem)
    return Tables(
        num_calls=len(calls),
        num_nodes=len(problem.nodes),
        num_devices=problem.num_devices,
        iterations=problem.iterations,
        rule=rule.of(problem, problem.iterations),
        most_bytes=max(problem.device_bytes),
        **_node_arrays(problem, calls, groups),
        **option_arrays(problem, groups),
        **_least_arrays(problem),
        **_mesh_arrays(problem),
        tells_equal=_tells_equal(problem, calls),
        between=_between(problem, calls),
        **_edge_arrays(problem),
        **_order_arrays(direct, problem.iterations),
        cycle=widest_cycle(problem, calls, direct),
        around=_around(problem, calls, direct),
    )


def ends_of_moves(t: Tables) -> list[set[int]]:
    """The calls at the other ends of each call's moves; a move's duration depends on the options of both."""
    others: list[set[int]] = [set() for _ in range(t.num_calls)]
    for node in np.flatnonzero(t.node_kind == PAIR):
        first, second = int(t.first[node]), int(t.second[node])
        others[first].add(second)
        others[second].add(first)
    return others


def calls_with_moves(t: Tables) -> set[int]:
    """The calls at the ends of moves."""
    return {call for call, others in enumerate(ends_of_moves(t)) if others}


def _ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Ints:
    return np.array(values, dtype=np.int64)


def _node_arrays(problem: Problem, calls: dict[str, int], groups: dict[str, list[Ints]]) -> dict[str, Ints]:
    kinds = {PlannedCall: CALL, PairNode: PAIR, LinkNode: LINK, ComputeNode: COMPUTE}
    ends = [calls_of(node) or (problem.calls[0].name,) for node in problem.nodes]
    resources = [_resources(node, calls) for node in problem.nodes]
    costs = [_with_groups(_cost(node), node, groups) for node in problem.nodes]
    tables, rows, columns = zip(*costs, strict=True)
    return {
        "node_kind": _ints([kinds[type(node)] for node in problem.nodes]),
        "first": _ints([calls[names[0]] for names in ends]),
        "second": _ints([calls[names[-1]] for names in ends]),
        "resources": _ints(resources),
        "node_of": _ints([i for i, node in enumerate(problem.nodes) if isinstance(node, PlannedCall)]),
        "nodes_of": _ints([word([bool(word >> bit & 1) for word in resources]) for bit in range(2 * len(calls))]),
        "visit_nodes": _ints([word([not isinstance(node, PairNode) and calls_of(node) == (name,)
                                    for node in problem.nodes]) for name in calls]),
        "strangers": _ints([word([other.role != call.role for other in problem.calls]) for call in problem.calls]),
        "cost_start": starts([cost.size for cost in tables]),
        "cost_columns": _ints([cost.shape[2] for cost in tables]),
        "cost_layers": _ints([cost.shape[0] for cost in tables]),
        "cost": np.concatenate([cost.ravel() for cost in tables]),
        "least_cost": _ints([cost.min() for cost in tables]),
        "least_by_first": np.concatenate([cost.min(axis=(0, 2))[row] for cost, row, _ in costs]),
        "least_by_second": np.concatenate([cost.min(axis=(0, 1))[column] for cost, _, column in costs]),
        "row": np.concatenate(rows),
        "column": np.concatenate(columns),
        "row_start": starts(list(map(len, rows)))[:-1],
        "column_start": starts(list(map(len, columns)))[:-1],
    }  # fmt: skip


def _cost(node: ProblemNode) -> Ints:
    """Durations as [layers, options of first, options of second].

    A single column for a call or a link node, a single duration for a computation.
    """
    if isinstance(node, ComputeNode):
        return np.full((1, 1, 1), node.microseconds, dtype=np.int64)
    if isinstance(node, PlannedCall):
        return _ints([option.microseconds for option in node.options])[None, :, None]
    durations = np.asarray(node.microseconds, dtype=np.int64)
    if isinstance(node, LinkNode):
        return durations[None, :, None]
    return durations if durations.ndim == 3 else durations[None]


def _resources(node: ProblemNode, calls: dict[str, int]) -> int:
    if isinstance(node, PlannedCall):
        return 1 << calls[node.name]
    if isinstance(node, ComputeNode):
        return 0
    if isinstance(node, LinkNode):
        return 1 << calls[node.call] + (0 if node.occupies == "compute" else len(calls))
    first, second = 1 << calls[node.first], 1 << calls[node.second]
    return {"first": first, "second": second, "both": first | second}[node.occupies]


def _with_groups(cost: Ints, node: ProblemNode, groups: dict[str, list[Ints]]) -> tuple[Ints, Ints, Ints]:
    """Add a row (and for a pair a column) for each group of options: the least of their durations.

    Returns the table, [layers, rows, columns], and the row and the column of each option and group.
    """
    # A group behaves like a further option of the call with the least of each cost, so the search needs no second
    # set of tables, and the bound with a group is at most the bound with any of its members.
    places = [np.arange(length, dtype=np.int64) for length in cost.shape[1:]]
    if isinstance(node, PairNode) and node.kinds is not None:
        places = list(node.kinds)
    for axis, name in enumerate(calls_of(node), start=1):
        members = [np.unique(places[axis - 1][group]) for group in groups[name]]
        by_group = cost.take(np.concatenate(members), axis)
        least = np.minimum.reduceat(by_group, starts(list(map(len, members)))[:-1], axis)
        places[axis - 1] = np.concatenate([places[axis - 1], np.arange(len(members)) + cost.shape[axis]])
        cost = np.concatenate([cost, least], axis)
    row, column = places
    return cost, row, column


def _least_arrays(problem: Problem) -> dict[str, Ints]:
    sizes = [problem.meshes[members[0]].num_devices for members in problem.mesh_classes]
    in_class = np.full((len(problem.calls), len(sizes)), NEVER, dtype=np.int64)
    for row, call in zip(in_class, problem.calls, strict=True):
        np.minimum.at(row, [o.mesh_class for o in call.options], [o.microseconds for o in call.options])
    return {
        "least_area": _ints([min(o.microseconds * sizes[o.mesh_class] for o in c.options) for c in problem.calls]),
        "least_size": _ints([min(sizes[o.mesh_class] for o in c.options) for c in problem.calls]),
        "least_in_class": in_class,
    }


def _mesh_arrays(problem: Problem) -> dict[str, Ints]:
    classes = problem.mesh_classes
    sizes = [problem.meshes[members[0]].num_devices for members in classes]
    mesh_starts = [np.sort([problem.meshes[mesh].start for mesh in members]) for members in classes]
    can_lie = np.zeros((3, len(classes), len(classes)), dtype=np.int64)
    for a, first in enumerate(mesh_starts):
        for b, second in enumerate(mesh_starts[: a + 1]):
            can_lie[:, a, b] = can_lie[:, b, a] = _possible_relations(first, sizes[a], second, sizes[b])
    inside = [[_lie_within(a, size, b, other) for b, other in zip(mesh_starts, sizes, strict=True)]
              for a, size in zip(mesh_starts, sizes, strict=True)]  # fmt: skip
    return {
        "class_by_size": np.argsort(sizes, kind="stable"),
        "size_place": np.argsort(np.argsort(sizes, kind="stable"), kind="stable"),
        "class_size": _ints(sizes),
        "class_start": starts([len(members) for members in classes]),
        "class_mesh": _ints([mesh for members in classes for mesh in members]),
        "mesh_start": _ints([mesh.start for mesh in problem.meshes]),
        "mesh_stop": _ints([mesh.stop for mesh in problem.meshes]),
        "device_bytes": _ints(problem.device_bytes),
        "capacity_changes": np.flatnonzero(np.diff(problem.device_bytes)) + 1,
        "can_lie": can_lie,
        "lies_within": _ints(inside),
    }


def _possible_relations(first: Ints, size: int, second: Ints, other_size: int) -> tuple[bool, bool, bool]:
    """Whether meshes of two classes, given as sorted starts and a size, can be disjoint, overlap, be equal."""
    disjoint = first[0] + size <= second[-1] or second[0] + other_size <= first[-1]
    nearest = np.searchsorted(second, first - other_size, side="right")  # the first that ends after the mesh starts
    overlap = (nearest < np.searchsorted(second, first + size, side="left")).any()
    equal = size == other_size and np.isin(first, second).any()
    return bool(disjoint), bool(overlap), bool(equal)


def _lie_within(first: Ints, size: int, second: Ints, other_size: int) -> bool:
    """Whether each mesh of a class is inside all meshes of another that it overlaps; sorted starts and a size each."""
    if size > other_size:
        return False
    overlapping = np.searchsorted(second, first + size) - np.searchsorted(second, first - other_size, side="right")
    around = np.searchsorted(second, first, side="right") - np.searchsorted(second, first + size - other_size)
    return bool((overlapping == around).all())


def _between(problem: Problem, calls: dict[str, int]) -> Ints:
    between = np.full((len(calls), len(calls)), word([True] * len(calls)), dtype=np.int64)
    for (running, visitor), others in problem.between.items():
        between[calls[running], calls[visitor]] = word([name in others for name in calls])
    return between


def _tells_equal(problem: Problem, calls: dict[str, int]) -> Ints:
    # EQUAL and OVERLAP are separate alternatives only if they differ in cost: a copy that both calls could share, or a
    # move that takes another time. For all other pairs a third of the relations need not be visited.
    tells = np.zeros((len(calls), len(calls)), dtype=np.int64)
    copies = [{option.copy for option in call.options} - {None} for call in problem.calls]
    for a, b in np.ndindex(tells.shape):
        tells[a, b] = a != b and bool(copies[a] & copies[b])
    for node in problem.nodes:
        if isinstance(node, PairNode) and (cost := _cost(node)).shape[0] == 3 and (cost[1] != cost[2]).any():
            a, b = calls[node.first], calls[node.second]
            tells[a, b] = tells[b, a] = True
    return tells


def _edge_arrays(problem: Problem) -> dict[str, Ints]:
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    edges = sorted({(position[e.source], position[e.target], e.lag) for e in problem.edges if e.without is None})
    return {
        "edge_start": starts([sum(source == node for source, _, _ in edges) for node in range(len(position))]),
        "edge_target": _ints([target for _, target, _ in edges]),
        "edge_lag": _ints([lag for _, _, lag in edges]),
    }


@lru_cache(maxsize=64)  # most problems of a question have the same dependencies
def _order_arrays(direct: Direct, iterations: int) -> Mapping[str, Ints]:
    lags = least_lags(direct)
    nodes = range(len(lags))
    once = [[min(lags[u, v], lags[v, u]) == 0 and u != v for v in nodes] for u in nodes]
    always = [[lags[u, v] + lags[v, u] <= 1 and u != v for v in nodes] for u in nodes]
    anchors = anchors_of(lags, iterations)
    cycles = [_cycle(lags, anchor) for anchor in anchors]
    counted = [word([v in cycle for v in nodes]) for a, cycle in zip(anchors, cycles, strict=True) if lags[a, a] == 1]
    return {
        "ordered_once": _ints([word(row) for row in once]),
        "ordered_always": _ints([word(row) for row in always]),
        "anchor": _ints(anchors),
        "anchor_lag": _ints([int(lags[anchor, anchor]) for anchor in anchors]),
        "anchor_cycle": _ints([word([v in cycle for v in nodes]) for cycle in cycles]),
        "cycle_ordered": _ints([[word([_ordered_in(cycle, lags, u, v) for v in nodes]) for u in nodes]
                                for cycle in cycles]),
        "loops": loops(direct, counted),
    }  # fmt: skip


def _around(problem: Problem, calls: dict[str, int], direct: Direct) -> Ints:
    """For each pair of `visits_after` the nodes that never run between the first call and the second, or its move.

    Some run of such a node ends before the first call, and its next run starts behind the second.
    """
    sets = np.zeros((2, len(calls), len(calls)), dtype=np.int64)
    if not problem.visits_after:  # as in every problem that is searched for plans
        return sets
    lags = lags_with_own(direct)
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    for (first, second), lag in problem.visits_after.items():
        before, behind = lags[:, position[first]], lags[position[second]]
        sets[0, calls[first], calls[second]] = word((before + lag + behind <= 1).tolist())
        for move in problem.nodes:
            if isinstance(move, PairNode) and move.second == second:
                place = position[move.name]
                never = before + lags[position[first], place] + lags[place] <= 1
                sets[1, calls[first], calls[second]] |= word(never.tolist())
    return sets


def _cycle(lags: Ints, anchor: int) -> dict[int, int]:
    """The nodes between a run of `anchor` and its next, each with how many iterations after the anchor's it runs."""
    period = lags[anchor, anchor]
    between = {v: int(lags[anchor, v]) for v in range(len(lags)) if lags[anchor, v] + lags[v, anchor] <= period}
    return between | {anchor: 0}


def _ordered_in(cycle: dict[int, int], lags: Ints, node: int, other: int) -> bool:
    """Whether either of two nodes waits for the other's run in the cycle."""
    if node not in cycle or other not in cycle or node == other:
        return False
    apart = cycle[other] - cycle[node]
    ahead, behind = apart - lags[node, other], -apart - lags[other, node]  # iterations beyond the awaited iteration
    return any(more >= 0 and more % lags[node, node] == 0 for more in (ahead, behind))
