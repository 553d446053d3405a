"""What a loop through the iterations takes at least, compiled.

An anchor is a node whose next run, `lag` iterations on, waits for itself. Between the two lie nodes that run after the
one and before the other: start of the next >= start of this + (*) over them. Nodes that may slip beyond the next run of
the anchor, but not beyond the one after that, lie between its first and its last run all but once. What follows the
anchor's last run adds (*) over what waits for it in that iteration.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.cliques import sum_over
from prefect_rlhf.placement.search.bound.exclusive_work import heaviest_work, rounded_up
from prefect_rlhf.placement.search.bound.precedence import Order, exclude_once, members_after, united
from prefect_rlhf.placement.search.bound.scratch import LOOP, Scratch
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.tables.tables import Tables


@inner
def cycle_bound(
    t: Tables, us: Ints, area: Ints, s: Scratch, nodes: int, number: int, lag: int, explain: Ints, best: int
) -> int:
    """Microseconds until all iterations have ended, for one anchor; `nodes` take time."""
    anchor, repeats = t.anchor[number], (t.iterations - 1) // lag
    rest, loop, slips = around(t, s.order, number, lag)
    rest, loop, slips = rest & nodes, loop & nodes, slips & nodes
    exclude_once(t, s.conflict, s.order, s.adjacent)
    work, last_kept, last_fitting = heaviest_work(us, area, s, rest, t.num_devices)
    value = s.head[anchor] + rounded_up(work, t.num_devices)
    kept = fitting = 0
    if repeats and slips:
        between, kept, fitting = work_with_slips(us, area, s, loop, slips, repeats, t.num_devices)
        value += between
        if fitting | last_fitting == 0:
            value += sum_over(us, apart_from(s.conflict, s.order, kept & slips, last_kept))
    elif repeats:
        if lag > 1:
            for node in range(t.num_nodes):
                s.adjacent[node] = s.conflict[node] | t.loop_ordered[number, node]
        work, kept, fitting = heaviest_work(us, area, s, loop, t.num_devices)
        value += repeats * rounded_up(work, t.num_devices)
    if value > best:
        explain[0], explain[1], explain[2] = LOOP + number, kept, fitting
        explain[3], explain[4] = last_kept, last_fitting
    return value


@inner
def around(t: Tables, o: Order, number: int, lag: int) -> tuple[int, int, int]:
    """The nodes after an anchor; of these those before its next run; those that may slip, but not past two runs."""
    anchor = t.anchor[number]
    rest = loop = 1 << anchor
    if lag == t.anchor_lag[number]:
        rest, loop = t.anchor_rest[number], t.anchor_loop[number]
    if lag > 1:
        return rest, loop, 0
    rest |= members_after(o.same, anchor)
    loop |= rest & o.last[anchor]
    return rest, loop, rest & united(o.last, o.last[anchor]) & ~loop


@inner
def work_with_slips(
    us: Ints, area: Ints, s: Scratch, loop: int, slips: int, repeats: int, num_devices: int
) -> tuple[int, int, int]:
    """Microseconds, K and A between the first and the last run of an anchor, when some nodes may slip."""
    exclude_slips(s.conflict, s.order, slips, s.adjacent)
    fill_total(us, loop, slips, repeats, s.total_us)
    fill_total(area, loop, slips, repeats, s.total_area)
    work, kept, fitting = heaviest_work(s.total_us, s.total_area, s, loop | slips, num_devices)
    return rounded_up(work, num_devices), kept, fitting


@inner
def fill_total(one: Ints, loop: int, slips: int, repeats: int, total: Ints) -> None:
    """Write what all runs take that end before the anchor's last: one run fewer of those that slip."""
    for node in range(len(one)):
        total[node] = 0
        if loop >> node & 1:
            total[node] = repeats * one[node]
        elif slips >> node & 1:
            total[node] = (repeats - 1) * one[node]


@inner
def exclude_slips(conflict: Ints, o: Order, slips: int, adjacent: Ints) -> None:
    """Of what excludes a node that slips within an iteration, keep what excludes it in the next iteration as well."""
    rest = slips
    while rest:
        node = lowest(rest)
        rest &= rest - 1
        kept = conflict[node] | members_after(o.last, node)
        adjacent[node] &= kept
        others = ~kept & (1 << len(conflict)) - 1
        while others:
            adjacent[lowest(others)] &= ~(1 << node)
            others &= others - 1


@inner
def apart_from(conflict: Ints, o: Order, nodes: int, last: int) -> int:
    """Those of `nodes` whose last run but one excludes the last runs of all of `last`."""
    found = 0
    while nodes:
        node = lowest(nodes)
        nodes &= nodes - 1
        if last & ~(conflict[node] | members_after(o.last, node)) == 0:
            found |= 1 << node
    return found
