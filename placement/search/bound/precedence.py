"""Runs that certainly end before others start: by a dependency, or because they go first on shared devices.

Runs are placed in the order in which they become ready (ties: earlier iteration, then earlier node), and a run starts
after all that were placed before it on overlapping meshes. So when every dependency of run a has ended before run b is
ready, a is ready no later than b, and goes first wherever their meshes overlap. By the same rule the runs of a node go
one after the other, so a node that has ended in one iteration has ended in all before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.tables.tables import Tables

SAME, LAST, EARLIER = range(3)  # iterations


class Order(NamedTuple):
    """Sets of nodes for each node, filled by `fill_order`."""

    absent: Ints  # [1]: the absent nodes for which `depends_on` was filled
    depends_on: Ints  # [3, V]: direct dependencies: of its own iteration, the last, and earlier ones
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

    `nodes` surely take time, so they hold up what conflicts with them; `absent` surely take none, so their successors
    inherit their predecessors.
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
    """Write the direct dependencies of each node, where those of an absent node stand in its place."""
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
    """Write `ready` and `same` of a node whose `rivals` need devices that it needs."""
    others = o.depends_on[SAME, node]
    late = others & nodes  # it is ready later than these have started
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
    """Write `last` of a node whose `rivals` need devices that it needs."""
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
    """Whether all dependencies of a node are in two sets, one for its own iteration and one for those before."""
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
    """The nodes before whose start the node has ended, where `ended` are the sets of nodes ended before each."""
    after = 0
    for other in range(len(ended)):
        if ended[other] >> node & 1:
            after |= 1 << other
    return after


@inner
def exclude_once(t: Tables, conflict: Ints, o: Order, adjacent: Ints) -> None:
    """Write for each node those that it excludes within an iteration."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.ordered_once[node] | o.same[node]
    mirror(adjacent)


@inner
def exclude_always(t: Tables, conflict: Ints, o: Order, adjacent: Ints) -> None:
    """Write for each node those of which every run excludes every run of it."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.ordered_always[node] | (o.same[node] & members_after(o.last, node))
    mirror(adjacent)


@inner
def mirror(adjacent: Ints) -> None:
    """Let each node be adjacent to those that are adjacent to it."""
    for node in range(len(adjacent)):
        others = adjacent[node]
        while others:
            adjacent[lowest(others)] |= 1 << node
            others &= others - 1
