"""Which runs end before others start, for certain: these wait, or of two on the same devices one must go first.

Runs are placed in the order in which they become ready (ties: earlier iteration, then earlier node), and a run starts
after all that were placed before it on overlapping meshes. So when all that run a waits for has ended before run b is
ready, a is ready no later than b, and goes first wherever their meshes overlap. By the same rule the runs of a node go
one after the other, so what has ended in one iteration has ended in all before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.tables.tables import Tables

SAME, LAST, EARLIER = range(3)  # iterations


class Order(NamedTuple):
    """Sets of nodes for each node, filled by `fill_order`."""

    gone: Ints  # [1]: for which `waits` was filled
    waits: Ints  # [3, V]: what it waits for at once: of its own iteration, the last, and earlier ones
    ready: Ints  # [V]: what of its own iteration has ended when it is ready
    same: Ints  # [V]: what of its own iteration has ended when it starts
    last: Ints  # [V]: what of the last iteration has ended when it starts


def order_for(t: Tables) -> Order:
    """Empty arrays of the right sizes."""
    ready, same, last = np.zeros((3, t.num_nodes), dtype=np.int64)
    return Order(np.full(1, -1, dtype=np.int64), np.zeros((3, t.num_nodes), dtype=np.int64), ready, same, last)


@inner
def fill_order(t: Tables, conflict: Ints, nodes: int, gone: int, o: Order) -> None:
    """Write what ends before each node starts.

    `nodes` surely take time, so they hold up what conflicts with them; `gone` surely take none, so what waits for them
    waits for what they wait for.
    """
    if o.gone[0] != gone:
        fill_waits(t, gone, o.waits)
        o.gone[0] = gone
    for node in range(t.num_nodes):
        fill_same(t, conflict[node] & nodes, nodes, node, o)
    for node in range(t.num_nodes):
        fill_last(t, conflict[node] & nodes, nodes, node, o)


@inner
def fill_waits(t: Tables, gone: int, waits: Ints) -> None:
    """Write what each node waits for, where in place of what is gone stands what that waits for."""
    for node in range(t.num_nodes):
        for lag in range(3):
            waits[lag, node] = t.waits_for[lag, node] & ~gone
    changed = gone != 0
    while changed:
        changed = False
        for node in range(t.num_nodes):
            for lag in range(3):
                through = t.waits_for[lag, node] & gone
                while through:
                    other = lowest(through)
                    through &= through - 1
                    for more in range(3):
                        found = waits[more, other]
                        changed |= found & ~waits[min(lag + more, EARLIER), node] != 0
                        waits[min(lag + more, EARLIER), node] |= found


@inner
def fill_same(t: Tables, rivals: int, nodes: int, node: int, o: Order) -> None:
    """Write `ready` and `same` of a node whose `rivals` need devices that it needs."""
    others = o.waits[SAME, node]
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
        if t.wins_ties[rival] >> node & 1 and waits_within(o, rival, ready, ready_last):
            o.same[node] |= 1 << rival | o.same[rival]  # the winner of a tie has the smaller number: it has been filled
        elif late and waits_within(o, rival, started, started_last):
            o.same[node] |= 1 << rival | (o.same[rival] if rival < node else 0)


@inner
def fill_last(t: Tables, rivals: int, nodes: int, node: int, o: Order) -> None:
    """Write `last` of a node whose `rivals` need devices that it needs."""
    others = o.waits[LAST, node]
    ready = o.ready[node] | t.ready_last[node] | others | united(o.same, others)
    ready |= united(o.last, o.waits[SAME, node])
    o.last[node] = ready | 1 << node | o.same[node]
    if nodes >> node & 1 == 0:
        return
    rivals &= ~o.last[node]
    while rivals:
        rival = lowest(rivals)
        rivals &= rivals - 1
        if waits_within(o, rival, ready, ready):
            o.last[node] |= 1 << rival | o.same[rival]


@inner
def waits_within(o: Order, node: int, same: int, earlier: int) -> bool:
    """Whether all that a node waits for is in two sets, one for its own iteration and one for those before."""
    return o.waits[SAME, node] & ~same == 0 and (o.waits[LAST, node] | o.waits[EARLIER, node]) & ~earlier == 0


@inner
def united(sets: Ints, members: int) -> int:
    """The union of the members' sets."""
    found = 0
    while members:
        found |= sets[lowest(members)]
        members &= members - 1
    return found


@inner
def members_after(ended: Ints, node: int) -> int:
    """The nodes before whose start the node has ended, as `ended` says."""
    found = 0
    for other in range(len(ended)):
        if ended[other] >> node & 1:
            found |= 1 << other
    return found


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
