"""Runs that certainly end before other runs start, by ReaL's rule (`ready_first`), compiled.

Runs are placed in the order of their ready times (ties: earlier iteration, then earlier node). A run starts after all
runs that were placed before it on overlapping meshes. So if all dependencies of run a have ended before run b is ready,
a is ready no later than b, and goes first if their meshes overlap. By the same rule the runs of a node go in sequence:
a node that has ended in an iteration has ended in all iterations before.

A run's order follows no such rule, so there only dependencies and shared devices exclude.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, inner, lowest, word
from prefect_rlhf.placement.search.problem import Problem
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.tables.dependencies import Direct, direct_dependencies, least_lags
from prefect_rlhf.placement.search.tables.tables import Tables

SAME, LAST, EARLIER = range(3)  # iterations
LAGS = 3  # 0, 1, and all larger lags together


@dataclass(frozen=True, slots=True, eq=False)
class Order(Record):
    """Sets of nodes for each node. The first two hold in every plan; `fill_order` writes the others."""

    direct: Ints  # [3, V]: its direct dependencies, by lag: 0, 1, more
    ready_last: Ints  # [V]: the nodes whose last run has ended when it is ready
    absent: Ints  # [1]: the absent nodes for which `depends_on` was filled
    depends_on: Ints  # [3, V]: direct dependencies: of its own iteration, the last, and earlier iterations
    ready: Ints  # [V]: nodes of its own iteration that have ended when it is ready
    same: Ints  # [V]: nodes of its own iteration that have ended when it starts
    last: Ints  # [V]: nodes of the last iteration that have ended when it starts


def order_for(problem: Problem) -> Order:
    """Return the sets that hold in every plan, and room for the others."""
    direct = direct_dependencies(problem)
    ready, same, last = np.zeros((3, len(problem.nodes)), dtype=np.int64)
    return Order(
        direct=_by_lag(direct),
        ready_last=_ready_last(direct),
        absent=np.full(1, -1, dtype=np.int64),
        depends_on=np.zeros((LAGS, len(problem.nodes)), dtype=np.int64),
        ready=ready,
        same=same,
        last=last,
    )


def _by_lag(direct: Direct) -> Ints:
    nodes = range(len(direct))
    by_lag = [[{other for other, lag in pairs if min(lag, EARLIER) == row} for pairs in direct] for row in range(LAGS)]
    return np.array([[word([other in others for other in nodes]) for others in row] for row in by_lag], dtype=np.int64)


def _ready_last(direct: Direct) -> Ints:
    lags = least_lags(direct, own_lag=1)
    nodes = range(len(direct))

    def ended(node: int, source: int) -> bool:
        """Whether `source` of the last iteration has ended when `node` is ready."""
        return any((source == other and lag <= 1) or lags[source, other] <= 1 - lag for other, lag in direct[node])

    return np.array([word([ended(node, source) for source in nodes]) for node in nodes], dtype=np.int64)


@inner
def fill_order(conflict: Ints, nodes: int, absent: int, o: Order) -> None:
    """Write the nodes that end before each node starts.

    `nodes` certainly take time, so they delay the nodes that conflict with them. `absent` nodes certainly take no time,
    so their successors inherit their predecessors.
    """
    if o.absent[0] != absent:
        fill_dependencies(o, absent)
        o.absent[0] = absent
    for node in range(len(o.ready)):
        fill_same(conflict[node] & nodes, nodes, node, o)
    for node in range(len(o.ready)):
        fill_last(conflict[node] & nodes, nodes, node, o)


@inner
def fill_dependencies(o: Order, absent: int) -> None:
    """Write each node's direct dependencies; an absent node is replaced by its own dependencies."""
    for node in range(len(o.ready)):
        for lag in range(LAGS):
            o.depends_on[lag, node] = o.direct[lag, node] & ~absent
    changed = absent != 0
    while changed:
        changed = False
        for node in range(len(o.ready)):
            for lag in range(LAGS):
                through = o.direct[lag, node] & absent
                while through:
                    other = lowest(through)
                    through &= through - 1
                    for more in range(LAGS):
                        inherited = o.depends_on[more, other]
                        changed |= inherited & ~o.depends_on[min(lag + more, EARLIER), node] != 0
                        o.depends_on[min(lag + more, EARLIER), node] |= inherited


@inner
def fill_same(rivals: int, nodes: int, node: int, o: Order) -> None:
    """Write `ready` and `same` of a node; its `rivals` need devices that it needs."""
    others = o.depends_on[SAME, node]
    late = others & nodes  # the node is ready later than these have started
    ready = others | united(o.same, others)
    started = united(o.same, late)
    started_last = late | started | united(o.ready_last, late)
    o.ready[node] = o.same[node] = ready
    if nodes >> node & 1 == 0:
        return
    ready_last = ready | o.ready_last[node]
    rivals &= ~(ready | 1 << node)
    while rivals:
        rival = lowest(rivals)
        rivals &= rivals - 1
        if rival < node and depends_within(o, rival, ready, ready_last):
            o.same[node] |= 1 << rival | o.same[rival]  # of a tie the smaller number wins: it has been filled
        elif late and depends_within(o, rival, started, started_last):
            o.same[node] |= 1 << rival | (o.same[rival] if rival < node else 0)


@inner
def fill_last(rivals: int, nodes: int, node: int, o: Order) -> None:
    """Write `last` of a node; its `rivals` need devices that it needs."""
    others = o.depends_on[LAST, node]
    ready = o.ready[node] | o.ready_last[node] | others | united(o.same, others)
    ready |= united(o.last, o.depends_on[SAME, node])
    o.last[node] = ready | 1 << node | o.same[node]
    if nodes >> node & 1 == 0:
        return
    rivals &= ~o.last[node]
    while rivals:
        rival = lowest(rivals)
        rivals &= rivals - 1
        if depends_within(o, rival, ready, ready):
            o.last[node] |= 1 << rival | o.same[rival]


@inner
def depends_within(o: Order, node: int, same: int, earlier: int) -> bool:
    """Whether all dependencies of a node are in two sets: for its own iteration, and for the iterations before."""
    before = o.depends_on[LAST, node] | o.depends_on[EARLIER, node]
    return o.depends_on[SAME, node] & ~same == 0 and before & ~earlier == 0


@inner
def united(sets: Ints, members: int) -> int:
    """The union of the members' sets."""
    union = 0
    while members:
        union |= sets[lowest(members)]
        members &= members - 1
    return union


@inner
def members_after(ended: Ints, node: int) -> int:
    """The nodes that start after a node has ended; `ended` has the set of nodes that have ended before each."""
    after = 0
    for other in range(len(ended)):
        if ended[other] >> node & 1:
            after |= 1 << other
    return after


@inner
def exclude_once_in_order(t: Tables, conflict: Ints, o: Order, adjacent: Ints) -> None:
    """Write for each node the nodes that it excludes within an iteration."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.ordered_once[node] | o.same[node]
    mirror(adjacent)


@inner
def exclude_always_in_order(t: Tables, conflict: Ints, o: Order, adjacent: Ints) -> None:
    """Write for each node the nodes whose runs exclude its runs in any two iterations."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.ordered_always[node] | (o.same[node] & members_after(o.last, node))
    mirror(adjacent)


@inner
def mirror(adjacent: Ints) -> None:
    """Make adjacency symmetric."""
    for node in range(len(adjacent)):
        others = adjacent[node]
        while others:
            adjacent[lowest(others)] |= 1 << node
            others &= others - 1
