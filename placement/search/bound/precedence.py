"""Runs that certainly end before other runs start, under `ready_first`, compiled.

Runs are placed in the order in which they become ready (ties: earlier iteration, then earlier node). A run starts after
all runs that were placed before it on overlapping meshes. So if all dependencies of run a have ended before run b is
ready, a is ready no later than b, and goes first if their meshes overlap. By the same rule the runs of a node go in
sequence: a node that has ended in an iteration has ended in all iterations before.

A run in `graph_order` keeps no such rule, so only dependencies and shared devices exclude there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.tables.tables import Tables

SAME, LAST, EARLIER = range(3)  # iterations


@dataclass(frozen=True, slots=True, eq=False)
class Order(Record):
    """Sets of nodes for each node, filled by `fill_order`."""

    absent: Ints  # [1]: the absent nodes for which `depends_on` was filled
    depends_on: Ints  # [3, V]: direct dependencies: of its own iteration, the last, and earlier iterations
    ready: Ints  # [V]: nodes of its own iteration that have ended when it is ready
    same: Ints  # [V]: nodes of its own iteration that have ended when it starts
    last: Ints  # [V]: nodes of the last iteration that have ended when it starts


def order_for(t: Tables) -> Order:
    """Allocate arrays of the right sizes."""
    ready, same, last = np.zeros((3, t.num_nodes), dtype=np.int64)
    return Order(np.full(1, -1, dtype=np.int64), np.zeros((3, t.num_nodes), dtype=np.int64), ready, same, last)


@inner
def fill_order(t: Tables, conflict: Ints, nodes: int, absent: int, o: Order) -> None:
    """Write the nodes that end before each node starts.

    `nodes` surely take time, so they delay the nodes that conflict with them. `absent` surely take no time, so their
    successors inherit their predecessors.
    """
    if o.absent[0] != absent:
        fill_dependencies(t, absent, o.depends_on)
        o.absent[0] = absent
    for node in range(t.num_nodes):
        fill_same(t, conflict[node] & nodes, nodes, node, o)
    for node in range(t.num_nodes):
        fill_last(t, conflict[node] & nodes, nodes, node, o)


@inner
def fill_dependencies(t: Tables, absent: int, depends_on: Ints) -> None:
    """Write the direct dependencies of each node, with the dependencies of an absent node in its place."""
    for node in range(t.num_nodes):
        for lag in range(3):
            depends_on[lag, node] = t.depends_on[lag, node] & ~absent
    changed = absent != 0
    while changed:
        changed = False
        for node in range(t.num_nodes):
            for lag in range(3):
                through = t.depends_on[lag, node] & absent
                while through:
                    other = lowest(through)
                    through &= through - 1
                    for more in range(3):
                        inherited = depends_on[more, other]
                        changed |= inherited & ~depends_on[min(lag + more, EARLIER), node] != 0
                        depends_on[min(lag + more, EARLIER), node] |= inherited


@inner
def fill_same(t: Tables, rivals: int, nodes: int, node: int, o: Order) -> None:
    """Write `ready` and `same` of a node; its `rivals` need devices that it needs."""
    others = o.depends_on[SAME, node]
    late = others & nodes  # the node is ready later than these have started
    ready = others | united(o.same, others)
    started = united(o.same, late)
    started_last = late | started | united(t.ready_last, late)
    o.ready[node] = o.same[node] = ready
    if nodes >> node & 1 == 0:
        return
    ready_last = ready | t.ready_last[node]
    rivals &= ~(ready | 1 << node)
    while rivals:
        rival = lowest(rivals)
        rivals &= rivals - 1
        if t.wins_ties[rival] >> node & 1 and depends_within(o, rival, ready, ready_last):
            o.same[node] |= 1 << rival | o.same[rival]  # the winner of a tie has the smaller number: it has been filled
        elif late and depends_within(o, rival, started, started_last):
            o.same[node] |= 1 << rival | (o.same[rival] if rival < node else 0)


@inner
def fill_last(t: Tables, rivals: int, nodes: int, node: int, o: Order) -> None:
    """Write `last` of a node; its `rivals` need devices that it needs."""
    others = o.depends_on[LAST, node]
    ready = o.ready[node] | t.ready_last[node] | others | united(o.same, others)
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
    """The nodes that start after the end of a node; `ended` are the sets of nodes that have ended before each."""
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
    """Let each node be adjacent to the nodes that are adjacent to it."""
    for node in range(len(adjacent)):
        others = adjacent[node]
        while others:
            adjacent[lowest(others)] |= 1 << node
            others &= others - 1
