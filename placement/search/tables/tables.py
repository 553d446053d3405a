"""A problem as flat arrays, for the compiled inner loops: nodes and calls by number, sets of them as 64-bit words.

Words used in the arrays: a *resource* is what a node occupies; bit c is the devices of call c's mesh, bit
`num_calls + c` the host link of that mesh. A *relation* of two calls says how their meshes lie: DISJOINT, OVERLAP
(and not equal, where being equal costs something else), EQUAL; UNDECIDED in a partial plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, starts, word
from prefect_rlhf.placement.search.problem import LinkNode, PairNode, PlannedCall, Problem
from prefect_rlhf.placement.search.tables.dependencies import NEVER, least_lags, wait_arrays
from prefect_rlhf.placement.search.tables.groups import groups_of, option_arrays
from prefect_rlhf.placement.search.tables.symmetry import of_nodes, symmetries, wins_ties

UNDECIDED, DISJOINT, OVERLAP, EQUAL = -1, 0, 1, 2
CALL, PAIR, LINK = 0, 1, 2


class Tables(NamedTuple):
    """All that the compiled functions read. V nodes, C calls, K mesh classes, A anchors (see `bound`)."""

    num_calls: int
    num_nodes: int
    num_devices: int
    iterations: int
    most_bytes: int  # of the largest device
    # nodes [V]
    kind: Ints
    first: Ints  # the call itself; the first call of a pair; the call of a link node
    second: Ints  # the second call of a pair, else equal to `first`
    resources: Ints
    node_of: Ints  # [C]: the node that is the call
    nodes_of: Ints  # [2 C]: set of nodes that occupy a resource
    cost_start: Ints  # where its durations begin in `cost`, [V + 1]
    cost_columns: Ints  # options of the second call, for a pair
    cost_layers: Ints  # 3 when durations of a pair depend on the relation, else 1
    cost: Ints
    least_cost: Ints  # over everything, [V]
    least_by_first: Ints  # over options of the second call and relations, at the pair's row_start
    least_by_second: Ints  # over options of the first call and relations, at the pair's column_start
    row_start: Ints
    column_start: Ints
    # options of all calls one after another; after a call's own come its groups, see `groups`
    option_start: Ints  # [C + 1]
    group_start: Ints  # [C]: where its groups begin
    member_start: Ints  # [options + 1]: where those of a group stand in `member`
    member: Ints  # options of the call, the fastest of each group first
    option_cost: Ints
    option_class: Ints
    option_static: Ints
    option_active: Ints  # peak less static
    option_copy: Ints  # number of the copy, or -1; ANY_COPY of a group that has several
    option_shared: Ints  # the most of its static bytes that can lie in a shared copy
    option_fullest: Ints  # of the fullest device while it runs
    least_area: Ints  # device-microseconds, [C]
    least_size: Ints  # [C]
    least_in_class: Ints  # [C, K]: microseconds of the fastest option on a class; NEVER when there is none
    # meshes
    class_size: Ints  # [K]
    class_start: Ints  # [K + 1]
    class_mesh: Ints
    class_by_size: Ints  # [K]
    size_place: Ints  # [K]: where each class stands in `class_by_size`
    mesh_start: Ints
    mesh_stop: Ints
    device_bytes: Ints
    kind_start: Ints  # devices that hold more or less than the one before
    may: Ints  # [relation, K, K]: whether two meshes of these classes can lie so
    tells_equal: Ints  # [C, C]: whether EQUAL differs from OVERLAP for this pair
    symmetry: Ints  # [S, C]: permutations of the calls, see `symmetry`; the first changes nothing
    wins_ties: Ints  # [V]: set of nodes that it goes before when both become ready at once, however calls change places
    # waiting
    edge_start: Ints  # [V + 1]
    edge_target: Ints
    edge_lag: Ints
    num_waits: Ints  # [iterations * V]: for how many nodes a run waits
    # what is ordered whatever the plan, as sets of nodes
    ordered_once: Ints  # [V]: those ordered against it within one iteration
    ordered_always: Ints  # [V]: those of which every run is ordered against every run of it
    anchor: Ints  # [A]
    anchor_lag: Ints
    anchor_loop: Ints  # set: the anchor and all between it and its next run that must wait for it
    anchor_rest: Ints  # set: the anchor and all that waits for it in its iteration
    loop_ordered: Ints  # [A, V]: those of the loop that are ordered against it
    waits_for: Ints  # [3, V]: the nodes that it waits for at once, by lag: 0, 1, more
    ready_last: Ints  # [V]: the nodes of which the last run has ended when it is ready


def build_tables(problem: Problem) -> Tables:
    """Number everything. The same problem always gives the same arrays."""
    calls = {call.name: index for index, call in enumerate(problem.calls)}
    lags = least_lags(problem)
    return Tables(
        num_calls=len(calls),
        num_nodes=len(problem.nodes),
        num_devices=problem.num_devices,
        iterations=problem.iterations,
        most_bytes=max(problem.device_bytes),
        **_node_arrays(problem, calls),
        **_option_arrays(problem),
        least_in_class=_least_in_class(problem),
        **_mesh_arrays(problem),
        tells_equal=_tells_equal(problem, calls),
        **_symmetry_arrays(problem),
        **_edge_arrays(problem),
        **_order_arrays(problem, lags),
        **wait_arrays(problem),
    )


def calls_with_moves(t: Tables) -> set[int]:
    """The calls at the ends of moves: what these take depends on their options."""
    return {int(call) for ends in (t.first, t.second) for call in ends[t.kind == PAIR]}


def _ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Ints:
    return np.array(values, dtype=np.int64)


def _node_arrays(problem: Problem, calls: dict[str, int]) -> dict[str, Ints]:
    ends = [_ends(node) for node in problem.nodes]
    resources = [_resources(node, calls) for node in problem.nodes]
    groups = {call.name: groups_of(call) for call in problem.calls}
    costs = [_with_groups(_cost(node), node, groups) for node in problem.nodes]  # [layers, rows, columns]
    return {
        "kind": _ints([CALL if isinstance(n, PlannedCall) else PAIR if isinstance(n, PairNode) else LINK
                       for n in problem.nodes]),
        "first": _ints([calls[first] for first, _ in ends]),
        "second": _ints([calls[second] for _, second in ends]),
        "resources": _ints(resources),
        "node_of": _ints([i for i, node in enumerate(problem.nodes) if isinstance(node, PlannedCall)]),
        "nodes_of": _ints([word([bool(word >> bit & 1) for word in resources]) for bit in range(2 * len(calls))]),
        "cost_start": starts([cost.size for cost in costs]),
        "cost_columns": _ints([cost.shape[2] for cost in costs]),
        "cost_layers": _ints([cost.shape[0] for cost in costs]),
        "cost": np.concatenate([cost.ravel() for cost in costs]),
        "least_cost": _ints([cost.min() for cost in costs]),
        "least_by_first": np.concatenate([cost.min(axis=(0, 2)) for cost in costs]),
        "least_by_second": np.concatenate([cost.min(axis=(0, 1)) for cost in costs]),
        "row_start": starts([cost.shape[1] for cost in costs])[:-1],
        "column_start": starts([cost.shape[2] for cost in costs])[:-1],
    }  # fmt: skip


def _ends(node: PlannedCall | PairNode | LinkNode) -> tuple[str, str]:
    if isinstance(node, PairNode):
        return node.first, node.second
    name = node.name if isinstance(node, PlannedCall) else node.call
    return name, name


def _cost(node: PlannedCall | PairNode | LinkNode) -> Ints:
    """Durations as [layers, options of first, options of second]; one column for a call or a link node."""
    if isinstance(node, PlannedCall):
        return _ints([option.microseconds for option in node.options])[None, :, None]
    durations = np.asarray(node.microseconds, dtype=np.int64)
    if isinstance(node, LinkNode):
        return durations[None, :, None]
    return durations if durations.ndim == 3 else durations[None]


def _resources(node: PlannedCall | PairNode | LinkNode, calls: dict[str, int]) -> int:
    if isinstance(node, PlannedCall):
        return 1 << calls[node.name]
    if isinstance(node, LinkNode):
        return 1 << len(calls) + calls[node.call]
    first, second = 1 << calls[node.first], 1 << calls[node.second]
    return {"first": first, "second": second, "both": first | second}[node.occupies]


def _with_groups(cost: Ints, node: PlannedCall | PairNode | LinkNode, groups: dict[str, list[Ints]]) -> Ints:
    """The same with a row (and for a pair a column) for each group of options: the least of theirs."""
    first, second = _ends(node)
    cost = np.concatenate([cost, *(cost[:, members].min(axis=1, keepdims=True) for members in groups[first])], axis=1)
    if not isinstance(node, PairNode):
        return cost
    return np.concatenate(
        [cost, *(cost[:, :, members].min(axis=2, keepdims=True) for members in groups[second])], axis=2
    )


def _option_arrays(problem: Problem) -> dict[str, Ints]:
    sizes = [problem.meshes[members[0]].num_devices for members in problem.mesh_classes]
    return {
        **option_arrays(problem),
        "least_area": _ints([min(o.microseconds * sizes[o.mesh_class] for o in c.options) for c in problem.calls]),
        "least_size": _ints([min(sizes[o.mesh_class] for o in c.options) for c in problem.calls]),
    }


def _mesh_arrays(problem: Problem) -> dict[str, Ints]:
    classes = problem.mesh_classes
    sizes = [problem.meshes[members[0]].num_devices for members in classes]
    every = [np.sort([problem.meshes[mesh].start for mesh in members]) for members in classes]
    may = np.zeros((3, len(classes), len(classes)), dtype=np.int64)
    for a, first in enumerate(every):
        for b, second in enumerate(every[: a + 1]):
            may[:, a, b] = may[:, b, a] = _possible(first, sizes[a], second, sizes[b])
    return {
        "class_by_size": np.argsort(sizes, kind="stable"),
        "size_place": np.argsort(np.argsort(sizes, kind="stable"), kind="stable"),
        "class_size": _ints(sizes),
        "class_start": starts([len(members) for members in classes]),
        "class_mesh": _ints([mesh for members in classes for mesh in members]),
        "mesh_start": _ints([mesh.start for mesh in problem.meshes]),
        "mesh_stop": _ints([mesh.stop for mesh in problem.meshes]),
        "device_bytes": _ints(problem.device_bytes),
        "kind_start": np.flatnonzero(np.diff(problem.device_bytes)) + 1,
        "may": may,
    }


def _least_in_class(problem: Problem) -> Ints:
    least = np.full((len(problem.calls), len(problem.mesh_classes)), NEVER, dtype=np.int64)
    for row, call in zip(least, problem.calls, strict=True):
        np.minimum.at(row, [o.mesh_class for o in call.options], [o.microseconds for o in call.options])
    return least


def _possible(first: Ints, size: int, second: Ints, other_size: int) -> tuple[bool, bool, bool]:
    """Whether meshes of two classes, given as sorted starts and a size, can be disjoint, overlap, be equal."""
    disjoint = first[0] + size <= second[-1] or second[0] + other_size <= first[-1]
    nearest = np.searchsorted(second, first - other_size, side="right")  # the first that ends after the mesh starts
    overlap = (nearest < np.searchsorted(second, first + size, side="left")).any()
    equal = size == other_size and np.isin(first, second).any()
    return bool(disjoint), bool(overlap), bool(equal)


def _tells_equal(problem: Problem, calls: dict[str, int]) -> Ints:
    tells = np.zeros((len(calls), len(calls)), dtype=np.int64)
    copies = [{option.copy for option in call.options} - {None} for call in problem.calls]
    for a, b in np.ndindex(tells.shape):
        tells[a, b] = a != b and bool(copies[a] & copies[b])
    for node in problem.nodes:
        if isinstance(node, PairNode) and (cost := _cost(node)).shape[0] == 3 and (cost[1] != cost[2]).any():
            a, b = calls[node.first], calls[node.second]
            tells[a, b] = tells[b, a] = True
    return tells


def _symmetry_arrays(problem: Problem) -> dict[str, Ints]:
    group = symmetries(problem)
    of_all = [goes for goes in (of_nodes(problem, one) for one in group) if goes is not None]
    return {"symmetry": _ints(group), "wins_ties": _ints([word(row) for row in wins_ties(of_all)])}


def _edge_arrays(problem: Problem) -> dict[str, Ints]:
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    edges = sorted({(position[e.source], position[e.target], e.lag) for e in problem.edges})
    return {
        "edge_start": starts([sum(source == node for source, _, _ in edges) for node in range(len(position))]),
        "edge_target": _ints([target for _, target, _ in edges]),
        "edge_lag": _ints([lag for _, _, lag in edges]),
        "num_waits": num_waits(problem, problem.iterations),
    }


def num_waits(problem: Problem, iterations: int) -> Ints:
    """For how many nodes each run waits, [iterations * V]."""
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    waits = np.zeros((iterations, len(position)), dtype=np.int64)
    for _, target, lag in {(position[e.source], position[e.target], e.lag) for e in problem.edges}:
        waits[lag:, target] += 1
    return waits.ravel()


def _order_arrays(problem: Problem, lags: Ints) -> dict[str, Ints]:
    count = len(lags)
    once = [[min(lags[u, v], lags[v, u]) == 0 and u != v for v in range(count)] for u in range(count)]
    always = [[lags[u, v] + lags[v, u] <= 1 and u != v for v in range(count)] for u in range(count)]
    anchors = _anchors(problem, lags)
    loops = [_loop(lags, anchor) for anchor in anchors]
    return {
        "ordered_once": _ints([word(row) for row in once]),
        "ordered_always": _ints([word(row) for row in always]),
        "anchor": _ints(anchors),
        "anchor_lag": _ints([int(lags[anchor, anchor]) for anchor in anchors]),
        "anchor_loop": _ints([word([v in loop for v in range(count)]) for loop in loops]),
        "anchor_rest": _ints([word(_rest(lags, anchor)) for anchor in anchors]),
        "loop_ordered": _ints([[word(_ordered_in(loop, lags, u)) for u in range(count)] for loop in loops]),
    }


def _anchors(problem: Problem, lags: Ints) -> list[int]:
    """One node of each loop through the iterations: of the nodes that wait for each other's past runs, the first.

    Without any such loop the first node of all serves, which nothing precedes.
    """
    found: list[int] = []
    for node in range(len(lags)):
        on_loop = lags[node, node] < problem.iterations
        if on_loop and not any(lags[node, other] + lags[other, node] < NEVER for other in found):
            found.append(node)
    return found or [0]


def _loop(lags: Ints, anchor: int) -> dict[int, int]:
    """The nodes between a run of `anchor` and its next, each with how many iterations after the anchor's it runs."""
    period = lags[anchor, anchor]
    between = {v: int(lags[anchor, v]) for v in range(len(lags)) if lags[anchor, v] + lags[v, anchor] <= period}
    return between | {anchor: 0}


def _rest(lags: Ints, anchor: int) -> list[bool]:
    """The anchor and all that waits for it in its iteration; all nodes when there is no loop to be the anchor of."""
    if lags[anchor, anchor] == NEVER:
        return [True] * len(lags)
    return [bool(node == anchor or lags[anchor, node] == 0) for node in range(len(lags))]


def _ordered_in(loop: dict[int, int], lags: Ints, node: int) -> list[bool]:
    """Which nodes of the loop wait for `node`'s run in it, or it for theirs."""

    def ordered(other: int) -> bool:
        if node not in loop or other not in loop or node == other:
            return False
        apart = loop[other] - loop[node]
        return bool(lags[node, other] <= apart or lags[other, node] <= -apart)

    return [ordered(other) for other in range(len(lags))]
